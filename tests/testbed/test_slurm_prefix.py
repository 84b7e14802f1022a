"""A Slurm of another place: what of it is refused, by what its daemons trust each other, and building one."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import packages, slurm_prefix, slurmconf
from holmes_hpc.testbed.daemons import Bed, server, slurmd, within
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.slurmconf import Places
from holmes_hpc.testbed.topology import read

WIRING = Wiring(read(None), "hb0123", "10.99.0.0/16")
PORTS = {"slurmctld": 20001, "slurmdbd": 20002, "slurmd": 20003, "database": 20004}


def prefix(place: Path, version: str, *plugins: str) -> Path:
    for name in slurm_prefix.PROGRAMS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"#!/bin/sh\necho {version}\n")
        (place / name).chmod(0o755)
    (place / "lib" / "slurm").mkdir(parents=True)
    for plugin in plugins:
        (place / "lib" / "slurm" / f"{plugin}.so").touch()
    return place


def test_a_folder_without_slurmctld_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=r"--slurm .*: holds no sbin/slurmctld; give the folder that Slurm was"):
        slurm_prefix.check(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("version", "taken"),
    [("slurm 21.08.8", False), ("slurm 22.05.8", True), ("slurm 26.05.3", True), ("slurm 26.11.0", False)],
)
def test_a_slurm_out_of_range_is_said_with_the_range(version: str, taken: bool, tmp_path: Path) -> None:
    place = prefix(tmp_path, version)
    if taken:
        assert slurm_prefix.check(place) == version
        return
    with pytest.raises(TestbedError, match=rf"is {version}; give a Slurm of 22.05 to 26.05"):
        slurm_prefix.check(place)


@pytest.mark.parametrize(
    ("version", "plugins", "auth"),
    [
        ("slurm 24.11.7", ["auth_munge", "auth_slurm"], "munge"),
        ("slurm 25.05.1", ["auth_munge", "auth_slurm"], "slurm"),
        ("slurm 26.05.3", ["auth_slurm"], "slurm"),
        ("slurm 26.05.3", ["auth_munge"], "munge"),
    ],
)
def test_newer_slurms_trust_a_key_rather_than_one_munged(
    version: str, plugins: list[str], auth: str, tmp_path: Path
) -> None:
    assert slurm_prefix.auth_of(prefix(tmp_path, version, *plugins), version) == auth


def test_a_slurm_that_can_trust_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="built without auth/slurm"):
        slurm_prefix.auth_of(prefix(tmp_path, "slurm 26.05.3", "auth_jwt"), "slurm 26.05.3")


def test_with_a_key_no_munge_is_named_and_sockets_stay_in_the_testbed() -> None:
    places = Places(Path("/state"))
    texts = [
        slurmconf.slurm_conf(places, WIRING, PORTS, slurmconf.SLURM),
        slurmconf.slurmdbd_conf(places, WIRING, PORTS, "secret", slurmconf.SLURM),
    ]
    assert not any("munge" in text for text in texts) and all("AuthType=auth/slurm" in text for text in texts)
    assert "CredType=cred/slurm" in texts[0] and "AuthInfo=cred_expire=5\n" in texts[0]
    bed = Bed(places, WIRING, PORTS, "secret", None, Path("/opt/slurm"), slurmconf.SLURM)
    assert bed.servers == ("mariadbd", "slurmdbd", "slurmctld")
    assert bed.env()["SLURM_SACK_SOCKET"] == "/state/sack/slurmctld/sack.socket"
    assert bed.env()["PATH"].startswith("/opt/slurm/bin:/opt/slurm/sbin:")
    assert [w for w in server(bed, "slurmctld").argv if w.startswith("/")][:2] == [
        "/run/slurmctld",
        "/state/sack/slurmctld",
    ]
    for argv in (slurmd(bed, "ib1").argv, within(bed, "ib1", ["hostname"])):
        assert "/run/slurm" in argv and "/state/sack/ib1" in argv


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that is configured, made and installed as Slurm is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "install", lambda programs, progress: None)
    place = tmp_path / "slurm-26.05.3"
    place.mkdir()
    (place / "META").write_text("  Name: slurm\n")
    (place / "configure").write_text("""#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#--prefix=};; esac; done
printf 'all:\\n\\techo built\\ninstall:\\n\\tmkdir -p %s/sbin && date +%%N > %s/sbin/slurmctld\\n' \\
  $prefix $prefix > Makefile
""")
    (place / "configure").chmod(0o755)
    return place


@pytest.mark.integration
def test_a_source_is_built_once(source: Path) -> None:
    made = slurm_prefix.built(source, print)
    first = (made / "sbin" / "slurmctld").read_text()
    assert made.is_relative_to(slurm_prefix.cache()) and not (made.parent / "build").exists()
    assert (slurm_prefix.built(source, print) / "sbin" / "slurmctld").read_text() == first
    with tarfile.open(source.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(source, source.name)
    assert (slurm_prefix.built(source.with_suffix(".tgz"), print) / "sbin" / "slurmctld").is_file()


@pytest.mark.integration
def test_a_source_that_does_not_build_is_said_with_its_last_line(source: Path) -> None:
    (source / "configure").write_text("#!/bin/sh\necho checking; echo 'configure: error: no compiler'; exit 1\n")
    with pytest.raises(TestbedError) as caught:
        slurm_prefix.built(source, print)
    log = next(slurm_prefix.cache().glob("*/build.log"))
    assert str(caught.value) == (
        f"--slurm-source {source}: configure failed: configure: error: no compiler; the rest is in {log}"
    )
    assert log.read_text().splitlines()[0] == "checking"


@pytest.mark.parametrize("name", ["missing", "empty", "no.tar.gz"])
def test_what_is_no_source_is_refused(name: str, source: Path) -> None:
    (source.parent / "empty").mkdir()
    (source.parent / "no.tar.gz").write_text("x")
    with pytest.raises(TestbedError, match=r"does not exist|holds no Slurm|no tarball"):
        slurm_prefix.built(source.parent / name, print)

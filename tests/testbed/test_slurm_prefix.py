"""A Slurm below a prefix: checks, its auth plugin, and builds from source."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from holmes_hpc.errors import TestbedError
from holmes_hpc.testbed import daemons, packages, slurm_prefix, slurmconf
from holmes_hpc.testbed.daemons import node_command, server_daemon, slurmd_daemon
from holmes_hpc.testbed.network import Wiring
from holmes_hpc.testbed.slurmconf import Paths
from holmes_hpc.testbed.topology import read

WIRING = Wiring(read(None), "hb0123", "10.99.0.0/16")
PORTS = {"slurmctld": 20001, "slurmdbd": 20002, "slurmd": 20003, "database": 20004}


def make_prefix(folder: Path, version: str, *plugins: str) -> Path:
    for name in slurm_prefix.PROGRAMS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\necho {version}\n")
        (folder / name).chmod(0o755)
    (folder / "lib" / "slurm").mkdir(parents=True)
    for plugin in plugins:
        (folder / "lib" / "slurm" / f"{plugin}.so").touch()
    return folder


def test_folder_without_slurmctld_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=r"--slurm .*: contains no sbin/slurmctld; give the directory that Slurm's"):
        slurm_prefix.check_prefix(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("slurm 21.08.8", False), ("slurm 22.05.8", True), ("slurm 26.05.3", True), ("slurm 26.11.0", False)],
)
def test_unsupported_release_is_refused_with_the_range(version: str, is_supported: bool, tmp_path: Path) -> None:
    folder = make_prefix(tmp_path, version)
    if is_supported:
        assert slurm_prefix.check_prefix(folder) == version
        return
    with pytest.raises(TestbedError, match=rf"is {version}; give a Slurm of 22.05 to 26.05"):
        slurm_prefix.check_prefix(folder)


@pytest.mark.parametrize(
    ("version", "plugins", "auth"),
    [
        ("slurm 24.11.7", ["auth_munge", "auth_slurm"], "munge"),
        ("slurm 25.05.1", ["auth_munge", "auth_slurm"], "slurm"),
        ("slurm 26.05.3", ["auth_slurm"], "slurm"),
        ("slurm 26.05.3", ["auth_munge"], "munge"),
    ],
)
def test_newer_releases_prefer_auth_slurm(version: str, plugins: list[str], auth: str, tmp_path: Path) -> None:
    assert slurm_prefix.auth_plugin(make_prefix(tmp_path, version, *plugins), version) == auth


def test_slurm_without_a_usable_auth_plugin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match="built without auth/slurm"):
        slurm_prefix.auth_plugin(make_prefix(tmp_path, "slurm 26.05.3", "auth_jwt"), "slurm 26.05.3")


def test_auth_slurm_needs_no_munge_and_keeps_sockets_in_the_testbed() -> None:
    paths = Paths(Path("/state"))
    texts = [
        slurmconf.slurm_conf(paths, WIRING, PORTS, slurmconf.SLURM),
        slurmconf.slurmdbd_conf(paths, WIRING, PORTS, "secret", slurmconf.SLURM),
    ]
    assert not any("munge" in text for text in texts) and all("AuthType=auth/slurm" in text for text in texts)
    assert "CredType=cred/slurm" in texts[0] and "AuthInfo=cred_expire=5\n" in texts[0]
    testbed = daemons.Testbed(paths, WIRING, PORTS, "secret", None, Path("/opt/slurm"), slurmconf.SLURM)
    assert testbed.servers == ("mariadbd", "slurmdbd", "slurmctld")
    assert testbed.env()["SLURM_SACK_SOCKET"] == "/state/sack/slurmctld/sack.socket"
    assert testbed.env()["PATH"].startswith("/opt/slurm/bin:/opt/slurm/sbin:")
    assert [w for w in server_daemon(testbed, "slurmctld").argv if w.startswith("/")][:2] == [
        "/run/slurmctld",
        "/state/sack/slurmctld",
    ]
    for argv in (slurmd_daemon(testbed, "ib1").argv, node_command(testbed, "ib1", ["hostname"])):
        assert "/run/slurm" in argv and "/state/sack/ib1" in argv


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a source that is configured, built and installed as Slurm is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "install", lambda programs, progress: None)
    folder = tmp_path / "slurm-26.05.3"
    folder.mkdir()
    (folder / "META").write_text("  Name: slurm\n")
    (folder / "configure").write_text("""#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#--prefix=};; esac; done
printf 'all:\\n\\techo built\\ninstall:\\n\\tmkdir -p %s/sbin && date +%%N > %s/sbin/slurmctld\\n' \\
  $prefix $prefix > Makefile
""")
    (folder / "configure").chmod(0o755)
    return folder


@pytest.mark.integration
def test_source_is_built_once(source: Path) -> None:
    prefix = slurm_prefix.build(source, print)
    first = (prefix / "sbin" / "slurmctld").read_text()
    assert prefix.is_relative_to(slurm_prefix.cache_folder()) and not (prefix.parent / "build").exists()
    assert (slurm_prefix.build(source, print) / "sbin" / "slurmctld").read_text() == first
    with tarfile.open(source.with_suffix(".tgz"), "w:gz") as archive:
        archive.add(source, source.name)
    assert (slurm_prefix.build(source.with_suffix(".tgz"), print) / "sbin" / "slurmctld").is_file()


@pytest.mark.integration
def test_build_error_has_the_last_line_of_the_log(source: Path) -> None:
    (source / "configure").write_text("#!/bin/sh\necho checking; echo 'configure: error: no compiler'; exit 1\n")
    with pytest.raises(TestbedError) as caught:
        slurm_prefix.build(source, print)
    log = next(slurm_prefix.cache_folder().glob("*/build.log"))
    assert str(caught.value) == (f"--slurm-source {source}: configure failed: configure: error: no compiler; see {log}")
    assert log.read_text().splitlines()[0] == "checking"


@pytest.mark.parametrize("name", ["missing", "empty", "no.tar.gz"])
def test_wrong_sources_are_refused(name: str, source: Path) -> None:
    (source.parent / "empty").mkdir()
    (source.parent / "no.tar.gz").write_text("x")
    with pytest.raises(TestbedError, match=r"does not exist|contains no Slurm|not a tarball"):
        slurm_prefix.build(source.parent / name, print)

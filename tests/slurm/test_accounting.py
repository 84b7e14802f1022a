"""Associations of a user, from sacctmgr."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.slurm.accounting import Association, read_associations

pytestmark = pytest.mark.integration  # a stand-in for sacctmgr runs


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "sacctmgr").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sacctmgr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("USER", "alice")
    monkeypatch.delenv("LOGNAME", raising=False)
    monkeypatch.delenv("SLURM_CONF", raising=False)


def test_associations_with_the_accounts_above_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(
        tmp_path,
        monkeypatch,
        f"""echo "$@" >> {tmp_path}/calls
cat <<EOF
lab|normal,high|high||/root/bio/lab/0-alice/
chem|||gpu|/root/chem/0-alice/gpu/
EOF""",
    )
    first, second = read_associations()
    assert first == Association(("lab", "root", "bio", "0-alice"), ("high", "normal"))
    assert second.accounts[0] == "chem" and second.partition == "gpu" and second.qos == ()
    call = "--noheader --parsable2 show association where user=alice format=Account,QOS,DefaultQOS,Partition,Lineage"
    assert (tmp_path / "calls").read_text() == f"{call}\n"


def test_a_release_without_lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(
        tmp_path,
        monkeypatch,
        """case "$*" in *Lineage*) echo "Unknown field 'Lineage'" >&2; exit 1;; esac
echo 'lab|normal||'""",
    )
    assert read_associations() == (Association(("lab",), ("normal",)),)


@pytest.mark.parametrize("script", ["exit 1", "echo broken", "echo '|||'; exit 1", "", None])
def test_no_answer_is_no_association(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    answer(tmp_path, monkeypatch, script or "")
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert read_associations() == ()

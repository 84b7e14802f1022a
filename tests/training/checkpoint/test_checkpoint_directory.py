"""Which directories count as checkpoints, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holmes_hpc.errors import DataError, RecordError, RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import checkpoint_directory

GOOD = {"files": {".metadata": [2, 2659403885]}, "model": {}, "parallel": {}}


def made(folder: Path, step: int, about: Any = GOOD) -> Path:
    path = folder / checkpoint_directory.name_of(step)
    path.mkdir()
    (path / ".metadata").write_bytes(b"ab")
    text = about if isinstance(about, str) else json.dumps(about)
    (path / "holmes.json").write_text(text)
    return path


BAD = {
    "": "is damaged",
    "{": "is damaged",
    "[]": "is damaged",
    "[" * 100000: "is damaged",
    "{}": "names no files",
    '{"files": {}}': "does not name .metadata",
    '{"files": {"a": 5}}': "names no files",
    '{"files": [1]}': "names no files",
    '{"files": {".metadata": [1]}}': "names no files",
    '{"files": {".metadata": ["1", 2]}}': "names no files",
    '{"files": {".metadata": [-1, 2]}}': "names no files",
    '{"files": {".metadata": [true, 2]}}': "names no files",
    '{"files": {"../a": [1, 2]}}': "names no files",
    '{"files": {"/etc/passwd": [1, 2]}}': "names no files",
    '{"files": {".metadata": [1, 2]}, "model": []}': "is damaged",
}


@pytest.mark.parametrize("about", BAD)
def test_a_description_that_is_none_is_passed_over_and_the_older_one_taken(about: str, tmp_path: Path) -> None:
    old, new = made(tmp_path, 4), made(tmp_path, 8, about)
    assert [c.path for c in checkpoint_directory.complete(tmp_path)] == [old]
    assert [path for path, _ in checkpoint_directory.passed_over(tmp_path)] == [new]
    assert BAD[about] in checkpoint_directory.passed_over(tmp_path)[0][1]
    with pytest.raises(DataError, match="not a complete checkpoint"):
        checkpoint_directory.at(new)


def test_half_copied_it_is_passed_over(tmp_path: Path) -> None:
    (made(tmp_path, 8) / "holmes.json").unlink()
    assert checkpoint_directory.complete(tmp_path) == []
    assert checkpoint_directory.passed_over(tmp_path) == [
        (tmp_path / "step-00000008", "holmes.json: No such file or directory")
    ]


def test_one_that_is_none_costs_no_good_one_its_place(tmp_path: Path) -> None:
    for step in (4, 8):
        made(tmp_path, step)
    made(tmp_path, 12, "{}")
    assert checkpoint_directory.prune(tmp_path, 2) == []
    assert [c.step for c in checkpoint_directory.complete(tmp_path)] == [8, 4]


def test_a_good_one_is_whole(tmp_path: Path) -> None:
    checkpoint = checkpoint_directory.at(made(tmp_path, 4))
    assert checkpoint_directory.damage(checkpoint) is None
    (checkpoint.path / ".metadata").write_bytes(b"ac")
    assert checkpoint_directory.damage(checkpoint) == ".metadata has other bytes than were written"


def test_checkpoints_lie_on_another_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "runs/a/checkpoints"
    checkpoint_directory.place(folder, None)
    assert folder.is_dir() and not folder.is_symlink()
    checkpoint_directory.place(folder, str(tmp_path / "disk"))
    assert folder.resolve() == tmp_path / "disk/a"
    made(folder, 4)
    checkpoint_directory.place(folder, str(tmp_path / "another"))  # it keeps its place
    assert [c.step for c in checkpoint_directory.complete(folder)] == [4] and not (tmp_path / "another").exists()


def test_a_place_that_is_not_there_or_another_runs_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "runs/a/checkpoints"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / "unmounted")
    with pytest.raises(RunFailed, match=r"checkpoints: it is a link to \S+/unmounted, which is not there; mount"):
        checkpoint_directory.place(folder, None)
    with pytest.raises(RecordError, match="does not exist; remove it, or mount"):
        RunDirectory.create(folder.parent)
    folder.unlink()
    (tmp_path / "disk/a").mkdir(parents=True)
    (tmp_path / "disk/a/thesis.txt").touch()
    with pytest.raises(RunFailed, match="disk/a: other files are there"):
        checkpoint_directory.place(folder, str(tmp_path / "disk"))
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match="could not be written"):
        checkpoint_directory.place(folder, str(tmp_path / "file"))

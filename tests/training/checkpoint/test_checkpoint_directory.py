"""Complete checkpoints are found; incomplete and damaged ones are reported."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from holmes_hpc.errors import DataError, RecordError, RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import checkpoint_directory, file_checksums, save_and_load

GOOD = {"files": {".metadata": [2, 2659403885]}, "model": {}, "parallel": {}}


def create(folder: Path, step: int, description: Any = GOOD) -> Path:
    path = folder / checkpoint_directory.directory_name(step)
    path.mkdir()
    (path / ".metadata").write_bytes(b"ab")
    text = description if isinstance(description, str) else json.dumps({**description, "step": step})
    (path / "holmes.json").write_text(text)
    return path


BAD = {
    "": "is damaged",
    "{": "is damaged",
    "[]": "is damaged",
    "[" * 100000: "is damaged",
    "{}": "lists no files",
    '{"files": {}}': "does not list .metadata",
    '{"files": {"a": 5}}': "lists no files",
    '{"files": [1]}': "lists no files",
    '{"files": {".metadata": [1]}}': "lists no files",
    '{"files": {".metadata": ["1", 2]}}': "lists no files",
    '{"files": {".metadata": [-1, 2]}}': "lists no files",
    '{"files": {".metadata": [true, 2]}}': "lists no files",
    '{"files": {"../a": [1, 2]}}': "lists no files",
    '{"files": {"/etc/passwd": [1, 2]}}': "lists no files",
    '{"files": {".metadata": [1, 2]}, "model": []}': "is damaged",
}


@pytest.mark.parametrize("description", BAD)
def test_checkpoint_with_invalid_description_is_skipped_for_an_older_one(description: str, tmp_path: Path) -> None:
    old, new = create(tmp_path, 4), create(tmp_path, 8, description)
    assert [c.path for c in checkpoint_directory.complete_checkpoints(tmp_path)] == [old]
    assert [path for path, _ in checkpoint_directory.incomplete_checkpoints(tmp_path)] == [new]
    assert BAD[description] in checkpoint_directory.incomplete_checkpoints(tmp_path)[0][1]
    with pytest.raises(DataError, match="not a complete checkpoint"):
        checkpoint_directory.open_checkpoint(new)


def test_checkpoint_without_description_is_incomplete(tmp_path: Path) -> None:
    (create(tmp_path, 8) / "holmes.json").unlink()
    assert checkpoint_directory.complete_checkpoints(tmp_path) == []
    assert checkpoint_directory.incomplete_checkpoints(tmp_path) == [
        (tmp_path / "step-00000008", "holmes.json: No such file or directory")
    ]


def test_incomplete_checkpoint_does_not_count_towards_those_to_keep(tmp_path: Path) -> None:
    for step in (4, 8):
        create(tmp_path, step)
    create(tmp_path, 12, "{}")
    assert checkpoint_directory.prune(tmp_path, 2) == []
    assert [c.step for c in checkpoint_directory.complete_checkpoints(tmp_path)] == [8, 4]


def test_changed_byte_gives_a_wrong_checksum(tmp_path: Path) -> None:
    checkpoint = checkpoint_directory.open_checkpoint(create(tmp_path, 4))
    assert file_checksums.find_damage(checkpoint) is None
    (checkpoint.path / ".metadata").write_bytes(b"ac")
    assert file_checksums.find_damage(checkpoint) == ".metadata has a wrong checksum"


def test_checkpoint_dir_puts_checkpoints_on_another_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "runs/a/checkpoints"
    checkpoint_directory.create_folder(folder, None)
    assert folder.is_dir() and not folder.is_symlink()
    checkpoint_directory.create_folder(folder, str(tmp_path / "disk"))
    assert folder.resolve() == tmp_path / "disk/a"
    create(folder, 4)
    checkpoint_directory.create_folder(folder, str(tmp_path / "another"))  # ignored: the folder has a checkpoint
    steps = [c.step for c in checkpoint_directory.complete_checkpoints(folder)]
    assert steps == [4] and not (tmp_path / "another").exists()


def test_checkpoint_dir_that_is_missing_or_of_another_run_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs/a/checkpoints"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / "unmounted")
    with pytest.raises(RunFailed, match=r"checkpoints: this link points to \S+/unmounted, which does not exist; mount"):
        checkpoint_directory.create_folder(folder, None)
    with pytest.raises(RecordError, match="does not exist; remove it, or mount"):
        RunDirectory.create(folder.parent)
    folder.unlink()
    (tmp_path / "disk/a").mkdir(parents=True)
    (tmp_path / "disk/a/thesis.txt").touch()
    with pytest.raises(RunFailed, match="disk/a: the directory is not empty"):
        checkpoint_directory.create_folder(folder, str(tmp_path / "disk"))
    (tmp_path / "file").touch()
    with pytest.raises(RunFailed, match="cannot write the checkpoint"):
        checkpoint_directory.create_folder(folder, str(tmp_path / "file"))


def test_a_renamed_checkpoint_does_not_count(tmp_path: Path) -> None:
    path = create(tmp_path, 4).rename(tmp_path / checkpoint_directory.directory_name(9))
    assert checkpoint_directory.complete_checkpoints(tmp_path) == []
    assert checkpoint_directory.incomplete_checkpoints(tmp_path) == [(path, "holmes.json is of step 4")]


def test_full_disk_is_named_with_what_to_do_after_it(tmp_path: Path) -> None:
    unfinished = checkpoint_directory.unfinished_path(tmp_path, 8, 1)
    unfinished.mkdir()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = f"{unfinished}: cannot write the checkpoint: No space left on device; free some space, then "
    assert str(checkpoint_directory.write_error(unfinished, full)) == f"{message}run it again"
    create(tmp_path, 4)
    assert str(checkpoint_directory.write_error(unfinished, full)) == f"{message}`holmes resume` the run from step 4"


def test_half_written_checkpoint_of_a_failed_save_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = checkpoint_directory.unfinished_path(tmp_path, 8, 1)
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    monkeypatch.setattr(save_and_load, "is_full", lambda path: unfinished.exists())
    rank = object.__new__(save_and_load.Checkpoints)
    rank._unfinished, rank.folder = unfinished, tmp_path
    no_failures, hidden = (
        CheckpointException("write", {}),
        CheckpointException("write", {1: (RuntimeError("pos"), None)}),
    )
    rank._rank = 1
    assert "see rank 0" in str(rank._failed_save(tmp_path, no_failures)) and unfinished.exists()
    rank._rank = 0
    assert "No space left on device" in str(rank._failed_save(tmp_path, hidden)) and not unfinished.exists()

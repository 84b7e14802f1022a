"""Who else may write where a run lies; what is made can be written by nobody else, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holmes_hpc.errors import RecordError, RunFailed
from holmes_hpc.records import ownership
from holmes_hpc.records.files import append_line, locked, write_whole
from holmes_hpc.records.find import find_run
from holmes_hpc.records.locks import LockOwner, take_lock
from holmes_hpc.records.run import RunDirectory

ROOT = os.getuid() == 0


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "a"
    made.mkdir(parents=True)
    return made


def test_a_folder_of_ones_own(folder: Path) -> None:
    assert ownership.other_writers(folder) is None and ownership.other_writers(folder / "new" / "one") is None


@pytest.mark.parametrize(("mode", "says"), [(0o777, "can be written by everybody"), (0o1777, None), (0o755, None)])
def test_a_folder_above_it(mode: int, says: str | None, folder: Path) -> None:
    folder.parent.chmod(mode)
    said = ownership.other_writers(folder)
    assert said is None if says is None else said is not None and said == f"{folder.parent} {says}"
    if says:
        with pytest.raises(RecordError, match="other users could change the code that runs; chmod go-w it"):
            ownership.refuse_other_writers(folder)


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_of_another_user_or_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(folder.parent, 0, 12345)
    folder.parent.chmod(0o775)
    assert "can be written by group 12345" in (ownership.other_writers(folder) or "")
    with pytest.raises(RecordError, match="HOLMES_TRUST_GROUP=1"):
        ownership.refuse_other_writers(folder)
    monkeypatch.setenv("HOLMES_TRUST_GROUP", "1")
    assert ownership.other_writers(folder) is None
    folder.parent.chmod(0o777)
    assert "by everybody" in (ownership.other_writers(folder) or "")
    os.chown(folder, 54321, 0)
    assert ownership.other_writers(folder) == f"{folder} belongs to user 54321"


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 54321, 0)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    assert "belongs to user 54321" in (ownership.other_writers(tmp_path / "link" / "run") or "")


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_behind_a_link_of_a_link(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "latest").symlink_to(folder)
    (tmp_path / "link").symlink_to("theirs/latest")
    assert ownership.other_writers(tmp_path / "link" / "run") is None
    os.chown(theirs, 54321, 0)  # who may let it lead elsewhere at any time
    assert ownership.other_writers(tmp_path / "link" / "run") == f"{theirs} belongs to user 54321"
    assert ownership.other_writers(theirs / ".." / "runs") == f"{theirs} belongs to user 54321"


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert ownership.other_writers(tmp_path / "a" / "run") is None  # nothing can be run there


def test_a_sticky_folder_lets_others_put_files_beside_ones_own(folder: Path) -> None:
    folder.chmod(0o1777)
    assert ownership.other_writers(folder / "new") is None
    assert ownership.other_writers(folder) == f"{folder} can be written by everybody"


def test_a_lock_is_no_link(folder: Path) -> None:
    (folder / ".lock").symlink_to(folder / "elsewhere")
    with pytest.raises(RunFailed, match=r"\.lock: Too many levels of symbolic links"), locked(folder / ".lock"):
        pass
    with pytest.raises(RunFailed, match="symbolic links"):
        take_lock(folder / ".lock", LockOwner.current("one"))
    assert not (folder / "elsewhere").exists()


def test_who_reads_anothers_run_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory.create(folder / "run")
    find_run(folder / "run")
    assert not capsys.readouterr().err
    folder.chmod(0o777)
    find_run(folder / "run")
    said = capsys.readouterr().err
    assert f"warning: {folder / 'run'}: {folder} can be written by everybody; others may have changed" in said
    folder.chmod(0o755)


@pytest.mark.parametrize(
    ("said", "files", "folders"),
    [(0o000, 0o644, 0o755), (0o022, 0o644, 0o755), (0o002, 0o644, 0o755), (0o077, 0o600, 0o700)],
)
def test_what_is_made(said: int, files: int, folders: int, tmp_path: Path, umask: None) -> None:
    os.umask(said)
    ownership.careful_umask()
    run = RunDirectory.create(tmp_path / "run", "plan")
    append_line(run.metrics_path, "{}")
    write_whole(tmp_path / "secret", "", 0o600)
    (tmp_path / "plain").write_text("")  # as a library makes its files
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == files
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [run.path, *run.path.iterdir()]}
    assert set(modes.values()) == {files, folders}
    assert {name for name, mode in modes.items() if mode == folders} == {"run", "logs", "trace", "checkpoints", "exits"}
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_code_is_read_from_a_plain_file_of_this_user_only(folder: Path) -> None:
    task = folder / "task.pkl"
    task.write_bytes(b"code")
    with ownership.open_own_file(task) as file:
        assert file.read() == b"code"
    (folder / "link.pkl").symlink_to(task)
    with pytest.raises(OSError, match="symbolic links"):
        ownership.open_own_file(folder / "link.pkl")
    os.mkfifo(folder / "pipe.pkl")
    with pytest.raises(OSError, match="Not a file"):
        ownership.open_own_file(folder / "pipe.pkl")
    for path in (task, folder):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(RecordError, match=f"{path} can be written by everybody"):
            ownership.open_own_file(task)
        path.chmod(mode)
    (folder.parent / "elsewhere").symlink_to(folder)  # a folder may be a link, if its target is this user's too
    ownership.open_own_file(folder.parent / "elsewhere" / "task.pkl").close()


@pytest.mark.skipif(not ROOT, reason="only root can give files away")
def test_code_of_another_user_is_not_read(folder: Path) -> None:
    task = folder / "task.pkl"
    task.write_bytes(b"code")
    os.chown(task, 54321, 0)
    with pytest.raises(RecordError, match=r"task\.pkl belongs to user 54321, so other users could change the code"):
        ownership.open_own_file(task)

"""One holder at a time, named to the others; a lock that nobody holds any more keeps nobody out."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from holmes_hpc.errors import RecordError
from holmes_hpc.records.locks import LockOwner, hold_lock, take_lock


def test_the_second_is_told_who_is_the_first(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path / "lock", LockOwner.current("`holmes resume`", "41")),
        pytest.raises(
            RecordError,
            match=rf"{tmp_path}: the run directory is in use by `holmes resume` of \S+ on \S+ \(process \d+, job 41, "
            r"for 0 s\); wait until that process ends",
        ),
    ):
        take_lock(tmp_path / "lock", LockOwner.current("another"))
    assert not (tmp_path / "lock").read_text()
    with hold_lock(tmp_path / "lock", LockOwner.current("a third")):
        pass


def test_a_lock_that_a_file_server_keeps_for_a_dead_node(tmp_path: Path) -> None:
    asked: list[LockOwner] = []
    with hold_lock(tmp_path / "lock", LockOwner.current("an attempt", "41")):

        def over(other: LockOwner) -> bool:
            asked.append(other)
            return other.job == "41"

        handle = take_lock(tmp_path / "lock", LockOwner.current("an attempt", "42"), over)
    assert asked[0].what == "an attempt"
    assert '"job": "42"' in (tmp_path / "lock").read_text()  # the first one, at its end, leaves it alone
    with pytest.raises(RecordError, match=r"in use by an attempt .* job 42"):
        take_lock(tmp_path / "lock", LockOwner.current("an attempt", "43"), over)
    os.close(handle)


def test_of_many_who_see_that_a_holder_is_over_one_takes_its_place(tmp_path: Path) -> None:
    barrier, taken, refused = threading.Barrier(8), [], []

    def over(other: LockOwner) -> bool:
        if other.job == "41":
            barrier.wait()  # all have seen it before any of them acts
        return other.job == "41"

    def work(number: int) -> None:
        try:
            taken.append(take_lock(tmp_path / "lock", LockOwner.current("an attempt", str(number)), over))
        except RecordError:
            refused.append(number)

    with hold_lock(tmp_path / "lock", LockOwner.current("an attempt", "41")):
        threads = [threading.Thread(target=work, args=(50 + number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(taken) == 1 and len(refused) == 7
    os.close(taken[0])


def test_who_holds_it_is_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.pread(handle, 1000, 0)))
    with hold_lock(tmp_path / "lock", LockOwner.current("first", "41")):
        pass
    assert b'"job": "41"' in synced[0]  # on NFS another node reads what the server has


def test_one_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    first = take_lock(tmp_path / "lock", LockOwner.current("first"))
    threading.Timer(0.3, os.close, [first]).start()
    os.close(take_lock(tmp_path / "lock", LockOwner.current("second"), patience_s=30))


def test_of_many_at_once_one_has_it(tmp_path: Path) -> None:
    at_work, most, refused = [0], [0], []
    barrier = threading.Barrier(8)

    def work() -> None:
        for _ in range(20):
            barrier.wait()
            try:
                with hold_lock(tmp_path / "lock", LockOwner.current("one of many")):
                    at_work[0] += 1
                    most[0] = max(most[0], at_work[0])
                    time.sleep(0.001)
                    at_work[0] -= 1
            except RecordError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and refused


def test_a_file_system_without_locks_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        hold_lock(tmp_path / "lock", LockOwner.current("first")),
        hold_lock(tmp_path / "lock", LockOwner.current("second")),
    ):
        pass


@pytest.mark.parametrize("gone", ["here", "on another node"])
def test_a_file_that_its_holder_has_just_removed_is_left_for_the_next(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, tried = fcntl.flock, []

    def ending(handle: int, how: int) -> None:
        tried.append(handle)
        if len(tried) == 1:
            (tmp_path / "lock").unlink()
            if gone != "here":
                raise OSError(errno.ESTALE, "Stale file handle")  # as NFS says it
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", ending)
    with hold_lock(tmp_path / "lock", LockOwner.current("second")):
        assert len(tried) == 2

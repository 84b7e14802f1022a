"""Heterogeneous jobs in line: never more than n run, a long one holds up nobody, and it goes on without the client."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.submission.executor import throttle as lines
from holmes_hpc.submission.executor.throttle import Line, Places, leave


class Queue:
    """Slurm as far as a line needs it: who waits for whom, who runs. `seconds`: how long each job runs."""

    def __init__(self, seconds: list[float], most: int, deaths: tuple[int, ...] = ()) -> None:
        self.seconds, self.most, self.deaths = seconds, most, deaths
        self.places, self.waits, self.left = Places(), {}, dict(enumerate(seconds))  # type: ignore[var-annotated]
        self.running: dict[str, float] = {}
        self.done: list[str] = []

    def submit(self, now: float) -> None:
        for index in range(len(self.seconds)):
            before = self.places.next_place(self.most)
            self.places.order.append(str(index))
            if before is not None:
                self.places.waits[str(index)] = self.waits[str(index)] = before
        self.start(now)

    def start(self, now: float) -> None:
        for index, seconds in enumerate(self.seconds):
            job = str(index)
            if (
                job not in self.running
                and job not in self.done
                and self.waits.get(job) not in (set(map(str, range(len(self.seconds)))) - set(self.done))
            ):
                self.running[job] = now + seconds

    def let_wait(self, job: str, dependency: str) -> bool:
        if job in self.running or job in self.done:
            return False
        self.waits[job] = dependency.removeprefix("afterany:")
        return True


def run(
    seconds: list[float], most: int, deaths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, path: Path
) -> tuple[float, int]:
    """(seconds until the last job ended, most jobs at a time); `deaths`: jobs whose script has no last word."""
    queue, now, widest = Queue(seconds, most, deaths), 0.0, 0
    monkeypatch.setattr(lines, "_let_wait", queue.let_wait)
    monkeypatch.setattr(lines, "_held", lambda _: _Same(queue.places))
    queue.submit(now)
    while queue.running:
        widest = max(widest, len(queue.running))
        job = min(queue.running, key=lambda j: (queue.running[j], int(j)))
        now = queue.running[job]
        if int(job) not in deaths:
            leave(path, job)
        del queue.running[job]
        queue.done.append(job)
        queue.start(now)
    assert sorted(map(int, queue.done)) == list(range(len(seconds)))
    return now, widest


class _Same:
    def __init__(self, places: Places) -> None:
        self.places = places

    def __enter__(self) -> Places:
        return self.places

    def __exit__(self, *_: object) -> None: ...


def as_an_array(seconds: list[float], most: int) -> float:
    free = [0.0] * most
    for each in seconds:
        at = free.index(min(free))
        free[at] += each
    return max(free)


def test_the_next_starts_when_any_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = [10.0, 1, 10, 1, 10, 1, 10, 1]
    assert run(seconds, 2, (), monkeypatch, tmp_path) == (as_an_array(seconds, 2), 2) == (22, 2)
    assert run(seconds, 2, tuple(range(8)), monkeypatch, tmp_path) == (40, 2)  # no last word: job i after job i - 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.integers(1, 4), st.data())
def test_no_more_than_may_run_and_all_come_to_their_turn(seconds: list[int], most: int, data: st.DataObject) -> None:
    deaths = tuple(data.draw(st.sets(st.integers(0, len(seconds) - 1))))
    with pytest.MonkeyPatch.context() as patch:
        end, widest = run([float(s) for s in seconds], most, deaths, patch, Path("/nowhere"))
        assert widest <= most
        if not deaths:
            assert end == as_an_array([float(s) for s in seconds], most)


def test_a_job_submitted_later_takes_a_free_place(tmp_path: Path) -> None:
    line = Line(tmp_path / "line.json", 2)
    got = []
    for index, ended in enumerate([None, None, "1", None, None]):
        if ended:
            leave(line.path, ended)
        line.enter("afterok:7", lambda depends, index=index: got.append(depends) or SimpleNamespace(job_id=str(index)))
    assert got == ["afterok:7", "afterok:7", "afterok:7", "afterok:7,afterany:0", "afterok:7,afterany:2"]

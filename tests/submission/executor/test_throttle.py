"""The throttle of heterogeneous jobs: at most `limit` run, a long one delays no other, and no client is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.submission.executor import throttle as throttle_module
from holmes_hpc.submission.executor.throttle import JobQueue, Throttle, release_next


class SimulatedSlurm:
    """The part of Slurm that a throttle needs: dependencies and running jobs. `seconds`: each job's run time."""

    def __init__(self, seconds: list[float], limit: int) -> None:
        self.seconds, self.limit = seconds, limit
        self.queue, self.dependencies = JobQueue(), {}  # type: ignore[var-annotated]
        self.running: dict[str, float] = {}
        self.done: list[str] = []

    def submit(self, now: float) -> None:
        for index in range(len(self.seconds)):
            predecessor = self.queue.next_predecessor(self.limit)
            self.queue.order.append(str(index))
            if predecessor is not None:
                self.queue.waits[str(index)] = self.dependencies[str(index)] = predecessor
        self.start(now)

    def start(self, now: float) -> None:
        for index, seconds in enumerate(self.seconds):
            job = str(index)
            if (
                job not in self.running
                and job not in self.done
                and self.dependencies.get(job) not in (set(map(str, range(len(self.seconds)))) - set(self.done))
            ):
                self.running[job] = now + seconds

    def set_dependency(self, job: str, dependency: str) -> bool:
        if job in self.running or job in self.done:
            return False
        self.dependencies[job] = dependency.removeprefix("afterany:")
        return True


def run(
    seconds: list[float], limit: int, killed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, path: Path
) -> tuple[float, int]:
    """Return (end of the last job in seconds, most jobs at a time). `killed`: jobs whose script does not release."""
    slurm, now, most_running = SimulatedSlurm(seconds, limit), 0.0, 0
    monkeypatch.setattr(throttle_module, "_set_dependency", slurm.set_dependency)
    monkeypatch.setattr(throttle_module, "_locked_queue", lambda _: _Unlocked(slurm.queue))
    slurm.submit(now)
    while slurm.running:
        most_running = max(most_running, len(slurm.running))
        job = min(slurm.running, key=lambda j: (slurm.running[j], int(j)))
        now = slurm.running[job]
        if int(job) not in killed:
            release_next(path, job)
        del slurm.running[job]
        slurm.done.append(job)
        slurm.start(now)
    assert sorted(map(int, slurm.done)) == list(range(len(seconds)))
    return now, most_running


class _Unlocked:
    def __init__(self, queue: JobQueue) -> None:
        self.queue = queue

    def __enter__(self) -> JobQueue:
        return self.queue

    def __exit__(self, *_: object) -> None: ...


def array_end(seconds: list[float], limit: int) -> float:
    """Return when an array with the same limit would end, in seconds."""
    slots = [0.0] * limit
    for job_seconds in seconds:
        slots[slots.index(min(slots))] += job_seconds
    return max(slots)


def test_next_job_starts_when_any_job_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = [10.0, 1, 10, 1, 10, 1, 10, 1]
    assert run(seconds, 2, (), monkeypatch, tmp_path) == (array_end(seconds, 2), 2) == (22, 2)
    assert run(seconds, 2, tuple(range(8)), monkeypatch, tmp_path) == (40, 2)  # all killed: job i after job i - 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=14), st.integers(1, 4), st.data())
def test_limit_holds_and_every_job_runs(seconds: list[int], limit: int, data: st.DataObject) -> None:
    killed = tuple(data.draw(st.sets(st.integers(0, len(seconds) - 1))))
    with pytest.MonkeyPatch.context() as patch:
        end, most_running = run([float(s) for s in seconds], limit, killed, patch, Path("/nowhere"))
        assert most_running <= limit
        if not killed:
            assert end == array_end([float(s) for s in seconds], limit)


def test_later_job_replaces_an_ended_one(tmp_path: Path) -> None:
    throttle = Throttle(tmp_path / "throttle.json", 2)
    dependencies = []
    for index, ended in enumerate([None, None, "1", None, None]):
        if ended:
            release_next(throttle.path, ended)
        throttle.submit(
            "afterok:7", lambda dep, index=index: dependencies.append(dep) or SimpleNamespace(job_id=str(index))
        )
    assert dependencies == ["afterok:7", "afterok:7", "afterok:7", "afterok:7,afterany:0", "afterok:7,afterany:2"]
    queue = json.loads(throttle.path.read_text())  # batch scripts of other releases read these keys
    assert (
        queue.keys() == {"order", "waits", "ended", "common_dependency"} and queue["common_dependency"] == "afterok:7"
    )

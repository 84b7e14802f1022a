"""A throttle for heterogeneous jobs, which cannot be arrays: ``python -m ….throttle FILE JOB_ID``.

At most `limit` jobs run at a time, because each further job depends (``afterany``) on an earlier one. With only these
dependencies, a job that depends on a long job would wait although others have ended. So each batch script calls this
module at its end. The first waiting job then gets a dependency on the ending job, so that it starts next. If another
job depended on the ending job, it gets the dependency that the first waiting job had.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.files import locked, write_whole
from holmes_hpc.records.untrusted import read_file
from holmes_hpc.slurm.commands import slurm


@dataclass
class JobQueue:
    """The jobs of a throttle, by job id. `order`: in order of submission; `waits`: {job: the job that it depends on};
    `ended`: jobs whose batch script has ended; `common_dependency`: the user's dependencies, which all jobs have."""

    order: list[str] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    common_dependency: str = ""

    def next_predecessor(self, limit: int) -> str | None:
        """Return the job on which the next submitted job must depend; None if that one need not wait. If it takes the
        place of a job that has ended, remove that job from `order`."""
        if len(self.order) < limit:
            return None
        chain_ends = [job for job in self.order if job not in self.waits.values()]  # no job depends on these
        if any(job in self.ended for job in chain_ends):
            self.order.remove(next(job for job in chain_ends if job in self.ended))  # the next job replaces it
            return None
        return chain_ends[0]

    def dependency(self, job: str) -> str:
        return ",".join(d for d in (self.common_dependency, f"afterany:{job}") if d)


@dataclass
class Throttle:
    """A limit on running jobs. `path`: the file with its :class:`JobQueue`, on a file system that all nodes share."""

    path: Path
    limit: int

    def submit(self, dependency: str | None, submit_job: Callable[[str | None], Any]) -> Any:
        """Submit a job by ``submit_job(dependencies)`` and return it, while the queue is locked. The dependencies are
        the user's `dependency` and, if the limit is reached, one on an earlier job."""
        with _locked_queue(self.path) as queue:
            queue.common_dependency = dependency or ""
            predecessor = queue.next_predecessor(self.limit)
            job = submit_job(dependency if predecessor is None else queue.dependency(predecessor))
            queue.order.append(job.job_id)
            if predecessor is not None:
                queue.waits[job.job_id] = predecessor
        return job


@contextlib.contextmanager
def _locked_queue(path: Path) -> Iterator[JobQueue]:
    """Load the queue from its file, and save it after the block. The file is locked for all nodes."""
    with locked(path.with_name(f"{path.name}.lock"), wait_s=60):
        try:
            queue = JobQueue(**json.loads(read_file(path)))
        except FileNotFoundError:
            queue = JobQueue()
        yield queue
        write_whole(path, json.dumps(asdict(queue)))


def release_next(path: Path, job: str) -> None:
    """Record that `job` is about to end, and make the first waiting job depend on it (see the top of this file)."""
    with _locked_queue(path) as queue:
        if job in queue.ended:
            return
        queue.ended.append(job)
        successor = next((waiting for waiting, predecessor in queue.waits.items() if predecessor == job), None)
        for candidate in queue.order:
            predecessor = queue.waits.get(candidate)
            if candidate == successor:
                return  # Slurm starts it after `job`
            if predecessor is None or predecessor in queue.ended:
                continue  # it runs, or waits only for nodes
            if not _set_dependency(candidate, queue.dependency(job)):
                del queue.waits[candidate]  # it runs, or was cancelled
                continue
            queue.waits[candidate] = job
            if successor is not None and _set_dependency(successor, queue.dependency(predecessor)):
                queue.waits[successor] = predecessor
            return


def _set_dependency(job: str, dependency: str) -> bool:
    return slurm("scontrol", "update", f"JobId={job}", f"Dependency={dependency}", timeout_s=10).ok


def main(arguments: list[str]) -> None:
    try:
        release_next(Path(arguments[0]), arguments[1])
    except (HolmesError, OSError, ValueError, TypeError) as e:  # the queue continues without this call, only slower
        print(f"holmes: {e}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])

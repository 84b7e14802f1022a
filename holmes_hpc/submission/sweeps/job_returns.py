"""What Hydra gets back of a sweep's jobs: waiting for each, one JobReturn of each, and what Ctrl-C does meanwhile; the
progress that is shown until then, a live table on a terminal, else a line whenever something changes."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from submitit.core import utils
from submitit.local.local import LocalJob

from holmes_hpc import console
from holmes_hpc.errors import RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.status import job_of, record_end
from holmes_hpc.submission.sweeps.jobs import cancel_sweep, handle, result_pickle, states
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob
from holmes_hpc.submission.sweeps.status_table import SweepRow, live_table, on_terminal, row_of, sweep_rows

log = logging.getLogger(__name__)
EVERY_S = 2.0  # a look at the jobs
SAID_S = 8.0  # at most so long, and EVERY_S, nothing is said
SETTLE_S = 20  # after the end of a job in Slurm: time for its records to become visible on this machine


@dataclass
class Launched:
    """A job of this launch: its entry in the manifest, and what to wait for: submitit's job, else what tells its state;
    neither when it is `cached`: it had completed before."""

    entry: SweepJob
    config: DictConfig
    plain: Any = None
    held: Any = None
    cached: bool = False

    def done(self) -> bool:
        """Whether it has ended, as submitit or its state tells."""
        if self.plain is not None:
            return bool(self.plain.done())
        return self.held is None or bool(self.held.state("standard").ended)


def reattach(manifest: Manifest, entry: SweepJob) -> tuple[Any, Any]:
    """(submitit's job, else what tells its state) of a job that an earlier launch submitted."""
    if entry.kind == "plan":
        return None, job_of(RunDirectory(manifest.place(entry.directory)))
    if entry.where == "local":  # submitit's local job knows only processes of its own
        return None, handle(manifest, entry)
    return SlurmHetJob(manifest.place(entry.folder), entry.job_id, tasks=list(range(entry.tasks))), None


def wait(manifest: Manifest, job: Launched, meanwhile: Callable[[], None]) -> JobReturn:
    """Wait for a job's end; `meanwhile` is called again and again."""
    if job.entry.kind == "plan":
        return _planned_return(manifest, job, meanwhile)
    while not job.done():
        meanwhile()
        time.sleep(0.5)
    if job.cached:
        return utils.pickle_load(result_pickle(manifest, job.entry))[1]
    entry = job.entry
    plain = job.plain or LocalJob(manifest.place(entry.folder), entry.job_id, list(range(entry.tasks)))
    return plain.results()[0]


def _planned_return(manifest: Manifest, job: Launched, meanwhile: Callable[[], None]) -> JobReturn:
    """Wait for a plan's job; what Hydra wants to know about it comes back, with the final loss as its value."""
    run = RunDirectory(manifest.place(job.entry.directory))
    ended, state = None, JobState("COMPLETED")
    while job.held is not None:
        state = job.held.state("standard")
        if state.ended:
            ended = ended or time.monotonic()
            if run.read_result() is not None or time.monotonic() - ended > SETTLE_S * (job.entry.where == "slurm"):
                break
        else:
            ended = None
        meanwhile()
        time.sleep(1)
    result = run.read_result() or record_end(run, state)
    good = result["state"] == "completed"
    value: Any = (
        (result.get("final") or {}).get("loss")
        if good
        else RunFailed(f"{result['state']}: {result['error']}", where=str(run.path), hint="see its log")
    )
    with read_write(job.config.hydra.runtime), open_dict(job.config.hydra.runtime):
        job.config.hydra.runtime.output_dir = str(run.path)
    return JobReturn(
        overrides=list(job.config.hydra.overrides.task),
        cfg=task_config(job.config),
        hydra_cfg=OmegaConf.masked_copy(job.config, "hydra"),
        working_dir=str(run.path),
        task_name=str(job.config.hydra.job.name),
        status=JobStatus.COMPLETED if good else JobStatus.FAILED,
        _return_value=value,
    )


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Of the jobs `launched` (others may be added to the list). Inside, :meth:`show` may be called at any rate."""

    def __init__(self, manifest: Manifest, launched: Sequence[Launched]) -> None:
        self._manifest, self._launched = manifest, launched
        self._looked = self._said = time.monotonic()
        self._told: list[str] = []
        self._live: Any = None

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def rows(self, mode: str = "standard") -> list[SweepRow]:
        jobs = [job.entry for job in self._launched]
        return [row_of(self._manifest, job, state) for job, state in states(self._manifest, jobs, mode).items()]

    def show(self) -> None:
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return
        self._looked = now
        rows = self.rows()
        if sys.stdout.isatty():
            if self._live is None:
                self._live = on_terminal()
                self._live.start()
            self._live.update(
                live_table(str(self._manifest.path.parent), rows, self._live.console.height), refresh=True
            )
        elif (told := [row.state for row in rows]) != self._told or now - self._said >= SAID_S:
            self._told, self._said = told, now
            log.info(in_a_line(rows))

    def conclude(self) -> None:
        """The table at the end."""
        self.__exit__(None, None, None)
        with contextlib.suppress(OSError):
            console.table(str(self._manifest.path.parent), *sweep_rows(self.rows("cache")))
            if any(job.entry.kind == "plan" for job in self._launched):
                console.note(f"`holmes report {self._manifest.path.parent} --by loss` compares them")


def in_a_line(rows: Sequence[SweepRow]) -> str:
    """``2 running, 1 pending: #0 step 5, loss 3.21; #1 step 4, loss 3.3; #2 waits (Resources)``"""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in rows).most_common())
    said = [
        f"#{row.num} waits ({row.why})"
        if row.why
        else f"#{row.num} step {row.step}" + ("" if row.loss is None else f", loss {row.loss:.4g}")
        for row in rows
        if row.why or (not row.ended and row.step is not None)
    ]
    more = f"; and {len(said) - 4} more" if len(said) > 4 else ""
    return counts + (": " + "; ".join(said[:4]) + more if said else "")


def interrupted(manifest: Manifest, jobs: list[SweepJob]) -> None:
    """Ctrl-C: ask whether to cancel what was submitted, and say how to come back."""
    answer = None
    with contextlib.suppress(KeyboardInterrupt):
        answer = console.ask(f"\ncancel the sweep's {len(jobs)} jobs? [y/N] ")
    if answer and answer.startswith("y"):
        cancel_sweep(manifest, jobs)
        log.info("cancelled")
    else:
        log.info(
            f"the jobs go on: `holmes sweep status {manifest.path.parent}` shows them; the same command with "
            f"hydra.sweep.dir={manifest.path.parent} takes up where it was left"
        )


def save_hydra(config: DictConfig, directory: Path) -> None:
    """Hydra's own files of a job, which Hydra writes in a task; the ranks of a Plan are not Hydra's tasks."""
    if config.hydra.output_subdir is None:
        return
    target = directory / str(config.hydra.output_subdir)
    target.mkdir(parents=True, exist_ok=True)
    parts = {"config": task_config(config), "hydra": OmegaConf.masked_copy(config, "hydra")}
    for name, part in {**parts, "overrides": config.hydra.overrides.task}.items():
        (target / f"{name}.yaml").write_text(OmegaConf.to_yaml(part), encoding="utf-8")


def task_config(config: DictConfig) -> DictConfig:
    """A job's configuration without Hydra's own part."""
    return OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])

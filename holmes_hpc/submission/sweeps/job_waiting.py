"""Waiting for a sweep's jobs: their results as Hydra's JobReturn, their progress, and the handling of Ctrl-C.

On a terminal, progress is a live table. Otherwise, a line is logged at each change of state and every LOG_INTERVAL_S.
"""

import contextlib
import logging
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from submitit.local.local import LocalJob

from holmes_hpc import console
from holmes_hpc.errors import RunFailed, counted
from holmes_hpc.records.ownership import open_own_file
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.status import job_of, record_end
from holmes_hpc.submission.sweeps.jobs import cancel_sweep, job_handle, job_states, result_pickle
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob
from holmes_hpc.submission.sweeps.sweep_table import SweepRow, live_display, live_table, row_of, table_cells

log = logging.getLogger(__name__)
PAUSE_S = 0.5  # seconds between two checks of the job that is waited for
POLL_S = 2.0  # between queries of all jobs
LOG_INTERVAL_S = 8.0  # log at least this often, or up to POLL_S later
SETTLE_S = 20  # time after a job's end in Slurm until its records are visible on this machine


@dataclass
class LaunchedJob:
    """A job of this launch. `entry`: its entry in the manifest; `is_cached`: whether it completed in an earlier launch.
    Any other job has either a `submitit_job`, which returns its result, or a `handle`, which queries its state."""

    entry: SweepJob
    config: DictConfig
    submitit_job: Any = None
    handle: Any = None
    is_cached: bool = False

    def done(self) -> bool:
        """Return whether the job has ended."""
        if self.submitit_job is not None:
            return bool(self.submitit_job.done())
        return self.handle is None or bool(self.handle.state("standard").ended)


def reattach(manifest: Manifest, entry: SweepJob) -> tuple[Any, Any]:
    """Return (`submitit_job`, `handle`) of a :class:`LaunchedJob` for an active earlier job. One of them is None."""
    if entry.kind == "plan":
        return None, job_of(RunDirectory(manifest.resolve(entry.directory)))
    if entry.where == "local":  # submitit's local job knows only its own child processes
        return None, job_handle(manifest, entry)
    return SlurmHetJob(manifest.resolve(entry.folder), entry.job_id, tasks=list(range(entry.tasks))), None


def wait(manifest: Manifest, job: LaunchedJob, on_poll: Callable[[], None]) -> JobReturn:
    """Wait until a job ends, and return its result. Call `on_poll` repeatedly meanwhile."""
    if job.entry.kind == "plan":
        return _wait_for_plan(manifest, job, on_poll)
    while not job.done():
        on_poll()
        time.sleep(PAUSE_S)
    if job.is_cached:
        with open_own_file(result_pickle(manifest, job.entry)) as file:
            return pickle.load(file)[1]  # noqa: S301 (only this user can have written it)
    entry = job.entry
    submitit_job = job.submitit_job or LocalJob(manifest.resolve(entry.folder), entry.job_id, list(range(entry.tasks)))
    return submitit_job.results()[0]


def _wait_for_plan(manifest: Manifest, job: LaunchedJob, on_poll: Callable[[], None]) -> JobReturn:
    """Wait until the job of a plan ends. Return its result: the last loss, or an error if the run did not complete."""
    run = RunDirectory(manifest.resolve(job.entry.directory))
    ended, state = None, JobState("COMPLETED")
    while job.handle is not None:
        state = job.handle.state("standard")
        ended = (ended or time.monotonic()) if state.ended else None
        settle_s = SETTLE_S * (job.entry.where == "slurm")
        if ended and (run.read_result() is not None or time.monotonic() - ended > settle_s):
            break
        on_poll()
        time.sleep(PAUSE_S)
    result = run.read_result() or record_end(run, state)
    has_completed = result["state"] == "completed"
    value: Any = (result.get("final") or {}).get("loss")
    if not has_completed:
        problem = f"{result['state']}: {result['error']}"
        value = RunFailed(problem, where=str(run.path), hint=f"see `holmes logs {run.path}`")
    with read_write(job.config.hydra.runtime), open_dict(job.config.hydra.runtime):
        job.config.hydra.runtime.output_dir = str(run.path)
    return JobReturn(
        overrides=list(job.config.hydra.overrides.task),
        cfg=task_config(job.config),
        hydra_cfg=OmegaConf.masked_copy(job.config, "hydra"),
        working_dir=str(run.path),
        task_name=str(job.config.hydra.job.name),
        status=JobStatus.COMPLETED if has_completed else JobStatus.FAILED,
        _return_value=value,
    )


class Progress(contextlib.ExitStack):
    """A context manager that displays the progress of the jobs in `launched`, a list that may grow meanwhile."""

    def __init__(self, manifest: Manifest, launched: list[LaunchedJob]) -> None:
        super().__init__()
        self.manifest, self.launched = manifest, launched
        self._polled_at = self._logged_at = time.monotonic()
        self._logged_states: list[str] = []
        self._live: Any = None

    def rows(self, mode: str = "standard") -> list[SweepRow]:
        jobs = [job.entry for job in self.launched]
        return [row_of(self.manifest, job, state) for job, state in job_states(self.manifest, jobs, mode).items()]

    def show(self) -> None:
        """Query and show the states of the jobs. Do nothing if the last query was less than POLL_S ago."""
        now = time.monotonic()
        if now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        rows = self.rows()
        if sys.stdout.isatty():
            if self._live is None:
                self._live = self.enter_context(live_display())
            table = live_table(str(self.manifest.path.parent), rows, self._live.console.height)
            self._live.update(table, refresh=True)
        elif (states := [row.state for row in rows]) != self._logged_states or now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_states, self._logged_at = states, now
            log.info(summary_line(rows))

    def conclude(self) -> None:
        """End the display and print the final table of the jobs."""
        self.close()
        with contextlib.suppress(OSError):
            rows, folder = self.rows("cache"), self.manifest.path.parent
            console.table(str(folder), *table_cells(rows))
            if any(job.entry.kind == "plan" for job in self.launched):
                by_loss = " --by loss" if len({row.loss for row in rows} - {None}) > 1 else ""
                console.note(f"`holmes report {folder}{by_loss}` compares them")


def summary_line(rows: Sequence[SweepRow]) -> str:
    """Return ``2 running, 1 pending: #0 step 5, loss 3.21; #1 step 4, loss 3.3; #2 waits (Resources)``."""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in rows).most_common())
    jobs = []
    for row in rows:
        if row.why:
            jobs.append(f"#{row.num} waits ({row.why})")
        elif not row.ended and row.step is not None:
            jobs.append(f"#{row.num} step {row.step}" + ("" if row.loss is None else f", loss {row.loss:.4g}"))
    remainder = f"; and {len(jobs) - 4} more" if len(jobs) > 4 else ""
    return counts + (": " + "; ".join(jobs[:4]) + remainder if jobs else "")


def handle_interrupt(manifest: Manifest, jobs: list[SweepJob], unsubmitted: int) -> None:
    """Ask after Ctrl-C whether to cancel the submitted `jobs`. If not, log how to continue the sweep later.
    `unsubmitted`: the number of jobs that were not submitted yet."""
    if unsubmitted:
        log.info(f"{counted(unsubmitted, 'job')} of the sweep not submitted")
    if not jobs:
        return
    answer = None
    with contextlib.suppress(KeyboardInterrupt):
        answer = console.ask(f"\ncancel the sweep's {counted(len(jobs), 'job')}? [y/N] ")
    if answer and answer.startswith("y"):
        cancel_sweep(manifest, jobs)
        log.info("cancelled")
    else:
        folder = manifest.path.parent
        status, again = f"`holmes sweep status {folder}` shows them", f"hydra.sweep.dir={folder} continues the sweep"
        log.info(f"the jobs continue: {status}; the same command with {again}")


def write_hydra_files(config: DictConfig, directory: Path) -> None:
    """Write ``.hydra/`` of a job with a plan into its run directory. For a plain job, Hydra writes it in the task."""
    if config.hydra.output_subdir is None:
        return
    target = directory / str(config.hydra.output_subdir)
    target.mkdir(parents=True, exist_ok=True)
    parts = {"config": task_config(config), "hydra": OmegaConf.masked_copy(config, "hydra")}
    for name, part in {**parts, "overrides": config.hydra.overrides.task}.items():
        (target / f"{name}.yaml").write_text(OmegaConf.to_yaml(part), encoding="utf-8")


def task_config(config: DictConfig) -> DictConfig:
    """Return the configuration of a job without Hydra's own section ``hydra``."""
    return OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])

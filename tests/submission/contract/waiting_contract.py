"""Eight reasons for pending jobs on a real Slurm: each is shown within 10 s, and still after 90 s.

make submission-contract
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plans
import pytest
import submitit
from slurm_jobs import executor, folder, functions_travel_with_the_pickle, sleeper, start, until  # noqa: F401 (fixtures)
from submitit.core import utils

from holmes_hpc import testbed as testbed_module
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.job import SlurmHetJob

pytestmark = pytest.mark.slurm
SHOWN_WITHIN_S, STILL_SHOWN_S = 10, 90
TOPOLOGY = Path(__file__).parents[3] / "slurm" / "testbed" / "default.yaml"


def slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    """Create a separate testbed that enforces limits and cannot launch jobs in partition roce."""
    with tempfile.TemporaryDirectory(prefix="w", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLMES_TESTBED", f"{folder}/bed")
        prolog = Path(folder) / "prolog"
        prolog.write_text('#!/bin/sh\ntest "$SLURM_JOB_PARTITION" != roce\n')
        prolog.chmod(0o755)
        Path(folder).chmod(0o755)
        topology_file = Path(folder) / "limits.yaml"
        topology_file.write_text(
            TOPOLOGY.read_text() + f"slurm: {{AccountingStorageEnforce: limits, Prolog: {prolog}}}\n"
        )
        testbed_module.up(
            topology_file, progress=lambda line: print(f"testbed: {line}", file=sys.__stderr__, flush=True)
        )
        try:
            for key, value in testbed_module.env().items():
                patch.setenv(key, value)
            slurm("sacctmgr", "-i", "add", "qos", "one", "MaxJobsPerUser=1")
            slurm("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=one")
            slurm("sacctmgr", "-i", "add", "account", "tight")
            slurm("sacctmgr", "-i", "add", "user", "root", "account=tight")
            slurm("sacctmgr", "-i", "modify", "account", "tight", "set", "GrpTRES=cpu=1")
            preflight.clear_cache()
            yield
        finally:
            testbed_module.down()


def submit_waiting(folder: Path, partition: str, seconds: float = 900, **options: Any) -> SlurmHetJob:
    executor = submitit.AutoExecutor(folder, cluster="slurmhet")
    parameters = {key: options.pop(key) for key in list(options) if key in ("cpus_per_task", "nodes")}
    executor.update_parameters(
        timeout_min=30, slurm_partition=partition, slurm_additional_parameters=options, **parameters
    )
    return executor.submit(sleeper, seconds)  # type: ignore[return-value]


def test_eight_pending_reasons(limits: None, folder: Path) -> None:
    full = submit_waiting(folder, "eth", nodes=2, exclusive=True)
    until(lambda: full.slurm_state().state == "RUNNING")
    alone = submit_waiting(folder, "ib", qos="one")
    until(lambda: alone.slurm_state().state == "RUNNING")
    submitted = {}
    for reason, options in (
        ("Resources", {"partition": "eth", "exclusive": True}),
        ("Priority", {"partition": "eth", "exclusive": True}),
        ("JobHeldAdmin", {"begin": "now+1hour"}),
        ("QOSMaxJobsPerUserLimit", {"qos": "one"}),
        ("AssocGrpCpuLimit", {"account": "tight", "cpus_per_task": 2}),
        ("launch failed requeued held", {"partition": "roce"}),
        ("Dependency", {"dependency": f"afterany:{full.job_id}"}),
        ("BeginTime", {"begin": "now+1hour"}),
    ):
        submitted[reason] = submit_waiting(folder, **{"partition": "ib", **options}), time.monotonic()  # type: ignore[arg-type]
    slurm("scontrol", "hold", submitted["JobHeldAdmin"][0].job_id)
    shown_after_s: dict[str, float] = {}
    while (
        len(shown_after_s) < 8
        and time.monotonic() < max(submitted_at for _, submitted_at in submitted.values()) + 3 * SHOWN_WITHIN_S
    ):
        for reason, (job, submitted_at) in submitted.items():
            if reason not in shown_after_s and job.slurm_state("standard").reason.replace("_", " ") == reason:
                shown_after_s[reason] = time.monotonic() - submitted_at
        time.sleep(0.5)
    print(*(f"{reason}: after {seconds:.1f} s" for reason, seconds in shown_after_s.items()), sep="\n")
    assert len(shown_after_s) == 8 and max(shown_after_s.values()) <= SHOWN_WITHIN_S
    time.sleep(max(0.0, STILL_SHOWN_S + max(submitted_at for _, submitted_at in submitted.values()) - time.monotonic()))
    for reason, (job, submitted_at) in submitted.items():
        state = job.slurm_state("standard")
        print(f"after {time.monotonic() - submitted_at:.0f} s: {state.state} ({state.why})")
        assert state.reason.replace("_", " ") == reason and state.waits and not job.done()


def test_more_components_than_a_qos_allows_are_refused(limits: None, folder: Path) -> None:
    with pytest.raises(utils.FailedSubmissionError, match=r"MaxJobsPU of QOS one is 1, and each of 2 components"):
        executor(folder, [{"partition": "ib", "qos": "one"}, {"partition": "eth", "qos": "one"}]).submit(sleeper, 0)


def test_status_shows_the_pending_reason(limits: None, folder: Path) -> None:
    run = start(folder, plans.quick, {"additional": {"begin": "now+1hour"}})
    (row,) = json.loads(slurm(sys.executable, "-m", "holmes_hpc.cli", "status", str(run.path), "--json"))
    assert row["state"] == "pending" and row["why"].startswith("BeginTime, starts about ")

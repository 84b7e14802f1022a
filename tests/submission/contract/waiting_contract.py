"""Eight ways to wait, made on a real Slurm: each reason is told within 10 s, and still after 90 s.

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

from holmes_hpc import testbed as beds
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.job import SlurmHetJob

pytestmark = pytest.mark.slurm
AT_ONCE_S, LATER_S = 10, 90
TOPOLOGY = Path(__file__).parents[3] / "slurm" / "testbed" / "default.yaml"


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def limits() -> Iterator[None]:
    """A testbed of its own, where limits hold and nothing can be launched in partition roce."""
    with tempfile.TemporaryDirectory(prefix="w", dir="/tmp") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLMES_TESTBED", f"{place}/bed")
        prolog = Path(place) / "prolog"
        prolog.write_text('#!/bin/sh\ntest "$SLURM_JOB_PARTITION" != roce\n')
        prolog.chmod(0o755)
        Path(place).chmod(0o755)
        shape = Path(place) / "limits.yaml"
        shape.write_text(TOPOLOGY.read_text() + f"slurm: {{AccountingStorageEnforce: limits, Prolog: {prolog}}}\n")
        beds.up(shape, progress=lambda line: print(f"testbed: {line}", file=sys.__stderr__, flush=True))
        try:
            for key, value in beds.env().items():
                patch.setenv(key, value)
            slurm("sacctmgr", "-i", "add", "qos", "one", "MaxJobsPerUser=1")
            slurm("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=one")
            slurm("sacctmgr", "-i", "add", "account", "tight")
            slurm("sacctmgr", "-i", "add", "user", "root", "account=tight")
            slurm("sacctmgr", "-i", "modify", "account", "tight", "set", "GrpTRES=cpu=1")
            preflight.clear_cache()
            yield
        finally:
            beds.down()


def waiting(where: Path, partition: str, seconds: float = 900, **more: Any) -> SlurmHetJob:
    made = submitit.AutoExecutor(where, cluster="slurmhet")
    own = {key: more.pop(key) for key in list(more) if key in ("cpus_per_task", "nodes")}
    made.update_parameters(timeout_min=30, slurm_partition=partition, slurm_additional_parameters=more, **own)
    return made.submit(sleeper, seconds)  # type: ignore[return-value]


def test_eight_ways_to_wait(limits: None, folder: Path) -> None:
    full = waiting(folder, "eth", nodes=2, exclusive=True)
    until(lambda: full.slurm_state().state == "RUNNING")
    alone = waiting(folder, "ib", qos="one")
    until(lambda: alone.slurm_state().state == "RUNNING")
    began = {}
    for reason, words in (
        ("Resources", {"partition": "eth", "exclusive": True}),
        ("Priority", {"partition": "eth", "exclusive": True}),
        ("JobHeldAdmin", {"begin": "now+1hour"}),
        ("QOSMaxJobsPerUserLimit", {"qos": "one"}),
        ("AssocGrpCpuLimit", {"account": "tight", "cpus_per_task": 2}),
        ("launch failed requeued held", {"partition": "roce"}),
        ("Dependency", {"dependency": f"afterany:{full.job_id}"}),
        ("BeginTime", {"begin": "now+1hour"}),
    ):
        began[reason] = waiting(folder, **{"partition": "ib", **words}), time.monotonic()  # type: ignore[arg-type]
    slurm("scontrol", "hold", began["JobHeldAdmin"][0].job_id)
    told: dict[str, float] = {}
    while len(told) < 8 and time.monotonic() < max(at for _, at in began.values()) + 3 * AT_ONCE_S:
        for reason, (job, at) in began.items():
            if reason not in told and job.slurm_state("standard").reason.replace("_", " ") == reason:
                told[reason] = time.monotonic() - at
        time.sleep(0.5)
    print(*(f"{reason}: after {seconds:.1f} s" for reason, seconds in told.items()), sep="\n")
    assert len(told) == 8 and max(told.values()) <= AT_ONCE_S
    time.sleep(max(0.0, LATER_S + max(at for _, at in began.values()) - time.monotonic()))
    for reason, (job, at) in began.items():
        state = job.slurm_state("standard")
        print(f"after {time.monotonic() - at:.0f} s: {state.state} ({state.why})")
        assert state.reason.replace("_", " ") == reason and state.waits and not job.done()


def test_more_components_than_a_qos_allows_are_refused(limits: None, folder: Path) -> None:
    with pytest.raises(utils.FailedSubmissionError, match=r"MaxJobsPU of QOS one is 1, and each of 2 components"):
        executor(folder, [{"partition": "ib", "qos": "one"}, {"partition": "eth", "qos": "one"}]).submit(sleeper, 0)


def test_verbs_say_why_a_run_waits(limits: None, folder: Path) -> None:
    run = start(folder, plans.quick, {"additional": {"begin": "now+1hour"}})
    (shown,) = json.loads(slurm(sys.executable, "-m", "holmes_hpc.cli", "status", str(run.path), "--json"))
    assert shown["state"] == "pending" and shown["why"].startswith("BeginTime, starts about ")

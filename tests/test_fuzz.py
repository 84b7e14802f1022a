"""Whatever is almost right is read, or refused in one line; `make fuzz` looks for what is neither, for an hour."""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import made_runs
import plans
import pytest
import slurm_text
import trees
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutations import UNUSUAL, changed, changed_text

from holmes_hpc.errors import HolmesError
from holmes_hpc.fabric.probe import probe
from holmes_hpc.fabric.site_file import parse_site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import parse_run
from holmes_hpc.slurm import hostlist, job_queries, scontrol
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.lifecycle import status
from holmes_hpc.submission.lifecycle.failed_rank import find_failed_rank, parse_srun_errors
from holmes_hpc.submission.lifecycle.outcome import build_result

SITE = yaml.safe_load("""
name: two-clusters
ethernet_gbps: 25
gpu: {name: a100-80gb, peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400}
fabrics:
- {name: ib-a, nic: ib, rdma_gbps: 200, partition: gpu-ib, nodes: 4, gpus_per_node: 8, hca: [mlx5_0]}
- {name: roce-a, nic: roce, rdma_gbps: 200, partition: gpu-roce, nodes: 4, gpus_per_node: 8, ethernet: eth0}
links: [{between: [ib-a, roce-a], gbps: 10, delay_ms: 5}]
""")
CALIBRATION = {
    "fabrics": [
        {
            "fabric": "ib-a",
            "gpu": "a100-80gb",
            "parts": [
                {
                    "part": "layer",
                    "hidden": 256,
                    "tokens": 128,
                    "tp": 1,
                    "flops": 1e6,
                    "forward_s": 0.01,
                    "backward_s": 0.02,
                }
            ],
            "links": {"ib": {"gbps": 190.0, "delay_s": 1e-5}},
            "optimizer_s": 1e-9,
            "pass_s": 1e-4,
        }
    ],
    "between": [{"between": ["ib-a", "roce-a"], "gbps": 9.0, "delay_ms": 5.0}],
    "step_s": 0.1,
    "dtype": "bf16",
}


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Inside, whatever is wrong is said in one line."""
    try:
        yield
    except HolmesError as e:
        assert "\n" not in str(e) and str(e).strip()


@cache
def plan() -> dict[str, Any]:
    return plans.plan("ib-a", "roce-a").to_dict()


def at(document: Any, *way: Any, value: Any = None, gone: bool = False) -> Any:
    """Return a copy of `document` with one part replaced, or removed if `gone`."""
    made = copy.deepcopy(document)
    *holders, last = way
    inside = made
    for key in holders:
        inside = inside[key]
    if gone:
        del inside[last]
    else:
        inside[last] = value
    return made


@given(changed(plan()))
@example(at(plan(), "transports", 3, "ranks", 1, value=9))
@example(at(plan(), "transports", 0, "kind", gone=True))
@settings(max_examples=25)
def test_plans(document: Any) -> None:
    with one_line():
        Plan.from_dict(document)


@given(changed(SITE))
@example(at(SITE, "ethernet_gbps", value="\ud800"))
@settings(max_examples=25)
def test_site_files(document: Any) -> None:
    with one_line():
        parse_site(document)


@given(changed(CALIBRATION))
@settings(max_examples=25)
def test_calibrations(document: Any) -> None:
    with one_line():
        Calibration.from_dict(document)


RUN = {
    "version": 1,
    "name": "a",
    "created": "2025-01-01T12:00:00+00:00",
    "plan_id": "61baf7367738",
    "slurm": {"job_id": 41, "components": 2, "name": "holmes-a", "submitted": 1735732801.2},
    "hosts": ["ib1", "ib2"],
    "attempts": [
        {
            "attempt": 1,
            "started": "2025-01-01T12:00:04+00:00",
            "host": "ib1",
            "by": "srun",
            "start": "41/0",
            "last_step": 3,
            "ended": "failed",
        }
    ],
    "overrides": ["train.steps=20"],
    "config": {"train": {"steps": 20, "max_restarts": 1}},
}
EXIT = {"rank": 1, "state": "failed", "error": "x", "host": "ib2", "attempt": 1, "time": 1735732830.1}
RESULT = {
    "version": 1,
    "state": "failed",
    "exit_code": 1,
    "error": "x",
    "failed_rank": 1,
    "failed_node": "ib2",
    "log_tail": ["a"],
    "final": {"step": 3, "loss": 4.0},
    "writer": "batch",
    "attempt": 1,
    "time": 1.0,
}
LINE = {
    "step": 3,
    "attempt": 1,
    "time": 1735732830.1,
    "step_time_s": 1.9,
    "loss": 4.8,
    "breakdown": [{"compute_s": 1.4}],
    "nic_bytes": {"ib-a": {"tx": 1, "rx": 1}},
}


@given(changed({"run": RUN, "exit": EXIT, "result": RESULT, "line": LINE}))
@example({"exit": at(EXIT, "rank", gone=True)})
@example({"exit": at(EXIT, "rank", value=None)})
@example({"exit": at(EXIT, "time", value="a")})
@example({"exit": at(EXIT, "attempt", value={})})
@example({"exit": at(EXIT, "attempt", value=float("inf"))})
@example({"run": at(RUN, "attempts", value=True)})
@example({"run": at(RUN, "config", value=[1])})
@example({"run": RUN, "line": at(LINE, "loss", value="x")})
@example({"run": RUN, "line": at(LINE, "loss", value=10**400)})
@example({"run": RUN, "result": at(RESULT, "final", value=[1])})
@example({"run": RUN, "result": at(RESULT, "log_tail", value=5)})
@example({"run": at(RUN, "attempts", value=False)})
@example({"run": at(RUN, "overrides", value=1)})
@example({"run": {**RUN, "local": {"pid": [1]}}})
@example({"run": {**RUN, "local": {"pid": 5, "started": "x"}}})
@settings(max_examples=25)
def test_run_records(document: Any) -> None:
    said = {**{"run": None, "exit": None, "result": None, "line": None}, **document}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(folder)
        run.exits.mkdir()
        run.logs.mkdir()
        run.run_path.write_text(plain_yaml(said["run"]))
        for path, part in ((run.exits / "n1.jsonl", "exit"), (run.result_path, "result"), (run.metrics_path, "line")):
            path.write_text(as_json(said[part]) + "\n")
        for read in (
            run.read_run,
            run.read_exits,
            run.read_result,
            run.metrics,
            lambda: build_result(run, 1),
            lambda: stands(run),
            lambda: run.attempt,
            lambda: run.config,
            lambda: list(run.read_run()["overrides"]),
            lambda: status.job_of(run),
        ):
            with one_line():
                read()


class Over:
    """A job that has ended."""

    id = "41"

    def state(self, mode: str = "standard") -> JobState:
        return JobState("FAILED", exit_code=1)


def stands(run: RunDirectory) -> None:
    """`holmes status` of it, and of a listing with it."""
    with mock.patch.object(status, "job_of", lambda _: Over()), mock.patch.object(status, "record_end", lambda *_: {}):
        row, _ = status.run_statuses([run, run])
        assert f"{row.step or 0:d} {row.steps or 0:d} {row.loss or 0:.4f} {row.step_time_s or 0:.3f}"
        assert all(isinstance(line, str) for line in row.log_tail)
        status.run_status(run)


def plain_yaml(document: Any) -> str:
    with contextlib.suppress(yaml.YAMLError, UnicodeEncodeError):
        return yaml.safe_dump(document, allow_unicode=False)
    return "{"


def as_json(document: Any) -> str:
    return json.dumps(document)


SACCT = slurm_text.sacct_line("41", "RUNNING", code="0:15") + slurm_text.sacct_line("41+1", "CANCELLED by 0")
SQUEUE = slurm_text.squeue_line("41", "PENDING", reason="Resources")
JOB = (
    "JobId=41 HetJobId=40 HetJobOffset=1 JobName=a UserId=u(1) Restarts=0 JobState=RUNNING Reason=None "
    "Dependency=(null) "
    "ExitCode=0:15 SubmitTime=1735732801 NodeList=ib[1-2]\n"
)
SAID = (
    "srun: error: ib2: task 3: Killed\nsrun: error: roce[1-2]: tasks 0-1: Exited with exit code 1\n"
    "srun: error: Node failure on ib1\n"
)
TEXTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "sacct": (SACCT, job_queries.parse_sacct),
    "squeue": (SQUEUE, job_queries.parse_squeue),
    "job": (JOB, job_queries.parse_scontrol),
    "node": (slurm_text.node_line("ib1", "nic_ib,nic_200g", gres="gpu:a100:8(S:0-1)"), scontrol.parse_node),
    "partition": (slurm_text.partition_line("ib", "ib[1-4]"), scontrol.parse_partition),
    "hostlist": ("ib[1-3,7],roce[01-04]x[1-2]", hostlist.expand),
    "minutes": ("1-12:00:00", scontrol.minutes),
    "config": ("SlurmctldHost[0] = head\nSLURM_VERSION = 22.05.8\n", scontrol.parse_config),
    "srun": (SAID, lambda text: find_failed_rank([], parse_srun_errors(text), 4)),
    "run.yaml": (yaml.safe_dump(RUN), parse_run),
}


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
@settings(max_examples=25)
def test_texts(name: str, data: st.DataObject) -> None:
    text, parse = TEXTS[name]
    parse(text)
    words = data.draw(changed_text(text))
    with one_line():
        parse(words)


def test_an_exit_code_that_is_none() -> None:
    assert job_queries.parse_sacct(slurm_text.sacct_line("41", "FAILED", code="0:x"))[0].exit_code is None


@given(
    changed(
        {
            "class": {"operstate": "up", "speed": "100000", "type": "1", "carrier": "1", "flags": "0x1003"},
            "port": {"rate": "200 Gb/sec (4X HDR)", "state": "4: ACTIVE", "link_layer": "InfiniBand"},
        }
    ),
    UNUSUAL,
)
@settings(max_examples=15)
def test_sysfs(files: Any, address: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = trees.Tree(Path(folder))
        card = tree.pci("0000:00:01.0", "0000:01:00.0")
        tree.net("ib0", card, speed=100000)
        tree.rdma("mlx5_0", card)
        for path, said in (
            (tree.root / "class/net/ib0", files.get("class")),
            (tree.root / "class/infiniband/mlx5_0/ports/1", files.get("port")),
        ):
            for name, text in said.items() if isinstance(said, dict) else ():
                if isinstance(name, str) and name and (path / name).is_file():
                    (path / name).write_bytes(str(text).encode(errors="surrogatepass"))
        with one_line():
            probe(tree.root, {"ib0": (str(address), 24)})


@given(changed(plan()))
@example(at(plan(), "transports", 0, "kind", gone=True))
@example(at(plan(), "model", "kv_heads", value=10**19))
@settings(max_examples=10)
def test_reports(document: Any) -> None:
    from holmes_hpc.results.report import load_report

    with tempfile.TemporaryDirectory() as folder:
        run = made_runs.make_run(Path(folder) / "run", steps=3)
        run.plan_path.write_text(plain_yaml(document))
        with one_line():
            load_report([run.path]).tables()

"""Runs of several ranks on this machine: a tiny plan, a configuration, processes, and their records."""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leftovers import exempt

from holmes_hpc import ports
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, Parallel, StageParallel
from holmes_hpc.planning.plan.plan import Component, Plan, Schedule, Stage
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.records.run import RunDirectory

MODEL = ModelSpec("tiny", layers=6, hidden=32, heads=4, vocab=250, ffn=64, kv_heads=2, max_positions=32)
BATCH = Batch(global_size=8, micro_size=1, sequence_length=16)
TRAIN = TrainConfig(
    steps=4,
    device="cpu",
    dtype="fp32",
    lr=1e-2,
    min_lr=1e-3,
    warmup_steps=2,
    eval_steps=2,
    checkpoint_async=False,
    watchdog_s=600,
    net_timeout_s=300,
)
DATA = DataConfig(split="90,10", learnable=True)
LIMIT_S = 150  # for each wait: enough for a busy machine, and far below the run's own time-outs


def plan(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    *,
    layers: list[list[int]] | None = None,
    model: ModelSpec = MODEL,
    batch: Batch = BATCH,
    schedule: str | None = None,
    fabrics: bool = True,
    **fields: Any,
) -> Plan:
    """Return a plan whose stages are in separate fabrics, with nodes of TP ranks.

    `layers`: per stage, its chunks."""
    layers = layers or [[model.layers // pp]] * pp
    chunks = len(layers[0])
    parallel = Parallel.uniform(
        tp=tp,
        pp=pp,
        dp=dp,
        virtual_stages=chunks,
        **{k: fields.pop(k) for k in list(fields) if k in Parallel.__dataclass_fields__},
    )
    kinds = [NicType.IB, NicType.ROCE, NicType.ETHERNET]
    sites, components, stages = [], [], []
    for s in range(pp):
        kind = kinds[s % 3] if fabrics else NicType.IB
        name = f"{kind}-{s}" if fabrics else "ib-0"
        sites.append(
            Pool(
                name,
                kind,
                str(kind),
                dp if fabrics else dp * pp,
                tp,
                0.05,
                CPU,
                rdma_gbps=0.4 if kind.rdma else None,
                gres=False,
            )
        )
        components.append(Component(str(kind), "", name, dp if fabrics else dp * pp, tp, (s,)))
        stages.append(Stage(name, sum(layers[s]), tuple(layers[s])))
    if not fabrics:
        sites, components = sites[:1], [Component("ib", "", "ib-0", dp * pp, tp, tuple(range(pp)))]
    schedule_kind = schedule or ("interleaved" if chunks > 1 else "1f1b")
    in_flight = tuple(fields.pop("in_flight", [pp - s if chunks == 1 else 2 * pp * chunks for s in range(pp)]))
    deferred = tuple(fields.pop("deferred", ()))
    return Plan(
        "pipeline" if pp > 1 and fabrics else "one-fabric",
        model,
        batch,
        parallel,
        fields.pop("recompute", "none"),
        Schedule(schedule_kind, in_flight, deferred, tuple(fields.pop("final", (1,) * len(deferred)))),
        tuple(components),
        tuple(stages),
        Site("test", tuple(sites)),
        bucket_bytes=fields.pop("bucket_bytes", 20_000),
        **fields,
    )


def unequal(
    *widths: tuple[int, ...],
    layers: list[int] | None = None,
    weights: dict[int, list[float]] | None = None,
    model: ModelSpec = MODEL,
    batch: Batch = BATCH,
    **fields: Any,
) -> Plan:
    """Return a plan of stages with (TP, DP) or (TP, DP, CP) each, in separate fabrics, with nodes of TP ranks.

    `weights`: of a stage's replicas, if they differ."""
    layers = layers or [model.layers // len(widths)] * len(widths)
    kinds = [NicType.IB, NicType.ROCE, NicType.ETHERNET]
    sites = [
        Pool(
            f"{kinds[s % 3]}-{s}",
            kinds[s % 3],
            str(kinds[s % 3]),
            dp * math.prod(cp),
            tp,
            0.05,
            CPU,
            rdma_gbps=0.4 if kinds[s % 3].rdma else None,
            gres=False,
        )
        for s, (tp, dp, *cp) in enumerate(widths)
    ]
    stage_parallels = tuple(
        StageParallel(tp, dp, tuple((weights or {}).get(s, ())), *cp) for s, (tp, dp, *cp) in enumerate(widths)
    )
    in_flight = tuple(fields.pop("in_flight", least_in_flight(tuple(dp for _, dp, *_ in widths))))
    return Plan(
        "pipeline",
        model,
        batch,
        Parallel(stage_parallels, sequence_parallel=max(tp for tp, *_ in widths) > 1),
        "none",
        Schedule("ahead", in_flight),
        tuple(Component(f.partition, "", f.name, f.nodes, f.gpus_per_node, (s,)) for s, f in enumerate(sites)),
        tuple(Stage(f.name, n) for f, n in zip(sites, layers, strict=True)),
        Site("test", tuple(sites)),
        bucket_bytes=fields.pop("bucket_bytes", 20_000),
        **fields,
    )


def shared(pp: int, weights: list[float], model: ModelSpec = MODEL, batch: Batch = BATCH) -> Plan:
    """Return a plan of whole pipelines with these shares of a step, in two pools of one fabric.

    The first pipeline is in the first pool, the others in the second."""
    pools = [
        Pool(name, NicType.IB, name, nodes, pp, 0.05, CPU, rdma_gbps=0.4, gres=False, fabric="ib")
        for name, nodes in (("fast", 1), ("slow", len(weights) - 1))
    ]
    return Plan(
        "hierarchical-dp",
        model,
        batch,
        Parallel((StageParallel(1, len(weights), tuple(weights)),) * pp, order=HIERARCHICAL_ORDER),
        "none",
        Schedule("ahead", least_in_flight((1,) * pp)),
        tuple(Component(p.partition, "", p.name, p.nodes, pp) for p in pools),
        tuple(Stage("fast", model.layers // pp) for _ in range(pp)),
        Site("test", tuple(pools)),
        bucket_bytes=20_000,
    )


@dataclass
class FinishedRun:
    """A run that ended. `codes`: exit code per rank; `output`: the output of rank 0."""

    run: RunDirectory
    codes: list[int]
    output: list[str]

    def log(self, rank: int) -> str:
        return self.run.log_path(rank).read_text()

    def column(self, name: str) -> list[Any]:
        return [line[name] for line in self.run.metrics()]

    def flagged(self, name: str) -> list[int]:
        """Return the steps whose metrics line has the flag `name`."""
        return [line["step"] for line in self.run.metrics() if line.get(name)]


def first_ephemeral() -> int:
    """Return the lowest port that the system may assign to outgoing connections; tests listen below it."""
    try:
        return max(10001, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except OSError:  # not Linux
        return 32768


def free_port() -> int:
    """Return a free port below the range for outgoing connections."""
    candidates = list(range(10_000, first_ephemeral()))
    random.shuffle(candidates)
    port = ports.free_port(candidates, "127.0.0.1")
    assert port is not None
    return port


class Nursery:
    """The process that has loaded torch and forks ranks; it ends with the tests."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER"))}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_main.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # Importing Megatron-Core queries the CUDA driver, after which CUDA does not work in a fork. With this
            # variable, torch queries NVML instead.
            env={**environment, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        self._pids: queue.Queue[int] = queue.Queue()
        self._ready = threading.Event()
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        exempt(self._process.pid)
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.kill)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fields = line.split()
            if fields[0] == "ready":
                self._ready.set()
            elif fields[0] == "pid":
                with self.changed:
                    self.codes.pop(int(fields[1]), None)  # from an earlier process with this id
                self._pids.put(int(fields[1]))
            elif fields[0] == "exit":
                with self.changed:
                    self.codes[int(fields[1])] = int(fields[2])
                    self.changed.notify_all()

    def loaded(self) -> None:
        """Wait until the process can fork ranks at once."""
        assert self._ready.wait(300)

    def fork(self, environment: dict[str, str], config: Path, output: Path) -> int:
        assert self._process.stdin is not None
        sys.audit("tests.process", "a rank")
        self._process.stdin.write(
            json.dumps({"environment": environment, "config": str(config), "output": str(output)}) + "\n"
        )
        self._process.stdin.flush()
        return self._pids.get(timeout=180)  # the first rank waits until torch is loaded

    def code(self, pid: int, timeout_s: float) -> int | None:
        """Return the exit code of a rank; None if it did not end in time."""
        with self.changed:
            self.changed.wait_for(lambda: pid in self.codes, timeout_s)
            return self.codes.get(pid)


_nursery: Nursery | None = None


def nursery() -> Nursery:
    global _nursery
    if _nursery is None:
        _nursery = Nursery()
    return _nursery


@dataclass
class RunningRun:
    """A run in progress."""

    run: RunDirectory
    pids: list[int]
    outputs: list[Path]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def wait_for_step(self, step: int, timeout_s: float = LIMIT_S) -> None:
        """Wait until the record has `step`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            lines = self.run.metrics()
            if lines and lines[-1]["step"] >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"no step {step} in {timeout_s} s: {[p.read_text()[-2000:] for p in self.outputs]}")

    def wait_for_line(self, text: str, timeout_s: float = LIMIT_S) -> None:
        """Wait until rank 0's log has `text`."""
        end = time.monotonic() + timeout_s
        while text not in self.run.log_path(0).read_text():
            assert time.monotonic() < end, f"no {text!r} in {timeout_s} s: {self.outputs[0].read_text()[-2000:]}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = LIMIT_S) -> FinishedRun:
        """Wait for the ranks; a rank that does not end is killed and has the code -9."""
        end, codes = time.monotonic() + timeout_s, []
        for rank, pid in enumerate(self.pids):
            code = nursery().code(pid, max(0.1, end - time.monotonic()))
            if code is None:
                self.kill(rank)
                code = nursery().code(pid, 10)
            codes.append(-9 if code is None else code)
        return FinishedRun(self.run, codes, [p.read_text() for p in self.outputs])


def configuration(directory: Path, plan_file: Path | None, overrides: dict[str, Any] | None = None) -> Configuration:
    """Return a run's configuration: `overrides`, with groups `train` and `data` over the defaults above."""
    overrides = dict(overrides or {})
    return Configuration(
        MODEL,
        BATCH,
        train=replace(TRAIN, **overrides.pop("train", {})),
        data=replace(DATA, **overrides.pop("data", {})),
        run_dir=str(directory),
        plan_file=str(plan_file) if plan_file else None,
        **overrides,
    )


def begin(
    directory: Path,
    plan_or_path: Plan | Path,
    config: dict[str, Any] | None = None,
    *,
    ranks: int | None = None,
    environment: dict[int, dict[str, str]] | None = None,
    rendezvous: str = "file",
    absent: tuple[int, ...] = (),
) -> RunningRun:
    """Start the ranks of a run (a new one, or another attempt of the one in `directory`) except `absent`.

    `config`: the differences from :func:`configuration`."""
    plan_file = directory / "this-plan.yaml" if isinstance(plan_or_path, Plan) else plan_or_path
    values = configuration(directory, plan_file, config).to_dict()
    run = RunDirectory(directory)
    if not run.exists():
        RunDirectory.create(directory, plan_or_path.to_yaml() if isinstance(plan_or_path, Plan) else None, values)
    if isinstance(plan_or_path, Plan):
        plan_or_path.write(plan_file)
    size = ranks or (plan_or_path.world_size if isinstance(plan_or_path, Plan) else 1)
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    port, started = str(free_port()), RunningRun(run, [], [])
    for rank in [r for r in range(size) if r not in absent]:
        rank_environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": f"test-{port}",
        }
        if rendezvous == "env":
            rank_environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        output = directory / f"output-{rank}.txt"
        output.unlink(missing_ok=True)
        output.touch()
        started.outputs.append(output)
        started.pids.append(nursery().fork({**rank_environment, **(environment or {}).get(rank, {})}, path, output))
    return started


def train(directory: Path, plan: Plan, config: dict[str, Any] | None = None, **options: Any) -> FinishedRun:
    """Run a plan to the end."""
    return begin(directory, plan, config, **options).finish()

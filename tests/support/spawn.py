"""Runs of several ranks on this machine, for tests: a tiny plan, a configuration, processes, and what they recorded."""

from __future__ import annotations

import atexit
import json
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

from leftovers import stays

from holmes_hpc import ports
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.spec.parallel import Parallel, StageParallel
from holmes_hpc.planning.spec.plan import Component, Plan, Schedule, Stage
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
LIMIT_S = 150  # for whatever a run here does, on a busy machine too, and far below its own time-outs


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
    **more: Any,
) -> Plan:
    """A plan whose stages lie in fabrics of their own, nodes of TP ranks. `layers`: per stage, its chunks."""
    layers = layers or [[model.layers // pp]] * pp
    chunks = len(layers[0])
    parallel = Parallel.uniform(
        tp=tp,
        pp=pp,
        dp=dp,
        virtual_stages=chunks,
        **{k: more.pop(k) for k in list(more) if k in Parallel.__dataclass_fields__},
    )
    kinds = [NicType.IB, NicType.ROCE, NicType.ETHERNET]
    sites, components, stages = [], [], []
    for s in range(pp):
        kind = kinds[s % 3] if fabrics else NicType.IB
        name = f"{kind}-{s}" if fabrics else "ib-0"
        sites.append(
            Fabric(
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
    kind_of_schedule = schedule or ("interleaved" if chunks > 1 else "1f1b")
    in_flight = tuple(more.pop("in_flight", [pp - s if chunks == 1 else 2 * pp * chunks for s in range(pp)]))
    return Plan(
        "pipeline" if pp > 1 and fabrics else "one-fabric",
        model,
        batch,
        parallel,
        more.pop("recompute", "none"),
        Schedule(kind_of_schedule, in_flight),
        tuple(components),
        tuple(stages),
        Site("test", tuple(sites)),
        bucket_bytes=more.pop("bucket_bytes", 20_000),
        **more,
    )


def unequal(
    *widths: tuple[int, int],
    layers: list[int] | None = None,
    weights: dict[int, list[float]] | None = None,
    model: ModelSpec = MODEL,
    batch: Batch = BATCH,
    **more: Any,
) -> Plan:
    """A plan of stages of (TP, DP) each, in fabrics of their own, nodes of TP ranks. `weights`: of a stage's replicas,
    where they are not all the same."""
    layers = layers or [model.layers // len(widths)] * len(widths)
    kinds = [NicType.IB, NicType.ROCE, NicType.ETHERNET]
    sites = [
        Fabric(
            f"{kinds[s % 3]}-{s}",
            kinds[s % 3],
            str(kinds[s % 3]),
            dp,
            tp,
            0.05,
            CPU,
            rdma_gbps=0.4 if kinds[s % 3].rdma else None,
            gres=False,
        )
        for s, (tp, dp) in enumerate(widths)
    ]
    made = tuple(StageParallel(tp, dp, tuple((weights or {}).get(s, ()))) for s, (tp, dp) in enumerate(widths))
    in_flight = tuple(more.pop("in_flight", least_in_flight(tuple(dp for _, dp in widths))))
    return Plan(
        "pipeline",
        model,
        batch,
        Parallel(made, sequence_parallel=max(tp for tp, _ in widths) > 1),
        "none",
        Schedule("ahead", in_flight),
        tuple(Component(f.partition, "", f.name, f.nodes, f.gpus_per_node, (s,)) for s, f in enumerate(sites)),
        tuple(Stage(f.name, n) for f, n in zip(sites, layers, strict=True)),
        Site("test", tuple(sites)),
        bucket_bytes=more.pop("bucket_bytes", 20_000),
        **more,
    )


@dataclass
class Ended:
    """What came of a run. `codes`: exit code per rank; `output`: what rank 0 printed."""

    run: RunDirectory
    codes: list[int]
    output: list[str]

    def log(self, rank: int) -> str:
        return self.run.log_path(rank).read_text()

    def column(self, name: str) -> list[Any]:
        return [line[name] for line in self.run.metrics()]


def free_port() -> int:
    """A port below those that connections of other programs are given."""
    candidates = list(range(10_000, ports.first_ephemeral()))
    random.shuffle(candidates)
    found = ports.free_port(candidates, "127.0.0.1")
    assert found is not None
    return found


class Nursery:
    """The process that has loaded torch and forks ranks; it ends with the tests."""

    def __init__(self) -> None:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER"))}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_main.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # CUDA does not work in a fork of a process that has asked the driver for devices, as importing
            # Megatron-Core does; with this variable torch asks NVML instead
            env={**own, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        self._pids: queue.Queue[int] = queue.Queue()
        self._ready = threading.Event()
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        stays(self._process.pid)
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._process.kill)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if words[0] == "ready":
                self._ready.set()
            elif words[0] == "pid":
                with self.changed:
                    self.codes.pop(int(words[1]), None)  # of an earlier process with this number
                self._pids.put(int(words[1]))
            elif words[0] == "exit":
                with self.changed:
                    self.codes[int(words[1])] = int(words[2])
                    self.changed.notify_all()

    def loaded(self) -> None:
        """Wait until it can fork ranks at once."""
        assert self._ready.wait(300)

    def fork(self, environment: dict[str, str], config: Path, output: Path) -> int:
        assert self._process.stdin is not None
        sys.audit("tests.process", "a rank")
        self._process.stdin.write(
            json.dumps({"environment": environment, "config": str(config), "output": str(output)}) + "\n"
        )
        self._process.stdin.flush()
        return self._pids.get(timeout=180)  # the first one waits for torch to load

    def code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a rank, None when it did not end in time."""
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
class Started:
    """A run under way."""

    run: RunDirectory
    pids: list[int]
    outputs: list[Path]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def wait_for_step(self, step: int, timeout_s: float = LIMIT_S) -> None:
        """Until the record holds `step`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            lines = self.run.metrics()
            if lines and lines[-1]["step"] >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"no step {step} in {timeout_s} s: {[p.read_text()[-2000:] for p in self.outputs]}")

    def finish(self, timeout_s: float = LIMIT_S) -> Ended:
        """Wait for the ranks; one that does not end is killed and has the code -9."""
        end, codes = time.monotonic() + timeout_s, []
        for rank, pid in enumerate(self.pids):
            code = nursery().code(pid, max(0.1, end - time.monotonic()))
            if code is None:
                self.kill(rank)
                code = nursery().code(pid, 10)
            codes.append(-9 if code is None else code)
        return Ended(self.run, codes, [p.read_text() for p in self.outputs])


def configuration(directory: Path, plan_file: Path | None, given: dict[str, Any] | None = None) -> Configuration:
    """Of a run in `directory`: `given`, its groups `train` and `data` over those above."""
    given = dict(given or {})
    return Configuration(
        MODEL,
        BATCH,
        train=replace(TRAIN, **given.pop("train", {})),
        data=replace(DATA, **given.pop("data", {})),
        run_dir=str(directory),
        plan_file=str(plan_file) if plan_file else None,
        **given,
    )


def begin(
    directory: Path,
    what: Plan | Path,
    config: dict[str, Any] | None = None,
    *,
    ranks: int | None = None,
    environment: dict[int, dict[str, str]] | None = None,
    rendezvous: str = "file",
    absent: tuple[int, ...] = (),
) -> Started:
    """Start the ranks of a run (a new one, or another attempt of the one in `directory`), but those `absent`.
    `config`: what is other than in :func:`configuration`."""
    plan_file = directory / "this-plan.yaml" if isinstance(what, Plan) else what
    values = configuration(directory, plan_file, config).to_dict()
    run = RunDirectory(directory)
    if not run.exists():
        RunDirectory.create(directory, what.to_yaml() if isinstance(what, Plan) else None, values)
    if isinstance(what, Plan):
        what.write(plan_file)
    size = ranks or (what.world_size if isinstance(what, Plan) else 1)
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    port, started = str(free_port()), Started(run, [], [])
    for rank in [r for r in range(size) if r not in absent]:
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RUN_ID": f"test-{port}",
        }
        if rendezvous == "env":
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        output = directory / f"output-{rank}.txt"
        output.unlink(missing_ok=True)
        output.touch()
        started.outputs.append(output)
        started.pids.append(nursery().fork({**own, **(environment or {}).get(rank, {})}, path, output))
    return started


def train(directory: Path, what: Plan, config: dict[str, Any] | None = None, **more: Any) -> Ended:
    """Run `what` to its end."""
    return begin(directory, what, config, **more).finish()

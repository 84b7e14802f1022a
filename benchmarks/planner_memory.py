"""Compare predicted and measured memory of CPU ranks: the peak bytes of live tensor storage over some steps.

    python benchmarks/planner_memory.py [CASE...]

Ranks are processes on this machine. An allocation tracker sees every tensor of PyTorch; gloo's buffers are no tensors
and do not count. Runs use at least 300 MB per rank, and their stages differ by at least a factor of 1.5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import Batch, Experts, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.records.run import RunDirectory

MODEL = ModelSpec("memory", 12, 512, 8, 16000, ffn=1376, kv_heads=8, max_positions=512)
BATCH = Batch(16, 2, 256)


@dataclass(frozen=True)
class Case:
    """A plan's options, and the differences from MODEL and BATCH.

    `in_flight`: the depth under eager 1F1B, as for slow transfers (these runs have none)."""

    options: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    in_flight: tuple[int, ...] | None = None
    steps: int = 3

    def plan(self) -> Plan:
        ranks = prod(self.options.get(size, 1) for size in ("tp", "pp", "dp", "cp"))
        fabric = Pool("local", NicType.ETHERNET, "local", 1, ranks, 10.0, replace(CPU, memory_gib=64), gres=False)
        plan = fixed_plan(
            replace(MODEL, **self.model),
            replace(BATCH, **self.batch),
            Site("local", (fabric,)),
            PlanOptions(**self.options),
            Costs(),
        )
        if self.in_flight is None:
            return plan
        deeper_plan = replace(plan, schedule=Schedule("ahead", self.in_flight))
        return replace(deeper_plan, predicted=predict(deeper_plan, Costs()))


CASES = {
    "pp2": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4]}),
    "pp2 ahead": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [6, 6], "schedule": "ahead"}),
    "pp2 ahead, deeper": Case(
        {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [6, 6], "schedule": "ahead"}, in_flight=(5, 1)
    ),
    "pp3 ahead, deeper": Case(
        {"tp": 1, "pp": 3, "dp": 1, "layers_per_stage": [4, 4, 4], "schedule": "ahead"}, in_flight=(7, 4, 1)
    ),
    "pp2 full recomputation": Case(
        {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4], "recompute": "full"},
        batch={"micro_size": 8, "global_size": 32},
    ),
    "pp2 selective": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4], "recompute": "selective"}),
    "dp2 pp2": Case({"tp": 1, "pp": 2, "dp": 2, "layers_per_stage": [8, 4]}),
    "tp2 pp2": Case({"tp": 2, "pp": 2, "dp": 1, "layers_per_stage": [8, 4], "sequence_parallel": True}),
    "interleaved": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4], "virtual_stages": 2}),
    "gpt2": Case(
        {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4]},
        model={"swiglu": False, "rmsnorm": False, "rope": False, "bias": True, "tied": True, "ffn": 2048},
    ),
    "gqa": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4]}, model={"kv_heads": 2}),
    "dropout": Case({"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [8, 4]}, model={"dropout": 0.1}),
    "experts": Case({"tp": 1, "pp": 1, "dp": 2, "ep": 1}, model={"layers": 6, "experts": Experts(8, 2, ffn=512)}),
    "experts, ep2": Case({"tp": 1, "pp": 1, "dp": 2, "ep": 2}, model={"layers": 6, "experts": Experts(8, 2, ffn=512)}),
    "experts, all-gather": Case(
        {"tp": 1, "pp": 1, "dp": 4, "ep": 4, "ep_comm": "allgather"},
        model={"layers": 6, "experts": Experts(8, 2, ffn=512)},
    ),
    "wide experts": Case({"tp": 1, "pp": 1, "dp": 2, "ep": 1}, model={"layers": 4, "experts": Experts(4)}),
    "wide experts, ep2": Case({"tp": 1, "pp": 1, "dp": 2, "ep": 2}, model={"layers": 4, "experts": Experts(4)}),
    "first layers dense": Case(
        {"tp": 1, "pp": 2, "dp": 2, "ep": 2, "layers_per_stage": [5, 3]},
        model={"layers": 8, "experts": Experts(8, 2, ffn=512, first_dense=2)},
    ),
    "long": Case(  # a quarter of an hour
        {"tp": 1, "pp": 1, "dp": 1, "cp": 4},
        model={"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 256, "vocab": 256, "max_positions": 131072},
        batch={"global_size": 1, "micro_size": 1, "sequence_length": 131072},
        steps=1,
    ),
}


def measure_peak(run: Any) -> tuple[Any, int]:
    """Call `run()`; return its value and the peak bytes of live tensor storage."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Tracker(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.alive, self.bytes, self.peak = dict[int, int](), 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
            for leaf in tree_leaves(args):  # Megatron frees outputs by resize_() of their storage
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
            return outputs

        def track(self, tensor: torch.Tensor) -> None:
            if tensor.device.type == "meta":
                return
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.alive:
                weakref.finalize(storage, self.release, key)
                self.alive[key] = 0
            self.bytes += size - self.alive[key]
            self.alive[key] = size
            self.peak = max(self.peak, self.bytes)

        def release(self, key: int) -> None:
            self.bytes -= self.alive.pop(key)

    with Tracker() as tracker:
        value = run()
    return value, tracker.peak


def run_ranks_tracked(path: str, ranks: int) -> int:
    """Train with `ranks` forks of this process; each writes its peak bytes into the run directory.

    Return the number of ranks that failed."""
    from holmes_hpc import rank
    from holmes_hpc.training.rank import compiler

    compiler.disable()  # the tracker would load the compiler, which ranks on CPUs do not use
    config = json.loads(Path(path).read_text())
    rank.run_rank.load(config)  # type: ignore[attr-defined]
    children = []
    for index in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(index), LOCAL_RANK=str(index))
            _, peak = measure_peak(lambda: rank.run_rank(config))
            Path(config["run_dir"], f"bytes-{index}").write_text(str(peak))
            return 0
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def measure(plan: Plan, directory: Path, steps: int) -> list[int]:
    """Run `steps` steps of a plan; return the measured peak bytes of every rank."""
    from holmes_hpc.config.composition import load

    config = load(["data=synthetic", f"train.steps={steps}", "train.device=cpu"]).to_dict()
    run = RunDirectory.create(directory / "run", plan.to_yaml(), config, [])
    config |= {"plan_file": str(run.plan_path), "run_dir": str(run.path)}
    path, ranks = directory / "config.json", str(plan.world_size)
    path.write_text(json.dumps(config))
    launch = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": directory.name}
    failed = subprocess.run(
        [sys.executable, __file__, "--ranks", str(path), ranks],
        env={**os.environ, **launch, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode
    if failed:
        raise SystemExit(f"{failed} ranks failed; see their logs in {run.logs}")
    return [int((run.path / f"bytes-{i}").read_text()) for i in range(plan.world_size)]


def main(names: list[str]) -> None:
    print(
        f"{MODEL.layers} layers x {MODEL.hidden}, vocabulary {MODEL.vocab}, {BATCH.sequence_length} tokens,"
        f" micro-batches of {BATCH.micro_size}; bytes per stage, predicted and measured"
    )
    worst = 0.0
    for name in names or list(CASES):
        plan = CASES[name].plan()
        with tempfile.TemporaryDirectory(prefix="holmes-memory-") as folder:
            measured = measure(plan, Path(folder), CASES[name].steps)
        assert plan.predicted is not None
        per_stage = plan.world_size // plan.parallel.pp
        for stage, predicted in enumerate(plan.predicted.memory_bytes_per_gpu):
            measured_bytes = max(measured[stage * per_stage : (stage + 1) * per_stage])
            worst = max(worst, abs(predicted / measured_bytes - 1))
            print(
                f"{name:24} stage {stage}: {predicted / 1e6:7.1f} MB predicted, "
                f"{measured_bytes / 1e6:7.1f} MB measured, {predicted / measured_bytes - 1:+.1%}",
                flush=True,
            )
    print(f"largest error {worst:.1%} (at most 8%)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ranks"]:
        sys.exit(run_ranks_tracked(sys.argv[2], int(sys.argv[3])))
    else:
        main(sys.argv[1:])

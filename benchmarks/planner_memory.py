"""Predicted against measured memory of CPU ranks: the most bytes of live tensor storage of each rank, over some steps.

    python benchmarks/planner_memory.py [CASE...]

Ranks are processes on this machine; an allocation tracker sees every tensor that PyTorch makes (gloo's own buffers are
not tensors and stay out). Runs have 300 MB a rank and more, and stages that differ by 1.5 times and more.
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
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.records.run import RunDirectory

MODEL = ModelSpec("memory", 12, 512, 8, 16000, ffn=1376, kv_heads=8, max_positions=512)
BATCH = Batch(16, 2, 256)
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A plan's options, and what differs from MODEL and BATCH. `in_flight`: under the schedule that runs ahead, as deep
    as for a slow transfer, which there is none of here."""

    options: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    in_flight: tuple[int, ...] | None = None

    def plan(self) -> Plan:
        ranks = self.options["tp"] * self.options["pp"] * self.options["dp"]
        fabric = Fabric("here", NicType.ETHERNET, "here", 1, ranks, 10.0, replace(CPU, memory_gib=64), gres=False)
        made = fixed_plan(
            replace(MODEL, **self.model),
            replace(BATCH, **self.batch),
            Site("here", (fabric,)),
            PlanOptions(**self.options),
            Costs(),
        )
        if self.in_flight is None:
            return made
        deeper = replace(made, schedule=Schedule("ahead", self.in_flight))
        return replace(deeper, predicted=predict(deeper, Costs()))


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
}


def tracked(run: Any) -> tuple[Any, int]:
    """`run()`, and the most bytes of tensor storage that were alive at any moment of it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Tracker(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.alive, self.bytes, self.most = dict[int, int](), 0, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(made):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
            for leaf in tree_leaves(args):  # resize_() of a storage that is known: Megatron frees outputs that way
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
            return made

        def see(self, tensor: torch.Tensor) -> None:
            if tensor.device.type == "meta":
                return
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.alive:
                weakref.finalize(storage, self.gone, key)
                self.alive[key] = 0
            self.bytes += size - self.alive[key]
            self.alive[key] = size
            self.most = max(self.most, self.bytes)

        def gone(self, key: int) -> None:
            self.bytes -= self.alive.pop(key)

    with Tracker() as tracker:
        made = run()
    return made, tracker.most


def rank(path: str) -> None:
    """One rank: train, and write the most bytes beside the configuration."""
    from holmes_hpc.rank import run_rank

    config = json.loads(Path(path).read_text())
    _, most = tracked(lambda: run_rank(config))
    Path(config["run_dir"], f"bytes-{os.environ['RANK']}").write_text(str(most))


def measure(plan: Plan, directory: Path) -> list[int]:
    """Measured bytes of every rank."""
    from holmes_hpc.config.composition import load

    config = load(["data=synthetic", f"train.steps={STEPS}", "train.device=cpu"]).to_dict()
    run = RunDirectory.create(directory / "run", plan.to_yaml(), config, [])
    config |= {"plan_file": str(run.plan_path), "run_dir": str(run.path)}
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    ranks = []
    for index in range(plan.world_size):
        place = {"RANK": index, "WORLD_SIZE": plan.world_size, "LOCAL_RANK": index, "LOCAL_WORLD_SIZE": plan.world_size}
        environment = {
            **os.environ,
            **{k: str(v) for k, v in place.items()},
            "TORCHELASTIC_RUN_ID": directory.name,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, "--member", str(path)],
                env=environment,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    codes = [r.wait() for r in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}; their logs are in {run.logs}")
    return [int((run.path / f"bytes-{i}").read_text()) for i in range(plan.world_size)]


def main(names: list[str]) -> None:
    print(
        f"{MODEL.layers} layers x {MODEL.hidden}, vocabulary {MODEL.vocab}, {BATCH.sequence_length} tokens,"
        f" micro-batches of {BATCH.micro_size}; bytes per stage, predicted and measured"
    )
    worst = 0.0
    for name in names or list(CASES):
        plan = CASES[name].plan()
        with tempfile.TemporaryDirectory(prefix="holmes-memory-") as made:
            measured = measure(plan, Path(made))
        assert plan.predicted is not None
        per_stage = plan.world_size // plan.parallel.pp
        for stage, predicted in enumerate(plan.predicted.memory_bytes_per_gpu):
            found = max(measured[stage * per_stage : (stage + 1) * per_stage])
            worst = max(worst, abs(predicted / found - 1))
            print(
                f"{name:24} stage {stage}: {predicted / 1e6:7.1f} MB predicted, {found / 1e6:7.1f} MB measured,"
                f" {predicted / found - 1:+.1%}",
                flush=True,
            )
    print(f"largest error {worst:.1%} (at most 8%)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        rank(sys.argv[2])
    else:
        main(sys.argv[1:])

"""Run one part of gpu_proof.py in this process: `gpu_proof_parts.py PART DEVICE OUT.json`.

A part is a function of the device (cuda, or cpu for a test) that returns figures; ``wrong`` lists its failures. It
writes its figures after each step, so that a time limit does not lose them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_proof_models import BILLION, LAYERS_8B, LAYOUTS, MIXTURE, SMALL, TINY
from gpu_proof_processes import ROOT, last_line, run_script, train_ranks

from holmes_hpc.records.run import RunDirectory

FOLDER = Path(__file__).resolve().parent
Figures = dict[str, Any]
NOISE = 1e-4  # relative, of a loss: a GPU sums attention's gradients in any order
SHAPES_S = 8.0  # for calibrate's other shapes; a real calibration takes longer


def write_figures(figures: Figures) -> None:
    """Write the figures so far."""
    _keep("json", json.dumps(figures))


def _keep(ending: str, text: str) -> None:
    """Write a file of the part: OUT with another ending."""
    if len(sys.argv) == 4:
        Path(sys.argv[3]).with_suffix(f".{ending}").write_text(text)


def start(device: str) -> Figures:
    """Start pairs of processes with a step of eager 1F1B, over host-staged edges and over NCCL.

    Both ranks share a GPU, so NCCL treats them as two hosts and uses sockets."""
    figures: Figures = {"seconds": {}, "wrong": []}
    backends = (
        [("gloo", "LAZY"), ("gloo", "EAGER"), ("nccl", "LAZY"), ("nccl", "EAGER")]
        if device == "cuda"
        else [("gloo", "LAZY")]
    )
    for backend, loading in backends:
        start_s = time.monotonic()
        process = run_script(
            _START.format(device=device, backend=backend, limit_s=40 if device == "cuda" else 280),
            45 if device == "cuda" else 300,  # four fit into the part's limit
            {"CUDA_MODULE_LOADING": loading},
        )
        figures["seconds"][f"{backend} {loading.lower()}"] = round(time.monotonic() - start_s, 1)
        if process.returncode:
            figures["wrong"].append(f"{backend}, {loading.lower()} loading: {last_line(process)}")
        write_figures(figures)
    return figures


_START = """
import sys; sys.path.insert(0, {support!r})
from pipelines import Case, play
ranks_of_cases = play([Case(layers=[[1], [1]], micro_batches=[8], schedule="ahead", in_flight=[4, 1], steps=2,
                 device="{{device}}", backend="{{backend}}", trace=False)], {{limit_s}})
assert all(len(rank["gradients"]) == 2 for rank in ranks_of_cases[0])
""".format(support=str(ROOT / "tests" / "support"))


def tests(device: str) -> Figures:
    """Run `pytest -m gpu`; count the passed tests and name the failed and skipped ones."""
    options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "120", str(ROOT / "tests" / "training")]
    figures: Figures = {"passed": 0, "wrong": []}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if not (outcome := re.match(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", line)):
                continue
            if outcome[2] == "PASSED":
                figures["passed"] += 1
            else:
                figures["wrong"].append(f"{outcome[2].lower()}: {outcome[1].rpartition('::')[2]}")
            write_figures(figures)
    if not figures["passed"]:
        figures["wrong"].append("no test passed")
    return figures


def network(device: str) -> Figures:
    """Report NCCL's network for a communicator over sockets, and its error for InfiniBand without an adapter."""
    sockets = run_script(_NETWORK.format(kind="TCP"), 60, {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo"})
    networks = re.findall(r"Using network (\S+)", sockets.stdout)
    figures: Figures = {"asked for sockets": sorted(set(networks)), "wrong": []}
    if sockets.returncode or set(networks) != {"Socket"}:
        figures["wrong"].append(f"expected NCCL to use sockets: {last_line(sockets)}")
    write_figures(figures)
    if not Path("/sys/class/infiniband").is_dir() or not any(Path("/sys/class/infiniband").iterdir()):
        rdma = run_script(_NETWORK.format(kind='Transport("rdma", NicType.IB, "a")'), 60, {"NCCL_SOCKET_IFNAME": "lo"})
        figures["InfiniBand without an adapter"] = last_line(rdma)
        if rdma.returncode == 0:
            figures["wrong"].append("NCCL made a communicator over InfiniBand without an adapter")
    return figures


_NETWORK = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.transport import TCP, Transport
from holmes_hpc.training.network.process_groups import nccl_options
site = Site("one", (Pool("a", NicType.IB, "a", 1, 1, ethernet_gbps=10, rdma_gbps=200, gpu=CPU, gres=False),))
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20),
                        pg_options=nccl_options({kind}, site))
tensor = torch.ones(1, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()
"""


def speed(device: str) -> Figures:
    """Run benchmarks/gpu.py on dense models of 100 million parameters to layers of Llama 3.1 8B, and on a mixture."""
    sizes = (
        {
            "gpt_1b": (BILLION, 1, 15),
            "layers_8b": (LAYERS_8B, 1, 12),
            "mixture": (MIXTURE, 1, 12),
            "gpt_small": (SMALL, 1, 30),
        }
        if device == "cuda"
        else {"tiny": (TINY, 1, 7)}
    )
    figures: Figures = {"wrong": []}
    for name, (overrides, pairs, steps) in sizes.items():
        arguments = ["--device", device, "--pairs", str(pairs), "--steps", str(steps), "--json", *overrides]
        process = subprocess.run(
            [sys.executable, str(FOLDER / "gpu.py"), *arguments], capture_output=True, text=True, check=False
        )
        if process.returncode:
            figures["wrong"].append(f"{name}: {last_line(process)}")
            continue
        result = figures[name] = json.loads(process.stdout.splitlines()[-1])
        if device == "cuda" and result["speed_ratio"] < 0.97:
            figures["wrong"].append(f"{name}: {result['speed_ratio']:.3f} of the minimal loop's speed, below 0.97")
        if device == "cuda" and abs(result["predicted_gib"] / result["holmes_gib"] - 1) > 0.08:
            figures["wrong"].append(
                f"{name}: {result['predicted_gib']:.2f} GiB predicted, {result['holmes_gib']:.2f} measured"
            )
        write_figures(figures)
    return figures


def kernels(device: str) -> Figures:
    """Compare the times of a layer's kernels with the planner's model; keep all rows in kernels.rows.json."""
    import gpu_kernels  # loads torch

    figures: Figures = gpu_kernels.measure(device, quick=device != "cuda")
    _keep("rows.json", json.dumps(figures.pop("rows")))
    return figures


def profile(device: str) -> Figures:
    """Count device synchronizations and copies from pageable memory per micro-batch.

    Returns the slope between runs of 4 and 12 micro-batches per step, so that a step's own waits (for its loss and
    norm) cancel out."""
    counts = {}
    for micro_batches in (4, 12):
        with tempfile.TemporaryDirectory() as folder:
            counts[micro_batches] = _count_waits(
                [
                    *TINY,
                    f"batch.global_size={micro_batches}",
                    f"run_dir={folder}/run",
                    f"train.device={device}",
                    "train.steps=4",
                ]
            )
    steps = 4 * (12 - 4)
    figures: Figures = {
        name: round((counts[12][name] - counts[4][name]) / steps, 3) for name in sorted(counts[12] | counts[4])
    }
    return {**figures, "wrong": [f"{rate:g} {name} per micro-batch" for name, rate in figures.items() if rate > 0.01]}


def _count_waits(overrides: list[str]) -> Counter[str]:
    """Count synchronizations and copies from pageable memory of a run with torch's profiler."""
    process = run_script(_PROFILE, 60, {"HOLMES_PROOF": json.dumps(overrides)})
    if process.returncode:
        raise SystemExit(f"profile: {last_line(process)}")
    return Counter(json.loads(process.stdout.splitlines()[-1]))


_PROFILE = """
import json, os, sys
from collections import Counter
from torch.profiler import ProfilerActivity, profile
from holmes_hpc import train
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    train.main()
names = Counter(event.name for event in profiler.events())
print(json.dumps({n: count for n, count in names.items() if "Synchronize" in n or "Pageable" in n}))
"""


def resume(device: str) -> Figures:
    """Compare the losses of six steps in one run, and in two runs of three; on a GPU they may differ by NOISE.

    The first run also writes a profile and live metrics. Returns the kernels, passes and GPU figures in them."""
    common = [*TINY, f"train.device={device}", "train.checkpoint_interval=3", "train.lr_decay_steps=6"]
    with tempfile.TemporaryDirectory() as folder:
        observed = ["train.profile={start: 4, stop: 5}", "train.openmetrics=live.prom"]
        uninterrupted = _train([*common, f"run_dir={folder}/whole", "train.steps=6", *observed])
        trace = gzip.decompress(Path(folder, "whole", "trace", "profile-rank-0.json.gz").read_bytes())
        events = Counter(e.get("cat") for e in json.loads(trace)["traceEvents"])
        gpu_figures = Path(folder, "whole", "live.prom").read_text().count("\nholmes_gpu_")
        before_resume = _train([*common, f"run_dir={folder}/first", "train.steps=3"])
        checkpoint = sorted(Path(folder, "first", "checkpoints").glob("step-*"))[-1]
        after_resume = _train([*common, f"run_dir={folder}/second", "train.steps=6", f"checkpoint={checkpoint}"])
    losses = [[line["loss"] for line in lines] for lines in (uninterrupted, [*before_resume, *after_resume])]
    largest_error = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    is_wrong = largest_error > (NOISE if device == "cuda" else 0)
    counts: Figures = {
        "profiled_kernels": events["kernel"],
        "ranges": events["user_annotation"],
        "gpu_figures": gpu_figures,
    }
    failures = [f"resumed: {losses[1]}"] if is_wrong else []
    if device == "cuda" and not events["kernel"]:
        failures.append("no kernel in the profile")
    return {"losses": losses[0], "apart": largest_error, **counts, "wrong": failures}


def layouts(device: str) -> Figures:
    """Compare the losses of layouts with those of one process. NCCL treats ranks that share a GPU as hosts."""
    figures: Figures = {"wrong": []}
    tiny = [*TINY, f"train.device={device}", "train.steps=4", "train.lr=1e-3"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:

        def losses(number: int, ranks: int, overrides: list[str]) -> list[float]:
            run = Path(folder, str(number))
            train_ranks(ranks, [*tiny, f"run_dir={run}", *overrides])
            return [line["loss"] for line in RunDirectory(run).metrics()]

        numbers = {json.dumps(n): n for _, _, n in LAYOUTS.values()}
        expected = {key: pool.submit(losses, -n, 1, numbers[key]) for n, key in enumerate(numbers, 1)}
        found = {
            name: pool.submit(losses, n, ranks, [*layout, *LAYOUTS[name][2]])
            for n, (name, (ranks, layout, _)) in enumerate(LAYOUTS.items())
        }
        for name, job in found.items():
            limit = 1e-3 if "train.dtype=bf16" in LAYOUTS[name][2] else 1e-4 if device == "cuda" else 1e-6
            try:
                one_process = expected[json.dumps(LAYOUTS[name][2])].result()
                figures[name] = max(abs(b / a - 1) for a, b in zip(one_process, job.result(), strict=True))
                if figures[name] > limit:
                    figures["wrong"].append(f"{name}: losses {job.result()}, one process {one_process}")
            except RuntimeError as e:
                figures["wrong"].append(f"{name}: {e}")
            write_figures(figures)
    return figures


def failure(device: str) -> Figures:
    """Make a step fail, and measure how long the rank takes to end after its log line."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*TINY, f"run_dir={folder}/run", f"train.device={device}", "train.steps=4"]
        process = run_script(_FAILURE, 100, {"HOLMES_PROOF": json.dumps(overrides)})
    failed_at = [float(line) for line in process.stderr.splitlines() if re.fullmatch(r"[\d.]+", line)]
    ended_after_s = round(time.time() - failed_at[0], 1) if failed_at else math.inf
    return {"ended_after_s": ended_after_s, "wrong": [last_line(process)] if process.returncode != 1 else []}


_FAILURE = """
import json, os, sys, time
from holmes_hpc import train
from holmes_hpc.training import loop

def fail(*_):
    print(time.time(), file=sys.stderr, flush=True)
    raise RuntimeError("on purpose")

loop.Trainer._one_step = fail
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
train.main()
"""


def calibrate(device: str) -> Figures:
    """Calibrate one rank, and compare the step time predicted from it with the measured one."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *(BILLION if device == "cuda" else TINY),
            f"run_dir={folder}/run",
            f"train.device={device}",
            "train.steps=8",
            "train.measure=true",
        ]
        process = run_script(_CALIBRATE, 400, {"HOLMES_PROOF": json.dumps(overrides)})
        if process.returncode:
            raise SystemExit(f"calibrate: {last_line(process)}")
        run = (Path(folder, "run", "run.yaml")).read_text()
        _keep("calibration.yaml", Path(folder, "run", "calibration.yaml").read_text())
    figures = {name: float(value) for name, value in re.findall(r"(\w*step_time_s): ([\d.e-]+)", run)}
    ratio = figures["predicted_step_time_s"] / figures["step_time_s"]
    failures = (
        [f"predicted {ratio:.3f} times the measured step time"] if device == "cuda" and abs(ratio - 1) > 0.1 else []
    )
    return {**figures, "predicted_over_measured": round(ratio, 3), "wrong": failures}


_CALIBRATE = f"""
import json, os, sys
from holmes_hpc import train
from holmes_hpc.training.calibration import measure
measure.SHAPES_S = {SHAPES_S}
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
train.main()
"""


def weights(device: str) -> Figures:
    """Compare the same initial parameter on this device and on the CPU."""
    import torch

    from holmes_hpc.training.model import initial_weights

    digests = {}
    for where in ("cpu", device):
        rows, columns = torch.arange(1000, device=where), torch.arange(700, device=where)
        drawn = initial_weights.normal(1234, "decoder.layers.0.mlp.linear_fc1.weight", rows, columns, 700, 0.02)
        digests[where] = hashlib.sha256(drawn.cpu().numpy().tobytes()).hexdigest()[:16]
    return {"digests": digests, "wrong": [] if len(set(digests.values())) == 1 else ["the weights differ"]}


# -- Shared by the parts -----------------------------------------------------------------------------------------------


def _train(overrides: list[str]) -> list[dict[str, Any]]:
    """Train as a user would; return the lines of metrics.jsonl."""
    process = subprocess.run(
        [sys.executable, "-m", "holmes_hpc.train", *overrides], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if process.returncode:
        raise SystemExit(f"holmes_hpc.train: {last_line(process)}")
    folder = next(o.partition("=")[2] for o in overrides if o.startswith("run_dir="))
    return RunDirectory(folder).metrics()


PARTS: dict[str, Callable[[str], Figures]] = {
    f.__name__: f
    for f in (start, tests, network, layouts, failure, kernels, speed, profile, resume, calibrate, weights)
}

if __name__ == "__main__":
    write_figures(PARTS[sys.argv[1]](sys.argv[2]))

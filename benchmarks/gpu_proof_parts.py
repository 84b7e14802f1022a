"""The parts of gpu_proof.py, each run as a process of its own: `gpu_proof_parts.py PART DEVICE OUT.json`.

A part is a function of the device (cuda, or cpu for trying it) that returns figures; under ``wrong`` it lists what is
not as it should be. What it has found so far it writes after each figure, lest its limit take all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TINY = [
    "model=gpt_tiny",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=128",
    "model.vocab=500",
    "batch.global_size=4",
    "batch.micro_size=1",
    "batch.sequence_length=64",
    "data.learnable=false",
]
SMALL = [
    "model=gpt_small",
    "data=synthetic",
    "batch.global_size=32",
    "batch.micro_size=8",
    "batch.sequence_length=1024",
    "train.dtype=bf16",
]
BILLION = [
    "model=gpt_small",
    "data=synthetic",
    "model.name=gpt_1b",
    "model.layers=20",
    "model.hidden=2048",
    "model.heads=16",
    "model.kv_heads=16",
    "model.ffn=8192",
    "model.max_positions=2048",
    "batch.global_size=16",
    "batch.micro_size=4",
    "batch.sequence_length=2048",
    "train.dtype=bf16",
]
Figures = dict[str, Any]
NOISE = 1e-4  # of a loss: attention's gradients on a GPU are added up in any order
SHAPES_S = 8.0  # of calibrate's other shapes; a calibration has more time


def keep(found: Figures) -> None:
    """Write what is known so far."""
    if len(sys.argv) == 4:
        Path(sys.argv[3]).write_text(json.dumps(found))


def start(device: str) -> Figures:
    """Fresh pairs of processes whose first step runs ahead, over host-staged edges and over NCCL. Two ranks share a
    GPU: NCCL takes them for two hosts, and goes through sockets."""
    found: Figures = {"seconds": {}, "wrong": []}
    ways = (
        [("gloo", "LAZY"), ("gloo", "EAGER"), ("nccl", "LAZY"), ("nccl", "EAGER")]
        if device == "cuda"
        else [("gloo", "LAZY")]
    )
    for backend, loading in ways:
        began = time.monotonic()
        done = _python(
            _START.format(device=device, backend=backend, limit_s=15 if device == "cuda" else 280),
            20 if device == "cuda" else 300,
            {"CUDA_MODULE_LOADING": loading},
        )
        found["seconds"][f"{backend} {loading.lower()}"] = round(time.monotonic() - began, 1)
        if done.returncode:
            found["wrong"].append(f"{backend}, {loading.lower()} loading: {_last(done)}")
        keep(found)
    return found


_START = """
import sys; sys.path.insert(0, {support!r})
from pipelines import Case, play
ran = play([Case(layers=[[1], [1]], micro_batches=[8], schedule="ahead", in_flight=[4, 1], steps=2,
                 device="{{device}}", backend="{{backend}}", trace=False)], {{limit_s}})
assert all(len(rank["gradients"]) == 2 for rank in ran[0])
""".format(support=str(ROOT / "tests" / "support"))


def tests(device: str) -> Figures:
    """`pytest -m gpu`: how many passed, and the names of what failed or did not run."""
    options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "60", str(ROOT / "tests" / "training")]
    found: Figures = {"passed": 0, "wrong": []}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if not (ended := re.match(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", line)):
                continue
            if ended[2] == "PASSED":
                found["passed"] += 1
            else:
                found["wrong"].append(f"{ended[2].lower()}: {ended[1].rpartition('::')[2]}")
            keep(found)
    if not found["passed"]:
        found["wrong"].append("no test passed")
    return found


def network(device: str) -> Figures:
    """What NCCL says it uses for a communicator that asks for sockets, and what becomes of one that asks for
    InfiniBand where there is no adapter."""
    sockets = _python(_NETWORK.format(kind="TCP"), 16, {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "lo"})
    said = re.findall(r"Using network (\S+)", sockets.stdout)
    found: Figures = {"asked for sockets": sorted(set(said)), "wrong": []}
    if sockets.returncode or set(said) != {"Socket"}:
        found["wrong"].append(f"sockets were asked for: {_last(sockets)}")
    keep(found)
    if not Path("/sys/class/infiniband").is_dir() or not any(Path("/sys/class/infiniband").iterdir()):
        rdma = _python(_NETWORK.format(kind='Transport("rdma", NicType.IB, "a")'), 16, {"NCCL_SOCKET_IFNAME": "lo"})
        found["InfiniBand without an adapter"] = _last(rdma)
        if rdma.returncode == 0:
            found["wrong"].append("a communicator over InfiniBand was made without an adapter")
    return found


_NETWORK = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.transport import TCP, Transport
from holmes_hpc.training.network.process_groups import nccl_options
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20),
                        pg_options=nccl_options({kind}))
one = torch.ones(1, device="cuda")
dist.all_reduce(one)
torch.cuda.synchronize()
"""


def speed(device: str) -> Figures:
    """benchmarks/gpu.py on gpt_small and on a model of a billion parameters."""
    sizes = {"gpt_small": (SMALL, 2, 20), "gpt_1b": (BILLION, 1, 15)} if device == "cuda" else {"tiny": (TINY, 1, 7)}
    found: Figures = {"wrong": []}
    for name, (overrides, pairs, steps) in sizes.items():
        words = ["--device", device, "--pairs", str(pairs), "--steps", str(steps), "--json", *overrides]
        done = subprocess.run(
            [sys.executable, str(HERE / "gpu.py"), *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            found["wrong"].append(f"{name}: {_last(done)}")
            continue
        own = found[name] = json.loads(done.stdout.splitlines()[-1])
        if device == "cuda" and own["speed_ratio"] < 0.97:
            found["wrong"].append(f"{name}: {own['speed_ratio']:.3f} of the minimal loop's speed, 0.97 wanted")
        if device == "cuda" and abs(own["predicted_gib"] / own["holmes_gib"] - 1) > 0.08:
            found["wrong"].append(f"{name}: {own['predicted_gib']:.2f} GiB predicted, {own['holmes_gib']:.2f} measured")
        keep(found)
    return found


def profile(device: str) -> Figures:
    """Calls that wait for the device and copies from pageable memory, a micro-batch: the slope between runs of 4 and of
    12 micro-batches a step. What a step itself waits for (its loss, its norm) drops out."""
    counts = {}
    for micro_batches in (4, 12):
        with tempfile.TemporaryDirectory() as folder:
            counts[micro_batches] = _profiled(
                [
                    *TINY,
                    f"batch.global_size={micro_batches}",
                    f"run_dir={folder}/run",
                    f"train.device={device}",
                    "train.steps=4",
                ]
            )
    steps = 4 * (12 - 4)
    found: Figures = {
        name: round((counts[12][name] - counts[4][name]) / steps, 3) for name in sorted(counts[12] | counts[4])
    }
    return {**found, "wrong": [f"{rate:g} {name} a micro-batch" for name, rate in found.items() if rate > 0.01]}


def _profiled(overrides: list[str]) -> Counter[str]:
    """How often a run waited for the device or copied from pageable memory, by torch's profiler."""
    done = _python(_PROFILE, 60, {"HOLMES_PROOF": json.dumps(overrides)})
    if done.returncode:
        raise SystemExit(f"profile: {_last(done)}")
    return Counter(json.loads(done.stdout.splitlines()[-1]))


_PROFILE = """
import json, os, sys
from collections import Counter
from torch.profiler import ProfilerActivity, profile
from holmes_hpc import train
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
    train.main()
names = Counter(event.name for event in seen.events())
print(json.dumps({n: count for n, count in names.items() if "Synchronize" in n or "Pageable" in n}))
"""


def resume(device: str) -> Figures:
    """Six steps in one run, and in one that ends after three and is resumed: equal losses, on a GPU but for noise."""
    common = [*TINY, f"train.device={device}", "train.checkpoint_interval=3", "train.lr_decay_steps=6"]
    with tempfile.TemporaryDirectory() as folder:
        whole = _train([*common, f"run_dir={folder}/whole", "train.steps=6"])
        first = _train([*common, f"run_dir={folder}/first", "train.steps=3"])
        saved = sorted(Path(folder, "first", "checkpoints").glob("step-*"))[-1]
        second = _train([*common, f"run_dir={folder}/second", "train.steps=6", f"checkpoint={saved}"])
    losses = [[line["loss"] for line in lines] for lines in (whole, [*first, *second])]
    apart = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
    wrong = apart > (NOISE if device == "cuda" else 0)
    return {"losses": losses[0], "apart": apart, "wrong": [f"resumed: {losses[1]}"] if wrong else []}


def calibrate(device: str) -> Figures:
    """What `holmes calibrate` measures with one rank, and the step time that it predicts from that."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *(SMALL if device == "cuda" else TINY),
            f"run_dir={folder}/run",
            f"train.device={device}",
            "train.steps=8",
            "train.measure=true",
        ]
        done = _python(_CALIBRATE, 400, {"HOLMES_PROOF": json.dumps(overrides)})
        if done.returncode:
            raise SystemExit(f"calibrate: {_last(done)}")
        run = (Path(folder, "run", "run.yaml")).read_text()
    figures = {name: float(value) for name, value in re.findall(r"(\w*step_time_s): ([\d.e-]+)", run)}
    ratio = figures["predicted_step_time_s"] / figures["step_time_s"]
    wrong = [f"predicted {ratio:.3f} of what was measured"] if device == "cuda" and abs(ratio - 1) > 0.1 else []
    return {**figures, "predicted_over_measured": round(ratio, 3), "wrong": wrong}


_CALIBRATE = f"""
import json, os, sys
from holmes_hpc import train
from holmes_hpc.training.calibration import measure
measure.SHAPES_S = {SHAPES_S}
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
train.main()
"""


def weights(device: str) -> Figures:
    """The same parameter, drawn on this device and on the CPU."""
    import torch

    from holmes_hpc.training.model import initial_weights

    digests = {}
    for where in ("cpu", device):
        rows, columns = torch.arange(1000, device=where), torch.arange(700, device=where)
        drawn = initial_weights.normal(1234, "decoder.layers.0.mlp.linear_fc1.weight", rows, columns, 700, 0.02)
        digests[where] = hashlib.sha256(drawn.cpu().numpy().tobytes()).hexdigest()[:16]
    return {"digests": digests, "wrong": [] if len(set(digests.values())) == 1 else ["they differ"]}


# -- what the parts share ---------------------------------------------------------------------------------------------


def _python(text: str, limit_s: float, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A script in a fresh process. One that runs past its limit has exit code 124."""
    environment = {**os.environ, **more, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-X", "faulthandler", "-c", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said, errors = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(command, process.returncode, said, errors)
    except subprocess.TimeoutExpired:
        for one in (*psutil.Process(process.pid).children(recursive=True), process):  # ranks spin on the GPU
            with contextlib.suppress(psutil.Error):
                one.kill()
        said, _ = process.communicate()
        return subprocess.CompletedProcess(command, 124, said, f"ran past {limit_s:g} s")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}, nothing said"


def _train(overrides: list[str]) -> list[dict[str, Any]]:
    """A run as users start it: its lines of metrics."""
    from holmes_hpc.records.run import RunDirectory

    done = subprocess.run(
        [sys.executable, "-m", "holmes_hpc.train", *overrides], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise SystemExit(f"holmes_hpc.train: {_last(done)}")
    folder = next(o.partition("=")[2] for o in overrides if o.startswith("run_dir="))
    return RunDirectory(folder).metrics()


PARTS: dict[str, Callable[[str], Figures]] = {
    f.__name__: f for f in (start, tests, network, speed, profile, resume, calibrate, weights)
}

if __name__ == "__main__":
    keep(PARTS[sys.argv[1]](sys.argv[2]))

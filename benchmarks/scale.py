"""Measure what rank 0 and `holmes status` do for large runs, without the runs.

    python benchmarks/scale.py [--ranks 512,2048,4096,16384] [--steps 100000]
    python benchmarks/scale.py --start 64,256,1024,4096

For each size it plans gpt_7_5b on two fabrics (8 GPUs per node, TP 8, PP 16). It gives rank 0 made-up rows of all
ranks, and times its work of a step: the metrics line, and the monitors of NICs, links and nodes. Then it writes a
run directory with that line for each of many steps, and starts `holmes status` on it. At last it counts the bytes by
which the ranks of a node learn the transports of all ranks. Prints the growth exponents between the smallest and the
largest size, too.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import scale_start

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.console import table
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.metrics import metrics_line
from holmes_hpc.training.metrics.monitors import Monitors
from holmes_hpc.training.network.audit import planned_bytes
from holmes_hpc.training.network.destinations import Destinations
from holmes_hpc.training.network.exchange import set_outcome
from holmes_hpc.training.network.interfaces import NodeTransports

# In a small process of its own: memory counts from before a child's program is loaded.
STATUS = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.argv[1], "status"], check=True)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
REPEATS = 40  # steps: two windows of the slowest monitor


def make_plan(ranks: int) -> Plan:
    """Return a plan of gpt_7_5b for `ranks` GPUs, half of them in each of two fabrics."""
    nodes = ranks // 16
    kinds = (("ib-a", NicType.IB), ("roce-a", NicType.ROCE))
    gpu = Gpu("a100-80gb", 312, 80, 2400)
    pools = tuple(Pool(name, nic, name, nodes, 8, 25.0, gpu, 200.0) for name, nic in kinds)
    options = PlanOptions(tp=8, pp=16, schedule="1f1b", virtual_stages=1)
    model = load(["model=gpt_7_5b"]).model
    return best_plan(model, Batch(4 * ranks // 8, 1, 2048), Site("large", pools), options, Costs())


def nodes_of(plan: Plan) -> list[NodeTransports]:
    """Return the made-up nodes of all ranks."""
    nodes = []
    for rank, place in enumerate(plan.places):
        number, fabric = rank // 8, plan.site.pool(place.pool).fabric_name
        addresses = [f"10.{number >> 8}.{number & 255}.{i}" for i in (1, 2)]
        interfaces = {"tcp": ("eth0", addresses[0]), "rdma": ("ib0", addresses[1])}
        nodes.append(NodeTransports(f"node{number}", fabric, interfaces, {}, False))
    return nodes


class Memory(dict):
    """A store that keeps values in this process."""

    set = dict.__setitem__


def exchanged_bytes(plan: Plan) -> int:
    """Return the bytes that a node of 8 ranks reads from rank 0's store to know the transports of all ranks."""
    hcas = ",".join(f"mlx5_{i}:1" for i in range(8))
    variables = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": f"={hcas}"}
    nodes = nodes_of(plan)[::8]
    rows = [[asdict(replace(node, environment=variables))] for node in nodes], ""
    store = Memory()
    set_outcome(store, "node", rows)  # type: ignore[arg-type]
    return 8 * len(store["node/all"])


def time_steps(plan: Plan) -> tuple[list[float], dict]:
    """Return the CPU seconds of rank 0's work in each of some steps, and the last metrics line."""
    nodes = nodes_of(plan)
    destinations, train = Destinations(plan, nodes), TrainConfig(steps=10, dtype="bf16")
    session = SimpleNamespace(plan=plan, node_of_rank=nodes)
    monitors = Monitors(session, train, {}, destinations, None)  # type: ignore[arg-type]
    speeds, random = metrics_line.speeds_of(plan, train), np.random.default_rng(0)
    sent = np.zeros((plan.world_size, 7))
    for group, rank, amount in planned_bytes(plan, train.dtype):
        sent[rank, 2 * group.transport.nic.rdma if group.transport.nic else 4] += amount
    parts, zeros = dict.fromkeys(PARTS, 0.5), [0.0] * destinations.width
    planned = np.stack([metrics_line.rank_row(1.5, 1, 3.5, parts, tuple(row), 40 << 30, zeros).numpy() for row in sent])
    seconds = []
    for step in range(1, REPEATS + 1):
        rows = planned * random.uniform(0.99, 1.01, (plan.world_size, 1))
        start = time.thread_time()
        between = destinations.fabric_bytes(rows[:, metrics_line.SENT_COLUMNS])
        fields = {"grad_norm": 1.0, "learning_rate": 1e-4, "fabric_bytes": between, "attempt": 1}
        line = metrics_line.metrics_line(plan, rows, step, 1.7e9 + step, fields, speeds)
        warnings = list(monitors.add(rows, line, True))
        seconds.append(time.thread_time() - start)
        assert not warnings, warnings[0]
    return seconds, line


def time_status(plan: Plan, line: dict, steps: int) -> tuple[float, float, int]:
    """Return the seconds and the largest memory, in MB, of `holmes status` on a run of `steps` such lines, and the
    bytes of its last line."""
    with tempfile.TemporaryDirectory(prefix="holmes-scale-") as folder:
        config = load(["model=gpt_7_5b"]).to_dict()
        run = RunDirectory.create(Path(folder) / "large", plan.to_yaml(), config, [], plan_id=plan.id)
        run.append_metrics({**line, "step": 1})
        size = run.metrics_path.stat().st_size
        text = run.metrics_path.read_text().partition('"step"')[2].partition(",")[2]
        with run.metrics_path.open("a") as file:
            for step in range(2, steps + 1):
                file.write(f'{{"step":{step},{text}')
        command = [sys.executable, "-c", STATUS, str(Path(sys.executable).with_name("holmes"))]
        environment = {**os.environ, "HOLMES_RUNS": folder}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        seconds, kib = map(float, done.stdout.split()[-2:])
        return seconds, kib / 1024, size


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", default="512,2048,4096,16384")
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--start", help="numbers of simulated ranks; measure only their start (scale_start.py)")
    arguments = options.parse_args()
    if arguments.start:
        starts = [scale_start.measure(int(ranks)) for ranks in arguments.start.split(",")]
        table("The start of simulated ranks", scale_start.COLUMNS, scale_start.rows(starts))
        return
    print(f"inputs: {arguments.ranks} ranks, {arguments.steps} steps, load {os.getloadavg()[0]:.2f}")
    rows, figures = [], []
    for ranks in map(int, arguments.ranks.split(",")):
        plan = make_plan(ranks)
        seconds, line = time_steps(plan)
        status_s, megabytes, size = time_status(plan, line, arguments.steps)
        step_ms = 1000 * statistics.fmean(seconds)
        exchanged = exchanged_bytes(plan)
        figures.append((ranks, step_ms, size, status_s, exchanged))
        rows.append(
            [
                str(ranks),
                f"{step_ms:.2f}",
                f"{1000 * max(seconds):.1f}",
                str(size),
                f"{status_s:.2f}",
                f"{megabytes:.0f}",
                f"{exchanged / 1e3:.0f}",
            ]
        )
    first, last = figures[0], figures[-1]
    if last[0] > first[0]:
        growth = [math.log(b / a) / math.log(last[0] / first[0]) for a, b in zip(first[1:], last[1:], strict=True)]
        rows.append(["growth", f"{growth[0]:.2f}", "", f"{growth[1]:.2f}", f"{growth[2]:.2f}", "", f"{growth[3]:.2f}"])
    columns = [
        "ranks",
        "CPU of a step, ms (mean)",
        "ms (most)",
        "line, bytes",
        "status, s",
        "status, MB",
        "exchange, kB",
    ]
    table("Rank 0's work and `holmes status`", columns, rows)


if __name__ == "__main__":
    main()

"""Synthetic runs, written through the record's own writer, with known figures for checks.

They stand for no machine. Step times are `step_time_s` with noise of `spread`, in the proportions of a small run
with emulated compute."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Predicted, Schedule, Stage
from holmes_hpc.records.run import RunDirectory

NICS = {"ib-a": NicType.IB, "ib-b": NicType.IB, "roce-a": NicType.ROCE, "eth-a": NicType.ETHERNET}
MODEL = ModelSpec(name="gpt_tiny", layers=12, hidden=64, heads=4, vocab=257, ffn=256, kv_heads=4)
SHARES = {
    "compute_s": 0.7,
    "pipeline_wait_s": 0.1,
    "fill_drain_s": 0.05,
    "grad_sync_s": 0.08,
    "param_sync_s": 0.05,
    "optimizer_s": 0.02,
    "other_s": 0.0,
}


@cache
def _plan(placement: tuple[tuple[str, int], ...], transport: str, step_time_s: float, hidden: int) -> Plan:
    site = Site(
        "made-up",
        tuple(
            Pool(
                name,
                nic,
                str(nic),
                8,
                1,
                ethernet_gbps=0.05,
                gpu=CPU,
                gres=False,
                rdma_gbps=None if nic is NicType.ETHERNET else 0.4,
            )
            for name, nic in NICS.items()
        ),
    )
    stages = len(placement) if len(placement) > 1 else 2
    dp = sum(n for _, n in placement) // stages
    stage_layers = [MODEL.layers // stages] * stages
    is_single = len(placement) == 1
    components = tuple(
        Component(str(NICS[f]), f"nic_{NICS[f]}", f, n, 1, (0, 1) if is_single else (i,))
        for i, (f, n) in enumerate(placement)
    )
    fabrics = [placement[0][0]] * stages if is_single else [f for f, _ in placement]
    batch = Batch(global_size=8 * dp, micro_size=1, sequence_length=64)
    nic_bytes = {f: 4e6 * n for f, n in placement if NICS[f] is not NicType.ETHERNET}
    predicted = Predicted(
        step_time_s * 0.97,
        8 * dp / (step_time_s * 0.97),
        0.02,
        0.02,
        (10**8,) * stages,
        {**nic_bytes, "ethernet": 1e6},
        {"compute_s": 0.7 * step_time_s, "sync_s": 0.1 * step_time_s},
    )
    return Plan(
        "one-fabric" if is_single else "pipeline",
        replace(MODEL, hidden=hidden),
        batch,
        Parallel.uniform(pp=stages, dp=dp),
        "none",
        Schedule("1f1b", tuple(range(stages, 0, -1))),
        components,
        tuple(Stage(f, n) for f, n in zip(fabrics, stage_layers, strict=True)),
        site,
        transport_mode=transport,
        predicted=predicted,
    )


def make_plan(
    placement: Mapping[str, int], transport: str = "holmes", step_time_s: float = 1.0, hidden: int = MODEL.hidden
) -> Plan:
    return _plan(tuple(placement.items()), transport, step_time_s, hidden)


def make_line(plan: Plan, step: int, step_time_s: float, rng: random.Random, attempt: int = 1) -> dict[str, Any]:
    """Return one line of metrics.jsonl, as training writes it. Counted bytes are 1.05 times the planned ones."""
    assert plan.predicted
    samples = plan.batch.global_size / step_time_s
    return {
        "step": step,
        "time": round(1.7e9 + step * step_time_s, 3),
        "step_time_s": step_time_s,
        "loss": 5.5 - 0.05 * step + rng.random() * 0.01,
        "grad_norm": 1 + rng.random(),
        "learning_rate": 1e-3,
        "tokens_per_s": samples * plan.batch.sequence_length,
        "samples_per_s": samples,
        "model_tflops_per_gpu": 0.02 / step_time_s,
        "share_of_limit": SHARES["compute_s"],
        "hardware_tflops_per_gpu": 0.02 / step_time_s,
        "breakdown": [{part: round(share * step_time_s, 6) for part, share in SHARES.items()} for _ in plan.stages],
        "nic_bytes": {
            name: {"tx": int(count * 1.05), "rx": int(count * 1.05)}
            for name, count in plan.predicted.nic_bytes_per_step.items()
        },
        "peak_memory_bytes": [812_646_400 + max(ranks) for ranks in plan.parallel.stage_ranks],
        "attempt": attempt,
    }


def make_run(
    path: Path,
    placement: Mapping[str, int] | None = None,
    *,
    transport: str = "holmes",
    steps: int = 20,
    step_time_s: float = 1.0,
    spread: float = 0.02,
    seed: int = 0,
    state: str | None = "completed",
    started: str = "2025-01-01T12:00:10+00:00",
    labels: Mapping[str, Any] | None = None,
    job_id: int = 41,
    pace_layer_ms: float | None = 30.0,
    config: Mapping[str, Any] | None = None,
    hidden: int = MODEL.hidden,
) -> RunDirectory:
    """Create a complete run.

    `state` None: the run was cut off without a result. The first two steps take three times as long."""
    plan = make_plan(placement or {"ib-a": 2, "roce-a": 2}, transport, step_time_s, hidden)
    rng = random.Random(seed)
    run = RunDirectory.create(
        path,
        plan_text=plan.to_yaml(),
        plan_id=plan.id,
        pace_layer_ms=pace_layer_ms,
        device="cpu",
        config={
            "train": {
                "steps": steps,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "pace_layer_ms": pace_layer_ms,
            },
            "plan": {"transport": transport, "partition": "exact"},
            **(config or {}),
        },
        overrides=[f"train.steps={steps}", f"plan.transport={transport}"],
        labels=dict(labels or {}),
        slurm={"job_id": job_id, "submitted": "2025-01-01T12:00:00+00:00"},
        hosts=[f"{c.pool}{i}" for c in plan.components for i in range(c.nodes)],
        traffic={
            "setup": {"ib-a": {"tx": 80_000, "rx": 80_000}, "ethernet": {"tx": 90_000, "rx": 90_000}},
            "header_factor": 1.05,
        },
    )
    run.update_run(attempts=[{"attempt": 1, "started": started, "job_id": job_id}])
    for step in range(steps):
        warmup_factor = 3.0 if step < 2 else 1.0
        run.append_metrics(
            make_line(plan, step, warmup_factor * step_time_s * (1 + spread * (rng.random() - 0.5)), rng)
        )
    if state:
        failure = (
            {}
            if state == "completed"
            else {
                "error": "rank 3: connection lost",
                "failed_rank": 3,
                "failed_node": "roce-a1",
                "log_tail": ["Traceback", "lost"],
            }
        )
        run.write_result({"state": state, **failure})
    return run

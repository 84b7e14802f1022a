"""The constants of planning/cost/kernels.py's Stack, fitted to published runs; what they leave over; leave-one-set-out.

    python benchmarks/published_fit.py [--most 60] [--rounds 6]

Least squares of log(predicted / measured) by Gauss-Newton, reweighted so that the mean of the absolute errors is least
(iteratively reweighted least squares), sets of equal weight. What no row says stays near where it starts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from published_runs import Run, costs, layers, layout, read

from holmes_hpc.planning.cost.kernels import Stack
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.schedule.simulation import ROUGH, Durations, step_seconds

NAMES = tuple(f.name for f in fields(Stack))
FREE = tuple(n for n in NAMES if n not in ("ring_s", "rank_s", "memory", "flash", "transfer"))  # those are measured
# Where a fit starts, and stays where no row says otherwise: round figures from before any fit.
START = Stack(
    product=1.0,
    memory=0.85,
    stream=0.85,
    flash=1.0,
    flash1=0.6,
    unfused_attention=1.0,
    unfused_elementwise=1.5,
    loss_bytes=12.0,
    launch_s=2.5e-5,
    wait_s=1e-5,
    gap_s=4e-6,
    pass_s=1e-3,
    step_s=5e-3,
    ring_s=2e-5,
    rank_s=7e-6,
    local=0.77,
    ib=0.6,
    transfer=0.9,
)
# Shares of a rate are at most what benchmarks of nothing else reach of it: of InfiniBand nccl-tests (hardware.py).
MOST = {"product": 1.0, "stream": 1.0, "flash1": 1.0, "local": 0.92, "ib": 0.92}
STEP, HELD = 0.02, 0.03  # of a constant's logarithm: its difference quotient; how firmly it stays where it starts


def steps_s(run: Run, stacks: Sequence[Stack]) -> np.ndarray:
    """Seconds of a step under each of `stacks`: all of them in one simulation."""
    ends, after = [], []
    for stack in stacks:
        made = layout(run, costs(run, stack))
        times = timing(made, layers(run, made))
        ends.append(times.replicas[0])
        after.append(times.after_reduction_s()[0])
    names = Durations.__dataclass_fields__
    together = Durations(*(np.concatenate([getattr(d, name) for d in ends]) for name in names))
    return step_seconds(made.order, together, times.one_nic[0], ROUGH) + np.array(after)


def fit(
    runs: Sequence[Run], start: Stack = START, rounds: int = 6, names: Sequence[str] = FREE, near: Stack | None = None
) -> Stack:
    """The constants `names` that fit `runs` best, sets of equal weight; `near`: where it is looked for first."""
    counts = {r.set: sum(o.set == r.set for o in runs) for r in runs}
    equal = np.array([1 / counts[r.set] for r in runs])
    measured = np.array([r.seconds for r in runs])
    first, at = (np.log([getattr(stack, n) for n in names]) for stack in (start, near or start))
    most, damping = np.log([MOST.get(n, np.inf) for n in names]), 0.3
    for _ in range(rounds):
        stacks = [_with(start, names, at), *(_with(start, names, at + STEP * row) for row in np.eye(len(names)))]
        found = np.log(np.array([steps_s(r, stacks) for r in runs]) / measured[:, None])
        left, slope = found[:, 0], (found[:, 1:] - found[:, :1]) / STEP
        weight = np.sqrt(equal / np.maximum(np.abs(left), 0.02))
        a = np.vstack([slope * weight[:, None], HELD * np.eye(len(names))])
        b = np.concatenate([-left * weight, HELD * (first - at)])
        at = at + np.clip(_step(a, b, most - at), -damping, damping)
    return _with(start, names, at)


def _step(a: np.ndarray, b: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Least squares of a x = b with x at most `most`: what would go beyond is held there, and the rest fitted again."""
    held = np.zeros(len(most), dtype=bool)
    while True:
        x = np.where(held, most, 0.0)
        x[~held] = np.linalg.lstsq(a[:, ~held], b - a[:, held] @ most[held], rcond=None)[0]
        if not (x > most + 1e-9).any():
            return x
        held |= x > most + 1e-9


def _with(stack: Stack, names: Sequence[str], logs: np.ndarray) -> Stack:
    return replace(stack, **{name: float(np.exp(x)) for name, x in zip(names, logs, strict=True)})


def sample(runs: Sequence[Run], most: int) -> list[Run]:
    """Runs to fit to: of a set with more than `most`, as many, evenly drawn."""
    counts = {r.set: sum(o.set == r.set for o in runs) for r in runs}
    seen, kept = dict.fromkeys(counts, 0), []
    for run in runs:
        share = min(1.0, most / counts[run.set])
        if int((seen[run.set] + 1) * share) > int(seen[run.set] * share):
            kept.append(run)
        seen[run.set] += 1
    return kept


def report(name: str, runs: Sequence[Run], stack: Stack) -> float:
    ratio = np.array([steps_s(r, [stack])[0] / (r.seconds or 1) for r in runs])
    print(f"{name:14} {len(runs):5} {np.abs(ratio - 1).mean():7.1%} {(ratio - 1).mean():+7.1%}", flush=True)
    return float(np.abs(ratio - 1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--left-out", action="store_true")
    options = parser.parse_args()
    runs = sample([r for r in read() if r.seconds and r.expressible], options.most)
    sets = list(dict.fromkeys(r.set for r in runs))
    joint = fit(runs, rounds=options.rounds)
    print("jointly:", ", ".join(f"{n}={getattr(joint, n):.4g}" for n in NAMES))
    errors = [report(name, [r for r in runs if r.set == name], joint) for name in sets]
    print(f"mean over sets {np.mean(errors):.1%}")
    if options.left_out:
        print("left out in turn:")
        errors = []
        for name in sets:
            stack = fit([r for r in runs if r.set != name], rounds=-(-options.rounds // 2), near=joint)
            errors.append(report(name, [r for r in runs if r.set == name], stack))
        print(f"mean over sets {np.mean(errors):.1%}")


if __name__ == "__main__":
    main()

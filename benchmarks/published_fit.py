"""Fit the constants of planning/cost/kernels.py's Stack to published runs; print them and their errors.

    python benchmarks/published_fit.py [--most 60] [--rounds 6] [--left-out benchmarks/published/left_out.csv]

Gauss-Newton on log(predicted / measured), with iteratively reweighted least squares for the least mean absolute error.
Sets have equal weight. A constant without influence on any row stays near its start value. `--left-out` also fits
without each set and each GPU generation in turn, and writes the errors of their runs.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from published_runs import Run, costs, generation, layers, layout, read

from holmes_hpc.planning.cost.kernels import Stack
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.schedule.graph import Durations
from holmes_hpc.planning.schedule.simulation import ROUGH, step_seconds

NAMES = tuple(f.name for f in fields(Stack))
# Fitted constants. The others are measured (`local`, `ib`: nccl-tests on DGX A100, network_figures.py), or fitted
# apart: `chunk_s` to the 12 pairs of zero_bubble, 1F1B and interleaved.
FREE = tuple(n for n in NAMES if n not in ("ring_s", "rank_s", "memory", "flash", "local", "ib", "transfer", "chunk_s"))
# Start values of a fit: round figures. A constant without influence on any row keeps its value.
START = Stack(
    product=1.0,
    memory=0.85,
    stream=0.85,
    flash=1.0,
    flash1=0.6,
    flash3=1.5,
    fp8=0.85,
    unfused_attention=1.0,
    unfused_elementwise=1.5,
    loss_bytes=12.0,
    launch_s=2.5e-5,
    wait_s=1e-5,
    gap_s=4e-6,
    pass_s=1e-3,
    chunk_s=2.5e-4,
    step_s=5e-3,
    ring_s=2e-5,
    rank_s=7e-6,
    local=0.77,
    ib=0.92,
    roce=0.6,
    transfer=0.9,
)
# Limits of shares of a rate: the share that a pure benchmark of it reaches, such as nccl-tests (network_figures.py).
LIMITS = {"product": 1.0, "stream": 1.0, "flash1": 1.0, "flash3": 1.75, "fp8": 1.0, "roce": 0.92}
# Of a constant's logarithm: step of the difference quotient, weight of the start value.
STEP, START_WEIGHT = 0.02, 0.03
FULL_WEIGHT = 8  # rows; smaller sets have less weight


def steps_s(run: Run, stacks: Sequence[Stack]) -> np.ndarray:
    """Return the step time in seconds under each of `stacks`, from one simulation."""
    replicas, reductions_s = [], []
    for stack in stacks:
        run_layout = layout(run, costs(run, stack))
        times = timing(run_layout, layers(run, run_layout))
        replicas.append(times.replicas[0])
        reductions_s.append(times.after_reduction_s()[0])
    names = Durations.__dataclass_fields__
    durations = Durations(*(np.concatenate([getattr(d, name) for d in replicas]) for name in names))
    return step_seconds(run_layout.order, durations, times.one_nic[0], ROUGH) + np.array(reductions_s)


def fit(
    runs: Sequence[Run],
    start: Stack = START,
    rounds: int = 6,
    names: Sequence[str] = FREE,
    initial: Stack | None = None,
) -> Stack:
    """Fit the constants `names` to `runs`, sets of equal weight; `initial`: the first iterate, `start` by default."""
    counts = {r.set: sum(o.set == r.set for o in runs) for r in runs}
    set_weights = np.array([1 / max(FULL_WEIGHT, counts[r.set]) for r in runs])
    measured = np.array([r.seconds for r in runs])
    start_logs, logs = (np.log([getattr(stack, n) for n in names]) for stack in (start, initial or start))
    limits, damping = np.log([LIMITS.get(n, np.inf) for n in names]), 0.3
    for _ in range(rounds):
        stacks = [
            _replace_constants(start, names, logs),
            *(_replace_constants(start, names, logs + STEP * row) for row in np.eye(len(names))),
        ]
        log_ratios = np.log(np.array([steps_s(r, stacks) for r in runs]) / measured[:, None])
        residuals, slope = log_ratios[:, 0], (log_ratios[:, 1:] - log_ratios[:, :1]) / STEP
        weight = np.sqrt(set_weights / np.maximum(np.abs(residuals), 0.02))
        a = np.vstack([slope * weight[:, None], START_WEIGHT * np.eye(len(names))])
        b = np.concatenate([-residuals * weight, START_WEIGHT * (start_logs - logs)])
        logs = logs + np.clip(_solve_limited(a, b, limits - logs), -damping, damping)
    return _replace_constants(start, names, logs)


def _solve_limited(a: np.ndarray, b: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Solve a x = b by least squares with x <= `limits`: fix violating entries at their limit, and solve again."""
    at_limit = np.zeros(len(limits), dtype=bool)
    while True:
        x = np.where(at_limit, limits, 0.0)
        x[~at_limit] = np.linalg.lstsq(a[:, ~at_limit], b - a[:, at_limit] @ limits[at_limit], rcond=None)[0]
        if not (x > limits + 1e-9).any():
            return x
        at_limit |= x > limits + 1e-9


def _replace_constants(stack: Stack, names: Sequence[str], logs: np.ndarray) -> Stack:
    return replace(stack, **{name: float(np.exp(x)) for name, x in zip(names, logs, strict=True)})


def sample(runs: Sequence[Run], max_rows: int) -> list[Run]:
    """Return the runs to fit to: at most `max_rows` of each set, evenly spaced."""
    counts = {r.set: sum(o.set == r.set for o in runs) for r in runs}
    counts_so_far, selected = dict.fromkeys(counts, 0), []
    for run in runs:
        share = min(1.0, max_rows / counts[run.set])
        if int((counts_so_far[run.set] + 1) * share) > int(counts_so_far[run.set] * share):
            selected.append(run)
        counts_so_far[run.set] += 1
    return selected


def ratios(runs: Sequence[Run], stack: Stack) -> np.ndarray:
    """Return predicted over measured seconds of each run."""
    return np.array([steps_s(r, [stack])[0] / (r.seconds or 1) for r in runs])


def report(name: str, runs: Sequence[Run], stack: Stack) -> np.ndarray:
    ratio = ratios(runs, stack)
    print(f"{name:14} {len(runs):5} {np.abs(ratio - 1).mean():7.1%} {(ratio - 1).mean():+7.1%}", flush=True)
    return ratio


def leave_out(runs: Sequence[Run], joint: Stack, rounds: int) -> list[tuple[str, str, Run, float]]:
    """Fit without each set, then without each GPU generation. Return (kind, name, run, predicted over measured)."""
    rows = []
    for kind, name_of in (("set", lambda r: r.set), ("generation", generation)):
        print(f"each {kind} left out in turn:")
        for name in dict.fromkeys(map(name_of, runs)):
            stack = fit([r for r in runs if name_of(r) != name], rounds=rounds, initial=joint)
            left = [r for r in runs if name_of(r) == name]
            rows += [(kind, name, run, ratio) for run, ratio in zip(left, report(name, left, stack), strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=60, help="rows per set")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--left-out", metavar="FILE", help="also fit without each set and GPU generation; write errors")
    options = parser.parse_args()
    runs = sample([r for r in read() if r.seconds and r.expressible], options.most)
    joint = fit(runs, rounds=options.rounds)
    print("jointly:", ", ".join(f"{n}={getattr(joint, n):.4g}" for n in NAMES))
    by_set = [[r for r in runs if r.set == name] for name in dict.fromkeys(r.set for r in runs)]
    errors = [np.abs(report(group[0].set, group, joint) - 1).mean() for group in by_set if len(group) >= FULL_WEIGHT]
    print(f"mean over sets of at least {FULL_WEIGHT} rows {np.mean(errors):.1%}")
    if options.left_out:
        rows = leave_out(runs, joint, -(-options.rounds // 2))
        with open(options.left_out, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("left", "name", "set", "ratio"))
            writer.writerows((kind, name, run.set, f"{ratio:.4f}") for kind, name, run, ratio in rows)


if __name__ == "__main__":
    main()

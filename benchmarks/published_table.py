"""How far the planner is off on runs that others measured: step times, the order of layouts, memory.

    python benchmarks/published_table.py

A step's time: the mean of |predicted / measured - 1|, told what the software did. Beside it one constant share of the
peak (of all FLOPs, those of recomputation included), fitted to the other sets. The order of layouts: of those measured
for one model, batch and number of GPUs, the one predicted fastest costs how much more than the fastest (regret), and
how many pairs more than 3% apart are in the right order. Memory: which runs that ran would have been refused, and which
that did not fit accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from published_runs import Run, costs, gpu, layers, layout, predicted_s, profiled, read

from holmes_hpc.planning.cost.flops import hardware_flops_per_step
from holmes_hpc.planning.cost.memory import memory, stage_capacity


def ideal_s(run: Run) -> float:
    """Seconds of all FLOPs of a step at the GPUs' peak."""
    flops = hardware_flops_per_step(run.model, run.batch, run.tp, run.recompute)
    return flops / (run.gpus * gpu(run.gpu).peak_tflops * 1e12)


def error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1).mean())


def best_constant(sets: Iterable[Sequence[Run]]) -> float:
    """The share of the peak with the least mean error over `sets`, each of equal weight."""
    ratios = [np.array([ideal_s(r) / (r.seconds or 1) for r in runs]) for runs in sets]
    shares = np.geomspace(0.1, 0.9, 400)
    return float(min(shares, key=lambda share: np.mean([np.abs(ratio / share - 1).mean() for ratio in ratios])))


def by_set(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found = defaultdict(list)
    for run in runs:
        found[run.set].append(run)
    return dict(found)


def choices(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs among which a planner would have chosen: one model, batch, machine and software, at least three layouts."""
    found = defaultdict(list)
    for r in runs:
        found[r.set, r.model, r.global_size, r.gpus, r.gpu, r.attention, r.fused_norm, r.note].append(r)
    return [c for c in found.values() if len({(r.tp, r.pp, r.micro_size, r.recompute) for r in c}) > 2]


def ranking(choice: Sequence[Run], predicted: dict[Run, float]) -> tuple[float, int, int]:
    """(regret, pairs in the right order, pairs more than 3% apart)."""
    best = min(choice, key=lambda r: predicted[r])
    apart = [(a, b) for a, b in combinations(choice, 2) if abs(np.log(seconds(a) / seconds(b))) > 0.03]
    right = sum((predicted[a] < predicted[b]) == (seconds(a) < seconds(b)) for a, b in apart)
    return seconds(best) / min(map(seconds, choice)) - 1, right, len(apart)


def seconds(run: Run) -> float:
    assert run.seconds is not None
    return run.seconds


def accepted(run: Run) -> bool:
    """Whether the planner holds that it fits."""
    made = layout(run, costs(run))
    return bool((memory(made, layers(run, made)).total() <= stage_capacity(made)).all())


def main() -> None:
    runs = [r for r in read() if r.expressible]
    sets = by_set(r for r in runs if r.seconds)
    predicted = {r: predicted_s(r) for group in sets.values() for r in group}
    print(f"{'set':14} {'rows':>5} {'error':>7} {'bias':>7} {'worst':>7} {'constant':>9}")
    errors = []
    for name, group in sets.items():
        said, was = np.array([predicted[r] for r in group]), np.array([seconds(r) for r in group])
        share = best_constant(other for key, other in sets.items() if key != name)
        constant = error(np.array([ideal_s(r) / share for r in group]), was)
        errors.append(error(said, was))
        print(
            f"{name:14} {len(group):5} {errors[-1]:7.1%} {(said / was - 1).mean():+7.1%}"
            f" {np.abs(said / was - 1).max():7.1%} {constant:9.1%}"
        )
    print(f"mean over sets {np.mean(errors):.1%}")
    group = [r for r in sets["sailor"] if profiled(r)]
    said, was = np.array([predicted_s(r, profile=True) for r in group]), np.array([seconds(r) for r in group])
    print(
        f"sailor's OPT-350 by its layer profile: {len(group)} rows, {error(said, was):.1%}, bias"
        f" {(said / was - 1).mean():+.1%}, worst {np.abs(said / was - 1).max():.1%}; by the tables"
        f" {error(np.array([predicted[r] for r in group]), was):.1%}"
    )
    print("\norder of layouts")
    total = []
    for name, group in sets.items():
        found = [ranking(c, predicted) for c in choices(group)]
        if found:
            regret, right, pairs = zip(*found, strict=True)
            total += found
            print(
                f"{name:14} {len(found):4} choices, regret {np.mean(regret):.1%} (worst {max(regret):.1%}),"
                f" {sum(right)} of {sum(pairs)} pairs right ({sum(right) / max(1, sum(pairs)):.0%})"
            )
    regret, right, pairs = zip(*total, strict=True)
    print(f"all: regret {np.mean(regret):.1%}, {sum(right) / sum(pairs):.0%} of pairs right")
    print("\nmemory")
    for name, group in by_set(runs).items():
        if any(not r.fits for r in group):
            refused = sum(not accepted(r) for r in group if r.fits)
            taken = sum(accepted(r) for r in group if not r.fits)
            print(
                f"{name:14} {refused} of {sum(r.fits for r in group)} that ran refused,"
                f" {taken} of {sum(not r.fits for r in group)} that did not fit accepted"
            )


if __name__ == "__main__":
    main()

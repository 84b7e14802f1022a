"""Print the planner's errors on published runs: step times, the order of layouts, memory.

    python benchmarks/published_table.py

Step time: the mean of |predicted / measured - 1|, given the run's software. For comparison: the error with one constant
share of the GPUs' peak (of all FLOPs, with recomputation), fitted to the other sets. Order of layouts, among those
measured for one model, batch and number of GPUs: the slowdown of the layout predicted to be fastest against the
fastest (regret), and the share of pairs in the right order among those that differ by more than 3%. Memory: runs that
completed but would be refused, and runs out of memory that would be accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from published_fit import FULL_WEIGHT
from published_runs import (
    Run,
    costs,
    generation,
    gpu,
    has_profile,
    layers,
    layout,
    predicted_s,
    read,
    read_left_out,
    software,
)

from holmes_hpc.planning.cost.flops import hardware_flops_per_step
from holmes_hpc.planning.cost.memory import memory, stage_capacity
from holmes_hpc.planning.cost.uncertainty import measured as measured_errors


def ideal_s(run: Run) -> float:
    """Return the seconds of all FLOPs of a step at the GPUs' peak."""
    flops = hardware_flops_per_step(run.model, run.batch, run.tp, run.recompute)
    return flops / (run.gpus * gpu(run.gpu).peak_tflops * 1e12)


def error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(predicted / measured - 1).mean())


def best_constant(sets: Iterable[Sequence[Run]]) -> float:
    """Return the share of the peak with the least mean error over `sets`, each of equal weight."""
    ratios = [np.array([ideal_s(r) / (r.seconds or 1) for r in runs]) for runs in sets]
    shares = np.geomspace(0.1, 0.9, 400)
    return float(min(shares, key=lambda share: np.mean([np.abs(ratio / share - 1).mean() for ratio in ratios])))


def by_set(runs: Iterable[Run]) -> dict[str, list[Run]]:
    runs_of_set = defaultdict(list)
    for run in runs:
        runs_of_set[run.set].append(run)
    return dict(runs_of_set)


def print_errors(sets: dict[str, list[Run]], predicted: dict[Run, float]) -> None:
    """Print the errors of each set, and the mean over sets by GPU generation and by attention."""
    print(f"{'set':14} {'rows':>5} {'fit':>7} {'bias':>7} {'left out':>9} {'inside':>7} {'constant':>9}")
    left_out, interval = read_left_out(), measured_errors().sets
    rows, groups = list[tuple[float, ...]](), defaultdict[str, list[int]](list)
    for name, group in sets.items():
        estimates, measured = np.array([predicted[r] for r in group]), np.array([seconds(r) for r in group])
        share = best_constant(other_runs for key, other_runs in sets.items() if key != name)
        ratios = np.array([row.ratio for row in left_out if (row.left, row.name) == ("set", name)])
        rows.append(
            (
                error(estimates, measured),
                float((estimates / measured - 1).mean()),
                float(np.abs(ratios - 1).mean()),
                float(np.mean([interval.low <= 1 / ratio <= interval.high for ratio in ratios])),
                error(np.array([ideal_s(r) / share for r in group]), measured),
            )
        )
        print(
            f"{name:14} {len(group):5} "
            + " ".join(f"{x:{w}.1%}" for x, w in zip(rows[-1], (7, 7, 9, 7, 9), strict=True))
        )
        for key in (generation(group[0]), "fused attention" if software(group[0]).flash else "unfused attention"):
            groups[key].append(len(rows) - 1)
        if len(group) >= FULL_WEIGHT:
            groups[f"sets of at least {FULL_WEIGHT} rows"].append(len(rows) - 1)
    for key, members in groups.items():
        means = np.array([rows[i] for i in members]).mean(axis=0)
        print(f"{key} ({len(members)} sets): fit {means[0]:.1%}, left out {means[2]:.1%}, constant {means[4]:.1%}")


def layout_choices(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the groups of runs with the same model, batch, machine and software, and at least two layouts."""
    groups = defaultdict(list)
    for r in runs:
        groups[r.set, r.model, r.global_size, r.gpus, r.gpu, r.attention, r.fused_norm, r.note].append(r)
    return [c for c in groups.values() if len({(r.tp, r.pp, r.chunks, r.micro_size, r.recompute) for r in c}) > 1]


def rank_choice(choice: Sequence[Run], predicted: dict[Run, float]) -> tuple[float, int, int]:
    """Return (regret, pairs in the right order, pairs that differ by more than 3%)."""
    best = min(choice, key=lambda r: predicted[r])
    pairs = [(a, b) for a, b in combinations(choice, 2) if abs(np.log(seconds(a) / seconds(b))) > 0.03]
    right = sum((predicted[a] < predicted[b]) == (seconds(a) < seconds(b)) for a, b in pairs)
    return seconds(best) / min(map(seconds, choice)) - 1, right, len(pairs)


def seconds(run: Run) -> float:
    assert run.seconds is not None
    return run.seconds


def is_accepted(run: Run) -> bool:
    """Return whether the run fits in memory according to the planner."""
    run_layout = layout(run, costs(run))
    return bool((memory(run_layout, layers(run, run_layout)).total() <= stage_capacity(run_layout)).all())


def main() -> None:
    runs = [r for r in read() if r.expressible]
    sets = by_set(r for r in runs if r.seconds)
    predicted = {r: predicted_s(r) for group in sets.values() for r in group}
    print_errors(sets, predicted)
    group = [r for r in sets["sailor"] if has_profile(r)]
    estimates, measured = np.array([predicted_s(r, profile=True) for r in group]), np.array([seconds(r) for r in group])
    print(
        f"sailor's OPT-350 from its layer profile: {len(group)} rows, {error(estimates, measured):.1%}, bias"
        f" {(estimates / measured - 1).mean():+.1%}, worst {np.abs(estimates / measured - 1).max():.1%}; "
        f"from the tables {error(np.array([predicted[r] for r in group]), measured):.1%}"
    )
    print("\norder of layouts")
    all_rankings = []
    for name, group in sets.items():
        rankings = [rank_choice(c, predicted) for c in layout_choices(group)]
        if rankings:
            regret, right, pairs = zip(*rankings, strict=True)
            all_rankings += rankings
            print(
                f"{name:14} {len(rankings):4} choices, regret {np.mean(regret):.1%} (worst {max(regret):.1%}),"
                f" {sum(right)} of {sum(pairs)} pairs right ({sum(right) / max(1, sum(pairs)):.0%})"
            )
    regret, right, pairs = zip(*all_rankings, strict=True)
    print(f"all: regret {np.mean(regret):.1%}, {sum(right) / sum(pairs):.0%} of pairs right")
    print("\nmemory")
    for name, group in by_set(runs).items():
        if any(not r.fits for r in group):
            refused = sum(not is_accepted(r) for r in group if r.fits)
            accepted_runs = sum(is_accepted(r) for r in group if not r.fits)
            print(
                f"{name:14} {refused} of {sum(r.fits for r in group)} completed runs refused,"
                f" {accepted_runs} of {sum(not r.fits for r in group)} runs out of memory accepted"
            )


if __name__ == "__main__":
    main()

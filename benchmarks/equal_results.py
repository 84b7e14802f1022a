"""Compare the results of two checkouts: plans, predictions and losses must be equal.

    python benchmarks/equal_results.py OLD_TREE [--cache FILE] [--parts plans,predictions,training] [--allow-faster]
        [--layouts 30]

The new checkout is the one with this file. Each runs the same probe in its own process:

- plans: 50 searches over 25 sites, 10 of them with per-stage TP/DP;
- predictions: 100 user-fixed layouts over the same kind of sites;
- training: 20 steps of gpt_tiny under 5 layouts and `--layouts` drawn ones, as local processes. Both checkouts train
  the plans of the old one.

Sites and options come from seeds; a draw without a plan is drawn again. Old plans are read and written by the new
checkout before they are compared. Free text is not compared. Losses and gradient norms must be equal to the last digit,
with more than two replicas, whose gradients may be summed in another order, to 1e-6. Other numbers must be equal to
1e-12. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations, count
from math import inf, nan
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import HolmesError, PlanError
from holmes_hpc.fabric import site as site_module
from holmes_hpc.fabric.site import CPU, FabricLink, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search import best

Pool: Any = getattr(site_module, "Pool", None) or site_module.Fabric  # type: ignore[attr-defined]  # older checkouts
NEW_TREE = Path(__file__).resolve().parents[1]
CASES = {"plans": 50, "predictions": 100}
TOLERANCE = {"plans": 1e-12, "predictions": 1e-12, "training": 0.0}
FREE_TEXT = ("version", "assumptions", "notes", "why_not")
A100, H100 = Gpu("a100-80gb", 312, 80, 2400), Gpu("h100-80gb", 989, 80, 3600)
MODELS = ("gpt_3_6b", "gpt_7_5b", "llama2_7b", "llama3_8b", "mistral_7b", "gpt_39b")
USER_OPTIONS: list[dict[str, Any]] = yaml.safe_load("""[  # of the second search of each site, in turn
{partition: uniform}, {strategy: pipeline, schedule: 1f1b}, {transport: single}, {tp: 4, pp: 4},
{strategy: hierarchical-dp}, {recompute: full, distributed_optimizer: false},
{strategy: one-fabric, search_micro_size: true}, {schedule: interleaved, virtual_stages: 2},
{edge_dtype: fp8, edge_connections: 4}, {max_memory_gib: 40, partition: proportional},
{tp: 8, recompute: selective}, {strategy: pipeline, nodes: all}]""")
LAYOUT_OPTIONS: dict[str, list[Any]] = yaml.safe_load("""{  # a user-fixed layout has one value of each
tp: [1, 2, 4, 8], pp: [1, 2, 3, 4, 6, 8], dp: [1, 2, 3, 4, 6, 8, 12, 16], virtual_stages: [1, 1, 2],
schedule: [auto, ahead], recompute: [none, selective, full], partition: [exact, proportional, uniform],
strategy: [auto, auto, one-fabric, pipeline, hierarchical-dp], transport: [holmes, holmes, single],
sequence_parallel: [false, true], distributed_optimizer: [true, true, false]}""")
TRAINED: dict[str, tuple[tuple[tuple[int, int], ...], dict[str, Any]]] = {  # (nodes, ranks of a node), options
    "PP 2": (((1, 1), (1, 1)), {"tp": 1, "pp": 2, "dp": 1}),
    "TP 2": (((1, 2),), {"tp": 2, "pp": 1, "dp": 1}),
    "DP 2": (((2, 1),), {"tp": 1, "pp": 1, "dp": 2}),
    "interleaved": (((2, 1), (2, 1)), {"tp": 1, "pp": 2, "dp": 2, "virtual_stages": 2, "schedule": "interleaved"}),
    "per stage": (((1, 2), (1, 2)), {"tp": 1, "pp": 2, "dp": 2}),
}


REORDERED = 1e-6  # the relative difference that other orders of sums may make


def drawn_layouts(number: int) -> dict[str, tuple[tuple[tuple[int, int], ...], dict[str, Any]]]:
    """Return `number` layouts like those of TRAINED, of at most six ranks, which come from a seed."""
    rng, layouts = random.Random("layouts"), dict[str, Any]()
    while len(layouts) < number:
        tp, pp, dp = rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3, 4))
        chunks = rng.choice((1, 2)) if pp > 1 and 8 % dp == 0 and 8 // dp % pp == 0 else 1
        pools = rng.choice((1, 2)) if pp == 2 else 1
        if tp * pp * dp > 6 or 8 % dp:
            continue
        options = {"tp": tp, "pp": pp, "dp": dp, "virtual_stages": chunks, "distributed_optimizer": True}
        options |= {"schedule": rng.choice(("auto", "ahead", ("1f1b", "interleaved")[chunks - 1]))}
        options |= {"sequence_parallel": rng.random() < 0.5, "bucket_bytes": rng.choice((None, 20_000))}
        nodes = tuple((pp * dp // pools, tp) for _ in range(pools))
        layouts[f"drawn {len(layouts)}: {options}"] = nodes, options
    return layouts


def pools_of(site: Site) -> Any:
    """Return the pools of a site, which older checkouts call fabrics."""
    return getattr(site, "pools", None) or site.fabrics


def draw_site(rng: random.Random, least: int) -> Site:
    """Return a site of `least` to four fabrics with at most 64 nodes in all, and `links` between some."""
    kinds = rng.choice(((A100,), (H100,), (A100, H100)))
    ethernet_gbps = rng.choice((10.0, 25.0, 100.0))
    fabrics = []
    for i in range(rng.randint(least, 4)):
        nic = NicType(rng.choice(("ib", "roce", "ib", "roce", "ethernet")))
        nodes, gpus_per_node = rng.choice((2, 3, 4, 5, 6, 7, 8, 12, 16)), rng.choice((4, 8, 8))
        gpu, gbps = rng.choice(kinds), rng.choice((200.0, 400.0, 1600.0)) if nic.rdma else None
        fabrics.append(Pool(f"{nic}-{i}", nic, f"p{i}", nodes, gpus_per_node, ethernet_gbps, gpu, rdma_gbps=gbps))
    pairs = [pair for pair in combinations([f.name for f in fabrics], 2) if rng.random() < 0.25]
    links = tuple(FabricLink(pair, gbps=rng.choice((0.4, 5.0, 40.0)), delay_ms=rng.choice((0, 2))) for pair in pairs)
    return Site("drawn", tuple(fabrics), links=links)


def plan_options(site: Site, options: dict[str, Any]) -> PlanOptions:
    """Return PlanOptions; `unequal` is a bool in older checkouts and a text in newer ones, off by default."""
    if options.get("nodes") == "all":
        options = {**options, "nodes": {f.name: f.nodes for f in pools_of(site)}}
    is_unequal = options.get("unequal", False)
    try:
        return PlanOptions(**{**options, "unequal": str(is_unequal).lower()})
    except HolmesError:
        return PlanOptions(**{**options, "unequal": is_unequal})


def draw_search(number: int) -> tuple[Site, dict[str, Any]]:
    """Return the site and the options of a search: two searches per site, every fifth with per-stage TP/DP."""
    is_unequal = number % 5 == 3
    site = draw_site(random.Random(f"site {number // 2}"), least=2 if number // 2 % 5 in (1, 4) else 1)
    second = {"unequal": True} if is_unequal else USER_OPTIONS[number // 2 % len(USER_OPTIONS)]
    return site, second if number % 2 or is_unequal else {}


def draw_layout(number: int) -> tuple[Site, dict[str, Any]]:
    """Return a site and the options of one user-fixed layout."""
    rng = random.Random(f"layout {number}")
    return draw_site(rng, least=1), {key: rng.choice(values) for key, values in LAYOUT_OPTIONS.items()}


def plan_cases(part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the plan of each case, as plain data."""
    fixed_plan = getattr(best, "fixed_plan", None) or getattr(best, "given_plan", None)  # its name in older checkouts
    draw_case, make = (draw_search, best.best_plan) if part == "plans" else (draw_layout, fixed_plan)
    plans = 0
    for number in count():
        site, options = draw_case(number)
        rng = random.Random(f"model {number}")
        model, batch = rng.choice(MODELS), Batch(rng.choice((512, 768, 1536)), rng.choice((1, 2, 4)), 2048)
        try:
            plan = make(named(model), batch, site, plan_options(site, options), Costs())
        except PlanError:
            continue
        fabrics = " + ".join(f"{f.nodes}x{f.gpus_per_node} {f.gpu.name} {f.nic}" for f in pools_of(site))
        yield f"{number}: {model} {batch.global_size}/{batch.micro_size} on {fabrics}, {options}", plan.to_dict()
        plans += 1
        if plans == CASES[part]:
            return


def trained_plan(name: str, layout: tuple[tuple[tuple[int, int], ...], dict[str, Any]]) -> dict[str, Any]:
    """Return a plan of gpt_tiny for processes of this machine, as plain data."""
    fabrics, options = layout
    parts = zip((NicType.IB, NicType.ROCE), fabrics, strict=False)
    site = Site("local", tuple(Pool(str(x), x, str(x), n, g, 0.05, CPU, 0.4, gres=False) for x, (n, g) in parts))
    plan = best.best_plan(named("gpt_tiny"), Batch(8, 1, 64), site, plan_options(site, options), Costs()).to_dict()
    if name == "per stage":  # TP 2 x DP 1, then TP 1 x DP 2, which no search would choose
        plan |= {"version": 2, "parallel": {"sequence_parallel": True}}
        plan |= {"schedule": {"kind": "ahead", "in_flight": [3, 1]}, "alternatives": []}
        plan["stages"] = [{**s, "nodes": 1, "tp": 2 - i, "dp": 1 + i} for i, s in enumerate(plan["stages"])]
        del plan["transports"], plan["predicted"]
    return plan


def train(plan: dict[str, Any]) -> dict[str, Any]:
    """Train a plan with `holmes run` on CPUs; return its losses and gradient norms."""
    with tempfile.TemporaryDirectory(prefix="holmes-equal-") as folder:
        Path(folder, "plan.yaml").write_text(yaml.safe_dump(plan))
        Path(folder, "site.yaml").write_text(yaml.safe_dump({key: plan["site"][key] for key in ("name", "fabrics")}))
        command = [sys.executable, "-m", "holmes_hpc", "run", "--site", f"{folder}/site.yaml", "launcher=local"]
        command += [f"plan_file={folder}/plan.yaml", f"run_dir={folder}/run", "train.steps=20", "train.device=cpu"]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{process.stdout[-2000:]}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}


def read_and_write(plan: dict[str, Any]) -> dict[str, Any]:
    """Read a plan of the old checkout and return it as this one writes it."""
    try:
        return best.Plan.from_dict(plan).to_dict()
    except HolmesError as e:
        return {"refused": str(e)}


def write_results(output: Path, parts: list[str], old_results: Path | None, layouts: int) -> None:
    """Write the results of the checkout on PYTHONPATH; with `old_results` also those as this checkout writes them."""
    old = json.loads(old_results.read_text()) if old_results else {}
    results: dict[str, Any] = {}
    for part in parts:
        start = time.perf_counter()
        if part == "training":
            drawn = TRAINED | drawn_layouts(layouts)
            plans = old["training plans"] if old else {name: trained_plan(name, drawn[name]) for name in drawn}
            results |= {"training plans": plans, part: {name: train(plan) for name, plan in plans.items()}}
        else:
            results[part] = dict(plan_cases(part))
            results[f"old {part}"] = {name: read_and_write(plan) for name, plan in old.get(part, {}).items()}
        print(f"{os.environ['PYTHONPATH']}: {part} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    output.write_text(json.dumps(results))


def run_probe(tree: Path, parts: list[str], layouts: int, *old_results: Path) -> dict[str, Any]:
    """Run the probe under a checkout."""
    with tempfile.TemporaryDirectory(prefix="holmes-equal-") as folder:
        command = [sys.executable, __file__, str(tree), "--probe", f"{folder}/out.json", "--parts", ",".join(parts)]
        command += ["--layouts", str(layouts)]
        command += [f"--cache={path.resolve()}" for path in old_results]
        subprocess.run(command, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
        return json.loads(Path(folder, "out.json").read_text())


def entries(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each entry of nested data, except free text."""
    if not data or not isinstance(data, dict | list):
        yield key, data
        return
    for name, value in data.items() if isinstance(data, dict) else enumerate(data):
        if name not in FREE_TEXT:
            yield from entries(value, f"{key}.{name}")


def compare(old: Any, new: Any) -> tuple[str, float]:
    """Return the first differing key with both values, and the largest relative difference: infinite unless numbers."""
    old_values, new_values, first_difference, largest = dict(entries(old)), dict(entries(new)), "", 0.0
    for key in old_values | new_values:
        a, b = old_values.get(key, "(missing)"), new_values.get(key, "(missing)")
        if a != b:
            numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
            largest = max(largest, abs(a - b) / max(abs(a), abs(b)) if numbers else inf)
            first_difference = first_difference or f"{key[1:]}: {a!r:.40} -> {b!r:.40}"
    return first_difference, largest


def report_differences(part: str, old: dict[str, Any], new: dict[str, Any], allow_faster: bool) -> int:
    """Print the totals of a part and its differing cases; return how many differ."""
    lines, largest = [], 0.0
    for case in old | new:
        plans = old.get(case, {}), new.get(case, {})
        is_reordered = part == "training" and ("'dp': 3" in case or "'dp': 4" in case)
        tolerance = REORDERED if is_reordered else TOLERANCE[part]
        first_difference, relative = compare(*plans)
        before_s, after_s = (plan.get("predicted", {}).get("step_time_s", nan) for plan in plans)
        is_allowed = allow_faster and "'unequal'" in case and after_s <= before_s
        if relative > tolerance and not is_allowed:
            lines.append(
                f"  {case}: {first_difference}" + (f" (step {before_s:g} -> {after_s:g} s)" if before_s > 0 else "")
            )
        largest = max(largest, 0 if is_allowed else relative)
    print(f"{part}: {len(old | new)} cases, {len(lines)} differ, largest relative difference {largest:.3g}")
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old_tree", type=Path)
    parser.add_argument("--cache", type=Path, help="JSON file with the old results; missing results are added")
    parser.add_argument("--parts", default=",".join(TOLERANCE))
    parser.add_argument("--allow-faster", action="store_true", help="a faster per-stage plan is no difference")
    parser.add_argument("--layouts", type=int, default=0, help="layouts to draw for training, beside the five")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if arguments.probe:
        return write_results(arguments.probe, parts, arguments.cache, arguments.layouts)
    with tempfile.TemporaryDirectory(prefix="holmes-equal-") as folder:
        cache = arguments.cache or Path(folder, "old.json")
        old = json.loads(cache.read_text()) if cache.exists() else {}
        if missing := [part for part in parts if part not in old]:
            old |= run_probe(arguments.old_tree.resolve(), missing, arguments.layouts)
            cache.write_text(json.dumps(old))
        new = run_probe(NEW_TREE, parts, arguments.layouts, cache)
    counts = [report_differences(p, new.get(f"old {p}", old[p]), new[p], arguments.allow_faster) for p in parts]
    raise SystemExit(sum(counts) > 0)


if __name__ == "__main__":
    main()

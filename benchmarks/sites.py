"""What `holmes nodes` reads in the texts of real sites, beside what an expert reads: the table of results/sites.md.

Example: python benchmarks/sites.py ../shared/data/sites > benchmarks/results/sites.md
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from holmes_hpc.fabric.listing import Listing, listing_of
from holmes_hpc.fabric.nodes import with_reading
from holmes_hpc.fabric.site import Pool
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import parse_node, parse_partition

COLUMNS = ("gpu", "memory_gib", "gpus_per_node", "nodes")
# The partition that the experts' notes name; at the other sites none is judged.
PARTITIONS = {"lumi_g": "standard-g", "mila": "long", "nvidia_cwdfw": "batch", "uci_hpc3": "gpu"}
# By the notes; two memory sizes at jeanzay, node e1 at azure_cyclecloud. Elsewhere one per row of expected.csv.
POOLS = {"stanford_sherlock": 3, "mila": 7, "jeanzay": 4, "azure_cyclecloud": 2}
GUESSES = {"gpu": re.compile(r"GPU type|no GPU in Slurm"), "memory_gib": re.compile(r"GiB assumed|no GPU in Slurm")}


def read_site(folder: Path) -> Listing:
    """Return the listing of the site whose texts lie in `folder`: nodes and parts."""
    lines = [line.strip() for name in ("nodes", "parts") for line in (folder / name).read_text().splitlines()]
    nodes = [with_reading(parse_node(line)) for line in lines if line.startswith("NodeName=")]
    return listing_of(folder.name, nodes, [parse_partition(li) for li in lines if li.startswith("PartitionName=")])


def figures(pools: list[Pool]) -> tuple[str, str, str, str]:
    """Return the kind, memory, GPUs per node and nodes of alike pools, as texts in the form of expected.csv."""
    first = pools[0]
    kind = re.sub(r"(-gcd|-pcie|-sxm|-\d+gb)+$", "", first.gpu.name).replace("-", " ")
    return kind, f"{first.gpu.memory_gib:g}", str(first.gpus_per_node), str(sum(p.nodes for p in pools))


def judge(expected: dict[str, str], listing: Listing, pools: list[Pool]) -> list[str]:
    """Return a mark for each column: empty if right, ``~`` if wrong or unknown and stated as a guess, else ``✗``."""
    if not pools:
        return ["✗"] * len(COLUMNS)
    lines = [line for line in listing.grouping.assumptions if set(pools[0].node_names) <= set(named(line))]
    marks = []
    for column, value in zip(COLUMNS, figures(pools), strict=True):
        is_guess = column in GUESSES and any(GUESSES[column].search(line) for line in lines)
        is_open = expected[column] == "?" and (column not in GUESSES or is_guess or expected["site"] in POOLS)
        marks.append("" if expected[column] == value or (is_open and not is_guess) else "~" if is_guess else "✗")
    return marks


def named(line: str) -> list[str]:
    """Return the nodes in front of an assumption's text."""
    return expand(line.partition(": ")[0])


def match(rows: list[dict[str, str]], listing: Listing) -> list[tuple[dict[str, str], list[Pool]]]:
    """Return each expected row with the pools that agree with it most; one without a memory has those of all sizes."""
    left = list(listing.grouping.pools)
    pairs: list[tuple[dict[str, str], list[Pool]]] = []
    for row in rows:
        best = min(left, key=lambda p: judge(row, listing, [p]).count("✗"), default=None)
        pools = [p for p in left if best in (p,) or (row["memory_gib"] == "?" and alike(p, best))]
        left = [p for p in left if p not in pools]
        pairs.append((row, pools))
    return pairs


def alike(a: Pool, b: Pool | None) -> bool:
    """Return whether two pools differ in memory only."""
    return b is not None and figures([a])[0] == figures([b])[0] and a.gpus_per_node == b.gpus_per_node


def main(folder: Path) -> None:
    """Print the page."""
    with (folder / "expected.csv").open(encoding="utf-8") as file:
        expected = list(csv.DictReader(file))
    sites = {
        name: [row for row in expected if row["site"] == name] for name in dict.fromkeys(r["site"] for r in expected)
    }
    counts = dict.fromkeys((*COLUMNS, "pools", "partition", "all"), 0)
    lines, guesses = [], 0
    for name, rows in sites.items():
        listing = read_site(folder / name)
        all_pools = listing.grouping.pools
        marks = [True] * len(COLUMNS)
        for row, pools in match(rows, listing):
            judged = judge(row, listing, pools)
            guesses += judged.count("~")
            marks = [a and b != "✗" for a, b in zip(marks, judged, strict=True)]
            values = figures(pools) if pools else ("-",) * len(COLUMNS)
            texts = [f"{row[c]} / {v} {m}".strip() for c, v, m in zip(COLUMNS, values, judged, strict=True)]
            lines.append(f"| {name} | {' | '.join(texts)} | {pools[0].partition if pools else '-'} |")
        wanted = POOLS.get(name, len(rows))
        is_right = len(all_pools) == wanted
        partition = name not in PARTITIONS or {p.partition for p in all_pools} == {PARTITIONS[name]}
        lines.append(
            f"| | | | | pools {wanted} / {len(all_pools)}{'' if is_right else ' ✗'} | {'' if partition else '✗'} |"
        )
        results = dict(zip(counts, (*marks, is_right, partition), strict=False))
        for key, value in results.items():
            counts[key] += value and (key != "partition" or name in PARTITIONS)
        counts["all"] += all(results.values())
    print("# What Slurm's texts of real sites tell\n")
    print("Made by `python benchmarks/sites.py DIR`. A cell: what an expert reads / what `holmes nodes` reads.")
    print("✗: wrong. ~: not in the text, and a line of the output states the guess and how to settle it.")
    print("The partition is judged where notes name one.\n")
    print(f"Right or a stated guess, of {len(sites)} sites ({len(PARTITIONS)} for the partition; `all`: everything at")
    print(f"that site): {', '.join(f'{key} {n}' for key, n in counts.items())}. Stated guesses: {guesses} cells.\n")
    print("| site | GPU | GiB | GPUs per node | nodes | partition |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

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
from holmes_hpc.slurm.scontrol import parse_node, parse_partition

COLUMNS = ("gpu", "memory_gib", "gpus_per_node", "nodes")
# The partition that the experts' notes name; at the other sites none is judged.
PARTITIONS = {"lumi_g": "standard-g", "mila": "long", "nvidia_cwdfw": "batch", "uci_hpc3": "gpu"}
POOLS = {"stanford_sherlock": 3, "mila": 7}  # by the notes; elsewhere one per row of expected.csv
GUESS = re.compile(r"GPU types? |GiB assumed|no GPU in Slurm")


def read_site(folder: Path) -> Listing:
    """Return the listing of the site whose texts lie in `folder`: nodes and parts."""
    lines = [line.strip() for name in ("nodes", "parts") for line in (folder / name).read_text().splitlines()]
    nodes = [with_reading(parse_node(line)) for line in lines if line.startswith("NodeName=")]
    return listing_of(folder.name, nodes, [parse_partition(li) for li in lines if li.startswith("PartitionName=")])


def figures(fabric: Pool) -> tuple[str, str, str, str]:
    """Return the kind, memory, GPUs per node and nodes of a fabric, as texts in the form of expected.csv."""
    kind = re.sub(r"(-gcd|-pcie|-sxm|-\d+gb)+$", "", fabric.gpu.name).replace("-", " ")
    return kind, f"{fabric.gpu.memory_gib:g}", str(fabric.gpus_per_node), str(fabric.nodes)


def right(expected: dict[str, str], read: tuple[str, ...], guess_is_stated: bool = True) -> tuple[bool, ...]:
    """Return for each column whether what was read is right. `?`: the GPU and its memory need a line on the guess."""
    return tuple(
        guess_is_stated or c not in COLUMNS[:2] if expected[c] == "?" else expected[c] == value
        for c, value in zip(COLUMNS, read, strict=True)
    )


def match(rows: list[dict[str, str]], fabrics: tuple[Pool, ...]) -> list[tuple[dict[str, str], Pool | None]]:
    """Return each expected pool with the unused fabric that agrees with it most; None if none is left."""
    left = list(fabrics)
    pairs: list[tuple[dict[str, str], Pool | None]] = []
    for row in rows:
        best = max(left, key=lambda f: sum(right(row, figures(f))), default=None)
        if best is not None:
            left.remove(best)
        pairs.append((row, best))
    return pairs


def cell(expected: str, read: str | None) -> str:
    """Return one cell: what is expected, and what is read where it differs."""
    return f"{expected} / {read or '-'}" + ("" if expected in ("?", read) else " ✗")


def main(folder: Path) -> None:
    """Print the page."""
    with (folder / "expected.csv").open(encoding="utf-8") as file:
        expected = list(csv.DictReader(file))
    sites = {
        name: [row for row in expected if row["site"] == name] for name in dict.fromkeys(r["site"] for r in expected)
    }
    counts = dict.fromkeys((*COLUMNS, "pools", "partition", "all"), 0)
    lines = []
    for name, rows in sites.items():
        listing = read_site(folder / name)
        fabrics = listing.grouping.pools
        guess_is_stated = any(GUESS.search(line) for line in listing.grouping.assumptions)
        marks = [True] * len(COLUMNS)
        for row, fabric in match(rows, fabrics):
            read = figures(fabric) if fabric else (None,) * len(COLUMNS)
            good = right(row, figures(fabric), guess_is_stated) if fabric else tuple(row[c] == "?" for c in COLUMNS)
            marks = [a and b for a, b in zip(marks, good, strict=True)]
            partition = fabric.partition if fabric else "-"
            texts = [cell(row[c], value) for c, value in zip(COLUMNS, read, strict=True)]
            lines.append(f"| {name} | {' | '.join(texts)} | {partition} |")
        wanted = POOLS.get(name, len(rows))
        pools = len(fabrics) == wanted
        partition = name not in PARTITIONS or {f.partition for f in fabrics} == {PARTITIONS[name]}
        lines.append(f"| | | | | pools {wanted} / {len(fabrics)}{'' if pools else ' ✗'} | {'' if partition else '✗'} |")
        results = dict(zip(counts, (*marks, pools, partition), strict=False))
        for key, is_right in results.items():
            counts[key] += is_right and (key != "partition" or name in PARTITIONS)
        counts["all"] += all(results.values())
    print("# What Slurm's texts of real sites tell\n")
    print("Made by `python benchmarks/sites.py DIR`. A cell: what an expert reads / what `holmes nodes` reads.")
    print("✗: wrong. `?`: the text does not say; a GPU and its memory then count as right if a line states the guess.")
    print("Kinds of GPU in one partition are merged into one fabric. The partition is judged where notes name one.\n")
    print(f"Right, of {len(sites)} sites ({len(PARTITIONS)} for the partition; `all`: everything at that site):")
    print(", ".join(f"{key} {n}" for key, n in counts.items()) + ".\n")
    print("| site | GPU | GiB | GPUs per node | nodes | partition |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

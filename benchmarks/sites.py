"""What `holmes nodes` and `holmes site` find out about real sites, beside what an expert reads: results/sites.md.

A stand-in for srun answers the probe jobs of `holmes site` as the site's nodes would.

Example: python benchmarks/sites.py ../shared/data/sites > benchmarks/results/sites.md
"""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.fabric import node_facts
from holmes_hpc.fabric.discovery import Discovery, discover
from holmes_hpc.fabric.listing import Listing, listing_of
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import Nic, NodeNics, RdmaPort
from holmes_hpc.fabric.node_facts import MARK, facts_of
from holmes_hpc.fabric.nodes import SiteNode, with_reading
from holmes_hpc.fabric.partitions import NodeSettings
from holmes_hpc.fabric.site import Pool
from holmes_hpc.fabric.site_record import site_text
from holmes_hpc.slurm.constraint import matcher
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import Topology, parse_node, parse_partition

COLUMNS = ("gpu", "memory_gib", "gpus_per_node", "nodes")
# The partition that the experts' notes name; at the other sites none is judged.
PARTITIONS = {"lumi_g": "standard-g", "mila": "long", "nvidia_cwdfw": "batch", "uci_hpc3": "gpu"}
# By the notes; two memory sizes at jeanzay, node e1 at azure_cyclecloud. Elsewhere one per row of expected.csv.
POOLS = {"stanford_sherlock": 3, "mila": 7, "jeanzay": 4, "azure_cyclecloud": 2}
# Site -> (words in a node's GRES, features and partitions; NIC type, ports, Gb/s of a port; Gb/s of its Ethernet), the
# first that matches a node. From the features, where they have it; from pages of the centres; else made up.
Wires = tuple[str, str, int, float, float]
NICS: dict[str, tuple[Wires, ...]] = {
    "osc_pitzer": (("", "ib", 1, 100, 10),),
    "uci_hpc3": (("", "ib", 1, 100, 10),),
    "nih_biowulf": (("ibfdr", "ib", 1, 56, 10), ("", "ib", 1, 200, 10)),
    "meta_fair": (("ib1", "ib", 1, 100, 25), ("ib4", "ib", 4, 100, 25)),
    "nvidia_cwdfw": (("", "ib", 8, 400, 100),),
    "goethe_hlr": (("", "ib", 1, 100, 1),),
    "bcm_dgx_a800": (("", "ib", 8, 200, 100),),
    "aws_pcluster": (("p5", "efa", 32, 100, 100), ("48xlarge", "efa", 16, 100, 100), ("", "efa", 1, 100, 50)),
    "charai_gcp": (("", "ethernet", 0, 0, 200),),
    "iit_franklin": (("h200", "ib", 4, 400, 25), ("", "ib", 1, 200, 25)),
    "asu_sol": (("", "ib", 1, 200, 25),),
    "stanford_sherlock": (("NDR", "ib", 1, 400, 25), ("HDR", "ib", 1, 200, 25), ("", "ib", 1, 100, 25)),
    "univ_cg14": (("", "roce", 1, 100, 100),),
    "yale_grace": (("", "ib", 1, 100, 10),),
    "lumi_g": (("", "slingshot", 4, 200, 200),),
    "cscs_daint": (("", "ethernet", 0, 0, 10),),
    "ubc_mig": (("", "ib", 8, 400, 100),),
    "slinky_k8s": (("", "efa", 32, 100, 100),),
    "azure_cyclecloud": (("nv24", "ethernet", 0, 0, 40), ("", "ib", 8, 400, 80)),
    "csc_mahti_roihu": (("a100", "ib", 2, 100, 25), ("", "ib", 4, 200, 100)),
    "tacc_vista": (("", "ib", 1, 400, 25),),
    "dkrz_levante": (("", "ib", 2, 200, 25),),
    "mila": (
        ("h100", "ib", 4, 400, 25),
        ("a100", "ib", 2, 100, 25),
        ("l40s", "ethernet", 0, 0, 100),
        ("", "ethernet", 0, 0, 10),
    ),
    "jeanzay": (("h100", "ib", 4, 400, 25), ("", "omnipath", 4, 100, 10)),
}
DEVICES = {"ib": "mlx5_{}", "roce": "mlx5_{}", "efa": "rdmap{}s0", "omnipath": "hfi1_{}"}
GUESSES = {"gpu": re.compile(r"GPU type|no GPU in Slurm"), "memory_gib": re.compile(r"GiB assumed|no GPU in Slurm")}


def read_site(folder: Path) -> Listing:
    """Return the listing of the site whose texts lie in `folder`: nodes and parts."""
    lines = [line.strip() for name in ("nodes", "parts") for line in (folder / name).read_text().splitlines()]
    nodes = [with_reading(parse_node(line)) for line in lines if line.startswith("NodeName=")]
    return listing_of(folder.name, nodes, [parse_partition(li) for li in lines if li.startswith("PartitionName=")])


def wires(site: str, node: SiteNode) -> Wires:
    """Return the NICs of a site's node."""
    words = " ".join([*(g.type for g in node.gres), *node.features, *node.partitions])
    return next(entry for entry in NICS[site] if entry[0].lower() in words.lower())


def answer(site: str, node: SiteNode, gpu: tuple[str, float] | None) -> str:
    """Return the line that `node_facts` prints on a node, from what its kernel and its driver show. `gpu`: name and GiB
    of its GPU by nvidia-smi."""
    _, kind, count, gbps, ethernet_gbps = wires(site, node)
    interfaces = [Nic("eno1", NicType.ETHERNET, address="10.0.0.9", prefix=16, gbps=ethernet_gbps)]
    ports = []
    for i in range(count):
        if kind == "slingshot":
            interfaces.append(
                Nic(f"hsn{i}", NicType.ETHERNET, address=f"10.{i + 1}.0.9", prefix=16, gbps=gbps, driver="cxi_ss1")
            )
            continue
        if kind == "roce":
            interfaces.append(Nic(f"ens{i}", NicType.ROCE, address=f"10.{i + 1}.0.9", prefix=16, gbps=gbps))
        owner = f"ens{i}" if kind == "roce" else None
        ports.append(RdmaPort(DEVICES[kind].format(i), 1, kind, True, "ACTIVE", gbps, interface=owner))
    facts = facts_of(
        node.name, NodeNics(tuple(interfaces), tuple(ports), verbs=bool(ports)), node.features, {}, files=()
    )
    data = {**asdict(facts), "clock": time.time()}
    return MARK + json.dumps({**data, "gpu": gpu[0], "gpu_memory_gib": gpu[1], "gpus": node.gpus or 1} if gpu else data)


def fake_srun(site: str, listing: Listing, rows: list[dict[str, str]]) -> Callable[..., list[tuple[str, str]]]:
    """Return a stand-in for the runner of srun commands. Each job gets the first node that satisfies its options."""

    def run(commands: Sequence[Sequence[str]], timeout_s: float) -> list[tuple[str, str]]:
        answers = []
        for command in commands:
            options = dict(word.lstrip("-").partition("=")[::2] for word in command if word.startswith("--"))
            has_features = matcher(options.get("constraint"))
            names = expand(options.get("nodelist", "")) or [n.name for n in listing.nodes if n.usable]
            kind, _, count = options.get("gpus-per-node", "").rpartition(":")
            node = next(
                n
                for n in listing.nodes
                if n.name in names
                and options["partition"] in n.partitions
                and has_features(frozenset(n.features))
                and n.name not in expand(options.get("exclude", ""))
                and n.gpus_of(kind or None) >= int(count or 0)
            )
            pool = listing.pool_of[node.name]
            row = next((row for row, pools in match(rows, listing) if pool in pools), None)
            is_known = row is not None and row["memory_gib"] != "?" and not row["gpu"].startswith("mi")
            gpu = (
                (f"NVIDIA {row['gpu'].upper()}-{row['memory_gib']}GB", float(row["memory_gib"]))
                if is_known and row
                else None
            )
            answers.append((answer(site, node, gpu), ""))
        return answers

    return run


def discovered(site: str, listing: Listing, rows: list[dict[str, str]]) -> tuple[Discovery, list[dict[str, Any]]]:
    """Return what `holmes site` finds out, and the pools of the file that it writes, each with its fabric's `nic`."""
    node_facts.partial_outputs = fake_srun(site, listing, rows)
    discovery = discover(listing, Topology({}, {}), NodeSettings(), wait_s=300)
    data = yaml.safe_load(site_text(discovery, [n.name for n in listing.nodes], {})[0])
    nics = {fabric["name"]: fabric["nic"] for fabric in data["fabrics"]}
    return discovery, [{**pool, "nic": nics[pool["fabric"]]} for pool in data["pools"]]


def nic_rows(site: str, listing: Listing, rows: list[dict[str, str]]) -> tuple[list[str], bool, bool]:
    """Return the lines of the table of NICs, and whether type and rate are right in all pools."""
    discovery, pools = discovered(site, listing, rows)
    nodes = {n.name: n for n in listing.nodes}
    lines, are_right = [], [True, True]
    for pool in pools:
        _, kind, count, gbps, ethernet_gbps = wires(site, nodes[expand(pool["node_names"][0])[0]])
        rate, actual = count * gbps or ethernet_gbps, pool.get("rdma_gbps") or pool["ethernet_gbps"]
        gib = f"{pool['gpu']['memory_gib']:g} GiB" if "memory_gib" in pool["gpu"] else ""
        marks = [pool["nic"] == kind, rate == actual]
        are_right = [a and b for a, b in zip(are_right, marks, strict=True)]
        lines.append(
            f"| {site} | {pool['name']} | {kind} / {pool['nic']}{'' if marks[0] else ' ✗'} "
            f"| {rate:g} / {actual:g}{'' if marks[1] else ' ✗'} | {pool['gpu']['name']} {gib} "
            f"| {len(discovery.probes)} |"
        )
    lines += [f"| {site} | {problem} | | | | |" for problem in (*discovery.problems, *discovery.unknown_gpus.values())]
    return lines, are_right[0], are_right[1]


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
    nic_lines, types, rates = [], 0, 0
    for name, rows in sites.items():
        of_site, is_type_right, is_rate_right = nic_rows(name, read_site(folder / name), rows)
        nic_lines, types, rates = nic_lines + of_site, types + is_type_right, rates + is_rate_right
    print("# What Slurm's texts of real sites tell\n")
    print("Made by `python benchmarks/sites.py DIR`. A cell: what an expert reads / what `holmes nodes` reads.")
    print("✗: wrong. ~: not in the text, and a line of the output states the guess and how to settle it.")
    print("The partition is judged where notes name one.\n")
    print(f"Right or a stated guess, of {len(sites)} sites ({len(PARTITIONS)} for the partition; `all`: everything at")
    print(f"that site): {', '.join(f'{key} {n}' for key, n in counts.items())}. Stated guesses: {guesses} cells.\n")
    print("| site | GPU | GiB | GPUs per node | nodes | partition |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))
    print("\n# What `holmes site` writes\n")
    print(
        "A stand-in for srun answers as the node of the job would: the NICs of NICS in benchmarks/sites.py, the GPU of"
    )
    print(
        "the table above. A cell: the node's / the site file's. The rate is that of all RDMA NICs of a node, or of its"
    )
    print(f"Ethernet. Right at all pools of a site, of {len(sites)} sites: NIC type {types}, rate {rates}.\n")
    print("| site | pool | NIC | Gb/s | GPU in the file | jobs |")
    print("|---|---|---|---|---|---|")
    print("\n".join(nic_lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

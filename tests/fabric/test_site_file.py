import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import FabricLink, Gpu, NicNames, Pool
from holmes_hpc.fabric.site_file import SiteFile, read_site_file
from holmes_hpc.planning.cost.network_figures import GLOO_LINKS, NCCL_LINKS

GOOD = """
name: two-clusters
ethernet_gbps: 25
gpu: {name: a100-80gb, peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 200, partition: gpu-ib, nodes: 4, gpus_per_node: 8}
  - {name: roce-a, nic: roce, rdma_gbps: 200, partition: gpu-roce, nodes: 4, gpus_per_node: 8, ethernet_gbps: 10}
  - {name: eth-a, nic: ethernet, partition: cpu, nodes: 2, gpus_per_node: 8}
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return read_site_file(path)


def test_the_documented_file(tmp_path: Path) -> None:
    site = read(tmp_path, GOOD)
    assert [f.ethernet_gbps for f in site.pools] == [25, 10, 25]
    assert site.pool("ib-a").gpus == 32 and site.pool("eth-a").rdma_gbps is None
    assert type(site).from_dict(site.to_dict()) == site


@pytest.mark.parametrize("gpu", ["A100-80GB", "{name: A100-80GB}"])
def test_a_gpu_may_be_only_its_kind(tmp_path: Path, gpu: str) -> None:
    text = re.sub(r"gpu: \{name: a100-80gb.*?\}", f"gpu: {gpu}", GOOD, count=1)
    assert text != GOOD
    kind = read(tmp_path, text).pool("ib-a").gpu
    assert (kind.name, kind.peak_tflops, kind.memory_gib) == ("A100-80GB", 312, 80)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = """name: two
ethernet_gpbs: 25
gpu: A101
fabrics:
  - {name: ib-a, nic: ibb, rdma_gbps: 200, partition: gpu-ib, nodes: 0, gpus_per_node: 1}
  - {name: roce-a, nic: roce, rdma_gbps: fast, partition: gpu-roce, node: 1, gpus_per_node: 1}
  - {name: roce-b, nic: roce, rdma_gbps: 100, partition: gpu-roce, nodes: 1, gpus_per_node: 1, gpu: A102}
links: [{between: [ib-a, roce-a], gbps: -10}]
"""
    starts = [
        "gpu: gpu 'A101' is not a known kind",
        "fabric roce-b: gpu 'A102' is not a known kind",
        "pool ib-a: nic is 'ibb'",
        "pool ib-a: nodes is 0",
        "fabric roce-a: unknown key 'node'; did you mean 'nodes'?",
        "fabric roce-a: rdma_gbps is 'fast'",
    ]
    assert [line[: len(start)] for line, start in zip(mistakes(tmp_path, text), starts, strict=True)] == starts
    lines = mistakes(tmp_path, text.replace("A101", "A100"))
    assert lines[0].startswith("site: unknown key 'ethernet_gpbs'") and "gbps is -10" in lines[1] and len(lines) == 7


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("fabric: ib, partition: new", "fabric: ibx, partition: new", "pool h100: fabric is 'ibx', which is not under"),
        ("fabric: ib, partition: new", "partition: new", "pool h100: fabric is missing; give one of ib"),
        ("nic: ib,", "nic: ibb,", "fabric ib: nic is 'ibb'; use ib, roce"),
        ("nic: ib,", "nic: infiniband,", "fabric ib: nic is 'infiniband'"),
        ("rdma_gbps: 200", "rdma_gpbs: 200", "fabric ib: unknown key 'rdma_gpbs'; did you mean 'rdma_gbps'?"),
        ("rdma_gbps: 200", "rdma_gbps: -200", "fabric ib: rdma_gbps is -200; use a number above 0"),
        ("nodes: 2", "nodes: 0", "pool h100: nodes is 0"),
        ("nic: ib, rdma_gbps: 200", "nic: ib", "pool a100: rdma_gbps is missing"),
    ],
)
def test_a_mistake_about_the_fabric_of_pools_is_one_line(tmp_path: Path, old: str, new: str, line: str) -> None:
    text = """name: mixed
ethernet_gbps: 25
fabrics: [{name: ib, nic: ib, rdma_gbps: 200}]
pools:
  - {name: h100, fabric: ib, partition: new, nodes: 2, gpus_per_node: 8, gpu: {name: h100}, rdma_gbps: 400}
  - {name: a100, fabric: ib, partition: old, nodes: 4, gpus_per_node: 8, gpu: {name: a100-80gb}}
"""
    (text_of_mistake,) = mistakes(tmp_path, text.replace(old, new))
    assert text_of_mistake.startswith(line)


def mistakes(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SiteError) as refused:
        read(tmp_path, text)
    return [str(error).removeprefix(f"{tmp_path / 'site.yaml'}: ") for error in (refused.value, *refused.value.others)]


@pytest.mark.parametrize("key", ["", "constraint: a100, ", "gres_type: a100, ", "exclude: 'n[1-4]', "])
def test_pools_that_one_request_selects_are_warned_about(tmp_path: Path, key: str) -> None:
    text = GOOD.replace("partition: gpu-roce, ", f"partition: gpu-ib, {key}")
    warning = "jobs on ib-a and roce-a may get each other's nodes of partition gpu-ib: give them constraint"
    assert any(line.startswith(warning) for line in read(tmp_path, text).assumptions) == (not key)


def test_the_page_has_every_key_gpu_kind_and_factor() -> None:
    page = (Path(__file__).parents[2] / "docs/site-file.md").read_text()
    for cls in (SiteFile, Pool, Gpu, FabricLink):
        for field in fields(cls):
            assert f"| `{field.name}` |" in page, (cls, field.name)
    for _, gpu in read_vocabulary().gpus:
        assert f"`{gpu.name}`" in page, gpu.name
    names = {"local": "inside a node", "ib": "InfiniBand", "roce": "RoCE, EFA, Slingshot, Omni-Path"}
    for kind, name in {**names, "ethernet": "TCP over Ethernet"}.items():
        row = f"| {name} | {NCCL_LINKS[kind].efficiency:g} | {GLOO_LINKS[kind].efficiency:g} |"
        assert row in page.replace("**", ""), row


NAMED = GOOD.replace(
    "nodes: 4, gpus_per_node: 8}",
    """nodes: 4, gpus_per_node: 8, ethernet: bond0,
     hca: [mlx5_0, mlx5_1], storage: [mlx5_8, 10.9.0.0/16, 'fec0:0:0:1::/64'], nccl_net: IBext_v11,
     node_nics: {'ib[3-4]': {ethernet: eno2}, ib9: {hca: [mlx5_3]}}}""",
    1,
)


def test_nics_are_named_for_a_fabric_and_for_single_nodes(tmp_path: Path) -> None:
    site = read(tmp_path, NAMED)
    ib = site.pool("ib-a")
    storage = ("mlx5_8", "10.9.0.0/16", "fec0:0:0:1::/64")
    assert ib.nic_names("ib1") == NicNames("bond0", ("mlx5_0", "mlx5_1"), storage)
    assert ib.nic_names("ib4") == NicNames("eno2", ("mlx5_0", "mlx5_1"), storage)
    assert ib.nic_names("ib9") == NicNames("bond0", ("mlx5_3",), storage)
    assert type(site).from_dict(json.loads(json.dumps(site.to_dict()))) == site
    assert hash(site) is not None
    assert site.pool("roce-a").nic_names("x") == NicNames() and "hca" not in site.to_dict()["fabrics"][1]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ethernet_gbps: 25", "ethernet_gbps: -25", "ethernet_gbps is -25"),
        ("ethernet_gbps: 25", "ethernet_gbps: 1e-3", "or null; YAML reads 1e-3 as text: write 0.001"),
        ("nodes: 4", "nodes: 9e4", "use a whole number from 1; YAML reads 9e4 as text: write 90000"),
        ("ethernet_gbps: 25", "ethernet_gbps: .nan", "ethernet_gbps is nan; use a number above 0 (Gb/s)"),
        ("ethernet_gbps: 25", "", "fabric ib-a: ethernet_gbps is missing"),
        ("ethernet_gbps: 25", "ethernet_gpbs: 25", "did you mean 'ethernet_gbps'"),
        ("rdma_gbps: 200,", "rdma_GBps: 25,", "rates are in Gb/s, 8 for each GB/s; write rdma_gbps: 200"),
        (
            "intra_node_gbps: 2400",
            "intra_node_GBps: 300",
            "rates are in Gb/s, 8 for each GB/s; write intra_node_gbps: 2400",
        ),
        ("ethernet_gbps: 25", "ethernet_GBps: 3", "site: unknown key 'ethernet_GBps': rates are in Gb/s, 8 for each"),
        ("nic: ib, rdma_gbps: 200,", "nic: ib,", "pool ib-a: rdma_gbps is missing"),
        ("partition: gpu-ib", "partition: 'x; touch y'", "no partition of Slurm can be named 'x; touch y'"),
        ("partition: gpu-ib", "partition: --wrap=id", "no partition of Slurm can be named '--wrap=id'"),
        ("nic: ib,", "nic: infiband,", "pool ib-a: nic is 'infiband'"),
        ("nic: roce,", "nic: rose,", "(did you mean 'roce'?)"),
        ("nic: ethernet,", "nic: ethernet, rdma_gbps: 5,", "Ethernet-only pool has rdma_gbps"),
        ("nodes: 4, gpus_per_node: 8}", "nodes: 0, gpus_per_node: 8}", "nodes is 0"),
        ("nic: ethernet,", "nic: ethernet, hca: [mlx5_0],", "Ethernet-only pool has hca"),
        ("nic: ib,", "nic: ib, hca: mlx5_0,", "hca is 'mlx5_0'; use a list of texts"),
        ("nic: ib,", "nic: ib, storage: [10.9.0.0/99],", "storage: '10.9.0.0/99' is not a network"),
        ("nic: ib,", "nic: ib, node_nics: {ib1: {ethernt: x}},", "did you mean 'ethernet'"),
        ("nic: ethernet,", "nic: ethernet, rdma_efficiency: 0.5,", "Ethernet-only pool has rdma_efficiency"),
        ("nic: roce,", "nic: roce, rdma_efficiency: 1.5,", "rdma_efficiency is 1.5"),
        ("gpus_per_node: 8}", "gpus_per_node: 8, node_gpus: 4}", "node_gpus is 4, less than gpus_per_node, 8"),
        (
            "fabrics:",
            "pools: [{name: p, fabric: ib-a, nodes: 1}]\nfabrics:",
            "fabric ib-a: it has nodes of its own, and pools; make a pool of them, or remove nodes",
        ),
        ("nodes: 4, gpus_per_node: 8}", "nodes: 4.5, gpus_per_node: 8}", "nodes is 4.5"),
        ("gpus_per_node: 8}", "gpu_per_node: 8}", "did you mean 'gpus_per_node'"),
        ("partition: gpu-ib,", "", "partition is missing"),
        ("peak_tflops: 312", "peak_tflops: lots", "peak_tflops is 'lots'"),
        ("name: a100-80gb, peak_tflops: 312", "name: own-kind", "is not a known kind and has no peak_tflops"),
        ("name: a100-80gb, peak_tflops: 312", "name: own-kind", "gpu 'own-kind'"),
        ("name: roce-a", "name: ib-a", "two pools are named 'ib-a'"),
        (
            "fabrics:",
            "pools: [{name: p, fabric: ib-a, node_names: ['n[1-4]']},"
            " {name: q, fabric: ib-a, node_names: ['n[1,5-7]']}]"
            "\nfabrics:",
            "node n1 is in pools p and q; leave it in one",
        ),
        (
            "fabrics:",
            "pools: [{name: p, fabrics: ib-a}]\nfabrics:",
            "pool p: fabric is missing; give one of ib-a, roce",
        ),
        ("fabrics:", "pools: [{name: p, fabric: [ib-a]}]\nfabrics:", "fabric is ['ib-a'], which is not under fabrics"),
        ("name: ib-a", "name: 'ib a; rm'", "is not letters"),
        ("fabrics:", "fabrics: {}\nx:", "unknown key 'x'"),
        ("name: two-clusters", "name: [", "not YAML"),
        ("fabrics:", "links: [{between: [ib-a, roce-b], gbps: 10}]\nfabrics:", "a link names unknown fabric 'roce-b'"),
        ("fabrics:", "links: [{between: [ib-a, ib-a], gbps: 10}]\nfabrics:", "between is ['ib-a', 'ib-a']"),
        ("fabrics:", "links: [{between: [ib-a, roce-a], gbps: -1}]\nfabrics:", "gbps is -1; use a number above 0"),
        ("fabrics:", "links: [{between: [ib-a, roce-a]}]\nfabrics:", "no gbps, total_gbps or delay_ms; give gbps"),
        ("fabrics:", "links: [{between: [ib-a, roce-a], delay: 5}]\nfabrics:", "unknown key 'delay'"),
        (
            "fabrics:",
            "links: [{between: [ib-a, roce-a], gbps: 1}, {between: [roce-a, ib-a], gbps: 2}]\nfabrics:",
            "two links between ib-a and roce-a",
        ),
        ("fabrics:", "links: {between: [ib-a, roce-a], gbps: 1}\nfabrics:", "links"),
        ("ethernet_gbps: 25", "ethernet_gbps: 25000", "ethernet_gbps is 25000 Gb/s, more than any machine has"),
        ("rdma_gbps: 200", "rdma_gbps: 2.0e+11", "pool ib-a: rdma_gbps is 2e+11 Gb/s, more than any machine"),
        ("ethernet_gbps: 25", "ethernet_gbps: 1.0e-9", "pool ib-a: ethernet_gbps is 1e-09 Gb/s, less than any machine"),
        (
            "fabrics:",
            "links: [{between: [ib-a, roce-a], gbps: 11}]\nfabrics:",
            "link ib-a - roce-a: gbps is 11, but the Ethernet of roce-a has 10 Gb/s; correct it, or ethernet_gbps",
        ),
        ("peak_tflops: 312", "peak_tflops: 312000", "gpu a100-80gb: peak_tflops is 312000 TFLOP/s, more than"),
        ("memory_gib: 80", "memory_gib: 81920", "memory_gib is 81920 GiB, more than any machine has"),
        (
            "fabrics:",
            "links: [{between: [ib-a, roce-a], gbps: 1.0e+10}]\nfabrics:",
            "link ib-a - roce-a: gbps is 1e+10",
        ),
        (
            "fabrics:",
            "links: [{between: [ib-a, roce-a], total_gbps: 0}]\nfabrics:",
            "total_gbps is 0; use a number above",
        ),
        ("fabrics:", "links: [{between: [ib-a, roce-a], total_gbps: 1.0e+10}]\nfabrics:", "total_gbps is 1e+10"),
        ("name: a100-80gb, peak_tflops: 312", "name: a100-90gb", "gpu 'a100-90gb' is not a known kind and has no"),
        ("name: a100-80gb, peak_tflops: 312", "name: a10-80gb", "did you mean"),
        ("nodes: 4", "nodes: 100000", "nodes is 100000, more than any machine has; give at most 65533"),
        ("name: ib-a", 'constraint: "a\\nb", name: ib-a', "no constraint of Slurm can be 'a"),
        ("memory_gib: 80", "memory_gib: 80, attention: quick", "attention is 'quick'; use flash"),
        ("memory_gib: 80", "memory_gib: 80, fused_norm: 3", "fused_norm is 3; use true or false, or null"),
        ("name: a100-80gb", "attention: flash, name: v100-32gb", "attention is flash, which v100-32gb does not"),
        ("fabrics:", "links: [{between: 3, gbps: 1}]\nfabrics:", "between is 3"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(SiteError) as error:
        read(tmp_path, GOOD.replace(old, new, 1))
    text = str(error.value)
    assert says in text and "site.yaml" in text and "\n" not in text and "; " in text


@pytest.mark.parametrize("text", ["", "[]", "fabrics: []\nname: a", "name: x\nfabrics: [3]"])
def test_not_a_site(tmp_path: Path, text: str) -> None:
    with pytest.raises(SiteError):
        read(tmp_path, text)


def test_links(tmp_path: Path) -> None:
    links = "links: [{between: [roce-a, ib-a], gbps: 10, delay_ms: 5}, {between: [ib-a, eth-a], total_gbps: 10}]\n"
    site = read(tmp_path, GOOD.replace("fabrics:", links + "fabrics:"))
    link = site.link("ib-a", "roce-a")
    assert link is not None and (link.gbps, link.delay_ms) == (10, 5) and site.link("roce-a", "eth-a") is None
    ib, eth = site.pool("ib-a"), site.pool("eth-a")
    assert [site.rate_gbps("tcp", ib, eth, nodes) for nodes in (1, 32)] == [10, 10 / 32]
    assert type(site).from_dict(json.loads(json.dumps(site.to_dict()))) == site
    assert ["total_gbps" in data for data in site.to_dict()["links"]] == [False, True]


def test_the_rdma_efficiency_of_a_fabric_is_written_only_if_set(tmp_path: Path) -> None:
    site = read(tmp_path, GOOD.replace("nic: roce,", "nic: roce, rdma_efficiency: 0.9,"))
    assert [f.get("rdma_efficiency") for f in site.to_dict()["fabrics"]] == [None, 0.9, None]
    assert "rdma_efficiency" not in site.to_dict()["fabrics"][0] and type(site).from_dict(site.to_dict()) == site


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("intra_node_gbps: 2400", "intra_node_gbps: 300", ["intra_node_gbps of a100-80gb is 300; if that is in GB/s"]),
        (
            "nic: ib, rdma_gbps: 200",
            "nic: ib, rdma_gbps: 25",
            ["no InfiniBand has; if that is in GB/s, give Gb/s: 200"],
        ),
        ("intra_node_gbps: 2400", "intra_node_gbps: 600", ["if that is in GB/s, give Gb/s: 2400"]),
        ("intra_node_gbps: 2400", "intra_node_gbps: 9600", ["is 9600; a100-80gb's data sheet has 2400"]),
        ("peak_tflops: 312", "peak_tflops: 3120", ["peak_tflops of a100-80gb is 3120; a100-80gb's data sheet has"]),
        ("peak_tflops: 312", "peak_tflops: 400", []),
        ("memory_gib: 80", "memory_gib: 640", ["is 640; a100-80gb's data sheet has 80"]),
        ("ethernet_gbps: 10}", "ethernet_gbps: 1.25}", ["which no Ethernet has; if that is in GB/s, give Gb/s: 10"]),
        ("nic: roce, rdma_gbps: 200", "nic: roce, rdma_gbps: 25", []),
        ("a100-80gb", "own-kind", []),
        ("a100-80gb", "A100-80GB", []),
    ],
)
def test_gigabytes_in_place_of_gigabits_are_said(tmp_path: Path, old: str, new: str, says: list[str]) -> None:
    said = read(tmp_path, GOOD.replace(old, new)).assumptions
    assert len(said) == len(says) and all(a in b for a, b in zip(says, said, strict=True)), said


@pytest.mark.parametrize(
    ("name", "kind"), [("a100-80g", "a100-80gb"), ("a100-8gb", "a100-40gb"), ("nvidia_a100_sxm4_80gb", "a100-80gb")]
)
def test_the_kind_that_a_name_is_taken_for_is_said(tmp_path: Path, name: str, kind: str) -> None:
    said = read(tmp_path, GOOD.replace("a100-80gb, peak_tflops: 312, memory_gib: 80", name)).assumptions
    assert f"gpu {name} is treated as the known kind {kind}, with its tables" in said


def test_a_known_gpu_is_told_by_its_name(tmp_path: Path) -> None:
    text = GOOD.replace(", peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400", "").replace(
        "ethernet_gbps: 10}", "ethernet_gbps: 10, gpu: {name: h100, memory_gib: 94}}"
    )
    assert [(f.gpu.peak_tflops, f.gpu.memory_gib, f.gpu.intra_node_gbps) for f in read(tmp_path, text).pools] == [
        (312, 80, 2400),
        (989, 94, 3600),
        (312, 80, 2400),
    ]


def test_what_the_software_does_is_of_a_gpu_kind(tmp_path: Path) -> None:
    text = GOOD.replace("memory_gib: 80", "memory_gib: 80, attention: sdpa, fused_norm: no").replace(
        "ethernet_gbps: 10}",
        "ethernet_gbps: 10, gpu: {name: h100, peak_tflops: 989, memory_gib: 80,"
        " intra_node_gbps: 3600, attention: unfused}}",
    )
    site = read(tmp_path, text)
    assert [(f.gpu.attention, f.gpu.fused_norm) for f in site.pools] == [
        ("sdpa", False),
        ("unfused", None),
        ("sdpa", False),
    ]
    assert type(site).from_dict(site.to_dict()) == site
    assert "attention" not in str(read(tmp_path, GOOD).to_dict())  # as it was before there were such keys


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="No such file"):
        read_site_file(tmp_path / "none.yaml")

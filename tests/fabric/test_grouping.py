import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import node, partition, partition_line

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric import partitions as partitions_module
from holmes_hpc.fabric.grouping import OTHER_ARCHITECTURE, NodeSettings, constraint, group
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.partitions import usable_partitions, with_associations
from holmes_hpc.slurm.accounting import Association
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.scontrol import parse_partition


def grouped(nodes, partitions, settings=NodeSettings()):
    return group(nodes, partitions, settings)


def example():
    nodes = [node(f"ib{i}", "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a", "ib") for i in (1, 2, 3)]
    nodes += [node(f"roce{i}", "nic_roce,nic_0.25g,eth_0.05g,fabric_roce-a", "roce") for i in (1, 2)]
    nodes += [node(f"eth{i}", "nic_ethernet,nic_0.05g,eth_0.05g,fabric_eth-a", "eth") for i in (1, 2)]
    return nodes, [
        partition("ib", "ib[1-3]", default=True),
        partition("roce", "roce[1-2]"),
        partition("eth", "eth[1-2]"),
    ]


def test_labelled_site() -> None:
    grouping = grouped(*example())
    ib, roce, eth = grouping.pools
    assert (ib.name, ib.nic, ib.partition, ib.nodes) == ("ib-a", NicType.IB, "ib", 3)
    assert (ib.rdma_gbps, ib.ethernet_gbps) == (0.4, 0.05)
    assert ib.constraint == "nic_ib&fabric_ib-a" and ib.gpus_per_node == 1 and not ib.gres
    assert (eth.nic, eth.rdma_gbps, eth.ethernet_gbps) == (NicType.ETHERNET, None, 0.05)
    assert roce.node_names == ("roce1", "roce2")
    assert all("CPU rank" in a for a in grouping.assumptions)


def test_the_assumption_on_another_architecture_is_recognised() -> None:
    nodes, partitions = example()
    nodes = [replace(n, architecture="aarch64" if n.name.startswith("eth") else "x86_64") for n in nodes]
    (match,) = filter(None, map(OTHER_ARCHITECTURE.match, grouped(nodes, partitions).assumptions))
    assert match.groups() == ("eth[1-2]", "aarch64")


def test_ranks_of_nodes_without_gpus_come_from_their_features() -> None:
    grouping = grouped(
        [node("n1", "nic_ib,nic_1g,eth_1g,fabric_a,ranks_4"), node("n2", "nic_ib,nic_1g,eth_1g,fabric_b")],
        [partition("ib", "n[1-2]")],
    )
    assert {f.name: f.gpus_per_node for f in grouping.pools} == {"a": 4, "b": 1}
    assert not any(f.gres for f in grouping.pools)


def test_nic_names_in_features_apply_to_a_fabric_or_to_single_nodes() -> None:
    words = "nic_ib,nic_200g,eth_25g,fabric_a,nic_hca_mlx5_0"
    alike = grouped([node(f"n{i}", f"{words},nic_if_bond0") for i in (1, 2)], [partition("ib", "n[1-2]")]).pools[0]
    assert (alike.ethernet, alike.hca, alike.node_nics) == ("bond0", ("mlx5_0",), None)
    mixed = grouped(
        [node("n1", f"{words},nic_if_bond0"), node("n2", f"{words},nic_if_eno2"), node("n3", words)],
        [partition("ib", "n[1-3]")],
    ).pools[0]
    assert [mixed.nic_names(f"n{i}").ethernet for i in (1, 2, 3)] == ["bond0", "eno2", None]
    assert mixed.nic_names("n3").hca == ("mlx5_0",)
    words = "nic_ethernet,eth_25g,fabric_a,nic_hca_mlx5_0,nic_if_eno1"
    ethernet = grouped([node("n1", words)], [partition("ib", "n1")])
    assert (ethernet.pools[0].ethernet, ethernet.pools[0].hca) == ("eno1", ())


def test_nccl_networks_of_the_vocabulary_reach_the_fabrics(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("networks: {ib: IBext_v11}\n")
    nodes, partitions = example()
    grouping = group(nodes, partitions, NodeSettings(str(tmp_path / "own.yaml")))
    assert [f.nccl_net for f in grouping.pools] == ["IBext_v11", None, None]


def test_a_pool_has_the_cpus_and_memory_of_its_gpu_nodes() -> None:
    nodes = [node("n1", "nic_ib,fabric_a", gres="gpu:a100:8"), node("n2", "nic_ib,fabric_a", gres="gpu:a100:8")]
    pool = grouped(nodes, [partition("ib", "n[1-2]")]).pools[0]
    assert (pool.gpus_per_node, pool.node_gpus, pool.node_cpus, pool.node_memory_gib) == (8, None, 8, 16)
    assert grouped(*example()).pools[0].node_cpus is None  # ranks are CPU processes


@pytest.mark.parametrize(
    ("gres", "gres_type"),
    [
        (("gpu:a100:4(S:0)", "gpu:a100:4(S:0-1)"), "a100"),
        (("gpu:4", "gpu:4"), None),
        (("gpu:a100:2,gpu:h100:2", "gpu:a100:2,gpu:h100:2"), None),
    ],
)
def test_a_pool_has_the_gres_type_that_all_its_gpus_have(gres: tuple[str, str], gres_type: str | None) -> None:
    nodes = [node(f"n{i}", "nic_ib,fabric_a", gres=text) for i, text in enumerate(gres, 1)]
    assert grouped(nodes, [partition("ib", "n[1-2]")]).pools[0].gres_type == gres_type


def test_a_gres_type_selects_nodes_that_no_constraint_tells_apart() -> None:
    nodes = [node("n1", gres="gpu:a100:4"), node("n2", "nic_ib,fabric_x", gres="gpu:h100:4")]
    fabrics = {f.node_names: (f.gres_type, f.constraint) for f in grouped(nodes, [partition("ib", "n[1-2]")]).pools}
    assert fabrics == {("n1",): ("a100", ""), ("n2",): ("h100", "nic_ib&fabric_x")}


def test_down_nodes_are_left_out_and_listed() -> None:
    nodes, partitions = example()
    nodes[1] = node("ib2", "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a", "ib", state="IDLE+DRAIN")
    grouping = grouped(nodes, partitions)
    assert grouping.pools[0].node_names == ("ib1", "ib3") and "ib2" in grouping.left_out
    assert any(a.startswith("ib2: ") and "down" in a for a in grouping.assumptions)
    with pytest.raises(SiteError, match=r"no pool 'ib-b'; it has ib-a.*; ib2: left out: down, drained"):
        grouping.site("here").pool("ib-b")


def test_unlabelled_nodes_form_one_fabric_per_nic_type_and_partition() -> None:
    nodes = [
        node("a1", "ib_hdr", "gpu,all"),
        node("a2", "ib_hdr", "gpu,all"),
        node("b1", "roce100", "gpu,all"),
        node("c1", "ib_hdr", "new,all"),
    ]
    partitions = [partition("gpu", "a[1-2],b1"), partition("all", "a[1-2],b1,c1", default=True), partition("new", "c1")]
    grouping = grouped(nodes, partitions)
    assert {f.name: f.node_names for f in grouping.pools} == {
        "ib-new": ("c1",),
        "ib-gpu": ("a1", "a2"),
        "roce-gpu": ("b1",),
    }
    assert {f.name: f.constraint for f in grouping.pools}["ib-gpu"] == "ib_hdr"
    assert sum("no fabric label" in a for a in grouping.assumptions) == 3


def test_a_small_partition_inside_a_mixed_one_loses_no_node() -> None:
    nodes = [
        *(node(f"ib{i}", "nic_ib", "gpu,debug" if i < 3 else "gpu") for i in range(1, 9)),
        *(node(f"eth{i}", "nic_ethernet", "gpu") for i in (1, 2)),
    ]
    grouping = grouped(nodes, [partition("gpu", "ib[1-8],eth[1-2]"), partition("debug", "ib[1-2]", priority=10)])
    assert {f.partition: f.nodes for f in grouping.pools if f.nic is NicType.IB} == {"gpu": 8}


def test_a_partition_whose_node_limit_is_too_low_comes_last() -> None:
    nodes = [node(f"ib{i}", "nic_ib", "gpu,fast") for i in range(1, 5)]
    for max_nodes, chosen in (("2", "gpu"), ("UNLIMITED", "fast"), ("4", "gpu")):
        limited = replace(partition("fast", "ib[1-4]", priority=10), max_nodes=max_nodes)
        assert grouped(nodes, [partition("gpu", "ib[1-4]"), limited]).pools[0].partition == chosen


def test_a_job_gets_no_more_nodes_than_the_partition_allows() -> None:
    nodes = [node(f"ib{i}", "nic_ib,fabric_a", "ib,debug" if i < 3 else "ib") for i in range(1, 9)]
    limited = replace(partition("ib", "ib[1-8]"), max_nodes="6")
    grouping = grouped(nodes, [limited, partition("debug", "ib[1-2]")])
    fabric = grouping.pools[0]
    assert (fabric.partition, fabric.nodes, len(fabric.node_names)) == ("ib", 6, 8)
    assert any("6 nodes (MaxNodes)" in a for a in grouping.assumptions)


def test_nodes_with_ambiguous_features_are_left_out() -> None:
    nodes = [node("a1", "ib,roce", "p"), node("a2", "", "p"), node("a4", "nic_ib,nic_100g", "p")]
    grouping = grouped(nodes, [partition("p", "a[1-4]")])
    assert "a1" in grouping.left_out and "2 NIC types" in grouping.left_out["a1"]
    # a2 has no feature, and no constraint selects nodes without a feature.
    # nic_ib selects a4 but not a1, which has only the alias.
    assert [(p.name, p.constraint, p.exclude) for p in grouping.pools] == [
        ("ethernet-p", "", "a[1,4]"),
        ("ib-p", "nic_ib", ""),
    ]
    assert {"a1"} == {a.split(":")[0] for a in grouping.assumptions if "left out" in a}


def test_nodes_with_only_an_unknown_feature_are_assumed_to_be_ethernet() -> None:
    grouping = grouped([node("a2", "frobnicator", "p"), node("a4", "nic_ib,nic_100g", "p")], [partition("p", "a[1-4]")])
    assert [(f.name, f.constraint) for f in grouping.pools] == [("ethernet-p", "frobnicator"), ("ib-p", "nic_ib")]
    assert any("no feature names a NIC" in a and a.startswith("a2") for a in grouping.assumptions)


def test_ethernet_nodes_without_features_in_their_own_partition_are_usable() -> None:
    grouping = grouped([node("c1", "", "cpu"), node("c2", "", "cpu")], [partition("cpu", "c[1-2]")])
    (fabric,) = grouping.pools
    assert (fabric.nic, fabric.constraint, fabric.ethernet_gbps) == (NicType.ETHERNET, "", 10)
    assert any("10 Gb/s assumed" in a for a in grouping.assumptions)


def test_gpus_come_from_gres_and_differences_are_listed() -> None:
    nodes = [
        node("g1", "nic_ib,nic_200g,eth_25g,fabric_x", "p", gres="gpu:a100:8(S:0-1)"),
        node("g2", "nic_ib,nic_100g,eth_25g,fabric_x", "p", gres="gpu:v100:4(S:0-1)"),
        node("c1", "nic_ib", "p"),
    ]
    nodes += [node(f"g{i}", f"nic_ib,nic_{r}g,fabric_y", "p", gres="gpu:a30:2,gpu:t4:2") for i, r in ((3, 1), (4, 2))]
    grouping = grouped(nodes, [partition("p", "g[1-4],c1")])
    assert [(p.name, p.fabric_name, p.gpus_per_node, p.gpu.name, p.rdma_gbps) for p in grouping.pools] == [
        ("x-a100-40gb", "x", 8, "a100-40gb", 200),
        ("x-v100-16gb", "x", 4, "v100-16gb", 100),
        ("y", "y", 4, "t4", 1),
    ]
    text = "\n".join(grouping.assumptions)
    assert "GPU types differ inside a node" in text and "1 and 2 Gb/s" in text and "no GPU" in grouping.left_out["c1"]


def test_nodes_that_no_feature_tells_apart_are_excluded_by_name() -> None:
    nodes = [node("a1", "nic_ib", gres="gpu:a100:4"), node("a2", "nic_ib", gres="gpu:a100:8")]
    nodes += [node("m1", "nic_ib", gres="gpu:a100:4,gpu:a100_1g.5gb:7")]
    grouping = grouped(nodes, [partition("ib", "a[1-2],m1")])
    assert {p.gpus_per_node: p.exclude for p in grouping.pools} == {4: "a2,m1", 8: ""}
    assert any("jobs exclude these by name" in a for a in grouping.assumptions)


def test_gpus_with_mig_slices_are_left_out() -> None:
    nodes = [
        node("g1", "nic_ib,nic_200g,whole", "p", gres="gpu:a100:8"),
        node("g2", "nic_ib,nic_200g", "p", gres="gpu:a100_1g.5gb:7,gpu:a100:3"),
    ]
    grouping = grouped(nodes, [partition("p", "g[1-2]")])
    assert grouping.pools[0].node_names == ("g1",) and "MIG slices (a100_1g.5gb)" in grouping.left_out["g2"]


def test_an_unknown_gpu_is_listed() -> None:
    grouping = grouped([node("g1", "nic_ib,nic_200g", "p", gres="gpu:warp9:2")], [partition("p", "g1")])
    assert grouping.pools[0].gpu.name == "warp9"
    assert any("warp9 is not in the vocabulary" in a for a in grouping.assumptions)


def test_one_label_over_two_partitions_is_two_pools() -> None:
    nodes = [node(f"n{i}", "nic_ib,nic_100g,fabric_x", "p" if i < 3 else "q") for i in (1, 2, 3)]
    grouping = grouped(nodes, [partition("p", "n[1-2]"), partition("q", "n3")])
    assert [(p.fabric_name, p.partition, p.nodes) for p in grouping.pools] == [("x", "p", 2), ("x", "q", 1)]


def test_one_label_on_two_nic_types_is_two_fabrics() -> None:
    nodes = [node("n1", "nic_ib,nic_100g,fabric_x", "p"), node("n2", "nic_roce,nic_100g,fabric_x", "p")]
    grouping = grouped(nodes, [partition("p", "n[1-2]")])
    assert [f.name for f in grouping.pools] == ["x-ib", "x-roce"] and any(
        "2 NIC types" in a for a in grouping.assumptions
    )


def test_priority_and_default_decide_between_equal_partitions() -> None:
    nodes = [node("n1", "nic_ib,nic_100g,fabric_x", "low,high,def")]
    partitions = [partition("low", "n1"), partition("high", "n1", priority=10), partition("def", "n1", default=True)]
    assert grouped(nodes, partitions).pools[0].partition == "high"
    assert grouped(nodes, [partitions[2], partitions[0]]).pools[0].partition == "low"
    assert grouped(nodes, partitions, NodeSettings(partitions=("def",))).pools[0].partition == "def"


def test_closed_partitions_and_wrong_settings() -> None:
    nodes = [node("n1", "nic_ib", "p")]
    grouping = grouped(nodes, [partition("p", "n1", state="DOWN")])
    with pytest.raises(SiteError, match="no open partition"):
        grouping.site("c")
    with pytest.raises(SiteError, match="partitions: no partition 'q'; did you mean 'p'"):
        grouped(nodes, [partition("p", "n1")], NodeSettings(partitions=("q",)))


words = ["nic_ib", "nic_roce", "ib", "roce", "fabric_a", "fabric_b", "intel", "x", "nic_100g"]
features = st.lists(st.sampled_from(words), max_size=4, unique=True)


@given(
    st.lists(
        st.tuples(features, st.sampled_from(["p", "q", "p,q"]), st.sampled_from(["IDLE", "DOWN"])),
        min_size=1,
        max_size=7,
    )
)
def test_every_pool_selects_exactly_its_nodes(given_nodes) -> None:
    nodes = [node(f"n{i}", ",".join(f), p, state=s) for i, (f, p, s) in enumerate(given_nodes)]
    partitions = [
        partition(name, ",".join(n.name for n in nodes if name in n.partitions) or "(null)") for name in ("p", "q")
    ]
    grouping = grouped(nodes, partitions)
    for fabric in grouping.pools:
        required = [f for f in fabric.constraint.split("&") if f]
        selected = {
            n.name
            for n in nodes
            if fabric.partition in n.partitions and n.usable and all(f in n.features for f in required)
            if n.name not in expand(fabric.exclude)
        }
        assert selected == set(fabric.node_names)
    in_fabrics = [n for f in grouping.pools for n in f.node_names]
    assert len(in_fabrics) == len(set(in_fabrics))
    assert {n.name for n in nodes} == set(in_fabrics) | set(grouping.left_out)


def test_the_shortest_constraint_is_used() -> None:
    members = [node("n1", "intel,ib_hdr,big"), node("n2", "amd,ib_hdr,big")]
    assert constraint(members, [node("m1", "intel,big")]) == "ib_hdr"
    assert constraint(members, [node("m1", "ib_hdr")]) == "big"
    assert constraint(members, [node("m1", "ib_hdr"), node("m2", "big")]) == "ib_hdr&big"
    assert constraint(members, [node("m1", "ib_hdr,big,x")]) is None


@pytest.mark.parametrize(
    ("gres", "features", "memory"),
    [
        ("gpu:a100:4", "a100,a100-80g", 80),
        ("gpu:a100:4", "80gb", 80),
        ("gpu:a100:4", "gpu80", 80),
        ("gpu:a100:4", "hbm80g", 80),
        ("gpu:4", "GPU_SKU:A100_SXM4,gpu_mem:80GB", 80),
        ("gpu:4", "GPU_SKU:A100_SXM4,GPU_MEM:40GB", 40),
        ("gpu:4", "A100-80GB", 80),
        ("gpu:4", "v100,v100-32g", 32),
        ("gpu:a100:4,gpu-vram:80G", "", 80),
        ("gpu:a100_40:4", "mem80gb", 40),
        ("gpu:a100l:4", "", 80),
    ],
)
def test_gpu_memory_comes_from_features_and_gres_together(gres: str, features: str, memory: float) -> None:
    grouping = grouped([node("n1", f"nic_ib,fabric_a,{features}", gres=gres)], [partition("ib", "n1")])
    assert grouping.pools[0].gpu.memory_gib == memory
    assert not any(" GiB assumed" in a for a in grouping.assumptions)


@pytest.mark.parametrize("features", ["", "mem80gb", "gpu40,gpu80", "512G"])
def test_an_open_gpu_memory_is_the_smallest_and_reported(features: str) -> None:
    grouping = grouped([node("n1", f"nic_ib,fabric_a,{features}", gres="gpu:a100:4")], [partition("ib", "n1")])
    assert grouping.pools[0].gpu.memory_gib == 40
    (line,) = [a for a in grouping.assumptions if "GiB assumed" in a]
    assert "40 or 80 GiB" in line and "a100-80g" in line


def test_nodes_with_shards_only_are_left_out() -> None:
    nodes = [node("n1", "nic_ib,fabric_a", gres="shard:8"), node("n2", "nic_ib,fabric_a", gres="gpu:h100:8")]
    assert "shards" in grouped(nodes, [partition("ib", "n[1-2]")]).left_out["n1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"default": True}, "it is the default"),
        ({"max_nodes": "1"}, "it allows a job fewer of them"),
        ({"nodes": ("n1", "n2", "n3")}, "it has other nodes too"),
        ({"priority": 0}, "its priority is lower"),
        ({"nodes": ("n1",)}, None),
    ],
)
@pytest.mark.parametrize("label", ["fabric_x", "x"])
def test_a_partition_that_holds_the_same_nodes_is_passed_over_with_its_reason(
    change: dict[str, object], reason: str | None, label: str
) -> None:
    nodes = [node(f"n{i}", f"nic_ib,{label}", "general,htc") for i in (1, 2)]
    nodes.append(node("n3", "nic_roce,fabric_y", "roce,general" if "nodes" in change else "roce"))
    partitions = [partition("htc", "n[1-2]"), partition("roce", "n3")]
    grouping = grouped(nodes, [replace(partition("general", "n[1-2]"), **change), *partitions])
    assert {p.partition for p in grouping.pools} == {"htc", "roce"}
    line = f"n[1-2]: partition general is skipped for htc: {reason}; partitions=[general] uses it"
    assert (line in grouping.assumptions) == (reason is not None) == any("skipped" in a for a in grouping.assumptions)


@pytest.mark.parametrize(
    ("gres", "features", "is_open"),
    [
        ("gpu:a100:4", "", True),
        ("gpu:h100:8", "", True),
        ("gpu:a100:4", "gpu_a100_sxm4_80gb", False),
        ("gpu:a100_pcie_80gb:2", "", False),
        ("gpu:h200:8", "", False),
    ],
)
def test_an_open_form_factor_is_reported(gres: str, features: str, is_open: bool) -> None:
    grouping = grouped([node("n1", f"nic_ib,fabric_a,{features}", gres=gres)], [partition("ib", "n1")])
    lines = [line for line in grouping.assumptions if "SXM assumed" in line]
    assert bool(lines) == is_open and all("may be SXM or PCIe" in line and "-pcie" in line for line in lines)


def test_special_partitions_serve_only_if_asked_for() -> None:
    nodes = [node("n1", "nic_ib,fabric_x", "backfill,batch,long,cheap")]
    partitions = [
        partition("backfill", "n1", priority=9),
        partition("batch", "n1", max_time="1-00:00:00", priority=9),
        partition("long", "n1", max_time="7-00:00:00"),
        replace(partition("cheap", "n1"), preempt_mode="REQUEUE"),
    ]
    grouping = grouped(nodes, partitions)
    assert grouping.pools[0].partition == "long"
    text = " ".join(grouping.assumptions)
    assert "partition backfill is skipped: its name contains backfill" in text
    assert "partition cheap is skipped: its jobs are preempted" in text
    assert "partition batch is skipped for long: its time limit is shorter; partitions=[batch] uses it" in text
    asked = grouped(nodes, partitions, NodeSettings(partitions=("backfill",)))
    assert asked.pools[0].partition == "backfill"
    only = grouped([node("n1", "nic_ib,fabric_x", "debug")], [partition("debug", "n1")])
    assert only.pools[0].partition == "debug"


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"allow_accounts": ("chem",)}, {"account": "bio"}, "AllowAccounts lacks bio"),
        ({"deny_accounts": ("bio",)}, {"account": "bio"}, "DenyAccounts has bio"),
        ({"allow_qos": ("high",)}, {"qos": "normal"}, "AllowQos lacks normal"),
        ({"allow_groups": ("chem", "bio")}, {"groups": {"math"}}, "you are in none of AllowGroups=chem,bio"),
        ({"root_only": True}, {}, "only root"),
        ({"hidden": True}, {}, "it is hidden"),
    ],
)
def test_partitions_that_refuse_the_user_are_passed_over(fields: dict, settings: dict, reason: str) -> None:
    nodes = [node("n1", "nic_ib,fabric_x", "a,b")]
    partitions = [replace(partition("a", "n1"), **fields), partition("b", "n1", max_time="60")]
    grouping = grouped(nodes, partitions, NodeSettings(**settings))
    assert grouping.pools[0].partition == "b"
    assert any(f"partition a is skipped: {reason}" in a for a in grouping.assumptions)
    assert grouped(nodes, partitions[1:]).pools[0].partition == "b"


def test_allowed_groups_are_those_of_this_process(monkeypatch) -> None:
    limited = parse_partition(partition_line("a", "n1").replace("AllowGroups=ALL", "AllowGroups=chem,bio"))
    monkeypatch.setattr(partitions_module.grp, "getgrgid", lambda number: SimpleNamespace(gr_name=f"g{number}"))
    monkeypatch.setattr(partitions_module.os, "getgroups", lambda: [7])
    for user, names in ((0, set()), (1000, {f"g{os.getegid()}", "g7"})):
        monkeypatch.setattr(partitions_module.os, "geteuid", lambda user=user: user)
        assert with_associations(NodeSettings(), [limited]).groups == names
    assert limited.allow_groups == ("chem", "bio") and partition("b", "n1").allow_groups == ()


BIO = Association(("bio", "root", "science"), ("normal", "high"))
CHEM = Association(("chem",), ("normal",))


@pytest.mark.parametrize(
    ("fields", "settings", "associations", "reason"),
    [
        ({"allow_accounts": ("math",)}, {}, (BIO, CHEM), "AllowAccounts lacks bio, AllowAccounts lacks chem"),
        ({"allow_accounts": ("CHEM",)}, {}, (BIO, CHEM), None),
        ({"allow_accounts": ("science",)}, {}, (BIO, CHEM), None),  # an account above it
        ({"allow_accounts": ("chem",)}, {"account": "bio"}, (BIO, CHEM), "AllowAccounts lacks bio"),
        ({"allow_accounts": ("science",)}, {"account": "bio"}, (BIO, CHEM), None),
        ({"deny_accounts": ("bio", "chem")}, {}, (BIO, CHEM), "DenyAccounts has bio, DenyAccounts has chem"),
        ({"deny_accounts": ("bio",)}, {}, (BIO, CHEM), None),
        ({"allow_qos": ("high",)}, {}, (BIO, CHEM), None),
        ({"allow_qos": ("high",)}, {}, (CHEM,), "AllowQos lacks normal"),
        ({"allow_qos": ("high",)}, {"qos": "normal"}, (BIO, CHEM), "AllowQos lacks normal"),
        ({"deny_qos": ("normal",)}, {}, (BIO, CHEM), None),
        ({"deny_qos": ("normal",)}, {"account": "chem"}, (BIO, CHEM), "DenyQos has normal"),
        ({"allow_accounts": ("chem",), "allow_qos": ("high",)}, {}, (BIO, CHEM), "AllowAccounts lacks bio, AllowQos"),
        ({"allow_qos": ("high",)}, {}, (replace(CHEM, qos=()),), None),  # not known
        ({}, {}, (replace(CHEM, partition="b"),), "sacctmgr shows no association of yours for it"),
        ({}, {}, (replace(CHEM, partition="a"),), None),
        ({"allow_accounts": ("math",), "allow_qos": ("high",)}, {}, (), None),  # sacctmgr did not answer
    ],
)
def test_partitions_that_admit_none_of_the_users_associations_are_passed_over(
    fields: dict, settings: dict, associations: tuple, reason: str | None
) -> None:
    limited = replace(partition("a", "n1"), **fields)
    user = NodeSettings(**settings, associations=associations)
    open_, _ = usable_partitions([limited], user)
    assert list(open_) == (["a"] if reason is None else [])
    if reason is not None:
        with pytest.raises(SiteError, match=rf"no usable node \(n1: partition a: {re.escape(reason)}"):
            grouped([node("n1", "nic_ib", "a")], [limited], user).site("s")


names = st.sampled_from(["bio", "chem", "math"])
lists = st.lists(names, max_size=3).map(tuple)


@given(lists, lists, lists, lists, st.lists(st.builds(Association, lists.filter(bool), lists), max_size=3))
def test_one_more_association_never_closes_a_partition(
    allow: tuple, deny: tuple, allow_qos: tuple, deny_qos: tuple, associations: list[Association]
) -> None:
    limited = replace(
        partition("a", "n1"), allow_accounts=allow, deny_accounts=deny, allow_qos=allow_qos, deny_qos=deny_qos
    )

    def is_open(count: int) -> bool:
        return "a" in usable_partitions([limited], NodeSettings(associations=tuple(associations[:count])))[0]

    assert is_open(0)  # nothing is known
    assert all(is_open(count) <= is_open(count + 1) for count in range(1, len(associations)))


def test_associations_are_read_only_for_partitions_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holmes_hpc.fabric.partitions.read_associations", lambda: (BIO,))
    plain = partition("a", "n1")
    assert with_associations(NodeSettings(), [plain]) == NodeSettings()
    for field in ("allow_accounts", "deny_accounts", "allow_qos", "deny_qos"):
        settings = with_associations(NodeSettings(qos="high"), [plain, replace(plain, **{field: ("x",)})])
        assert settings == NodeSettings(qos="high", associations=(BIO,))


def test_reserved_nodes_serve_only_their_reservation() -> None:
    reserved = replace(node("n2", "nic_ib,fabric_x", state="IDLE+RESERVED"), reservation="team")
    nodes, partitions = [node("n1", "nic_ib,fabric_x"), reserved], [partition("ib", "n[1-2]")]
    grouping = grouped(nodes, partitions)
    assert grouping.pools[0].node_names == ("n1",) and "slurm.reservation=team" in grouping.left_out["n2"]
    assert grouped(nodes, partitions, NodeSettings(reservation="team")).pools[0].nodes == 2

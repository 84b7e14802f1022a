from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import Tree

from holmes_hpc.training.network.audit import Load, audit_bytes, expected, nic_faults

MB = 1e6
LOADS = [
    Load("ib1", "ib", "dp 0", 80 * MB),
    Load("ib1", "ethernet", "edge 0-1", 10 * MB),
    Load("ib1", "ib", "dp_cp 0", 20 * MB),
    Load("roce1", "roce", "dp 1", 60 * MB),
]


def test_expected_sums_groups() -> None:
    assert expected(LOADS)["ib1"] == {"ib": pytest.approx(100 * MB), "ethernet": pytest.approx(10 * MB)}


def test_healthy_counts_are_silent() -> None:
    counted = {"ib1": {"ib": 104 * MB, "ethernet": 11 * MB, "other": 0.2 * MB}, "roce1": {"roce": 63 * MB}}
    assert audit_bytes(counted, LOADS) == []


def test_data_parallel_traffic_on_ethernet_is_an_error_that_names_the_group() -> None:
    found = audit_bytes({"ib1": {"ib": 20 * MB, "ethernet": 90 * MB}}, LOADS, names={"ib1": {"ethernet": "eth0"}})
    assert len(found) == 1 and (found[0].level, found[0].node, found[0].nic) == ("error", "ib1", "eth0")
    assert "sent 90.0 MB per step, the plan expects 10.0 MB: probably group dp 0, which belongs on ib" in found[0].what


def test_a_nic_that_the_plan_does_not_use_counts_where_another_lacks_as_much() -> None:
    storage = {"ib": 100 * MB, "ethernet": 10 * MB, "other": 500 * MB}
    assert audit_bytes({"ib1": storage}, LOADS) == []
    (found,) = audit_bytes({"ib1": {"ib": 20 * MB, "ethernet": 10 * MB, "other": 80 * MB}}, LOADS)
    assert "other NIC other sent 80.0 MB" in found.what and "probably group dp 0, which belongs on ib" in found.what
    (found,) = audit_bytes({"ib1": {"ib": 20 * MB, "ethernet": 10 * MB, "other": 5 * MB}}, LOADS)
    assert found.level == "warning" and "ib NIC ib sent 80.0 MB per step less" in found.what


def test_too_little_is_a_warning() -> None:
    found = audit_bytes({"roce1": {"roce": 10 * MB}}, LOADS)
    assert [(f.level, f.node) for f in found] == [("warning", "roce1")]


@given(st.floats(0.92, 1.08))
def test_within_the_tolerance_nothing_is_said(share: float) -> None:
    counted = {node: {k: v * share for k, v in kinds.items()} for node, kinds in expected(LOADS).items()}
    assert audit_bytes(counted, LOADS) == []


@given(st.sampled_from([load for load in LOADS if load.kind != "ethernet"]))
def test_any_group_that_moves_to_ethernet_is_named(moved: Load) -> None:
    counted = expected(LOADS)
    counted[moved.node][moved.kind] -= moved.bytes
    counted[moved.node]["ethernet"] = counted[moved.node].get("ethernet", 0) + moved.bytes
    (found,) = audit_bytes(counted, LOADS)
    assert f"probably group {moved.label}, which belongs on {moved.kind}" in found.what and found.node == moved.node


def test_nics_that_go_down_in_mid_run(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.net("eth0")
    tree.net("roce0", operstate="down")
    tree.rdma("mlx5_0", tree.pci("0000:11:00.0"))
    tree.rdma("mlx5_1", tree.pci("0000:12:00.0"), state="1: DOWN")
    found = nic_faults(["eth0", "roce0", "mlx5_0:1", "mlx5_1:1", "ib9"], "n1", tree.root)
    assert [(nic, fault.where) for nic, fault in found.items()] == [
        ("roce0", "node n1"),
        ("mlx5_1:1", "node n1"),
        ("ib9", "node n1"),
    ]
    assert "gone" in found["ib9"].what


def test_bytes_that_no_group_lacks_are_probably_somebody_elses() -> None:
    (found,) = audit_bytes({"ib1": {"ib": 100 * MB, "ethernet": 90 * MB}}, LOADS, names={"ib1": {"ethernet": "eth0"}})
    assert found.level == "warning" and "probably another job's, or a service's" in found.what
    assert "squeue -w ib1" in found.hint and found.nic == "eth0"

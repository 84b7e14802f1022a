"""Counted bytes against planned bytes: which differences are errors and which are warnings."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import Tree

from holmes_hpc.training.network.audit import Load, audit_bytes, expected_bytes, nic_faults

MB = 1e6
LOADS = [
    Load("ib1", "ib", "dp 0", 80 * MB),
    Load("ib1", "ethernet", "edge 0-1", 10 * MB),
    Load("ib1", "ib", "dp_cp 0", 20 * MB),
    Load("roce1", "roce", "dp 1", 60 * MB),
]


def test_expected_bytes_are_sums_over_groups() -> None:
    assert expected_bytes(LOADS)["ib1"] == {"ib": pytest.approx(100 * MB), "ethernet": pytest.approx(10 * MB)}


def test_counts_as_planned_give_no_finding() -> None:
    counted = {"ib1": {"ib": 104 * MB, "ethernet": 11 * MB, "other": 0.2 * MB}, "roce1": {"roce": 63 * MB}}
    assert audit_bytes(counted, LOADS) == []


def test_data_parallel_traffic_on_ethernet_is_an_error_that_names_the_group() -> None:
    counted = {"ib1": {"ib": 20 * MB, "ethernet": 90 * MB}}
    (finding,) = audit_bytes(counted, LOADS, names={"ib1": {"ethernet": "eth0"}})
    assert (finding.level, finding.node, finding.nic) == ("error", "ib1", "eth0")
    assert "sent 90.0 MB per step, the plan expects 10.0 MB: probably group dp 0, which belongs on ib" in finding.what


def test_a_nic_outside_the_plan_is_reported_only_if_another_nic_lacks_as_many_bytes() -> None:
    storage = {"ib": 100 * MB, "ethernet": 10 * MB, "other": 500 * MB}
    assert audit_bytes({"ib1": storage}, LOADS) == []
    (finding,) = audit_bytes({"ib1": {"ib": 20 * MB, "ethernet": 10 * MB, "other": 80 * MB}}, LOADS)
    assert "other NIC other sent 80.0 MB" in finding.what and "probably group dp 0, which belongs on ib" in finding.what
    (finding,) = audit_bytes({"ib1": {"ib": 20 * MB, "ethernet": 10 * MB, "other": 5 * MB}}, LOADS)
    assert finding.level == "warning" and "ib NIC ib sent 80.0 MB per step less" in finding.what


def test_fewer_bytes_than_planned_are_a_warning() -> None:
    findings = audit_bytes({"roce1": {"roce": 10 * MB}}, LOADS)
    assert [(f.level, f.node) for f in findings] == [("warning", "roce1")]


@given(st.floats(0.92, 1.08))
def test_counts_within_the_tolerance_give_no_finding(share: float) -> None:
    counted = {node: {k: v * share for k, v in kinds.items()} for node, kinds in expected_bytes(LOADS).items()}
    assert audit_bytes(counted, LOADS) == []


@given(st.sampled_from([load for load in LOADS if load.kind != "ethernet"]))
def test_any_group_that_moves_to_ethernet_is_named(moved: Load) -> None:
    counted = expected_bytes(LOADS)
    counted[moved.node][moved.kind] -= moved.bytes
    counted[moved.node]["ethernet"] = counted[moved.node].get("ethernet", 0) + moved.bytes
    (finding,) = audit_bytes(counted, LOADS)
    assert f"probably group {moved.label}, which belongs on {moved.kind}" in finding.what and finding.node == moved.node


def test_nics_that_are_down_or_gone_are_faults(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.net("eth0")
    tree.net("roce0", operstate="down")
    tree.rdma("mlx5_0", tree.pci("0000:11:00.0"))
    tree.rdma("mlx5_1", tree.pci("0000:12:00.0"), state="1: DOWN")
    faults = nic_faults(["eth0", "roce0", "mlx5_0:1", "mlx5_1:1", "ib9"], "n1", tree.root)
    assert [(nic, fault.where) for nic, fault in faults.items()] == [
        ("roce0", "node n1"),
        ("mlx5_1:1", "node n1"),
        ("ib9", "node n1"),
    ]
    assert "gone" in faults["ib9"].what


def test_a_surplus_that_no_group_lacks_is_probably_another_jobs() -> None:
    counted = {"ib1": {"ib": 100 * MB, "ethernet": 90 * MB}}
    (finding,) = audit_bytes(counted, LOADS, names={"ib1": {"ethernet": "eth0"}})
    assert finding.level == "warning" and "probably another job's, or a service's" in finding.what
    assert "squeue -w ib1" in finding.hint and finding.nic == "eth0"

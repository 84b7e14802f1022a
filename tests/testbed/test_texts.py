"""What is written for the kernel and for Slurm, as text."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.testbed import daemons, network, slurmconf, userland
from holmes_hpc.testbed.network import Wiring, shape
from holmes_hpc.testbed.slurmconf import Places
from holmes_hpc.testbed.topology import FOLDER, parse, read

PORTS = {"slurmctld": 20001, "slurmdbd": 20002, "slurmd": 20003, "database": 20004}
PLACES = Places(Path("/state"))
NAMES = [path.stem for path in sorted(FOLDER.glob("*.yaml"))]


def wiring(name: str | None = None) -> Wiring:
    return Wiring(read(name), "hb0123", "10.99.0.0/16")


def settings(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName=", "PartitionName="))]
    return dict(line.split("=", 1) for line in lines)


def rows(text: str, kind: str) -> list[dict[str, str]]:
    return [dict(word.split("=", 1) for word in line.split()) for line in text.splitlines() if line.startswith(kind)]


@pytest.mark.parametrize("name", NAMES)
def test_names_fit_the_kernel_and_addresses_are_unique(name: str) -> None:
    made = wiring(name)
    nics = [nic for node in made.topology.nodes for nic in made.nics(node)]
    names = [nic.port for nic in nics] + [nic.name for nic in nics] + list(made.bridges) + [made.uplink]
    assert all(len(each) <= 15 for each in names)
    ports = [nic.port for nic in nics]
    addresses = [nic.address for nic in nics] + [f"{made.gateway}/24"]
    assert len(set(ports)) == len(ports) and len(set(addresses)) == len(addresses)
    assert all(ipaddress.ip_interface(a).ip in ipaddress.ip_network(made.subnet) for a in addresses)


def test_each_fabric_has_a_bridge_and_a_network_of_its_own() -> None:
    made = wiring("two-ib")
    where = {}
    for node in made.topology.nodes:
        nic = made.nics(node)[2]
        where.setdefault(node.fabric.name, set()).add((nic.bridge, ipaddress.ip_interface(nic.address).network))
    assert all(len(places) == 1 for places in where.values())
    assert len(set.union(*where.values())) == 2


def test_an_ethernet_only_node_has_no_rdma_nic_and_management_is_unshaped() -> None:
    made = wiring()
    by_name = {node.name: {nic.name: nic.mbit for nic in made.nics(node)} for node in made.topology.nodes}
    assert by_name["eth1"] == {"mgmt0": None, "eth0": 50}
    assert by_name["ib1"] == {"mgmt0": None, "eth0": 50, "ib0": 400}
    assert by_name["roce4"] == {"mgmt0": None, "eth0": 50, "roce0": 250}


def test_hosts_resolves_nodes_to_their_ethernet() -> None:
    made = wiring()
    lines = dict(reversed(line.split(maxsplit=1)) for line in made.hosts().splitlines())
    for node in made.topology.nodes:
        assert lines[node.name] == made.ethernet(node) != made.management(node)


@given(st.integers(1, 100_000))
def test_a_bucket_holds_a_bundle_and_its_queue_holds_more(mbit: int) -> None:
    words = shape("eth0", mbit).split()
    value = {key: words[words.index(key) + 1] for key in ("rate", "burst", "limit")}
    assert value["rate"] == f"{mbit * 1_000_000}bit"
    assert int(value["burst"]) > network.bundle_bytes(mbit) >= 2 * network.MTU
    assert int(value["limit"]) >= int(value["burst"]) + 2 * network.BUNDLE_BYTES


def test_slurm_conf_keeps_apart_from_another_slurm() -> None:
    found = settings(slurmconf.slurm_conf(PLACES, wiring(), PORTS))
    assert found["SlurmctldHost"].endswith("(10.99.0.1)")
    for key in (
        "StateSaveLocation",
        "SlurmdSpoolDir",
        "SlurmctldLogFile",
        "SlurmdLogFile",
        "SlurmctldPidFile",
        "SlurmdPidFile",
        "AccountingStoragePass",
    ):
        assert found[key].startswith("/state/"), key
    assert {found["SlurmctldPort"], found["SlurmdPort"], found["AccountingStoragePort"]} == {"20001", "20003", "20002"}
    assert found["AuthInfo"] == "cred_expire=5,socket=/state/run/munge.socket"
    assert found["SlurmdTimeout"] == "10" and found["SchedulerType"] == "sched/backfill"
    assert found["SlurmdParameters"] == "config_overrides"


def test_slurm_conf_lists_every_node_once_with_its_features_and_partition() -> None:
    made = wiring()
    text = slurmconf.slurm_conf(PLACES, made, PORTS)
    nodes = rows(text, "NodeName=")
    assert [row["NodeName"] for row in nodes] == [node.name for node in made.topology.nodes]
    assert nodes[0]["Feature"] == "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a"
    assert len({row["NodeAddr"] for row in nodes}) == 10
    partitions = {row["PartitionName"]: row["Nodes"].split(",") for row in rows(text, "PartitionName=")}
    assert partitions == {
        "ib": ["ib1", "ib2", "ib3", "ib4"],
        "roce": ["roce1", "roce2", "roce3", "roce4"],
        "eth": ["eth1", "eth2"],
    }


def test_a_preemptable_partition_lies_below_the_fabrics_own() -> None:
    text = slurmconf.slurm_conf(PLACES, wiring("preemption"), PORTS)
    by_name = {row["PartitionName"]: row for row in rows(text, "PartitionName=")}
    low, high = by_name["ib-low"], by_name["ib"]
    assert low["Nodes"] == high["Nodes"]
    assert int(low["PriorityTier"]) < int(high["PriorityTier"])
    assert (low["PreemptMode"], high["PreemptMode"]) == ("REQUEUE", "OFF")


def test_a_topology_replaces_a_setting_instead_of_repeating_it() -> None:
    text = (FOLDER / "default.yaml").read_text() + "slurm: {killwait: 9, Epilog: /bin/true}\n"
    found = slurmconf.slurm_conf(PLACES, Wiring(parse(text, "x"), "hb0123", "10.99.0.0/16"), PORTS)
    assert [line for line in found.splitlines() if line.lower().startswith("killwait=")] == ["killwait=9"]
    assert "Epilog=/bin/true" in found.splitlines()


def test_slurmdbd_uses_the_testbeds_own_database() -> None:
    found = settings(slurmconf.slurmdbd_conf(PLACES, wiring(), PORTS, "secret"))
    assert (found["StorageHost"], found["StoragePort"], found["StoragePass"]) == ("127.0.0.1", "20004", "secret")
    assert found["DbdAddr"] == "10.99.0.1" and found["AuthInfo"] == "socket=/state/run/munge.socket"


def test_a_free_subnet_avoids_routes_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [ipaddress.IPv4Network("10.0.0.0/8"), ipaddress.IPv4Network("172.16.0.0/13")]
    monkeypatch.setattr(network, "_networks_in_use", lambda: iter(used))
    assert network.free_subnet("hbffff") == "172.24.0.0/16"
    used.append(ipaddress.IPv4Network("0.0.0.0/0"))
    with pytest.raises(network.TestbedError, match="every private /16"):
        network.free_subnet("hbffff")


@pytest.mark.parametrize(
    ("version", "plugin"),
    [
        ("slurm-wlm 22.05.8", "cgroup/v1"),
        ("slurm 23.02.7", "cgroup/v1"),
        ("slurm-wlm 23.11.4", "disabled"),
        ("slurm-wlm 24.11.5", "disabled"),
        ("who knows", "cgroup/v1"),
    ],
)
def test_the_cgroup_plugin_is_one_that_this_slurm_starts_with(version: str, plugin: str) -> None:
    assert daemons.cgroup_plugin(version) == plugin


def test_the_machines_own_release_needs_no_entering() -> None:
    assert userland.root_of(Path("/state"), "bookworm") is None
    assert userland.root_of(Path("/state"), "trixie") == Path("/state/trixie")
    assert userland.private(None, ["srun", "x"]) == userland.entering(None, ["srun", "x"]) == ["srun", "x"]
    assert userland.private(Path("/state/trixie"), ["srun", "x"])[-3:] == ["/state/trixie", "srun", "x"]

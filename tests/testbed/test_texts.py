"""The texts for the kernel and for Slurm's configuration."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.testbed import daemons, network, slurmconf, userland
from holmes_hpc.testbed.network import Wiring, tbf_line
from holmes_hpc.testbed.slurmconf import Paths
from holmes_hpc.testbed.topology import FOLDER, parse, read

PORTS = {"slurmctld": 20001, "slurmdbd": 20002, "slurmd": 20003, "database": 20004}
PATHS = Paths(Path("/state"))
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
    layout = wiring(name)
    nics = [nic for node in layout.topology.nodes for nic in layout.nics(node)]
    names = [nic.port for nic in nics] + [nic.name for nic in nics] + list(layout.bridges) + [layout.uplink]
    assert all(len(name) <= 15 for name in names)
    ports = [nic.port for nic in nics]
    addresses = [nic.address for nic in nics] + [f"{layout.gateway}/24"]
    assert len(set(ports)) == len(ports) and len(set(addresses)) == len(addresses)
    assert all(ipaddress.ip_interface(a).ip in ipaddress.ip_network(layout.subnet) for a in addresses)


def test_each_fabric_has_a_separate_bridge_and_network() -> None:
    layout = wiring("two-ib")
    networks = {}
    for node in layout.topology.nodes:
        nic = layout.nics(node)[2]
        networks.setdefault(node.fabric.name, set()).add((nic.bridge, ipaddress.ip_interface(nic.address).network))
    assert all(len(fabric_networks) == 1 for fabric_networks in networks.values())
    assert len(set.union(*networks.values())) == 2


def test_an_ethernet_only_node_has_no_rdma_nic_and_management_is_unshaped() -> None:
    layout = wiring()
    by_name = {node.name: {nic.name: nic.mbit for nic in layout.nics(node)} for node in layout.topology.nodes}
    assert by_name["eth1"] == {"mgmt0": None, "eth0": 50}
    assert by_name["ib1"] == {"mgmt0": None, "eth0": 50, "ib0": 400}
    assert by_name["roce4"] == {"mgmt0": None, "eth0": 50, "roce0": 250}


def test_hosts_resolves_nodes_to_their_ethernet() -> None:
    layout = wiring()
    lines = dict(reversed(line.split(maxsplit=1)) for line in layout.hosts().splitlines())
    for node in layout.topology.nodes:
        assert lines[node.name] == layout.ethernet(node) != layout.management(node)


@given(st.integers(1, 100_000))
def test_token_bucket_and_queue_hold_a_gso_bundle(mbit: int) -> None:
    words = tbf_line("eth0", mbit).split()
    values = {key: words[words.index(key) + 1] for key in ("rate", "burst", "limit")}
    assert values["rate"] == f"{mbit * 1_000_000}bit"
    assert int(values["burst"]) > network.gso_bytes(mbit) >= 2 * network.MTU
    assert int(values["limit"]) >= int(values["burst"]) + 2 * network.GSO_BYTES


def test_slurm_conf_is_separate_from_another_slurm() -> None:
    conf = settings(slurmconf.slurm_conf(PATHS, wiring(), PORTS))
    assert conf["SlurmctldHost"].endswith("(10.99.0.1)")
    for key in (
        "StateSaveLocation",
        "SlurmdSpoolDir",
        "SlurmctldLogFile",
        "SlurmdLogFile",
        "SlurmctldPidFile",
        "SlurmdPidFile",
        "AccountingStoragePass",
    ):
        assert conf[key].startswith("/state/"), key
    assert {conf["SlurmctldPort"], conf["SlurmdPort"], conf["AccountingStoragePort"]} == {"20001", "20003", "20002"}
    assert conf["AuthInfo"] == "cred_expire=5,socket=/state/run/munge.socket"
    assert conf["SlurmdTimeout"] == "10" and conf["SchedulerType"] == "sched/backfill"
    assert conf["SlurmdParameters"] == "config_overrides"


def test_slurm_conf_lists_every_node_once_with_its_features_and_partition() -> None:
    layout = wiring()
    text = slurmconf.slurm_conf(PATHS, layout, PORTS)
    nodes = rows(text, "NodeName=")
    assert [row["NodeName"] for row in nodes] == [node.name for node in layout.topology.nodes]
    assert nodes[0]["Feature"] == "nic_ib,nic_0.4g,eth_0.05g,fabric_ib-a"
    assert len({row["NodeAddr"] for row in nodes}) == 10
    partitions = {row["PartitionName"]: row["Nodes"].split(",") for row in rows(text, "PartitionName=")}
    assert partitions == {
        "ib": ["ib1", "ib2", "ib3", "ib4"],
        "roce": ["roce1", "roce2", "roce3", "roce4"],
        "eth": ["eth1", "eth2"],
    }


def test_preemptible_partition_has_lower_priority() -> None:
    text = slurmconf.slurm_conf(PATHS, wiring("preemption"), PORTS)
    by_name = {row["PartitionName"]: row for row in rows(text, "PartitionName=")}
    low, high = by_name["ib-low"], by_name["ib"]
    assert low["Nodes"] == high["Nodes"]
    assert int(low["PriorityTier"]) < int(high["PriorityTier"])
    assert (low["PreemptMode"], high["PreemptMode"]) == ("REQUEUE", "OFF")


def test_topology_setting_replaces_the_default() -> None:
    text = (FOLDER / "default.yaml").read_text() + "slurm: {killwait: 9, Epilog: /bin/true}\n"
    conf = slurmconf.slurm_conf(PATHS, Wiring(parse(text, "x"), "hb0123", "10.99.0.0/16"), PORTS)
    assert [line for line in conf.splitlines() if line.lower().startswith("killwait=")] == ["killwait=9"]
    assert "Epilog=/bin/true" in conf.splitlines()


def test_slurmdbd_uses_the_testbed_database() -> None:
    conf = settings(slurmconf.slurmdbd_conf(PATHS, wiring(), PORTS, "secret"))
    assert (conf["StorageHost"], conf["StoragePort"], conf["StoragePass"]) == ("127.0.0.1", "20004", "secret")
    assert conf["DbdAddr"] == "10.99.0.1" and conf["AuthInfo"] == "socket=/state/run/munge.socket"


def test_free_subnet_avoids_routes_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [ipaddress.IPv4Network("10.0.0.0/8"), ipaddress.IPv4Network("172.16.0.0/13")]
    monkeypatch.setattr(network, "_networks_in_use", lambda: iter(used))
    assert network.free_subnet("hbffff") == "172.24.0.0/16"
    used.append(ipaddress.IPv4Network("0.0.0.0/0"))
    with pytest.raises(network.TestbedError, match="every private /16 is in use"):
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
def test_slurm_can_start_with_the_cgroup_plugin(version: str, plugin: str) -> None:
    assert daemons.cgroup_plugin(version) == plugin


def test_native_release_needs_no_mounts() -> None:
    assert userland.private_command(None, ["srun", "x"]) == userland.enter_command(None, ["srun", "x"]) == ["srun", "x"]
    assert userland.private_command(Path("/state/trixie"), ["srun", "x"])[-3:] == ["/state/trixie", "srun", "x"]

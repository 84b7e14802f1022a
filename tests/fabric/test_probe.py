import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import trees
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.label import features_of
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import Nic, NodeNics, data_interface
from holmes_hpc.fabric.node_facts import Facts, facts_of
from holmes_hpc.fabric.probe import addresses, probe
from holmes_hpc.training.network.nic_bytes import bytes_by_kind, counter_difference, read_counters

IB, ROCE, ETHERNET = NicType.IB, NicType.ROCE, NicType.ETHERNET


def probed(tmp_path: Path, name: str, **ipv4: str) -> NodeNics:
    tree = Tree(tmp_path)
    trees.ALL[name](tree)
    return probe(tree.root, {k: (v, 24) for k, v in ipv4.items()}, tree.read)


@pytest.mark.parametrize(
    ("name", "nic", "features"),
    [
        ("hdr_4_hcas", IB, ("nic_ib", "nic_800g", "eth_25g")),
        ("roce_on_a_bond", ROCE, ("nic_roce", "nic_200g", "eth_200g")),
        ("one_port_down", IB, ("nic_ib", "nic_200g", "eth_25g")),
        ("ib_and_a_storage_card", IB, ("nic_ib", "nic_400g", "eth_100g")),
        ("iwarp", ETHERNET, ("nic_ethernet", "nic_40g", "eth_40g")),
        ("gid_unreadable", ROCE, ("nic_roce", "nic_100g", "eth_100g")),
        ("some_gids_unreadable", ROCE, ("nic_roce", "nic_100g", "eth_100g")),
        ("virtio_only", ETHERNET, ("nic_ethernet",)),
        ("speed_unknown", ETHERNET, ("nic_ethernet",)),
        ("eight_rails", IB, ("nic_ib", "nic_3200g", "eth_100g")),
        ("converged_roce", ROCE, ("nic_roce", "nic_100g", "eth_100g")),
        ("a_slow_cable", IB, ("nic_ib", "nic_600g", "eth_25g")),
        ("omnipath", ETHERNET, ("nic_ethernet", "nic_25g", "eth_25g")),
        ("a_fast_bond_beside_a_slow_port", ROCE, ("nic_roce", "nic_200g", "eth_200g")),
        ("a_vlan", ROCE, ("nic_roce", "nic_100g", "eth_100g")),
        ("a_vlan_on_a_bond", ETHERNET, ("nic_ethernet", "nic_50g", "eth_50g")),
        ("virtual_functions", IB, ("nic_ib", "nic_200g", "eth_25g")),
        ("a_virtual_function_alone", IB, ("nic_ib", "nic_200g", "eth_25g")),
        ("a_dual_port_card", IB, ("nic_ib", "nic_168g", "eth_25g")),
        ("eight_hcas_and_two_for_storage", IB, ("nic_ib", "nic_4000g", "eth_100g")),
        ("rails_and_a_frontend", ROCE, ("nic_roce", "nic_1600g", "eth_400g")),
        ("a_container", ETHERNET, ("nic_ethernet", "nic_25g", "eth_25g")),
    ],
)
def test_type_and_features_of_each_tree(tmp_path: Path, name: str, nic: NicType, features: tuple[str, ...]) -> None:
    nics = probed(tmp_path, name)
    assert nics.type is nic and features_of(nics) == features


def test_every_tree_is_tested() -> None:
    marks = test_type_and_features_of_each_tree.pytestmark[0].args[1]
    assert {m[0] for m in marks} == set(trees.ALL)


def test_nearest_gpus_and_ports(tmp_path: Path) -> None:
    nics = probed(tmp_path, "hdr_4_hcas")
    assert [p.gpus for p in nics.ports] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [p.name for p in nics.ports] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    assert nics.ports[0].interface == "ib0" and nics.interface("ib0").type is IB


def test_bond_owns_the_roce_port_and_the_gid_is_the_v2_ipv4_one(tmp_path: Path) -> None:
    nics = probed(tmp_path, "roce_on_a_bond")
    (port,) = nics.ports
    assert (port.interface, port.gid_index, port.gid) == ("bond0", 3, trees.mapped("10.7.0.3"))
    bond = data_interface(nics, ROCE)
    assert (bond.name, bond.address, bond.gbps) == ("bond0", "10.7.0.3", 200)
    assert nics.interface("eth2").member_of == "bond0"


def test_a_slave_named_by_the_gid_leads_to_its_bond(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    tree.net("bond0", bond=True, speed=100000)
    tree.net("eth2", card, speed=100000, master="bond0")
    tree.rdma("mlx5_0", card, "Ethernet", gids=((trees.mapped("10.7.0.3"), "RoCE v2", "eth2"),))
    assert probe(tree.root, {}, tree.read).ports[0].interface == "bond0"


def test_a_down_port_is_said_and_not_used(tmp_path: Path) -> None:
    nics = probed(tmp_path, "one_port_down")
    assert [p.name for p in nics.usable_ports(IB)] == ["mlx5_0:1"] and "mlx5_1:1 is DOWN" in nics.notes


def test_the_storage_card_stays_out_of_the_nodes_type(tmp_path: Path) -> None:
    nics = probed(tmp_path, "ib_and_a_storage_card", eth0="10.0.0.3", ens8="10.9.0.3")
    assert [p.name for p in nics.usable_ports(IB)] == ["mlx5_0:1", "mlx5_1:1"]
    assert nics.type is IB


def test_a_slow_cable_is_said_and_left_out(tmp_path: Path) -> None:
    nics = probed(tmp_path, "a_slow_cable")
    assert [p.name for p in nics.compute_ports(IB)] == ["mlx5_0:1", "mlx5_1:1", "mlx5_3:1"]
    assert nics.notes == ("mlx5_2:1 runs at 100 Gb/s, others at 200: not used",)


def test_iwarp_is_not_roce(tmp_path: Path) -> None:
    nics = probed(tmp_path, "iwarp")
    assert nics.ports[0].kind == "iwarp" and not nics.usable_ports(ROCE) and "iwarp" in nics.notes[0]


def test_networks_of_plugins_are_known_with_their_rates(tmp_path: Path) -> None:
    made = Tree(tmp_path / "opa")
    trees.ALL["omnipath"](made)
    assert probe(made.root, read=made.read).plugin_network == (NicType.OMNIPATH, 200)
    cxi = Tree(tmp_path / "cxi")
    for i in range(4):
        cxi.net(f"hsn{i}", cxi.pci(f"0000:0{i}:01.0"), speed=200000, driver="cxi_ss1")
    nics = probe(cxi.root, read=cxi.read)
    assert (nics.type, nics.plugin_network) == (NicType.ETHERNET, (NicType.SLINGSHOT, 800))
    facts = facts_of("n", nics, [], {}, files=())
    read_back = msgspec.convert(json.loads(json.dumps(asdict(facts))), Facts)
    assert facts.plugin == ("nic_plugin_slingshot", "nic_800g") and read_back == facts


def test_unreadable_gids_are_skipped(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    nics = probed(one, "gid_unreadable", eth2="10.7.0.3")
    assert nics.ports[0].gid is None and nics.ports[0].interface == "eth2" and "GID" in nics.notes[0]
    assert data_interface(nics, ROCE).name == "eth2"
    assert probed(two, "some_gids_unreadable").ports[0].gid_index == 1


def test_a_copied_tree_without_links_still_tells_types(tmp_path: Path) -> None:
    """A copy by `cp -rL` has no PCI paths, so no nearest GPU."""
    import shutil

    tree = Tree(tmp_path / "sys")
    trees.hdr_4_hcas(tree)
    for base in ("class/net", "class/infiniband"):
        shutil.copytree(tree.root / base, tmp_path / "copy" / base, ignore=shutil.ignore_patterns("device"))
    nics = probe(tmp_path / "copy")
    assert nics.type is IB and nics.ports[0].gpus == () and features_of(nics) == ("nic_ib", "nic_800g", "eth_25g")


def test_nothing_at_all(tmp_path: Path) -> None:
    nics = probe(tmp_path / "nowhere")
    assert nics == NodeNics((), addressed=False) and nics.type is ETHERNET
    with pytest.raises(SiteError, match="no ethernet interface among none"):
        data_interface(nics, ETHERNET)


def a_node(kind: str) -> NodeNics:
    return NodeNics(
        (
            Nic("eth0", ETHERNET, address="10.1.0.2", prefix=24),
            Nic("lo", ETHERNET, address="127.0.0.1"),
            Nic(f"{kind}0", NicType(kind), address="10.2.0.2", prefix=24),
            Nic("mgmt0", ETHERNET, address="10.0.0.2", prefix=24),
            Nic("docker0", ETHERNET, address="172.17.0.1"),
        )
    )


def test_testbed_names_stand_for_rdma(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for name in ("eth0", "roce0", "mgmt0", "docker0"):
        tree.net(name, speed=10000)
    ipv4 = {
        "eth0": ("10.1.0.2", 24),
        "roce0": ("10.2.0.2", 24),
        "mgmt0": ("10.0.0.2", 24),
        "docker0": ("172.17.0.1", 16),
    }
    nics = probe(tree.root, ipv4, tree.read)
    assert nics.type is ROCE and features_of(nics) == ("nic_roce",)  # veth's own 10 Gb/s means nothing
    assert data_interface(nics, ROCE).name == "roce0" and data_interface(nics, ETHERNET).name == "eth0"
    with pytest.raises(SiteError, match="no ib interface"):
        data_interface(nics, IB, node="roce1")


def test_management_is_the_last_resort_and_docker_none() -> None:
    nics = NodeNics(tuple(n for n in a_node("ib").interfaces if n.name not in ("eth0", "ib0")))
    assert data_interface(nics, ETHERNET).name == "mgmt0"


def test_down_without_address_and_forced() -> None:
    down = NodeNics((Nic("ib0", IB, up=False),))
    with pytest.raises(SiteError, match=r"node n1: ib interface ib0 is down; ip link set ib0 up"):
        data_interface(down, IB, node="n1")
    with pytest.raises(SiteError, match="ib0 has no IPv4 address"):
        data_interface(NodeNics((Nic("ib0", IB),)), IB)


@pytest.mark.parametrize(
    ("name", "ipv4", "interface"),
    [
        ("a_fast_bond_beside_a_slow_port", {"eno1": "10.0.0.3", "bond0": "10.1.0.3"}, "bond0"),
        ("a_vlan", {"eno1": "10.0.0.3", "ens1.100": "10.7.0.3"}, "ens1.100"),
        ("a_vlan_on_a_bond", {"eno1": "10.0.0.3", "bond0.100": "10.1.0.3"}, "bond0.100"),
        ("converged_roce", {"eth0": "10.7.0.3"}, "eth0"),
        ("rails_and_a_frontend", {"eth0": "10.1.0.3"}, "rail0"),
        ("speed_unknown", {"eno1": "10.0.0.3", "eno2": "10.0.1.3"}, "eno1"),
        ("virtual_functions", {"eth0": "10.0.0.3", "ib0": "10.2.0.3"}, "eth0"),
    ],
)
def test_sockets_take_the_fastest_interface_whatever_its_kind(
    tmp_path: Path, name: str, ipv4: dict[str, str], interface: str
) -> None:
    nics = probed(tmp_path, name, **ipv4)
    assert data_interface(nics, ETHERNET).name == interface
    if interface in ("bond0", "rail0"):
        assert any(f"{interface} carries TCP, because e" in note for note in nics.notes)


@pytest.mark.parametrize(
    ("name", "nic", "ports"),
    [
        ("virtual_functions", IB, ["mlx5_0:1"]),
        ("a_virtual_function_alone", IB, ["mlx5_0:1"]),
        ("a_dual_port_card", IB, ["mlx4_0:1", "mlx4_0:2", "mlx5_0:1"]),
        ("eight_rails", IB, [f"mlx5_{i}:1" for i in range(8)]),
        ("a_vlan", ROCE, ["mlx5_0:1"]),
        ("a_container", IB, []),
    ],
)
def test_the_ports_of_the_job(tmp_path: Path, name: str, nic: NicType, ports: list[str]) -> None:
    nics = probed(tmp_path, name)
    assert [p.name for p in nics.compute_ports(nic)] == ports
    if name == "virtual_functions":
        assert "mlx5_1:1 is a virtual function of 0000:11:00.0, which is also present: not used" in nics.notes


def test_a_container_may_have_devices_that_its_sysfs_lacks(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    trees.a_container(tree)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert not probe(tree.root, {}, tree.read, tmp_path / "dev").verbs
    (tmp_path / "dev/infiniband/uverbs0").touch()
    nics = probe(tree.root, {}, tree.read, tmp_path / "dev")
    assert nics.verbs and "/dev/infiniband" in nics.notes[0]


def test_a_pulled_cable_is_told_from_a_switched_off_nic(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.net("ib0", operstate="lowerlayerdown")
    with pytest.raises(SiteError, match="ib0 has no carrier; check its cable"):
        data_interface(probe(tree.root, {"ib0": ("10.0.0.1", 24)}, tree.read), IB)
    tree.refuse("class/net/ib0/carrier")
    tree.write((tree.root / "class/net/ib0").resolve(), operstate="down")
    with pytest.raises(SiteError, match="ib0 is down"):
        data_interface(probe(tree.root, {"ib0": ("10.0.0.1", 24)}, tree.read), IB)


def test_ib_ports_without_ipoib_are_said(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="have no kernel interface"):
        data_interface(probed(tmp_path, "eight_rails"), IB)


def test_this_machine() -> None:
    nics = probe()
    assert {n.name for n in nics.interfaces} >= {"lo"}
    assert addresses()["lo"] == ("127.0.0.1", 8)


def test_counters_words_are_bytes(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    card = tree.pci("0000:11:00.0")
    tree.rdma("mlx5_0", card, xmit=250, rcv=1000)
    tree.net("ib0", card, kind="32", tx=1000, rx=4000)
    tree.net("eth0", tree.pci("0000:12:00.0"), tx=70, rx=80)
    tree.net("docker0", tx=5, rx=6)
    counters = read_counters(tree.root)
    assert counters["mlx5_0:1"] == (1000, 4000) and counters["eth0"] == (70, 80)
    # IPoIB's bytes are in the port's counter already
    kinds = bytes_by_kind(counters, probe(tree.root, {}, tree.read))
    assert kinds == {"ib": (1000, 4000), "ethernet": (70, 80), "other": (5, 6)}


def test_counters_of_a_bond_are_counted_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    trees.roce_on_a_bond(tree)
    for name, tx in (("bond0", 10), ("eth2", 6), ("eth3", 4)):
        tree.write((tree.root / "class/net" / name).resolve() / "statistics", tx_bytes=tx)
    kinds = bytes_by_kind(read_counters(tree.root), probe(tree.root, {}, tree.read))
    assert kinds["ethernet"] == (10, 0)  # TCP goes over the bond; RDMA is counted by its port


def test_storage_ports_are_none_of_the_fabrics(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    trees.a_slow_cable(tree)
    kinds = bytes_by_kind(
        {**{f"mlx5_{i}:1": (1, 10) for i in range(4)}, "eth0": (5, 6)}, probe(tree.root, {}, tree.read)
    )
    assert kinds == {"ib": (3, 30), "other": (1, 10), "ethernet": (5, 6)}
    tree = Tree(tmp_path / "converged")
    trees.converged_roce(tree)
    kinds = bytes_by_kind({"eth0": (5, 6), "mlx5_0:1": (70, 80)}, probe(tree.root, {}, tree.read))
    assert kinds == {"ethernet": (5, 6), "roce": (70, 80)}  # TCP, and RDMA beside it


def test_counters_of_a_a_node() -> None:
    counters = {"eth0": (1, 2), "ib0": (3, 4), "mgmt0": (5, 6), "lo": (9, 9), "docker0": (7, 8)}
    assert bytes_by_kind(counters, a_node("ib")) == {"ethernet": (1, 2), "ib": (3, 4), "other": (12, 14)}


def test_difference_survives_a_reset_and_a_lost_nic() -> None:
    before = {"a": (10, 10), "b": (1, 1), "c": (0, 0)}
    assert counter_difference(before, {"a": (15, 3), "c": (4, 5)}) == {"a": (5, 3), "c": (4, 5)}


def test_missing_counters_are_left_out(tmp_path: Path) -> None:
    assert read_counters(tmp_path) == {}

from pathlib import Path

import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nccl import (
    conf_files,
    environment,
    matches,
    read_conf,
    refusals,
    restrict_nics,
    socket_settings,
    split_defaults,
)
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import Nic, NodeNics
from holmes_hpc.fabric.probe import probe
from holmes_hpc.fabric.site import NicNames

IB, ROCE, ETHERNET = NicType.IB, NicType.ROCE, NicType.ETHERNET
TESTBED = NodeNics(
    (Nic("eth0", ETHERNET, address="10.1.0.2", prefix=24), Nic("ib0", IB, address="10.2.0.2", prefix=24))
)


def nics(tmp_path: Path, name: str) -> NodeNics:
    tree = Tree(tmp_path)
    trees.ALL[name](tree)
    return probe(tree.root, {"eth0": ("10.0.0.2", 24)}, tree.read)


@pytest.mark.parametrize(
    ("name", "nic", "interface", "hca"),
    [
        ("hdr_4_hcas", IB, "eth0", "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"),
        ("one_port_down", IB, "eth0", "=mlx5_0:1"),
        ("ib_and_a_storage_card", IB, "ens8", "=mlx5_0:1,mlx5_1:1"),
        ("a_slow_cable", IB, "eth0", "=mlx5_0:1,mlx5_1:1,mlx5_3:1"),
        ("roce_on_a_bond", ROCE, "bond0", "=mlx5_bond_0:1"),
        ("hdr_4_hcas", ETHERNET, "eth0", None),
        ("virtio_only", ETHERNET, "eth0", None),
        ("a_container", IB, "eth0", None),
    ],
)
def test_environment(tmp_path: Path, name: str, nic: NicType, interface: str, hca: str | None) -> None:
    env = environment(nics(tmp_path, name), nic)
    assert env["NCCL_SOCKET_IFNAME"] == f"={interface}" and env["GLOO_SOCKET_IFNAME"] == interface
    assert env.get("NCCL_IB_HCA") == hca


@pytest.mark.parametrize(
    ("value", "uses"),
    [
        ("mlx5_1", "mlx5_1:1 mlx5_1:2 mlx5_10:1"),  # no sign: the beginning
        ("=mlx5_1", "mlx5_1:1 mlx5_1:2"),
        ("mlx5_1:1", "mlx5_1:1 mlx5_10:1"),
        ("=mlx5_1:2,mlx4_0", "mlx5_1:2 mlx4_0:1"),
        ("mlx5", "mlx5_1:1 mlx5_1:2 mlx5_10:1"),
        ("^mlx5_1", "mlx4_0:1"),
        ("^=mlx5_1", "mlx5_10:1 mlx4_0:1"),
        ("^=mlx5_1:1,mlx5_10", "mlx5_1:2 mlx4_0:1"),
        ("=mlx5_1:1,,mlx5_10:1,", "mlx5_1:1 mlx5_10:1"),
        ("=mlx5_", ""),
        ("=", "mlx5_1:1 mlx5_1:2 mlx5_10:1 mlx4_0:1"),  # no word: everything
        ("^", ""),
        ("=^mlx5_1", ""),  # the signs have one order
        ("mlx5_1, mlx4_0", "mlx5_1:1 mlx5_1:2 mlx5_10:1"),  # NCCL keeps the blank
    ],
)
def test_nccls_own_rule_of_names(value: str, uses: str) -> None:
    ports = [("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1), ("mlx4_0", 1)]
    assert [f"{d}:{p}" for d, p in ports if matches(value, d, p)] == uses.split()


SPELLINGS = [
    "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1",
    "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
    "mlx5_3,mlx5_2,mlx5_1,mlx5_0",
    "=mlx5_0,mlx5_1,mlx5_2,mlx5_3",
    "mlx5",
    "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1",
    "^mlx4",
    "^=mlx5_9",
]


@pytest.mark.parametrize("value", SPELLINGS)
def test_every_correct_spelling_of_the_ports_is_accepted(tmp_path: Path, value: str) -> None:
    env = {"NCCL_IB_HCA": value}
    made = environment(restrict_nics(nics(tmp_path, "hdr_4_hcas"), NicNames(), env), IB)
    assert made["NCCL_IB_HCA"] == SPELLINGS[0] and refusals(env, made, files=[]) == []


@pytest.mark.parametrize("value", ["bond0", "=bond0", "bond", "^eno", "^=eno1,lo", "eth,bond", "=eth9,bond0"])
def test_every_correct_spelling_of_the_interface_is_accepted(tmp_path: Path, value: str) -> None:
    tree = Tree(tmp_path)
    trees.a_fast_bond_beside_a_slow_port(tree)
    found = probe(tree.root, {"eno1": ("10.0.0.3", 24), "bond0": ("10.1.0.3", 24)}, tree.read)
    env = {"NCCL_SOCKET_IFNAME": value}
    made = environment(restrict_nics(found, NicNames(), env), ROCE)
    assert made["NCCL_SOCKET_IFNAME"] == "=bond0" and refusals(env, made, files=[]) == []


def test_a_variable_chooses_among_what_could_be_used(tmp_path: Path) -> None:
    """Sites leave storage out with NCCL_IB_HCA, and name a slower interface where the fastest reaches nobody."""
    env = {"NCCL_IB_HCA": "mlx5_0,mlx5_2", "NCCL_SOCKET_IFNAME": "eth"}
    tree = Tree(tmp_path)
    trees.rails_and_a_frontend(tree)
    found = restrict_nics(probe(tree.root, {"eth0": ("10.1.0.3", 24)}, tree.read), NicNames(), env)
    made = environment(found, ROCE)
    assert made == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_2:1"}
    assert refusals(env, made, files=[]) == [] and found.rdma_gbps(ROCE) == 800


def test_a_variable_does_not_choose_a_management_port_or_loopback() -> None:
    node = NodeNics(
        (
            *TESTBED.interfaces,
            Nic("mgmt0", ETHERNET, address="10.0.0.2", prefix=24),
            Nic("lo", ETHERNET, address="127.0.0.1", prefix=8),
        )
    )
    for env in ({"GLOO_SOCKET_IFNAME": "mgmt0"}, {"NCCL_SOCKET_IFNAME": "mgmt"}, {"NCCL_SOCKET_IFNAME": "lo"}):
        made = environment(restrict_nics(node, NicNames(), env), IB)
        assert made["GLOO_SOCKET_IFNAME"] == "eth0" and "rules out eth0" in refusals(env, made, files=[])[0].what
    assert environment(restrict_nics(node, NicNames("mgmt0"), {}), IB)["GLOO_SOCKET_IFNAME"] == "mgmt0"


def test_what_the_site_names_is_used_and_a_variable_against_it_refused(tmp_path: Path) -> None:
    found = nics(tmp_path, "eight_hcas_and_two_for_storage")
    named = environment(restrict_nics(found, NicNames("eth0", ("mlx5_3", "mlx5_4:1")), {}), IB)
    assert named["NCCL_IB_HCA"] == "=mlx5_3:1,mlx5_4:1"
    (line,) = refusals({"NCCL_IB_HCA": "=mlx5_3"}, named, "n1", files=[])
    assert str(line) == (
        "error: node n1: NCCL_IB_HCA==mlx5_3 rules out mlx5_4:1, which the plan uses on this node "
        "(=mlx5_3:1,mlx5_4:1); unset NCCL_IB_HCA, or name the intended NIC as the fabric's hca "
        "(docs/nics.md)"
    )


@pytest.mark.parametrize(
    "storage", [("mlx5_8", "mlx5_9:1"), ("fec0:0:0:1::/64", "10.9.0.0/16"), ("fec0::/16", "mlx5_9")]
)
def test_storage_is_left_out_by_name_subnet_or_gid_prefix(tmp_path: Path, storage: tuple[str, ...]) -> None:
    tree = Tree(tmp_path)
    trees.eight_hcas_and_two_for_storage(tree)
    found = probe(tree.root, {"eth0": ("10.0.0.2", 24), "ib9": ("10.9.0.2", 24)}, tree.read)
    assert len(found.compute_ports(IB)) == 10  # nothing in sysfs tells them apart
    left = restrict_nics(found, NicNames(storage=storage), {})
    assert [p.device for p in left.compute_ports(IB)] == [f"mlx5_{i}" for i in range(8)] and left.rdma_gbps(IB) == 3200


def test_a_gid_prefix_of_roce_is_that_of_its_address(tmp_path: Path) -> None:
    left = restrict_nics(nics(tmp_path, "rails_and_a_frontend"), NicNames(storage=("10.7.2.0/24",)), {})
    assert [p.device for p in left.compute_ports(ROCE)] == ["mlx5_0", "mlx5_1", "mlx5_3"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (NicNames(hca=("mlx5_0", "mlx5_7")), "node n1: no HCA mlx5_7, which the site names; it has mlx5_0:1, mlx5_1:1"),
        (NicNames(hca=("mlx5_0:2",)), "node n1: no HCA mlx5_0:2"),
        (NicNames("bond0"), "node n1: no interface bond0, which the site names for its sockets; it has eth0, lo"),
    ],
)
def test_a_name_that_is_not_there_is_one_line(tmp_path: Path, names: NicNames, says: str) -> None:
    with pytest.raises(SiteError, match=says.replace("(", r"\(")):
        restrict_nics(nics(tmp_path, "one_port_down"), names, {}, "n1")


def test_a_named_port_that_is_down_and_a_named_interface_without_an_address(tmp_path: Path) -> None:
    found = nics(tmp_path, "one_port_down")
    with pytest.raises(SiteError, match="no active ib port among mlx5_1:1 ib DOWN; bring the port up"):
        environment(restrict_nics(found, NicNames(hca=("mlx5_1",)), {}), IB)
    bare = NodeNics((*TESTBED.interfaces, Nic("bond0", ROCE)))
    with pytest.raises(SiteError, match="interface bond0 has no IPv4 address; ip addr add"):
        environment(restrict_nics(bare, NicNames("bond0"), {}), ETHERNET)


def test_a_named_interface_may_be_of_any_kind(tmp_path: Path) -> None:
    """IPoIB with a gateway between two InfiniBand clusters."""
    made = environment(restrict_nics(TESTBED, NicNames("ib0"), {}), IB)
    assert made["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_a_container_is_given_the_ports_that_the_site_names(tmp_path: Path) -> None:
    made = environment(restrict_nics(nics(tmp_path, "a_container"), NicNames(hca=("mlx5_0", "mlx5_1")), {}), IB)
    assert made["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"


@pytest.mark.parametrize(
    ("gbps", "senders", "threads", "each"),
    [
        (100, 1, 4, 4),  # what NCCL's documentation advises
        (25, 8, None, None),
        (25, 4, None, None),  # enough as it is
        (25, 1, 1, 4),
        (100, 8, 1, 2),
        (200, 8, 1, 4),
        (200, 1, 8, 4),
        (400, 1, 16, 4),
        (800, 1, 16, 4),
        (3200, 1, 16, 4),
    ],
)
def test_connections_for_the_rate(gbps: float, senders: int, threads: int | None, each: int | None) -> None:
    wanted = {} if threads is None else {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(each)}
    assert socket_settings(gbps, senders) == wanted


@given(st.floats(0.01, 1e5), st.integers(0, 64))
def test_connections_stay_within_nccls_limits_and_carry_the_share(gbps: float, senders: int) -> None:
    made = socket_settings(gbps, senders)
    threads, each = int(made.get("NCCL_SOCKET_NTHREADS", 1)), int(made.get("NCCL_NSOCKS_PERTHREAD", 1))
    share = gbps / max(1, senders)
    assert 1 <= threads <= 16 and each >= 1 and threads * each <= 64
    assert threads * each == 64 or threads * each * 6.25 >= share * 0.999999


def test_a_sites_own_number_of_connections_stays_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_NSOCKS_PERTHREAD=8\n")
    wanted = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    assert split_defaults(wanted, {}, []) == (wanted, [])
    assert split_defaults(wanted, {"NCCL_SOCKET_NTHREADS": "4"}, [tmp_path / "nccl.conf"]) == (
        {},
        ["NCCL_NSOCKS_PERTHREAD=8 is the site's own and stays; for the plan's rate it would be 4"],
    )
    assert split_defaults(wanted, {"NCCL_SOCKET_NTHREADS": "2"}, []) == (
        {"NCCL_NSOCKS_PERTHREAD": "4"},
        ["NCCL_SOCKET_NTHREADS=2 is the site's own and stays; for the plan's rate it would be 4"],
    )


def test_a_plugin_is_refused_only_where_nccls_own_networks_are_meant() -> None:
    env = {"NCCL_NET_PLUGIN": "ofi"}
    assert refusals(env, {}, files=[]) and refusals(env, {}, files=[], network="Libfabric") == []


def test_the_testbed_has_no_hca() -> None:
    assert environment(TESTBED, IB) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def test_a_fabric_the_node_is_not_of(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"node n3: no active roce port among mlx5_0:1 ib ACTIVE"):
        environment(nics(tmp_path, "hdr_4_hcas"), ROCE, "n3")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket overrides"),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 switches RDMA off"),
        ({"NCCL_NET_PLUGIN": "ofi"}, "NCCL_NET_PLUGIN=ofi replaces"),
        ({"NCCL_COMM_ID": "10.0.0.1:99"}, "NCCL_COMM_ID"),
        ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, "AF_INET6"),
        (
            {"NCCL_SOCKET_IFNAME": "ib"},
            "NCCL_SOCKET_IFNAME=ib rules out eth0, which the plan uses on this node (=eth0)",
        ),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "NCCL_SOCKET_IFNAME=^eth rules out eth0"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME=ib0 rules out eth0"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_a_wrong_variable_is_one_line_with_its_cure(env: dict[str, str], says: str) -> None:
    found = refusals(env, environment(TESTBED, IB), "ib1", files=[])
    assert len(found) == 1 and found[0].level == "error"
    assert says in str(found[0]) and "node ib1" in str(found[0]) and "unset" in found[0].hint


def test_a_refusal_names_the_nic_that_was_meant() -> None:
    found = refusals({"NCCL_NET": "Socket"}, {}, "ib1", files=[], nic="ib0")
    assert str(found[0]) == (
        "error: node ib1: NCCL_NET=Socket overrides the network of every communicator "
        "(expected: NIC ib0); unset it (NCCL_NET)"
    )
    assert found[0].nic == "ib0"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"NCCL_IB_DISABLE": "0"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_DEBUG": "INFO"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_NET": ""},
        {"NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"GLOO_SOCKET_IFNAME": "eth1,eth0"},
    ],
)
def test_healthy_environments_print_nothing(env: dict[str, str]) -> None:
    assert refusals(env, environment(TESTBED, IB), files=[]) == []


def test_a_gid_index_is_a_warning() -> None:
    assert [f.level for f in refusals({"NCCL_IB_GID_INDEX": "3"}, {}, files=[])] == ["warning"]


def test_settings_files(tmp_path: Path) -> None:
    text = "# mine\nNCCL_NET = Socket\nNCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=ib0\nrubbish\n"
    (tmp_path / ".nccl.conf").write_text(text)
    env = {"HOME": str(tmp_path)}
    assert conf_files(env) == [tmp_path / ".nccl.conf", Path("/etc/nccl.conf")]
    found = refusals(env, environment(TESTBED, IB), "ib1", files=[tmp_path / ".nccl.conf"])
    assert len(found) == 1 and "NCCL_NET=Socket in" in found[0].what and "remove it from" in found[0].hint
    assert conf_files({"HOME": "/h", "NCCL_CONF_FILE": "/x"}) == [Path("/x"), Path("/etc/nccl.conf")]
    assert read_conf(tmp_path / "none") == {}


NAMES = st.text(max_size=10).filter(lambda name: not name.startswith("NCCL"))  # hypothesis also draws our constants


@given(st.dictionaries(NAMES, st.text(max_size=10), max_size=5))
def test_foreign_variables_are_nobodys_business(env: dict[str, str]) -> None:
    assert refusals(env, {"NCCL_SOCKET_IFNAME": "=eth0"}, files=[]) == []

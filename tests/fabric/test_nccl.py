from pathlib import Path

import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nccl import conf_files, environment, read_conf, refusals
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import Nic, NodeNics
from holmes_hpc.fabric.probe import probe

IB, ROCE, ETHERNET = NicType.IB, NicType.ROCE, NicType.ETHERNET
TESTBED = NodeNics((Nic("eth0", ETHERNET, address="10.1.0.2", prefix=24),
                    Nic("ib0", IB, address="10.2.0.2", prefix=24)))


def nics(tmp_path: Path, name: str) -> NodeNics:
    tree = Tree(tmp_path)
    trees.ALL[name](tree)
    return probe(tree.root, {"eth0": ("10.0.0.2", 24)}, tree.read)


@pytest.mark.parametrize(("name", "nic", "hca"), [
    ("hdr_4_hcas", IB, "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1"),
    ("one_port_down", IB, "=mlx5_0:1"),
    ("ib_and_a_storage_card", IB, "=mlx5_0:1,mlx5_1:1"),
    ("a_slow_cable", IB, "=mlx5_0:1,mlx5_1:1,mlx5_3:1"),
    ("roce_on_a_bond", ROCE, "=mlx5_bond_0:1"),
    ("hdr_4_hcas", ETHERNET, None),
    ("virtio_only", ETHERNET, None),
])
def test_environment(tmp_path: Path, name: str, nic: NicType, hca: str | None) -> None:
    env = environment(nics(tmp_path, name), nic)
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0" and env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert env.get("NCCL_IB_HCA") == hca


def test_the_testbed_has_no_hca() -> None:
    assert environment(TESTBED, IB) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def test_a_fabric_the_node_is_not_of(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match=r"node n3: no active roce port among mlx5_0:1 ib ACTIVE"):
        environment(nics(tmp_path, "hdr_4_hcas"), ROCE, "n3")


@pytest.mark.parametrize(("env", "says"), [
    ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket overrides"),
    ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 switches RDMA off"),
    ({"NCCL_NET_PLUGIN": "ofi"}, "NCCL_NET_PLUGIN=ofi replaces"),
    ({"NCCL_COMM_ID": "10.0.0.1:99"}, "NCCL_COMM_ID"),
    ({"NCCL_SOCKET_FAMILY": "AF_INET6"}, "AF_INET6"),
    ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME=ib differs from this node's =eth0"),
    ({"NCCL_SOCKET_IFNAME": "^docker"}, "differs from this node's =eth0"),
    ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME=ib0 differs from this node's eth0"),
    ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "TORCH_DISTRIBUTED_DEBUG"),
])
def test_a_wrong_variable_is_one_line_with_its_cure(env: dict[str, str], says: str) -> None:
    found = refusals(env, environment(TESTBED, IB), "ib1", files=[])
    assert len(found) == 1 and found[0].level == "error"
    assert says in str(found[0]) and "node ib1" in str(found[0]) and "unset" in found[0].hint


def test_a_refusal_names_the_nic_that_was_meant() -> None:
    found = refusals({"NCCL_NET": "Socket"}, {}, "ib1", files=[], nic="ib0")
    assert str(found[0]) == ("error: node ib1: NCCL_NET=Socket overrides the network of every communicator "
                             "(meant: NIC ib0); unset it (NCCL_NET)")
    assert found[0].nic == "ib0"


@pytest.mark.parametrize("env", [{}, {"NCCL_IB_DISABLE": "0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}, {"NCCL_DEBUG": "INFO"},
                                 {"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_NET": ""}, {"NCCL_SOCKET_IFNAME": "eth0"}])
def test_healthy_environments_print_nothing(env: dict[str, str]) -> None:
    assert refusals(env, environment(TESTBED, IB), files=[]) == []


def test_prefix_match_of_several_ports_is_refused() -> None:
    wanted = {"NCCL_IB_HCA": "=mlx5_1:1,mlx5_2:1"}
    assert refusals({"NCCL_IB_HCA": "mlx5_1:1,mlx5_2:1"}, wanted, files=[])
    assert not refusals({"NCCL_IB_HCA": "=mlx5_2:1,mlx5_1:1"}, wanted, files=[])


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


@given(st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=5))
def test_foreign_variables_are_nobodys_business(env: dict[str, str]) -> None:
    assert refusals(env, {"NCCL_SOCKET_IFNAME": "=eth0"}, files=[]) == []

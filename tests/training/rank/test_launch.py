"""The launch of a rank from Slurm's and torchrun's variables, the rendezvous, and the networks of process groups."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import spawn
import torch.distributed as dist

from holmes_hpc.errors import HolmesError, NetworkError, PlanError
from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.nics import Nic, NodeNics, RdmaPort
from holmes_hpc.fabric.site import FabricLink, NicNames, NicType
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import write_whole
from holmes_hpc.training import session
from holmes_hpc.training.network import interfaces as transports
from holmes_hpc.training.network import rendezvous
from holmes_hpc.training.network.filtered_listener import listening_socket
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.rank.launch import Launch, check_launch, read_launch

# The variables of a task in a step over three components under Slurm 22.05. The plain ones hold the last component's.
HET = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "6",
    "SLURM_JOB_ID": "41",
    "SLURM_HET_JOB_ID": "40",
    "SLURM_HET_SIZE": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_PARTITION": "eth",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURMD_NODENAME": "roce1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "ib[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "roce[1,3]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "eth[1-2]",
}


def test_a_task_of_a_hetjob_finds_its_component_by_its_node() -> None:
    task = read_launch(HET, host="somewhere")
    assert (task.rank, task.world_size, task.node, task.components, task.one_host) == (2, 6, "roce1", (1,), False)
    assert check_launch(task, spawn.plan(pp=3, dp=2)) == 1


def test_a_task_in_another_component_than_planned_is_refused() -> None:
    wrong = read_launch({**HET, "SLURM_PROCID": "1"})
    with pytest.raises(PlanError, match="rank 1 runs on a node of component 1, but the plan puts it in component 0"):
        check_launch(wrong, spawn.plan(pp=3, dp=2))


def test_a_node_outside_all_components_is_an_error() -> None:
    with pytest.raises(PlanError, match="node ib9 is in none of the job's 3 components"):
        read_launch({**HET, "SLURMD_NODENAME": "ib9"})


def test_a_node_in_two_components_belongs_to_both() -> None:
    shared = read_launch({**HET, "SLURM_JOB_NODELIST_HET_GROUP_2": "roce1,eth1"})
    assert shared.components == (1, 2) and check_launch(shared, spawn.plan(pp=3, dp=2)) == 1


def test_all_ranks_of_a_start_share_a_key_that_a_requeue_changes() -> None:
    first = read_launch(HET)
    other_rank = read_launch({**HET, "SLURM_PROCID": "5", "SLURMD_NODENAME": "eth2", "SLURM_JOB_ID": "42"})
    assert first.key == other_rank.key != read_launch({**HET, "SLURM_RESTART_COUNT": "1"}).key


def test_a_plain_job_has_no_component_variables_to_check() -> None:
    plain = {k: v for k, v in HET.items() if "HET" not in k}
    assert check_launch(read_launch(plain), spawn.plan(pp=3, dp=2)) == 1


def test_the_variables_of_torchrun_win_over_those_of_slurm() -> None:
    task = read_launch(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "29500",
            **HET,
        }
    )
    assert (task.rank, task.local_rank, task.one_host, task.address, task.port) == (3, 1, False, "n1", 29500)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
    ],
)
def test_invalid_variables_are_reported_in_one_line(environ: dict[str, str]) -> None:
    with pytest.raises(HolmesError) as e:
        read_launch(environ)
    assert "\n" not in str(e.value)


def test_a_single_process_is_rank_0_of_1() -> None:
    assert check_launch(read_launch({}), spawn.plan()) == 0
    with pytest.raises(PlanError, match="1 rank started, the plan has 4"):
        check_launch(read_launch({}), spawn.plan(pp=2, dp=2))


# -- rendezvous -------------------------------------------------------------------------------------------------------


def member(rank: int, size: int = 2, key: str = "slurm-1-0-0") -> Launch:
    return Launch(rank, size, rank, "srun", f"n{rank}", key, True)


def test_ranks_meet_despite_an_old_address_in_the_run_directory(tmp_path: Path) -> None:
    path = rendezvous.published_path(tmp_path, member(0))
    old = rendezvous.Rendezvous("127.0.0.1", spawn.free_port(), "00" * 32, 1, "n0", 1)
    write_whole(path, json.dumps(asdict(old)), 0o600)
    write_whole(rendezvous.published_path(tmp_path, member(0, key="slurm-0-0-0")), json.dumps(asdict(old)), 0o600)
    joined_stores: list[Any] = []
    attempts: list[int] = []
    rank_1 = threading.Thread(
        target=lambda: joined_stores.append(rendezvous.join_store(tmp_path, member(1), 200, on_attempt=attempts.append))
    )
    rank_1.start()
    store = rendezvous.host_store(tmp_path, member(0), "127.0.0.1", 2, 200)
    rank_1.join()
    joined_stores[0].set("a", "b")
    assert store.get("a") == b"b" and attempts[-1] == 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # the file of a killed start is removed
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_port_that_is_taken_on_the_loopback_interface_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run's proxy may have it: it listens at a port of the kernel's choice."""
    ports, other_sockets = list[int](), list[Any]()

    class ListenerOnTakenPort(rendezvous.FilteredListener):
        def __init__(self, address: str, key: bytes) -> None:
            super().__init__(address, key)
            ports.append(self.port)
            other_sockets.extend([] if other_sockets else [listening_socket("127.0.0.2", self.port)])

    monkeypatch.setattr(rendezvous, "FilteredListener", ListenerOnTakenPort)
    store = rendezvous.host_store(tmp_path, member(0, size=1), "127.0.0.1", 2, 60)
    store.set("a", "b")
    assert store.get("a") == b"b" and len(set(ports)) == 2
    other_sockets[0].close()


def test_ranks_do_not_wait_for_a_store_that_cannot_listen(tmp_path: Path) -> None:
    run, node = SimpleNamespace(path=tmp_path), SimpleNamespace(address="192.0.2.1")  # reserved by RFC 5737
    with pytest.raises(NetworkError, match=r"cannot serve on 192\.0\.2\.1"):
        session._meet(member(0), run, node, SimpleNamespace(attempt=3), 1)  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match=r"rank 0 failed: .*cannot serve on"):
        rendezvous.join_store(tmp_path, member(1), 100)


def test_another_process_at_the_address_is_refused(tmp_path: Path) -> None:
    other_store = rendezvous.host_store(tmp_path / ".", member(0, key="other"), "127.0.0.1", 1, 5)
    published = json.loads(rendezvous.published_path(tmp_path, member(0, key="other")).read_text())
    write_whole(rendezvous.published_path(tmp_path, member(0)), json.dumps({**published, "secret": "00" * 32}), 0o600)
    with pytest.raises(NetworkError, match="another process answers there"):
        rendezvous.join_store(tmp_path, member(1), 1)
    del other_store


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rendezvous.json"
    write_whole(path, json.dumps(asdict(rendezvous.Rendezvous("1.2.3.4", 1, "00", 1, "n", 1))), 0o600)
    assert rendezvous.read_published(path) is not None
    path.chmod(0o640)  # others may have read the secret
    assert rendezvous.read_published(path) is None
    path.chmod(0o600)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert rendezvous.read_published(path) is None


@pytest.mark.parametrize("agent", [True, False])
def test_a_store_without_authentication_gives_a_warning(
    agent: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = spawn.free_port()
    launch = Launch(0, 1, 0, "torchrun", "n0", "torchrun-none", True, (), "127.0.0.1", port)
    agent_store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    rendezvous.launcher_store(launch, 10).set("a", "b")
    output = capfd.readouterr()
    assert ("asks for no secret" in output.out + output.err) is agent  # without an agent it listens on loopback only
    del agent_store


def test_a_failure_of_rank_0_before_the_rendezvous_reaches_other_ranks(tmp_path: Path) -> None:
    rendezvous.publish_failure(tmp_path, member(0), 3, "node n0: eth0 is down", 1)
    attempts: list[int] = []
    with pytest.raises(NetworkError, match="rank 0 failed: node n0: eth0 is down"):
        rendezvous.join_store(tmp_path, member(1), 5, on_attempt=attempts.append)
    assert attempts == [3]


# -- networks ---------------------------------------------------------------------------------------------------------


def nics(*names: str, **changes: Any) -> NodeNics:
    kinds = {"ib": NicType.IB, "roce": NicType.ROCE}
    interfaces = []
    for i, name in enumerate(names):
        kind = kinds.get(name.rstrip("0123456789"), NicType.ETHERNET)
        interfaces.append(Nic(name, kind, **{"address": f"10.0.{i}.7", "prefix": 24, **changes.get(name, {})}))
    return NodeNics(tuple(interfaces))


@pytest.mark.parametrize(
    ("rank", "names", "interfaces", "environment"),
    [
        (0, ("eth0", "ib0", "mgmt0"), {"tcp": "eth0", "rdma": "ib0"}, "=eth0"),
        (2, ("mgmt0", "eth1", "roce0"), {"tcp": "eth1", "rdma": "roce0"}, "=eth1"),
        (4, ("eth0", "mgmt0"), {"tcp": "eth0"}, "=eth0"),
    ],
)
def test_every_node_uses_its_own_interfaces(
    rank: int, names: tuple[str, ...], interfaces: dict[str, str], environment: str
) -> None:
    networks = transports.node_transports(spawn.plan(pp=3, dp=2), rank, nics(*names), "n", one_host=False, cuda=False)
    assert {k: v[0] for k, v in networks.interfaces.items()} == interfaces
    assert networks.environment["NCCL_SOCKET_IFNAME"] == environment
    assert msgspec.json.decode(msgspec.json.encode(networks), type=NodeTransports) == networks


def transport_of(plan: Plan, kind: str, *ranks: int) -> Any:
    return next(g.transport for g in plan.transports() if g.kind == kind and g.ranks == ranks)


def test_groups_get_the_interface_of_their_transport() -> None:
    plan = spawn.plan(pp=3, dp=2)
    networks = transports.node_transports(plan, 0, nics("eth0", "ib0"), "n", one_host=False, cuda=False)
    assert networks.interface(transport_of(plan, "dp", 0, 1)) == "ib0"
    assert networks.interface(transport_of(plan, "edge", 0, 2)) == "eth0"
    assert networks.interface(plan.transport_of(range(6))) == "eth0"
    assert networks.interface(plan.transport_of([0])) == "lo"
    single = spawn.plan(pp=3, dp=2, transport_mode="single")
    assert networks.interface(transport_of(single, "dp", 0, 1)) == "eth0"


@pytest.mark.parametrize(
    ("names", "changes", "match"),
    [
        (("eth0",), {}, "no ib interface"),
        (("eth0", "ib0"), {"ib0": {"up": False}}, "ib interface ib0 is down"),
        (("eth0", "ib0"), {"ib0": {"address": None}}, "ib interface ib0 has no IPv4 address"),
        (("ib0",), {}, "no ethernet interface"),
        (("eth0", "mgmt0", "ib0"), {"eth0": {"up": False}}, "eth0 is down, and mgmt0 is no substitute"),
    ],
)
def test_a_missing_network_is_reported_in_one_line_with_node_nic_and_fix(
    names: tuple[str, ...], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(NetworkError, match=match) as e:
        transports.node_transports(
            spawn.plan(pp=3, dp=2), 0, nics(*names, **changes), "ib7", one_host=False, cuda=False
        )
    assert "ib7" in str(e.value) and e.value.hint


def test_a_roce_nic_does_not_replace_an_ethernet_nic_that_is_down() -> None:
    plan, down = spawn.plan(pp=3, dp=2), {"eth0": {"up": False}}
    with pytest.raises(NetworkError, match="eth0 is down, and roce0 is no substitute; ip link set eth0 up"):
        transports.node_transports(plan, 2, nics("eth0", "mgmt0", "roce0", **down), "roce1", one_host=False, cuda=False)
    unused = {"eth1": {"up": False, "address": None}}  # a converged node: RoCE and TCP over one NIC
    networks = transports.node_transports(plan, 2, nics("eth1", "roce0", **unused), "roce1", one_host=False, cuda=False)
    assert networks.interfaces["tcp"][0] == networks.interfaces["rdma"][0] == "roce0"


def test_rdma_ports_without_an_interface_are_enough_for_nccl() -> None:
    ports = (RdmaPort("mlx5_0", 1, "ib", True, "ACTIVE", 200.0), RdmaPort("mlx5_10", 1, "ib", True, "ACTIVE", 200.0))
    node = NodeNics(nics("eth0").interfaces, ports)
    networks = transports.node_transports(spawn.plan(pp=3, dp=2), 0, node, "n", one_host=False, cuda=True)
    assert networks.environment["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_10:1" and "rdma" not in networks.interfaces
    with pytest.raises(NetworkError, match="no kernel interface"):
        transports.node_transports(spawn.plan(pp=3, dp=2), 0, node, "n", one_host=False, cuda=False)


def test_a_container_without_infiniband_in_sysfs_is_refused_only_without_verbs() -> None:
    plan, bare = spawn.plan(pp=3, dp=2), nics("eth0")
    with pytest.raises(NetworkError, match="neither /sys/class/infiniband nor /dev/infiniband/uverbs"):
        transports.node_transports(plan, 0, bare, "n", one_host=False, cuda=True)
    networks = transports.node_transports(plan, 0, replace(bare, verbs=True), "n", one_host=False, cuda=True)
    assert "NCCL_IB_HCA" not in networks.environment and "rdma" not in networks.interfaces
    (line,) = transports.log_lines(networks, {}, [])
    assert line.startswith("node n: no /sys/class/infiniband (a container), but /dev/infiniband: NCCL finds its ib")


def with_fabric(plan: Plan, **changes: Any) -> Plan:
    """Return `plan` with changes to its first fabric."""
    first, *other_fabrics = plan.site.pools
    return replace(plan, site=replace(plan.site, pools=(replace(first, **changes), *other_fabrics)))


def test_interface_names_of_a_node_win_over_those_of_the_site() -> None:
    plan = with_fabric(spawn.plan(pp=3, dp=2), ethernet="eth1", node_nics={"ib[3-4]": NicNames("eth2")})
    node_nics = nics("eth0", "eth1", "eth2", "ib0")
    for node, interface in (("ib1", "eth1"), ("ib4", "eth2")):
        named_nics = transports.site_nics(plan, 0, node_nics, node, {})
        networks = transports.node_transports(plan, 0, named_nics, node, one_host=False, cuda=False)
        assert (
            networks.environment["NCCL_SOCKET_IFNAME"] == f"={interface}" and networks.interfaces["tcp"][0] == interface
        )
    with pytest.raises(NetworkError, match=r"node ib9 \(pool ib-0\): no interface eth1, which the site names"):
        transports.site_nics(plan, 0, nics("eth0"), "ib9", {})


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"ethernet_gbps": 100.0}, {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}),  # one rank a node
        ({"ethernet_gbps": 5.0}, {}),
    ],
)
def test_sockets_get_connections_for_the_plans_rate(changes: dict[str, Any], settings: dict[str, str]) -> None:
    plan, node_nics = with_fabric(spawn.plan(pp=3, dp=2), **changes), replace(nics("eth0", "ib0"), verbs=True)
    networks = transports.node_transports(plan, 0, node_nics, "n", one_host=False, cuda=True)
    assert networks.defaults == settings and not set(settings) & set(networks.environment)
    assert transports.node_transports(plan, 0, node_nics, "n", one_host=False, cuda=False).defaults == {}
    if settings:
        line = transports.log_lines(networks, {"NCCL_SOCKET_NTHREADS": "2"}, [])[-1]
        assert line == "node n: NCCL_SOCKET_NTHREADS=2 is the site's own and stays; for the plan's rate it would be 4"


def test_a_link_in_the_site_file_sets_the_rate_between_its_fabrics() -> None:
    plan = spawn.plan(pp=2, dp=2)
    fabrics = plan.components[0].fabric, plan.components[1].fabric
    slow = replace(plan, site=replace(plan.site, links=(FabricLink(fabrics, gbps=40.0),)))
    node_nics = replace(nics("eth0", "ib0"), verbs=True)
    networks = transports.node_transports(slow, 0, node_nics, "n", one_host=False, cuda=True)
    assert networks.defaults == nccl.socket_settings(40.0, 1) != {}


@pytest.mark.parametrize(
    ("environ", "match"),
    [
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME=ib0 rules out eth0"),
        ({"GLOO_SOCKET_IFNAME": "mgmt0"}, "GLOO_SOCKET_IFNAME=mgmt0"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_variables_that_contradict_the_plan_are_refused(environ: dict[str, str], match: str) -> None:
    networks = transports.node_transports(
        spawn.plan(pp=3, dp=2), 0, nics("eth0", "ib0"), "ib1", one_host=False, cuda=False
    )
    assert transports.refuse_overrides(networks, {}, []) == []
    with pytest.raises(NetworkError, match=match) as e:
        transports.refuse_overrides(networks, environ, [])
    assert "ib1" in str(e.value)


def test_ranks_that_the_plan_puts_on_one_node_must_share_it() -> None:
    plan = spawn.plan(tp=2, pp=2)

    def node(name: str) -> NodeTransports:
        return NodeTransports(name, "f", {}, {}, False)

    transports.check_placement(plan, [node("a"), node("a"), node("b"), node("b")])
    with pytest.raises(NetworkError, match="rank 1 shares node a in the plan, but runs on b"):
        transports.check_placement(plan, [node("a"), node("b"), node("a"), node("b")])
    with pytest.raises(NetworkError, match="2 nodes are planned, 1 are used"):
        transports.check_placement(plan, [node("a")] * 4)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Unable to find address for: ib0", "give ib0 an IPv4 address"),
        ("connect: Network is unreachable", "connect the networks"),
        ("timed out", "reach each other over ib0"),
    ],
)
def test_an_error_of_a_group_names_its_ranks_and_transport(text: str, hint: str) -> None:
    plan = spawn.plan(pp=3, dp=2)
    error = transports.as_network_error(RuntimeError(text), "dp", (0, 1), transport_of(plan, "dp", 0, 1), "ib1", "ib0")
    assert str(error).startswith("dp group of ranks 0,1 (rdma over ib (ib-0)) on node ib1: set-up on ib0 failed")
    assert hint in str(error)

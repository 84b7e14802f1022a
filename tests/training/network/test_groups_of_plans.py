"""Every process group that each rank of a plan creates with NCCL, and its network.

The groups are those of training: Groups, then Megatron-Core's parallel state, then the edges. They are created through
torch's fake process group, which does not communicate. With NCCL in torch (`make test-nccl`) the options are NCCL's
own; without it a stand-in holds the network's name.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from sites import A100
from torch.testing._internal.distributed.fake_pg import FakeStore

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.process_groups import Groups
from holmes_hpc.training.pipeline import point_to_point

MODEL = ModelSpec("groups", 12, 64, 8, 512, ffn=128, kv_heads=8, max_positions=64, tied=True)
TABLE = Path(__file__).parents[3] / "benchmarks" / "results" / "nccl-groups.md"
IB_ROCE = [("ib-a", "ib"), ("roce-a", "roce")]
PLANS: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {
    "IB + RoCE": (IB_ROCE, {"tp": 1, "pp": 2, "dp": 8}),
    "IB + RoCE + Ethernet": ([*IB_ROCE, ("eth-a", "ethernet")], {"tp": 1, "pp": 3, "dp": 8}),
    "hierarchical": (IB_ROCE, {"tp": 1, "pp": 1, "dp": 16, "strategy": "hierarchical-dp"}),
    "one fabric": ([("ib-a", "ib")], {"tp": 1, "pp": 2, "dp": 4}),
    "TP 4": (IB_ROCE, {"tp": 4, "pp": 4, "dp": 1}),
    "virtual stages": (IB_ROCE, {"tp": 1, "pp": 4, "dp": 4, "virtual_stages": 3}),
    "plain Megatron-LM": (IB_ROCE, {"tp": 1, "pp": 2, "dp": 8, "transport": "single"}),
}


WORLD = "torch's WORLD"


class CreatedGroup(NamedTuple):
    """A process group. `network`: NCCL's network (None: NCCL chooses, on one node) or gloo's interface."""

    kind: str
    ranks: tuple[int, ...]
    backend: str
    network: str | None


def plan_of(name: str) -> Plan:
    fabrics, options = PLANS[name]
    site = Site(
        "site",
        tuple(
            Pool(f, NicType(nic), f, 2, 4, 25, A100, rdma_gbps=None if nic == "ethernet" else 200) for f, nic in fabrics
        ),
    )
    return fixed_plan(MODEL, Batch(48, 1, 64), site, PlanOptions(**options), Costs())


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[CreatedGroup]:
    """Return a list to which every group that this process creates is added."""
    created: list[CreatedGroup] = []
    real = {"init_process_group": dist.init_process_group, "new_group": dist.new_group}
    if not dist.is_nccl_available():

        def options() -> Any:
            return SimpleNamespace(config=SimpleNamespace(net_name=None))

        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)

    def network(backend: str, options: Any) -> str | None:
        return options.config.net_name if backend == "nccl" else options["interface"]

    def init(backend: str, *, pg_options: Any, timeout: Any, **options: Any) -> None:
        created.append(CreatedGroup(WORLD, tuple(range(options["world_size"])), backend, network(backend, pg_options)))
        real["init_process_group"]("fake", **options)

    def new(ranks: Sequence[int], *, timeout: Any, backend: str, pg_options: Any, group_desc: str) -> Any:
        name = "nccl" if backend == "nccl" else "gloo"
        created.append(CreatedGroup(group_desc, tuple(ranks), name, network(backend, pg_options)))
        return real["new_group"](list(ranks), backend="fake", group_desc=group_desc)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return created


def groups_of(plan: Plan, rank: int, created: list[CreatedGroup]) -> list[CreatedGroup]:
    """Return the groups of `rank`, in the order in which it creates them."""
    place = plan.places[rank]
    fabric = plan.site.pool(place.pool)
    interfaces = {"tcp": ("eth0", "10.1.0.1")}
    if fabric.nic.rdma:
        interfaces["rdma"] = ("ib0", "10.2.0.1")
    created.clear()
    groups = Groups(plan, NodeTransports(place.node, place.pool, interfaces, {}, False), rank, True, 10.0, 10.0)
    try:
        groups.start(FakeStore())
        groups.make_parallel_state()
        if plan.parallel.pp > 1:
            config = SimpleNamespace(
                variable_seq_lengths=False, pipeline_dtype=torch.float32, virtual_pipeline_model_parallel_size=None
            )
            point_to_point.build_communicator(
                plan,
                groups.edge,
                rank=rank,
                config=config,
                device=torch.device("cpu"),
                pp_group=parallel_state.get_pipeline_model_parallel_group(),
            )
        groups.new(range(plan.world_size), "control", gloo=True)
        return [g for g in created if rank in g.ranks and len(g.ranks) > 1]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def expected_network(plan: Plan, group: CreatedGroup) -> str | None:
    """Return the network by the README's rules: RDMA inside a fabric that has it, sockets between fabrics, neither
    inside a node; control traffic beside GPUs (gloo's groups, torch's WORLD) over Ethernet."""
    places = {plan.places[r] for r in group.ranks}
    if len(places) == 1:
        return "lo" if group.backend == "gloo" else None
    if group.backend == "gloo":
        return "eth0"
    if group.kind == WORLD:
        return "Socket"
    fabrics = {p.pool for p in (plan.places if plan.transport_mode == "single" else places)}
    rdma = len(fabrics) == 1 and plan.site.pool(fabrics.pop()).nic.rdma
    return "IB" if rdma else "Socket"


def row(name: str, plan: Plan, created: Sequence[CreatedGroup]) -> str:
    """Return a row of benchmarks/results/nccl-groups.md: the kinds of NCCL's groups by network."""
    kinds: dict[str | None, set[str]] = defaultdict(set)
    for group in created:
        if group.backend == "nccl":
            kind = group.kind.removesuffix(" with cp").removesuffix(" with egtp")  # the latter from 0.18 on
            kinds[group.network].add("edge" if kind.startswith("edge") else kind)
    p = plan.parallel
    shape = f"TP {p.tp} PP {p.pp} DP {p.dp}" + (f", {p.virtual_stages} chunks" if p.virtual_stages > 1 else "")
    columns = (", ".join(sorted(kinds[network])) or "–" for network in ("IB", "Socket", None))
    return f"| {name} ({shape}) | {' | '.join(columns)} |"


@pytest.mark.nccl
@pytest.mark.integration
@pytest.mark.parametrize("name", PLANS)
def test_every_group_uses_the_network_of_its_planned_transport(name: str, created: list[CreatedGroup]) -> None:
    plan = plan_of(name)
    entries = {tuple(sorted(g.ranks)): g.transport.kind for g in plan.transports() if g.kind != "control"}
    all_groups: list[CreatedGroup] = []
    for rank in range(plan.world_size):
        rank_groups = groups_of(plan, rank, created)
        for group in rank_groups:
            assert group.network == expected_network(plan, group), group
            if group.backend == "nccl" and group.kind != WORLD:
                transport = {"IB": "rdma", "Socket": "tcp", None: "local"}[group.network]
                assert entries[tuple(sorted(group.ranks))] == transport, group
        all_groups += rank_groups
    assert {tuple(sorted(g.ranks)) for g in all_groups} == set(entries)  # exactly the plan's groups are created
    assert row(name, plan, all_groups) in TABLE.read_text()


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    yield
    assert not dist.is_initialized()

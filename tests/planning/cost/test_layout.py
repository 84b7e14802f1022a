"""The cost model derives transports by arithmetic, and they must equal those of the plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import thorough
from sites import H100, one_fabric, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import step_s, timing
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.planning.schedule.kinds import in_flight
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.planning.search.layers import uniform_layers

SLOWER = {"local": 0, "rdma": 1, "tcp": 2}


def sites() -> Iterator[Site]:
    two = two_clusters(2)
    first, second = two.pools
    yield two
    yield replace(two, pools=(first,))
    yield replace(two, pools=(replace(first, nodes=1),))
    yield replace(two, pools=(first, replace(second, nic=NicType.ETHERNET, rdma_gbps=None)))


@cache
def plans(mode: str) -> list[Plan]:
    made = []
    for site, strategy, tp, pp, dp in product(
        sites(), ("auto", "hierarchical-dp"), (1, 2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)
    ):
        options = PlanOptions(tp=tp, pp=pp, dp=dp, strategy=strategy, transport=mode)
        with contextlib.suppress(PlanError):
            made.append(fixed_plan(named("gpt_3_6b"), Batch(64, 1, 1024), site, options, Costs()))
    return made


def slowest(transports: Iterable[Transport]) -> Transport:
    return max(transports, key=lambda t: SLOWER[t.kind], default=LOCAL)


def slowest_in_plan(plan: Plan, fabrics: set[str], kind: str, *stages: int) -> Transport:
    """Return the slowest transport that the plan gives to groups of `kind` inside `fabrics`."""
    return slowest(
        g.transport
        for g in plan.transports()
        if g.kind == kind and g.stages == stages and {plan.places[r].pool for r in g.ranks} <= fabrics
    )


@pytest.mark.integration
@pytest.mark.parametrize("mode", thorough.all_but(["holmes", "single"], "holmes"))
def test_derived_transports_equal_those_of_the_plan(mode: str) -> None:
    """Compare the slowest of several groups, which determines the step."""
    seen: set[tuple[str, str]] = set()
    for plan in plans(mode):
        layout, p = Layout.of(plan, Costs()), plan.parallel
        for number, replica in enumerate(layout.replicas):
            fabrics = {c.pool for c in replica}

            for s in range(p.pp):
                pairs = {}
                if s + 1 < p.pp:
                    pairs["edge"] = layout.edges[number][s], slowest_in_plan(plan, fabrics, "edge", s, s + 1)
                if layout.intra_dp_size > 1:
                    kind = "intra_dp" if p.optimizer_instances > 1 else "dp"
                    pairs[kind] = layout.intra_dp_transport(number, s), slowest_in_plan(plan, fabrics, kind, s)
                for kind, (derived, expected) in pairs.items():
                    assert derived == expected, (kind, s, plan.parallel, plan.components)
                    seen.add((kind, derived.kind))
            if p.pp > 1:
                assert layout.embedding_transport(number) == slowest_in_plan(plan, fabrics, "embd", 0, p.pp - 1), (
                    plan.parallel,
                    plan.components,
                )
        if p.optimizer_instances > 1:
            assert layout.inter_dp_transport() == slowest(
                g.transport for g in plan.transports() if g.kind == "inter_dp"
            )
    assert {kind for kind, _ in seen} == {"edge", "dp", "intra_dp"}
    assert {network for _, network in seen} == {"local", "rdma", "tcp"}


@pytest.mark.integration
def test_control_traffic_uses_tcp_or_stays_local() -> None:
    for plan in plans("holmes"):
        control = plan.transport_of(range(plan.world_size), host_memory=True)
        assert control == (LOCAL if sum(c.nodes for c in plan.components) == 1 else TCP)


def test_a_variant_costs_as_much_as_a_fresh_layout() -> None:
    """A variant shares no memoised result that its schedule, recomputation or virtual stages change.
    The pipelines cross fabrics, stay inside nodes, or are hierarchical."""
    site = Site("three", (*two_clusters(2).pools, replace(one_fabric(H100, "h", 2), ethernet_gbps=5.0)))
    for options in (
        PlanOptions(tp=2, pp=12, dp=2),
        PlanOptions(tp=1, pp=3, dp=16),
        PlanOptions(tp=2, pp=4, dp=6, strategy="hierarchical-dp"),
    ):
        plan = fixed_plan(named("gpt_3_6b"), Batch(48, 1, 1024), site, options, Costs())
        layout = Layout.of(plan, Costs())
        timing(layout, layer_array(plan))
        memory(layout, layer_array(plan))
        for recompute, chunks, kind, size in (
            ("full", 1, "ahead", 10**7),
            ("selective", 2, "interleaved", 10**6),
            ("none", 2, "ahead", 10**9),
        ):
            depths = in_flight(options.pp or 1, layout.order.micro_batches, chunks)
            variant = layout.with_settings(Schedule(kind, depths), size, recompute, chunks)
            fresh = replace(
                layout,
                schedule=Schedule(kind, depths),
                bucket_bytes=size,
                recompute=recompute,
                parallel=replace(layout.parallel, virtual_stages=chunks),
                pool_memo=Memo(),
            )
            assert variant == fresh
            layers = uniform_layers(fresh)
            assert step_s(variant, layers)[0] == step_s(fresh, layers)[0]
            assert (memory(variant, layers).total() == memory(fresh, layers).total()).all()

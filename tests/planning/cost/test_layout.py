"""The cost model finds out by arithmetic where groups run; their networks must be those that the plan writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from sites import two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.search.best import given_plan
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.planning.spec.transport import LOCAL, TCP, Transport

SLOWER = {"local": 0, "rdma": 1, "tcp": 2}


def sites() -> Iterator[Site]:
    two = two_clusters(2)
    one, other = two.fabrics
    yield two
    yield replace(two, fabrics=(one,))
    yield replace(two, fabrics=(replace(one, nodes=1),))
    yield replace(two, fabrics=(one, replace(other, nic=NicType.ETHERNET, rdma_gbps=None)))


def plans(mode: str) -> Iterator[Plan]:
    for site in sites():
        for strategy in ("auto", "hierarchical-dp"):
            for tp in (1, 2, 8):
                for pp in (1, 2, 4, 8):
                    for dp in (1, 2, 4, 8, 16):
                        options = PlanOptions(tp=tp, pp=pp, dp=dp, strategy=strategy, transport=mode)
                        try:
                            yield given_plan(named("gpt_3_6b"), Batch(64, 1, 1024), site, options, Costs())
                        except PlanError:
                            continue


def slowest(found: Iterable[Transport]) -> Transport:
    return max(found, key=lambda t: SLOWER[t.kind], default=LOCAL)


def written(plan: Plan, fabrics: set[str], kind: str, *stages: int) -> Transport:
    """The slowest transport that the plan gives to groups of `kind` inside `fabrics`."""
    return slowest(g.transport for g in plan.transports() if g.kind == kind and g.stages == stages
                   and {plan.places[r].fabric for r in g.ranks} <= fabrics)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["holmes", "single"])
def test_transports_are_the_plans(mode: str) -> None:
    """Of several groups the slowest: that is what a step waits for."""
    seen: set[tuple[str, str]] = set()
    for plan in plans(mode):
        layout, p = Layout.of(plan, Costs()), plan.parallel
        for number, replica in enumerate(layout.replicas):
            here = {c.fabric for c in replica}

            for s in range(p.pp):
                found = {}
                if s + 1 < p.pp:
                    found["edge"] = layout.edge(number, s), written(plan, here, "edge", s, s + 1)
                if layout.run > 1:
                    kind = "intra_dp" if p.optimizer_instances > 1 else "dp"
                    found[kind] = layout.reduction(number, s), written(plan, here, kind, s)
                for kind, (derived, said) in found.items():
                    assert derived == said, (kind, s, plan.parallel, plan.components)
                    seen.add((kind, derived.kind))
            if p.pp > 1:
                assert layout.ends(number) == written(plan, here, "embd", 0, p.pp - 1), (plan.parallel, plan.components)
        if p.optimizer_instances > 1:
            assert layout.across() == slowest(g.transport for g in plan.transports() if g.kind == "inter_dp")
    assert {kind for kind, _ in seen} == {"edge", "dp", "intra_dp"}
    assert {network for _, network in seen} == {"local", "rdma", "tcp"}


@pytest.mark.integration
def test_control_has_what_the_whole_job_shares_but_rdma() -> None:
    for plan in plans("holmes"):
        control = plan.transport_of(range(plan.world_size), host_memory=True)
        assert control == (LOCAL if sum(c.nodes for c in plan.components) == 1 else TCP)

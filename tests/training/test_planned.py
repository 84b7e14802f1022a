"""Training runs of the best plan under each strategy and schedule, with ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spawn
import thorough

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan

pytestmark = pytest.mark.integration


def site(ib: int = 2, roce: int = 2, per_node: int = 1) -> Site:
    return Site(
        "test",
        (
            Pool("ib-a", NicType.IB, "ib", ib, per_node, 0.05, CPU, rdma_gbps=0.4, gres=False),
            Pool("roce-a", NicType.ROCE, "roce", roce, per_node, 0.05, CPU, rdma_gbps=0.25, gres=False),
        ),
    )


BOTH = {"ib-a": 2, "roce-a": 2}
CASES: dict[str, tuple[Site, dict[str, Any]]] = {
    "default": (site(), {}),
    "one fabric": (site(), {"nodes": {"ib-a": 2}, "strategy": "one-fabric"}),
    "pipeline across": (site(), {"nodes": BOTH, "strategy": "pipeline", "dp": 2}),
    "1f1b": (site(), {"nodes": BOTH, "strategy": "pipeline", "dp": 2, "schedule": "1f1b"}),
    "plain Megatron-LM": (site(), {"nodes": BOTH, "strategy": "pipeline", "dp": 2, "transport": "single"}),
    "two stages in one fabric": (site(2, 1), {"nodes": {"ib-a": 2, "roce-a": 1}, "pp": 3, "dp": 1}),
    "hierarchical": (site(), {"nodes": BOTH, "strategy": "hierarchical-dp", "pp": 1}),
    "hierarchical, stages in a node": (
        site(1, 1, 2),
        {"nodes": {"ib-a": 1, "roce-a": 1}, "strategy": "hierarchical-dp", "pp": 2, "tp": 1},
    ),
    "interleaved": (site(), {"nodes": {"ib-a": 2}, "pp": 2, "dp": 1, "virtual_stages": 2, "schedule": "interleaved"}),
    "interleaved eager 1F1B": (
        site(),
        {"nodes": {"ib-a": 2}, "pp": 2, "dp": 1, "virtual_stages": 2, "schedule": "ahead"},
    ),
    "hierarchical, interleaved": (
        site(1, 1, 2),
        {"nodes": {"ib-a": 1, "roce-a": 1}, "strategy": "hierarchical-dp", "pp": 2, "tp": 1, "virtual_stages": 2},
    ),
    "tensor parallel": (site(1, 1, 2), {"nodes": {"ib-a": 1, "roce-a": 1}, "tp": 2, "pp": 2}),
    "full recomputation": (site(), {"nodes": {"ib-a": 2}, "pp": 2, "dp": 1, "recompute": "full"}),
    "proportional": (site(), {"nodes": BOTH, "strategy": "pipeline", "dp": 2, "partition": "proportional"}),
}


REPEATED = {"full recomputation", "proportional"}  # test_layouts.py trains such layouts too


@pytest.mark.parametrize("name", thorough.all_but(CASES, *(CASES.keys() - REPEATED)))
def test_a_plan_of_the_search_runs(name: str, tmp_path: Path) -> None:
    test_site, options = CASES[name]
    plan = best_plan(spawn.MODEL, spawn.BATCH, test_site, PlanOptions(**options), Costs())
    ended = spawn.train(tmp_path / "run", plan, {"train": {"steps": 2}})
    assert set(ended.codes) == {0}, ended.output
    assert len(ended.column("loss")) == 2


def test_the_number_of_connections_of_an_edge_does_not_change_the_losses(tmp_path: Path) -> None:
    losses = []
    for connections in (1, 2):
        plan = best_plan(
            spawn.MODEL,
            spawn.BATCH,
            site(),
            PlanOptions(nodes=BOTH, strategy="pipeline", pp=2, dp=2, schedule="ahead", edge_connections=connections),
            Costs(),
        )
        ended = spawn.train(tmp_path / str(connections), plan, {"train": {"steps": 2}})
        assert set(ended.codes) == {0}, ended.output
        losses.append(ended.column("loss"))
    assert len(losses[0]) == 2 and losses[0] == losses[1]

"""The search of stages of unequal widths: as good as going through everything, and every node used."""

from __future__ import annotations

import random
from dataclasses import replace

import brute_unequal
import pytest

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.unequal import found
from holmes_hpc.planning.spec.widths import Widths

A100, H100 = Gpu("a100-80gb", 312, 80, 2400), Gpu("h100-80gb", 989, 80, 3600)
SMALL = ModelSpec("small", layers=6, hidden=1024, heads=8, vocab=32000, ffn=4096, kv_heads=8, max_positions=1024)


def site(*fabrics: tuple[str, int, int, Gpu], ethernet_gbps: float = 25) -> Site:
    """(NIC type, nodes, GPUs of a node, GPU) of each fabric, RDMA of 200 Gb/s."""
    return Site("site", tuple(Fabric(f"{nic}-{i}", NicType(nic), f"p{i}", nodes, per_node, ethernet_gbps, gpu,
                                     rdma_gbps=200) for i, (nic, nodes, per_node, gpu) in enumerate(fabrics)))


@pytest.mark.parametrize("seed", range(2))
def test_within_a_hundredth_of_going_through_everything(seed: int) -> None:
    draw = random.Random(seed)
    at = site(*((nic, draw.randint(1, 3), draw.choice([1, 2]), draw.choice([A100, H100])) for nic in ("ib", "roce")))
    batch = Batch(draw.choice([7, 12, 20]), 1, 1024)
    best = found(SMALL, batch, at, PlanOptions(), Costs(), Clock(), float("inf"))[0]
    assert best.seconds <= 1.01 * brute_unequal.best_step_s(SMALL, batch, at, Costs(), 3)


def test_nodes_that_a_grid_leaves_out_are_used() -> None:
    at = site(("ib", 2, 2, A100), ("roce", 3, 2, A100))
    wide, grid = (best_plan(SMALL, Batch(60, 1, 1024), at, PlanOptions(unequal=u), Costs()) for u in (True, False))
    assert isinstance(wide.parallel, Widths) and wide.version == 2 and not wide.unused
    assert wide.predicted is not None and grid.predicted is not None
    assert wide.predicted.step_time_s < 0.99 * grid.predicted.step_time_s
    assert wide.alternatives[0]["parallel"]["dp"] == grid.parallel.dp


def test_equal_widths_unless_asked_for_and_where_fabrics_are_alike() -> None:
    uneven = site(("ib", 2, 2, A100), ("roce", 3, 2, A100))
    for at, unequal in ((uneven, False), (replace(uneven, fabrics=uneven.fabrics[:1]), True)):
        plan = best_plan(SMALL, Batch(12, 1, 1024), at, PlanOptions(unequal=unequal), Costs())
        assert not isinstance(plan.parallel, Widths) and plan.version == 1

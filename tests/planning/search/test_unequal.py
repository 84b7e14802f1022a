"""The search of stages of unequal widths: every node used where it is asked for."""

from __future__ import annotations

from dataclasses import replace

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.spec.widths import Widths

A100 = Gpu("a100-80gb", 312, 80, 2400)
SMALL = ModelSpec("small", layers=6, hidden=1024, heads=8, vocab=32000, ffn=4096, kv_heads=8, max_positions=1024)


def site(*fabrics: tuple[str, int, int, Gpu], ethernet_gbps: float = 25) -> Site:
    """(NIC type, nodes, GPUs of a node, GPU) of each fabric, RDMA of 200 Gb/s."""
    return Site("site", tuple(Fabric(f"{nic}-{i}", NicType(nic), f"p{i}", nodes, per_node, ethernet_gbps, gpu,
                                     rdma_gbps=200) for i, (nic, nodes, per_node, gpu) in enumerate(fabrics)))


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

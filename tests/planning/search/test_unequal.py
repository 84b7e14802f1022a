"""The search of stages of unequal widths: as good as going through everything, and every node used."""

from __future__ import annotations

import random
from dataclasses import replace

import brute_unequal
import pytest

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.unequal import found
from holmes_hpc.planning.spec.widths import Widths

A100, H100 = Gpu("a100-80gb", 312, 80, 2400), Gpu("h100-80gb", 989, 80, 3600)
SMALL = ModelSpec("small", layers=6, hidden=1024, heads=8, vocab=32000, ffn=4096, max_positions=1024)


def site(*fabrics: tuple[str, int, int, Gpu], ethernet_gbps: float = 25) -> Site:
    """(NIC type, nodes, GPUs of a node, GPU) of each fabric, RDMA of 200 Gb/s."""
    return Site("site", tuple(Fabric(f"{nic}-{i}", NicType(nic), f"p{i}", nodes, per_node, ethernet_gbps, gpu,
                                     rdma_gbps=200) for i, (nic, nodes, per_node, gpu) in enumerate(fabrics)))


@pytest.mark.parametrize("seed", range(3))
def test_within_a_hundredth_of_going_through_everything(seed: int) -> None:
    draw = random.Random(seed)
    at = site(*((nic, draw.randint(1, 3), draw.choice([1, 2]), draw.choice([A100, H100])) for nic in ("ib", "roce")))
    batch = Batch(draw.choice([7, 12, 20]), 1, 1024)
    best = found(SMALL, batch, at, PlanOptions(), Costs(), Clock(), float("inf"))[0]
    assert best.seconds <= 1.01 * brute_unequal.best_step_s(SMALL, batch, at, Costs(), 3)


def rate(at: Site, **options: object) -> float:
    batch = Batch(1536, 4, 2048)
    plan = best_plan(named("gpt_7_5b"), batch, at, PlanOptions(**options), Costs())  # type: ignore[arg-type]
    assert plan.predicted is not None
    return plan.predicted.samples_per_s


def test_five_and_seven_nodes_are_as_fast_as_six_and_six() -> None:
    plan = best_plan(named("gpt_7_5b"), Batch(1536, 4, 2048), site(("ib", 5, 8, A100), ("roce", 7, 8, A100)),
                     PlanOptions(), Costs())
    assert isinstance(plan.parallel, Widths) and plan.version == 2 and not plan.unused and plan.predicted is not None
    assert plan.predicted.samples_per_s >= 0.97 * rate(site(("ib", 6, 8, A100), ("roce", 6, 8, A100)))


def test_slower_gpus_are_used_beside_faster_ones() -> None:
    fast, slow = ("ib", 3, 8, H100), ("roce", 5, 8, A100)
    assert rate(site(fast, slow)) >= 1.35 * max(rate(site(fast)), rate(site(slow)))


def test_equal_widths_when_asked_for_and_where_fabrics_are_alike() -> None:
    uneven = site(("ib", 2, 2, A100), ("roce", 3, 2, A100))
    for at, options in ((uneven, PlanOptions(unequal=False)), (replace(uneven, fabrics=uneven.fabrics[:1]), None)):
        plan = best_plan(SMALL, Batch(12, 1, 1024), at, options or PlanOptions(), Costs())
        assert not isinstance(plan.parallel, Widths) and plan.version == 1

"""Overlap and better hardware never make a predicted step longer."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.experts import optimizer_share
from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import UNDOABLE, least_s, parameters, step_s, timing
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.schedule.kinds import candidate_schedules, schedule_kind
from holmes_hpc.planning.search.layers import chunk_layers
from holmes_hpc.planning.search.placement import Block, component

GPU_NAMES = ("v100-16gb", "a100-80gb", "l40s", "h100", "mi300x")
GPUS = tuple(gpu for name in GPU_NAMES if (gpu := read_vocabulary().gpu(name)) is not None)
NONE = Software(overlap=False, overlap_gather=False)
FACTS = {name: True for name in ("overlap", "overlap_gather", "aligned_gather", "overlap_tp")}


def draw_layout(rng: random.Random) -> tuple[Layout, np.ndarray]:
    """Return a layout on one or two fabrics, and its layers."""
    tp, dp, pp = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8, 16)), rng.choice((1, 2, 3, 4, 8))
    chunks = rng.choice((1, 1, 2, 3)) if pp > 1 else 1
    fabrics = rng.choice((1, 2)) if pp % 2 == 0 else 1
    ranks = tp * dp * pp // fabrics
    gpus = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if ranks % n == 0 and n % tp == 0] or [tp])
    nic, gpu, layers = rng.choice(list(NicType)), rng.choice(GPUS), pp * chunks * rng.randint(1, 4)
    rdma_gbps, ethernet_gbps = (
        rng.choice((25.0, 100.0, 400.0, 3200.0)) if nic.rdma else None,
        rng.choice((1.0, 10.0, 100.0)),
    )
    per_pool = pp // fabrics
    pools = tuple(
        Pool(f"f{i}", nic, "p", ranks // gpus, gpus, ethernet_gbps, gpu, rdma_gbps=rdma_gbps) for i in range(fabrics)
    )
    hidden = rng.choice((1024, 4096, 12288))
    model = ModelSpec("m", layers, hidden, 32, rng.choice((1000, 51200)), 4 * hidden, 32, tied=rng.random() < 0.5)
    layout = Layout(
        model,
        Batch(2 * dp * rng.choice((1, 2, 3, 8)) * (pp if chunks > 1 else 1), 2, 2048),
        Parallel.uniform(tp, pp, dp, distributed_optimizer=rng.random() < 0.9, sequence_parallel=tp > 1),
        recompute=rng.choice(("none", "full")),
        schedule=schedule_of("1f1b", (1,) * pp),
        components=tuple(component(Block(p, p.nodes, gpus, per_pool), i * per_pool) for i, p in enumerate(pools)),
        site=Site("s", pools),
        costs=Costs(software=NONE),
        transport_mode=rng.choice(("holmes", "single")),
        bucket_bytes=rng.choice((160_000_000, 10_000_000, 625_000)),
    )
    kind = rng.choice(candidate_schedules("auto", chunks, background=True))
    return layout.with_schedule(schedule_kind(kind), chunks), chunk_layers([layers // pp] * pp, chunks)


def test_overlap_is_never_slower_than_none() -> None:
    """Each kind of overlap alone, and all."""
    for seed in range(300):
        layout, layers = draw_layout(random.Random(seed))
        pace_layer_ms = 5.0 if seed % 3 == 0 else None

        def seconds(software: Software) -> float:
            costs = Costs(pace_layer_ms=pace_layer_ms, software=software)  # noqa: B023
            return float(step_s(replace(layout, costs=costs), layers)[0])  # noqa: B023

        none_s = seconds(NONE)
        reduction = replace(NONE, overlap=True)
        gather = replace(reduction, overlap_gather=True, aligned_gather=True)
        reduction_s, gather_s = seconds(reduction), seconds(gather)
        others_s = seconds(replace(NONE, overlap_tp=True)), seconds(replace(NONE, **FACTS))
        assert max(reduction_s, *others_s) <= none_s * (1 + 1e-9), (seed, layout.parallel)
        assert gather_s <= reduction_s * (1 + 1e-9), (seed, layout.parallel)


def test_early_steps_are_never_slower_but_for_their_copies_and_these_need_memory() -> None:
    for seed in range(100):
        layout, layers = draw_layout(random.Random(seed))
        early = replace(layout, costs=replace(layout.costs, early_step="stage"))
        copies_s = (1 - 1 / UNDOABLE) * timing(early, layers).optimizer[0]
        assert least_s(early, layers)[0][0] <= step_s(early, layers)[0] * (1 + 1e-9), seed
        assert step_s(early, layers)[0] <= step_s(layout, layers)[0] * 1.005 + copies_s, seed
        more = memory(early, layers).optimizer - memory(layout, layers).optimizer
        assert np.allclose(more, 12 * optimizer_share(layout, layers, parameters(layout, layers).sum(axis=2))), seed


@pytest.mark.parametrize(
    ("overrides", "is_aligned"),
    [((), True), (("plan.transport=single",), False), (("train.overlap_param_gather=false",), False)],
)
def test_all_stages_gather_at_once_except_in_plain_megatron(overrides: tuple[str, ...], is_aligned: bool) -> None:
    costs = request.costs(load(overrides))
    assert costs.software.aligned_gather is is_aligned


def test_better_hardware_is_never_slower() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        layout, layers = draw_layout(rng)
        layout = replace(layout, costs=Costs())
        pools = list(layout.site.pools)
        index = rng.randrange(len(pools))
        pool = pools[index]
        faster = replace(pool.gpu, peak_tflops=2 * pool.gpu.peak_tflops, intra_node_gbps=2 * pool.gpu.intra_node_gbps)
        pools[index] = replace(
            pool,
            **rng.choice(
                (
                    {"gpu": faster},
                    {"ethernet_gbps": 2 * pool.ethernet_gbps},
                    {"rdma_gbps": pool.rdma_gbps and 2 * pool.rdma_gbps},
                )
            ),
        )
        better = replace(layout, site=replace(layout.site, pools=tuple(pools)))
        assert step_s(better, layers)[0] <= step_s(layout, layers)[0] * 1.005, (seed, pools[index])

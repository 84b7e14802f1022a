"""Costs of context parallelism: bytes and time of the ring, memory of a rank, and a plan for a long sequence."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import published_contexts
import pytest
import spawn
from sites import A100, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.search.best import best_plan, fixed_plan

SITE = Site("s", (Pool("a", NicType.IB, "p", 2, 8, 25.0, A100, rdma_gbps=200.0),))
LLAMA, LONG = replace(named("llama3_1_8b"), max_positions=131072), Batch(16, 1, 131072)


def fixed(tp: int, cp: int, **options: Any) -> Layout:
    choices = PlanOptions(**{"tp": tp, "pp": 1, "dp": 16 // (tp * cp), "cp": cp, "recompute": "none", **options})
    return Layout.of(fixed_plan(LLAMA, LONG, SITE, choices, Costs()), Costs())


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_the_ring_sends_keys_and_values_forward_and_with_gradients_backward(recompute: str, passes: int) -> None:
    plan = spawn.plan(dp=4, cp=4, recompute=recompute)
    layout = Layout.of(plan, Costs())
    sent = [row for row in sent_bytes(layout, layer_array(plan)) if row[0].kind == "cp"]
    key_values = 2 * 4 * 16 * 4  # K and V of 4 tokens a rank, 2 heads of width 8, in fp32
    assert [rank for _, rank, _ in sent] == [0, 1, 2, 3]
    assert {amount for *_, amount in sent} == {passes * 3 * key_values * 6 * 8}  # layers, micro-batches


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_an_all_to_all_sends_queries_keys_values_and_the_output(recompute: str, passes: int) -> None:
    plan = spawn.plan(dp=2, cp=2, recompute=recompute, cp_comm="a2a")
    sent = [row for row in sent_bytes(Layout.of(plan, Costs()), layer_array(plan)) if row[0].kind == "cp"]
    exchanged = (32 + 2 * 16 + 32) * 8 * 4  # of 8 tokens a rank, in fp32
    assert [rank for _, rank, _ in sent] == [0, 1]
    assert {amount for *_, amount in sent} == {passes * exchanged / 2 * 6 * 8}  # layers, micro-batches


def test_an_all_to_all_is_chosen_where_a_ring_between_nodes_takes_longer() -> None:
    short, options = replace(LONG, sequence_length=4096), PlanOptions(tp=1, pp=1, dp=1, cp=8, recompute="full")
    one_gpu = replace(SITE, pools=(replace(SITE.pools[0], nodes=8, gpus_per_node=1, rdma_gbps=25.0),))
    plans = {}
    for comm in ("ring", "a2a", "auto"):
        plans[comm] = best_plan(LLAMA, short, one_gpu, replace(options, cp_comm=comm, max_memory_gib=inf), Costs())
    assert [plans[comm].parallel.cp_comm for comm in plans] == ["ring", "a2a", "a2a"]
    step_s = [plan.predicted.step_time_s for plan in plans.values() if plan.predicted]
    assert step_s[2] == step_s[1] < step_s[0]
    inside = best_plan(LLAMA, short, SITE, replace(options, tp=2, cp=4, nodes={"a": 1}), Costs())
    assert inside.parallel.cp_comm == "ring"


def test_a_rank_holds_its_part_of_the_activations_but_one_copy_of_queries_and_keys_less() -> None:
    parts = {cp: layout for cp in (1, 4) for layout in [fixed(2, cp)]}
    held = {cp: memory(layout, layout.all_layers[-1:]).activations[0, 0] for cp, layout in parts.items()}
    copy_bytes = LLAMA.layers * LONG.sequence_length * (4096 + 1024) // 2 * 2  # of TP 2, in bf16
    assert 4 * held[4] == pytest.approx(held[1] - copy_bytes)


def test_a_ring_between_nodes_takes_the_time_of_their_nic() -> None:
    pool, part = SITE.pools[0], LONG.split(16)
    inside = Costs().layer_s(LLAMA, part, 1, replace(pool, gpus_per_node=16), True, "none")
    slow = Costs().layer_s(LLAMA, part, 1, replace(pool, rdma_gbps=1.0), True, "none")
    key_values = 2 * 8192 * 1024 * 2
    assert slow[0] - inside[0] > 0.9 * 15 * key_values * 8e-9 > 0
    assert Costs().layer_s(LLAMA, part, 1, pool, True, "none") == pytest.approx(inside)  # hidden beside attention


def test_a_long_sequence_gets_context_parallelism_unasked() -> None:
    options = PlanOptions(recompute="full", schedule="1f1b", unequal="false", virtual_stages=1, tp=2)
    plan = best_plan(LLAMA, LONG, SITE, options, Costs())
    assert plan.parallel.cp > 1 and plan.predicted is not None
    assert max(plan.predicted.memory_bytes_per_gpu) < 80 * 2**30
    one_sequence = best_plan(LLAMA, replace(LONG, global_size=1), SITE, replace(options, pp=1), Costs())
    assert one_sequence.parallel.cp == 8  # on two nodes; CP 1 has no placement on whole nodes
    short = best_plan(LLAMA, Batch(16, 1, 4096), SITE, options, Costs())
    assert short.parallel.cp == 1


@pytest.mark.thorough
def test_llama_with_131072_tokens_fits_on_two_fabrics_of_four_nodes() -> None:
    """Check the plan that users get without options, for the model's own batch."""
    plan = best_plan(LLAMA, replace(LONG, global_size=512), two_clusters(4), PlanOptions(), Costs())
    assert plan.predicted is not None and max(plan.predicted.memory_bytes_per_gpu) < 80 * 2**30
    transports = {g.transport.kind for g in plan.transports() if g.kind == "cp"}
    assert plan.parallel.cp > 1 and transports <= {"local", "rdma"}


def test_published_runs_with_context_parallelism_are_predicted() -> None:
    errors = [abs(row.error) for row in published_contexts.llama_rows(fp8=False)]
    assert len(errors) == 15 and sum(errors) / len(errors) < 0.06
    rows = published_contexts.long_rows()
    assert max(abs(row.error) for row in rows) < 0.15
    predicted = [row.predicted for row in rows]
    assert predicted == sorted(predicted)  # more tokens, more TFLOP/s, as published

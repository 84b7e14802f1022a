"""Errors for problems without a plan name the cause, and their advice works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from sites import A100, two_clusters

from holmes_hpc.config.model import Batch, Experts, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan

pytestmark = pytest.mark.integration

MODEL, BATCH = named("gpt_7_5b"), Batch(64, 1, 2048)


def make_site(nodes: int = 2, **gpu: Any) -> Site:
    return Site("one", (Pool("ib", NicType.IB, "ib", nodes, 8, 25.0, replace(A100, **gpu), rdma_gbps=200.0),))


def plan_error(site: Site, model: ModelSpec = MODEL, **options: Any) -> PlanError:
    with pytest.raises(PlanError) as error:
        best_plan(model, BATCH, site, PlanOptions(**options), Costs())
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"tp": 1, "dp": 8, "pp": 1}, "plan.pp"),
        ({"max_memory_gib": 4.0}, "plan.max_memory_gib"),
        ({"tp": 1, "pp": 1, "recompute": "none"}, "plan.pp"),
    ],
)
def test_user_option_that_keeps_the_model_from_fitting_is_named(options: dict[str, Any], key: str) -> None:
    """Without that option there is a plan."""
    site = make_site(memory_gib=40)
    error = plan_error(site, **options)
    assert "does not fit" in error.what and error.where == key and error.hint is not None
    assert f"remove {key}:" in error.hint
    others = {name: value for name, value in options.items() if f"plan.{name}" not in key}
    assert best_plan(MODEL, BATCH, site, PlanOptions(**others), Costs()).predicted is not None


def test_more_memory_than_the_gpus_have_is_refused() -> None:
    error = plan_error(make_site(memory_gib=40), max_memory_gib=53.0)
    assert str(error).startswith("plan.max_memory_gib: it is 53, the GPUs have 40 GiB; use at most 40")


def test_the_memory_limit_of_a_plan_does_not_add_to_a_smaller_gpus() -> None:
    """80 GiB are the larger GPU's memory, and twice the smaller one's."""
    larger = make_site().pools[0]
    smaller = replace(larger, name="old", fabric="ib", partition="old", gpu=replace(A100, name="old", memory_gib=20))
    site = Site("two", (replace(larger, fabric="ib", name="new"), smaller))
    plan = best_plan(MODEL, BATCH, site, PlanOptions(max_memory_gib=80.0, strategy="pipeline"), Costs())
    assert plan.predicted is not None
    used = {p: max(plan.predicted.memory_bytes_per_gpu[s] for s in c.stages) for c in plan.components for p in [c.pool]}
    assert used["old"] <= 20 * 2**30 < used["new"]


def test_changes_for_the_whole_site_are_given_without_the_fixed_nodes() -> None:
    error = plan_error(make_site(2, memory_gib=8), nodes={"ib": 1})
    assert error.hint is not None and error.hint.startswith("remove plan.nodes and use GPUs of ")


def test_pipeline_strategy_needs_two_fabrics() -> None:
    error = plan_error(make_site(), strategy="pipeline")
    assert "there is only ib" in error.what and error.where == "plan.strategy"


def test_too_small_site_gets_changes_that_work() -> None:
    error = plan_error(make_site(1, memory_gib=12))
    assert error.where == "memory" and error.hint is not None and "remove" not in error.hint
    times = re.search(r"(\d+) times as many nodes", error.hint)
    gib = re.search(r"GPUs of (\d+) GiB", error.hint)
    assert times is not None and gib is not None, error.hint
    for site in (make_site(int(times[1]), memory_gib=12), make_site(1, memory_gib=float(gib[1]))):
        assert best_plan(MODEL, BATCH, site, PlanOptions(), Costs()).predicted is not None


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"cp": 1024}, "plan.cp: TP 1 x PP 1 x DP 1 x CP 1024 needs 1024 GPUs, there are 16"),
        ({"cp": 4, "dp": 2, "pp": 4}, "plan.cp: TP 1 x PP 4 x DP 2 x CP 4 needs 32 GPUs, there are 16"),
        (
            {"cp": 4, "dp": 3},
            "batch: global_size 64 is not a multiple of micro_size 1 x DP 3; use a DP that divides 64",
        ),
        (
            {"cp": 2, "pp": 3, "dp": 1},
            "plan: no placement of 36 layers and 64 micro-batches on 2 ib nodes, with PP 3, DP 1, CP 2, has the same",
        ),
        ({"cp": 3}, "plan.cp: sequence_length 2048 is not a multiple of 6 (2 x CP 3); use another CP, or a"),
    ],
)
def test_contexts_are_named_in_the_sizes_that_the_user_gave(options: dict[str, Any], start: str) -> None:
    error = str(plan_error(make_site(), **options))
    assert error.startswith(start)
    assert f"CP {options['cp']}" in error or "dp" in options


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"schedule": "zero_bubble"}, "plan: context parallelism does not support zero_bubble; use only one"),
        ({"strategy": "hierarchical-dp"}, "plan: context parallelism does not support hierarchical data parallelism;"),
        ({"unequal": "true"}, "plan: context parallelism does not support per-stage TP/DP; use only one"),
        ({"model": replace(MODEL, dropout=0.1)}, "model.dropout: context parallelism does not support dropout; use 0"),
        (
            {"cp_comm": "a2a", "model": replace(MODEL, kv_heads=1)},
            "plan.cp_comm: all-to-all attention: TP x CP 2 does not divide 1 heads of keys and values; use ring",
        ),
    ],
)
def test_options_that_context_parallelism_excludes_are_named(options: dict[str, Any], start: str) -> None:
    assert str(plan_error(make_site(), cp=2, **options)).startswith(start)


def test_keys_that_exclude_hierarchical_data_parallelism_are_named() -> None:
    one_gpu = replace(make_site().pools[0], gpus_per_node=1)
    assert str(plan_error(Site("one", (one_gpu,)), strategy="hierarchical-dp")).startswith(
        "plan.strategy: hierarchical-dp in pool ib needs 2 GPUs per node for two stages; it has 1; use"
    )
    assert str(plan_error(two_clusters(1), strategy="hierarchical-dp", distributed_optimizer=False)).startswith(
        "plan.distributed_optimizer: hierarchical-dp over several pools needs a sharded optimizer; use true or auto"
    )


def test_context_parallelism_across_fabrics_is_refused() -> None:
    sizes = {"ib-a": 1, "roce-a": 1}
    for options, stage in (({"cp": 16}, "TP 1 x DP 1 x CP 16"), ({"cp": 4, "dp": 2, "tp": 2}, "TP 2 x DP 2 x CP 4")):
        assert str(plan_error(two_clusters(1), nodes=sizes, **options)).startswith(
            f"plan.cp: a stage of {stage} needs 16 GPUs of one fabric, the largest has 8; use smaller sizes"
        )


def test_experts_across_fabrics_are_refused() -> None:
    sizes, model = {"ib-a": 1, "roce-a": 1}, replace(MODEL, experts=Experts(16))
    for options, stage in (({"ep": 16}, "with EP 16"), ({"ep": 2, "pp": 1, "dp": 16}, "of TP 1 x DP 16")):
        assert str(plan_error(two_clusters(1), model=model, nodes=sizes, **options)).startswith(
            f"plan.ep: a stage {stage} needs 16 GPUs of one fabric, the largest has 8; use smaller sizes"
        )


def test_a_pool_without_gpus_is_named_if_a_model_does_not_fit() -> None:
    error = plan_error(make_site(1, **{**vars(CPU), "memory_gib": 2.0}))
    assert error.hint is not None and "is planned without GPUs: if it has some, describe them" in error.hint


def test_wrong_sum_of_layers_is_reported_with_both_numbers() -> None:
    error = plan_error(make_site(), layers_per_stage=(10, 10))
    assert "[10, 10] are 20 layers, gpt_7_5b has 36" in error.what and error.where == "plan.layers_per_stage"


def test_batch_with_few_divisors_gets_a_note_with_a_better_one() -> None:
    """511 = 7 x 73 sequences leave GPUs idle or force unusual stages and TP."""
    model = replace(named("gpt_3_6b"), layers=4)
    plan = best_plan(model, Batch(511, 1, 2048), make_site(2), PlanOptions(unequal="false"), Costs())
    matches = [re.search(r"batch\.global_size=(\d+) would give at least (\d+)% more", a) for a in plan.assumptions]
    size, gain_percent = next((int(m[1]), int(m[2])) for m in matches if m)
    other = best_plan(model, Batch(size, 1, 2048), make_site(2), PlanOptions(unequal="false"), Costs())
    assert plan.predicted is not None and other.predicted is not None and abs(size - 511) <= 0.03 * 511
    gain = other.predicted.samples_per_s / plan.predicted.samples_per_s - 1
    assert gain == pytest.approx(gain_percent / 100, abs=0.006)
    assert not any("global_size" in a for a in other.assumptions)

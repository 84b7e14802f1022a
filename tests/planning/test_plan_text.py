"""The text of `holmes plan`: runners-up that are too close to call, figures per GPU kind, reduced rates."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import plans
import pytest
import yaml
from sites import A100, two_clusters

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.node_gpus import UNKNOWN_GPU
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import kind_tflops, slowest_parts
from holmes_hpc.planning.plan_text import explain, summary
from holmes_hpc.planning.search.best import best_plan, fixed_plan

pytestmark = pytest.mark.integration

MODEL, BATCH = named("gpt_3_6b"), Batch(256, 2, 2048)
SITE = Site(
    "twins",
    tuple(Pool(name, NicType.IB, name, 2, 8, 1.0, A100, rdma_gbps=gbps) for name, gbps in (("a", 800.0), ("b", 790.0))),
)


def test_nodes_of_another_architecture_are_noted_if_the_plan_uses_them() -> None:
    line = "arm[1-2]: aarch64, not x86_64: set slurm.pools.POOL.python to a Python for them"
    for nodes, notes in ((("arm1", "arm2", "arm3", "arm4"), 1), (("a1", "a2", "a3", "a4"), 0)):
        ib, *others = plans.site().pools
        mixed = replace(plans.site(), pools=(replace(ib, node_names=nodes), *others), assumptions=(line,))
        text = " ".join(summary(plans.plan("ib-a", "roce-a", site=mixed), Costs()))
        assert text.count(f"Note: {line}") == notes


def test_a_runner_up_that_is_too_close_comes_with_the_commands_that_compare() -> None:
    plan = best_plan(MODEL, BATCH, SITE, PlanOptions(strategy="one-fabric"), Costs())
    text = " ".join(explain(plan, Costs()))
    match = re.search(
        r"too close to call\. .* with plan\.tp=(\d+) plan\.pp=(\d+) plan\.dp=(\d+)"
        r" 'plan\.nodes=(\{.*?\})' plan\.virtual_stages=(\d+) plan\.strategy=([\w-]+) plan\.schedule=(\w+)\.",
        text,
    )
    assert match is not None, text
    tp, pp, dp, chunks = (int(match[i]) for i in (1, 2, 3, 5))
    runner_up = best_plan(
        MODEL,
        BATCH,
        SITE,
        PlanOptions(
            strategy=match[6],
            schedule=match[7],
            tp=tp,
            pp=pp,
            dp=dp,
            virtual_stages=chunks,
            nodes=yaml.safe_load(match[4]),
        ),
        Costs(),
    )
    near = plan.alternatives[0]
    assert runner_up.predicted is not None
    assert runner_up.predicted.step_time_s == pytest.approx(near["predicted"]["step_time_s"], rel=0.01)


def test_slow_runners_up_are_not_called_close() -> None:
    plan = best_plan(MODEL, BATCH, SITE, PlanOptions(strategy="one-fabric"), Costs())
    slow = tuple({**a, "predicted": {**a["predicted"], "step_time_s": 9e9}} for a in plan.alternatives)
    assert "too close" not in " ".join(explain(replace(plan, alternatives=slow), Costs()))


def test_the_headline_shows_the_sequence_length() -> None:
    """So that a batch that was chosen by default is noticed."""
    plan = fixed_plan(MODEL, Batch(64, 1, 1024), SITE, PlanOptions(tp=1, pp=2, dp=8), Costs())
    assert "gpt_3_6b, 64 sequences of 1024 tokens per step" in " ".join(explain(plan, Costs()))


@pytest.mark.parametrize(("is_sharded", "sharding"), [(True, "sharded over"), (False, "replicated on")])
def test_the_details_name_the_sharding_and_the_bucket_size(is_sharded: bool, sharding: str) -> None:
    options = PlanOptions(tp=1, pp=2, dp=8, distributed_optimizer=is_sharded, bucket_bytes=50_000_000)
    plan = fixed_plan(MODEL, Batch(64, 1, 1024), SITE, options, Costs())
    line = f"Other settings: optimizer {sharding} the data-parallel ranks, gradient buckets of 50 MB."
    assert line in explain(plan, Costs())


def test_each_gpu_kind_has_its_own_tflops() -> None:
    """Layers that no H100 has are not counted on it; all GPUs together do what the model needs."""
    faster = replace(A100, name="h100-80gb", peak_tflops=989.0)
    site = replace(SITE, pools=(SITE.pools[0], replace(SITE.pools[1], gpu=faster)))
    plan = best_plan(MODEL, BATCH, site, PlanOptions(strategy="pipeline", tp=1, pp=2, dp=16), Costs())
    assert plan.predicted is not None and len(plan.components) == 2
    tflops = kind_tflops(plan, plan.predicted.step_time_s)
    assert tflops[faster] > 1.5 * tflops[A100]
    assert sum(tflops.values()) / 2 == pytest.approx(plan.predicted.model_tflops_per_gpu)
    text = " ".join(explain(plan, Costs()))
    tokens = plan.predicted.samples_per_s * BATCH.sequence_length
    assert f"{tokens:,.0f} tokens/s" in text and f"{tflops[faster]:.3g} on h100-80gb (" in text


def test_the_drawing_shows_the_networks_inside_and_between_pools() -> None:
    plan = best_plan(
        MODEL, Batch(768, 4, 2048), two_clusters(2), PlanOptions(strategy="hierarchical-dp", tp=1), Costs()
    )
    text = " ".join(explain(plan, Costs(), width=1000))
    for fabric in ("ib (ib-a)", "roce (roce-a)"):
        assert f"data parallel by rdma over {fabric} inside the pool and tcp over ethernet" in text


def test_runners_up_are_sorted_by_step_time_and_gains_name_their_assumption() -> None:
    slower = tuple(replace(f, nodes=1, ethernet_gbps=25.0) for f in SITE.pools)
    plan = best_plan(
        MODEL, BATCH, replace(SITE, pools=(*SITE.pools, replace(slower[0], name="c"))), PlanOptions(), Costs()
    )
    times = [a["predicted"]["step_time_s"] for a in plan.alternatives]
    assert len(times) > 2 and times == sorted(times)
    assert "What would help, each change alone and with this layout (a new plan may gain more):" in explain(
        plan, Costs()
    )


def test_the_summary_answers_in_ten_lines() -> None:
    """What runs where, step time with its interval, days, memory, and what would help most; the rest is on demand."""
    plan = best_plan(MODEL, BATCH, SITE, PlanOptions(strategy="pipeline", tp=1, pp=2, dp=16), Costs())
    assert plan.predicted is not None and plan.predicted.interval_s is not None
    lines = summary(plan, Costs(), 1000)
    text, low = "\n".join(lines), plan.predicted.interval_s[0]
    assert len(lines) <= 10 and max(map(len, lines)) <= 100
    assert "  a: 2 nodes x 8 a100-80gb, stage 0, " in text and "TP 1, PP 2, DP 16" in text
    assert f"Step time: {plan.predicted.step_time_s:.3g} s (90% interval: {low:.3g} to " in text
    assert "Duration: 1,000 steps (" in text and "of 80 GiB per GPU, on stage " in text
    assert "What would help most: " in text and "--explain shows" in lines[-1]
    assert explain(plan, Costs(), 1000)[: len(lines) - 1] == lines[:-1]
    many = replace(SITE, pools=tuple(replace(SITE.pools[0], name=f"p{i}", fabric="a", nodes=1) for i in range(6)))
    spread = best_plan(MODEL, BATCH, many, PlanOptions(strategy="pipeline", tp=8, pp=6, dp=1), Costs())
    assert "  and 3 more pools, 15 layers" in summary(spread, Costs())


@pytest.mark.parametrize(
    ("assumption", "is_first"),
    [
        ("n[1-6]: no feature names a NIC: Ethernet only is assumed", True),
        ("assumed by `holmes site`: nic, rdma_gbps of a", True),
        ("assumed by `holmes site`: gpu of a", False),
        ("n[1-6]: Ethernet rate not in the features: 10 Gb/s assumed; label eth_<rate>g", False),
    ],
)
def test_assumed_nics_are_what_would_help_most(assumption: str, is_first: bool) -> None:
    pool = Pool("a", NicType.ETHERNET, "a", 6, 8, 10.0, A100)
    plan = fixed_plan(
        MODEL, BATCH, Site("one", (pool,), (assumption,)), PlanOptions(tp=1, pp=2, dp=16, nodes={"a": 4}), Costs()
    )
    (line,) = (line for line in summary(plan, Costs(), width=1000) if line.startswith("What would help most"))
    first = (
        "What would help most: first settle the NICs by `holmes site`: Ethernet is assumed, and 2 nodes of a stay idle"
    )
    assert line.startswith(f"{first}. Then: ") == is_first


def test_steps_of_1000_seconds_and_more_are_whole_numbers() -> None:
    plan = fixed_plan(named("gpt_39b"), Batch(4096, 1, 2048), SITE, PlanOptions(tp=8, pp=2, dp=2), Costs())
    assert plan.predicted is not None and plan.predicted.step_time_s > 1500
    text = "\n".join(explain(plan, Costs()))
    assert f"Step time: {plan.predicted.step_time_s:,.0f} s (90%" in text and not re.search(r"e\+\d+ s\b", text)


def test_a_layout_that_does_not_fit_is_in_the_summary() -> None:
    plan = fixed_plan(named("gpt_39b"), BATCH, SITE, PlanOptions(tp=1, pp=1, dp=16), Costs())
    text = "\n".join(summary(plan, Costs(), width=1000))
    assert re.search("; it does not fit: .*; use more stages, TP or CP, .*, or GPUs of .* GiB\n", text)
    assert "would help" not in text  # a layout that cannot run needs no advice on its speed
    whole, limited = (
        fixed_plan(
            named("gpt_39b"), BATCH, SITE, PlanOptions(tp=8, pp=2, dp=1, recompute="full", max_memory_gib=gib), Costs()
        )
        for gib in (None, 30.0)
    )
    assert not whole.misfit and "can use only" in limited.misfit and "recompute=full" not in limited.misfit


def test_a_figure_far_from_the_data_sheet_is_in_the_summary(tmp_path: Path) -> None:
    gpu = "{name: h100, peak_tflops: 300, memory_gib: 80, intra_node_gbps: 3600}"
    pool = "name: a, nic: ib, partition: p, nodes: 4, gpus_per_node: 8, ethernet_gbps: 25, rdma_gbps: 400"
    (tmp_path / "site.yaml").write_text(f"name: s\nfabrics: [{{{pool}, gpu: {gpu}}}]\n")
    site = read_site_file(tmp_path / "site.yaml")
    plan = fixed_plan(MODEL, BATCH, site, PlanOptions(tp=1, pp=2, dp=16), Costs())
    assert "Note: peak_tflops of h100 is 300; h100's data sheet has 989" in summary(plan, Costs())


def test_a_part_under_half_a_percent_is_shown_as_below_one_percent() -> None:
    plan = fixed_plan(MODEL, BATCH, SITE, PlanOptions(tp=1, pp=2, dp=16), Costs())
    assert plan.predicted is not None
    less = {**plan.predicted.breakdown, "optimizer_s": 3e-4 * plan.predicted.step_time_s, "param_sync_s": 1e-17}
    lines = explain(replace(plan, predicted=replace(plan.predicted, breakdown=less)), Costs())
    (line,) = (line for line in lines if line.lstrip().startswith("optimizer"))
    assert line.split()[1:] == [f"{less['optimizer_s']:.3g}", "s", "<1%"]
    assert not any(line.lstrip().startswith("parameter sync") for line in lines)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"compute_s": 2.46, "grad_sync_s": 0.1, "optimizer_s": -1.0}, "compute takes 2.46 s longer"),
        (
            {"compute_s": 2.46, "optimizer_s": 0.0, "grad_sync_s": 2.3},
            "compute takes 2.46 s longer, gradient sync 2.3 s",
        ),
        ({"compute_s": -1.0, "grad_sync_s": 3.0}, "gradient sync takes 3 s longer"),
    ],
)
def test_a_runner_up_names_the_one_or_two_parts_that_grow_most(more: dict[str, float], words: str) -> None:
    assert slowest_parts(more) == words


def test_local_ranks_that_share_cores_are_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["launcher=local", "plan.pp=2", "plan.dp=2", "train.device=cpu"])
    line = "4 ranks share 2 cores of this machine: steps take longer than predicted"
    for cores, is_noted in ((2, True), (4, False)):
        monkeypatch.setattr(request.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert (line in request.make_plan(config).assumptions) is is_noted


def test_a_pool_of_gpus_that_nobody_knows_is_not_planned_on_a_guess() -> None:
    known, unknown = (replace(p, node_names=(p.name + "1", p.name + "2")) for p in SITE.pools)
    unknown = replace(unknown, gpu=replace(UNKNOWN_GPU, name="warp9"))
    site = replace(SITE, pools=(known, unknown))
    plan = request.make_plan(load(["model=gpt_3_6b"]), site)
    assert {c.pool for c in plan.components} == {"a"}
    assert any(line.startswith("b[1-2]: left out: GPU kind warp9 is not known; ask") for line in plan.site.assumptions)
    for words, pools in ((["plan.nodes={b: 2}"], site.pools), ([], (unknown,))):
        with pytest.raises(SiteError, match=r"^pool b: GPU kind warp9 is not known; ask its driver by `holmes site"):
            request.make_plan(load(["model=gpt_3_6b", *words]), replace(site, pools=pools))

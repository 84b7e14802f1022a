"""What a calibration says counts for the GPUs, the TP, the shapes and the fabrics that it was measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sites import A100, H100, one_fabric, small_testbed, two_clusters

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Fabric, FabricLink, Gpu, Site
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import Calibration, Measured, MeasuredFabric, interpolated
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import head_flops, layer_flops
from holmes_hpc.planning.cost.hardware import Link
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.traffic import transfers_s
from holmes_hpc.planning.search.best import best_plan, given_plan

MODEL, BATCH = named("gpt_3_6b"), Batch(256, 4, 2048)
V100 = Gpu("v100-32gb", 125, 32, 1200)
TWO = Site("two", (one_fabric(A100, "a", 2), one_fabric(H100, "h", 2)))


def layer(batch: Batch, tp: int, seconds: tuple[float, float], parallel: bool = False) -> Measured:
    tokens = batch.micro_size * batch.sequence_length
    return Measured(
        "layer",
        MODEL.hidden,
        tokens,
        tp,
        layer_flops(MODEL, tokens, batch.sequence_length),
        *seconds,
        batch.sequence_length,
        parallel,
    )


def of_table(fabric: Fabric, batches: list[Batch], tp: int, factor: float = 1.0) -> MeasuredFabric:
    """As if the kernels' tables had been measured, `factor` times as long."""
    rows = [(b, Costs().layer_s(MODEL, b, tp, fabric)) for b in batches]
    return MeasuredFabric(
        fabric.name, fabric.gpu.name, parts=tuple(layer(b, tp, (factor * f, factor * s)) for b, (f, s) in rows)
    )


# -- GPU kinds --------------------------------------------------------------------------------------------------------


def test_each_kind_of_gpu_has_its_own_times() -> None:
    """Layers are divided by what each was measured to take: 9 and 21 of 30, as 23 to 10 ms say; not 15 and 15."""
    batch = Batch(1024, 1, 2048)
    mixed = Calibration(
        (
            MeasuredFabric("a", A100.name, parts=(layer(batch, 1, (0.023, 0.046)),)),
            MeasuredFabric("h", H100.name, parts=(layer(batch, 1, (0.010, 0.020)),)),
        )
    )
    costs = Costs(mixed)
    assert costs.layer_s(MODEL, batch, 1, TWO.fabric("a")) == pytest.approx((0.023, 0.046))
    assert costs.layer_s(MODEL, batch, 1, TWO.fabric("h")) == pytest.approx((0.010, 0.020))
    plan = best_plan(MODEL, batch, TWO, PlanOptions(strategy="pipeline", tp=1, pp=2, dp=16, virtual_stages=1), costs)
    assert {s.fabric: s.layers for s in plan.stages} == {"a": 9, "h": 21}


def test_a_kind_that_was_not_measured_has_its_table_and_it_is_said() -> None:
    alone = Calibration((MeasuredFabric("h", H100.name, parts=(layer(BATCH, 1, (0.5, 1.0)),), pass_s=0.3),))
    for fabric in (one_fabric(A100, "h"), one_fabric(V100, "v")):  # not by the fabric's name either
        assert Costs(alone).layer_s(MODEL, BATCH, 1, fabric) == Costs().layer_s(MODEL, BATCH, 1, fabric)
        assert Costs(alone).pass_s(fabric) == Costs().pass_s(fabric) != 0.3
    plan = given_plan(MODEL, BATCH, TWO, PlanOptions(tp=1, pp=2, dp=16), Costs(alone))
    said = [a for a in plan.assumptions if "compute times of" in a]
    assert len(said) == 1 and A100.name in said[0] and "the calibration has other GPUs" in said[0]


def test_another_fabric_with_the_same_gpus_takes_what_the_first_took_unless_it_was_measured() -> None:
    first = MeasuredFabric("a", A100.name, parts=(layer(BATCH, 1, (0.02, 0.04)),))
    second = MeasuredFabric("b", A100.name, parts=(layer(BATCH, 1, (0.03, 0.06)),))
    b, c = one_fabric(A100, "b"), one_fabric(replace(A100, name="nvidia_a100_80gb"), "c")
    assert Costs(Calibration((first, second))).layer_s(MODEL, BATCH, 1, b)[0] == pytest.approx(0.03)
    assert Costs(Calibration((first,))).layer_s(MODEL, BATCH, 1, b)[0] == pytest.approx(0.02)
    assert Costs(Calibration((first,))).layer_s(MODEL, BATCH, 1, c)[0] == pytest.approx(0.02)  # another spelling
    plan = given_plan(MODEL, BATCH, Site("b", (b,)), PlanOptions(tp=1, pp=1, dp=8), Costs(Calibration((first,))))
    assert "layers on b take what they took on a, with the same GPUs" in plan.assumptions


def test_a_part_that_a_fabric_does_not_hold_is_that_of_another_with_its_gpus() -> None:
    tokens = BATCH.micro_size * BATCH.sequence_length
    head = Measured("head", MODEL.hidden, tokens, 1, head_flops(MODEL, tokens), 0.1, 0.2, BATCH.sequence_length)
    both = Calibration(
        (
            MeasuredFabric("a", A100.name, parts=(layer(BATCH, 1, (0.02, 0.04)),)),
            MeasuredFabric("b", A100.name, parts=(head,)),
            MeasuredFabric("h", H100.name),
        )
    )
    assert Costs(both).part_s("head", MODEL, BATCH, 1, one_fabric(A100, "a")) == pytest.approx((0.1, 0.2))
    h100 = one_fabric(H100, "h")
    assert Costs(both).part_s("head", MODEL, BATCH, 1, h100) == Costs().part_s("head", MODEL, BATCH, 1, h100)


def test_links_are_those_of_the_fabric() -> None:
    known = Costs(
        Calibration(
            (
                MeasuredFabric("a", A100.name, links={"ib": Link(1e-5, 0.5), "local": Link(1e-6, 0.4)}),
                MeasuredFabric("h", H100.name, links={"ib": Link(1e-5, 0.8), "ib.all_gather": Link(1e-5, 0.7)}),
            )
        )
    )
    plan = given_plan(MODEL, BATCH, TWO, PlanOptions(tp=2, pp=2, dp=8), known)
    layout = Layout.of(plan, known)
    inside = {c.fabric: layout.reduction(0, c.stages[0]) for c in layout.components}
    found = {name: known.link(t, TWO.fabric(name)).efficiency for name, t in inside.items()}
    assert found == {"a": 0.5, "h": 0.8}
    other = one_fabric(V100, "v")
    assert known.link(inside["a"], other, "all_gather").efficiency == 0.7  # a network's, measured anywhere
    local = layout.edges[0][1]
    assert local.kind != "local" or known.link(local, other) == Costs().link(local, other)


def test_an_earlier_release_measured_all_gpus_together() -> None:
    old = Calibration.from_dict(
        {
            "device": "NVIDIA A100-SXM4-80GB",
            "dtype": "bf16",
            "links": {"ib": {"latency_s": 1e-5, "efficiency": 0.5}},
            "optimizer_s": 1e-12,
            "pass_s": 1e-3,
            "step_s": 0.01,
            "parts": [
                {
                    "part": "layer",
                    "hidden": MODEL.hidden,
                    "tokens": 8192,
                    "tp": 1,
                    "flops": layer_flops(MODEL, 8192, 2048),
                    "forward_s": 0.02,
                    "backward_s": 0.04,
                }
            ],
        }
    )
    costs = Costs(old)
    assert costs.layer_s(MODEL, BATCH, 1, TWO.fabric("a")) == pytest.approx((0.02, 0.04))
    assert costs.layer_s(MODEL, BATCH, 1, TWO.fabric("h")) == Costs().layer_s(MODEL, BATCH, 1, TWO.fabric("h"))
    plan = given_plan(MODEL, BATCH, TWO, PlanOptions(tp=1, pp=2, dp=16), costs)
    assert any("does not tell a100-80gb and h100-80gb apart" in a for a in plan.assumptions)
    assert not any(
        "apart" in a
        for a in given_plan(MODEL, BATCH, two_clusters(), PlanOptions(tp=1, pp=2, dp=32), costs).assumptions
    )


# -- tensor parallel and shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [A100, H100])
@pytest.mark.parametrize("measured_at", [1, 2, 8])
def test_collectives_of_tp_are_counted_once(gpu: Gpu, measured_at: int) -> None:
    """What was measured is what the tables say: so is every other TP."""
    fabric = one_fabric(gpu)
    costs = Costs(Calibration((of_table(fabric, [BATCH], measured_at),)))
    for tp in (1, 2, 4, 8):
        found, table = costs.layer_s(MODEL, BATCH, tp, fabric), Costs().layer_s(MODEL, BATCH, tp, fabric)
        assert found == pytest.approx(table, rel=1e-6), (measured_at, tp)


def test_a_slower_gpu_does_not_make_the_collectives_slower() -> None:
    """Layers of twice the tables' time at TP 1: at TP 8 computing doubles, the exchange does not, nor is it free."""
    fabric = one_fabric(A100)
    plain, slow = Costs(), Costs(Calibration((of_table(fabric, [BATCH], 1, 2.0),)))
    one, eight = (sum(plain.layer_s(MODEL, BATCH, tp, fabric)) for tp in (1, 8))
    found = sum(slow.layer_s(MODEL, BATCH, 8, fabric))
    assert eight < found < 2 * eight and found > 1.05 * 2 * one / 8


def test_a_measured_link_inside_the_nodes_carries_the_collectives() -> None:
    fabric, rows = one_fabric(A100), of_table(one_fabric(A100), [BATCH], 1)
    slow = replace(rows, links={"local": Link(1e-6, 0.01)})
    assert sum(Costs(Calibration((slow,))).layer_s(MODEL, BATCH, 8, fabric)) > 3 * sum(
        Costs(Calibration((rows,))).layer_s(MODEL, BATCH, 8, fabric)
    )


def test_a_plan_says_that_its_tp_was_not_measured() -> None:
    costs = Costs(Calibration((of_table(TWO.fabrics[0], [BATCH], 1),)))
    site = Site("a", TWO.fabrics[:1])
    two = given_plan(MODEL, BATCH, site, PlanOptions(tp=2, pp=1, dp=8), costs).assumptions
    one = given_plan(MODEL, BATCH, site, PlanOptions(tp=1, pp=1, dp=16), costs).assumptions
    assert [a for a in two if "layers at TP 2 reckoned from TP 1" in a] and not [a for a in one if "reckoned" in a]


@given(
    st.lists(st.tuples(st.integers(1, 16), st.floats(0.5, 2)), min_size=1, max_size=5, unique_by=lambda r: r[0]),
    st.integers(1, 32),
)
def test_between_measurements_lies_what_they_were(rows: list[tuple[int, float]], at: int) -> None:
    """At a point its value; between two of them no value beyond both; outside, the nearest one's."""
    points = [((float(x), 7.0), y) for x, y in rows]
    found = interpolated(points, (float(at), 3.0))
    known = dict(rows)
    below, above = (
        max((x for x in known if x <= at), default=min(known)),
        min((x for x in known if x >= at), default=max(known)),
    )
    ends = sorted((known[below], known[above]))
    assert ends[0] - 1e-12 <= found <= ends[1] + 1e-12
    if at in known:
        assert found == pytest.approx(known[at])


def test_a_shape_between_two_that_were_measured_is_between_them() -> None:
    """Micro-batches of 1 took what the tables say, of 4 twice that: of 2, half-way in the logarithm, 1.5 times."""
    fabric = one_fabric(A100)
    one, four, two, eight = (replace(BATCH, micro_size=n) for n in (1, 4, 2, 8))
    rows = (*of_table(fabric, [one], 1).parts, *of_table(fabric, [four], 1, 2.0).parts)
    costs = Costs(Calibration((MeasuredFabric("ib-a", A100.name, parts=rows),)))

    def over_table(batch: Batch) -> float:
        return sum(costs.layer_s(MODEL, batch, 1, fabric)) / sum(Costs().layer_s(MODEL, batch, 1, fabric))

    assert [over_table(b) for b in (one, two, four, eight)] == pytest.approx([1, 1.5, 2, 2])
    shorter = replace(BATCH, micro_size=4, sequence_length=512)
    with_short = Costs(
        Calibration((MeasuredFabric("ib-a", A100.name, parts=(*rows, *of_table(fabric, [shorter], 1, 4.0).parts)),))
    )
    middle = replace(BATCH, micro_size=4, sequence_length=1024)
    ratio = sum(with_short.layer_s(MODEL, middle, 1, fabric)) / sum(Costs().layer_s(MODEL, middle, 1, fabric))
    assert 2 < ratio < 4


def test_on_cpus_a_shape_goes_by_its_flops() -> None:
    fabric, tiny, batch = small_testbed().fabrics[0], named("gpt_tiny"), Batch(16, 2, 64)
    row = Measured("layer", tiny.hidden, 128, 1, layer_flops(tiny, 128, 64), 0.01, 0.02, 64)
    costs = Costs(Calibration((MeasuredFabric("ib-a", "cpu", parts=(row,)),)))
    assert costs.layer_s(tiny, replace(batch, micro_size=4), 1, fabric) == pytest.approx((0.02, 0.04))


@pytest.mark.parametrize("model", ["gpt_7_5b", "llama2_7b"])
def test_layers_of_another_model_are_refused(tmp_path: Path, model: str) -> None:
    path = tmp_path / "cal.yaml"
    made = Calibration((of_table(one_fabric(A100), [BATCH], 1),))
    path.write_text(yaml.safe_dump(made.to_dict()))
    assert request.costs(load(["model=gpt_3_6b", f"calibration={path}"])).calibration == made
    with pytest.raises(ConfigError, match=rf"cal.yaml: calibration: it was measured .* calibrate model={model}"):
        request.costs(load([f"model={model}", f"calibration={path}"]))


def test_layers_of_the_same_width_and_other_flops_are_of_another_model() -> None:
    made = Calibration((of_table(one_fabric(A100), [BATCH], 1),))
    made.refuse_other_models(replace(MODEL, layers=2, name="fewer layers"))
    with pytest.raises(ConfigError, match="with other FLOPs"):
        made.refuse_other_models(replace(MODEL, ffn=2 * MODEL.ffn))


# -- between fabrics --------------------------------------------------------------------------------------------------


def test_what_was_measured_between_fabrics_goes_before_what_the_site_says() -> None:
    said = replace(TWO, links=(FabricLink(("a", "h"), gbps=10, delay_ms=1),))
    known = Costs(Calibration(between=(FabricLink(("h", "a"), gbps=2.5, delay_ms=8),)))
    options = PlanOptions(tp=2, pp=2, dp=8)
    stated, measured = (given_plan(MODEL, BATCH, said, options, c) for c in (Costs(), known))
    assert measured.site.link("a", "h") == FabricLink(("h", "a"), gbps=2.5, delay_ms=8)
    ways = [transfers_s(Layout.of(stated, c), 0)[0][0] for c in (Costs(), known)]
    assert ways[1] > 3 * ways[0]  # a plan's own prediction too
    assert transfers_s(Layout.of(measured, known), 0)[0][0] == ways[1]
    told = [a for a in measured.assumptions if a.startswith("between h and a")]
    assert told == ["between h and a 2.5 Gb/s and 8 ms, as measured; the site says 10 Gb/s and 1 ms"]
    assert Layout.of(measured, known).site.assumptions.count(told[0]) == 1
    assert not [a for a in stated.assumptions if "as measured" in a]


def test_measured_links_decide_which_fabrics_are_neighbours() -> None:
    site = Site("three", tuple(one_fabric(A100, name, 2) for name in "abc"))
    known = Costs(Calibration(between=(FabricLink(("a", "b"), gbps=0.5),)))
    plan = best_plan(named("gpt_7_5b"), Batch(768, 1, 2048), site, PlanOptions(tp=2, pp=3, dp=8), known)
    assert [c.fabric for c in plan.components] in (["a", "c", "b"], ["b", "c", "a"])


def test_links_between_fabrics_that_a_site_has_not_are_let_be() -> None:
    known = Calibration(between=(FabricLink(("a", "elsewhere"), gbps=1),))
    assert known.on(TWO) is TWO


# -- what the software does -------------------------------------------------------------------------------------------


def test_what_the_software_does_is_that_of_the_gpus() -> None:
    unfused = replace(
        TWO, fabrics=(TWO.fabrics[0], one_fabric(replace(H100, attention="unfused", fused_norm=False), "h", 2))
    )
    options, plain = PlanOptions(tp=1, pp=2, dp=16, fabric_order=("a", "h")), Costs()
    fused, loose = (given_plan(MODEL, BATCH, site, options, plain) for site in (TWO, unfused))
    assert plain.layer_s(MODEL, BATCH, 1, unfused.fabric("h")) > plain.layer_s(MODEL, BATCH, 1, TWO.fabric("h"))
    assert plain.layer_s(MODEL, BATCH, 1, unfused.fabric("a")) == plain.layer_s(MODEL, BATCH, 1, TWO.fabric("a"))
    assert fused.predicted and loose.predicted
    before, after = fused.predicted.memory_bytes_per_gpu, loose.predicted.memory_bytes_per_gpu
    assert after[0] == before[0] and after[1] > 1.1 * before[1]
    assert loose.predicted.interval_s != fused.predicted.interval_s
    supposed = [a for a in loose.assumptions if "attention is fused" in a]
    assert len(supposed) == 1 and len([a for a in fused.assumptions if "attention is fused" in a]) == 1
    whole = Site("h", (one_fabric(replace(H100, attention="flash"), "h", 2),))
    known = given_plan(MODEL, BATCH, whole, PlanOptions(tp=1, pp=1, dp=16), plain)
    assert not [a for a in known.assumptions if "attention is fused" in a]


def test_flash_attention_of_fp32_is_a_contradiction() -> None:
    fabric = one_fabric(replace(A100, attention="flash"))
    with pytest.raises(ConfigError, match="attention is flash, which computes in fp16 or bf16 alone"):
        Costs(dtype="fp32").layer_s(MODEL, BATCH, 1, fabric)
    Costs(dtype="bf16").layer_s(MODEL, BATCH, 1, fabric)

"""A calibration applies to the GPUs, TP, shapes and fabrics that it was measured on."""

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
from holmes_hpc.fabric.site import FabricLink, Gpu, NicType, Pool, Site
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPart, MeasuredPool, interpolate
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import head_flops, layer_flops
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.network_figures import Link
from holmes_hpc.planning.cost.network_times import transfers_s
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Transport
from holmes_hpc.planning.search.best import best_plan, fixed_plan

MODEL, BATCH = named("gpt_3_6b"), Batch(256, 4, 2048)
V100 = Gpu("v100-32gb", 125, 32, 1200)
TWO = Site("two", (one_fabric(A100, "a", 2), one_fabric(H100, "h", 2)))


def layer(batch: Batch, tp: int, seconds: tuple[float, float], parallel: bool = False) -> MeasuredPart:
    tokens = batch.micro_size * batch.sequence_length
    return MeasuredPart(
        "layer",
        MODEL.hidden,
        tokens,
        tp,
        layer_flops(MODEL, tokens, batch.sequence_length),
        *seconds,
        batch.sequence_length,
        parallel,
    )


def table_times(fabric: Pool, batches: list[Batch], tp: int, factor: float = 1.0) -> MeasuredPool:
    """Return the times of the kernels' tables, scaled by `factor`, as measurements."""
    rows = [(b, Costs().layer_s(MODEL, b, tp, fabric)) for b in batches]
    return MeasuredPool(
        fabric.name, fabric.gpu.name, parts=tuple(layer(b, tp, (factor * f, factor * s)) for b, (f, s) in rows)
    )


# -- GPU kinds --------------------------------------------------------------------------------------------------------


def test_each_kind_of_gpu_has_its_own_times() -> None:
    """Divide 30 layers by the measured times: 9 and 21 for 23 and 10 ms, not 15 and 15."""
    batch = Batch(1024, 1, 2048)
    mixed = Calibration(
        (
            MeasuredPool("a", A100.name, parts=(layer(batch, 1, (0.023, 0.046)),)),
            MeasuredPool("h", H100.name, parts=(layer(batch, 1, (0.010, 0.020)),)),
        )
    )
    costs = Costs(mixed)
    assert costs.layer_s(MODEL, batch, 1, TWO.pool("a")) == pytest.approx((0.023, 0.046))
    assert costs.layer_s(MODEL, batch, 1, TWO.pool("h")) == pytest.approx((0.010, 0.020))
    plan = best_plan(MODEL, batch, TWO, PlanOptions(strategy="pipeline", tp=1, pp=2, dp=16, virtual_stages=1), costs)
    assert {s.fabric: s.layers for s in plan.stages} == {"a": 9, "h": 21}


def test_an_unmeasured_gpu_kind_uses_its_table_and_the_plan_notes_it() -> None:
    calibration = Calibration((MeasuredPool("h", H100.name, parts=(layer(BATCH, 1, (0.5, 1.0)),), pass_s=0.3),))
    for fabric in (one_fabric(A100, "h"), one_fabric(V100, "v")):  # the fabric's name does not match either
        assert Costs(calibration).layer_s(MODEL, BATCH, 1, fabric) == Costs().layer_s(MODEL, BATCH, 1, fabric)
        assert Costs(calibration).pass_overhead_s(fabric) == Costs().pass_overhead_s(fabric) != 0.3
    plan = fixed_plan(MODEL, BATCH, TWO, PlanOptions(tp=1, pp=2, dp=16), Costs(calibration))
    notes = [a for a in plan.assumptions if "compute times of" in a]
    assert len(notes) == 1 and A100.name in notes[0] and "the calibration has other GPUs" in notes[0]


def test_an_unmeasured_fabric_uses_times_of_a_fabric_with_the_same_gpus() -> None:
    first = MeasuredPool("a", A100.name, parts=(layer(BATCH, 1, (0.02, 0.04)),))
    second = MeasuredPool("b", A100.name, parts=(layer(BATCH, 1, (0.03, 0.06)),))
    b, c = one_fabric(A100, "b"), one_fabric(replace(A100, name="nvidia_a100_80gb"), "c")
    assert Costs(Calibration((first, second))).layer_s(MODEL, BATCH, 1, b)[0] == pytest.approx(0.03)
    assert Costs(Calibration((first,))).layer_s(MODEL, BATCH, 1, b)[0] == pytest.approx(0.02)
    assert Costs(Calibration((first,))).layer_s(MODEL, BATCH, 1, c)[0] == pytest.approx(0.02)  # another spelling
    plan = fixed_plan(MODEL, BATCH, Site("b", (b,)), PlanOptions(tp=1, pp=1, dp=8), Costs(Calibration((first,))))
    assert "layer times on b assumed as measured on a, with the same GPUs" in plan.assumptions


def test_a_missing_part_comes_from_a_fabric_with_the_same_gpus() -> None:
    tokens = BATCH.micro_size * BATCH.sequence_length
    head = MeasuredPart("head", MODEL.hidden, tokens, 1, head_flops(MODEL, tokens), 0.1, 0.2, BATCH.sequence_length)
    calibration = Calibration(
        (
            MeasuredPool("a", A100.name, parts=(layer(BATCH, 1, (0.02, 0.04)),)),
            MeasuredPool("b", A100.name, parts=(head,)),
            MeasuredPool("h", H100.name),
        )
    )
    assert Costs(calibration).part_s("head", MODEL, BATCH, 1, one_fabric(A100, "a")) == pytest.approx((0.1, 0.2))
    h100 = one_fabric(H100, "h")
    assert Costs(calibration).part_s("head", MODEL, BATCH, 1, h100) == Costs().part_s("head", MODEL, BATCH, 1, h100)


def test_each_fabric_uses_its_measured_links() -> None:
    costs = Costs(
        Calibration(
            (
                MeasuredPool("a", A100.name, links={"ib": Link(1e-5, 0.5), "local": Link(1e-6, 0.4)}),
                MeasuredPool("h", H100.name, links={"ib": Link(1e-5, 0.8), "ib.all_gather": Link(1e-5, 0.7)}),
            )
        )
    )
    plan = fixed_plan(MODEL, BATCH, TWO, PlanOptions(tp=2, pp=2, dp=8), costs)
    layout = Layout.of(plan, costs)
    transports = {c.pool: layout.intra_dp_transport(0, c.stages[0]) for c in layout.components}
    efficiencies = {name: costs.link(t, TWO.pool(name)).efficiency for name, t in transports.items()}
    assert efficiencies == {"a": 0.5, "h": 0.8}
    other = one_fabric(V100, "v")
    assert costs.link(transports["a"], other, "all_gather").efficiency == 0.7  # of the network, measured on any fabric
    local = layout.edges[0][1]
    assert local.kind != "local" or costs.link(local, other) == Costs().link(local, other)


def test_calibrations_of_earlier_releases_are_read() -> None:
    calibration = Calibration.from_dict(
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
    costs = Costs(calibration)
    assert costs.layer_s(MODEL, BATCH, 1, TWO.pool("a")) == pytest.approx((0.02, 0.04))
    assert costs.layer_s(MODEL, BATCH, 1, TWO.pool("h")) == Costs().layer_s(MODEL, BATCH, 1, TWO.pool("h"))
    plan = fixed_plan(MODEL, BATCH, TWO, PlanOptions(tp=1, pp=2, dp=16), costs)
    assert any("names no GPU kind, the site has a100-80gb and h100-80gb" in a for a in plan.assumptions)
    assert not any(
        "names no GPU kind" in a
        for a in fixed_plan(MODEL, BATCH, two_clusters(), PlanOptions(tp=1, pp=2, dp=32), costs).assumptions
    )


# -- tensor parallel and shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [A100, H100])
@pytest.mark.parametrize("measured_at", [1, 2, 8])
def test_collectives_of_tp_are_counted_once(gpu: Gpu, measured_at: int) -> None:
    """Measurements equal to the tables give the tables' times at every other TP."""
    fabric = one_fabric(gpu)
    costs = Costs(Calibration((table_times(fabric, [BATCH], measured_at),)))
    for tp in (1, 2, 4, 8):
        seconds, table = costs.layer_s(MODEL, BATCH, tp, fabric), Costs().layer_s(MODEL, BATCH, tp, fabric)
        assert seconds == pytest.approx(table, rel=1e-6), (measured_at, tp)


def test_a_slower_gpu_does_not_slow_the_collectives() -> None:
    """With layers of twice the tables' time at TP 1, computing at TP 8 doubles and communication does not."""
    fabric = one_fabric(A100)
    plain, slow = Costs(), Costs(Calibration((table_times(fabric, [BATCH], 1, 2.0),)))
    one, eight = (sum(plain.layer_s(MODEL, BATCH, tp, fabric)) for tp in (1, 8))
    slow_eight = sum(slow.layer_s(MODEL, BATCH, 8, fabric))
    assert eight < slow_eight < 2 * eight and slow_eight > 1.05 * 2 * one / 8


def test_tp_collectives_use_the_measured_link_inside_nodes() -> None:
    fabric, rows = one_fabric(A100), table_times(one_fabric(A100), [BATCH], 1)
    slow = replace(rows, links={"local": Link(1e-6, 0.01)})
    assert sum(Costs(Calibration((slow,))).layer_s(MODEL, BATCH, 8, fabric)) > 3 * sum(
        Costs(Calibration((rows,))).layer_s(MODEL, BATCH, 8, fabric)
    )


def test_a_plan_notes_an_unmeasured_tp() -> None:
    costs = Costs(Calibration((table_times(TWO.pools[0], [BATCH], 1),)))
    site = Site("a", TWO.pools[:1])
    two = fixed_plan(MODEL, BATCH, site, PlanOptions(tp=2, pp=1, dp=8), costs).assumptions
    one = fixed_plan(MODEL, BATCH, site, PlanOptions(tp=1, pp=1, dp=16), costs).assumptions
    assert [a for a in two if "layers at TP 2 estimated from TP 1" in a] and not [a for a in one if "estimated" in a]


@given(
    st.lists(st.tuples(st.integers(1, 16), st.floats(0.5, 2)), min_size=1, max_size=5, unique_by=lambda r: r[0]),
    st.integers(1, 32),
)
def test_interpolation_stays_between_the_neighbouring_values(rows: list[tuple[int, float]], at: int) -> None:
    """A point has its value; between two points the value is bounded by both; outside, the nearest one's counts."""
    points = [((float(x), 7.0), y) for x, y in rows]
    value = interpolate(points, (float(at), 3.0))
    values = dict(rows)
    below, above = (
        max((x for x in values if x <= at), default=min(values)),
        min((x for x in values if x >= at), default=max(values)),
    )
    ends = sorted((values[below], values[above]))
    assert ends[0] - 1e-12 <= value <= ends[1] + 1e-12
    if at in values:
        assert value == pytest.approx(values[at])


def test_times_of_unmeasured_shapes_are_interpolated() -> None:
    """Micro-batches of 1 match the tables and of 4 take twice as long, so of 2 take 1.5 times as long (logarithmic)."""
    fabric = one_fabric(A100)
    one, four, two, eight = (replace(BATCH, micro_size=n) for n in (1, 4, 2, 8))
    rows = (*table_times(fabric, [one], 1).parts, *table_times(fabric, [four], 1, 2.0).parts)
    costs = Costs(Calibration((MeasuredPool("ib-a", A100.name, parts=rows),)))

    def over_table(batch: Batch) -> float:
        return sum(costs.layer_s(MODEL, batch, 1, fabric)) / sum(Costs().layer_s(MODEL, batch, 1, fabric))

    assert [over_table(b) for b in (one, two, four, eight)] == pytest.approx([1, 1.5, 2, 2])
    shorter = replace(BATCH, micro_size=4, sequence_length=512)
    with_short = Costs(
        Calibration((MeasuredPool("ib-a", A100.name, parts=(*rows, *table_times(fabric, [shorter], 1, 4.0).parts)),))
    )
    middle = replace(BATCH, micro_size=4, sequence_length=1024)
    ratio = sum(with_short.layer_s(MODEL, middle, 1, fabric)) / sum(Costs().layer_s(MODEL, middle, 1, fabric))
    assert 2 < ratio < 4


def test_cpu_times_scale_with_flops() -> None:
    fabric, tiny, batch = small_testbed().pools[0], named("gpt_tiny"), Batch(16, 2, 64)
    row = MeasuredPart("layer", tiny.hidden, 128, 1, layer_flops(tiny, 128, 64), 0.01, 0.02, 64)
    costs = Costs(Calibration((MeasuredPool("ib-a", "cpu", parts=(row,)),)))
    assert costs.layer_s(tiny, replace(batch, micro_size=4), 1, fabric) == pytest.approx((0.02, 0.04))


@pytest.mark.parametrize("model", ["gpt_7_5b", "llama2_7b"])
def test_layers_of_another_model_are_refused(tmp_path: Path, model: str) -> None:
    path = tmp_path / "cal.yaml"
    calibration = Calibration((table_times(one_fabric(A100), [BATCH], 1),))
    path.write_text(yaml.safe_dump(calibration.to_dict()))
    assert request.costs(load(["model=gpt_3_6b", f"calibration={path}"])).calibration == calibration
    with pytest.raises(ConfigError, match=rf"cal.yaml: calibration: calibration has .* calibrate model={model}"):
        request.costs(load([f"model={model}", f"calibration={path}"]))


def test_layers_of_equal_width_and_other_flops_are_refused() -> None:
    calibration = Calibration((table_times(one_fabric(A100), [BATCH], 1),))
    calibration.refuse_other_models(replace(MODEL, layers=2, name="fewer layers"))
    with pytest.raises(ConfigError, match="other layer FLOPs"):
        calibration.refuse_other_models(replace(MODEL, ffn=2 * MODEL.ffn))


# -- between fabrics --------------------------------------------------------------------------------------------------


def test_measured_links_override_the_links_of_the_site() -> None:
    site = replace(TWO, links=(FabricLink(("a", "h"), gbps=10, delay_ms=1),))
    costs = Costs(Calibration(between=(FabricLink(("h", "a"), gbps=2.5, delay_ms=8),)))
    options = PlanOptions(tp=2, pp=2, dp=8)
    stated, measured = (fixed_plan(MODEL, BATCH, site, options, c) for c in (Costs(), costs))
    assert measured.site.link("a", "h") == FabricLink(("h", "a"), gbps=2.5, delay_ms=8)
    transfers = [transfers_s(Layout.of(stated, c), 0)[0][0] for c in (Costs(), costs)]
    assert transfers[1] > 3 * transfers[0]  # a plan's own prediction as well
    assert transfers_s(Layout.of(measured, costs), 0)[0][0] == transfers[1]
    notes = [a for a in measured.assumptions if a.startswith("link between h and a")]
    assert notes == ["link between h and a: measured 2.5 Gb/s and 8 ms, site says 10 Gb/s and 1 ms"]
    assert Layout.of(measured, costs).site.assumptions.count(notes[0]) == 1
    assert not [a for a in stated.assumptions if "link between" in a]


def test_a_measured_pair_of_nodes_keeps_the_total_of_the_site() -> None:
    site = replace(TWO, links=(FabricLink(("a", "h"), gbps=10, total_gbps=20),))
    calibration = Calibration(between=(FabricLink(("h", "a"), gbps=2.5),))
    measured = calibration.with_measured_links(site)
    assert measured.links == (FabricLink(("h", "a"), gbps=2.5, total_gbps=20),)
    assert calibration.with_measured_links(measured) is measured
    assert "total_gbps" not in calibration.to_dict()["between"][0]


@pytest.mark.parametrize("nic", [NicType.ROCE, NicType.IB, NicType.EFA])
def test_a_fabrics_rdma_efficiency_replaces_the_published_one_and_yields_to_a_measured_one(nic: NicType) -> None:
    fabric = replace(TWO.pools[0], nic=nic, rdma_gbps=200.0)
    stated = replace(fabric, rdma_efficiency=0.88)
    costs, rdma = Costs(), Transport("rdma", nic, fabric.name)
    published = [costs.link(rdma, fabric, c).efficiency for c in ("", "reduce_scatter")]
    assert [costs.link(rdma, stated, c).efficiency for c in ("", "reduce_scatter")] == [0.88, 0.88]
    assert [costs.link(rdma, fabric, c).efficiency for c in ("", "reduce_scatter")] == published
    assert costs.link(TCP, stated) == costs.link(TCP, fabric) and costs.link(LOCAL, stated) == costs.link(LOCAL, fabric)
    measured = MeasuredPool(fabric.name, A100.name, links={str(nic): Link(1e-5, 0.5)})
    assert Costs(Calibration(fabrics=(measured,))).link(rdma, stated).efficiency == 0.5


def test_measured_links_decide_which_fabrics_are_neighbours() -> None:
    site = Site("three", tuple(one_fabric(A100, name, 2) for name in "abc"))
    costs = Costs(Calibration(between=(FabricLink(("a", "b"), gbps=0.5),)))
    plan = best_plan(named("gpt_7_5b"), Batch(768, 1, 2048), site, PlanOptions(tp=2, pp=3, dp=8), costs)
    assert [c.pool for c in plan.components] in (["a", "c", "b"], ["b", "c", "a"])


def test_links_to_fabrics_outside_the_site_are_ignored() -> None:
    calibration = Calibration(between=(FabricLink(("a", "elsewhere"), gbps=1),))
    assert calibration.with_measured_links(TWO) is TWO


# -- software ----------------------------------------------------------------------------------------------------------


def test_each_gpu_kind_uses_its_own_attention_and_norm() -> None:
    unfused = replace(
        TWO, pools=(TWO.pools[0], one_fabric(replace(H100, attention="unfused", fused_norm=False), "h", 2))
    )
    options, plain = PlanOptions(tp=1, pp=2, dp=16, pool_order=("a", "h")), Costs()
    fused, mixed = (fixed_plan(MODEL, BATCH, site, options, plain) for site in (TWO, unfused))
    assert plain.layer_s(MODEL, BATCH, 1, unfused.pool("h")) > plain.layer_s(MODEL, BATCH, 1, TWO.pool("h"))
    assert plain.layer_s(MODEL, BATCH, 1, unfused.pool("a")) == plain.layer_s(MODEL, BATCH, 1, TWO.pool("a"))
    assert fused.predicted and mixed.predicted
    fused_bytes, mixed_bytes = fused.predicted.memory_bytes_per_gpu, mixed.predicted.memory_bytes_per_gpu
    assert mixed_bytes[0] == fused_bytes[0] and mixed_bytes[1] > 1.1 * fused_bytes[1]
    assert mixed.predicted.interval_s != fused.predicted.interval_s
    notes = [a for a in mixed.assumptions if "fused attention by" in a]
    assert len(notes) == 1 and len([a for a in fused.assumptions if "fused attention by" in a]) == 1
    flash_site = Site("h", (one_fabric(replace(H100, attention="flash"), "h", 2),))
    flash_plan = fixed_plan(MODEL, BATCH, flash_site, PlanOptions(tp=1, pp=1, dp=16), plain)
    assert not [a for a in flash_plan.assumptions if "fused attention by" in a]


def test_flash_attention_in_fp32_is_refused() -> None:
    fabric = one_fabric(replace(A100, attention="flash"))
    with pytest.raises(ConfigError, match="attention flash supports only fp16 and bf16"):
        Costs(dtype="fp32").layer_s(MODEL, BATCH, 1, fabric)
    Costs(dtype="bf16").layer_s(MODEL, BATCH, 1, fabric)

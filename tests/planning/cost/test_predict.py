"""Times, bytes and memory of given plans against hand calculations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from sites import A100, small_testbed, two_clusters

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.cost import flops as counts
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPart, MeasuredPool
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import check_memory, fits, layer_activation_bytes, memory
from holmes_hpc.planning.cost.network_figures import Link
from holmes_hpc.planning.cost.predict import chrome_trace, layer_array, predict, timeline
from holmes_hpc.planning.cost.timing import Timing, parameters, timing
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.search.best import best_plan, fixed_plan

TINY, BATCH = named("gpt_tiny"), Batch(16, 2, 64)


def plan(
    site: Site = small_testbed(), model: ModelSpec = TINY, batch: Batch = BATCH, costs: Costs = Costs(), **options: Any
) -> Plan:
    return fixed_plan(model, batch, site, PlanOptions(**options), costs)


def pipeline(**options: Any) -> Plan:
    return plan(tp=1, pp=2, dp=2, nodes={"ib-a": 2, "roce-a": 2}, **options)


def stage_parameters(plan: Plan) -> list[int]:
    layer_size = counts.layer_parameters(TINY)
    sizes = [s.layers * layer_size for s in plan.stages]
    sizes[0] += counts.embedding_parameters(TINY)
    sizes[-1] += counts.head_parameters(TINY)
    return sizes


def test_bytes_of_the_demo_match_gloo() -> None:
    """Check two nodes per stage in fp32: gradients, by an all-to-all, and gathered parameters.
    Activations of 4 micro-batches of each of 2 pipelines cross Ethernet in both directions."""
    made = pipeline()
    assert made.predicted is not None
    nic_bytes, sizes = made.predicted.nic_bytes_per_step, stage_parameters(made)
    for fabric, size in (("ib-a", sizes[0]), ("roce-a", sizes[1])):
        reduce_scatter, gather = (2 - 1) / 2 * 4 * size, (2 - 1) / 2 * 4 * size
        assert nic_bytes[fabric] == pytest.approx(2 * (reduce_scatter + gather))
    assert nic_bytes["ethernet"] == pytest.approx(2 * 4 * 2 * (2 * 64 * 256 * 4))


def test_bytes_sum_up_over_the_groups_of_the_plan() -> None:
    """Sum the bytes per network over the plan's own list of groups. Nodes hold several ranks."""
    made = plan(two_clusters(2), named("gpt_3_6b"), Batch(64, 2, 2048), tp=2, pp=2, dp=8)
    sent: dict[str, float] = {}
    layout = Layout.of(made, Costs())
    gradient, weight = 4, 2
    for g in made.transports():
        key = g.transport.fabric or "ethernet"
        nodes = {made.places[r] for r in g.ranks}
        if g.transport.kind == "local":
            continue
        if g.kind == "dp":
            stage = g.stages[0]
            size = made.stages[stage].layers * counts.layer_parameters(made.model, 2)
            size += counts.embedding_parameters(made.model, 2) if stage == 0 else counts.head_parameters(made.model, 2)
            n = len(g.ranks)
            sent[key] = sent.get(key, 0) + len(nodes) * (n - 1) / n * size * (gradient + weight)
        elif g.kind == "edge":
            sent[key] = sent.get(key, 0) + 2 * made.micro_batches * 2 * 2048 * 3072 * weight
    assert made.predicted is not None and layout.intra_dp_size == 8
    assert made.predicted.nic_bytes_per_step == pytest.approx(sent)


def test_plain_megatron_sends_everything_over_ethernet() -> None:
    holmes, single = pipeline(), pipeline(transport="single")
    assert holmes.predicted is not None and single.predicted is not None
    assert set(single.predicted.nic_bytes_per_step) == {"ethernet"}
    assert sum(single.predicted.nic_bytes_per_step.values()) == pytest.approx(
        sum(holmes.predicted.nic_bytes_per_step.values())
    )
    assert single.predicted.step_time_s > 1.4 * holmes.predicted.step_time_s


def test_paced_layers_take_their_pace() -> None:
    """One rank has 8 layers of 10 ms forward and 20 ms backward, 8 micro-batches, and little else."""
    costs = Costs(pace_layer_ms=10)
    made = plan(tp=1, pp=1, dp=1, nodes={"ib-a": 1}, costs=costs)
    assert made.predicted is not None
    assert made.predicted.breakdown["compute_s"] == pytest.approx(8 * 8 * 0.03, rel=0.05)
    full = predict(replace(made, recompute="full"), costs)
    assert full.breakdown["compute_s"] == pytest.approx(8 * 8 * 0.04, rel=0.05)


def test_parts_sum_to_the_step() -> None:
    for made in (pipeline(), pipeline(schedule="ahead"), pipeline(transport="single")):
        assert made.predicted is not None
        assert sum(made.predicted.breakdown.values()) == pytest.approx(made.predicted.step_time_s)
        assert min(made.predicted.breakdown.values()) >= 0
        assert made.predicted.samples_per_s == pytest.approx(16 / made.predicted.step_time_s)


def test_measurements_override_published_figures() -> None:
    tokens = 2 * 64
    measured = Calibration(
        (
            MeasuredPool(
                parts=(
                    MeasuredPart("layer", 256, tokens, 1, counts.layer_flops(TINY, tokens, 64), 0.1, 0.3),
                    MeasuredPart("head", 256, tokens, 1, counts.head_flops(TINY, tokens), 0.0, 0.0),
                    MeasuredPart("embedding", 256, tokens, 1, tokens * 256.0, 0.0, 0.0),
                ),
                links={"ethernet": Link(0.5, 1.0)},
                optimizer_s=0.0,
            ),
        ),
        step_s=0.25,
    )
    one_rank = plan(tp=1, pp=1, dp=1, nodes={"ib-a": 1}, costs=Costs(measured))
    assert one_rank.predicted is not None
    assert one_rank.predicted.step_time_s == pytest.approx(8 * 8 * 0.4 + 0.25)
    two_stages = pipeline(costs=Costs(measured))
    assert two_stages.predicted is not None
    # Each transfer has half a second of latency.
    assert two_stages.predicted.step_time_s > (4 + 1) * 4 * 0.4 + (4 + 1) * 0.5
    assert Calibration.from_dict(measured.to_dict()) == measured


def paced(**figures: Any) -> Calibration:
    """Return a calibration with layers of 10 ms."""
    return Calibration(
        (MeasuredPool(parts=(MeasuredPart("layer", 256, 128, 1, 1e6, 0.011, 0.022),), **figures),), pace_layer_ms=10
    )


def test_a_calibration_of_another_pace_is_refused() -> None:
    fabric, larger = small_testbed().pools[0], Batch(16, 4, 64)
    # The pace does not grow with the micro-batch.
    assert Costs(paced(), 10).layer_s(TINY, larger, 1, fabric) == (0.011, 0.022)
    assert Costs(paced(), 10).layer_s(TINY, larger, 1, fabric, recompute="full") == (0.011, 0.033)
    for calibration, pace, message in (
        (paced(), None, "calibration has layers paced to 10 ms, the run has unpaced layers"),
        (paced(), 20, "the run has layers paced to 20 ms"),
        (replace(paced(), pace_layer_ms=None), 10, "calibration has unpaced layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            Costs(calibration, pace)


def test_a_calibration_of_another_dtype_is_refused() -> None:
    measured = replace(paced(), dtype="bf16")
    assert Costs(measured, 10).dtype_of(A100) == Costs(measured, 10, dtype="bf16").dtype_of(A100) == "bf16"
    with pytest.raises(ConfigError, match="calibration has dtype=bf16, the run has dtype=fp32"):
        Costs(measured, 10, dtype="fp32")


def test_a_plan_keeps_its_pace() -> None:
    made = plan(tp=1, pp=2, dp=2, nodes={"ib-a": 2, "roce-a": 2}, costs=Costs(pace_layer_ms=10))
    copied = Plan.from_dict(made.to_dict())
    assert copied == made and copied.pace_layer_ms == 10
    assert copied.id != pipeline().id and "pace_layer_ms" not in pipeline().to_dict()
    with pytest.raises(PlanError, match="pace_layer_ms is -1"):
        replace(made, pace_layer_ms=-1)


def test_measured_collectives_and_passes_are_used() -> None:
    """A slower all-gather affects only the gathering of parameters; a pass's overhead counts once per pass."""
    links = {name: Link(0, 1) for name in ("ib", "roce", "ethernet")}
    base = pipeline(costs=Costs(paced(links=links), 10))
    gather = pipeline(costs=Costs(paced(links={**links, "roce.all_gather": Link(0, 0.25)}), 10))
    assert base.predicted and gather.predicted
    assert gather.predicted.breakdown["param_sync_s"] > base.predicted.breakdown["param_sync_s"]
    assert gather.predicted.breakdown["compute_s"] == pytest.approx(base.predicted.breakdown["compute_s"])
    fast, slow = (pipeline(costs=Costs(replace(paced(pass_s=s), pace_layer_ms=None))).predicted for s in (0.0, 0.002))
    assert fast and slow
    assert slow.breakdown["compute_s"] == pytest.approx(fast.breakdown["compute_s"] + 2 * base.micro_batches * 0.002)


def test_pipelines_inside_a_node_have_only_local_edges() -> None:
    """Check hierarchical pipelines of two stages of two chunks on a node's two GPUs.
    The edge from the last stage back to the first stays in the node."""
    gpus = replace(small_testbed(), pools=tuple(replace(f, gpus_per_node=2) for f in small_testbed().pools[:2]))
    made = best_plan(
        TINY,
        BATCH,
        gpus,
        PlanOptions(strategy="hierarchical-dp", tp=1, pp=2, dp=4, virtual_stages=2, nodes={"ib-a": 2, "roce-a": 2}),
        Costs(),
    )
    layout = Layout.of(made, Costs())
    assert {layout.edges[replica][s].kind for replica in range(2) for s in range(2)} == {"local"}
    edges = [g for g in made.transports() if g.kind == "edge"]
    assert {g.transport.kind for g in edges} == {"local"}


def test_optimizer_instances_overlap_reduction_only_on_gpus() -> None:
    """Megatron-Core overlaps by CUDA streams; on CPUs, all reduction follows the last backward pass."""
    site = replace(small_testbed(), pools=tuple(replace(f, gpus_per_node=2) for f in small_testbed().pools[:2]))
    options = {
        "strategy": "hierarchical-dp",
        "tp": 1,
        "pp": 2,
        "dp": 4,
        "virtual_stages": 2,
        "nodes": {"ib-a": 2, "roce-a": 2},
    }
    cpu = plan(site, **options)
    d = timing(Layout.of(cpu, Costs()), layer_array(cpu)).replicas[0]
    assert (d.tail == d.reduce).all() and (d.tail[:, :, 0] > 0).all() and not d.tail[:, :, 1:].any()
    gpus = plan(replace(site, pools=tuple(replace(f, gpu=A100) for f in site.pools)), **options)
    d = timing(Layout.of(gpus, Costs()), layer_array(gpus)).replicas[0]
    assert (d.tail <= d.reduce).all() and (d.reduce[:, :, 1:] > 0).all()


def test_traffic_without_overlap_counts_completely() -> None:
    def times(**software: bool) -> Timing:
        costs = Costs(pace_layer_ms=10, software=Software(**software))
        made = pipeline(costs=costs, bucket_bytes=2_000_000)
        return timing(Layout.of(made, costs), layer_array(made))

    timings = times(), times(overlap_gather=False), times(overlap=False)
    both, gather, neither = (t.replicas[0] for t in timings)
    assert (both.tail < both.reduce).all() and (gather.tail == both.tail).all() and (neither.tail == both.reduce).all()
    # Without overlap, the optimizer gathers for all stages at once instead of each before its first pass.
    assert both.ready.all() and not gather.ready.any() and not neither.ready.any() and not timings[0].gather.any()
    assert (timings[1].gather > both.ready.sum(axis=2)).all() and (timings[2].gather == timings[1].gather).all()
    assert timings[1].after_reduction_s() - timings[0].after_reduction_s() == pytest.approx(timings[1].gather.max())


def test_unknown_keys_of_a_calibration_are_refused() -> None:
    with pytest.raises(Exception, match="unknown key 'link'; did you mean 'links'"):
        Calibration.from_dict({"link": {}})
    with pytest.raises(Exception, match="unknown link 'infiniband'"):
        Calibration.from_dict({"links": {"infiniband": {"latency_s": 0, "efficiency": 1}}})


def test_faster_ethernet_never_slows_a_pipeline_over_it() -> None:
    times = []
    for gbps in (5, 10, 25, 100, 400):
        made = plan(
            two_clusters(2, gbps),
            named("gpt_3_6b"),
            Batch(768, 4, 2048),
            tp=1,
            pp=2,
            dp=16,
            nodes={"ib-a": 2, "roce-a": 2},
        )
        assert made.predicted is not None
        times.append(made.predicted.step_time_s)
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]


@pytest.mark.parametrize("first", ["ib-a", "roce-a"])
@pytest.mark.parametrize("schedule", ["ahead", "1f1b"])
@pytest.mark.parametrize("rdma_gbps", [0.25, 0.05])
def test_the_slower_fabric_gets_the_last_stage(rdma_gbps: float, schedule: str, first: str) -> None:
    """The first stage does the last backward pass, during which the last stage's gradients travel.
    So the slower fabric gets the last stage in any order of the site, and the step is shorter than the other way
    round."""
    fabrics = [replace(f, rdma_gbps={"ib-a": 0.4, "roce-a": rdma_gbps}[f.name]) for f in small_testbed().pools[:2]]
    site = replace(small_testbed(), pools=tuple(sorted(fabrics, key=lambda f: f.name != first)))
    options = PlanOptions(strategy="pipeline", nodes={"ib-a": 2, "roce-a": 2}, tp=1, pp=2, dp=2, schedule=schedule)
    costs, batch = Costs(pace_layer_ms=10), Batch(64, 2, 64)
    made = best_plan(TINY, batch, site, options, costs)
    assert [stage.fabric for stage in made.stages] == ["ib-a", "roce-a"]
    reduce = timing(Layout.of(made, costs), layer_array(made)).replicas[0].reduce[0].sum(axis=1)
    events = timeline(made, costs)
    ends = [max(e["end_s"] for e in events if e["stage"] == s and e["kind"] == "backward") for s in (0, 1)]
    assert ends[0] > ends[1] and reduce[0] < reduce[1]
    swapped = best_plan(TINY, batch, site, replace(options, pool_order=("roce-a", "ib-a")), costs)
    assert [stage.fabric for stage in swapped.stages] == ["roce-a", "ib-a"]
    assert made.predicted and swapped.predicted and made.predicted.step_time_s < 0.99 * swapped.predicted.step_time_s


def test_stage_transfers_wait_for_gradients_only_on_a_shared_nic() -> None:
    for transport in ("holmes", "single"):
        layout = Layout.of(pipeline(transport=transport), Costs())
        d = timing(layout, layer_array(pipeline())).replicas[0]
        assert (d.last_up[0, 1] > d.up[0, 1]) == (transport == "single")


def test_reductions_of_later_chunks_share_a_nic_with_the_last_transfers() -> None:
    """While the second chunk's gradients are reduced, those of a group of micro-batches (2) are received."""
    made = pipeline(schedule="interleaved", virtual_stages=2)
    for transport, transfers in (("holmes", 0), ("single", 2)):
        layout = Layout.of(replace(made, transport_mode=transport), Costs(pace_layer_ms=100))
        d, count = timing(layout, layer_array(made)).replicas[0], parameters(layout, layer_array(made))
        alone_s = d.tail - transfers * d.up[:, :, None] * np.array([0, 1])
        assert alone_s[0, :, 1] / count[0, :, 1] == pytest.approx(alone_s[0, :, 0] / count[0, :, 0], rel=0.01)


@pytest.mark.parametrize(("depth", "received"), [(1, 1), (2, 2), (4, 4)])
def test_gathering_waits_for_received_micro_batches_on_its_nic(depth: int, received: int) -> None:
    """The delay covers the posted receives of the eager schedule, if both use one NIC."""
    costs = Costs(pace_layer_ms=10)
    for transport in ("holmes", "single"):
        base = pipeline(transport=transport, partition="uniform")
        megatron, eager = (
            timing(Layout.of(replace(base, schedule=Schedule(kind, depths)), costs), layer_array(base)).replicas[0]
            for kind, depths in (("1f1b", (2, 1)), ("ahead", (depth, 1)))
        )
        extra_s = (eager.ready - megatron.ready)[0, :, 0]
        assert extra_s[0] == 0
        assert extra_s[1] == pytest.approx(received * megatron.down[0, 0] if transport == "single" else 0)
        assert extra_s[1] < megatron.ready[0, 1, 0]


def test_the_timeline_contains_every_pass_and_ends_with_gradients() -> None:
    made, costs = pipeline(), Costs(pace_layer_ms=5)
    events = timeline(made, costs)
    for kind in ("forward", "backward"):
        passes = [(e["stage"], e["micro_batch"]) for e in events if e["kind"] == kind]
        assert sorted(passes) == [(s, m) for s in range(2) for m in range(4)]
    assert sum(e["kind"] == "send" for e in events) == 8
    assert max(events, key=lambda e: e["end_s"])["kind"] == "grad_sync"
    trace = chrome_trace(events)["traceEvents"]
    assert sum(e["ph"] == "X" for e in trace) == len(events)
    assert all(e["dur"] > 0 for e in trace if e["ph"] == "X")


def gpu_site(memory_gib: float) -> Site:
    gpu = replace(A100, memory_gib=memory_gib)
    return Site("one", (Pool("ib-a", NicType.IB, "p", 1, 8, 25, gpu, rdma_gbps=200),))


def test_weights_gradients_and_optimizer_take_megatrons_bytes() -> None:
    """In bf16, a parameter takes 2 + 4 bytes, and 12 more sharded over the data-parallel ranks."""
    made = plan(gpu_site(80), named("gpt_3_6b"), Batch(64, 1, 2048), tp=1, pp=1, dp=8)
    part = memory(Layout.of(made, Costs()), layer_array(made))
    size = counts.parameters(made.model)
    assert (part.weights + part.gradients)[0, 0] == pytest.approx(6 * size)
    assert part.optimizer[0, 0] == pytest.approx(12 / 8 * size)
    unsharded = memory(
        Layout.of(replace(made, parallel=replace(made.parallel, distributed_optimizer=False)), Costs()),
        layer_array(made),
    )
    assert unsharded.optimizer[0, 0] == pytest.approx(12 * size)


def test_stages_hold_the_activations_in_flight() -> None:
    """Under 1F1B over four stages, the first holds four times the activations of the last."""
    made = plan(gpu_site(80), named("gpt_3_6b"), Batch(64, 1, 2048), tp=2, pp=4, dp=1, layers_per_stage=[8, 7, 8, 7])
    activations = memory(Layout.of(made, Costs()), layer_array(made)).activations[0]
    assert activations[0] / activations[2] == pytest.approx(2, rel=0.01)
    assert activations[0] / activations[1] == pytest.approx(4 * 8 / (3 * 7), rel=0.01)


def test_sequence_parallel_and_recomputation_save_memory() -> None:
    model, batch = named("gpt3_175b"), Batch(1, 1, 2048)
    costs, gpu = Costs(software=Software(attention="softmax")), gpu_site(80).pools[0].gpu
    sizes = [
        layer_activation_bytes(LayerShape(model, batch, 8, parallel, recompute), costs, gpu)[0]
        for parallel, recompute in ((False, "none"), (True, "none"), (True, "selective"), (True, "full"))
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] == batch.tokens * 12288 * 2 / 8


def test_fsdp_shards_memory_and_sends_parameters_every_pass() -> None:
    """Under FSDP, a rank holds its shard of weights and gradients and gathers parameters for each micro-batch."""
    site = gpu_site(80)
    site = replace(site, pools=tuple(replace(f, nodes=4, gpus_per_node=2) for f in site.pools))
    made = plan(site, named("gpt_3_6b"), Batch(64, 1, 2048), tp=1, pp=1, dp=8)
    full, gradients = (Costs(software=Software(sharding=sharding)) for sharding in ("full", "gradients"))
    plain, full_fsdp, grad_fsdp = (memory(Layout.of(made, c), layer_array(made)) for c in (Costs(), full, gradients))
    assert (8 * full_fsdp.weights == plain.weights).all() and (8 * full_fsdp.gradients == plain.gradients).all()
    assert (grad_fsdp.weights == plain.weights).all() and (8 * grad_fsdp.gradients == plain.gradients).all()
    assert predict(made, full).step_time_s > predict(made, gradients).step_time_s


def test_unfused_modules_and_gathered_logits_take_more_memory() -> None:
    made = plan(gpu_site(80), named("llama2_7b"), Batch(64, 2, 2048), tp=2, pp=1, dp=4)
    sizes = [
        memory(Layout.of(made, Costs(software=Software(**settings))), layer_array(made)).total()[0, 0]
        for settings in (
            {},
            {"fused_norm": False},
            {"fused_elementwise": False},
            {"attention": "softmax"},
            {"attention": "unfused"},
            {"gathered_logits": True},
        )
    ]
    assert min(sizes[1:]) > sizes[0] and sizes[4] > sizes[3]


def test_out_of_memory_errors_name_stage_and_shortage() -> None:
    made = plan(gpu_site(20), named("gpt_7_5b"), Batch(64, 4, 2048), tp=1, pp=2, dp=4)
    layout, layers = Layout.of(made, Costs()), layer_array(made)
    assert not fits(layout, layers)[0]
    message = r"stage [01] needs .* GiB per GPU, but can use only 19\.2 GiB of the 20 GiB on a100-80gb"
    with pytest.raises(PlanError, match=message):
        check_memory(layout, layers)
    assert any("does not fit" in line for line in made.assumptions)
    assert not fits(layout, layers, max_gib=500)[0]  # a GPU has no more than its memory
    assert fits(layout, layers, max_gib=float("inf"))[0]


def test_a_model_too_large_for_the_site_names_the_shortage() -> None:
    with pytest.raises(PlanError, match=r"gpt3_175b does not fit: .* GiB per GPU, but can use only 76\.8 GiB"):
        best_plan(named("gpt3_175b"), Batch(1536, 4, 2048), gpu_site(80), PlanOptions(), Costs())


def test_partial_recomputation_lies_between_none_and_full() -> None:
    """Each further part (selective) or layer (full) costs time and saves memory.
    Parts with unknown times are refused."""

    def figures(recompute: str, **settings: object) -> tuple[float, float, float]:
        costs = Costs(software=Software(attention="softmax", **settings))  # type: ignore[arg-type]
        made = plan(gpu_site(80), named("gpt_7_5b"), Batch(32, 2, 2048), tp=2, pp=2, dp=2, recompute=recompute)
        predicted = predict(made, costs)
        flops = predicted.hardware_tflops_per_gpu * predicted.step_time_s
        return predicted.step_time_s, max(predicted.memory_bytes_per_gpu), flops

    rising = [
        figures("none"),
        figures("selective"),
        figures("selective", recompute_parts=("scores", "norms")),
        figures("selective", recompute_parts=("scores", "norms", "ffn")),
    ]
    blocks = [
        figures("none"),
        figures("full", recompute_layers=0),
        figures("full", recompute_layers=5),
        figures("full", recompute_layers=17),
        figures("full"),
    ]
    assert blocks[0] == pytest.approx(blocks[1], rel=0.02) and blocks[0][0] == pytest.approx(blocks[1][0])
    for less, more in (*pairwise(rising), *pairwise(blocks[1:])):
        assert more[0] > less[0] and more[1] < less[1] and more[2] >= (1 - 1e-12) * less[2]
    assert blocks[2][1] - blocks[4][1] == pytest.approx(13 / 18 * (blocks[1][1] - blocks[4][1]), rel=0.02)
    with pytest.raises(ConfigError, match="unknown part 'heads'"):
        Software(recompute_parts=("heads",))
    made = plan(gpu_site(80), named("gpt_7_5b"), Batch(32, 2, 2048), tp=2, pp=2, dp=2, recompute="selective")
    cpus = replace(made, site=replace(made.site, pools=tuple(replace(f, gpu=CPU) for f in made.site.pools)))
    with pytest.raises(ConfigError, match="recomputing norms is not supported"):
        predict(cpus, Costs(software=Software(recompute_parts=("norms",))))

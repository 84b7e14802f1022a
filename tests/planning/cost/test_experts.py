"""Costs of mixtures of experts: parameters, FLOPs, memory, all-to-all traffic, and the choice of EP."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import spawn
from sites import two_clusters

from holmes_hpc.config.model import Batch, Experts, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import CPU
from holmes_hpc.planning.cost import experts
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_flops, layer_parameters, model_flops_per_step, parameters
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import layer_activation_bytes, memory
from holmes_hpc.planning.cost.predict import kind_tflops, layer_array, predict
from holmes_hpc.planning.cost.software import Software
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import best_plan, fixed_plan
from holmes_hpc.planning.search.problem import expert_sizes

SITE = two_clusters(2)  # two fabrics of two nodes with eight GPUs
MODEL = ModelSpec(
    "moe", layers=8, hidden=1024, heads=8, vocab=32000, ffn=4096, kv_heads=8, experts=Experts(16, top_k=2, ffn=512)
)
BATCH = Batch(128, 1, 1024)


def plan(ep: int, tp: int = 1, **options: object) -> Plan:
    fields = {"pp": 2, "dp": 16 // tp, **options}
    return fixed_plan(MODEL, BATCH, SITE, PlanOptions(tp=tp, ep=ep, **fields), Costs())  # type: ignore[arg-type]


def test_a_token_uses_top_k_experts_and_the_router() -> None:
    dense = replace(MODEL, experts=Experts(), ffn=2 * 512)  # as wide as both experts of a token
    router = 16 * 1024
    assert layer_flops(MODEL, 1, 1024) - layer_flops(dense, 1, 1024) == 2 * router
    one_expert = 3 * 1024 * 512
    assert layer_parameters(MODEL) - layer_parameters(dense) == 14 * one_expert + router
    assert layer_parameters(MODEL) - layer_parameters(MODEL, expert_ranks=4) == 12 * one_expert
    assert layer_parameters(MODEL, 2) - layer_parameters(MODEL, 2, 4) == 12 * one_expert  # TP does not split experts
    assert parameters(MODEL) > 2 * parameters(dense)


def test_shared_experts_compute_every_token_and_are_split_by_tp() -> None:
    shared = replace(MODEL, experts=replace(MODEL.experts, shared=512))
    one = 3 * 1024 * 512  # as wide as one expert
    assert layer_flops(shared, 1, 1024) - layer_flops(MODEL, 1, 1024) == 2 * one
    assert layer_parameters(shared) - layer_parameters(MODEL) == one
    assert layer_parameters(shared, 2, 4) - layer_parameters(MODEL, 2, 4) == one // 2
    plans = [fixed_plan(m, BATCH, SITE, PlanOptions(tp=2, pp=2, dp=8, ep=2), Costs()) for m in (MODEL, shared)]
    (without, beside) = (predict(p, Costs()) for p in plans)
    assert beside.step_time_s > without.step_time_s
    sizes = [float(memory(Layout.of(p, Costs()), layer_array(p)).total().max()) for p in plans]
    assert sizes[1] > sizes[0]
    with pytest.raises(PlanError, match="3 ffn cannot be divided by TP 2"):
        fixed_plan(
            replace(MODEL, experts=replace(MODEL.experts, shared=3)),
            BATCH,
            SITE,
            PlanOptions(tp=2, pp=2, dp=8),
            Costs(),
        )


def test_memory_shards_experts_over_ep_and_their_optimizer_over_their_replicas() -> None:
    one, four = (Layout.of(plan(ep), Costs()) for ep in (1, 4))
    layers = layer_array(plan(1))
    parts = [memory(layout, layers) for layout in (one, four)]
    moved = 4 * 12 * 3 * 1024 * 512  # parameters of experts that EP 4 moves to other ranks, in four layers
    assert float((parts[0].weights - parts[1].weights)[0, 0]) == 2 * moved
    assert float((parts[0].gradients - parts[1].gradients)[0, 0]) == 4 * moved
    # an expert has 16 replicas at EP 1, which hold all 16 experts, and 4 at EP 4, which hold 4
    assert parts[0].optimizer == pytest.approx(parts[1].optimizer)
    assert (
        float(experts.optimizer_share(one, layers, experts.weights(one, layers).sum(axis=2))[0, 0])
        == 4 * 3 * 1024 * 512
    )


def test_ranks_that_split_each_expert_hold_and_exchange_as_much_as_with_whole_experts() -> None:
    whole, split = (plan(ep, ep_comm="allgather", etp=etp) for ep, etp in ((8, 1), (2, 4)))
    assert split.parallel.etp == 4 and plan(2, ep_comm="allgather").parallel.etp == 1
    parts = [memory(Layout.of(p, Costs()), layer_array(p)) for p in (whole, split)]
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(parts[0], name).tolist() == getattr(parts[1], name).tolist()
    assert (parts[0].activations < parts[1].activations).all()  # each expert gets all of its tokens on four ranks
    amounts = [list(sent_bytes(Layout.of(p, Costs()), layer_array(p))) for p in (whole, split)]
    assert amounts[0] == amounts[1]
    assert predict(whole, Costs()).step_time_s < predict(split, Costs()).step_time_s  # by larger matrix products


def test_the_choice_is_as_fast_as_those_with_a_fixed_ep_or_pipeline() -> None:
    model, batch = named("qwen3_30b_a3b"), Batch(512, 1, 4096)

    def step_s(**options: int) -> float:
        made = best_plan(model, batch, SITE, PlanOptions(**options), Costs())  # type: ignore[arg-type]
        assert made.predicted is not None
        return made.predicted.step_time_s

    assert step_s() <= 1.005 * min(step_s(ep=8), step_s(pp=2), step_s(pp=8))


def test_experts_are_split_where_too_few_experts_remain_to_share() -> None:
    few = replace(MODEL, experts=Experts(2, top_k=1, ffn=2097152))
    options = PlanOptions(pp=2, ep_comm="allgather")
    made = best_plan(few, BATCH, SITE, options, Costs())
    assert (made.parallel.ep, made.parallel.etp >= 4) == (2, True)
    with pytest.raises(PlanError, match="does not fit"):
        best_plan(few, BATCH, SITE, replace(options, etp=1), Costs())
    assert expert_sizes(replace(few, experts=Experts(8, 2, ffn=512)), options, 16) == [(n, 1) for n in (1, 2, 4, 8)] + [
        (8, 2)
    ]
    assert expert_sizes(few, replace(options, etp=2), 6) == [(1, 2)]


@pytest.mark.parametrize(("ep", "nodes"), [(8, 1), (16, 2)])
def test_all_to_all_bytes_cross_nodes_only_if_a_group_does(ep: int, nodes: int) -> None:
    made = plan(ep)
    layout = Layout.of(made, Costs())
    sent = [(group, amount) for group, _, amount in sent_bytes(layout, layer_array(made)) if group.kind == "ep"]
    assert experts.ep_nodes(layout, layout.components[0]) == nodes
    if nodes == 1:
        assert not sent
        return
    # 8 of 16 ranks are on the other node: each gets 2 of 16 x 1024 tokens, forward and backward, in 4 layers
    per_micro_batch = 8 * 2 * 1024 / 16 * (2 * 1024 * 2 + 4)
    assert {amount for _, amount in sent} == {2 * 4 * 8 * per_micro_batch} and len(sent) == 32
    assert {group.transport.fabric for group, _ in sent} == {"ib-a", "roce-a"}
    once = Layout.of(made, Costs(software=Software(deduplicated=True)))  # a token's two experts are on 1.5 nodes
    fewer = {amount for group, _, amount in sent_bytes(once, layer_array(made)) if group.kind == "ep"}
    assert fewer == {0.75 * amount for _, amount in sent}
    assert (experts.exchange_s(once, 0) < 0.8 * experts.exchange_s(layout, 0)).all()


def test_an_all_gather_brings_every_token_to_all_ranks_of_a_ring() -> None:
    made = plan(16, ep_comm="allgather")
    layout = Layout.of(made, Costs())
    sent = [(rank, amount) for group, rank, amount in sent_bytes(layout, layer_array(made)) if group.kind == "ep"]
    assert sorted(rank for rank, _ in sent) == [0, 8, 16, 24]  # one rank of each node sends to the other node
    # 15 x 1024 tokens in half precision, probabilities, their map; results in fp32; forward and backward, in 4 layers
    token = 2 * 1024 + 4 * 16 + 4 * 1024
    assert {amount for _, amount in sent} == {4 * 8 * 15 * 1024 * (2 * token + 16)}
    again = Layout.of(plan(16, ep_comm="allgather", recompute="full"), Costs())
    (more,) = {amount for group, _, amount in sent_bytes(again, layer_array(made)) if group.kind == "ep"}
    assert more == 4 * 8 * 15 * 1024 * (3 * token + 2 * 16)
    assert (experts.exchange_s(layout, 0) > experts.exchange_s(Layout.of(plan(16), Costs()), 0)).all()
    assert plan(1, ep_comm="allgather").parallel.ep_comm == "alltoall"  # without an exchange
    buffers = [memory(Layout.of(p, Costs()), layer_array(p)).buffers for p in (made, plan(16))]
    assert (buffers[0] - buffers[1]).tolist() == [[16 * 1024 * 1024 * (2 + 4), 0]]  # not beside the logits


def test_no_byte_of_experts_crosses_fabrics() -> None:
    ethernet = [predict(made, Costs()).nic_bytes_per_step["ethernet"] for made in (plan(1), plan(16))]
    assert ethernet[0] == ethernet[1] > 0


def test_an_exchange_takes_longer_between_nodes_and_is_part_of_the_step() -> None:
    inside, across = (Layout.of(plan(ep), Costs()) for ep in (8, 16))
    assert experts.exchange_s(Layout.of(plan(1), Costs()), 0).tolist() == [0, 0]
    assert (experts.exchange_s(across, 0) > 4 * experts.exchange_s(inside, 0)).all()
    extra = 2 * 4 * 8 * float((experts.exchange_s(across, 0) - experts.exchange_s(inside, 0)).min())
    step_s = [predict(plan(ep, recompute="none"), Costs()).step_time_s for ep in (8, 16)]
    assert step_s[1] - step_s[0] > 0.5 * extra


def test_ep_is_searched_and_keeps_experts_inside_a_fabric() -> None:
    made = best_plan(MODEL, BATCH, SITE, PlanOptions(), Costs())
    assert made.predicted is not None and made.strategy != "hierarchical-dp" and not made.is_per_stage
    fabric_of = {p.name: p.fabric_name for p in SITE.pools}
    groups = [g for g in made.transports() if g.kind == "ep"]
    assert groups and all(len({fabric_of[made.places[r].pool] for r in g.ranks}) == 1 for g in groups)
    for ep in (1, 16):
        fixed = best_plan(MODEL, BATCH, SITE, PlanOptions(ep=ep), Costs())
        assert fixed.parallel.ep == ep and fixed.predicted is not None
        assert fixed.predicted.step_time_s >= made.predicted.step_time_s * (1 - 1e-9)


def test_a_model_that_fits_only_with_its_experts_shared_gets_a_large_ep() -> None:
    large = replace(MODEL, experts=Experts(16, top_k=2, ffn=131072))  # 6.4 G parameters of experts in a layer
    made = best_plan(large, BATCH, SITE, PlanOptions(pp=2, unequal="auto"), Costs())
    assert made.parallel.ep >= 4
    with pytest.raises(PlanError, match="does not fit"):
        best_plan(large, BATCH, SITE, PlanOptions(pp=2, ep=1), Costs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 3}, "EP 3 does not divide 16 experts"),
        ({"strategy": "hierarchical-dp"}, "experts do not support hierarchical data parallelism"),
        ({"schedule": "zero_bubble"}, "experts do not support zero_bubble"),
        ({"unequal": "true"}, "experts do not support per-stage TP/DP"),
        ({"tp": 1, "dp": 2, "ep": 4}, "EP 4 does not divide TP 1 x DP 2"),
        ({"tp": 2, "sequence_parallel": False}, "experts need sequence parallelism"),
    ],
)
def test_options_that_experts_exclude_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        best_plan(MODEL, BATCH, SITE, PlanOptions(**options), Costs())  # type: ignore[arg-type]


def test_a_dense_model_has_no_ep() -> None:
    with pytest.raises(PlanError, match="a model with experts"):
        best_plan(spawn.MODEL, BATCH, SITE, PlanOptions(ep=2), Costs())


def test_the_activations_of_experts_are_those_that_autograd_saves() -> None:
    """On a CPU, they were within 2% of what the hooks of autograd counted for six sizes."""

    def size(experts: Experts) -> float:
        shape = LayerShape(replace(MODEL, ffn=512, experts=experts, dropout=0.0), Batch(1, 1, 100))
        return layer_activation_bytes(shape, Costs(), CPU)[0] / 400

    dense, one, two = size(Experts()), size(Experts(16, 1)), size(Experts(16, 2))
    assert two - one == 1024 + 6 * 512 + 4
    assert one - (dense - 5 * 512) == 1024 + 6 * 512 + 4 + 1024 + 2.25 * 16


def test_joined_products_hold_the_first_matrices_and_their_gradients() -> None:
    model = replace(MODEL, swiglu=True, experts=Experts(8, top_k=2, ffn=48))
    two, eight = Parallel.uniform(dp=8, ep=2), Parallel.uniform(dp=8, ep=8)
    assert experts.joined_bytes(model, two, element=2) == 2 * 2 * 4 * 2 * 48 * model.hidden
    halves = replace(two, etp=2, ep_comm="allgather")  # of the width of four experts
    assert experts.joined_bytes(model, halves, element=2) == 2 * 4 * 2 * 48 * model.hidden
    assert experts.joined_bytes(model, eight, element=2) == 0  # one expert per rank
    assert experts.joined_bytes(model, two, element=4) == 0  # computed one after the other


def test_first_dense_layers_have_the_sizes_of_a_dense_model() -> None:
    dense = replace(MODEL, experts=replace(MODEL.experts, first_dense=2))
    expert, router, ffn = 3 * 1024 * 512, 16 * 1024, 3 * 1024 * 4096
    assert parameters(MODEL) - parameters(dense) == 2 * (16 * expert + router - ffn)
    steps = [model_flops_per_step(m, BATCH) for m in (MODEL, dense)]
    assert steps[1] - steps[0] == 3 * 2 * 2 * BATCH.tokens * (ffn - 2 * expert - router)
    options = PlanOptions(tp=1, pp=2, dp=16, ep=16, recompute="none", schedule="1f1b")
    with_experts, first_dense = (
        Layout.of(fixed_plan(m, BATCH, SITE, options, Costs()), Costs()) for m in (MODEL, dense)
    )
    layers = layer_array(plan(16))
    parts = [memory(layout, layers) for layout in (with_experts, first_dense)]
    assert (parts[1].weights - parts[0].weights)[0].tolist() == [2 * 2 * (ffn - expert - router), 0]
    shapes = [LayerShape(m, BATCH) for m in (MODEL, dense.dense)]
    gpu = SITE.pools[0].gpu
    held, backward = zip(*(layer_activation_bytes(shape, Costs(), gpu) for shape in shapes), strict=True)
    assert (parts[1].activations - parts[0].activations)[0].tolist() == pytest.approx([2 * 2 * (held[1] - held[0]), 0])
    assert (parts[1].buffers - parts[0].buffers)[0].tolist() == pytest.approx([backward[1] - backward[0], 0])
    assert backward[1] > backward[0]  # the widest layer decides
    calls = [
        {group.stages[0]: amount for group, _, amount in sent_bytes(layout, layers) if group.kind == "ep"}
        for layout in (with_experts, first_dense)
    ]
    assert calls[1] == {0: calls[0][0] / 2, 1: calls[0][1]}


def test_first_dense_layers_have_the_times_of_a_dense_model() -> None:
    dense = replace(MODEL, experts=replace(MODEL.experts, first_dense=2))
    options = PlanOptions(tp=1, pp=2, dp=16, ep=16, recompute="full", schedule="1f1b")
    seconds = []
    for model in (MODEL, dense, MODEL.dense):
        layout = Layout.of(
            fixed_plan(model, BATCH, SITE, replace(options, ep=16 if model.experts.count else 1), Costs()), Costs()
        )
        seconds.append(timing(layout, layer_array(plan(16))).replicas[0])
    of_experts, of_two, of_none = seconds
    for name in ("forward", "backward"):
        values = [getattr(d, name)[0, :, 0] for d in (of_experts, of_two, of_none)]
        assert values[1][0] == pytest.approx((values[0][0] + values[2][0]) / 2)  # two of the stage's four layers
        assert values[1][1] == pytest.approx(values[0][1]) and values[0][1] != pytest.approx(values[2][1])


def test_the_search_keeps_first_dense_layers_in_the_first_chunk() -> None:
    dense = replace(MODEL, ffn=64, experts=replace(MODEL.experts, first_dense=3))
    for options in (PlanOptions(), PlanOptions(pp=4), PlanOptions(pp=4, schedule="ahead")):
        made = best_plan(dense, BATCH, SITE, options, Costs())
        assert made.stages[0].chunks[0] >= 3 and made.stages[0].layers > 3
    with pytest.raises(PlanError, match=r"chunks of 3 layers, but experts.first_dense is 3"):
        best_plan(dense, BATCH, SITE, PlanOptions(pp=2, layers_per_stage=(3, 5)), Costs())
    with pytest.raises(PlanError, match=r"5 layers with experts cannot fill PP 6.*use at most 5 stages"):
        best_plan(dense, BATCH, SITE, PlanOptions(pp=6), Costs())


@pytest.mark.parametrize(
    ("first_dense", "pp", "partition", "layers"), [(3, 4, "uniform", [4, 2, 1, 1]), (6, 2, "proportional", [7, 1])]
)
def test_the_first_stage_has_all_dense_layers_in_every_partition(
    first_dense: int, pp: int, partition: str, layers: list[int]
) -> None:
    model = replace(MODEL, experts=replace(MODEL.experts, first_dense=first_dense))
    options = PlanOptions(tp=1, pp=pp, dp=32 // pp, partition=partition)
    made = fixed_plan(model, BATCH, SITE, options, Costs())
    assert [stage.layers for stage in made.stages] == layers


def test_first_dense_layers_count_in_the_tflops_of_a_gpu_kind() -> None:
    dense = replace(MODEL, experts=replace(MODEL.experts, first_dense=2))
    made = fixed_plan(dense, BATCH, SITE, PlanOptions(tp=1, pp=2, dp=16), Costs())
    assert made.predicted is not None
    tflops = kind_tflops(made, made.predicted.step_time_s)
    assert list(tflops.values()) == pytest.approx([made.predicted.model_tflops_per_gpu])


def test_experts_with_a_capacity_below_the_mean_compute_and_exchange_less() -> None:
    half = replace(MODEL, experts=replace(MODEL.experts, capacity=0.5))
    ample = replace(MODEL, experts=replace(MODEL.experts, capacity=1.5))
    options = PlanOptions(tp=1, pp=2, dp=16, ep=16)
    plans = [fixed_plan(m, BATCH, SITE, options, Costs()) for m in (MODEL, ample, half)]
    dropless, unused, halved = (predict(p, Costs()) for p in plans)
    assert dropless.step_time_s == unused.step_time_s > halved.step_time_s
    layouts = [Layout.of(p, Costs()) for p in (plans[0], plans[2])]
    sizes = [experts.bytes_to_each_rank(layout, layout.components[0], between_nodes=True) for layout in layouts]
    assert sizes[1] == sizes[0] / 2
    shapes = [LayerShape(m, BATCH) for m in (MODEL, ample, half)]
    held = [layer_activation_bytes(shape, Costs(), SITE.pools[0].gpu)[0] for shape in shapes]
    assert held[0] == held[1] > held[2]
    assert layer_flops(MODEL, 1, 1024) - layer_flops(half, 1, 1024) == 2 * 3 * 1024 * 512  # one expert of two


@pytest.mark.parametrize(("ep", "capacity", "load"), [(2, None, 1.5), (2, 1.25, 1.25), (2, 0.5, 1), (1, None, 1)])
def test_unequal_tokens_lengthen_products_and_exchanges_and_take_memory(
    ep: int, capacity: float | None, load: float
) -> None:
    made = plan(ep)
    made = replace(made, model=replace(made.model, experts=replace(made.model.experts, capacity=capacity)))
    equal, unequal = (Costs(software=Software(expert_imbalance=imbalance)) for imbalance in (1.0, 1.5))
    seconds, bytes_held = (
        [measure(Layout.of(made, costs)) for costs in (equal, unequal)]
        for measure in (lambda x: experts.exchange_s(x, 0)[0], lambda x: memory(x, layer_array(made)).total()[0, 0])
    )
    assert (seconds[1] > seconds[0]) == (bytes_held[1] > bytes_held[0]) == (load > 1)
    assert LayerShape(made.model, made.batch, ep=ep).expert_load(1.5) == load
    assert LayerShape(MODEL, BATCH, ep=ep).expert_load(1000) == ep  # one rank gets all tokens
    steps = [predict(made, costs).step_time_s for costs in (equal, unequal)]
    assert (steps[1] > steps[0]) == (load > 1)


def test_the_advice_knows_exchanges_between_nodes_and_keeps_ep() -> None:
    between, inside = ("\n".join(explain(plan(ep), Costs(), width=300)) for ep in (16, 8))
    assert "is waiting for exchanges of EP over NICs" in between and "exchanges of EP" not in inside
    assert "all RDMA twice as fast" in between
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 (and so on) share a layer's experts, on 1 node" in inside
    assert "ranks 0, 1, 2, …, 15 (and so on) share a layer's experts, on 2 nodes" in between
    (gain,) = re.findall(r"([+-][\d.]+)% samples/s  twice the nodes", between)
    assert 50 < float(gain) < 105

"""The calibration of one rank: train some steps, then measure the parts of a step, layers of other shapes, networks.

All ranks measure at the same time and as in training: with the plan's process groups and the model's layers (emulated
layers, if set). Rank 0 writes the results of each pool to ``calibration.yaml`` in the run directory.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import RunFailed
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPart, MeasuredPool
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.flops import part_flops
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.cost.timing import parameters
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.run import now
from holmes_hpc.training.calibration import networks
from holmes_hpc.training.loop import Trainer
from holmes_hpc.training.model import gpt
from holmes_hpc.training.network.exchange import exchange
from holmes_hpc.training.rank.failure import Watchdog
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.rank.signals import Signals
from holmes_hpc.training.session import Session, run_in_session

FILE = "calibration.yaml"
WARM_UP = 3  # steps, or passes through a layer
PART_REPEATS = 12
# Limits after the steps: of all optional measurements (the Ethernet between pools is the last), and of other shapes.
DEADLINE_S, SHAPES_S = 150.0, 75.0
MAX_TOKEN_RATIO = 4  # limit of another shape's tokens / the plan's, so that a layer fits into a stage's memory
PASS = "pass"  # name of the time that a pass takes beyond the sum of its parts
Rows = Sequence[dict[str, Any]]  # of each rank (:func:`build_calibration`), or lines of metrics.jsonl
Shape = tuple[int, int]  # micro-batch size, sequence length
Times = dict[tuple[str, Shape], tuple[float, float]]  # (name of a part or PASS, shape) -> seconds (forward, backward)


def measure(config: Configuration, unrecorded: Sequence[str] = ()) -> dict[str, Any]:
    """Measure as one rank of the plan. Return the calibration on rank 0, which writes it; {} on other ranks. See
    :func:`session.run_in_session` for failures and `unrecorded`."""
    return run_in_session(config, unrecorded, partial(_measure, config))


def _measure(config: Configuration, session: Session, watchdog: Watchdog, signals: Signals) -> dict[str, Any]:
    trainer, plan, rank = Trainer(config, session, watchdog), session.plan, session.launch.rank
    trainer.record_start()
    if trainer.run(signals).get("preempted"):
        raise RunFailed("a signal ended the calibration", where="calibrate", hint="run it again")
    log = log_line if rank == 0 else lambda text: None
    exchange_all = partial(exchange, session.store, member=rank, members=range(plan.world_size))
    watchdog.start_phase("measuring the parts of a step")
    log(f"measuring the parts of a step, then layers of other shapes for at most {SHAPES_S:.0f} s")
    deadline = networks.Deadline(trainer.control, DEADLINE_S)
    times = part_times(trainer, networks.Deadline(trainer.control, SHAPES_S))
    device = torch.cuda.get_device_name(session.device) if session.cuda else "cpu"
    rows = [[name, *shape, *seconds] for (name, shape), seconds in times.items()]
    ranks = exchange_all(name="measured/parts", value={"device": device, "times": rows})
    watchdog.start_phase("measuring the networks")
    log(f"measuring the networks; between pools only until {DEADLINE_S:.0f} s after the steps")
    rank_samples = exchange_all(name="measured/links", value=networks.measure_links(session, trainer.control, deadline))
    all_reduce_s = networks.all_reduce_s(trainer.control)
    trainer.close()
    written: dict[str, Any] = {}
    if rank == 0:
        samples = [networks.Sample(tuple(pools), *s) for rows in rank_samples for pools, *s in rows]
        written = _write_calibration(trainer, ranks, samples, all_reduce_s)
    session.close()
    return written


def part_times(trainer: Trainer, deadline: networks.Deadline) -> Times:
    """Return the median seconds of each part of this rank. All ranks call this. The parts are a transformer layer (in
    several shapes), the embedding, the head, and the rest of a pass (PASS)."""
    plan_shape = trainer.plan.batch.micro_size, trainer.plan.batch.sequence_length
    positions = torch.arange(plan_shape[1], device=trainer.session.device).repeat(plan_shape[0], 1)
    tokens = positions % trainer.plan.model.vocab
    times: Times = {}
    chunk_with_layers: Any = None
    data = trainer.batches(trainer.training, trainer.step)[0]
    for wrapped in trainer.models:
        if wrapped.ddp_config.overlap_param_gather:
            wrapped.disable_forward_pre_hook()
        model = gpt.unwrap(wrapped)
        hidden = gpt.hidden_states(torch.randn, trainer.model_config, *plan_shape, trainer.session.device)
        counts = {"layer": len(model.decoder.layers), "embedding": model.pre_process, "head": model.post_process}
        with wrapped.no_sync():
            if counts["layer"]:
                chunk_with_layers = wrapped
                times["layer", plan_shape] = _layer_s(trainer, model, plan_shape)
            if model.pre_process:
                times["embedding", plan_shape] = _passes_s(trainer, partial(model.embedding, tokens, positions), None)
            if model.post_process:
                times["head", plan_shape] = _passes_s(trainer, partial(_head, model, tokens), hidden)
            chunk = partial(_chunk, wrapped, data, model)
            chunk_s = _passes_s(trainer, chunk, None if model.pre_process else hidden)
            parts_s = [sum(n * times[part, plan_shape][i] for part, n in counts.items() if n) for i in (0, 1)]
            times[PASS, plan_shape] = (chunk_s[0] - parts_s[0], chunk_s[1] - parts_s[1])
    for shape in [] if trainer.settings.pace_layer_ms else other_shapes(trainer.plan):
        if not deadline.has_time_left():
            log_line(f"time limit reached: layers of {shape[0]} sequences of {shape[1]} tokens not measured")
            break
        if trainer.session.launch.rank == 0:
            log_line(f"measuring layers of {shape[0]} sequences of {shape[1]} tokens")
        if chunk_with_layers is not None:
            with chunk_with_layers.no_sync():
                times["layer", shape] = _layer_s(trainer, gpt.unwrap(chunk_with_layers), shape)
    return times


def other_shapes(plan: Plan) -> list[Shape]:
    """Return shapes other than the plan's, the most informative first. They have other micro-batch sizes or shorter
    sequences. Longer sequences could exceed the model's positions."""
    batch, p = plan.batch, plan.parallel
    micro, length, shapes = batch.micro_size, batch.sequence_length, list[Shape]()
    for sequence in (length, length // 2, length // 4):
        sizes = (1, 2 * micro, 4 * micro, micro // 2, 2) if sequence == length else (micro, 1, 4 * micro)
        shapes += [(size, sequence) for size in sizes]
    split, max_tokens = p.tp if p.sequence_parallel else 1, MAX_TOKEN_RATIO * micro * length
    return [
        (m, s)
        for m, s in dict.fromkeys(shapes)
        if m > 0 and s > 0 and s % split == 0 and (m, s) != (micro, length) and m * s <= max_tokens
    ]


def _chunk(wrapped: Any, data: Iterator[Any], model: Any, hidden: torch.Tensor | None) -> torch.Tensor:
    """Read a micro-batch and run a chunk's forward pass on it, as in training. Return the loss, or else the output."""
    if hidden is not None:
        model.set_input_tensor(hidden)
    output, loss = gpt.forward_step(data, wrapped)
    return loss(output)[0] if model.post_process else output


def _layer_s(trainer: Trainer, model: Any, shape: Shape) -> tuple[float, float]:
    """Return the median seconds of (forward, backward) of this rank's first layer."""
    layer, rotary = model.decoder.layers[0], model.rotary_pos_emb(shape[1]) if trainer.plan.model.rope else None

    def forward(hidden: torch.Tensor | None) -> torch.Tensor:
        return layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)[0]

    random = gpt.hidden_states(torch.randn, trainer.model_config, *shape, trainer.session.device)
    return _passes_s(trainer, forward, random)


def _head(model: Any, labels: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Compute final norm, logits and loss."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(model.decoder.final_layernorm(hidden), weight=weight)
    return model.compute_language_model_loss(labels, logits).float().mean()


def _passes_s(
    trainer: Trainer, forward: Callable[[torch.Tensor | None], torch.Tensor], hidden: torch.Tensor | None
) -> tuple[float, float]:
    """Return the median seconds of (forward, backward) after the warm-up. `hidden`: the input of `forward`."""
    times, (forward_timer, backward_timer) = [], map(trainer.breakdown, ("forward-compute", "backward-compute"))
    for _ in range(WARM_UP + PART_REPEATS):
        start = networks.synchronized_time()
        forward_timer.start()
        output = forward(hidden)
        forward_timer.stop()
        middle = networks.synchronized_time()
        backward_timer.start()
        output.backward(torch.ones_like(output))
        backward_timer.stop()
        times.append((middle - start, networks.synchronized_time() - middle))
    forward_s, backward_s = zip(*times[WARM_UP:], strict=True)
    return statistics.median(forward_s), statistics.median(backward_s)


def build_calibration(
    plan: Plan, ranks: Rows, fitted: networks.FittedLinks, steps: Rows, *, all_reduce_s: float, train: TrainConfig
) -> Calibration:
    """Return the calibration: each pool has the times and links of its own ranks. `ranks`: for each rank `device` and
    `times` (rows: name, micro size, sequence length, forward and backward seconds). `steps`: the lines of metrics.jsonl
    after warm-up. `all_reduce_s`: seconds of an all-reduce of one number."""
    links, optimizer_s, pools = networks.links_of_pools(fitted), _optimizer_s(plan, steps), []
    for name, pool_ranks in grouped((place.pool, rank) for rank, place in zip(ranks, plan.places, strict=True)):
        times = _median_times(pool_ranks)
        pass_times_s = [sum(seconds) / 2 for (part, _), seconds in times.items() if part == PASS]
        pass_s = max(0.0, *pass_times_s) if pass_times_s else None
        parts = tuple(_as_part(plan, *part, *seconds) for part, seconds in times.items() if part[0] != PASS)
        gpu, device = plan.site.pool(name).gpu.name, pool_ranks[0]["device"]
        pools.append(MeasuredPool(name, gpu, device, parts, links.get(name, {}), optimizer_s.get(name), pass_s))
    other_s = [statistics.mean(stage["other_s"] for stage in line["breakdown"]) for line in steps]
    step_s = all_reduce_s + statistics.median(other_s)
    made = f"{now()}, plan {plan.id}"
    calibration = Calibration(tuple(pools), (), train.pace_layer_ms, step_s, train.dtype, made)
    return replace(calibration, between=networks.links_between_fabrics(fitted, calibration, plan.site))


def _median_times(ranks: Rows) -> Times:
    """Return the median times of each part over the ranks that have this part."""
    rows = (row for rank in ranks for row in rank["times"])
    times = grouped(((name, (micro, sequence)), seconds) for name, micro, sequence, *seconds in rows)
    return {key: (statistics.median(f for f, _ in s), statistics.median(b for _, b in s)) for key, s in times}


def _as_part(plan: Plan, name: str, shape: Shape, forward_s: float, backward_s: float) -> MeasuredPart:
    m, p, tokens = plan.model, plan.parallel, math.prod(shape)
    flops, is_split = part_flops(m, name, tokens, shape[1], p.tp), p.sequence_parallel and p.tp > 1
    return MeasuredPart(name, m.hidden, tokens, p.tp, flops, forward_s, backward_s, shape[1], is_split)


def _optimizer_s(plan: Plan, steps: Rows) -> dict[str, float]:
    """Return, for each pool, the optimizer's seconds per parameter that a rank updates, on the pool's slowest stage. A
    stage with replicas in several pools counts for each of these pools, or for none if their GPUs differ."""
    p = plan.parallel
    shards = p.dp // p.optimizer_instances if p.distributed_optimizer else 1
    stage_parameters = parameters(Layout.of(plan, Costs()), layer_array(plan)).sum(axis=2)[0]
    slowest_s: dict[str, float] = {}
    for stage, count in enumerate(stage_parameters):
        pools = {c.pool for c in plan.components if stage in c.stages}
        if len({plan.site.pool(pool).gpu for pool in pools}) > 1:
            continue
        seconds = statistics.median(line["breakdown"][stage]["optimizer_s"] for line in steps)
        for pool in pools:
            slowest_s[pool] = max(slowest_s.get(pool, 0.0), seconds / (float(count) / shards))
    return slowest_s


def _write_calibration(
    trainer: Trainer, ranks: Rows, samples: list[networks.Sample], all_reduce_s: float
) -> dict[str, Any]:
    """Write and return the calibration. Log how well it reproduces the measured link times and step time."""
    train, plan, run = trainer.settings, trainer.plan, trainer.session.run
    fitted = networks.fit(samples)
    steps = [line for line in run.metrics() if line["step"] > min(WARM_UP, train.steps - 1)]
    calibration = build_calibration(plan, ranks, fitted, steps, all_reduce_s=all_reduce_s, train=train)
    for sample in samples:
        times = f"{sample.seconds:.6f} s, fit {networks.fitted_s(sample, fitted):.6f} s"
        log_line(f"{' - '.join(sample.pools)}, {sample.link}: {sample.description}: {times}")
    for pool in calibration.fabrics:
        by_device = replace(pool, gpu="", fabric="")  # so that has_gpu compares only the device's name
        if not by_device.has_gpu(plan.site.pool(pool.fabric).gpu):
            gpus = f"the site has GPU {pool.gpu}, but the device is {pool.device}"
            log_line(f"{pool.fabric}: {gpus}: correct the site")
    write_whole(Path(run.path, FILE), yaml.safe_dump(calibration.to_dict(), sort_keys=False))
    software = Software(**Software.facts_of(train, plan.transport_mode))
    predicted = predict(plan, Costs(calibration, train.pace_layer_ms, software=software)).step_time_s
    measured = statistics.median(line["step_time_s"] for line in steps)
    run.update_run(calibration={"step_time_s": measured, "predicted_step_time_s": predicted, "made": time.time()})
    log_line(f"step time: measured {measured:.4f} s, predicted from the measured parts {predicted:.4f} s")
    return calibration.to_dict()

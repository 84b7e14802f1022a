"""What each rank of `holmes calibrate` does: a few steps of training, then their parts one by one, then layers at other
micro-batch sizes and sequence lengths, then the networks.

Everything is timed where training does it: in the plan's own groups, with the model's own layers (paced ones wait here
too), all ranks at once. Rank 0 writes what came out, for each fabric by itself, as ``calibration.yaml`` into the run
directory. After the steps it takes no more than DEADLINE_S, since other shapes are left out when the time is up.
"""

from __future__ import annotations

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
from holmes_hpc.errors import RunFailed
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredFabric, MeasuredPart
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import part_flops
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.cost.timing import parameters
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.run import RunDirectory, now
from holmes_hpc.training import session
from holmes_hpc.training.calibration import networks
from holmes_hpc.training.loop import Trainer
from holmes_hpc.training.model import gpt
from holmes_hpc.training.network.rendezvous import exchange
from holmes_hpc.training.rank.failure import Watchdog
from holmes_hpc.training.rank.log import say
from holmes_hpc.training.rank.signals import Signals
from holmes_hpc.training.session import Session

FILE = "calibration.yaml"
WARM_UP = 3  # of steps, of passes through a layer
REPEATS = 12
DEADLINE_S, SHAPES_S = 150.0, 75.0  # of what may be left out: all, and of it other shapes
LARGER = 4  # times a micro-batch's tokens that another shape has at most: one layer of it fits where a stage does
PASS = "pass"  # what a pass takes beyond its parts
Shape = tuple[int, int]  # micro-batch size, sequence length
Times = dict[tuple[str, Shape], tuple[float, float]]  # of a part, or PASS: seconds (forward, backward)


def measure(config: Configuration, unrecorded: Sequence[str] = ()) -> dict[str, Any]:
    """Measure as one rank of the plan; return what rank 0 wrote (on rank 0).

    See :func:`session.as_rank` for failures and `unrecorded`.
    """
    return session.as_rank(config, unrecorded, partial(_measure, config))


def _measure(config: Configuration, here: Session, watchdog: Watchdog, signals: Signals) -> dict[str, Any]:
    trainer, plan, rank = Trainer(config, here, watchdog), here.plan, here.launch.rank
    trainer.record_start()
    if trainer.run(signals).get("preempted"):
        raise RunFailed("told to end before all was measured", where="calibrate", hint="start it again")
    log = say if rank == 0 else lambda text: None
    everyone = partial(exchange, here.store, member=rank, members=range(plan.world_size))
    watchdog.alive("measuring the parts of a step")
    log(f"measuring the parts of a step: other shapes of a layer for {SHAPES_S:.0f} s at most")
    deadline = networks.Deadline(trainer.control, DEADLINE_S)
    times = part_times(trainer, networks.Deadline(trainer.control, SHAPES_S))
    device = torch.cuda.get_device_name(here.device) if here.cuda else "cpu"
    rows = [[name, *shape, *seconds] for (name, shape), seconds in times.items()]
    ranks = everyone(name="measured/parts", value={"device": device, "times": rows})
    watchdog.alive("measuring the networks")
    log(f"measuring the networks: until {DEADLINE_S:.0f} s after the steps at most")
    samples = everyone(name="measured/links", value=networks.samples(here, trainer.control, deadline))
    meeting_s = networks.meeting_s(trainer.control)
    trainer.close()
    written: dict[str, Any] = {}
    if rank == 0:
        flat = [networks.Sample(tuple(fabrics), *s) for rows in samples for fabrics, *s in rows]
        written = _write(trainer, here.run, ranks, flat, meeting_s)
    here.close()
    return written


# -- the parts of a step ----------------------------------------------------------------------------------------------


def part_times(trainer: Trainer, deadline: networks.Deadline) -> Times:
    """This rank's median seconds of a transformer layer, in several shapes, and of the embedding and the head where it
    holds them. All ranks call it."""
    own = trainer.plan.batch.micro_size, trainer.plan.batch.sequence_length
    positions = torch.arange(own[1], device=trainer.here.device).repeat(own[0], 1)
    tokens = positions % trainer.plan.model.vocab
    times: Times = {}
    layered: Any = None
    data = trainer.batches(trainer.training, trainer.step)[0]
    for wrapped in trainer.models:
        if wrapped.ddp_config.overlap_param_gather:
            wrapped.disable_forward_pre_hook()
        model = gpt.inner(wrapped)
        counts = {"layer": len(model.decoder.layers), "embedding": model.pre_process, "head": model.post_process}
        with wrapped.no_sync():
            if counts["layer"]:
                layered = wrapped
                times["layer", own] = _layer_s(trainer, model, own)
            if model.pre_process:
                times["embedding", own] = _passes_s(partial(model.embedding, tokens, positions), None)
            if model.post_process:
                times["head", own] = _passes_s(partial(_head, model, tokens), _hidden(trainer, own))
            whole = _passes_s(
                partial(_whole, wrapped, data, model), None if model.pre_process else _hidden(trainer, own)
            )
            parts_s = [sum(n * times[part, own][way] for part, n in counts.items() if n) for way in (0, 1)]
            times[PASS, own] = (whole[0] - parts_s[0], whole[1] - parts_s[1])
    for shape in [] if trainer.settings.pace_layer_ms else other_shapes(trainer.plan):
        if not deadline.left():
            say(f"no time was left to measure layers of {shape[0]} sequences of {shape[1]} tokens")
            break
        if trainer.here.launch.rank == 0:
            say(f"layers of {shape[0]} sequences of {shape[1]} tokens")
        if layered is not None:
            with layered.no_sync():
                times["layer", shape] = _layer_s(trainer, gpt.inner(layered), shape)
    return times


def other_shapes(plan: Plan) -> list[Shape]:
    """Shapes of a layer beside the plan's own, the most telling ones first: other micro-batch sizes, then shorter
    sequences (longer ones may be beyond the model's positions)."""
    batch, p = plan.batch, plan.parallel
    micro, long, wanted = batch.micro_size, batch.sequence_length, list[Shape]()
    for sequence in (long, long // 2, long // 4):
        sizes = (1, 2 * micro, 4 * micro, micro // 2, 2) if sequence == long else (micro, 1, 4 * micro)
        wanted += [(size, sequence) for size in sizes]
    split = p.tp if p.sequence_parallel else 1
    return [
        (m, s)
        for m, s in dict.fromkeys(wanted)
        if m > 0 and s > 0 and s % split == 0 and (m, s) != (micro, long) and m * s <= LARGER * micro * long
    ]


def _whole(wrapped: Any, data: Iterator[Any], model: Any, hidden: torch.Tensor | None) -> torch.Tensor:
    """A micro-batch through a model chunk as the loop does it, data and all."""
    if hidden is not None:
        model.set_input_tensor(hidden)
    output, loss = gpt.forward_step(data, wrapped)
    return loss(output)[0] if model.post_process else output


def _hidden(trainer: Trainer, shape: Shape) -> torch.Tensor:
    """A micro-batch's hidden states as this rank sees them: (sequence, micro size, hidden)."""
    p, (micro, sequence) = trainer.plan.parallel, shape
    length = sequence // (p.tp if p.sequence_parallel else 1)
    return torch.randn(
        length,
        micro,
        trainer.plan.model.hidden,
        device=trainer.here.device,
        dtype=trainer.model_config.params_dtype,
        requires_grad=True,
    )


def _layer_s(trainer: Trainer, model: Any, shape: Shape) -> tuple[float, float]:
    """Of this rank's first layer."""
    layer, rotary = model.decoder.layers[0], model.rotary_pos_emb(shape[1]) if trainer.plan.model.rope else None

    def forward(hidden: torch.Tensor | None) -> torch.Tensor:
        return layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)[0]

    return _passes_s(forward, _hidden(trainer, shape))


def _head(model: Any, labels: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Final norm, logits, loss."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(model.decoder.final_layernorm(hidden), weight=weight)
    return model.compute_language_model_loss(labels, logits).float().mean()


def _passes_s(
    forward: Callable[[torch.Tensor | None], torch.Tensor], given: torch.Tensor | None
) -> tuple[float, float]:
    """Median seconds of (forward, backward), warm-up left out."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        began = networks.moment()
        output = forward(given)
        between = networks.moment()
        output.backward(torch.ones_like(output))
        times.append((between - began, networks.moment() - between))
    forward_s, backward_s = zip(*times[WARM_UP:], strict=True)
    return statistics.median(forward_s), statistics.median(backward_s)


# -- what is written --------------------------------------------------------------------------------------------------


def calibration(
    plan: Plan,
    ranks: Sequence[dict[str, Any]],
    found: networks.Fitted,
    steps: Sequence[dict[str, Any]],
    *,
    meeting_s: float,
    dtype: str,
    pace_layer_ms: float | None,
) -> Calibration:
    """The record: of each fabric its own ranks' times and links. `ranks`: `device` and `times` (rows of name, micro
    size, sequence, forward and backward seconds) of each; `found`: the fitted links; `steps`: the lines of metrics of
    steps after warm-up; `meeting_s`: what it takes all ranks to sum up one number."""
    links, optimizer, fabrics = networks.of_fabrics(found), _optimizer_s(plan, steps), []
    for name in dict.fromkeys(place.fabric for place in plan.places):
        own = [rank for rank, place in zip(ranks, plan.places, strict=True) if place.fabric == name]
        times = _merged(own)
        passes = [sum(t) / 2 for (what, _), t in times.items() if what == PASS]
        fabrics.append(
            MeasuredFabric(
                name,
                plan.site.fabric(name).gpu.name,
                own[0]["device"],
                parts=tuple(_measured(plan, *part, *seconds) for part, seconds in times.items() if part[0] != PASS),
                links=links.get(name, {}),
                optimizer_s=optimizer.get(name),
                pass_s=max(0.0, *passes) if passes else None,
            )
        )
    other = statistics.median(statistics.mean(s["other_s"] for s in line["breakdown"]) for line in steps)
    made = Calibration(tuple(fabrics), (), pace_layer_ms, other + meeting_s, dtype, f"{now()}, plan {plan.id}")
    return replace(made, between=networks.between(found, made, plan.site))


def _merged(ranks: Sequence[dict[str, Any]]) -> Times:
    """Medians over the ranks that hold a part."""
    held: dict[tuple[str, Shape], list[tuple[float, float]]] = {}
    for rank in ranks:
        for name, micro, sequence, forward_s, backward_s in rank["times"]:
            held.setdefault((name, (micro, sequence)), []).append((forward_s, backward_s))
    return {
        key: (statistics.median(f for f, _ in rows), statistics.median(b for _, b in rows))
        for key, rows in held.items()
    }


def _measured(plan: Plan, name: str, shape: Shape, forward_s: float, backward_s: float) -> MeasuredPart:
    m, p, tokens = plan.model, plan.parallel, math.prod(shape)
    return MeasuredPart(
        name,
        hidden=m.hidden,
        tokens=tokens,
        tp=p.tp,
        flops=part_flops(m, name, tokens, shape[1], p.tp),
        forward_s=forward_s,
        backward_s=backward_s,
        sequence=shape[1],
        sequence_parallel=p.sequence_parallel and p.tp > 1,
    )


def _optimizer_s(plan: Plan, steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a parameter that a rank updates, by fabric: of its slowest stage. A stage whose replicas are in
    several fabrics counts for each of them, unless their GPUs are of several kinds."""
    p = plan.parallel
    shared = p.dp // p.optimizer_instances if p.distributed_optimizer else 1
    held = parameters(Layout.of(plan, Costs()), layer_array(plan)).sum(axis=2)[0]
    found: dict[str, float] = {}
    for stage, count in enumerate(held):
        fabrics = {c.fabric for c in plan.components if stage in c.stages}
        if len({plan.site.fabric(f).gpu for f in fabrics}) > 1:
            continue
        seconds = statistics.median(line["breakdown"][stage]["optimizer_s"] for line in steps)
        for fabric in fabrics:
            found[fabric] = max(found.get(fabric, 0.0), seconds / (float(count) / shared))
    return found


def _write(
    trainer: Trainer,
    run: RunDirectory,
    ranks: Sequence[dict[str, Any]],
    samples: list[networks.Sample],
    meeting_s: float,
) -> dict[str, Any]:
    train, plan = trainer.settings, trainer.plan
    found = networks.fit(samples)
    steps = [line for line in run.metrics() if line["step"] > min(WARM_UP, train.steps - 1)]
    made = calibration(
        plan, ranks, found, steps, meeting_s=meeting_s, dtype=train.dtype, pace_layer_ms=train.pace_layer_ms
    )
    for sample in samples:
        fitted_s = networks.fitted_s(sample, found)
        say(
            f"{' - '.join(sample.fabrics)}, {sample.link}: {sample.what}: {sample.seconds:.6f} s, by the fit"
            f" {fitted_s:.6f} s"
        )
    for fabric in made.fabrics:
        own = replace(fabric, gpu="", fabric="")
        if not own.has_gpu(plan.site.fabric(fabric.fabric).gpu):
            say(f"{fabric.fabric}: the site says {fabric.gpu}, and the device is {fabric.device}: correct the site")
    write_whole(Path(run.path, FILE), yaml.safe_dump(made.to_dict(), sort_keys=False))
    # what the planner now says of these very steps: how well its model holds here
    predicted = predict(plan, Costs(made, train.pace_layer_ms)).step_time_s
    measured = statistics.median(line["step_time_s"] for line in steps)
    run.update_run(calibration={"step_time_s": measured, "predicted_step_time_s": predicted, "made": time.time()})
    say(f"a step took {measured:.4f} s; from the measured parts it is {predicted:.4f} s")
    return made.to_dict()

"""What each rank of `holmes calibrate` does: a few steps of training, then their parts one by one, then the networks.

Everything is timed where training does it: in the plan's own groups, with the model's own layers (paced ones wait here
too), all ranks at once. Rank 0 writes what came out as ``calibration.yaml`` into the run directory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.errors import RunFailed
from holmes_hpc.planning.cost.calibration import Calibration, Measured
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import head_flops, layer_flops
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.cost.timing import parameters
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.run import RunDirectory, now
from holmes_hpc.training import session
from holmes_hpc.training.calibration import networks
from holmes_hpc.training.loop import Trainer
from holmes_hpc.training.rank import launch
from holmes_hpc.training.rank.failure import RankExit
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import RankLog, say
from holmes_hpc.training.rank.signals import Signals
from holmes_hpc.training.rank.watchdog import Watchdog, dump_stacks
from holmes_hpc.training.session import Session

FILE = "calibration.yaml"
WARM_UP = 3  # of steps, of passes through a layer
REPEATS = 12
Times = dict[str, tuple[float, float]]  # part -> seconds (forward, backward); pass: what is in no part, for each


def measure(config: Configuration, unrecorded: Sequence[str] = ()) -> dict[str, Any]:
    """Measure as one rank of the plan; what rank 0 wrote comes back there. Failures end the rank as they do in
    training: one line in the log and in exits/, the same exit code on every rank. `unrecorded`: see
    :func:`holmes_hpc.training.loop.train`."""
    own = launch.read()
    run = session.run_directory(config.run_dir)
    log, rank_exit = RankLog(run, own), RankExit(run, own)
    rank_exit.before_exit = dump_stacks
    watchdog = Watchdog(rank_exit, config.train.watchdog_s, speaks=own.rank == 0).start()
    try:
        session.tell_defaults(own, unrecorded)
        with Signals() as signals:
            made = _measure(config, own, run, rank_exit, watchdog, signals)
        rank_exit.ended("completed")
        return made
    except Exception as e:
        sys.exit(rank_exit.failed(e))
    finally:
        watchdog.stop()
        log.close()


def _measure(config: Configuration, own: Launch, run: RunDirectory, rank_exit: RankExit, watchdog: Watchdog,
             signals: Signals) -> dict[str, Any]:
    plan = Plan.read(config.plan_file or run.plan_path)
    here = session.start(config.train, own, plan, run, rank_exit)
    trainer = Trainer(config, here, watchdog)
    trainer.record_start()
    if trainer.run(signals).get("preempted"):
        raise RunFailed("told to end before all was measured", where="calibrate", hint="start it again")
    watchdog.alive("measuring the parts of a step")
    parts = _everyone(here, "parts", part_times(trainer))
    watchdog.alive("measuring the networks")
    samples = _everyone(here, "links", networks.samples(here, trainer.control))
    meeting_s = networks.meeting_s(trainer.control)
    trainer.close()
    made: dict[str, Any] = {}
    if own.rank == 0:
        flat = [networks.Sample(*s) for rows in samples for s in rows]
        made = _write(trainer, run, _merged(parts), flat, meeting_s)
    here.close()
    return made


def _everyone(here: Session, name: str, value: Any) -> list[Any]:
    """Every rank's `value` (plain data), in rank order."""
    here.store.set(f"measured/{name}/{here.launch.rank}", json.dumps(value))
    keys = [f"measured/{name}/{rank}" for rank in range(here.launch.world_size)]
    here.store.wait(keys)
    return [json.loads(text) for text in here.store.multi_get(keys)]


# -- the parts of a step ----------------------------------------------------------------------------------------------


def part_times(trainer: Trainer) -> Times:
    """This rank's median seconds of a transformer layer, and of the embedding and the head where it holds them."""
    shape = trainer.plan.batch
    positions = torch.arange(shape.sequence_length, device=trainer.here.device).repeat(shape.micro_size, 1)
    tokens = positions % trainer.plan.model.vocab
    times: Times = {}
    for wrapped in trainer.models:
        if wrapped.ddp_config.overlap_param_gather:
            wrapped.disable_forward_pre_hook()
        model = wrapped.module
        while not hasattr(model, "pre_process"):
            model = model.module
        with wrapped.no_sync():
            if len(model.decoder.layers):
                times["layer"] = _layer_s(trainer, model)
            if model.pre_process:
                times["embedding"] = _passes_s(partial(_embedding, model, tokens, positions), None)
            if model.post_process:
                times["head"] = _passes_s(partial(_head, model, tokens), _hidden(trainer))
            whole = _passes_s(partial(_whole, trainer, wrapped, model), None if model.pre_process else _hidden(trainer))
            held = len(model.decoder.layers)
            parts = [(held, times.get("layer", (0.0, 0.0)))]
            parts += [(1, times[name]) for name, there in (("embedding", model.pre_process),
                                                           ("head", model.post_process)) if there]
            times["pass"] = (whole[0] - sum(n * t[0] for n, t in parts), whole[1] - sum(n * t[1] for n, t in parts))
    return times


def _whole(trainer: Trainer, wrapped: Any, model: Any, hidden: torch.Tensor | None) -> torch.Tensor:
    """A micro-batch through a model chunk as the loop does it, data and all."""
    if hidden is not None:
        model.set_input_tensor(hidden)
    output, loss = trainer.forward_one(wrapped)
    made: torch.Tensor = loss(output)[0] if model.post_process else output
    return made


def _hidden(trainer: Trainer) -> torch.Tensor:
    """A micro-batch's hidden states as this rank sees them: (sequence, micro size, hidden)."""
    p, batch = trainer.plan.parallel, trainer.plan.batch
    length = batch.sequence_length // (p.tp if p.sequence_parallel else 1)
    return torch.randn(length, batch.micro_size, trainer.plan.model.hidden, device=trainer.here.device,
                       dtype=trainer.model_config.params_dtype, requires_grad=True)


def _layer_s(trainer: Trainer, model: Any) -> tuple[float, float]:
    """Of this rank's first layer."""
    layer, rotary = model.decoder.layers[0], None
    if trainer.plan.model.rope:
        rotary = model.rotary_pos_emb(trainer.plan.batch.sequence_length)

    def forward(hidden: torch.Tensor | None) -> torch.Tensor:
        output: torch.Tensor = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)[0]
        return output

    return _passes_s(forward, _hidden(trainer))


def _embedding(model: Any, tokens: torch.Tensor, positions: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = model.embedding(tokens, positions)
    return output


def _head(model: Any, labels: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Final norm, logits, loss."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    logits, _ = model.output_layer(model.decoder.final_layernorm(hidden), weight=weight)
    loss: torch.Tensor = model.compute_language_model_loss(labels, logits).float().mean()
    return loss


def _passes_s(forward: Callable[[torch.Tensor | None], torch.Tensor], given: torch.Tensor | None,
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


def _merged(parts: Iterable[dict[str, Sequence[float]]]) -> Times:
    """Medians over the ranks that hold a part."""
    rows = list(parts)
    found: Times = {}
    for name in ("layer", "embedding", "head", "pass"):
        held = [row[name] for row in rows if name in row]
        if held:
            found[name] = (statistics.median(r[0] for r in held), statistics.median(r[1] for r in held))
    return found


# -- what is written --------------------------------------------------------------------------------------------------


def calibration(plan: Plan, times: Times, found: networks.Links, steps: Sequence[dict[str, Any]], *, meeting_s: float,
                device: str, dtype: str, pace_layer_ms: float | None) -> Calibration:
    """The record, from the parts' seconds, the links, the lines of metrics of steps after warm-up, and what it takes
    all ranks to sum up one number."""
    m, batch, tp = plan.model, plan.batch, plan.parallel.tp
    tokens = batch.micro_size * batch.sequence_length
    flops = {"layer": layer_flops(m, tokens, batch.sequence_length), "embedding": float(tokens * m.hidden),
             "head": head_flops(m, tokens, tp)}
    parts = tuple(Measured(name, m.hidden, tokens, tp, flops[name], *times[name]) for name in flops if name in times)
    pass_s = max(0.0, sum(times.get("pass", (0.0, 0.0))) / 2)
    held = float(parameters(Layout.of(plan, Costs()), layer_array(plan)).sum(axis=2).max())
    updated = held / (plan.parallel.dp // plan.parallel.optimizer_instances
                      if plan.parallel.distributed_optimizer else 1)
    optimizer = statistics.median(max(s["optimizer_s"] for s in line["breakdown"]) for line in steps)
    other = statistics.median(statistics.mean(s["other_s"] for s in line["breakdown"]) for line in steps)
    return Calibration(device, pace_layer_ms, parts, found, optimizer / updated, pass_s, other + meeting_s, dtype,
                       f"{now()}, plan {plan.id}")


def _write(trainer: Trainer, run: RunDirectory, times: Times, samples: list[networks.Sample], meeting_s: float,
           ) -> dict[str, Any]:
    train, plan, here = trainer.settings, trainer.plan, trainer.here
    found = networks.fit(samples)
    steps = [line for line in run.metrics() if line["step"] > min(WARM_UP, train.steps - 1)]
    device = torch.cuda.get_device_name(here.device) if here.cuda else "cpu"
    made = calibration(plan, times, found, steps, meeting_s=meeting_s, device=device, dtype=train.dtype,
                       pace_layer_ms=train.pace_layer_ms)
    for sample in samples:
        fitted_s = networks.fitted_s(sample, found)
        say(f"{sample.link}: {sample.what}: {sample.seconds:.6f} s, by the fit {fitted_s:.6f} s")
    write_whole(Path(run.path, FILE), yaml.safe_dump(made.to_dict(), sort_keys=False))
    # what the planner now says of these very steps: how well its model holds here
    predicted = predict(plan, Costs(made, train.pace_layer_ms)).step_time_s
    measured = statistics.median(line["step_time_s"] for line in steps)
    run.update_run(calibration={"step_time_s": measured, "predicted_step_time_s": predicted, "made": time.time()})
    say(f"a step took {measured:.4f} s; from the measured parts it is {predicted:.4f} s")
    return made.to_dict()

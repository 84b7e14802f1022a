"""The training loop: how one process of a job meets the others, builds its part of the model, trains and records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.learning_rate import learning_rate
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.schedule.kinds import megatrons_own
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.records.logs import SPARSE_S, SPARSE_STEPS
from holmes_hpc.training import session, warm_up
from holmes_hpc.training.checkpoint.save_and_load import Checkpoints
from holmes_hpc.training.data.build import build_datasets, describe_data
from holmes_hpc.training.data.prefix import document_end
from holmes_hpc.training.data.samples import batches
from holmes_hpc.training.metrics import metrics_line
from holmes_hpc.training.metrics.breakdown import Breakdown, Trace, trace_timers
from holmes_hpc.training.model import attention, emulated_layers, gpt, optimizer, replica_check
from holmes_hpc.training.network import audit, nic_bytes, slow_links
from holmes_hpc.training.pipeline import eager_1f1b
from holmes_hpc.training.pipeline.point_to_point import Edges
from holmes_hpc.training.rank.failure import LONG, Watchdog
from holmes_hpc.training.rank.log import say
from holmes_hpc.training.rank.signals import AnyRank, ControlAllReduce, Signals
from holmes_hpc.training.rank.stragglers import Stragglers, work_of_stages
from holmes_hpc.training.session import Session

LINE_WAIT_S, LINE_WAIT = 0.02, 0.002  # at most so long, and such a part of a step, a step's line is waited for


def train(config: Configuration, unrecorded: Sequence[str] = ()) -> dict[str, Any]:
    """Train as one rank of the plan, recording into the run directory; return the last step's figures (on rank 0). See
    :func:`session.as_rank` for failures and `unrecorded`."""

    def work(here: Session, watchdog: Watchdog, signals: Signals) -> dict[str, Any]:
        trainer = Trainer(config, here, watchdog)
        trainer.record_start()
        final = trainer.run(signals)
        trainer.close()
        here.close()
        return final

    return session.as_rank(config, unrecorded, work)


class Trainer:
    """What one rank trains with: model chunks, optimizer, data, schedule."""

    def __init__(self, config: Configuration, here: Session, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.here, self.plan = here, here.plan
        pace_layer_ms = config.train.pace_layer_ms or here.plan.pace_layer_ms
        factors = config.train.pace_factors or here.plan.pace_factors
        self.stragglers = Stragglers(
            here.plan.parallel.stage_ranks,
            [n.node for n in here.nodes],
            *work_of_stages(here.plan, (factors or {}) if pace_layer_ms else None),
        )
        dtype = gpt.dtype_name(config.train.dtype, here.cuda)
        self.settings = replace(config.train, pace_layer_ms=pace_layer_ms, pace_factors=factors, dtype=dtype)
        train, plan, self.data = self.settings, here.plan, config.data
        self.breakdown = Breakdown(here.cuda)
        torch.manual_seed(train.seed)
        pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        model_parallel_cuda_manual_seed(train.seed + 100 * pipeline_rank)  # dropout differs between stages

        watchdog.setting_up("looking at the data")
        self.training, self.validation = build_datasets(config.data, train, plan, config.run_dir)
        self.document_end = document_end(config.data)
        chosen = config.checkpoint
        chunks = self._build_model(pipeline_rank, None if chosen else train.seed)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.edges = eager_1f1b.communicator(
            plan, here.groups.edge, here.launch.rank, self.groups, self.model_config, here.device
        )
        self.trace = Trace(here.run.trace_path(here.launch.rank), pipeline_rank) if train.trace else None
        self.forward_backward = eager_1f1b.forward_backward(plan, self.trace)
        if self.trace is not None and not eager_1f1b.runs_in_background(plan):
            order = Order(megatrons_own(len(self.models)).name, plan.parallel.pp, plan.micro_batches, len(self.models))
            trace_timers(self.breakdown, self.trace, order.passes(pipeline_rank))
        everyone = range(plan.world_size)
        self.control = here.groups.new(everyone, "control", gloo=True) if here.cuda else torch.distributed.group.WORLD
        self.checkpoints = Checkpoints(
            here.run.checkpoints,
            plan,
            self.models,
            self.optimizer,
            attempt=here.attempt,
            keep=train.checkpoint_keep,
            background=train.checkpoint_async,
            group=self.control,
            checkpoint_dir=train.checkpoint_dir,
        )
        watchdog.setting_up("loading the checkpoint, where there is one")
        self.step = self.checkpoints.load(chosen)
        if chosen and here.attempt == 1 and self.step >= train.steps:
            raise ConfigError(
                f"it stands at step {self.step}, and train.steps is {train.steps}",
                where=f"checkpoint {chosen}",
                hint="train.steps counts from step 0: raise it",
            )
        if here.cuda:
            watchdog.setting_up("warming up")
            warm_up.connect(self.groups, here.device)
            warm_up.local_passes(self.models, self.model_config, plan.batch, here.device)
        watchdog.setting_up("comparing the replicas' weights")
        replica_check.check(chunks, plan.model.tied, here.groups.embedding_group)
        self.control_flags = ControlAllReduce(self.control)
        self.loggers = metrics_line.Loggers(train, here.run) if here.launch.rank == 0 else None
        self.nic_log = nic_bytes.NicLog(here.run.nics, here.launch.node, here.attempt)
        self.final: dict[str, Any] = {}
        self._gathering: metrics_line.Gathering | None = None
        # what warns of NICs, links and nodes that are slow, from every rank's row of a step
        self._monitors: list[Callable[[list[torch.Tensor]], Iterable[object]]] = []
        self._alone = False  # nothing but the step's traffic since the step before, and no connections are made
        self._said = 0.0
        self._saved_at = 0  # the step whose state was saved last
        self._pause_s = 0.0  # between the last two steps: validation, checkpoint

    def _build_model(self, pipeline_rank: int, seed: int | None) -> list[Any]:
        """Build this rank's model chunks and optimizer; return the bare chunks. `seed`: None for saved weights."""
        here, plan, train = self.here, self.plan, self.settings
        self.watchdog.setting_up("building the model")
        dtype = gpt.dtype_of(train.dtype, here.cuda)
        self.model_config = gpt.transformer_config(
            plan, dtype, cuda=here.cuda, fp8=train.fp8, timers=self.breakdown, stage=pipeline_rank
        )
        attention.refuse_unfused(plan, here.launch.rank, here.device, dtype, self.document_end is not None)
        attention.refuse_apart(self.document_end, here.cuda)
        chunks = gpt.build(plan, self.model_config, seed, here.device)
        if train.pace_layer_ms:
            factor = emulated_layers.factor(
                train.pace_factors or {},
                [(n.fabric, n.node) for n in here.nodes],
                here.launch.rank,
                [fabric.name for fabric in plan.site.fabrics],
            )
            emulated_layers.pace((chunk.decoder.layers for chunk in chunks), factor * train.pace_layer_ms)
        self.models = optimizer.wrap(chunks, self.model_config, plan, train)
        self.optimizer = optimizer.build(
            self.models, self.model_config, plan, train, self.breakdown, here.groups.embedding_group
        )
        optimizer.watch_waits(self.optimizer, self.models, self.breakdown)
        return chunks

    # -- the steps --------------------------------------------------------------------------------------------------

    def run(self, signals: Signals) -> dict[str, Any]:
        """All steps up to ``train.steps``, or until a signal asks for the end; then the state is saved."""
        batches = self.batches(self.training, self.step)
        self.here.traffic.take()
        self.breakdown.begin()
        began = time.perf_counter()
        while self.step < self.settings.steps:
            self.step += 1
            self.watchdog.alive(f"step {self.step}")
            losses, figures = self._one_step(batches)
            parts = self.breakdown.take()
            ended = time.perf_counter()
            step_time_s = ended - began
            self._record(losses, figures, step_time_s, parts)
            if self.trace is not None:
                self.trace.write(self.step)
            any_rank = self.control_flags.exchange(stop=signals.told is not None, writing=self.checkpoints.is_writing())
            if any_rank.stop and self.step < self.settings.steps:
                return self._stop_early()
            began = self._between_steps(any_rank, ended)
            if self._gathering is not None and self._gathering.ready(min(LINE_WAIT_S, LINE_WAIT * step_time_s)):
                self._finish_record()  # else after the next step: no stage waits for a slower one to tell its figures
        self._finish_record()
        self.control_flags.finish()
        self._settle()
        return self.final

    def _between_steps(self, any_rank: AnyRank, ended: float) -> float:
        """Run validation and checkpointing if due; return the start time of the next step."""
        began, interval = time.perf_counter(), self.settings.checkpoint_interval
        self.watchdog.alive(f"what follows step {self.step}")
        if self.settings.eval_interval and self.step % self.settings.eval_interval == 0:
            self._evaluate()
        if self.checkpoints.has_unfinished_save:  # a step after a save nobody has said anything of it yet
            asked = self.step == self._saved_at + 1
            if not (self.checkpoints.is_any_rank_writing() if asked else any_rank.writing):
                self._settle()
        if interval and (self.step % interval == 0 or self.step == self.settings.steps):
            self._save()
        self._pause_s = time.perf_counter() - began
        if self._pause_s < 1e-3:
            self._pause_s = 0.0
            return ended
        self.breakdown.begin()
        return time.perf_counter()

    def _save(self, wait: bool = False) -> None:
        """Save the state after this step. Its line of the metrics comes first: a resumed run starts after it."""
        self._finish_record()
        self.watchdog.alive(f"saving the state after step {self.step}", LONG)
        self._saved_at = self.step
        self.checkpoints.save(self.step, {"loss": self.final.get("loss")}, wait)
        self.watchdog.alive(f"what follows step {self.step}")

    def _settle(self) -> None:
        self.watchdog.alive("the end of saving", LONG)
        self.checkpoints.finish_save()
        self.watchdog.alive(f"what follows step {self.step}")

    def _stop_early(self) -> dict[str, Any]:
        """A signal asked for the end: save, so that the run can go on from here."""
        self.control_flags.finish()
        if self.here.launch.rank == 0:
            say(f"stopping after step {self.step} as asked by a signal")
        self._save(wait=True)
        return {**self.final, "preempted": True}

    def _one_step(self, batches: list[Iterator[Any]]) -> tuple[list[float], dict[str, Any]]:
        """Forward and backward of all micro-batches, then the optimizer."""
        rate = learning_rate(self.step, self.settings)
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.breakdown.part("pipeline_wait_s"):  # what is neither computing nor one of the other parts
            stored = self._forward_backward(batches, forward_only=False)
        optimizer.set_options(self.optimizer, self.settings, rate)
        with self.breakdown.part("optimizer_s"):
            updated, norm, _ = self.optimizer.step()
        norm = None if norm is None else float(norm)  # with some Transformer Engines a tensor
        losses = torch.stack(stored).tolist() if stored else []
        optimizer.check_numbers(self.optimizer, self.step, losses, updated, norm)
        rare = {"skipped": not updated, "pause_before_s": self._pause_s}
        return losses, {"grad_norm": norm, "learning_rate": rate, **{k: v for k, v in rare.items() if v}}

    def _forward_backward(self, batches: list[Iterator[Any]], forward_only: bool) -> list[torch.Tensor]:
        """Mean losses of the micro-batches, on the first TP rank of the last stage; on the device, not waited for."""
        stored = self.forward_backward(
            forward_step_func=partial(gpt.forward_step, masked=self.document_end is not None),
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=self.plan.micro_batches,
            seq_length=self.plan.batch.sequence_length,
            micro_batch_size=self.plan.batch.micro_size,
            forward_only=forward_only,
            p2p_communicator=self.edges,
            pg_collection=self.groups,
        )
        if not stored or parallel_state.get_tensor_model_parallel_rank() != 0:
            return []
        return [entry["loss"] for entry in stored]

    def batches(self, dataset: Any, start_step: int) -> list[Iterator[Any]]:
        """Return the micro-batches from `start_step` on, as each model chunk gets them."""
        rank = parallel_state.get_data_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return [
            batches(dataset, self.plan, rank, start_step, self.here.device, self.document_end, stage)
            for _ in self.models
        ]

    def _evaluate(self) -> None:
        """The mean loss of `train.eval_steps` validation batches, into the line of the step before it."""
        if self.validation is None:
            return
        batches = self.batches(self.validation, 0)
        losses: list[float] = []
        for chunk in self.models:
            chunk.eval()
        with torch.no_grad():
            for number in range(self.settings.eval_steps):
                self.watchdog.alive(f"validation {number + 1} after step {self.step}")
                stored = self._forward_backward(batches, forward_only=True)
                losses += torch.stack(stored).tolist() if stored else []
        self.watchdog.alive(f"what follows step {self.step}")
        for chunk in self.models:
            chunk.train()
        if self.trace is not None:
            self.trace.forget()
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.control)
        loss = float(total[0] / total[1])
        if self._gathering is not None:
            self._gathering.more["validation_loss"] = loss  # of the step whose line is not written yet
        self._finish_record()
        if self.here.launch.rank == 0:
            say(f"step {self.step}: validation loss {loss:.4f}")

    # -- the record -------------------------------------------------------------------------------------------------

    def record_start(self) -> None:
        """Into run.yaml: hosts, NICs, versions, set-up traffic and the header factor."""
        here, plan = self.here, self.plan
        self.watchdog.setting_up("counting what the networks add to a byte")
        session.tell_groups(here)
        setup = self._gather_all(here.traffic.take())
        factors = nic_bytes.header_factors(
            plan, here.launch.rank, here.traffic, partial(here.groups.new, gloo=True), self._gather_all, here.cuda
        )
        calibration = self._gather_all(here.traffic.take())
        if here.launch.rank > 0:
            return
        setup_bytes = nic_bytes.sum_by_kind(
            plan, [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(setup, calibration, strict=True)]
        )
        here.run.update_run(
            **session.describe(here),
            pace_layer_ms=self.settings.pace_layer_ms,
            traffic={
                "setup": setup_bytes,
                "header_factor": round(statistics.fmean(factors.values()), 4) if factors else None,
                "header_factors": {k: round(v, 4) for k, v in factors.items()},
            },
        )
        if not here.nodes[0].one_host:
            nics = audit.Audit(plan, here.nodes, factors, self.settings.dtype)
            links = slow_links.slow_link_detector(plan, here.nodes, factors, self.settings.dtype)
            self._monitors += [
                lambda rows: nics.add(metrics_line.nic_rows(rows), self._alone),
                lambda rows: links.add(metrics_line.part_by_rank(rows, "grad_sync_s")) if self._alone else (),
            ]
        self._monitors.append(lambda rows: self.stragglers.step(metrics_line.part_by_rank(rows, "compute_s")))
        for kind, factor in factors.items():
            say(
                f"{kind}: {factor:.3f} bytes on the wire per byte sent"
                + (" (RDMA: not measured)" if here.cuda and kind != "ethernet" else "")
            )
        say(describe_data(self.data, self.training, plan, self.settings.steps))
        say(
            f"plan {plan.id}: {plan.spread}, {plan.parallel}, layers {[s.layers for s in plan.stages]}, "
            f"{plan.micro_batches} micro-batches, {plan.schedule.kind}"
            + (f"; paced: {self.settings.pace_layer_ms} ms a layer" if self.settings.pace_layer_ms else "")
        )

    def _gather_all(self, row: tuple[float, ...]) -> list[list[float]]:
        own = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.plan.world_size)]
        torch.distributed.all_gather(rows, own, group=self.control)
        return [r.tolist() for r in rows]

    def _record(
        self, losses: list[float], figures: dict[str, Any], step_time_s: float, parts: dict[str, float]
    ) -> None:
        """Send this step's figures to rank 0; write those of the step before."""
        self._finish_record()
        here = self.here
        row = metrics_line.rank_row(
            sum(losses), len(losses), step_time_s, parts, here.traffic.take(), metrics_line.peak_memory_bytes(here.cuda)
        )
        self.nic_log.add(self.step, here.traffic.by_nic)
        self._gathering = metrics_line.Gathering(
            row, here.launch.rank, self.plan.world_size, self.control, self.step, figures
        )
        self._alone = bool(self.final) and "pause_before_s" not in figures and not self.checkpoints.has_unfinished_save
        due = self.step % SPARSE_STEPS == 1 or time.monotonic() - self._said > SPARSE_S
        if here.launch.rank > 0 and due:
            self._said = time.monotonic()
            say(
                f"step {self.step}: {step_time_s:.3f} s, "
                + ", ".join(f"{name[:-2].replace('_', ' ')} {value:.3f}" for name, value in parts.items())
            )

    def _finish_record(self) -> None:
        done, self._gathering = self._gathering, None
        rows = done.finish() if done is not None else None
        if done is None or rows is None:
            return
        entry = metrics_line.metrics_line(self.plan, rows, done.step, done.when, done.more)
        entry["attempt"] = self.here.attempt
        self.here.run.append_metrics(entry)
        self.final = entry
        if self.loggers is not None:
            self.loggers.write(entry)
        for finding in (finding for monitor in self._monitors for finding in monitor(rows)):
            say(str(finding))
        every = self.settings.log_interval
        if done.step % every == 0 or done.step in (1, self.settings.steps) or time.monotonic() - self._said > 60:
            self._said = time.monotonic()
            self.watchdog.said()
            norm = entry["grad_norm"]
            say(
                f"step {done.step}/{self.settings.steps}: loss {entry['loss']:.4f}, grad norm "
                f"{norm if norm is None else format(norm, '.3f')}, {entry['step_time_s']:.3f} s, "
                f"{entry['samples_per_s']:.2f} samples/s, {entry['model_tflops_per_gpu']:.3g} model TFLOP/s per GPU"
            )

    def close(self) -> None:
        """Wait for what the edges still carry, and for the loggers."""
        self.nic_log.write()
        if isinstance(self.edges, Edges):
            self.edges.close()
        if self.loggers is not None:
            self.loggers.close()

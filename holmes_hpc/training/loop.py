"""The training loop of one rank: build its part of the model, train, validate, save checkpoints and record steps."""

import time
from collections.abc import Iterator, Sequence
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
from holmes_hpc.planning.plan.plan import early_step_of
from holmes_hpc.planning.schedule.kinds import megatron_kind
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.records.logs import SPARSE_S, SPARSE_STEPS
from holmes_hpc.training import run_start, warm_up
from holmes_hpc.training.build_model import build
from holmes_hpc.training.checkpoint.memory_copies import Copies
from holmes_hpc.training.checkpoint.save_and_load import Checkpoints
from holmes_hpc.training.data.build import build_datasets, describe_data
from holmes_hpc.training.data.prefix import document_end
from holmes_hpc.training.data.samples import batches
from holmes_hpc.training.metrics import metrics_line
from holmes_hpc.training.metrics.breakdown import Breakdown, Trace, trace_timers
from holmes_hpc.training.metrics.monitors import Monitors
from holmes_hpc.training.metrics.openmetrics import GpuFigures
from holmes_hpc.training.metrics.profiler import Profiler
from holmes_hpc.training.model import experts, gpt, optimizer, replica_check
from holmes_hpc.training.model.context_parallel import part_of
from holmes_hpc.training.model.early_step import EarlySteps
from holmes_hpc.training.network import nic_bytes
from holmes_hpc.training.network.destinations import Destinations
from holmes_hpc.training.pipeline import eager_1f1b
from holmes_hpc.training.pipeline.point_to_point import Edges
from holmes_hpc.training.rank.failure import LONG_PHASE, Watchdog
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.rank.signals import AnyRank, ControlAllReduce, Signals
from holmes_hpc.training.session import Session, run_in_session

GATHER_WAIT_S, GATHER_WAIT_SHARE = 0.02, 0.002  # wait for the metrics gather at most 20 ms and 0.2% of the step


def train(config: Configuration, unrecorded: Sequence[str] = ()) -> dict[str, Any]:
    """Train as one rank of the plan, and record the run in its directory. Rank 0 returns the last step's metrics.

    See :func:`run_in_session` for failures and `unrecorded`.
    """

    def train_in_session(session: Session, watchdog: Watchdog, signals: Signals) -> dict[str, Any]:
        trainer = Trainer(config, session, watchdog)
        trainer.record_start()
        last_metrics = trainer.run(signals)
        trainer.close()
        session.close()
        return last_metrics

    return run_in_session(config, unrecorded, train_in_session)


class Trainer:
    """The trainer of one rank: its model chunks, optimizer, data and schedule."""

    def __init__(self, config: Configuration, session: Session, watchdog: Watchdog) -> None:
        self.watchdog, self.session, self.plan = watchdog, session, session.plan
        pace_layer_ms = config.train.pace_layer_ms or session.plan.pace_layer_ms
        factors = config.train.pace_factors or session.plan.pace_factors
        dtype = gpt.dtype_name(config.train.dtype, session.cuda, session.plan)
        paces: dict[str, Any] = {"pace_layer_ms": pace_layer_ms, "pace_factors": factors}
        self.settings = replace(
            config.train, **paces, dtype=dtype, early_step=early_step_of(config.train, session.plan)
        )
        train, plan, self.data = self.settings, session.plan, config.data
        self.breakdown = Breakdown(session.cuda)
        torch.manual_seed(train.seed)
        pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
        model_parallel_cuda_manual_seed(train.seed + 100 * pipeline_rank)  # dropout differs between stages

        watchdog.start_set_up("opening the data")
        self.training, self.validation = build_datasets(config.data, train, plan, config.run_dir)
        self.document_end = document_end(config.data)
        checkpoint = config.checkpoint
        watchdog.start_set_up("building the model")
        built = build(session, train, self.breakdown, self.document_end, None if checkpoint else train.seed)
        self.model_config, chunks, self.weights, self.models, self.optimizer = built
        self.early_steps = EarlySteps(self.optimizer, self.models, train)
        self.expert_tokens = experts.TokenCounter(chunks)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.edges = eager_1f1b.communicator(session, self.groups, self.model_config)
        self.trace = Trace(session.run.trace_path(session.launch.rank), pipeline_rank) if train.trace else None
        self.forward_backward = eager_1f1b.forward_backward(plan, self.trace, self.weights)
        if self.trace is not None and not eager_1f1b.runs_in_background(plan):
            order = Order(megatron_kind(len(self.models)).name, plan.parallel.pp, plan.micro_batches, len(self.models))
            trace_timers(self.breakdown, self.trace, order.passes(pipeline_rank))
        world = torch.distributed.group.WORLD
        self.control = session.groups.new(range(plan.world_size), "control", gloo=True) if session.cuda else world
        self.control_flags = ControlAllReduce(self.control, session.groups.control_tree)
        waits = [self._finish_record, self.control_flags.wait]
        waits += [self.edges.settle] if isinstance(self.edges, Edges) else []
        rank, size = session.launch.rank, plan.world_size
        self.profiler = Profiler(train.profile, session.run.trace, rank, size, self.control, waits)
        self.checkpoints = Checkpoints(session, train, self.models, self.optimizer, self.control)
        watchdog.start_set_up("loading a checkpoint if there is one")
        self.copies = Copies.of(session, config, self.models, self.optimizer, self.control)
        self.step = (self.copies.load() if self.copies else 0) or self.checkpoints.load(checkpoint)
        has_all_steps = checkpoint and session.attempt == 1 and self.step >= train.steps
        problem = f"saved after step {self.step}, but train.steps is {train.steps}"
        hint = "raise train.steps, which counts the checkpoint's steps too"
        ConfigError.refuse(f"checkpoint {checkpoint}", (has_all_steps, problem, hint))
        if session.cuda:
            watchdog.start_set_up("warming up")
            warm_up.connect(self.groups, session.device)
            warm_up.local_passes(self.models, self.model_config, plan.parts, session.device, self.weights)
        watchdog.start_set_up("comparing weights between replicas")
        replica_check.check(chunks, plan.model.tied, session.groups.embedding_group)
        self._speeds = metrics_line.speeds_of(plan, train)
        self.loggers = metrics_line.Loggers(train, session.run) if session.launch.rank == 0 else None
        self.destinations = Destinations(session.plan, session.node_of_rank)
        self.gpu_figures = GpuFigures(session.device if session.cuda and train.openmetrics is not None else None)
        self.nic_log = nic_bytes.NicLog(session.run.nics, session.launch.node, session.attempt)
        self.last_metrics: dict[str, Any] = {}  # the latest metrics line, on rank 0
        self._gathering: metrics_line.Gathering | None = None
        self.monitors: Monitors | None = None  # set on rank 0 by :meth:`record_start`
        self._is_step_only = False  # True: no connection set-up, validation or checkpoint since the previous step
        self._logged_at = 0.0
        self._saved_step = self._rolled_back_step = 0
        self._losses: list[torch.Tensor] = []  # of the micro-batches of the current step
        self._pause_s = 0.0  # seconds of validation and checkpointing between the last two steps

    # -- the steps --------------------------------------------------------------------------------------------------

    def run(self, signals: Signals) -> dict[str, Any]:
        """Run the steps up to ``train.steps``, or save and stop early after a signal. Return the last metrics."""
        batches = self.batches(self.training, self.step)
        self.profiler.start_step(self.step + 1)
        self.session.traffic.take()  # drops the bytes of the set-up
        self.breakdown.begin()
        start = time.perf_counter()
        while self.step < self.settings.steps:
            self.step += 1
            self.watchdog.start_phase(f"step {self.step}")
            if isinstance(self.edges, Edges):
                self.edges.has_next_step = self.step < self.settings.steps
            any_rank = self._run_passes(batches)
            if self.early_steps.is_pending and not self._confirm_early_step():
                batches, start = self._roll_back(start), time.perf_counter()
                continue
            losses, fields = self._update(any_rank)
            parts = self.breakdown.take()
            step_time_s = (end := time.perf_counter()) - start
            self._record(losses, fields, step_time_s, parts)
            if self.trace is not None:
                self.trace.write(self.step)
            self.control_flags.start(
                stop=bool(signals.received), writing=self.checkpoints.is_writing(), copying=self._is_copying
            )
            if any_rank.stop and self.step < self.settings.steps:
                return self._stop_early()
            start = self._between_steps(any_rank, end)
            wait_s = min(GATHER_WAIT_S, GATHER_WAIT_SHARE * step_time_s)
            gathering = None if self.early_steps.is_pending else self._gathering
            if gathering is not None and gathering.ready(wait_s):
                self._finish_record()  # if not ready: after the next step, so that no stage waits for a slower stage
        self._finish_record()
        self.control_flags.finish()
        self._finish_checkpoint()
        return self.last_metrics

    def _between_steps(self, any_rank: AnyRank, step_end: float) -> float:
        """Run validation and checkpointing if due. Return the ``time.perf_counter`` at which the next step starts."""
        start, interval = time.perf_counter(), self.settings.checkpoint_interval
        self.watchdog.start_phase(f"finishing step {self.step}")
        if self.settings.eval_interval and self.step % self.settings.eval_interval == 0:
            self._evaluate()
        if self.checkpoints.has_unfinished_save:
            is_just_saved = self.step == self._saved_step + 1  # then the flags in `any_rank` precede the save
            if not (self.checkpoints.is_any_rank_writing() if is_just_saved else any_rank.writing):
                self._finish_checkpoint(may_fail=True)
        if interval and (self.step % interval == 0 or self.step == self.settings.steps):
            self._save(wait=self.step == self.settings.steps)
        if self.copies is not None and self.copies.is_due(self.step, any_rank.copying):
            self._finish_record()  # a run that continues after this step does not repeat it
            self.checkpoints.is_copied = self.copies.has_copied
            self.copies.start(self.step)
        self.profiler.start_step(self.step + 1)
        self._pause_s = time.perf_counter() - start
        if self._pause_s < 1e-3:
            self._pause_s = 0.0
            return step_end
        self.breakdown.begin()
        return time.perf_counter()

    def _save(self, wait: bool = False) -> None:
        """Save the state after this step. Write the step's metrics first, because a resumed run does not repeat it."""
        self._finish_record()
        self.watchdog.start_phase(f"saving the state after step {self.step}", LONG_PHASE)
        self._saved_step = self.step
        self.checkpoints.save(self.step, {"loss": self.last_metrics.get("loss")}, wait)
        self.watchdog.start_phase(f"finishing step {self.step}")

    def _finish_checkpoint(self, may_fail: bool = False) -> None:
        self.watchdog.start_phase("finishing the checkpoint", LONG_PHASE)
        self.checkpoints.finish_save(may_fail)
        self.watchdog.start_phase(f"finishing step {self.step}")

    def _stop_early(self) -> dict[str, Any]:
        """Save the state after a stop signal, so that the run can be resumed. Return the last metrics."""
        self.control_flags.finish()
        if self.session.launch.rank == 0:
            log_line(f"stopping after step {self.step} because of a signal")
        self._save(wait=True)
        return {**self.last_metrics, "preempted": True}

    def _run_passes(self, batches: list[Iterator[Any]]) -> AnyRank:
        """Run forward and backward passes, and store the micro-batches' losses. Return the previous step's flags."""
        for chunk in self.models:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.early_steps.start_passes()
        with self.breakdown.part("pipeline_wait_s"):  # excludes compute and the other parts that run inside it
            self._losses = self._forward_backward(batches, forward_only=False)
        return self.control_flags.finish()

    def _update(self, any_rank: AnyRank) -> tuple[list[float], dict[str, Any]]:
        """Run the optimizer. Return the micro-batches' losses and fields of the metrics line."""
        rate, copies = learning_rate(self.step, self.settings), self.copies
        optimizer.set_options(self.optimizer, self.settings, rate)
        is_state_used = any_rank.stop or (copies is not None and copies.is_due(self.step, any_rank.copying))
        is_early = not is_state_used and self.early_steps.may_take(self.step)
        with self.breakdown.part("optimizer_s"):
            if copies is not None:
                copies.wait_until_read()
            updated, norm = self.early_steps.take() if is_early else optimizer.step(self.optimizer)
            if self.step < self.settings.steps:
                optimizer.start_gathers(self.models)
        losses = torch.stack(self._losses).tolist() if self._losses else []
        if not is_early:
            self.early_steps.add_norm(norm)
        optimizer.check_numbers(self.optimizer, self.step, losses, updated, norm)
        optional = {
            "skipped": not updated,
            "early_step": is_early,
            "rolled_back": self.step == self._rolled_back_step,
            "pause_before_s": self._pause_s,
        }
        return losses, {"grad_norm": norm, "learning_rate": rate, **{k: v for k, v in optional.items() if v}}

    def _confirm_early_step(self) -> bool:
        """Wait for the gradient norm of the previous step. Return whether its early optimizer step was right."""
        with self.breakdown.part("pipeline_wait_s"):
            norm, is_right = self.early_steps.confirm()
        assert self._gathering is not None  # the step's line waits for the norm
        self._gathering.fields["grad_norm"] = norm
        return is_right

    def _roll_back(self, start: float) -> list[Iterator[Any]]:
        """Restore the state before the previous step, whose early optimizer step was wrong. Return its batches.
        `start`: of this step. Metrics count the time of the discarded passes as a pause before the repeated step."""
        gathering, self._gathering = self._gathering, None
        assert gathering is not None
        gathering.finish()
        self.early_steps.undo()
        self._rolled_back_step, self.step = self.step - 1, self.step - 2
        if self.session.launch.rank == 0:
            norm = f"gradient norm is {gathering.fields['grad_norm']:.3f}"
            log_line(f"step {self._rolled_back_step} is repeated without an early optimizer step: its {norm}")
        for counts in (self.session.traffic, self.expert_tokens):
            counts.take()
        if self.trace is not None:
            self.trace.discard()
        self._pause_s = time.perf_counter() - start + gathering.step_time_s
        self.breakdown.begin()
        return self.batches(self.training, self.step)

    def _forward_backward(self, batches: list[Iterator[Any]], forward_only: bool) -> list[torch.Tensor]:
        """Run the schedule of one step. The last stage's first TP rank returns the micro-batches' losses, others []."""
        outputs = self.forward_backward(
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
        if not outputs or parallel_state.get_tensor_model_parallel_rank() != 0:
            return []
        return [output["loss"] for output in outputs]

    def batches(self, dataset: Any, start_step: int) -> list[Iterator[Any]]:
        """Return, for each model chunk, an iterator over this rank's micro-batches from `start_step` on."""
        rank, stage = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        device, end = self.session.device, self.document_end
        batches_of_chunks = (batches(dataset, self.plan, rank, start_step, device, end, stage) for _ in self.models)
        return [map(part_of, chunk_batches) for chunk_batches in batches_of_chunks]

    def _evaluate(self) -> None:
        """Compute the mean loss of `train.eval_steps` validation batches, and add it to this step's metrics line."""
        if self.validation is None:
            return
        batches = self.batches(self.validation, 0)
        losses: list[float] = []
        for chunk in self.models:
            chunk.eval()
        with torch.no_grad():
            for number in range(self.settings.eval_steps):
                self.watchdog.start_phase(f"validation {number + 1} after step {self.step}")
                stored_losses = self._forward_backward(batches, forward_only=True)
                losses += torch.stack(stored_losses).tolist() if stored_losses else []
        self.watchdog.start_phase(f"finishing step {self.step}")
        for chunk in self.models:
            chunk.train()
        if self.trace is not None:
            self.trace.discard()
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.control)
        loss = float(total[0] / total[1])
        if self._gathering is not None:
            self._gathering.fields["validation_loss"] = loss  # the step's line is not written yet
        self._finish_record()
        if self.session.launch.rank == 0:
            tokens = self.settings.eval_steps * self.plan.batch.tokens
            log_line(f"step {self.step}: validation loss {loss:.4f} over {tokens:,} tokens")

    # -- the record -------------------------------------------------------------------------------------------------

    def record_start(self) -> None:
        """Record the start of the run, and start the monitors on rank 0. All ranks call this."""
        self.watchdog.start_set_up("measuring header factors of the networks")
        data_text = describe_data(self.data, self.training, self.plan, self.settings.steps)
        factors = run_start.record(self.session, self.settings, self.control, data_text)
        if self.session.launch.rank == 0:
            self.monitors = Monitors(self.session, self.settings, factors, self.destinations, self.checkpoints)

    def _record(self, losses: list[float], fields: dict[str, Any], step_time_s: float, parts: dict[str, float]) -> None:
        """Write the previous step's metrics if they are pending. Start the gather of this step's metrics to rank 0."""
        self._finish_record()
        session, traffic = self.session, self.session.traffic
        nic, tokens, memory = traffic.take(), self.expert_tokens.take(), metrics_line.peak_memory_bytes(session.cuda)
        sent_and_gpu = [*self.destinations.row(session.launch.rank, traffic), *self.gpu_figures.read()]
        row = metrics_line.rank_row(sum(losses), len(losses), step_time_s, parts, nic, memory, sent_and_gpu, tokens)
        self.nic_log.add(self.step, traffic.by_nic)
        groups = self.control, session.groups.control_tree
        self._gathering = metrics_line.Gathering(
            row, session.launch.rank, self.plan.world_size, *groups, self.step, fields
        )
        has_paused = "pause_before_s" in fields or self.checkpoints.has_unfinished_save
        self._is_copying = self.copies is not None and (self.copies.is_busy or bool(session.run.metrics_file.waiting))
        self._is_step_only = bool(self.last_metrics) and not has_paused and not self._is_copying
        is_due = self.step % SPARSE_STEPS == 1 or time.monotonic() - self._logged_at > SPARSE_S
        if session.launch.rank > 0 and is_due:
            self._logged_at = time.monotonic()
            part_texts = (f"{name[:-2].replace('_', ' ')} {value:.3f}" for name, value in parts.items())
            log_line(f"step {self.step}: {step_time_s:.3f} s, {', '.join(part_texts)}")

    def _finish_record(self) -> None:
        """Wait for the pending gather, if any. Rank 0 writes its metrics line, and logs warnings and the step."""
        gathering, self._gathering = self._gathering, None
        rows = gathering.finish() if gathering is not None else None
        if gathering is None or rows is None:
            return
        step, interval, last_step = gathering.step, self.settings.log_interval, self.settings.steps
        if fabric_bytes := self.destinations.fabric_bytes(rows[:, metrics_line.SENT_COLUMNS]):
            gathering.fields["fabric_bytes"] = fabric_bytes
        entry = metrics_line.metrics_line(self.plan, rows, step, gathering.unix_time_s, gathering.fields, self._speeds)
        self.last_metrics = entry = {**entry, "attempt": self.session.attempt}
        self.session.run.append_metrics(entry, warn=log_line)
        if step % metrics_line.RANKS_EVERY == 1:
            self.session.run.append_ranks({**metrics_line.rank_line(rows, step), "attempt": self.session.attempt})
        if self.loggers is not None:
            self.loggers.write(entry)
        if self.monitors is not None:
            for warning in self.monitors.add(rows, entry, self._is_step_only):
                log_line(str(warning))
        if step % interval == 0 or step in (1, last_step) or time.monotonic() - self._logged_at > 60:
            self._logged_at = time.monotonic()
            self.watchdog.note_step_logged()
            log_line(metrics_line.log_text(entry, last_step))

    def close(self) -> None:
        """Write the rest of the NIC log and of a profile, wait for pending stage transfers, and close the loggers."""
        self.nic_log.finish()
        if self.copies is not None:
            self.copies.finish()
        self.profiler.close()
        if isinstance(self.edges, Edges):
            self.edges.close()
        if self.loggers is not None:
            self.loggers.close()
        if self.monitors is not None:
            self.monitors.close()

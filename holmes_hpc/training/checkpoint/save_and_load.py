"""Asynchronous, atomic checkpoints by Megatron-Core's dist_checkpointing, loadable under another layout.

The optimizer's state is saved per parameter (``fully_reshardable``), so a checkpoint does not depend on the layout.
checkpoint_directory.py defines which directories are checkpoints.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from holmes_hpc.config.hugging_face import folder_of
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import DataError, HolmesError, RunFailed
from holmes_hpc.records.files import DISK_FULL, is_full
from holmes_hpc.training.checkpoint import checkpoint_directory, optimizer_kinds, restricted_pickle, writer_process
from holmes_hpc.training.checkpoint.file_checksums import collect_checksums, find_damage
from holmes_hpc.training.model import gpt, megatron_versions
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.session import Session

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
}
POLL_S = 0.05
_OPTIMIZER_KEYS = {"distributed_optimizer": None, "optimizer_instances": None}  # no effect on dropout's random numbers
_ERRORS = (CheckpointingException, CheckpointException)


class Checkpoints:
    """The checkpoints of one run. All ranks call every method at the same step. `models`: DDP-wrapped model chunks;
    `group`: of all ranks, for small host tensors."""

    def __init__(self, session: Session, train: TrainConfig, models: Sequence[Any], optimizer: Any, group: Any) -> None:
        self.folder, self.plan, self.attempt = session.run.checkpoints, session.plan, session.attempt
        self._session, self.train, self._group = session, train, group
        self.models, self.optimizer = models, optimizer
        self._rank, self._device = dist.get_rank(), next(models[0].parameters()).device.type
        self._has_uniform_tp = len(self.plan.parallel.tps) == 1
        # DP replicas share the work of writing and reading, except if only some stages have replicas: the stages would
        # then run different collectives.
        self._shares_files = (
            self._has_uniform_tp and len({stage.copies > 1 for stage in self.plan.parallel.stages}) == 1
        )
        if self._rank == 0:
            checkpoint_directory.create_folder(self.folder, train.checkpoint_dir)
        self._calls, self._strategy = AsyncCallsQueue(), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        if self._shares_files:
            replicas = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
            self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, replicas, do_cache_distribution=True)
        self._save_start, self._unfinished = 0.0, self.folder
        self.saved_step = 0  # of the last checkpoint that this attempt loaded or, on rank 0, completed
        self.is_copied = False  # in memory
        filesystem_async._results_queue = writer_process.Results()  # Megatron-Core has no argument for its queue

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int, extra: Mapping[str, Any], wait: bool = False) -> None:
        """Start to save the state after `step`, once an earlier save is finished.
        With `wait`, or without `checkpoint_async`, return when the checkpoint is complete. `extra`: more fields of
        holmes.json. With `wait`, raise RunFailed on a full disk even if there is an earlier checkpoint."""
        self.finish_save(may_fail=True)
        if any(not inner.optimizer.state for inner in megatron_versions.inner_optimizers(self.optimizer)):
            if self._rank == 0:  # in fp16, while the loss scale is still too large
                log_line(f"step {step}: not saved, since the optimizer has applied no update yet")
            return
        self._save_start = time.perf_counter()
        for model in self.models:  # With this overlap, parameters are gathered only before the next forward pass.
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        path = self._unfinished = checkpoint_directory.unfinished_path(self.folder, step, self.attempt)
        try:
            self._run_on_rank_0(partial(_make_folder, path))
        except CheckpointException as e:
            self._fail(path, e, may_fail=not wait)
            return
        description = {
            "model": asdict(self.plan.model),
            "parallel": self.plan.parallel.to_dict(),
            "plan_id": self.plan.id,
            "distributed_optimizer": self.plan.parallel.distributed_optimizer,
            "device": self._device,
            **extra,
        }
        try:
            state = self._state(is_loading=False)
            request = megatron_versions.save(state, path, self._strategy, METADATA, self._has_uniform_tp)
            request.add_finalize_fn(lambda: self._finish(path, step, description))
            writer_process.start(self._calls, request, path, self._rank)
        except (OSError, RuntimeError, *_ERRORS) as e:
            raise self._failed_save(path, e) from e
        if wait or not self.train.checkpoint_async:
            self.finish_save(may_fail=not wait)

    def is_writing(self) -> bool:
        """Return whether this rank's writer is running."""
        calls = self._calls.async_calls
        process = calls[0].async_caller.process if calls else None
        return process is not None and process.is_alive()

    @property
    def has_unfinished_save(self) -> bool:
        """True from the start of a save until it has finished on all ranks."""
        return self._calls.get_num_unfinalized_calls() > 0

    def finish_save(self, may_fail: bool = False) -> None:
        """Wait for the save in progress and complete its checkpoint. `may_fail`: on a full disk only warn, if the state
        of an earlier step is in a checkpoint or in memory."""
        if not self.has_unfinished_save:
            return
        while self.is_any_rank_writing():  # A slow disk may take longer than the time-out of one collective.
            time.sleep(POLL_S)
        try:
            self._calls.maybe_finalize_async_calls(blocking=True)
        except _ERRORS as e:  # raised on all ranks
            self._fail(self.folder, e, may_fail)
        except (OSError, RuntimeError) as e:
            raise self._failed_save(self.folder, e) from e

    def _fail(self, path: Path, error: BaseException, may_fail: bool) -> None:
        """Raise the error of a failed save, or only warn: see :meth:`finish_save`. All ranks call this."""
        write_error = self._failed_save(path, error)
        is_disk_full = any(os.strerror(number) in str(write_error) for number in DISK_FULL)
        may_fail = may_fail and is_disk_full and (self.saved_step > 0 or self.is_copied)
        if self._any_rank(self._rank == 0 and not may_fail):
            raise write_error from error
        if self._rank == 0:
            log_line(f"warning: {write_error}; training goes on")

    def _failed_save(self, path: Path, error: BaseException) -> Exception:
        """Return the error of a failed save. Rank 0 removes the half-written checkpoint, which may fill the disk."""
        if self._rank == 0:
            write_error = _write_error(path, error)
            if not isinstance(error, RuntimeError) or is_full(self.folder):  # other RuntimeErrors: a rank was lost
                shutil.rmtree(self._unfinished, ignore_errors=True)
            return write_error
        if not getattr(error, "failures", True):  # torch gives the cause to rank 0 only, which reports it
            return RuntimeError("the checkpoint cannot be written, see rank 0's log")
        return _write_error(path, error)

    def is_any_rank_writing(self) -> bool:
        """Return whether the writer of any rank is running. All ranks call this."""
        return self._any_rank(self.is_writing())

    def _any_rank(self, is_true: bool) -> bool:
        flag = torch.tensor(int(is_true))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _finish(self, path: Path, step: int, description: Mapping[str, Any]) -> None:
        """Complete the checkpoint on rank 0, after all ranks have written. All ranks call this."""

        def complete() -> None:
            files = collect_checksums(path)
            checkpoint_directory.finish(path, step, description, files)
            checkpoint_directory.prune(self.folder, self.train.checkpoint_keep)
            self.saved_step = step
            size_mb, duration_s = sum(size for size, _ in files.values()) / 1e6, time.perf_counter() - self._save_start
            log_line(f"step {step}: checkpoint of {size_mb:.1f} MB saved in {duration_s:.2f} s")

        self._run_on_rank_0(complete)

    def _run_on_rank_0(self, task: Callable[[], None]) -> None:
        """Run `task` on rank 0. If it fails, all ranks raise a CheckpointException, as if a rank could not write."""
        failures = dict[int, Any]()
        if self._rank == 0:
            try:
                task()
            except (RunFailed, OSError, ValueError) as e:
                failures[0] = e, None
        if self._any_rank(bool(failures)):
            raise CheckpointException("write", failures)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, initial: str | None = None) -> int:
        """Load the run's latest intact checkpoint, or `initial` (a path, or ``hf:DIR``) if the run has none. Return its
        step; 0 if there is nothing to load, or only weights. Raise DataError for another model's checkpoint, and if all
        checkpoints of the run are damaged."""
        folder = folder_of(initial)
        paths = self._find_checkpoints(Path(initial) if initial and folder is None else None)
        first_problem = ""
        for path in paths:
            checkpoint = checkpoint_directory.wait_for_checkpoint(path)
            damage = self._find_damage(checkpoint)
            if damage is None:
                assert checkpoint is not None
                if checkpoint.description.get(checkpoint_directory.IMPORTED):
                    self._load_hugging_face(path)
                else:
                    saved_model = checkpoint.description.get("model", {})
                    checkpoint_directory.check_identity(saved_model, self.plan.model, str(checkpoint.path))
                    self._load(checkpoint)
                self.saved_step = checkpoint.step
                self._session.record_load("checkpoint", checkpoint.step)
                return checkpoint.step
            first_problem = first_problem or f"{path.name}: {damage}"
            if self._rank == 0:
                log_line(f"warning: checkpoint {path} is damaged ({damage}); trying an earlier one")
        if paths:
            hint = "restore one from a copy, or remove them and start again"
            raise DataError(f"all checkpoints are damaged ({first_problem})", where=str(paths[0].parent), hint=hint)
        if folder is not None:
            self._load_hugging_face(folder)
        self._session.record_load("nothing" if folder is None else "weights", 0)
        return 0

    def _load_hugging_face(self, path: Path) -> None:
        """Load the weights of a Hugging Face folder. The optimizer starts without moments.
        If one rank fails with a DataError, all ranks raise this error."""
        from holmes_hpc.training.checkpoint import hugging_face_folder  # needs safetensors, which is optional

        start, model = time.perf_counter(), self.plan.model
        chunks, rank = [gpt.unwrap(m) for m in self.models], parallel_state.get_tensor_model_parallel_rank()
        self._run_on_all_ranks(partial(hugging_face_folder.fill_model, path, model, chunks, rank))
        self.optimizer.reload_model_params()
        if self._rank == 0:
            config_copy = self.folder.parent / hugging_face_folder.CONFIG_COPY
            config_copy.mkdir(exist_ok=True)
            hugging_face_folder.copy_small_files(path, config_copy)
            log_line(f"loaded the weights in {path} in {time.perf_counter() - start:.1f} s")

    def _find_checkpoints(self, initial: Path | None) -> list[Path]:
        """Return the checkpoints that rank 0 finds, the latest first; `initial` if the run has none.
        Only rank 0 searches, because ranks could find different ones on a file system that shows changes late."""

        def search() -> list[Path]:
            checkpoint_directory.remove_unfinished(self.folder)
            for path, problem in checkpoint_directory.incomplete_checkpoints(self.folder):
                log_line(f"warning: checkpoint {path} is incomplete ({problem}); skipping it")
            paths = [checkpoint.path for checkpoint in checkpoint_directory.complete_checkpoints(self.folder)]
            return paths or ([] if initial is None else [checkpoint_directory.open_checkpoint(initial.absolute()).path])

        return self._run_on_all_ranks(search if self._rank == 0 else list)[0]

    def _find_damage(self, checkpoint: checkpoint_directory.Checkpoint | None) -> str | None:
        """Return the damage found by the lowest rank that finds any, or None. Each rank checks a share of the files."""

        def check_files() -> str | None:
            if checkpoint is None:
                return f"not visible on rank {self._rank}"
            damage = find_damage(checkpoint, self._rank, dist.get_world_size())
            if damage is None and self._rank == 0 and not checkpoint.description.get(checkpoint_directory.IMPORTED):
                return restricted_pickle.find_problem(checkpoint.path)
            return damage

        return next((damage for damage in self._run_on_all_ranks(check_files) if damage is not None), None)

    def _run_on_all_ranks(self, task: Callable[[], Any]) -> list[Any]:
        """Run `task`, which may take longer than the time-out of a collective, in a thread on each rank. Return the
        results of all ranks. If it fails, all ranks raise the HolmesError of the lowest failed rank."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(task)
            while self._any_rank(not future.done()):
                time.sleep(POLL_S)
        error = future.exception()
        results: list[Any] = [None] * dist.get_world_size()
        local_result = error if isinstance(error, HolmesError) else future.result()
        dist.all_gather_object(results, local_result, group=self._group)
        for result in results:
            if isinstance(result, HolmesError):
                raise result
        return results

    def _load(self, checkpoint: checkpoint_directory.Checkpoint) -> None:
        for inner in megatron_versions.distributed(self.optimizer):
            megatron_versions.prepare_for_loading(inner)
        description, p = checkpoint.description, self.plan.parallel
        saved, current = description.get("parallel", {}), json.loads(json.dumps(p.to_dict()))
        is_same_device = description.get("device", self._device) == self._device
        is_same_layout = is_same_device and {**saved, **_OPTIMIZER_KEYS} == {**current, **_OPTIMIZER_KEYS}
        state = self._state(is_loading=True, generators=is_same_layout)
        optimizer_state = None  # to be filled from a checkpoint of the other kind of optimizer
        if description.get("distributed_optimizer", p.distributed_optimizer) != p.distributed_optimizer:
            optimizer_state = state.pop("optimizer")
            fp32 = all(w.dtype == torch.float32 for model in self.models for w in model.parameters())
            state["tensors"] = optimizer_kinds.tensors_to_load(optimizer_state, fp32)
        try:
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            readers = replicas if self._shares_files else None
            loaded = megatron_versions.load(state, checkpoint.path, self._has_uniform_tp, readers)
            if optimizer_state is not None:
                optimizer_kinds.fill(optimizer_state, self.optimizer, loaded["tensors"], loaded["optimizer"])
                loaded["optimizer"] = optimizer_state
        except (Exception, CheckpointException) as e:  # untrusted input can cause any error
            problem = f"cannot be loaded: {restricted_pickle.error_message(_inner_error(e))}"
            hint = "resume with the optimizer it was saved with, or from an earlier checkpoint"
            raise DataError(problem, where=str(checkpoint.path), hint=hint) from e
        for index, model in enumerate(self.models):
            restricted_pickle.check_extra_states(loaded[f"model{index}"], str(checkpoint.path))
            model.module.load_state_dict(loaded[f"model{index}"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for inner in megatron_versions.distributed(self.optimizer):
            for values in inner.optimizer.state.values():
                if "step" in values:  # All parameters would share one tensor, and each would increment it.
                    values["step"] = values["step"].clone()
        if is_same_layout:
            gpt.set_generators(loaded["generators"])

    def _state(self, is_loading: bool, generators: bool = True) -> dict[str, Any]:
        metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state: dict[str, Any] = {
            f"model{i}": m.module.sharded_state_dict(metadata=metadata) for i, m in enumerate(self.models)
        }
        with megatron_versions.offsets_without_padding(self.optimizer):
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        if generators:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            position = self._generator_position()
            state["generators"] = ShardedObject("generators", gpt.generators(), *position, replica_id=replica)
        return state

    def _generator_position(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the grid of random generators, and this rank's position. DP replicas share generators."""
        p = self.plan.parallel
        stage, _, part = p.coordinates(self._rank)
        if self.plan.is_per_stage:  # stages of unequal TP form no grid
            offsets = [0, *accumulate(p.tp_of(s) for s in range(p.pp))]
            return (offsets[-1],), (offsets[stage] + part % p.tp_of(stage),)
        return (p.pp, p.tp), (stage, part)


def _inner_error(error: BaseException) -> Any:
    """Return the error of the first failed rank, which torch wraps in its own error; else `error`."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _make_folder(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if is_full(path):  # later, only some ranks would fail
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_error(path: Path, error: BaseException) -> RunFailed:
    """Return a RunFailed that reports any error of saving in one line. Torch hides a full disk in its own errors."""
    inner = _inner_error(error)
    if isinstance(inner, RunFailed):
        return inner
    if isinstance(inner, OSError):
        return checkpoint_directory.write_error(path, inner)
    if is_full(path if path.exists() else path.parent):
        return checkpoint_directory.write_error(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    problem = f"cannot write the checkpoint: {' '.join(str(inner).split())[:300]}"
    hint = "see this rank's log; `holmes resume` continues from the last good checkpoint"
    return RunFailed(problem, where=str(path), hint=hint)

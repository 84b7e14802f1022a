"""Checkpoints by Megatron-Core's dist_checkpointing: asynchronous, atomic, loadable under another layout.

The optimizer's state is saved per parameter (``fully_reshardable``), so a checkpoint belongs to the model and not to
the layout it was saved under. What makes a directory a checkpoint is in checkpoint_directory.py.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import threading
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
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from holmes_hpc.config.hugging_face import folder_of
from holmes_hpc.errors import DataError, HolmesError, RunFailed
from holmes_hpc.lifetime import end_with
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.checkpoint import checkpoint_directory, restricted_pickle
from holmes_hpc.training.model import gpt, megatron_versions
from holmes_hpc.training.rank.log import say

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
}
RESULT_WAIT_S = 30  # after the writer has ended
LOOK_S = 0.05  # while a save is waited for
_ERRORS = (CheckpointingException, CheckpointException)


class _Results:
    """How a writer's results come back to its rank: a pipe, and a thread that empties it. Megatron-Core's default, a
    manager, is one more process for every rank, which outlives a rank that is killed."""

    def __init__(self) -> None:
        self._pipe = multiprocessing.get_context("fork").SimpleQueue()
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._empty, name="checkpoint results", daemon=True).start()

    def _empty(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._arrived.put(self._pipe.get())

    def put(self, results: Any) -> None:
        self._pipe.put(results)

    def get_nowait(self) -> Any:
        return self._arrived.get(timeout=RESULT_WAIT_S)


class Checkpoints:
    """Saves and loads one run's training state.

    `models`: DDP-wrapped model chunks; `group`: of all ranks, for small host tensors; `elsewhere`: see
    :func:`checkpoint_directory.place`. All ranks call every method at the same step.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        models: Sequence[Any],
        optimizer: Any,
        *,
        attempt: int,
        keep: int,
        background: bool,
        group: Any,
        elsewhere: str | None = None,
    ) -> None:
        self.folder, self.plan, self.models, self.optimizer = folder, plan, models, optimizer
        self.attempt, self.keep, self.background, self._group = attempt, keep, background, group
        self._rank, self._device = dist.get_rank(), next(models[0].parameters()).device.type
        self._alike = len(plan.parallel.tps) == 1  # all stages cut their weights alike
        if self._rank == 0:
            checkpoint_directory.place(folder, elsewhere)
        self._calls = AsyncCallsQueue()
        self._began = 0.0
        filesystem_async._results_queue = _Results()

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int, more: Mapping[str, Any], wait: bool = False) -> None:
        """Save the state after `step`; in the background where configured, unless `wait`. One at a time."""
        self.settle()
        if any(not inner.optimizer.state for inner in megatron_versions.inner_optimizers(self.optimizer)):
            if self._rank == 0:  # in fp16, while the loss scale is still too large
                say(f"step {step}: no update has counted yet, so there is nothing to save")
            return
        self._began = time.perf_counter()
        for model in self.models:  # parameters that are gathered before the next forward pass only
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        path = checkpoint_directory.unfinished_path(self.folder, step, self.attempt)
        if self._rank == 0:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise checkpoint_directory.failed(path, e) from e
        dist.barrier(group=self._group)
        about = {
            "model": asdict(self.plan.model),
            "parallel": self.plan.parallel.to_dict(),
            "plan_id": self.plan.id,
            "distributed_optimizer": self.plan.parallel.distributed_optimizer,
            "device": self._device,
            **more,
        }
        try:
            request = megatron_versions.save(
                self._state(is_loading=False),
                path,
                TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
                METADATA,
                self._alike,
            )
            request = _with_checksums(request, path, self._rank)
            request.add_finalize_fn(lambda: self._finish(path, step, about))
            self._calls.schedule_async_request(request)
        except (OSError, RuntimeError, *_ERRORS) as e:
            raise _as_failure(path, e) from e
        if wait or not self.background:
            self.settle()

    def writing(self) -> bool:
        """Whether this rank's writer is still at work."""
        calls = self._calls.async_calls
        process = calls[0].async_caller.process if calls else None
        return process is not None and process.is_alive()

    @property
    def unsettled(self) -> bool:
        """Whether a save was begun and not yet finished on all ranks."""
        return self._calls.get_num_unfinalized_calls() > 0

    def settle(self) -> None:
        """Wait for the save that is under way, and make it count."""
        if not self.unsettled:
            return
        while self.writing_anywhere():  # in turns: one disk may be slower than a collective's time-out
            time.sleep(LOOK_S)
        try:
            self._calls.maybe_finalize_async_calls(blocking=True)
        except (OSError, RuntimeError, *_ERRORS) as e:
            raise _as_failure(self.folder, e) from e

    def writing_anywhere(self) -> bool:
        """Whether any rank's writer is; all ranks ask at the same time."""
        return self._anywhere(self.writing())

    def _anywhere(self, here: bool) -> bool:
        word = torch.tensor(int(here))
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self._group)
        return bool(word)

    def _finish(self, path: Path, step: int, about: Mapping[str, Any]) -> None:
        """Runs on all ranks when all have written."""
        if self._rank == 0:
            files = {}
            for part in sorted(path.glob(".crc-*.json")):
                files.update({k: tuple(v) for k, v in json.loads(part.read_text()).items()})
                part.unlink()
            for other in path.iterdir():
                files.setdefault(other.name, checkpoint_directory.checksum(other))
            checkpoint_directory.finish(path, step, about, files)
            checkpoint_directory.prune(self.folder, self.keep)
            say(
                f"step {step}: checkpoint of {sum(size for size, _ in files.values()) / 1e6:.1f} MB saved in "
                f"{time.perf_counter() - self._began:.2f} s"
            )

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, chosen: str | None = None) -> int:
        """Load the latest checkpoint of this run that is whole, or `chosen` (a path, or ``hf:DIR``) where it has none
        yet; its step comes back, 0 when there is neither.

        DataError for a checkpoint of another model, and when none of those there are is whole.
        """
        folder = folder_of(chosen)
        found = self._found(Path(chosen) if chosen and folder is None else None)
        problem = ""
        for path in found:
            checkpoint = checkpoint_directory.seen(path)
            damage = self._damage(checkpoint)
            if damage is None:
                assert checkpoint is not None
                if checkpoint.about.get(checkpoint_directory.IMPORTED):
                    self._begin_with(path)
                else:
                    saved = checkpoint.about.get("model", {})
                    checkpoint_directory.check_identity(saved, self.plan.model, str(checkpoint.path))
                    self._load(checkpoint)
                return checkpoint.step
            problem = problem or f"{path.name}: {damage}"
            if self._rank == 0:
                say(f"warning: checkpoint {path} is damaged ({damage}); looking for an earlier one")
        if found:
            raise DataError(
                f"no checkpoint is whole ({problem})",
                where=str(self.folder),
                hint="restore one from a copy, or remove them and start again",
            )
        if folder is not None:
            self._begin_with(folder)
        return 0

    def _begin_with(self, path: Path) -> None:
        """Weights of a Hugging Face folder; the optimizer's moments as at a first step. DataError on all ranks when one
        cannot read its own."""
        from holmes_hpc.training.checkpoint import hugging_face_folder  # needs safetensors, which no other run does

        began, model = time.perf_counter(), self.plan.model
        chunks, rank = [gpt.inner(m) for m in self.models], parallel_state.get_tensor_model_parallel_rank()
        self._everywhere(partial(hugging_face_folder.fill_model, path, model, chunks, rank))
        self.optimizer.reload_model_params()
        if self._rank == 0:
            kept = self.folder.parent / hugging_face_folder.KEPT  # config and tokenizer, for the run's exports
            kept.mkdir(exist_ok=True)
            hugging_face_folder.copy_small(path, kept)
            say(f"starts from the weights in {path}, read in {time.perf_counter() - began:.1f} s")

    def _found(self, chosen: Path | None) -> list[Path]:
        """Return what to load, the latest first: what rank 0 sees once it has cleaned up. It looks for all, for on a
        file system that shows changes late each rank might see something else."""
        return self._everywhere(partial(self._look, chosen))[0]

    def _look(self, chosen: Path | None) -> list[Path]:
        if self._rank > 0:
            return []
        checkpoint_directory.sweep(self.folder)
        for path, why in checkpoint_directory.passed_over(self.folder):
            say(f"warning: checkpoint {path} is not whole ({why}); it is passed over")
        found = [checkpoint.path for checkpoint in checkpoint_directory.complete(self.folder)]
        return found or ([] if chosen is None else [checkpoint_directory.at(chosen.absolute()).path])

    def _damage(self, checkpoint: checkpoint_directory.Checkpoint | None) -> str | None:
        """What any rank found wrong; every rank reads its share of the files, however long that takes."""

        def own() -> str | None:
            if checkpoint is None:
                return f"not to be seen by rank {self._rank}"
            found = checkpoint_directory.damage(checkpoint, self._rank, dist.get_world_size())
            pickled = not checkpoint.about.get(checkpoint_directory.IMPORTED)
            return (
                restricted_pickle.problem(checkpoint.path) if pickled and found is None and self._rank == 0 else found
            )

        return next((text for text in self._everywhere(own) if text is not None), None)

    def _everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """Return what `work`, in a thread, gives on each rank, however long it takes; the first rank's DataError is
        raised on all."""
        with ThreadPoolExecutor(1) as pool:
            doing = pool.submit(work)
            while self._anywhere(not doing.done()):
                time.sleep(LOOK_S)  # in turns: the files may be larger than a collective's time-out allows
        error = doing.exception()
        results: list[Any] = [None] * dist.get_world_size()
        own = error if isinstance(error, HolmesError) else doing.result()
        dist.all_gather_object(results, own, group=self._group)
        for result in results:
            if isinstance(result, HolmesError):
                raise result
        return results

    def _load(self, checkpoint: checkpoint_directory.Checkpoint) -> None:
        for inner in megatron_versions.distributed(self.optimizer):
            megatron_versions.prepare_for_loading(inner)
        same_layout = (
            checkpoint.about.get("parallel") == json.loads(json.dumps(self.plan.parallel.to_dict()))
            and checkpoint.about.get("device", self._device) == self._device
        )
        state = self._state(is_loading=True, generators=same_layout)
        try:
            loaded = megatron_versions.load(state, checkpoint.path, self._alike)
        except (Exception, CheckpointException) as e:  # what a stranger wrote ends in any error
            raise DataError(
                f"cannot be loaded: {restricted_pickle.line_of(_inner_error(e))}",
                where=str(checkpoint.path),
                hint="resume with the optimizer it was saved with, or from an earlier checkpoint",
            ) from e
        for index, model in enumerate(self.models):
            restricted_pickle.check_extra_states(loaded[f"model{index}"], str(checkpoint.path))
            model.module.load_state_dict(loaded[f"model{index}"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for inner in megatron_versions.distributed(self.optimizer):
            for values in inner.optimizer.state.values():
                if "step" in values:  # one tensor for all parameters, which each of them would count up
                    values["step"] = values["step"].clone()
        if same_layout:
            gpt.set_generators(loaded["generators"])

    def _state(self, is_loading: bool, generators: bool = True) -> dict[str, Any]:
        metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state: dict[str, Any] = {
            f"model{i}": m.module.sharded_state_dict(metadata=metadata) for i, m in enumerate(self.models)
        }
        with megatron_versions.offsets_without_padding(self.optimizer):
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        if generators:
            state["generators"] = ShardedObject(
                "generators",
                gpt.generators(),
                *self._place_of_generators(),
                replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            )
        return state

    def _place_of_generators(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many sets of generators there are that replicas share, and which one is this rank's."""
        p = self.plan.parallel
        stage, _, part = p.coordinates(self._rank)
        if self.plan.is_per_stage:  # no grid
            before = [0, *accumulate(p.tp_of(s) for s in range(p.pp))]
            return (before[-1],), (before[stage] + part,)
        return (p.pp, p.tp), (stage, part)


def _with_checksums(request: AsyncRequest, path: Path, rank: int) -> AsyncRequest:
    """The writer, in its own process, ends with its rank, and also notes the checksums of the files it wrote."""
    write, own_rank = request.async_fn, os.getpid()
    if write is None:
        return request

    def write_and_check(*args: Any, **kwargs: Any) -> None:
        writer = os.getpid()
        end_with(own_rank)
        os.register_at_fork(after_in_child=lambda: end_with(writer))  # Megatron-Core forks one more for the file
        write(*args, **kwargs)
        own = {p.name: checkpoint_directory.checksum(p) for p in path.glob(f"__{rank}_*")}
        with contextlib.suppress(OSError):  # of a full disk the writer itself tells
            (path / f".crc-{rank}.json").write_text(json.dumps(own))

    return request._replace(async_fn=write_and_check)


def _inner_error(error: BaseException) -> Any:
    """What a rank said, where torch put it into an error of its own."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _as_failure(path: Path, error: BaseException) -> RunFailed:
    """Whatever went wrong while saving, as one line. Torch hides a full disk behind errors of its own."""
    inner = _inner_error(error)
    if isinstance(inner, OSError):
        return checkpoint_directory.failed(path, inner)
    with contextlib.suppress(OSError):
        room = os.statvfs(path if path.exists() else path.parent)
        if room.f_bavail * room.f_frsize < 1 << 20:
            return checkpoint_directory.failed(path, OSError(28, "No space left on device"))
    return RunFailed(
        f"the checkpoint could not be written: {' '.join(str(inner).split())[:300]}",
        where=str(path),
        hint="see this rank's log; `holmes resume` goes on from the last good checkpoint",
    )

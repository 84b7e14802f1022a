"""What Megatron-Core's versions, 0.16.1 to 0.19, call differently: the only place where the project tells them apart,
by what their functions take."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from torch.distributed.checkpoint import FileSystemReader

COMMON = "common_state"  # the entry in which versions from 0.17 on keep what earlier ones write into common.pt
# Said by later ones at every start, to who writes against Megatron-Core rather than to who trains.
_TO_PROGRAMMERS = ("GPTModel IS DEPRECATED", "DistributedDataParallel: full_param_layout", "MCore's async save is")


def _for_a_reader(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_TO_PROGRAMMERS)


def quiet() -> None:
    """Keep what is for programmers out of the ranks' logs."""
    for name in (
        "models.gpt.gpt_model",
        "distributed.distributed_data_parallel",
        "dist_checkpointing.strategies.torch",
    ):
        logging.getLogger(f"megatron.core.{name}").addFilter(_for_a_reader)


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def backward_step(*tensors: Any, model_type: Any, config: Any) -> Any:
    """One micro-batch's backward pass: `tensors` are its input, its output, and the output's gradient."""
    more = (model_type,) if _takes(schedules.backward_step, "model_type") else ()
    return schedules.backward_step(*tensors, *more, config)


def save(state: dict[str, Any], path: Path, strategy: Any, content: dict[str, Any], alike: bool) -> Any:
    """Begin an asynchronous save; the request comes back. `alike`: every rank's part of a tensor has the same shape,
    which Megatron-Core then checks (where stages have unlike TP, torch alone checks that the parts make the whole).
    Later versions write with NVRx unless told not to: that
    package is another dependency, and its writer outlives a rank that is killed."""
    own_writer = {"async_strategy": "mcore"} if _takes(dist_checkpointing.save, "async_strategy") else {}
    return dist_checkpointing.save(
        state,
        os.fspath(path),
        strategy,
        async_sharded_save=True,
        content_metadata=content,
        validate_access_integrity=alike,
        **own_writer,
    )


def load(state: dict[str, Any], path: Path, alike: bool) -> dict[str, Any]:
    """Load a checkpoint that any of the versions wrote; `alike` as for :func:`save`. Later ones read the earlier ones'
    themselves."""
    more: dict[str, Any] = {"validate_access_integrity": alike}
    if _takes(dist_checkpointing.load, "common_strategy") and not (path / "common.pt").exists():
        more["common_strategy"] = _common_inside()
    return dist_checkpointing.load(state, os.fspath(path), **more)


def _common_inside() -> Any:
    """A reader of the common part that knows where later versions keep it."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonInside(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            key = ShardedObject(COMMON, None, (1,), (0,)).unique_key
            found: dict[str, Any] = {key: io.BytesIO()}
            torch.distributed.checkpoint.load(found, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True)
            value = found[key]
            if isinstance(value, io.BytesIO):
                value.seek(0)
                value = torch.load(value, weights_only=True)
            return value[0]

    return CommonInside()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain of several, or the one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def distributed(optimizer: Any) -> list[DistributedOptimizer]:
    return [inner for inner in inner_optimizers(optimizer) if isinstance(inner, DistributedOptimizer)]


def prepare_for_loading(inner: DistributedOptimizer) -> None:
    """Megatron-Core (0.16) loads a distributed Adam only when it has made a step, and PyTorch's not at all: it looks
    among the checkpoint's tensors for the count of steps, which PyTorch keeps with every parameter."""
    if not inner.optimizer.state:
        inner._init_optimizer_states_with_dummy_values()
    assign = DistributedOptimizer._set_main_param_and_optimizer_states

    def assign_but_step(parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = inner.model_param_group_index_map[parameter]
        values = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]
        assign(inner, parameter, {**({"step": values["step"]} if "step" in values else {}), **tensors})

    inner._set_main_param_and_optimizer_states = assign_but_step


@contextlib.contextmanager
def offsets_without_padding(optimizer: Any) -> Iterator[None]:
    """While the optimizer's state is described: Megatron-Core (0.16) gathers a buffer without the padding at the end of
    each of its buckets, but then looks for the parameters at their places in the padded buffer, so that behind the
    first padded bucket every parameter would be saved with its neighbour's values. Give it the places that are meant.
    """
    buffers = [buffer for inner in distributed(optimizer) for buffer in inner.buffers]
    kept = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            starts, total = [], 0
            for bucket in buffer.buckets:
                starts.append(bucket.offset - total)
                total += bucket.numel_unpadded
            buffer.param_index_map = {
                parameter: (start - starts[bucket], end - starts[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, mapping in zip(buffers, kept, strict=True):
            buffer.param_index_map = mapping

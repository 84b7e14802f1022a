"""The differences between Megatron-Core's versions 0.16.1 to 0.19, by the parameters of their functions."""

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
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import schedules
from torch.distributed.checkpoint import FileSystemReader

COMMON = "common_state"  # the entry in which versions from 0.17 on store what earlier ones write to common.pt
# Messages of later versions at every start, which concern developers and not users.
_DEVELOPER_MESSAGES = ("GPTModel IS DEPRECATED", "DistributedDataParallel: full_param_layout", "MCore's async save is")


def filter_logs() -> None:
    """Keep messages for developers out of the ranks' logs."""
    names = ("models.gpt.gpt_model", "distributed.distributed_data_parallel", "dist_checkpointing.strategies.torch")
    for name in names:
        logger = logging.getLogger(f"megatron.core.{name}")
        logger.addFilter(lambda record: not record.getMessage().startswith(_DEVELOPER_MESSAGES))


def _takes(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def backward_step(*tensors: Any, model_type: Any, config: Any) -> Any:
    """Run one micro-batch's backward pass. `tensors`: its input, its output, and the output's gradient."""
    optional = (model_type,) if _takes(schedules.backward_step, "model_type") else ()
    return schedules.backward_step(*tensors, *optional, config)


def save(state: dict[str, Any], path: Path, strategy: Any, content: dict[str, Any], equal_shapes: bool) -> Any:
    """Start an asynchronous save and return its request. `equal_shapes`: all ranks' parts of a tensor have the same
    shape, so that Megatron-Core checks that they cover it; otherwise only torch does. Later versions write with NVRx by
    default, one more dependency, whose writer outlives a killed rank. Megatron-Core's own writer is used instead."""
    options = {"async_sharded_save": True, "content_metadata": content, "validate_access_integrity": equal_shapes}
    options |= {"async_strategy": "mcore"} if _takes(dist_checkpointing.save, "async_strategy") else {}
    return dist_checkpointing.save(state, os.fspath(path), strategy, **options)


def load(state: dict[str, Any], path: Path, equal_shapes: bool, replicas: Any) -> dict[str, Any]:
    """Load a checkpoint of any supported version. `equal_shapes`: see :func:`save`; `replicas`: the group of ranks that
    share the reading and exchange what they have read, None if each reads its own part."""
    options: dict[str, Any] = {"validate_access_integrity": equal_shapes}
    if _takes(dist_checkpointing.load, "common_strategy") and not (path / "common.pt").exists():
        options["common_strategy"] = _common_state_reader()
    if replicas is not None:
        options["sharded_strategy"] = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), replicas)
    return dist_checkpointing.load(state, os.fspath(path), **options)


def _common_state_reader() -> Any:
    """Return a reader of the common state from the entry in which later versions store it."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonStateReader(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            key = ShardedObject(COMMON, None, (1,), (0,)).unique_key
            entries: dict[str, Any] = {key: io.BytesIO()}
            torch.distributed.checkpoint.load(entries, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True)
            value = entries[key]
            if isinstance(value, io.BytesIO):
                value.seek(0)
                value = torch.load(value, weights_only=True)
            return value[0]

    return CommonStateReader()


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the single optimizer in a list."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def distributed(optimizer: Any) -> list[DistributedOptimizer]:
    return [inner for inner in inner_optimizers(optimizer) if isinstance(inner, DistributedOptimizer)]


def gradients_of_norm(inner: Any) -> list[torch.Tensor]:
    """Return the gradients of a single optimizer that count in the global gradient norm."""
    later_name = "get_grads_for_grad_norm"
    return list(getattr(inner, later_name)() if hasattr(inner, later_name) else inner.get_main_grads_for_grad_norm())


def main_parameter(inner: Any, parameter: Any) -> torch.Tensor:
    """Return the part of a parameter, in fp32, that a distributed optimizer updates on this rank."""
    group, order = inner.model_param_group_index_map[parameter]
    return inner.optimizer.param_groups[group]["params"][order]


def prepare_for_loading(inner: DistributedOptimizer) -> None:
    """Make a distributed Adam ready to load a checkpoint, even before its first step and even if it is PyTorch's Adam.
    Megatron-Core (0.16) loads state only into an Adam that has made a step. It also fails with PyTorch's Adam, because
    it expects this Adam's step counts, one for every parameter, among the checkpoint's tensors."""
    if not inner.optimizer.state:
        inner._init_optimizer_states_with_dummy_values()
    assign = DistributedOptimizer._set_main_param_and_optimizer_states

    def assign_but_step(parameter: Any, tensors: dict[str, Any]) -> None:
        values = inner.optimizer.state[main_parameter(inner, parameter)]
        assign(inner, parameter, {**({"step": values["step"]} if "step" in values else {}), **tensors})

    inner._set_main_param_and_optimizer_states = assign_but_step


@contextlib.contextmanager
def offsets_without_padding(optimizer: Any) -> Iterator[None]:
    """Correct the parameters' offsets while Megatron-Core (0.16) reads the optimizer's state. Megatron-Core gathers a
    buffer without the padding of its buckets, but uses the parameters' offsets in the padded buffer. So it would save
    each parameter after the first padded bucket with values of its neighbour."""
    buffers = [buffer for inner in distributed(optimizer) for buffer in inner.buffers]
    saved_maps = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            padding_before, total = [], 0  # of each bucket, in elements
            for bucket in buffer.buckets:
                padding_before.append(bucket.offset - total)
                total += bucket.numel_unpadded
            buffer.param_index_map = {
                parameter: (start - padding_before[bucket], end - padding_before[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, mapping in zip(buffers, saved_maps, strict=True):
            buffer.param_index_map = mapping

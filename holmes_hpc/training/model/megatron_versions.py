"""What Megatron-Core's versions, 0.16.1 to 0.19, call differently: the only place where the project tells them apart,
by what their functions take."""

from __future__ import annotations

import inspect
import io
import logging
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
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

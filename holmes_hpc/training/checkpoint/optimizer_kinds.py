"""Loading the state of a sharded (distributed) optimizer into an optimizer that is not sharded, and the reverse.

Both kinds save Adam's moments of a parameter under the same names. They differ in the names of the fp32 parameters (an
unsharded optimizer of fp32 weights saves none), and in the place of Adam's step count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_items_iter
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

from holmes_hpc.training.model import megatron_versions

SHARDED, UNSHARDED = "optimizer.state.param.", "optimizer.state.fp32_param."  # prefixes of fp32 parameters' keys


def tensors_to_load(state: dict[Any, Any], fp32: bool) -> dict[str, Any]:
    """Return the tensors of `state`, a sharded state dict, under the keys that the other kind of optimizer saves.
    `fp32`: whether the model's weights are fp32. An unsharded optimizer then has saved no copies (:func:`fill`)."""
    tensors = {}
    for i, (_, _, tensor) in enumerate(_tensors(state)):
        if tensor.key.startswith(UNSHARDED):
            tensors[str(i)] = replace(tensor, key=SHARDED + tensor.key.removeprefix(UNSHARDED))
        elif not tensor.key.startswith(SHARDED):
            tensors[str(i)] = tensor
        elif not fp32:
            tensors[str(i)] = replace(tensor, key=UNSHARDED + tensor.key.removeprefix(SHARDED))
    return tensors


def fill(state: dict[Any, Any], optimizer: Any, tensors: Mapping[str, Any], saved: Mapping[Any, Any]) -> None:
    """Fill `state`, the sharded state dict of `optimizer`, with values of the checkpoint, so that it can be loaded.
    `tensors`: the result of :func:`tensors_to_load` after it was loaded; `saved`: the rest of the optimizer's state in
    the checkpoint, with the step count and, in fp16, the loss scale."""
    for i, (container, key, _) in enumerate([*_tensors(state)]):
        container[key] = tensors.get(str(i))
    for container, key, value in [*nested_items_iter(state)]:
        if isinstance(value, LocalNonpersistentObject):
            container[key] = value.unwrap()
    values = {key: value for _, key, value in nested_items_iter(saved)}
    step = float(values["common_step"] if "common_step" in values else values["step"])
    inner_optimizers = megatron_versions.inner_optimizers(optimizer)
    inner_states = [state] if len(inner_optimizers) == 1 else [state[i] for i in range(len(inner_optimizers))]
    for inner, inner_state in zip(inner_optimizers, inner_states, strict=True):
        adam = inner_state.get("optimizer", inner_state)
        if "param_state" in inner_state or HAVE_APEX_OR_TE:  # sharded, or Apex's or TE's Adam: a step count per group
            for group in adam["param_groups"]:
                group["step"] = int(step) if HAVE_APEX_OR_TE else step
        else:
            adam["state"]["common_step"] = torch.tensor(step)
        if "param_state" in inner_state:
            weights = [weight for buffer in inner.buffers for weight in buffer.param_index_map]
            for i, parameter in inner_state["param_state"].items():
                parameter["param"] = weights[i].detach() if parameter["param"] is None else parameter["param"]
        if "grad_scaler" in inner_state:
            inner_state["grad_scaler"] = {key: values[key] for key in inner_state["grad_scaler"]}


def _tensors(state: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Return (container, key, tensor) of each sharded tensor in `state`."""
    return (item for item in nested_items_iter(state) if isinstance(item[2], ShardedTensor | ShardedTensorFactory))

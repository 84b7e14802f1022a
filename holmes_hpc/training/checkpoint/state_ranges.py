"""The training state of a rank as ranges of whole parameters, which do not depend on the layout.

Under another layout, a rank finds the ranges that it needs among those of other ranks. Only parts of tensors that TP
splits cannot be used under another TP.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from holmes_hpc.training.model import experts, gpt, megatron_versions
from holmes_hpc.training.model.optimizer import use_main_weights


class Range(NamedTuple):
    """A range of a parameter's elements. `name`: the parameter's name in the full model, with its part if TP splits it;
    `first`: number of the first element; `tensors`: the fp32 weight and the optimizer's moments, flat; `kept`: the
    elements that this rank copies, a share if several ranks hold the range."""

    name: str
    first: int
    tensors: tuple[torch.Tensor, ...]
    kept: slice


def held_ranges(models: Sequence[Any], optimizer: Any, tied: bool, with_moments: bool = True) -> Iterator[Range]:
    """Yield the ranges that the rank's optimizer updates, then the saved buffers of its `models`. `tied`: as for
    :func:`gpt.global_name`; `with_moments`: False before the optimizer has a state, which a look would create."""
    names = {
        parameter: _name(local_name, parameter, chunk, tied)
        for chunk in map(gpt.unwrap, models)
        for local_name, parameter in chunk.named_parameters()
    }
    for inner in megatron_versions.inner_optimizers(optimizer):
        is_sharded = inner in megatron_versions.distributed(optimizer)
        parameters = inner.model_param_gbuf_map if is_sharded else _by_main_parameter(inner, names)
        for parameter in parameters:
            main = parameters[parameter] if not is_sharded else megatron_versions.main_parameter(inner, parameter)
            state = inner.optimizer.state[main] if with_moments else {}
            moments = [moment for name, moment in sorted(state.items()) if name != "step"]
            first, kept = 0, slice(0, main.numel())
            if is_sharded:
                first = inner._get_model_param_range_map(parameter)["param"].start
            else:
                replicas = _replicas(parameter)
                rank, size = dist.get_rank(replicas), dist.get_world_size(replicas)
                kept = slice(main.numel() * rank // size, main.numel() * (rank + 1) // size)
            yield Range(names[parameter], first, tuple(t.detach().view(-1) for t in (main, *moments)), kept)
    for chunk in map(gpt.unwrap, models):
        saved = chunk.state_dict()
        for local_name, buffer in chunk.named_buffers():
            if local_name in saved:
                yield Range(gpt.global_name(local_name, chunk), 0, (buffer.view(-1),), slice(0, buffer.numel()))


def _name(local_name: str, parameter: torch.Tensor, chunk: Any, tied: bool) -> str:
    name, group = gpt.global_name(local_name, chunk, tied), experts.tensor_parallel_group(parameter)
    is_split = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
    return f"{name} part {group.rank()} of {group.size()}" if is_split else name


def _by_main_parameter(inner: Any, parameters: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return {parameter: the fp32 tensor that an optimizer without shards updates}."""
    updated = {main for group in inner.optimizer.param_groups for main in group["params"]}
    mains = {p: p if (main := getattr(p, "main_param", None)) is None else main for p in parameters}
    return {parameter: main for parameter, main in mains.items() if main in updated}


def _replicas(parameter: torch.Tensor) -> Any:
    """Return the group of ranks that hold the same parameter."""
    if experts.is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def finish_loading(models: Sequence[Any], optimizer: Any, updates: float) -> None:
    """Use the loaded fp32 weights in the model. `updates`: Adam's number of updates."""
    for inner in megatron_versions.inner_optimizers(optimizer):
        for values in inner.optimizer.state.values():
            if "step" in values:
                values["step"] = torch.tensor(updates)
    use_main_weights(optimizer, models)


def prepare(optimizer: Any) -> None:
    """Give the optimizer a state to load into, by an update without gradients. It changes weights by weight decay."""
    for inner in megatron_versions.distributed(optimizer):
        megatron_versions.prepare_for_loading(inner)
    for inner in megatron_versions.inner_optimizers(optimizer):
        if not inner.optimizer.state:
            for parameter in (p for group in inner.optimizer.param_groups for p in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            inner.optimizer.step()
            inner.optimizer.zero_grad()


def number_of_updates(optimizer: Any) -> float:
    """Return Adam's number of updates; 0 for other optimizers."""
    states = (s for inner in megatron_versions.inner_optimizers(optimizer) for s in inner.optimizer.state.values())
    return float(next((values["step"] for values in states if "step" in values), 0.0))

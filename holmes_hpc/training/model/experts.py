"""Megatron-Core's mixture-of-experts layers: their options, and the changes that they need to train on CPUs.

Each expert is on ETP ranks (`plan.etp`), by default on one as a whole. A rank computes its experts one after the other.
On GPUs in bf16, it computes them together. An all-to-all in the `ep` group brings every token to its experts and back.
With ``plan.ep_comm=allgather``, all ranks of the group get all tokens, and a reduce-scatter returns the summed results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.planning.plan.parallel import Parallel


class _Gather(mappings._GatherFromSequenceParallelRegion):
    """The all-gather of tokens, or of their numbers before an all-to-all."""


class _Scatter(mappings._ReduceScatterToSequenceParallelRegion):
    """The reduce-scatter of results behind an all-gather of tokens."""


# Functions that exchange tokens, or their numbers. In these, ranks of an EP group wait for each other.
EXCHANGES = (
    (mappings._AllToAll, "forward"),
    *((exchange, direction) for exchange in (_Gather, _Scatter) for direction in ("forward", "backward")),
)


def config_options(spec: ModelSpec, parallel: Parallel) -> dict[str, Any]:
    """Return the options of TransformerConfig for the experts of `spec`; none for a dense model."""
    experts = spec.experts
    if not experts.count:
        return {}
    balance = "seq_aux_loss" if experts.per_sequence else "aux_loss"
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": "sigmoid" if experts.score == "sigmoid" else "softmax",
        "moe_router_enable_expert_bias": experts.bias > 0,
        "moe_router_bias_update_rate": experts.bias,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.top_groups if experts.groups > 1 else None,
        "moe_z_loss_coeff": experts.z_loss or None,
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_expert_capacity_factor": experts.capacity,
        "moe_router_pre_softmax": experts.score == "softmax_all"
        or experts.top_k == 1,  # over one expert, a softmax would always be 1
        "moe_ffn_hidden_size": spec.ffn_width,
        "moe_router_load_balancing_type": balance if experts.balance else "none",
        "moe_aux_loss_coeff": experts.balance,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [int(n >= experts.first_dense) for n in range(spec.layers)] if experts.first_dense else 1,
        "moe_token_dispatcher_type": parallel.ep_comm,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def group_products(chunks: Iterable[torch.nn.Module], config: TransformerConfig) -> None:
    """Make each layer run the matrix multiplications of all its experts as one kernel, if torch has such a kernel.
    Otherwise kernel launches take longer than the multiplications (benchmarks/results/gpu.md)."""
    widths = (config.hidden_size, (config.moe_ffn_hidden_size or 0) // (config.expert_tensor_parallel_size or 1))
    if config.params_dtype != torch.bfloat16 or config.fp8 or any(width % 8 for width in widths):
        return
    if hasattr(F, "grouped_mm"):  # from torch 2.10 on
        for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, SequentialMLP)):
            if module.num_local_experts > 1:
                module.forward = partial(_all_experts, module)


def _all_experts(
    module: SequentialMLP, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return all experts' output, (tokens, hidden), and no bias. `tokens`: by expert; `weights`: of the router."""
    config, experts = module.config, module.local_experts
    ends = tokens_per_expert.to(tokens.device, torch.int32).cumsum(0, dtype=torch.int32)
    inner = _Products.apply(tokens, ends, *(expert.linear_fc1.weight for expert in experts))
    if config.bias_activation_fusion:
        inner = weighted_bias_swiglu_impl(inner, None, weights.unsqueeze(-1))
    else:
        gate, factor = inner.chunk(2, -1) if config.gated_linear_unit else (inner, 1)
        inner = (config.activation_func(gate) * factor * weights.unsqueeze(-1)).to(tokens.dtype)
    return _Products.apply(inner, ends, *(expert.linear_fc2.weight for expert in experts)), None


class _Products(torch.autograd.Function):
    """The multiplication of each expert's tokens by its transposed weight. Weights have the shape (outputs, inputs)."""

    @staticmethod
    def forward(context: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = context.saved_tensors
        gradient = gradient.contiguous()
        weight_gradients = F.grouped_mm(gradient.t(), tokens, offs=ends)
        is_idle = ends.diff(prepend=ends.new_zeros(1)) == 0  # experts without tokens: kernels may skip their rows
        weight_gradients.masked_fill_(is_idle[:, None, None], 0)
        return F.grouped_mm(gradient, torch.stack(weights), offs=ends), None, *weight_gradients.unbind()


def prepare_dispatchers() -> None:
    """Make the router and the dispatchers work on CPUs and without Transformer Engine, and call `EXCHANGES`."""
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16 reads it without defining it
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    token_dispatcher.gather_from_sequence_parallel_region = lambda tensor, group, **_: _Gather.apply(tensor, group)
    token_dispatcher.reduce_scatter_to_sequence_parallel_region = lambda tensor, group: _Scatter.apply(tensor, group)


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor on the host, as a numpy array if `as_numpy`. Megatron-Core's does so only for GPU tensors."""
    if not torch.is_tensor(tensor):
        return tensor
    host_tensor = tensor.to("cpu", non_blocking=True)
    if record_stream and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
    return host_tensor.numpy() if as_numpy else host_tensor


def forget_loss_scale() -> None:
    """Make the next forward pass set the scale of the balancing loss again. Backward passes outside a schedule, for
    example in the warm-up, leave a scale of another shape."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


def time_exchanges(add: Callable[[float], None]) -> None:
    """Call `add` with the seconds of every exchange of tokens, in forward and backward passes. The time starts after a
    barrier, so that it does not include the wait for ranks that still compute."""

    def timed(exchange: Callable[..., Any], context: Any, *arguments: Any) -> Any:
        if not any(torch.is_tensor(value) and value.is_floating_point() for value in arguments):
            return exchange(context, *arguments)  # of numbers or maps of tokens
        groups = (value for value in arguments if isinstance(value, dist.ProcessGroup))
        dist.barrier(next(groups, None) or context.group)
        start = time.perf_counter()
        output = exchange(context, *arguments)
        add(time.perf_counter() - start)
        return output

    for exchange, direction in EXCHANGES:
        setattr(exchange, direction, staticmethod(partial(timed, getattr(exchange, direction))))


class TokenCounter:
    """A counter of tokens that this rank's experts compute in training. A token counts once per expert and layer."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._count = 0
        for module in (m for chunk in chunks for m in chunk.modules() if isinstance(m, SequentialMLP)):
            module.register_forward_pre_hook(self._add)

    def _add(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._count += len(inputs[0]) * torch.is_grad_enabled()  # not in the first of two passes with recomputation

    def take(self) -> int:
        """Return the number of tokens since the last call."""
        count, self._count = self._count, 0
        return count


def mark(model: torch.nn.Module) -> None:
    """Mark the experts' weights, so that they get their own buffers and optimizers. Their data-parallel
    groups can differ from those of other weights. They are marked even with EP 1, so that checkpoints fit any EP."""
    for name, parameter in model.named_parameters():
        if ".local_experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def is_expert(parameter: torch.Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def tensor_parallel_group(parameter: torch.Tensor) -> Any:
    """Return the group of ranks over which a parameter, of an expert or not, is split."""
    state = parallel_state
    return state.get_expert_tensor_parallel_group() if is_expert(parameter) else state.get_tensor_model_parallel_group()


def gather_once(optimizers: Sequence[Any]) -> None:
    """Make only the last of several distributed optimizers gather parameters after its update, because each gathers
    those of all. With experts and without overlapped gathers, Megatron-Core would gather each parameter twice."""
    for optimizer in optimizers[:-1]:
        optimizer.step_with_ready_grads = partial(MixedPrecisionOptimizer.step_with_ready_grads, optimizer)


def bucket_groups(wrapped: Any) -> list[Any]:
    """Return the bucket groups of a chunk wrapped in DDP, in the order of their reduction."""
    return [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]


def number_globally(components: list[str], model: torch.nn.Module) -> None:
    """Replace an expert's number on this rank by its number in the layer. `components`: of a parameter's name."""
    if "local_experts" in components:
        position = components.index("local_experts") + 1
        experts: Any = model.get_submodule(".".join(components[:position]))
        first = parallel_state.get_expert_model_parallel_rank() * len(experts)
        components[position] = str(first + int(components[position]))

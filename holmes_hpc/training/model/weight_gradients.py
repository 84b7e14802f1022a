"""Weight gradients that are computed after the gradients of activations, for the schedule zero_bubble.

Each linear layer keeps its input and, in the backward pass, the gradient of its output. From these,
:meth:`WeightGradients.compute` later computes the weights' gradients, and adds them to DDP's buffer. All operations and
their order are those of Megatron-Core's linear layers (tensor_parallel/layers.py), so results are equal bit for bit.
Norms, embedding, biases and head get their gradients in the backward pass as usual.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _reduce_scatter_along_first_dim
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.schedule.kinds import WeightPass

Timers = Callable[[str], Any]  # name -> Megatron-Core's timer
Product = tuple[torch.nn.Module, torch.Tensor, torch.Tensor, bool]  # layer, input, output's gradient, sequence-parallel


class WeightGradients:
    """The weight gradients of a rank that are still to be computed. `chunks`: the model chunks, in whose transformer
    layers all linear layers are split; `timers`: returns Megatron-Core's timer of a name; `emulated`: number of a chunk
    -> a context for the emulated time of a layer's gradients. Raise ConfigError for layers that cannot be split."""

    def __init__(self, chunks: Iterable[Any], timers: Timers) -> None:
        self._timer = timers("backward-compute")
        self._pending: dict[WeightPass, dict[int, list[Product]]] = {}  # by layer, in the order of the backward pass
        self._current = WeightPass(0, 0)
        self.emulated: Callable[[int], AbstractContextManager[None]] = lambda _chunk: nullcontext()
        for chunk in chunks:
            for number, layer in enumerate(chunk.decoder.layers):
                linear = [m for m in layer.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
                if not linear:
                    problem = "zero_bubble cannot split layers of Transformer Engine"
                    raise ConfigError(problem, where="plan.schedule", hint="use eager_1f1b")
                for module in linear:
                    module._forward_impl = partial(self._forward, module, number)

    def start_backward(self, micro_batch: int, chunk: int) -> None:
        """Assign what the next backward pass keeps to the weight pass of this micro-batch and chunk."""
        self._current = WeightPass(micro_batch, chunk)

    def compute(self, wrapped: Sequence[Any], passes: Sequence[WeightPass], *, last: bool) -> None:
        """Compute weight passes, layer by layer. `wrapped`: the chunks, wrapped in DDP; `last`: the last of `passes`
        belongs to the step's last micro-batch, so that each bucket is reduced as soon as it is complete."""
        self._timer.start()
        products = {weight_pass: self._pending.pop(weight_pass, {}) for weight_pass in passes}
        for number in [*products[passes[-1]]]:
            for weight_pass in passes:
                with self.emulated(weight_pass.chunk):
                    for product in products[weight_pass].pop(number):
                        ddp = wrapped[weight_pass.chunk] if last and weight_pass == passes[-1] else None
                        _add_gradient(*product, ddp=ddp)
        self._timer.stop()

    def _forward(
        self,
        module: Any,
        layer: int,
        input: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: Any,
        **_other: Any,
    ) -> torch.Tensor:
        """Stand in for ``_forward_impl`` of a linear layer."""

        def keep(layer_input: torch.Tensor, gradient: torch.Tensor) -> None:
            products = self._pending.setdefault(self._current, {})
            products.setdefault(layer, []).append((module, layer_input, gradient, sequence_parallel))

        return _Product.apply(input, bias, module, keep, (sequence_parallel, allreduce_dgrad), tp_group)


class _Product(torch.autograd.Function):
    """The multiplication of an input by a layer's weight, whose backward pass does not compute the weight's gradient.
    The weight is not an argument of `forward`, so that DDP's hook does not expect its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        module: Any,
        keep: Callable[..., None],
        parallel: tuple[bool, bool],
        group: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.module, ctx.keep, ctx.parallel, ctx.group, ctx.has_bias = module, keep, parallel, group, bias is not None
        total_input = _gather_along_first_dim(input, group=group) if parallel[0] else input
        output = torch.matmul(total_input, module.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (input,) = ctx.saved_tensors
        is_sequence_parallel, is_reduced = ctx.parallel
        input_gradient = gradient.matmul(ctx.module.weight)
        if is_reduced:
            torch.distributed.all_reduce(input_gradient, group=ctx.group)
        if is_sequence_parallel:
            input_gradient = _reduce_scatter_along_first_dim(input_gradient, group=ctx.group)
        ctx.keep(input, gradient)
        bias_gradient = gradient.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        return input_gradient, bias_gradient, None, None, None, None


@torch.no_grad()
def _add_gradient(module: Any, input: torch.Tensor, gradient: torch.Tensor, gathers: bool, ddp: Any) -> None:
    """Compute the weight's gradient of one :data:`Product`, and add it to the gradient buffer. `gathers`: gather the
    input first, because this rank has only its part of the sequence; `ddp`: the chunk whose bucket is reduced if it is
    now complete, None to reduce nothing."""
    total_input = _gather_along_first_dim(input, group=module.tp_group) if gathers else input
    gradient, total_input = prepare_input_tensors_for_wgrad_compute(gradient, total_input)
    module.weight.main_grad.add_(gradient.t().matmul(total_input))
    if ddp is not None and ddp.ddp_config.overlap_grad_reduce:
        ddp.param_to_bucket_group[module.weight].register_grad_ready(module.weight, ddp.force_all_reduce)

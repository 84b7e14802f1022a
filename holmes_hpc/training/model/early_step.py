"""Optimizer steps that a stage takes before the global gradient norm is known (``train.early_step=stage``).

The all-reduce of the norm makes every stage wait for the slowest one. With early steps it runs in the background while
a stage updates its weights as if no gradient were clipped, and computes the next step's passes. Before the next
optimizer step the norm is read. If it is not finite or above the clip, the early step was wrong: the loop restores the
state before its passes and repeats it without an early step. Results are therefore equal bit for bit.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.training.model import gpt, megatron_versions, optimizer

RECENT, SAFE_SHARE = 4, 0.5  # the norms of so many steps must be below this share of the clip


class EarlySteps:
    """The early steps of a rank's optimizer; none unless ``train.early_step`` is stage."""

    def __init__(self, adam: Any, models: Sequence[Any], train: TrainConfig) -> None:
        self._optimizer, self._models, self._train = adam, models, train
        self._clip, self._is_on = train.clip_grad, train.early_step == "stage"
        self._norms: deque[float] = deque(maxlen=RECENT)
        self._before: deque[tuple[dict[str, Any], list[torch.Tensor]]] = deque(maxlen=2)  # state that passes change
        self._copies: list[torch.Tensor] = []
        self._step_counts: list[Any] = []
        self._wait_for_norm: Callable[[], float] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the norm of the last step has not been read yet."""
        return self._wait_for_norm is not None

    def start_passes(self) -> None:
        """Keep the state that the passes of the next step change: random number generators and buffers."""
        if self._is_on:
            self._before.append((gpt.generators(), [buffer.clone() for buffer in self._buffers()]))

    def may_take(self, step: int) -> bool:
        """Return whether the optimizer step of `step` may be early: recent norms are far below the clip, and the state
        after the step is neither saved nor validated nor next to a profile."""
        train, limit = self._train, SAFE_SHARE * self._clip if self._clip else math.inf
        intervals = (train.checkpoint_interval, train.eval_interval, train.steps)
        is_used = any(interval and step % interval == 0 for interval in intervals)
        is_profiled = train.profile is not None and train.profile.start - 1 <= step <= train.profile.stop
        is_safe = len(self._norms) == RECENT and all(norm < limit for norm in self._norms)
        return self._is_on and is_safe and not (is_used or is_profiled)

    def add_norm(self, norm: float | None) -> None:
        """Add the norm of a step, None if the step was skipped."""
        self._norms.append(math.nan if norm is None else norm)

    @torch.no_grad()
    def take(self) -> tuple[bool, None]:
        """Start the all-reduce of the norm, copy the optimizer's state, and update the weights without clipping.
        Return the result of :func:`optimizer.step`, without the norm."""
        self._optimizer.prepare_grads()
        self._wait_for_norm = start_norm(self._optimizer)
        tensors = [*self._tensors()]
        self._copies = self._copies or [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._copies, tensors)
        self._step_counts = [group.get("step") for group in self._optimizer.param_groups]
        return self._optimizer.step_with_ready_grads(), None

    def confirm(self) -> tuple[float, bool]:
        """Wait for the pending norm. Return (the norm, whether the early step was right)."""
        assert self._wait_for_norm is not None
        norm, self._wait_for_norm = self._wait_for_norm(), None
        self.add_norm(norm)
        is_clipped = bool(self._clip) and self._clip / (norm + 1e-6) < 1  # as Megatron-Core decides
        return norm, math.isfinite(norm) and not is_clipped

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the state before the passes of the last early step."""
        torch._foreach_copy_([*self._tensors()], self._copies)
        for group, count in zip(self._optimizer.param_groups, self._step_counts, strict=True):
            if count is not None:
                group["step"] = count
        optimizer.use_main_weights(self._optimizer, self._models)
        generators, buffers = self._before[0]
        gpt.set_generators(generators)
        for buffer, value in zip(self._buffers(), buffers, strict=True):
            buffer.copy_(value)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield the weights that the optimizer updates, and its moments."""
        for inner in megatron_versions.inner_optimizers(self._optimizer):
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                yield parameter
                yield from (v for v in inner.optimizer.state[parameter].values() if isinstance(v, torch.Tensor))

    def _buffers(self) -> Iterator[torch.Tensor]:
        return (buffer for model in self._models for buffer in gpt.unwrap(model).buffers())


def start_norm(chain: Any) -> Callable[[], float]:
    """Start to compute the global gradient norm as Megatron-Core does. Return a function that waits for it."""
    inners = megatron_versions.inner_optimizers(chain)
    has_one_group = len(inners) == 1 or chain.grads_states_parallel_group_is_shared()
    parts: list[tuple[torch.Tensor, Any]] = []
    for part in [inners] if has_one_group else [[inner] for inner in inners]:
        square = torch.zeros(1, device="cuda")
        if gradients := [g for inner in part for g in megatron_versions.gradients_of_norm(inner)]:
            overflow = torch.zeros(1, dtype=torch.int, device="cuda")
            square = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)[0] ** 2.0
        parts.append((square, dist.all_reduce(square, group=part[0].get_grad_stats_parallel_group(), async_op=True)))

    def wait() -> float:
        for _, work in parts:
            work.wait()
        norms = [square.item() ** 0.5 for square, _ in parts]
        return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))

    return wait

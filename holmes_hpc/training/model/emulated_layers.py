"""Emulated compute: every transformer layer waits until a configured time has passed.

Many ranks on few cores then behave like accelerators on a real network. A layer's forward pass takes
`train.pace_layer_ms` times the `train.pace_factors` of its pool or node; its backward pass takes twice that. A
recomputed forward pass takes its time again. Losses and gradients do not change. Embedding, head and optimizer take
their actual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.slurm.hostlist import expand


class _Mark(torch.autograd.Function):
    """An identity function that calls `on_backward` with its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, on_backward: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.on_backward = on_backward
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.on_backward(gradient)
        return gradient, None


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` is `moment`, or a little later."""
    while (remaining_s := moment - time.perf_counter()) > 0:
        time.sleep(remaining_s)


class Clock:
    """The clock of a rank: its last emulated pass, and when that was due to end (``time.perf_counter`` seconds)."""

    def __init__(self) -> None:
        self.end = 0.0
        self.last_pass: tuple[str, int, int] | None = None  # forward or backward, chunk, layer

    def begin(self, layer_pass: tuple[str, int, int], previous: tuple[str, int, int], seconds: float) -> float:
        """Return when `layer_pass`, which takes `seconds`, is due to end (``time.perf_counter`` seconds).

        If this rank's last pass was `previous`, `layer_pass` counts from the time at which `previous` was due to end,
        not from now. This makes up for delays by other ranks on the same cores.
        """
        start = self.end if self.last_pass == previous else time.perf_counter()
        self.end, self.last_pass = start + seconds, layer_pass
        return self.end


class EmulatedLayer:
    """Layer `number` of a chunk, whose ``forward`` takes `forward_s` and its backward pass twice as long.

    Most of the backward's wait comes before its computation. Its gradients then appear at the end of its time, as on an
    accelerator.
    """

    def __init__(self, layer: torch.nn.Module, chunk: int, number: int, forward_s: float, clock: Clock) -> None:
        self._forward, self.forward_s, self._clock = layer.forward, forward_s, clock
        self._chunk, self._number = chunk, number
        self._start = self._end = 0.0
        self._compute_s = 2 * forward_s  # of the last backward pass; the first one waits after its computation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        end = self._end_of("forward", -1, self.forward_s)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = _Mark.apply(kwargs["hidden_states"], self._end_backward)
        else:
            args = (_Mark.apply(args[0], self._end_backward), *args[1:])
        output = self._forward(*args, **kwargs)
        hidden, *extra_outputs = output if isinstance(output, tuple) else (output,)
        if hidden.requires_grad:  # a hook, not a _Mark: Megatron frees a stage's output, which a view would prevent
            hidden.register_hook(self._start_backward)
        _synchronize(hidden)
        wait_until(end)
        return (hidden, *extra_outputs) if isinstance(output, tuple) else hidden

    def _end_of(self, direction: str, offset: int, seconds: float) -> float:
        layer_pass, previous = ((direction, self._chunk, self._number + shift) for shift in (0, offset))
        return self._clock.begin(layer_pass, previous, seconds)

    def _start_backward(self, gradient: torch.Tensor) -> None:
        _synchronize(gradient)
        self._end = self._end_of("backward", +1, 2 * self.forward_s)
        wait_until(self._end - 1.2 * self._compute_s)
        self._start = time.perf_counter()

    def _end_backward(self, gradient: torch.Tensor) -> None:
        _synchronize(gradient)
        self._compute_s = time.perf_counter() - self._start
        wait_until(self._end)


def _synchronize(tensor: torch.Tensor) -> None:
    """Wait until the GPU has computed `tensor`. Wait for the current stream only, because a receive on another stream
    may depend on this rank's next call."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def factor(factors: Mapping[str, float], places: Sequence[tuple[str, str]], rank: int, pools: Collection[str]) -> float:
    """Return the time factor of a rank's layers: that of its node, else of its pool, else 1.

    `places`: (pool, node) of every rank; `pools`: the site's. Raise ConfigError if `factors` has another name.
    """
    nodes = {node for _, node in places}
    rank_factor = 1.0
    for name in sorted(factors, key=lambda name: name not in pools):
        expanded_names = {name} if name in pools else set(expand(name))
        if name not in pools and (unknown := sorted(expanded_names - nodes)):
            raise ConfigError(
                f"no pool or node {unknown[0]!r}",
                where="train.pace_factors",
                hint=nearest(unknown[0], {*pools} | nodes),
            )
        rank_factor = factors[name] if expanded_names & set(places[rank]) else rank_factor
    return rank_factor


def emulate(chunks: Iterable[Iterable[torch.nn.Module]], layer_ms: float) -> None:
    """Make every layer of a rank's model chunks take `layer_ms` forward; `layer_ms` must be above 0.

    Layers are modules that take and return hidden states, alone or first in a tuple.
    """
    clock = Clock()
    for chunk, layers in enumerate(chunks):
        for number, layer in enumerate(layers):
            layer.forward = EmulatedLayer(layer, chunk, number, layer_ms / 1000, clock)

"""Paced compute: every transformer layer takes a given time, by waiting.

So that many ranks on few cores behave like accelerators beside a real network: a layer's forward pass takes
`train.pace_layer_ms` (times what `train.pace_factors` says of its fabric or node), its backward pass twice as long; a
recomputed forward pass takes its time again. The numbers are those of the unpaced model. What is not in a layer
(embedding, head, optimizer) takes what it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.slurm.hostlist import expand


class _Mark(torch.autograd.Function):
    """The same tensor; `passed` is called with its gradient when that comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.passed = passed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passed(gradient)
        return gradient, None


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` is `moment`, or a little later."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class Clock:
    """A rank's time: when its last paced pass was due to end, and which pass that was."""

    def __init__(self) -> None:
        self.ends = 0.0
        self.last: tuple[str, int, int] | None = None  # forward or backward, chunk, layer

    def begin(self, this: tuple[str, int, int], follows: tuple[str, int, int], seconds: float) -> float:
        """When pass `this` of `seconds` is due to end. Where it goes on from pass `follows`, it begins when that was
        due: what other ranks on the same cores kept that one waiting is made up for, and nothing else happens between.
        """
        starts = self.ends if self.last == follows else time.perf_counter()
        self.ends, self.last = starts + seconds, this
        return self.ends


class PacedLayer:
    """Layer `number` of a chunk: its ``forward`` takes `forward_s`, and the backward pass of that twice as long.

    Most of the backward's wait comes before its computing, so that its gradients appear at the end of its time, when
    an accelerator would have them, and not at its start.
    """

    def __init__(self, layer: torch.nn.Module, chunk: int, number: int, forward_s: float, clock: Clock) -> None:
        self._forward, self.forward_s, self._clock = layer.forward, forward_s, clock
        self._chunk, self._number = chunk, number
        self._began = self._ends = 0.0
        self._computing_s = 2 * forward_s  # of the last backward pass; until one was seen, wait afterwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ends = self._due("forward", -1, self.forward_s)
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = _Mark.apply(kwargs["hidden_states"], self._backward_ends)
        else:
            args = (_Mark.apply(args[0], self._backward_ends), *args[1:])
        output = self._forward(*args, **kwargs)
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        if hidden.requires_grad:  # a hook, and no _Mark: Megatron frees a stage's output, which a view does not allow
            hidden.register_hook(self._backward_begins)
        _finish(hidden)
        wait_until(ends)
        return (hidden, *rest) if isinstance(output, tuple) else hidden

    def _due(self, way: str, after: int, seconds: float) -> float:
        chunk, number = self._chunk, self._number
        return self._clock.begin((way, chunk, number), (way, chunk, number + after), seconds)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        _finish(gradient)
        self._ends = self._due("backward", +1, 2 * self.forward_s)
        wait_until(self._ends - 1.2 * self._computing_s)
        self._began = time.perf_counter()

    def _backward_ends(self, gradient: torch.Tensor) -> None:
        _finish(gradient)
        self._computing_s = time.perf_counter() - self._began
        wait_until(self._ends)


def _finish(made: torch.Tensor) -> None:
    """Wait until the GPU has computed `made`: for the stream that computes, never for the device, on whose other
    streams a receive may be waiting for what this rank does next."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


def factor(
    factors: Mapping[str, float], places: Sequence[tuple[str, str]], rank: int, fabrics: Collection[str]
) -> float:
    """How many times the pace a rank's layers take: as is said of its node, else of its fabric, else once. `places`:
    (fabric, node) of every rank; `fabrics`: the site's. ConfigError where something else is named."""
    nodes = {node for _, node in places}
    own = 1.0
    for name in sorted(factors, key=lambda name: name not in fabrics):
        named = {name} if name in fabrics else set(expand(name))
        if name not in fabrics and (strange := sorted(named - nodes)):
            raise ConfigError(f"train.pace_factors names {strange[0]!r}", hint=nearest(strange[0], {*fabrics} | nodes))
        own = factors[name] if named & set(places[rank]) else own
    return own


def pace(chunks: Iterable[Iterable[torch.nn.Module]], layer_ms: float) -> None:
    """Pace the layers of a rank's model chunks to `layer_ms` forward.

    `layer_ms` is above 0. Layers are modules that take and return hidden states, alone or first in a tuple.
    """
    clock = Clock()
    for c, layers in enumerate(chunks):
        for number, layer in enumerate(layers):
            layer.forward = PacedLayer(layer, c, number, layer_ms / 1000, clock)

"""Paced compute: every transformer layer takes a given time, by waiting.

So that many ranks on few cores behave like accelerators beside a real network: a layer's forward pass takes
`train.pace_layer_ms`, its backward pass twice as long; a recomputed forward pass takes its time again. The numbers are
those of the unpaced model. What is not in a layer (embedding, head, optimizer) takes what it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holmes_hpc.errors import ConfigError

SLACK_S = 0.0002  # sleeping may overshoot: the last part of a wait is looked at more closely


class _Mark(torch.autograd.Function):
    """The same tensor; `passed()` is called when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, passed: Callable[[], None]) -> torch.Tensor:
        ctx.passed = passed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passed()
        return gradient, None


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` is `moment`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left - SLACK_S if left > 2 * SLACK_S else 0)


class Lateness:
    """By how many seconds a rank's last backward pass overran its time, because other ranks held the cores."""

    seconds = 0.0


class PacedLayer:
    """A layer's ``forward`` that takes `forward_s`, and whose backward takes twice that.

    Most of the backward's wait comes before its computing, so that its gradients appear at the end of its time, when
    an accelerator would have them, and not at its start. What it overruns then, the next one (of any layer that shares
    `late`) makes up for.
    """

    def __init__(self, layer: torch.nn.Module, forward_s: float, late: Lateness) -> None:
        self._forward, self.forward_s, self._late = layer.forward, forward_s, late
        self._ends = self._began = 0.0
        self._computing_s = 2 * forward_s  # of the last backward pass; until one was seen, wait afterwards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ends = time.perf_counter() + self.forward_s
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = _Mark.apply(kwargs["hidden_states"], self._backward_ends)
        else:
            args = (_Mark.apply(args[0], self._backward_ends), *args[1:])
        output = self._forward(*args, **kwargs)
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        if hidden.requires_grad:  # a hook, and no _Mark: Megatron frees a stage's output, which a view does not allow
            hidden.register_hook(self._backward_begins)
        _finish_device_work()
        wait_until(ends)
        return (hidden, *rest) if isinstance(output, tuple) else hidden

    def _backward_begins(self, _: torch.Tensor) -> None:
        _finish_device_work()
        self._ends = time.perf_counter() + 2 * self.forward_s - self._late.seconds
        wait_until(self._ends - 1.2 * self._computing_s)
        self._began = time.perf_counter()

    def _backward_ends(self) -> None:
        _finish_device_work()
        now = time.perf_counter()
        self._computing_s = now - self._began
        self._late.seconds = min(2 * self.forward_s, max(0.0, now - self._ends))
        wait_until(self._ends)


def _finish_device_work() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def pace(layers: Iterable[torch.nn.Module], layer_ms: float) -> None:
    """Pace `layers` (modules that take and return hidden states, alone or first in a tuple) to `layer_ms` forward."""
    if layer_ms <= 0:
        raise ConfigError(f"pace_layer_ms is {layer_ms}", where="train", cure="use milliseconds above 0, or null")
    late = Lateness()
    for layer in layers:
        layer.forward = PacedLayer(layer, layer_ms / 1000, late)

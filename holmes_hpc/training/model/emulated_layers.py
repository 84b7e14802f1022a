"""Emulated compute: every transformer layer waits until a configured time has passed.

Many ranks on few cores then behave like accelerators on a real network. A layer's forward pass takes
`train.pace_layer_ms` times the `train.pace_factors` of its pool or node; its backward pass takes twice that. A
recomputed forward pass takes its time again. A pass takes exactly the time of its layers. This time also covers the
embedding, the head, the exchanges of context parallelism, and delays by other ranks on the same cores. The optimizer
and the exchanges between experts take their actual time in addition. Losses and gradients do not change.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.planning.cost.timing import WEIGHT_SHARE
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.training.model import experts
from holmes_hpc.training.model.weight_gradients import Timers, WeightGradients


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` is `moment`, or a little later."""
    while (remaining_s := moment - time.perf_counter()) > 0:
        time.sleep(remaining_s)


class Clock:
    """The clock of a rank: the time (of ``time.perf_counter``) at which the layers of its current pass are to end."""

    def __init__(self) -> None:
        self._end = self._finished = self.exchanged_s = 0.0
        self._pass: tuple[str, int] | None = None  # the current pass: direction and chunk; None before its first layer
        self._rest_s: dict[tuple[str, int], float] = {}  # (direction, chunk) -> seconds of a pass after its last layer
        self._direction = "forward"

    def start_pass(self, direction: str) -> None:
        self._direction, self._pass, self._end = direction, None, time.perf_counter()

    def exchange(self, seconds: float) -> None:
        """Add the time of an exchange with other ranks, which the layer's own time does not contain."""
        self._end += seconds
        self.exchanged_s += seconds

    def start_layer(self, seconds: float, layer_pass: tuple[str, int], is_last: bool) -> float:
        """Return when the next layer, which takes `seconds`, is due to end. `layer_pass`: its direction and chunk.
        The last layer of a pass is due earlier, by the time that the rest of the pass takes (for example, the head)."""
        self._end += seconds
        is_last_of_pass = is_last and layer_pass[0] == self._direction  # false for a recomputed layer
        return self._end - (self._rest_s.get(layer_pass, 0.0) if is_last_of_pass else 0.0)

    def finish_layer(self, end: float, layer_pass: tuple[str, int]) -> None:
        wait_until(end)
        self._pass, self._finished = layer_pass, time.perf_counter()

    @contextmanager
    def layer(self, seconds: float, layer_pass: tuple[str, int]) -> Iterator[None]:
        """Make the computing in the ``with`` block take `seconds`."""
        end = self.start_layer(seconds, layer_pass, is_last=False)
        yield
        self.finish_layer(end, layer_pass)

    def finish_pass(self) -> None:
        if self._pass is not None:
            rest_s = time.perf_counter() - self._finished
            self._rest_s[self._pass] = max(rest_s, 0.9 * self._rest_s.get(self._pass, 0.0))  # a maximum that decays
            wait_until(self._end)


class EmulatedLayer:
    """A layer of a chunk. `times_s`: the times of its (forward, backward) pass; `ends`: whether it is (the first, the
    last) layer of the chunk. In the backward pass, most of the wait comes before the computation. Gradients then appear
    at the end of the pass's time, as on an accelerator."""

    def __init__(
        self, layer: torch.nn.Module, chunk: int, ends: tuple[bool, bool], times_s: tuple[float, float], clock: Clock
    ) -> None:
        self._forward, self._clock, self._ends = layer.forward, clock, ends
        self.forward_s, self._backward_s = times_s
        self._passes = ("forward", chunk), ("backward", chunk)
        self._start = self._end = self._exchanged_s = 0.0
        self._compute_s = self._backward_s  # of the last backward pass; the first waits only after computing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        end = self._clock.start_layer(self.forward_s, self._passes[0], self._ends[1]) - self._clock.exchanged_s
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = self._marked(kwargs["hidden_states"])
        else:
            args = (self._marked(args[0]), *args[1:])
        output = self._forward(*args, **kwargs)
        hidden, *extra_outputs = output if isinstance(output, tuple) else (output,)
        if hidden.requires_grad:  # no view, which would prevent Megatron from freeing a stage's output
            hidden.register_hook(self._start_backward)
        _synchronize(hidden)
        self._clock.finish_layer(end + self._clock.exchanged_s, self._passes[0])  # exchanges delay the layer's end
        return (hidden, *extra_outputs) if isinstance(output, tuple) else hidden

    def _marked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a view of the layer's input. The layer's backward pass ends when the view's gradient is complete."""
        view = hidden.view_as(hidden)
        if view.requires_grad:
            view.register_hook(self._end_backward)
        return view

    def _start_backward(self, gradient: torch.Tensor) -> None:
        _synchronize(gradient)
        self._end = self._clock.start_layer(self._backward_s, self._passes[1], self._ends[0])
        wait_until(self._end - 1.2 * self._compute_s)  # with a margin, because computations vary
        self._start, self._exchanged_s = time.perf_counter(), self._clock.exchanged_s

    def _end_backward(self, gradient: torch.Tensor) -> None:
        _synchronize(gradient)
        exchanged_s = self._clock.exchanged_s - self._exchanged_s
        self._compute_s = time.perf_counter() - self._start - exchanged_s
        self._clock.finish_layer(self._end + exchanged_s, self._passes[1])


def _synchronize(tensor: torch.Tensor) -> None:
    """Wait for the current stream to compute `tensor`: a receive on another may depend on this rank's next call."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def factor(factors: Mapping[str, float], places: Sequence[tuple[str, str]], rank: int, pools: Collection[str]) -> float:
    """Return the time factor of a rank's layers: that of its node, else of its pool, else 1. `places`: (pool, node) of
    every rank. Raise ConfigError if a name in `factors` is neither a pool nor a node of the run."""
    nodes = {node for _, node in places}
    rank_factor = 1.0
    for name in sorted(factors, key=lambda name: name not in pools):
        expanded_names = {name} if name in pools else set(expand(name))
        if name not in pools and (unknown := sorted(expanded_names - nodes)):
            hint = nearest(unknown[0], {*pools} | nodes)
            raise ConfigError(f"no pool or node {unknown[0]!r}", where="train.pace_factors", hint=hint)
        rank_factor = factors[name] if expanded_names & set(places[rank]) else rank_factor
    return rank_factor


def emulate(
    chunks: Iterable[Sequence[torch.nn.Module]], layer_ms: float, timers: Timers, weights: WeightGradients | None = None
) -> None:
    """Make every layer of a rank's chunks take `layer_ms` (above 0) forward. `timers`: returns the timer of a name,
    which Megatron-Core starts and stops at each pass; `weights`: weight gradients, if weight passes compute them."""
    clock, weight_s = Clock(), 0.0
    experts.time_exchanges(clock.exchange)
    if weights is not None:
        weight_s = WEIGHT_SHARE * 2 * layer_ms / 1000
        weights.emulated = lambda chunk: clock.layer(weight_s, ("weight", chunk))
    for direction in ("forward", "backward"):
        timer = timers(f"{direction}-compute")
        timer.start = _in_turn(timer.start, partial(clock.start_pass, direction))
        timer.stop = _in_turn(clock.finish_pass, timer.stop)
    for chunk, layers in enumerate(chunks):
        for number, layer in enumerate(layers):
            ends = number == 0, number == len(layers) - 1
            times_s = layer_ms / 1000, 2 * layer_ms / 1000 - weight_s
            layer.forward = EmulatedLayer(layer, chunk, ends, times_s, clock)


def _in_turn(*functions: Callable[[], None]) -> Callable[..., None]:
    def call(*_args: Any, **_options: Any) -> None:
        for function in functions:
            function()

    return call

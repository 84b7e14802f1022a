"""Emulated layers, under a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clock import Clock
from torch.utils.checkpoint import checkpoint

from holmes_hpc.errors import ConfigError
from holmes_hpc.training.model import emulated_layers, experts


class Layer(torch.nn.Module):
    """A layer whose forward and backward pass advance the fake clock."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))
        outer = self

        class Work(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                clock.pass_(forward_s)
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                outer.gradient_seen = clock.now
                clock.pass_(backward_s)
                return gradient

        self._work, self.gradient_seen = Work, 0.0

    def forward(self, hidden_states: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, None]:
        return self._work.apply(hidden_states) * self.weight, None


class Timers(dict[str, Any]):
    """Megatron-Core's timers of passes."""

    def __missing__(self, name: str) -> Any:
        self[name] = SimpleNamespace(start=lambda: None, stop=lambda: None)
        return self[name]

    def run(self, direction: str, compute: Callable[[], Any]) -> Any:
        """Run a pass and return its result."""
        self[f"{direction}-compute"].start()
        result = compute()
        self[f"{direction}-compute"].stop()
        return result


def test_the_factor_of_a_node_wins_over_its_fabrics_and_unknown_names_are_refused() -> None:
    places = [("ib-a", "ib1"), ("ib-a", "ib2"), ("roce-a", "roce1")]
    site = ["ib-a", "roce-a", "eth-a"]
    factors = {"ib[2-2]": 4.0, "ib-a": 2.0, "eth-a": 3.0}  # the last has no rank in this plan
    assert [emulated_layers.factor(factors, places, rank, site) for rank in range(3)] == [2.0, 4.0, 1.0]
    for unknown in ("ib[2-3]", "eth-b"):
        with pytest.raises(ConfigError, match=f"no pool or node '{'ib3' if '[' in unknown else unknown}'"):
            emulated_layers.factor({unknown: 2.0}, places, 0, site)


@pytest.mark.parametrize("compute_s", [0.001, 0.02])
def test_an_emulated_layer_takes_its_time_and_changes_no_number(
    compute_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    plain, emulated, timers = Layer(clock, compute_s, compute_s), Layer(clock, compute_s, compute_s), Timers()
    emulated_layers.emulate([[emulated]], 30, timers.__getitem__)
    for _ in range(2):
        gradients = []
        for layer in (plain, emulated):
            x = torch.ones(4, requires_grad=True)
            start = clock.now
            output, context = timers.run("forward", partial(layer, hidden_states=x))
            forward_s = clock.now - start
            start = clock.now
            timers.run("backward", output.sum().backward)
            backward_s = clock.now - start
            gradients.append((output.detach(), x.grad, layer.weight.grad))
        assert context is None
        assert forward_s == pytest.approx(0.030, abs=5e-4) and backward_s == pytest.approx(0.060, abs=5e-4)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert emulated.gradient_seen > start + 0.060 - 2 * compute_s  # gradients come at the end of the time


def test_a_layer_slower_than_its_time_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timers = Clock(monkeypatch), Timers()
    layer = Layer(clock, 0.05, 0.2)
    emulated_layers.emulate([[layer]], 30, timers.__getitem__)
    for _ in range(2):
        start = clock.now
        output, _ = timers.run("forward", partial(layer, hidden_states=torch.ones(4, requires_grad=True)))
        assert clock.now - start == pytest.approx(0.05, abs=1e-4)
        start = clock.now
        timers.run("backward", output.sum().backward)
        elapsed = clock.now - start
    assert elapsed == pytest.approx(0.2, abs=1e-4)


def test_a_pass_takes_the_time_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 30 and 60 ms take 120 and 240 ms, although one computes 40 ms forward and one 75 ms backward, and
    embedding and head take 8 and 12 ms."""
    clock, timers = Clock(monkeypatch), Timers()
    layers = [Layer(clock, *seconds) for seconds in ((0.01, 0.01), (0.04, 0.01), (0.01, 0.075), (0.01, 0.01))]
    emulated_layers.emulate([layers], 30, timers.__getitem__)
    embedding, head = Layer(clock, 0.008, 0.008), Layer(clock, 0.012, 0.012)

    def forward() -> torch.Tensor:
        hidden = torch.ones(4, requires_grad=True)
        for layer in (embedding, *layers, head):
            hidden, _ = layer(hidden_states=hidden)
        return hidden

    for repeat in range(3):
        clock.pass_(1.0)  # a wait before a pass is no delay to make up for
        start = clock.now
        output = timers.run("forward", forward)
        assert clock.now - start == pytest.approx(0.120 if repeat else 0.132, abs=1e-3)
        clock.pass_(1.0)
        start = clock.now
        timers.run("backward", output.sum().backward)
        assert clock.now - start == pytest.approx(0.240 if repeat else 0.248, abs=1e-3)


def test_a_recomputed_layer_takes_its_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timers = Clock(monkeypatch), Timers()
    layer = Layer(clock, 0.01, 0.01)
    emulated_layers.emulate([[layer]], 30, timers.__getitem__)
    inputs = torch.ones(4, requires_grad=True)
    for _ in range(2):
        output = timers.run("forward", lambda: checkpoint(lambda x: layer(x)[0], inputs, use_reentrant=True))
        start = clock.now
        timers.run("backward", output.sum().backward)
        assert clock.now - start == pytest.approx(0.090, abs=1e-3)


def test_a_backward_and_a_weight_pass_share_the_time_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timers, weights = Clock(monkeypatch), Timers(), SimpleNamespace(emulated=None)
    layer = Layer(clock, 0.01, 0.01)
    emulated_layers.emulate([[layer]], 30, timers.__getitem__, weights)  # type: ignore[arg-type]

    def compute_weights() -> None:
        with weights.emulated(0):
            clock.pass_(0.01)

    share = emulated_layers.WEIGHT_SHARE
    for _ in range(2):
        output, _ = timers.run("forward", partial(layer, hidden_states=torch.ones(4, requires_grad=True)))
        start = clock.now
        timers.run("backward", output.sum().backward)
        assert clock.now - start == pytest.approx(0.060 * (1 - share), abs=1e-3)
        start = clock.now
        timers.run("backward", compute_weights)
        assert clock.now - start == pytest.approx(0.060 * share, abs=1e-3)


def test_a_pass_does_not_make_up_for_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timers = Clock(monkeypatch), Timers()
    slow, fast = Layer(clock, 0.05, 0.01), Layer(clock, 0.01, 0.01)
    emulated_layers.emulate([[slow], [fast]], 30, timers.__getitem__)
    start = clock.now
    for layer in (slow, fast):
        timers.run("forward", partial(layer, hidden_states=torch.ones(4)))
    assert clock.now - start == pytest.approx(0.080, abs=1e-3)


def test_on_a_gpu_only_the_current_stream_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive on another stream may depend on the rank's next call."""
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waited for the device"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: devices.append(device))
    )
    for cuda in (False, True):
        emulated_layers._synchronize(SimpleNamespace(is_cuda=cuda, device="cuda:3"))  # type: ignore[arg-type]
    assert devices == ["cuda:3"]


def test_an_exchange_of_experts_adds_to_the_time_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = SimpleNamespace(forward=lambda _context, _tokens, seconds: clock.pass_(seconds))
    monkeypatch.setattr(experts, "EXCHANGES", ((calls, "forward"),))
    context, numbers = SimpleNamespace(group="ep"), torch.ones(4, dtype=torch.int64)  # their exchange adds no time
    monkeypatch.setattr("torch.distributed.barrier", lambda _group: clock.pass_(0.001))  # hidden in the layer's time

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.forward(context, numbers, 0.002)
            calls.forward(context, x, 0.004)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls.forward(context, gradient, 0.007)
            return gradient

    layer, timers = Layer(clock, 0.001, 0.002), Timers()
    compute = layer.forward
    layer.forward = lambda x: compute(Exchange.apply(x))  # type: ignore[method-assign, assignment]
    emulated_layers.emulate([[layer]], 30, timers.__getitem__)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        start = clock.now
        hidden, _none = timers.run("forward", partial(layer, x))
        assert clock.now - start == pytest.approx(0.034)
        start = clock.now
        timers.run("backward", hidden.sum().backward)
        assert clock.now - start == pytest.approx(0.067)

"""Emulated layers, under a fake clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clock import Clock

from holmes_hpc.errors import ConfigError
from holmes_hpc.training.model import emulated_layers


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
    plain, emulated = Layer(clock, compute_s, compute_s), Layer(clock, compute_s, compute_s)
    emulated_layers.emulate([[emulated]], 30)
    for _ in range(2):
        gradients = []
        for layer in (plain, emulated):
            x = torch.ones(4, requires_grad=True)
            start = clock.now
            output, context = layer(hidden_states=x)
            forward_s = clock.now - start
            start = clock.now
            output.sum().backward()
            backward_s = clock.now - start
            gradients.append((output.detach(), x.grad, layer.weight.grad))
        assert context is None
        assert forward_s == pytest.approx(0.030, abs=5e-4) and backward_s == pytest.approx(0.060, abs=5e-4)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert emulated.gradient_seen > start + 0.060 - 2 * compute_s  # gradients come at the end of the time


def test_a_layer_slower_than_its_time_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layer = Layer(clock, 0.05, 0.2)
    emulated_layers.emulate([[layer]], 30)
    for _ in range(2):
        start = clock.now
        output, _ = layer(hidden_states=torch.ones(4, requires_grad=True))
        assert clock.now - start == pytest.approx(0.05, abs=1e-4)
        start = clock.now
        output.sum().backward()
        elapsed = clock.now - start
    assert elapsed == pytest.approx(0.2, abs=1e-4)


def test_a_pass_through_a_chunk_makes_up_for_a_slow_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 30 and 60 ms take 120 and 240 ms, although one computes 40 ms forward and one 75 ms backward."""
    clock = Clock(monkeypatch)
    layers = [Layer(clock, *seconds) for seconds in ((0.01, 0.01), (0.04, 0.01), (0.01, 0.075), (0.01, 0.01))]
    emulated_layers.emulate([layers], 30)
    for _ in range(2):
        clock.pass_(1.0)  # a wait before a pass is no delay to make up for
        hidden, start = torch.ones(4, requires_grad=True), clock.now
        for layer in layers:
            hidden, _ = layer(hidden_states=hidden)
        assert clock.now - start == pytest.approx(0.120, abs=1e-3)
        clock.pass_(1.0)
        start = clock.now
        hidden.sum().backward()
        assert clock.now - start == pytest.approx(0.240, abs=1e-3)


def test_a_chunk_does_not_make_up_for_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    slow, fast = Layer(clock, 0.05, 0.01), Layer(clock, 0.01, 0.01)
    emulated_layers.emulate([[slow], [fast]], 30)
    start = clock.now
    for layer in (slow, fast):
        layer(hidden_states=torch.ones(4))
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

"""Layers that take a given time, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clock import Clock

from holmes_hpc.errors import ConfigError
from holmes_hpc.training.model import emulated_layers


class Layer(torch.nn.Module):
    """Takes its time by the test's clock, forward and backward."""

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

    def forward(self, hidden_states: torch.Tensor, other: Any = None) -> tuple[torch.Tensor, None]:
        return self._work.apply(hidden_states) * self.weight, None


def test_a_nodes_own_pace_goes_over_its_fabrics_and_strange_names_are_refused() -> None:
    places = [("ib-a", "ib1"), ("ib-a", "ib2"), ("roce-a", "roce1")]
    site = ["ib-a", "roce-a", "eth-a"]
    factors = {"ib[2-2]": 4.0, "ib-a": 2.0, "eth-a": 3.0}  # the last has no rank in this plan
    assert [emulated_layers.factor(factors, places, rank, site) for rank in range(3)] == [2.0, 4.0, 1.0]
    for strange in ("ib[2-3]", "eth-b"):
        with pytest.raises(ConfigError, match=f"names '{'ib3' if '[' in strange else strange}'"):
            emulated_layers.factor({strange: 2.0}, places, 0, site)


@pytest.mark.parametrize("own_s", [0.001, 0.02])
def test_a_paced_layer_takes_its_time_and_changes_no_number(own_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    free, paced = Layer(clock, own_s, own_s), Layer(clock, own_s, own_s)
    emulated_layers.pace([[paced]], 30)
    for _ in range(2):
        gradients = []
        for layer in (free, paced):
            x = torch.ones(4, requires_grad=True)
            began = clock.now
            output, context = layer(hidden_states=x)
            forward_s = clock.now - began
            began = clock.now
            output.sum().backward()
            backward_s = clock.now - began
            gradients.append((output.detach(), x.grad, layer.weight.grad))
        assert context is None
        assert forward_s == pytest.approx(0.030, abs=5e-4) and backward_s == pytest.approx(0.060, abs=5e-4)
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert paced.gradient_seen > began + 0.060 - 2 * own_s  # gradients come at the end of the time, not at its start


def test_a_layer_slower_than_the_pace_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    layer = Layer(clock, 0.05, 0.2)
    emulated_layers.pace([[layer]], 30)
    for _ in range(2):
        began = clock.now
        output, _ = layer(hidden_states=torch.ones(4, requires_grad=True))
        assert clock.now - began == pytest.approx(0.05, abs=1e-4)
        began = clock.now
        output.sum().backward()
        elapsed = clock.now - began
    assert elapsed == pytest.approx(0.2, abs=1e-4)


def test_a_pass_through_a_chunk_makes_up_for_a_layer_that_overran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 30 and 60 ms, of which one computes for 40 and for 75 ms: 120 and 240 ms in all."""
    clock = Clock(monkeypatch)
    layers = [Layer(clock, *own_s) for own_s in ((0.01, 0.01), (0.04, 0.01), (0.01, 0.075), (0.01, 0.01))]
    emulated_layers.pace([layers], 30)
    for _ in range(2):
        clock.pass_(1.0)  # what a pass waits for is no lateness
        hidden, began = torch.ones(4, requires_grad=True), clock.now
        for layer in layers:
            hidden, _ = layer(hidden_states=hidden)
        assert clock.now - began == pytest.approx(0.120, abs=1e-3)
        clock.pass_(1.0)
        began = clock.now
        hidden.sum().backward()
        assert clock.now - began == pytest.approx(0.240, abs=1e-3)


def test_the_next_chunk_does_not_make_up_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    late, timely = Layer(clock, 0.05, 0.01), Layer(clock, 0.01, 0.01)
    emulated_layers.pace([[late], [timely]], 30)
    began = clock.now
    for layer in (late, timely):
        layer(hidden_states=torch.ones(4))
    assert clock.now - began == pytest.approx(0.080, abs=1e-3)


def test_on_a_gpu_it_waits_for_the_stream_that_computes_and_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another stream a receive may be waiting for what this rank does after the layer."""
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waited for the device"))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    for cuda in (False, True):
        emulated_layers._finish(SimpleNamespace(is_cuda=cuda, device="cuda:3"))  # type: ignore[arg-type]
    assert waited == ["cuda:3"]

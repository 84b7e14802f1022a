"""The time breakdown of a step, under a fake clock."""

from __future__ import annotations

import pytest
from clock import Clock

from holmes_hpc.training.metrics import breakdown


def test_the_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    parts = breakdown.Breakdown()
    clock.pass_(5)
    parts.begin()
    clock.pass_(1)
    with parts.part("pipeline_wait_s"):
        clock.pass_(2)
        parts("forward-compute", log_level=2).start()
        clock.pass_(4)
        with parts.part("param_sync_s"):
            clock.pass_(8)
        parts("forward-compute").stop()
        clock.pass_(64)
        parts("backward-compute", log_level=2).start()
        clock.pass_(128)
        parts("backward-compute").stop()
        clock.pass_(256)
        parts("forward-backward", log_level=1).start(barrier=False)
        parts("all-grads-sync", log_level=1).start()
        clock.pass_(16)
        parts("all-grads-sync").stop()
        parts("forward-backward").stop()
    with parts.part("optimizer_s"):
        parts("optimizer-inner-step", log_level=1).start()
        clock.pass_(32)
        parts("optimizer-inner-step").stop()
    assert parts.take() == pytest.approx(
        {
            "other_s": 1,
            "fill_drain_s": 2 + 256,
            "compute_s": 4 + 128,
            "param_sync_s": 8,
            "grad_sync_s": 16,
            "optimizer_s": 32,
            "pipeline_wait_s": 64,
        }
    )
    assert sum(parts.take().values()) == pytest.approx(0)


def test_a_wrapped_method_counts_even_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Owner:
        def wait(self, seconds: float) -> float:
            clock.pass_(seconds)
            if seconds > 2:
                raise RuntimeError
            return seconds

    owner, parts = Owner(), breakdown.Breakdown()
    parts.wrap(owner, "wait", "param_sync_s")
    parts.begin()
    assert owner.wait(1) == 1
    with pytest.raises(RuntimeError):
        owner.wait(3)
    clock.pass_(1)
    seconds = parts.take()
    assert seconds["param_sync_s"] == pytest.approx(4) and seconds["other_s"] == pytest.approx(1)


def test_exchanges_of_experts_are_a_part_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    parts = breakdown.Breakdown()
    parts.begin()
    parts("forward-compute").start()
    clock.pass_(1)
    for seconds in (2, 4):
        with parts.part("expert_s"):
            clock.pass_(seconds)
    parts("forward-compute").stop()
    seconds_of = parts.take()
    assert (seconds_of["compute_s"], seconds_of["expert_s"]) == pytest.approx((7, 6))
    assert "expert_s" not in parts.take()

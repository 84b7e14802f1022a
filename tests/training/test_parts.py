"""Parts of the engine by themselves, with clocks of the test's own: breakdown, pacing, schedule of rates, watching."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import spawn
import torch
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import RunFailed
from holmes_hpc.fabric.nics import Nic, NodeNics, RdmaPort
from holmes_hpc.fabric.site import NicType
from holmes_hpc.training.metrics import breakdown
from holmes_hpc.training.metrics import line as metrics
from holmes_hpc.training.model import optimizer, pace
from holmes_hpc.training.network.nic_bytes import NicLog, Traffic, header_factors, sample_pairs, sum_by_kind
from holmes_hpc.training.rank import cpu
from holmes_hpc.training.rank import watchdog as watch
from holmes_hpc.training.rank.launch import Launch


class Clock:
    """Time that passes only when somebody sleeps, or says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.now = 1000.0
        if monkeypatch is not None:
            monkeypatch.setattr("time.perf_counter", lambda: self.now)
            monkeypatch.setattr("time.sleep", self.pass_)

    def pass_(self, seconds: float) -> None:
        self.now += max(seconds, 1e-5)

    def __call__(self) -> float:
        return self.now


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
        parts("forward-backward", log_level=1).start(barrier=False)
        parts("all-grads-sync", log_level=1).start()
        clock.pass_(16)
        parts("all-grads-sync").stop()
        parts("forward-backward").stop()
    with parts.part("optimizer_s"):
        parts("optimizer-inner-step", log_level=1).start()
        clock.pass_(32)
        parts("optimizer-inner-step").stop()
    taken = parts.take()
    assert taken == pytest.approx({"other_s": 1, "pipeline_wait_s": 2, "compute_s": 4, "param_sync_s": 8,
                                   "grad_sync_s": 16, "optimizer_s": 32})
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
    taken = parts.take()
    assert taken["param_sync_s"] == pytest.approx(4) and taken["other_s"] == pytest.approx(1)


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


@pytest.mark.parametrize("own_s", [0.001, 0.02])
def test_a_paced_layer_takes_its_time_and_changes_no_number(own_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    free, paced = Layer(clock, own_s, own_s), Layer(clock, own_s, own_s)
    pace.pace([[paced]], 30)
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
    pace.pace([[layer]], 30)
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
    pace.pace([layers], 30)
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
    pace.pace([[late], [timely]], 30)
    began = clock.now
    for layer in (late, timely):
        layer(hidden_states=torch.ones(4))
    assert clock.now - began == pytest.approx(0.080, abs=1e-3)


RATES = TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=4, steps=20)


def test_learning_rates() -> None:
    rates = [optimizer.learning_rate(step, RATES) for step in range(1, 31)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[19:] == [0.1] * 11
    assert rates[11] == pytest.approx(0.55)  # half way down a half cosine
    assert all(a > b for a, b in pairwise(rates[3:20]))


@given(steps=st.integers(1, 50), warm=st.integers(0, 50), end=st.none() | st.integers(1, 80))
def test_learning_rates_stay_between_their_ends(steps: int, warm: int, end: int | None) -> None:
    train = replace(RATES, steps=steps, warmup_steps=min(warm, end or steps), lr_decay_steps=end)
    for step in range(1, 90):
        assert 0 < optimizer.learning_rate(step, train) <= 1


@pytest.mark.parametrize(("losses", "updated", "norm", "scale", "says"), [
    ([2.0], True, 1.0, 8.0, None), ([], True, 0.0, 8.0, None), ([2.0], True, None, 8.0, None),
    ([2.0], True, math.nan, 8.0, "the gradient norm is nan"), ([2.0], True, math.inf, 8.0, "the gradient norm is inf"),
    ([2.0, math.nan], True, 1.0, 8.0, "the loss is nan"), ([math.inf], False, None, 8.0, "the loss is inf"),
    ([2.0], False, None, 8.0, None), ([2.0], False, None, 1.0, "least loss scale"),
    ([], False, None, 1.0, "least loss scale"),
])
def test_a_step_whose_numbers_are_none_ends_the_run(losses: list[float], updated: bool, norm: float | None,
                                                    scale: float, says: str | None) -> None:
    scaler = SimpleNamespace(scale=torch.tensor([scale]), min_scale=torch.tensor([1.0]))
    for made in (SimpleNamespace(grad_scaler=scaler),
                 SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler)])):
        if says is None:
            optimizer.check_numbers(made, 7, losses, updated, norm)
        else:
            with pytest.raises(RunFailed, match=f"step 7: .*{says}"):
                optimizer.check_numbers(made, 7, losses, updated, norm)


def test_fp16_ends_when_the_loss_scale_has_fallen_as_far_as_it_can() -> None:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    with cpu._CudaMeansCpu():
        scaler = DynamicGradScaler(2.0**6, 1.0, 2.0, 0.5, 1000, 2)
    made, ended = SimpleNamespace(grad_scaler=scaler), 0
    for step in range(1, 20):
        scaler.update(found_inf=True)
        try:
            optimizer.check_numbers(made, step, [3.0], False, None)
        except RunFailed:
            ended = step
            break
    assert ended == 7  # the first is let pass (hysteresis), then six halvings


class Told:
    rank, node = 0, "n"


def test_a_step_that_takes_too_long_is_a_hang() -> None:
    clock = Clock()
    dog = watch.Watchdog(Told(), 10, speaks=False, clock=clock)  # type: ignore[arg-type]
    clock.pass_(99)
    assert dog.hung() is None  # set-up may take ten times as long
    dog.alive("step 1")
    clock.pass_(9)
    assert dog.hung() is None
    dog.alive("step 2")
    clock.pass_(9)
    assert dog.hung() is None
    clock.pass_(2)
    assert dog.hung() == "step 2 takes longer than 10 s"
    dog.alive("saving", watch.LONG)
    clock.pass_(99)
    assert dog.hung() is None
    clock.pass_(2)
    assert dog.hung() == "saving takes longer than 100 s"


def test_the_slow_node_is_named_and_no_other() -> None:
    judge = watch.Stragglers([[0, 1, 2], [3, 4]], ["a", "b", "c", "d", "e"], every=3)
    steps = [[1.0, 1.1, 0.9, 3.0, 3.1]] * 3
    assert [judge.step(s) for s in steps] == [[], [], []]
    slow = [[1.0, 1.1, 1.6, 3.0, 3.1], [1.0, 1.1, 0.9, 9.0, 3.1], [1.0, 1.1, 1.6, 3.0, 3.1]]  # one hiccup is none
    found = [judge.step(s) for s in slow][-1]
    assert len(found) == 1 and "node c: rank 2 computes 1.45 times" in found[0]


def test_a_stage_with_nobody_to_compare_with_is_compared_by_its_layers() -> None:
    nodes, stages = ["a", "b", "c", "d"], [[0], [1], [2], [3]]
    judge = watch.Stragglers(stages, nodes, [2, 4, 4, 3.5], ["h", "h", "h", "v"], every=1)
    assert judge.step([0.2, 0.4, 0.5, 3.5]) == []  # another GPU is no slow node
    found = judge.step([0.2, 0.4, 0.7, 3.5])
    assert len(found) == 1 and "node c: rank 2 computes 1.75 times as long for a layer of stage 2" in found[0]
    assert len(judge.step([0.4, 0.4, 0.4, 0.1])) == 1


def test_the_work_of_stages() -> None:
    plan = spawn.plan(pp=3, layers=[[3], [2], [1]])
    work, alike = watch.work_of_stages(plan, paced=False)
    assert work[:2] == [3, 2] and 1.2 < work[2] < 3 and alike == [plan.site.fabrics[0].gpu] * 3
    assert watch.work_of_stages(plan, paced=True)[0] == [3, 2, 1]
    assert watch.work_of_stages(spawn.plan(pp=2, dp=2), paced=False) == ([], [])


def test_a_line_of_the_metrics_adds_up() -> None:
    plan = spawn.plan(pp=2, dp=2)
    parts = {p: 0.1 for p in breakdown.PARTS}
    rows = [metrics.row(0, 0, 0.6, parts, (10, 20, 30, 40, 7), 100),
            metrics.row(0, 0, 0.7, parts, (1, 2, 3, 4, 0), 200),
            metrics.row(8.0, 4, 0.6, {**parts, "compute_s": 0.3}, (0, 0, 0, 0, 0), 300),
            metrics.row(12.0, 4, 0.6, parts, (0, 0, 5, 6, 0), 400)]
    line = metrics.line(plan, rows, 7, 123.0, {"grad_norm": 1.0})
    assert (line["step"], line["time"], line["loss"], line["step_time_s"]) == (7, 123.0, 2.5, 0.6)
    assert line["samples_per_s"] == pytest.approx(8 / 0.6, rel=1e-4)
    assert line["tokens_per_s"] == pytest.approx(8 * 16 / 0.6, rel=1e-4)
    assert line["breakdown"][1]["compute_s"] == pytest.approx(0.2) and line["breakdown"][0]["compute_s"] == 0.1
    assert line["nic_bytes"] == {"ethernet": {"tx": 11, "rx": 22}, "ib-0": {"tx": 33, "rx": 44},
                                 "roce-1": {"tx": 5, "rx": 6}}
    assert line["peak_memory_bytes"] == [100, 200, 300, 400]
    assert metrics.compute_by_rank(rows) == pytest.approx([0.1, 0.1, 0.3, 0.1])
    assert line["hardware_tflops_per_gpu"] == line["model_tflops_per_gpu"] > 0


def test_nothing_counted_is_nothing_recorded() -> None:
    plan = spawn.plan(dp=2)
    rows = [metrics.row(0, 0, 1, dict.fromkeys(breakdown.PARTS, 0.0), (0, 0, 0, 0, 0), 1)] * 2
    line = metrics.line(plan, rows, 1, 0.0, {})
    assert line["nic_bytes"] == {} and math.isnan(line["loss"])
    assert sum_by_kind(plan, [[0, 0, 0, 0, 0]] * 2) == {}


def test_samples_are_sent_between_nodes_of_every_kind_of_nic() -> None:
    assert sample_pairs(spawn.plan(pp=3, dp=2)) == {"ib-0": (0, 1), "roce-1": (2, 3), "ethernet": (4, 5)}
    assert sample_pairs(spawn.plan()) == {}


class Counted:
    """A NIC that carries what others send beside the sample, too."""

    def take(self) -> tuple[float, float, float, float, float]:
        return 3e6, 3e6, 5e6, 5e6, 0.0


def test_on_cuda_rdma_has_no_factor_from_a_sample_that_went_over_ethernet(monkeypatch) -> None:
    plan, made = spawn.plan(pp=3, dp=2), []
    monkeypatch.setattr("holmes_hpc.training.network.nic_bytes._send", lambda ranks, rank, group, data: None)

    def new_group(ranks, kind):
        made.append(kind)

    found = header_factors(plan, 0, Counted(), new_group, lambda row: [row] * plan.world_size, cuda=True)
    assert found.pop("ethernet") > 1
    assert found == {"ib-0": 1.0, "roce-1": 1.0} and made == ["sample ethernet"]
    assert set(header_factors(plan, 0, Counted(), new_group, lambda row: [row] * plan.world_size)) == {
        "ib-0", "roce-1", "ethernet"}


IB_NODE = NodeNics((Nic("eth0", NicType.ETHERNET), Nic("mgmt0", NicType.ETHERNET), Nic("docker0", NicType.ETHERNET)), (
    RdmaPort("mlx5_0", 1, "ib", True, "ACTIVE", 200.0), RdmaPort("mlx5_1", 1, "ib", True, "ACTIVE", 100.0)))


def test_every_nic_is_counted_and_only_those_of_the_plan_in_its_sums(monkeypatch) -> None:
    readings = iter([{n: (0, 0) for n in ("eth0", "mgmt0", "docker0", "mlx5_0:1", "mlx5_1:1")},
                     {"eth0": (1, 2), "mgmt0": (10, 20), "docker0": (0, 0), "mlx5_0:1": (100, 200),
                      "mlx5_1:1": (1000, 0)}])
    monkeypatch.setattr("holmes_hpc.training.network.nic_bytes.read_counters", lambda: next(readings))
    counted = Traffic(spawn.plan(pp=2), Launch(0, 2, 0, "srun", "ib1", "key", False), IB_NODE)
    assert counted.take() == (1, 2, 100, 200, 1010)  # mlx5_1 is slower: storage, not one of NCCL's ports
    assert counted.by_nic["mlx5_1:1"] == (1000, 0)


def test_the_log_of_nics_holds_every_step_and_is_written_now_and_then(tmp_path) -> None:
    log = NicLog(tmp_path / "nics", "ib1", attempt=2)
    for step in range(1, 40):
        log.add(step, {"eth0": (step, 0), "mlx5_0:1": (0, 0), "docker0": (5, 5)})
    path = tmp_path / "nics" / "ib1.jsonl"
    assert len(path.read_text().splitlines()) < 39
    log.write()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 40))
    assert lines[6] == {"step": 7, "attempt": 2, "node": "ib1", "nics": {"eth0": {"tx": 7, "rx": 0}}}
    NicLog(tmp_path / "none", "ib1", 1).add(1, {})
    assert not (tmp_path / "none").exists()

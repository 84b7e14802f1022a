"""Edges: what a tensor looks like on the wire, and channels between two real processes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import Case, play_apart, server

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.parallel import Parallel, groups
from holmes_hpc.planning.plan.plan import GroupTransport
from holmes_hpc.planning.plan.transport import TCP, Transport
from holmes_hpc.training.pipeline import point_to_point
from holmes_hpc.training.pipeline.codec import SAME, Codec, codec

# ---- on the wire

RELATIVE_ERROR = {"bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4}


def across(chosen: Codec, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    wire = chosen.encode(tensor)
    target = torch.empty_like(tensor)
    buffer = chosen.buffer(target)
    assert (buffer.shape, buffer.dtype) == (wire.shape, wire.dtype) and wire.is_contiguous()
    buffer.copy_(wire)
    chosen.decode(buffer, target)
    return target, wire.nbytes


@pytest.mark.parametrize("name", RELATIVE_ERROR)
@given(scale=st.floats(1e-2, 1e2), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_a_rounded_tensor_is_close_and_small(name: str, scale: float, seed: int) -> None:
    tensor = torch.randn(6, 2, 64, generator=torch.Generator().manual_seed(seed)) * scale
    arrived, nbytes = across(codec(name, torch.float32), tensor)
    smallest_step = 2**-17 if name == "fp8" else 2**-39  # of the row's largest value
    bound = RELATIVE_ERROR[name] * tensor.abs() + tensor.abs().amax(-1, keepdim=True) * smallest_step
    assert ((arrived - tensor).abs() <= bound * 1.001).all()
    assert nbytes <= tensor.nbytes * {"fp8": 0.27, "fp16": 0.52, "bf16": 0.5}[name]


@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_rows_of_very_different_size_stay_apart(name: str) -> None:
    """Gradients of activations may be far below fp16's range, and far apart."""
    tensor = torch.stack([torch.randn(64) * 1e-12, torch.zeros(64), torch.randn(64) * 1e12])
    arrived, _ = across(codec(name, torch.float32), tensor)
    assert torch.equal(arrived[1], tensor[1])
    for row in (0, 2):
        assert (arrived[row] - tensor[row]).norm() <= RELATIVE_ERROR[name] * tensor[row].norm()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_bad_values_stay_bad(name: str, bad: float) -> None:
    tensor = torch.ones(2, 64)
    tensor[1, 3] = bad
    arrived, _ = across(codec(name, torch.float32), tensor)
    assert torch.equal(arrived[0], tensor[0]) and not torch.isfinite(arrived[1]).all()


def test_nothing_is_rounded_where_nothing_is_saved() -> None:
    assert codec("same", torch.float32) is SAME
    assert codec("bf16", torch.bfloat16) is SAME and codec("fp16", torch.bfloat16) is SAME
    assert codec("fp8", torch.bfloat16) is not SAME


@pytest.mark.integration
def test_rounding_changes_losses_by_little() -> None:
    common: dict[str, Any] = {
        "layers": [[1], [1]],
        "micro_batches": [4],
        "schedule": "ahead",
        "in_flight": [3, 1],
        "steps": 8,
        "trace": False,
    }
    results = play_apart([Case(edge_dtype=name, **common) for name in ("same", "bf16", "fp8")])
    exact, half, quarter = ([sum(step) / len(step) for step in ranks[-1]["losses"]] for ranks in results)
    assert exact != half != quarter
    assert max(abs(a - b) for a, b in zip(exact, half, strict=True)) < 0.005
    assert max(abs(a - b) for a, b in zip(exact, quarter, strict=True)) < 0.05


# ---- which groups are made


@pytest.mark.parametrize(
    ("parallel", "roles"),
    [
        (
            Parallel.uniform(pp=3),
            [
                {"forward_out", "backward_in"},
                {"forward_in", "forward_out", "backward_in", "backward_out"},
                {"forward_in", "backward_out"},
            ],
        ),
        (Parallel.uniform(pp=2, virtual_stages=2), [{"forward_in", "forward_out", "backward_in", "backward_out"}] * 2),
        (Parallel.uniform(pp=3, virtual_stages=2), [{"forward_in", "forward_out", "backward_in", "backward_out"}] * 3),
    ],
)
def test_every_direction_of_every_edge_has_a_group_of_two(
    monkeypatch: pytest.MonkeyPatch, parallel: Parallel, roles: list[set[str]]
) -> None:
    monkeypatch.setattr(point_to_point, "_try", lambda *_, sends: None)
    monkeypatch.setattr(point_to_point, "EdgeCommunicator", lambda group, config, channels, device: channels)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    rdma = Transport("rdma", NicType.IB, "ib-a")
    plan: Any = SimpleNamespace(
        parallel=parallel,
        edge_dtype="fp8",
        edge_connections=2,
        transports=lambda: (
            GroupTransport(g.kind, g.ranks, TCP if g.stages == (0, 1) else rdma, g.stages)
            for g in groups(parallel, parallel.dp, tied=True)
        ),
    )
    for rank in range(parallel.pp):
        asked: list[tuple[int, ...]] = []
        channels: Any = point_to_point.build(
            plan,
            lambda edge: asked.append(edge.ranks) or len(asked),  # noqa: B023
            rank=rank,
            pp_group=None,
            config=SimpleNamespace(pipeline_dtype=torch.float32),
            device=torch.device("cpu"),
        )
        assert set(channels) == roles[rank]
        connections = [connection for channel in channels.values() for connection in channel.connections]
        assert len(connections) == len(set(connections))  # no two channels share a group
        assert all(len(set(ranks)) == 2 for ranks in asked)
        tcp = [s for s in channels.values() if len(s.connections) == 2]
        assert all((s.codec is not SAME) == (s in tcp) for s in channels.values())  # rounded on TCP edges only
        assert len(asked) == len(edges_of(parallel)) * 2 + 2 * sum(1 for e in edges_of(parallel) if e == (0, 1))


def edges_of(parallel: Parallel) -> list[tuple[int, ...]]:
    found = [g.stages for g in groups(parallel, parallel.dp, tied=True) if g.kind == "edge"]
    return found + ([(0, 1)] if parallel.pp == 2 and parallel.virtual_stages > 1 else [])


def test_sends_that_nobody_waits_for_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's interleaved schedule does not wait for a step's last send: what follows would pile up behind it."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(point_to_point.Channel, "_post", lambda *_: [])
    channel = point_to_point.Channel("forward 0->1", [None], 1)  # type: ignore[list-item]
    config = SimpleNamespace(variable_seq_lengths=False, pipeline_dtype=torch.float32)
    monkeypatch.setattr(point_to_point.P2PCommunicator, "__init__", lambda self, group, config: None)
    ends = point_to_point.EdgeCommunicator(
        None,
        config,
        {"forward_out": channel},  # type: ignore[arg-type]
        torch.device("cpu"),
    )
    ends.pp_group = SimpleNamespace(rank=lambda: 0)  # type: ignore[assignment]
    for _ in range(10):
        ends._communicate(
            tensor_send_next=torch.ones(2),
            tensor_send_prev=None,
            recv_prev=False,
            recv_next=False,
            tensor_shape=None,
            wait_on_reqs=False,
        )
    assert len(channel._leaving) <= 2


# ---- between two processes


def _two(rank: int, folder: str, part: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    channel = point_to_point.Channel("forward 0->1", [dist.new_group([0, 1])], 1 - rank)
    tensors = [torch.full((3, 5), float(i)) for i in range(8)]
    if part == "order":
        if rank == 0:
            kept = [t.clone() for t in tensors]
            for t in kept:
                channel.send(t)
                t.data = torch.empty(1)  # as Megatron frees a stage's outputs, here at once
            channel.close()
        else:
            told: list[Any] = []
            channel.watch = lambda *event: told.append(event)
            posted = [channel.receive(torch.empty(3, 5), label) for label in range(8)]
            for transfer, tensor in zip(posted, tensors, strict=True):
                assert torch.equal(transfer.wait(), tensor) and torch.equal(transfer.wait(), tensor)
            channel.close()
            assert [e[:2] for e in told] == [("receive_forward", label) for label in range(8)]
            assert all(a[3] <= b[3] and b[2] <= b[3] for a, b in itertools.pairwise(told))
    elif rank == 0:  # and rank 1 leaves without a word
        with pytest.raises(NetworkError, match=r"edge forward 0->1: .*see the log of the rank at its other end") as e:
            channel.receive(torch.empty(3, 5)).wait()
        assert "\n" not in str(e.value)


@pytest.mark.integration
@pytest.mark.parametrize("part", ["order", "other end gone"])
def test_two_processes(part: str) -> None:
    assert server().call("pair", __file__, "_two", part, timeout_s=120)

"""Edges: the codecs, and channels between two real processes."""

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
from holmes_hpc.training.pipeline.codec import IDENTITY, Codec, codec

# ---- codecs

RELATIVE_ERROR = {"bf16": 2**-8, "fp16": 2**-11, "fp8": 2**-4}


def transfer(chosen: Codec, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the tensor as it arrives, and its bytes on the wire."""
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
    arrived, nbytes = transfer(codec(name, torch.float32), tensor)
    smallest_step = 2**-17 if name == "fp8" else 2**-39  # of the row's largest value
    bound = RELATIVE_ERROR[name] * tensor.abs() + tensor.abs().amax(-1, keepdim=True) * smallest_step
    assert ((arrived - tensor).abs() <= bound * 1.001).all()
    assert nbytes <= tensor.nbytes * {"fp8": 0.27, "fp16": 0.52, "bf16": 0.5}[name]


@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_rows_of_very_different_magnitude_keep_their_precision(name: str) -> None:
    """Gradients of activations may be far below fp16's range, and differ by many orders of magnitude."""
    tensor = torch.stack([torch.randn(64) * 1e-12, torch.zeros(64), torch.randn(64) * 1e12])
    arrived, _ = transfer(codec(name, torch.float32), tensor)
    assert torch.equal(arrived[1], tensor[1])
    for row in (0, 2):
        assert (arrived[row] - tensor[row]).norm() <= RELATIVE_ERROR[name] * tensor[row].norm()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_inf_and_nan_arrive_as_non_finite_values(name: str, bad: float) -> None:
    tensor = torch.ones(2, 64)
    tensor[1, 3] = bad
    arrived, _ = transfer(codec(name, torch.float32), tensor)
    assert torch.equal(arrived[0], tensor[0]) and not torch.isfinite(arrived[1]).all()


def test_nothing_is_rounded_if_that_saves_no_bytes() -> None:
    assert codec("same", torch.float32) is IDENTITY
    assert codec("bf16", torch.bfloat16) is IDENTITY and codec("fp16", torch.bfloat16) is IDENTITY
    assert codec("fp8", torch.bfloat16) is not IDENTITY


@pytest.mark.integration
def test_rounding_changes_losses_only_slightly() -> None:
    common: dict[str, Any] = {
        "layers": [[1], [1]],
        "micro_batches": [4],
        "schedule": "ahead",
        "in_flight": [3, 1],
        "steps": 8,
        "trace": False,
    }
    results = play_apart([Case(edge_dtype=name, **common) for name in ("same", "bf16", "fp8")])
    exact, bf16, fp8 = ([sum(step) / len(step) for step in ranks[-1]["losses"]] for ranks in results)
    assert exact != bf16 != fp8
    assert max(abs(a - b) for a, b in zip(exact, bf16, strict=True)) < 0.005
    assert max(abs(a - b) for a, b in zip(exact, fp8, strict=True)) < 0.05


# ---- process groups


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
    monkeypatch.setattr(point_to_point, "_open_connection", lambda *_, is_sender: None)
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
        created: list[tuple[int, ...]] = []
        channels: Any = point_to_point.build_communicator(
            plan,
            lambda edge: created.append(edge.ranks) or len(created),  # noqa: B023
            rank=rank,
            pp_group=None,
            config=SimpleNamespace(pipeline_dtype=torch.float32),
            device=torch.device("cpu"),
        )
        assert set(channels) == roles[rank]
        connections = [connection for channel in channels.values() for connection in channel.connections]
        assert len(connections) == len(set(connections))  # no two channels share a group
        assert all(len(set(ranks)) == 2 for ranks in created)
        tcp = [c for c in channels.values() if len(c.connections) == 2]
        assert all((c.codec is not IDENTITY) == (c in tcp) for c in channels.values())  # only TCP edges are rounded
        assert len(created) == len(edges_of(parallel)) * 2 + 2 * sum(1 for e in edges_of(parallel) if e == (0, 1))


def edges_of(parallel: Parallel) -> list[tuple[int, ...]]:
    edges = [g.stages for g in groups(parallel, parallel.dp, tied=True) if g.kind == "edge"]
    return edges + ([(0, 1)] if parallel.pp == 2 and parallel.virtual_stages > 1 else [])


def test_sends_without_a_wait_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's interleaved schedule never waits for a step's last send."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(point_to_point.Channel, "_post", lambda *_: [])
    channel = point_to_point.Channel("forward 0->1", [None], 1)  # type: ignore[list-item]
    config = SimpleNamespace(variable_seq_lengths=False, pipeline_dtype=torch.float32)
    monkeypatch.setattr(point_to_point.P2PCommunicator, "__init__", lambda self, group, config: None)
    communicator = point_to_point.EdgeCommunicator(
        None,
        config,
        {"forward_out": channel},  # type: ignore[arg-type]
        torch.device("cpu"),
    )
    communicator.pp_group = SimpleNamespace(rank=lambda: 0)  # type: ignore[assignment]
    for _ in range(10):
        communicator._communicate(
            tensor_send_next=torch.ones(2),
            tensor_send_prev=None,
            recv_prev=False,
            recv_next=False,
            tensor_shape=None,
            wait_on_reqs=False,
        )
    assert len(channel._leaving) <= 2


# ---- between two processes


def _run_rank(rank: int, folder: str, part: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    channel = point_to_point.Channel("forward 0->1", [dist.new_group([0, 1])], 1 - rank)
    dist.barrier()  # none ends while the other still connects
    tensors = [torch.full((3, 5), float(i)) for i in range(8)]
    if part == "order":
        if rank == 0:
            for tensor in [t.clone() for t in tensors]:
                channel.send(tensor)
                tensor.data = torch.empty(1)  # as Megatron frees a stage's outputs, but at once
            channel.close()
        else:
            events: list[Any] = []
            channel.on_transfer = lambda *event: events.append(event)
            posted = [channel.receive(torch.empty(3, 5), label) for label in range(8)]
            for transfer, tensor in zip(posted, tensors, strict=True):
                assert torch.equal(transfer.wait(), tensor) and torch.equal(transfer.wait(), tensor)
            channel.close()
            assert [e[:2] for e in events] == [("receive_forward", label) for label in range(8)]
            assert all(a[3] <= b[3] and b[2] <= b[3] for a, b in itertools.pairwise(events))
    elif rank == 0:  # rank 1 exits
        with pytest.raises(NetworkError, match=r"edge forward 0->1: .*see the log of the rank at its other end") as e:
            channel.receive(torch.empty(3, 5)).wait()
        assert "\n" not in str(e.value)


@pytest.mark.integration
@pytest.mark.parametrize("part", ["order", "other end gone"])
def test_channels_between_two_processes(part: str) -> None:
    assert server().call("pair", __file__, "_run_rank", part, timeout_s=120)

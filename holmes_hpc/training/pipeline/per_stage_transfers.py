"""Edges between stages of unequal widths: from every replica of a stage to each that it shares a micro-batch with.

They are the two-rank channels of point_to_point.py. Between stages of unlike TP a tensor is cut where the sequence is
cut differently: each rank sends its part of the sequence to the ranks that need a piece of it, so that every byte
crosses once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.pipeline.point_to_point import Channel, Edges, NewGroup, Transfer, connect, is_nccl, wait_all


class Cut:
    """A :class:`Channel` to several ranks at once, each of which has a piece of every tensor: `pieces`, the channel of
    each and the rows (parts of the sequence) that go over it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Channel, slice]] = []

    def send(self, tensor: torch.Tensor, label: Any = None) -> None:
        for channel, rows in self.pieces:
            channel.send(tensor[rows], label)

    def receive(self, into: torch.Tensor, label: Any = None) -> Transfer:
        target = into.detach()  # the same memory without a gradient, so that its parts can be written
        parts = [channel.receive(target[rows], label) for channel, rows in self.pieces]
        return Transfer("of several parts", into, partial(wait_all, parts))

    def settle(self, keep: int = 0) -> None:
        for channel, _ in self.pieces:
            channel.settle(keep)


class RoutedEdges(Edges):
    """What ``run_ahead`` sends and receives over where stages have unequal parallel. `row`: this rank's replica, as
    :class:`Order` counts."""

    def __init__(self, place: Any, row: int, device: torch.device) -> None:
        super().__init__({}, device)
        self.pp_group, self.row = place, row
        self._streams: dict[tuple[str, int], Cut] = {}

    def add(self, role: str, peer: int, channel: Channel, rows: slice) -> None:
        """`role`: forward_in, forward_out, backward_in or backward_out; `peer`: the row at the other end."""
        self.channels[channel.name] = channel
        self.on_device = self.on_device or is_nccl(channel.connections[0])
        self._streams.setdefault((role, peer), Cut()).pieces.append((channel, rows))

    def stream(self, role: str, peer: int) -> Cut:
        """What goes in that role between this row and `peer`."""
        return self._streams[role, peer]


def build_routed(
    plan: Plan, new_group: NewGroup, *, rank: int, place: Any, config: Any, device: torch.device
) -> RoutedEdges:
    """The edges of this rank. All ranks of the job call it at the same time, as they do `new_group`."""
    p, order = plan.parallel, plan.order
    stage, replica, part = p.coordinates(rank)
    edges = RoutedEdges(place, order.row(stage, replica), device)
    for edge in (group for group in plan.transports() if group.kind == "edge"):
        for role, other, channel in connect(plan, edge, new_group, rank=rank, config=config, device=device):
            peer_stage, peer, peer_part = p.coordinates(other)
            rows = shared_rows(plan.batch.sequence_length, (part, p.tp_of(stage)), (peer_part, p.tp_of(peer_stage)))
            edges.add(role, order.row(peer_stage, peer), channel, rows)
    return edges


def shared_rows(length: int, own: tuple[int, int], other: tuple[int, int]) -> slice:
    """The rows of this rank's part of a sequence that another rank has too. `own`, `other`: (which part, of how many).
    All where both have the same parts, or the whole."""
    if own[1] == other[1]:
        return slice(None)
    first = own[0] * length // own[1]
    low = max(first, other[0] * length // other[1])
    high = min((own[0] + 1) * length // own[1], (other[0] + 1) * length // other[1])
    return slice(low - first, high - first)

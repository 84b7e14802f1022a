"""Edges between stages with per-stage TP/DP.

Two replicas of neighbouring stages have edges between them if they share a micro-batch. Edges consist of
two-rank channels (point_to_point.py). Stages with different TP or CP split a sequence differently. Each rank sends the
rows of its part to the ranks that need these rows, so that every byte is sent once.
"""

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import torch

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.pipeline.point_to_point import Channel, Edges, NewGroup, Transfer, connect_edges, wait_all


class SplitChannel:
    """A :class:`Channel` to several ranks, each of which has some rows of every tensor.
    `pieces`: for each of these ranks, (the channel to it, its rows as a slice of sequence positions)."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Channel, slice]] = []

    def send(self, tensor: torch.Tensor, label: Any = None) -> None:
        for channel, rows in self.pieces:
            channel.send(tensor[rows], label)

    def receive(self, into: torch.Tensor, label: Any = None) -> Transfer:
        target = into.detach()  # the same memory without a gradient, so that its rows can be written
        transfers = [channel.receive(target[rows], label) for channel, rows in self.pieces]
        return Transfer("of several ranks", into, partial(wait_all, transfers))

    def settle(self, keep: int = 0) -> None:
        for channel, messages in Counter(channel for channel, _ in self.pieces).items():
            channel.settle(keep * messages)


class PerStageEdges(Edges):
    """The edges of a rank for ``run_eager_1f1b`` with per-stage TP/DP. `row`: this rank's stage and replica as a row of
    :class:`Order`; `split_channels`: (role, row at the other end) -> channel."""

    def __init__(
        self, pp_group: Any, row: int, device: torch.device, split_channels: dict[tuple[str, int], SplitChannel]
    ) -> None:
        super().__init__({c.name: c for split in split_channels.values() for c, _ in split.pieces}, device)
        self.pp_group, self.row, self._split_channels = pp_group, row, split_channels

    def channel(self, role: str, peer: int) -> SplitChannel:
        """Return the channel of `role` between this row of :class:`Order` and the row `peer`."""
        return self._split_channels[role, peer]


def build_per_stage_edges(
    plan: Plan, new_group: NewGroup, *, rank: int, pp_group: Any, config: Any, device: torch.device
) -> PerStageEdges:
    """Return the edges of this rank. All ranks of the job call it together, because `new_group` is collective."""
    p, order = plan.parallel, plan.order
    stage, replica, part = p.coordinates(rank)
    split_channels = defaultdict[tuple[str, int], SplitChannel](SplitChannel)
    for role, peer, channel in connect_edges(plan, new_group, rank, config.pipeline_dtype, device):
        peer_stage, peer_replica, peer_part = p.coordinates(peer)
        upper, lower = sorted([(stage, part), (peer_stage, peer_part)])
        rows = p.exchanged_rows(upper[0], lower[0], plan.batch.sequence_length)[upper[1], lower[1]]
        pieces = [(channel, above if stage < peer_stage else below) for above, below in rows]
        split_channels[role, order.row(peer_stage, peer_replica)].pieces += pieces
    return PerStageEdges(pp_group, order.row(stage, replica), device, dict(split_channels))

"""The reduce-scatter of gloo ranks: exact sums in the order of ranks, and receives before sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from holmes_hpc.training.network import reduce_scatter as module
from holmes_hpc.training.network.reduce_scatter import reduce_scatter

RANKS, SHARD = 3, 1000


def _gradients(rank: int, ranks: int) -> torch.Tensor:
    return torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(rank))


def _check_sums(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for members in ([0, 1, 2], [0, 2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        outputs = torch.empty(2, SHARD)
        gradients = _gradients(rank, len(members))
        handle = reduce_scatter(outputs[0], gradients, dist.ReduceOp.SUM, group, async_op=True)
        assert reduce_scatter(outputs[1], gradients, group=group) is None
        assert handle is not None
        handle.wait()
        expected = torch.zeros(SHARD)
        for member in members:
            expected += _gradients(member, len(members)).view(len(members), -1)[members.index(rank)]
        assert torch.equal(outputs, expected.expand(2, -1))


@pytest.mark.integration
def test_each_rank_has_the_exact_sum_of_its_shard(tmp_path: Path) -> None:
    start_processes(_check_sums, (str(tmp_path),), nprocs=RANKS, start_method="fork")


def test_receives_are_announced_before_data_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda group: [4, 7, 9])
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(module.dist, "irecv", lambda tensor, peer, group: calls.append(("receive", peer)))
    monkeypatch.setattr(module.dist, "isend", lambda tensor, peer, group: calls.append(("send", peer)))
    reduce_scatter(torch.empty(2), torch.zeros(6), group="group", async_op=True)
    assert calls == [("receive", 4), ("receive", 9), ("send", 9), ("send", 4)]


def test_other_reductions_than_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="only sums"):
        reduce_scatter(torch.empty(2), torch.zeros(6), dist.ReduceOp.MAX)

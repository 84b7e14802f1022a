"""The control tree: groups of ranks, and its all-reduce."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holmes_hpc.training.metrics import metrics_line
from holmes_hpc.training.network import process_groups
from holmes_hpc.training.network.control_tree import ControlTree, groups_of_rank
from holmes_hpc.training.rank.signals import AnyRank, ControlAllReduce

NODES = [(0, 1, 2), (3, 4), (5,), (6, 7, 8), (9, 10)]


def test_leaders_of_nodes_meet_in_groups_of_bounded_width() -> None:
    groups = {rank: groups_of_rank(rank, NODES, 3) for rank in range(11)}
    assert groups[0] == [(0, 1, 2), (0, 3, 5), (0, 6)] and groups[5] == [(0, 3, 5)] and groups[8] == [(6, 7, 8)]
    assert groups[6] == [(6, 7, 8), (6, 9), (0, 6)] and groups[9] == [(9, 10), (6, 9)]
    assert [len(group) for group in groups_of_rank(0, [range(128)])] == [16, 8]
    large = [tuple(range(8 * n, 8 * n + 8)) for n in range(2048)]
    assert [len(group) for group in groups_of_rank(0, large)] == [8, 16, 16, 8]
    assert max(len(groups_of_rank(rank, large)) for rank in range(8, 16)) == 2


def all_ranks(nodes: list[tuple[int, ...]], call: Any, width: int = 2) -> list[Any]:
    """Return what `call(rank, tree)` returns on each rank, or its error. The ranks are threads."""
    store, results = dist.HashStore(), dict[int, Any]()

    def run(rank: int) -> None:
        groups = []
        for ranks in groups_of_rank(rank, nodes, width):
            options = SimpleNamespace(
                store=dist.PrefixStore(str(ranks), store),
                group_rank=ranks.index(rank),
                group_size=len(ranks),
                timeout=timedelta(seconds=3),
            )
            groups.append(process_groups._create_gloo(options, {"interface": "lo"}))
        try:
            results[rank] = call(rank, ControlTree(rank, groups))
        except RuntimeError as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for ranks in nodes for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in sorted(results)]


def test_flags_of_one_rank_reach_all_ranks() -> None:
    def steps(rank: int, tree: ControlTree) -> list[AnyRank]:
        flags = ControlAllReduce(None, tree)
        results = []
        for step in range(11):
            flags.start(stop=rank == step, writing=rank == 10 - step, copying=False)
            results.append(flags.finish())
        return results

    for results in all_ranks(NODES, steps):
        assert results == [AnyRank(stop=True, writing=True, copying=False)] * 11


def test_rows_of_all_ranks_reach_rank_0_in_order() -> None:
    def steps(rank: int, tree: ControlTree) -> list[Any]:
        rows = [torch.tensor([step, 2.5 * rank, 1, 2, 3], dtype=torch.float64) for step in range(3)]
        gatherings = [metrics_line.Gathering(row, rank, 12, None, tree, 1, {}) for row in rows]
        return [gathering.finish() for gathering in gatherings]

    nodes = [(0, 4, 5), (1, 2), (3,), (6, 7, 8, 9, 11), (10,)]
    of_rank_0, *others = all_ranks(nodes, steps, width=3)
    assert others == [[None] * 3] * 11
    for step, rows in enumerate(of_rank_0):
        assert rows.tolist() == [[step, 2.5 * rank, 1, 2, 3] for rank in range(12)]


@pytest.mark.integration
def test_a_rank_that_is_gone_ends_the_all_reduce_of_the_others() -> None:
    def step(rank: int, tree: ControlTree) -> None:
        if rank != 4:
            tree.all_reduce(torch.zeros(3), dist.ReduceOp.MAX).wait()

    results = all_ranks(NODES[:2], step)
    assert all(isinstance(result, RuntimeError) for rank, result in enumerate(results) if rank != 4)

"""A tree of gloo groups of at most WIDTH ranks, for control traffic of large runs.

The ranks of a node are a group, or several. The first ranks of nodes are the nodes' leaders: at most WIDTH leaders are
a group, the first ranks of these groups are groups again, and so on up to one group.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 16


def groups_of_rank(rank: int, nodes: Sequence[Sequence[int]], width: int = WIDTH) -> list[tuple[int, ...]]:
    """Return the groups of `rank` in the tree, from its node's to the highest. `nodes`: the ranks of each node."""
    own = [_group(rank, next(ranks for ranks in nodes if rank in ranks), width)]
    firsts: Sequence[int] = [r for ranks in nodes for r in ranks[::width]] if own[0][0] == rank else ()
    while own[-1][0] == rank and len(firsts) > 1:  # the rank is the first of its group, and there are other groups
        own.append(_group(rank, firsts, width))
        firsts = firsts[::width]
    return [group for group in own if len(group) > 1]


def _group(rank: int, ranks: Sequence[int], width: int) -> tuple[int, ...]:
    """Return the group of `rank` when `ranks` are divided into groups of `width`."""
    start = ranks.index(rank) // width * width
    return tuple(ranks[start : start + width])


class Operation(Future[Any]):
    """An operation in progress, with the methods of torch's Work."""

    wait, is_completed = Future.result, Future.done


class ControlTree:
    """The gloo groups of `rank` in the tree. `groups`: from its node's to the highest.

    All ranks start the same operations in the same order. A thread of each rank does them one after the other. It is a
    daemon, so it does not keep a failed process from ending.
    """

    def __init__(self, rank: int, groups: Sequence[Any]) -> None:
        self._rank, self._groups = rank, groups
        self._started = SimpleQueue[tuple[Operation, Callable[[], Any]]]()
        threading.Thread(target=self._serve, name="control tree", daemon=True).start()

    def all_reduce(self, values: torch.Tensor, op: Any) -> Operation:
        """Start an all-reduce of `values` in place."""
        return self._start(lambda: self._all_reduce(values, op))

    def gather(self, row: torch.Tensor) -> Operation:
        """Start a gather of one row of equal length per rank. The result is (ranks, length) on rank 0, else None."""
        return self._start(lambda: self._gather(row))

    def _start(self, call: Callable[[], Any]) -> Operation:
        operation = Operation()
        self._started.put((operation, call))
        return operation

    def _serve(self) -> None:
        while True:
            operation, call = self._started.get()
            try:
                operation.set_result(call())
            except Exception as e:
                operation.set_exception(e)

    def _all_reduce(self, values: torch.Tensor, op: Any) -> None:
        for group in self._groups:
            group.allreduce([values], op).wait()
        for group in reversed(self._groups):  # the first rank of a group knows the result
            group.broadcast([values], dist.BroadcastOptions()).wait()

    def _gather(self, row: torch.Tensor) -> torch.Tensor | None:
        rows = torch.cat([row.new_tensor([self._rank]), row])[None]
        for group in self._groups:
            most = torch.tensor(len(rows))
            group.allreduce([most], dist.ReduceOp.MAX).wait()
            part = rows.new_full((int(most), rows.shape[1]), -1)  # rows of no rank fill it up
            part[: len(rows)] = rows
            parts = [torch.empty_like(part) for _ in range(group.size())] if group.rank() == 0 else []
            group.gather([parts] if parts else [], [part], dist.GatherOptions()).wait()
            if not parts:
                return None
            rows = torch.cat(parts)
            rows = rows[rows[:, 0] >= 0]
        return rows[rows[:, 0].argsort(), 1:]

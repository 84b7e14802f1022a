"""Exchanges through the store: outcomes, and members that are missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from holmes_hpc.errors import NetworkError
from holmes_hpc.training.network.exchange import combine_by_node, exchange

NODES = {"n1": (0, 1, 2), "n2": (3, 4), "n3": (5,)}


def combine(ranks: list[int], timeout_s: float = 30) -> list[Any]:
    """Return what each of `ranks` received, or its error."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))

    def call(rank: int) -> Any:
        try:
            kind = list[list[int]]
            of_node = lambda rows: [row["rank"] for row in rows]  # noqa: E731
            return combine_by_node(store, "x", rank, NODES, {"rank": rank}, of_node, list, kind)
        except NetworkError as e:
            return str(e)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def test_all_ranks_receive_the_values_of_nodes() -> None:
    assert combine([5, 3, 1, 0, 2, 4]) == [[[0, 1, 2], [3, 4], [5]]] * 6


def test_missing_ranks_are_named_on_all_others() -> None:
    (message,) = set(combine([0, 2, 3, 4], 0.3))
    assert message.startswith("rendezvous: ranks [1,5] (n[1,3]) did not join; look at their logs")


def test_a_store_that_is_gone_is_named() -> None:
    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            return

        def add(self, key: str, value: int) -> int:
            if "late" in key:
                raise RuntimeError("connection reset")
            return 1

    store = Gone()
    with pytest.raises(NetworkError, match=r"the store did not answer within 0.1 s; look at their logs"):
        exchange(store, "x", 0, [0, 1], 1, timeout_s=0.1)

"""The NIC types: InfiniBand, RoCE, plain Ethernet."""

from __future__ import annotations

from enum import Enum


class NicType(str, Enum):
    """What carries a node's fast traffic."""

    IB = "ib"
    ROCE = "roce"
    ETHERNET = "ethernet"

    def __str__(self) -> str:
        return self.value

    @property
    def rdma(self) -> bool:
        return self is not NicType.ETHERNET

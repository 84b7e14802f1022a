"""The NIC types, and what NCCL calls the network that each of them is used through."""

from __future__ import annotations

from enum import Enum


class NicType(str, Enum):
    """What carries a node's fast traffic. The last three need a plugin of NCCL, so a site says itself that it has them
    (its site file, or its own file of features); without that word their nodes count as Ethernet."""

    IB = "ib"
    ROCE = "roce"
    ETHERNET = "ethernet"
    EFA = "efa"
    SLINGSHOT = "slingshot"
    OMNIPATH = "omnipath"

    def __str__(self) -> str:
        return self.value

    @property
    def rdma(self) -> bool:
        return self is not NicType.ETHERNET

    @property
    def verbs(self) -> bool:
        """Whether NCCL's own IB transport serves it: by RDMA ports that sysfs shows, counts, and NCCL_IB_HCA names."""
        return self in (NicType.IB, NicType.ROCE)


# What a communicator asks for by name (`ncclConfig_t.netName`, NCCL 2.17.1 and later; capitals do not count). NCCL's
# own networks come first; the others are what their plugins call themselves, which changes with their versions. A site
# that has another one says so: `nccl_net` of a fabric in its site file, or `networks` in its own file of features.
# HPC-X's plugin for IB and RoCE calls itself IBext_v11 and the like, its UCX one UCX.
NCCL_NETWORKS = {
    NicType.IB: "IB",
    NicType.ROCE: "IB",
    NicType.ETHERNET: "Socket",
    NicType.EFA: "Libfabric",  # aws-ofi-nccl; "AWS Libfabric" in its older versions
    NicType.SLINGSHOT: "AWS Libfabric",  # the same plugin over cxi, as HPE's sites have it
    NicType.OMNIPATH: "PSM2",  # psm2-nccl
}
OWN_NETWORKS = ("IB", "Socket")  # those that NCCL has without a plugin

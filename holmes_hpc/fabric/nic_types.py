"""The NIC types, and NCCL's names of their networks.

features.yaml detects the types in Slurm's features, probe.py and nics.py in the kernel's data."""

from enum import Enum


class NicType(str, Enum):
    """The type of the NICs that carry a node's fast traffic.
    EFA, Slingshot and Omni-Path need an NCCL plugin. They are used only if the site declares them in its site file
    (`holmes site` does) or in its own file of features. Otherwise nodes with such NICs count as Ethernet nodes."""

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
        """True if NCCL's own IB transport uses this type. Its ports are then in sysfs, and NCCL_IB_HCA selects them."""
        return self in (NicType.IB, NicType.ROCE)


# The network name that a communicator requests (`ncclConfig_t.netName`, NCCL 2.17.1 and later; case-insensitive).
# NCCL's own networks come first. The others are names of plugins, which change with their versions. A site sets another
# name by `nccl_net` of a fabric in its site file, or by `networks` in its own file of features. HPC-X's plugin for IB
# and RoCE is called IBext_v11 or similar, its UCX plugin UCX.
NCCL_NETWORKS = {
    NicType.IB: "IB",
    NicType.ROCE: "IB",
    NicType.ETHERNET: "Socket",
    NicType.EFA: "Libfabric",  # aws-ofi-nccl; "AWS Libfabric" in its older versions
    NicType.SLINGSHOT: "AWS Libfabric",  # the same plugin over cxi, on HPE systems
    NicType.OMNIPATH: "PSM2",  # psm2-nccl
}
OWN_NETWORKS = ("IB", "Socket")  # the networks of NCCL without a plugin

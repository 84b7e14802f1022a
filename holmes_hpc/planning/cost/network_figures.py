"""Latency and efficiency of networks without measurements, and the traffic of NCCL's and gloo's collectives.

A plan that uses these figures says so in its assumptions. Figures of GPUs: fabric/gpu_kinds.yaml, kernel_figures.yaml.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.kernels import STACK
from holmes_hpc.schema import Checked, key


@dataclass(frozen=True)
class Link(Checked, where="calibration"):
    """The latency and efficiency of one kind of transport."""

    latency_s: Annotated[float, key("latency of a message", unit="s", ge=0)]
    # A burst may exceed the nominal rate, so values above 1 are valid.
    efficiency: Annotated[float, key("payload rate over nominal rate", gt=0)]


@dataclass(frozen=True)
class Collectives:
    """The traffic of a library's collectives: bytes that one of n ranks sends, in units of (n-1)/n of the tensor.
    `ring_reduce_scatter`: traffic of the library's own reduce-scatter. `gather_fill`: idle time of the ring in an
    all-gather, expressed as a number of blocks (1/n of the tensor) that could be sent in that time."""

    ring_reduce_scatter: float
    all_gather: float
    all_reduce: float
    gather_fill: float = 0.0

    def reduce_scatter(self, ranks: int, nodes: int, instances: int = 1) -> float:
        """Return the traffic of the reduce-scatter that sends least, for a group of `ranks` ranks on `nodes` nodes: the
        library's own, a ring that leaves each node once, or an all-to-all whose receivers compute the sums.
        Megatron-Core has no all-to-all for several optimizer `instances`."""
        per_node = ranks / nodes
        all_to_all = per_node * (ranks - per_node) / max(1, ranks - 1) if nodes > 1 else 1.0
        return min(self.ring_reduce_scatter, all_to_all) if instances == 1 else self.ring_reduce_scatter

    def is_all_to_all(self, ranks: int, nodes: int, instances: int = 1) -> bool:
        """Return whether :meth:`reduce_scatter` chooses an all-to-all, which needs a buffer as large as the tensor."""
        return ranks > 1 and self.reduce_scatter(ranks, nodes, instances) < self.ring_reduce_scatter


# NCCL uses ring algorithms (nccl-tests' PERFORMANCE.md: bus bandwidth of each). In torch 2.13, Gloo's reduce_scatter is
# an all-reduce of the complete tensor (byte counters with 2, 3 and 4 ranks). Its all-gather keeps the ring partly idle
# and takes 0.6 of a block longer (measured with 2 ranks on each network of the testbed, with 3 ranks on two networks).
NCCL = Collectives(1.0, 1.0, 2.0)
GLOO = Collectives(2.0, 1.0, 2.0, gather_fill=0.6)


def collectives(gpu: Gpu) -> Collectives:
    """Return the collectives of a rank's library: gloo on CPUs, NCCL on GPUs."""
    return GLOO if gpu.is_cpu else NCCL


UNMEASURED_NICS = tuple(str(nic) for nic in NicType if nic.rdma and not nic.verbs)

# By transport. NVLink: 230 of 300 GB/s per direction, InfiniBand: 184 of 200 GB/s, the bus bandwidths of
# nccl-tests on DGX A100 (NVIDIA's figures). TCP: the payload of a 1500-byte packet, 1448/1514.
# Latencies: a few microseconds for RDMA, tens for TCP. EFA, Slingshot and Omni-Path have no figures and use RoCE's.
NCCL_LINKS: Mapping[str, Link] = {
    "local": Link(5e-6, STACK.local),
    "ib": Link(1e-5, STACK.ib),
    "ethernet": Link(5e-5, 0.956),
    **dict.fromkeys(("roce", *UNMEASURED_NICS), Link(1e-5, STACK.roce)),
}
# CPU ranks use gloo over TCP on any NIC. Headers take 1 - 1448/1514; a message costs about a scheduler's tick.
GLOO_LINKS: Mapping[str, Link] = {"local": Link(2e-4, 0.9), **dict.fromkeys(map(str, NicType), Link(4e-4, 0.95))}

"""Published figures that stand in where nothing was measured; each is named as an assumption of the plan it served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.schema import Checked, key

CPU_MEMORY_GBPS = 10.0  # of one rank: one core's share of a server's DDR4


@dataclass(frozen=True)
class Link(Checked, where="calibration"):
    """What one kind of transport costs."""

    latency_s: Annotated[float, key("before a message's first byte", unit="s", ge=0)]
    # above 1 where a burst is faster than the nominal rate
    efficiency: Annotated[float, key("share of the nominal rate that payload gets", gt=0)]


@dataclass(frozen=True)
class Collectives:
    """How a library does its collectives: bytes that one of n ranks sends, in units of (n-1)/n of the whole tensor.
    `gather_fill`: by how many of its n blocks an all-gather takes longer than its bytes."""

    reduce_scatter: float
    all_gather: float
    all_reduce: float
    gather_fill: float = 0.0


# NCCL: ring algorithms (nccl-tests' PERFORMANCE.md: bus bandwidth of each). Gloo in torch 2.13: its reduce_scatter is
# an all-reduce of the whole tensor (measured with byte counters at 2, 3 and 4 ranks). Its all-gather's ring is not full
# all the time: at 2 ranks on each of the testbed's networks, and at 3 on two, it took 0.6 of a block longer.
NCCL = Collectives(1.0, 1.0, 2.0)
GLOO = Collectives(2.0, 1.0, 2.0, gather_fill=0.6)


def collectives(gpu: Gpu) -> Collectives:
    """CPU ranks talk by gloo, GPUs by NCCL."""
    return GLOO if gpu.is_cpu else NCCL


@dataclass(frozen=True)
class Fitted:
    """Three constants fitted to the 13 runs of Narayanan et al. (SC'21) and Yang et al. (arXiv 2312.03549) by a model
    with one share of the peak for all products. `matrix`: that share, `memory`: the share of the memory bandwidth that
    everything else reaches; both serve CPUs and what a calibration lacks (GPUs that nobody measured: kernels.py).
    `roce`: share of the nominal rate that RoCE reaches; it rests on one run."""

    matrix: float = 0.762
    memory: float = 0.825
    roce: float = 0.319


FITTED = Fitted()


UNMEASURED = tuple(str(nic) for nic in NicType if nic.rdma and not nic.verbs)

# By transport. NVLink: 230 GB/s of 300 GB/s a direction, InfiniBand: 184 of 200 GB/s, the bus bandwidths that
# nccl-tests print on DGX A100 (NVIDIA's own figures). TCP: what headers leave of a 1500-byte packet, 1448/1514.
# Latencies: a few microseconds for RDMA, tens for TCP. EFA, Slingshot and Omni-Path: nobody's figures, taken as RoCE's.
NCCL_LINKS: Mapping[str, Link] = {
    "local": Link(5e-6, 0.77),
    "ib": Link(1e-5, 0.92),
    "roce": Link(1e-5, FITTED.roce),
    "ethernet": Link(5e-5, 0.956),
    **dict.fromkeys(UNMEASURED, Link(1e-5, FITTED.roce)),
}
# CPU ranks: gloo over TCP whatever the NIC; headers take 1 - 1448/1514, and a message costs about a scheduler's tick.
GLOO_LINKS: Mapping[str, Link] = {
    "local": Link(2e-4, 0.9),
    "ib": Link(4e-4, 0.95),
    "roce": Link(4e-4, 0.95),
    "ethernet": Link(4e-4, 0.95),
    **dict.fromkeys(UNMEASURED, Link(4e-4, 0.95)),
}

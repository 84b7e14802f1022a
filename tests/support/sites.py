"""Sites for tests."""

from __future__ import annotations

from holmes_hpc.fabric.site import CPU, Gpu, NicType, Pool, Site

A100 = Gpu("a100-80gb", 312, 80, 2400)
H100 = Gpu("h100-80gb", 989, 80, 3600)


def one_fabric(gpu: Gpu, name: str = "ib-a", nodes: int = 1) -> Pool:
    """Return a fabric of InfiniBand nodes with 8 GPUs."""
    return Pool(name, NicType.IB, f"gpu-{name}", nodes, 8, 25, gpu, rdma_gbps=200)


def two_clusters(nodes: int = 4, ethernet_gbps: float = 25) -> Site:
    """Return the paper's setting: InfiniBand and RoCE nodes of 8 A100, joined by Ethernet."""
    return Site(
        "two",
        tuple(
            Pool(
                f"{nic}-a",
                NicType(nic),
                f"gpu-{nic}",
                nodes,
                8,
                ethernet_gbps,
                A100,
                rdma_gbps=200,
                constraint=f"nic_{nic}",
            )
            for nic in ("ib", "roce")
        ),
    )


def small_testbed() -> Site:
    """Return the default topology of the testbed: CPU ranks, one per node."""
    rows = (("ib-a", "ib", 0.4, 4), ("roce-a", "roce", 0.25, 4), ("eth-a", "ethernet", None, 2))
    return Site(
        "testbed",
        tuple(
            Pool(
                name,
                NicType(nic),
                name.split("-")[0],
                nodes,
                1,
                0.05,
                CPU,
                rdma_gbps=gbps,
                constraint=f"nic_{nic}",
                gres=False,
            )
            for name, nic, gbps, nodes in rows
        ),
    )

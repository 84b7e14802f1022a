"""What a site has: GPUs, fabrics; the nouns that planning and training share. Data only."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nic_types import NicType


def _positive(what: str, value: float | None, where: str) -> None:
    if value is None or not math.isfinite(value) or value <= 0:
        raise SiteError(f"{what} is {value}, must be a number above 0", where=where, hint=f"correct {what}")


@dataclass(frozen=True)
class Gpu:
    """One accelerator. `peak_tflops`: dense bf16/fp16; `intra_node_gbps`: one GPU to its peers in the node."""

    name: str
    peak_tflops: float
    memory_gib: float
    intra_node_gbps: float

    def __post_init__(self) -> None:
        for key in ("peak_tflops", "memory_gib", "intra_node_gbps"):
            _positive(key, getattr(self, key), f"gpu {self.name}")


# A CPU rank stands in for an accelerator where nodes have no GPU (the testbed, a laptop).
CPU = Gpu(name="cpu", peak_tflops=0.05, memory_gib=4, intra_node_gbps=40)


@dataclass(frozen=True)
class Fabric:
    """Nodes that reach each other by RDMA, or a group of Ethernet-only nodes.

    Rates are what one node can send, in Gb/s (1e9 bit/s): `rdma_gbps` over all its RDMA NICs (None where `nic` is
    ethernet), `ethernet_gbps` to every other node. `constraint` is the Slurm feature expression that selects its nodes.
    """

    name: str
    nic: NicType
    partition: str
    nodes: int
    gpus_per_node: int
    ethernet_gbps: float
    gpu: Gpu
    rdma_gbps: float | None = None
    constraint: str = ""
    node_names: tuple[str, ...] = ()
    gres: bool = True  # False: no GPU in Slurm's GRES, so nothing is requested and a rank is a CPU process

    def __post_init__(self) -> None:
        where = f"fabric {self.name}"
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise SiteError(f"name {self.name!r} is not letters, digits, '-', '_' or '.'", where=where, hint="rename")
        object.__setattr__(self, "nic", NicType(self.nic))
        object.__setattr__(self, "node_names", tuple(self.node_names))
        for key in ("nodes", "gpus_per_node"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SiteError(f"{key} is {value}, must be a whole number above 0", where=where, hint=f"correct {key}")
        _positive("ethernet_gbps", self.ethernet_gbps, where)
        if self.nic.rdma:
            _positive("rdma_gbps", self.rdma_gbps, where)
        elif self.rdma_gbps is not None:
            raise SiteError("an Ethernet-only fabric has rdma_gbps", where=where, hint="remove rdma_gbps or set nic")
        if self.node_names and len(self.node_names) != self.nodes:
            raise SiteError(f"{len(self.node_names)} node names for {self.nodes} nodes", where=where, hint="correct it")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def data_gbps(self) -> float:
        """The rate of the NIC that traffic inside this fabric uses."""
        return self.rdma_gbps if self.rdma_gbps is not None else self.ethernet_gbps


@dataclass(frozen=True)
class Site:
    """All fabrics of one Slurm, or of a site file. `assumptions`: what was not stated and therefore supposed."""

    name: str
    fabrics: tuple[Fabric, ...]
    assumptions: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "fabrics", tuple(self.fabrics))
        object.__setattr__(self, "assumptions", tuple(self.assumptions))
        if not self.fabrics:
            raise SiteError("no fabric", where=f"site {self.name}", hint="list at least one fabric")
        names = [f.name for f in self.fabrics]
        for name in names:
            if names.count(name) > 1:
                raise SiteError(f"two fabrics are named {name!r}", where=f"site {self.name}", hint="rename one")

    def fabric(self, name: str) -> Fabric:
        for fabric in self.fabrics:
            if fabric.name == name:
                return fabric
        raise SiteError(f"no fabric {name!r}", where=f"site {self.name}",
                        hint=f"it has {', '.join(f.name for f in self.fabrics)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, accepted back by :meth:`from_dict`."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Site:
        """The inverse of :meth:`to_dict` (a site file, which has defaults, is read by fabric.site_file)."""
        fabrics = tuple(Fabric(**{**f, "gpu": Gpu(**f["gpu"])}) for f in data["fabrics"])
        return cls(data["name"], fabrics, tuple(data.get("assumptions", ())))

    def digest(self) -> str:
        """Twelve hex digits that change when hardware, partitions or constraints change, not with states: so neither
        with the nodes that happen to be up, nor with assumptions."""
        data = [{k: v for k, v in f.items() if k not in ("node_names", "nodes")} for f in self.to_dict()["fabrics"]]
        return hashlib.sha256(json.dumps([self.name, data], sort_keys=True).encode()).hexdigest()[:12]

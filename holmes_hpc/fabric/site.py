"""The parts of a site (GPUs, pools, fabrics, links), as data for planning and training."""

import ipaddress
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from holmes_hpc.errors import Case, SiteError, nearest
from holmes_hpc.fabric.nic_types import NCCL_NETWORKS, NicType
from holmes_hpc.schema import Checked, check, key, make
from holmes_hpc.slurm.hostlist import expand

# Implementations of attention: FlashAttention-2, FlashAttention-1, FlashAttention-3, torch's own fused attention,
# Megatron-LM's fused softmax between two batched matrix multiplications, separate operations.
ATTENTION = ("flash", "flash1", "flash3", "sdpa", "softmax", "unfused")
TRANSFORMER_ENGINE = "transformer_engine"  # attention with the library's fastest kernel for the GPU
FLASH_ATTENTION = ATTENTION[:3]
FUSED_ATTENTION = ATTENTION[:4]  # scores stay on the chip
_PARTITION = re.compile(r"(?![-#])[^\s\"'`$;&|<>\\]*")
_WITHOUT_BF16 = re.compile(r"(?:^|[\W_]|gpu)([vp]100|t4)(?!\d)|rtx.?[68]000(?!.*ada)", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu(Checked, where="gpu {0.name}", error=SiteError):
    """A kind of accelerator, with the attention and norm kernels of its software if they are known."""

    name: Annotated[str, key("name of the GPU kind, as in `holmes nodes`")]
    peak_tflops: Annotated[float, key("dense bf16 or fp16", unit="TFLOP/s", gt=0)]
    memory_gib: Annotated[float, key("memory of one GPU", unit="GiB", gt=0)]
    intra_node_gbps: Annotated[float, key("send rate of one GPU to its peers in the node", unit="Gb/s", gt=0)]
    attention: Annotated[str | None, key("implementation of attention; null: not known", one_of=ATTENTION)] = None
    fused_norm: Annotated[bool | None, key("a norm is one kernel; null: not known")] = None
    nvlink_gpus: Annotated[int | None, key("GPUs that NVLink connects; null: those of a node", ge=1)] = None

    @property
    def is_cpu(self) -> bool:
        """True if it is a CPU core that stands in for an accelerator."""
        return self.name == "cpu"

    @property
    def has_bf16(self) -> bool:
        """True if its matrix units support bf16. GPUs before Ampere support neither bf16 nor FlashAttention-2."""
        return not _WITHOUT_BF16.search(self.name)


def auto_dtype(gpus: Iterable[Gpu]) -> str:
    """Return the type that ``train.dtype=auto`` selects: fp32 with CPUs, bf16 if all GPUs support it, else fp16."""
    kinds = tuple(gpus)
    return "fp32" if any(gpu.is_cpu for gpu in kinds) else "bf16" if all(gpu.has_bf16 for gpu in kinds) else "fp16"


# A CPU rank stands in for an accelerator if nodes have no GPU (the testbed, a laptop).
CPU = Gpu(name="cpu", peak_tflops=0.05, memory_gib=4, intra_node_gbps=40)
_STORAGE = (
    "RDMA devices that the job must not use: by name, IPv4 subnet or GID prefix: "
    "[mlx5_8, 10.9.0.0/16, 'fec0:0:0:1::/64']"
)


@dataclass(frozen=True)
class NicNames:
    """The NICs that the site names for its jobs. For an unset key, a rank chooses from the NICs of its kernel."""

    ethernet: Annotated[str | None, key("interface of the sockets: bond0")] = None
    hca: Annotated[tuple[str, ...], key("RDMA devices or ports: [mlx5_0, 'mlx5_1:1']")] = ()
    storage: Annotated[tuple[str, ...], key(_STORAGE)] = ()

    def __post_init__(self) -> None:
        check(self, "NICs", SiteError)
        hint = "write 10.9.0.0/16, 'fec0:0:0:1::/64', or a device's name"
        for entry in (e for e in self.storage if "/" in e):
            what = f"storage: {entry!r} is not a network:"
            with SiteError.instead_of(ValueError, where="NICs", hint=hint, what=what):
                ipaddress.ip_network(entry, strict=False)

    def over(self, fallback: "NicNames") -> "NicNames":
        """Return these names, with the names of `fallback` for unset keys."""
        return NicNames(self.ethernet or fallback.ethernet, self.hca or fallback.hca, self.storage or fallback.storage)


# Keys of a pool that are written even if they are not set: the oldest files have them.
_ALWAYS_WRITTEN = ("rdma_gbps", "constraint", "node_names", "gres")


@dataclass(frozen=True)
class Pool(Checked, where="pool {0.name}", error=SiteError):
    """Nodes of one fabric that have the same GPUs, NICs, partition and constraint. Pools with the same `fabric` form
    that fabric: their nodes reach each other by RDMA, or by Ethernet if `nic` is ethernet. A pool with an empty
    `fabric` is one by itself. Rates are those of one node, in Gb/s (1e9 bit/s). `rdma_gbps` is None without RDMA."""

    name: Annotated[str, key("name of the pool")]
    nic: Annotated[NicType, key("NIC type of its fast traffic", one_of=tuple(NicType))]
    partition: Annotated[str, key("Slurm partition of its nodes")]
    nodes: Annotated[int, key("usable nodes", ge=1)]
    gpus_per_node: Annotated[int, key("GPUs per node", ge=1)]
    ethernet_gbps: Annotated[float, key("Ethernet send rate of a node", unit="Gb/s", gt=0)]
    gpu: Annotated[Gpu, key("kind of its GPUs: {name, peak_tflops, memory_gib, intra_node_gbps}")]
    rdma_gbps: Annotated[float | None, key("send rate of a node over all its RDMA NICs", unit="Gb/s", gt=0)] = None
    constraint: Annotated[str, key("Slurm features that select its nodes")] = ""
    node_names: Annotated[tuple[str, ...], key("names of all its nodes, or none")] = ()
    gres: Annotated[bool, key("false: no GPU in Slurm's GRES, so ranks are CPU processes")] = True
    ethernet: Annotated[str | None, key("interface of its nodes' sockets; null: the fastest")] = None
    hca: Annotated[tuple[str, ...], key("RDMA devices or ports of its nodes; none named: the fastest of its type")] = ()
    storage: Annotated[tuple[str, ...], key("RDMA devices to leave out: by name, IPv4 subnet or GID prefix")] = ()
    node_nics: Annotated[Mapping[str, NicNames] | None, key("NICs of single nodes: {'ib[3-4]': {ethernet: eno2}}")] = (
        field(default=None, hash=False)
    )
    nccl_net: Annotated[str | None, key("NCCL's name of its RDMA network; null: that of the NIC type")] = None
    node_cpus: Annotated[int | None, key("CPUs per node available to jobs", ge=1)] = None
    node_memory_gib: Annotated[float | None, key("memory per node available to jobs", unit="GiB", gt=0)] = None
    node_gpus: Annotated[int | None, key("GPUs of its largest node, if gpus_per_node is lower", ge=1)] = None
    fabric: Annotated[str, key("name of its fabric; empty: that of the pool")] = ""
    exclude: Annotated[str, key("nodes that its jobs must not get, if no feature excludes them: gpu[5-8]")] = ""
    gres_type: Annotated[str | None, key("type of its GPUs in Slurm's GRES, which jobs request")] = None
    rdma_efficiency: Annotated[float | None, key("payload's share of rdma_gbps; null: its NIC's", gt=0, le=1)] = None

    def __post_init__(self) -> None:
        if self.nic in tuple(NicType):
            object.__setattr__(self, "nic", NicType(self.nic))
        super().__post_init__()

    def _mistakes(self) -> Iterator[Case]:
        for name in (self.name, self.fabric_name):
            is_valid = re.fullmatch(r"[\w.-]*[^\W_][\w.-]*", name)
            yield not is_valid, f"name {name!r} is not letters, digits, '-', '_' or '.'", "choose another name"
        is_partition, is_constraint = _PARTITION.fullmatch(self.partition), self.constraint.isprintable()
        yield not is_partition, f"no partition of Slurm can be named {self.partition!r}", "give one of `sinfo`"
        yield not is_constraint, f"no constraint of Slurm can be {self.constraint!r}", "give features in one line"
        hint = "give the rate of one node over all its RDMA NICs, in Gb/s"
        yield self.nic.rdma and self.rdma_gbps is None, "rdma_gbps is missing", hint
        count = len(self.node_names)
        problem = f"{count} node names for {self.nodes} nodes"
        yield 0 < count < self.nodes, problem, "give the names of all nodes, or none"
        problem = f"node_gpus is {self.node_gpus}, less than gpus_per_node, {self.gpus_per_node}"
        yield (self.node_gpus or math.inf) < self.gpus_per_node, problem, "correct one of them"
        has_hca = any(names.hca for names in (self._common_nics, *(self.node_nics or {}).values()))
        values = {"rdma_gbps": self.rdma_gbps, "rdma_efficiency": self.rdma_efficiency, "hca": has_hca}
        for name in (name for name, value in values.items() if value and not self.nic.rdma):
            yield True, f"an Ethernet-only pool has {name}", f"remove {name}, or set nic to its RDMA type"

    @property
    def fabric_name(self) -> str:
        """The name of its fabric."""
        return self.fabric or self.name

    @property
    def _common_nics(self) -> NicNames:
        return NicNames(self.ethernet, self.hca, self.storage)

    def nic_names(self, node: str) -> NicNames:
        """Return the NICs that the site names for `node`; entries for the node override those of the pool."""
        node_nics = next((names for hosts, names in (self.node_nics or {}).items() if node in expand(hosts)), None)
        return self._common_nics if node_nics is None else node_nics.over(self._common_nics)

    @property
    def nccl_network(self) -> str:
        """NCCL's name of the network for traffic inside the pool's fabric: RDMA, or Ethernet without RDMA."""
        return self.nccl_net or NCCL_NETWORKS[self.nic]

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def data_gbps(self) -> float:
        """The rate of one node, in Gb/s, for traffic inside this pool: RDMA, or Ethernet without RDMA."""
        return self.rdma_gbps if self.rdma_gbps is not None else self.ethernet_gbps


@dataclass(frozen=True)
class FabricLink:
    """The network between two fabrics, if it differs from the Ethernet of their nodes."""

    between: Annotated[tuple[str, ...], key("the two fabrics: [FABRIC, FABRIC]")]
    gbps: Annotated[float | None, key("rate of a node; null: that of its Ethernet", unit="Gb/s", gt=0)] = None
    delay_ms: Annotated[float, key("one-way delay beyond that of their own networks", unit="ms", ge=0)] = 0.0
    total_gbps: Annotated[float | None, key("rate that all nodes share; null: no limit", unit="Gb/s", gt=0)] = None

    def __post_init__(self) -> None:
        where = f"link {' - '.join(map(str, self.between))}" if isinstance(self.between, list | tuple) else "link"
        check(self, where, SiteError)
        is_pair = len(self.between) == len(set(self.between)) == 2
        is_empty = self.gbps is None and self.total_gbps is None and not self.delay_ms
        hint = "give gbps (Gb/s of a node), total_gbps (of all nodes), delay_ms, or several"
        SiteError.refuse(
            where,
            (not is_pair, f"between is {list(self.between)}", "name two different fabrics"),
            (is_empty, "no gbps, total_gbps or delay_ms", hint),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. `total_gbps` is left out if it is None, because older files lack the key."""
        data = {**asdict(self), "between": list(self.between)}
        return {name: value for name, value in data.items() if name != "total_gbps" or value is not None}


@dataclass(frozen=True)
class Site(Checked, where="site {0.name}", error=SiteError):
    """All pools of one Slurm, or of a site file."""

    name: Annotated[str, key("name of the site")]
    pools: Annotated[tuple[Pool, ...], key("its pools")]
    assumptions: Annotated[tuple[str, ...], key("assumptions in place of missing facts")] = ()
    links: Annotated[tuple[FabricLink, ...], key("links of fabrics: {between, gbps, total_gbps, delay_ms}")] = ()

    def _mistakes(self) -> Iterator[Case]:
        fabric_names, pairs = list(self.fabrics), [frozenset(link.between) for link in self.links]
        yield not self.pools, "no pool", "list at least one fabric or pool"
        for name, count in Counter(p.name for p in self.pools).items():
            yield count > 1, f"two pools are named {name!r}", "rename one"
        for node, count in Counter(node for pool in self.pools for node in pool.node_names).items():
            if count > 1:
                claimants = " and ".join(p.name for p in self.pools if node in p.node_names)
                yield True, f"node {node} is in pools {claimants}", "leave it in one of them"
        for name, pools in self.fabrics.items():
            problem = f"pools {' and '.join(p.name for p in pools)} of fabric {name} differ in nic"
            yield len({p.nic for p in pools}) > 1, problem, "give each fabric one NIC type"
        for p in self.pools:
            problem = f"pool {p.name} of fabric {p.fabric} has the name of another fabric"
            yield p.fabric_name != p.name and p.name in fabric_names, problem, "rename the pool"
        for name in (name for link in self.links for name in link.between):
            yield name not in fabric_names, f"a link names unknown fabric {name!r}", nearest(name, fabric_names)
        for pair, count in Counter(pairs).items():
            yield count > 1, f"two links between {' and '.join(sorted(pair))}", "remove one"

    @property
    def fabrics(self) -> dict[str, tuple[Pool, ...]]:
        """Fabric -> its pools."""
        names = dict.fromkeys(pool.fabric_name for pool in self.pools)
        return {name: tuple(pool for pool in self.pools if pool.fabric_name == name) for name in names}

    def pool(self, name: str) -> Pool:
        """Return the pool called `name`. SiteError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        left_out = [text for text in self.assumptions if ": left out: " in text]
        hint = "; ".join((f"it has {', '.join(p.name for p in self.pools)}", *left_out))
        raise SiteError(f"no pool {name!r}", where=f"site {self.name}", hint=hint)

    def restricted_to(self, pools: Sequence[Pool]) -> "Site":
        """Return the site with only `pools` and the links between them."""
        names = {pool.fabric_name for pool in pools}
        links = tuple(link for link in self.links if names.issuperset(link.between))
        return replace(self, pools=tuple(pools), links=links)

    def link(self, sender: str, receiver: str) -> FabricLink | None:
        """Return the link that the site declares between two fabrics, named in any order; None if it has none."""
        return next((link for link in self.links if frozenset(link.between) == {sender, receiver}), None)

    def rate_gbps(self, transport: str, sender: Pool, receiver: Pool | None = None, nodes: float = 1) -> float:
        """Return the nominal rate (efficiency 1), in Gb/s, from one node of `sender` to one of `receiver` (None:
        `sender`). `transport`: ``rdma``, ``tcp``, or ``local`` (the rate of one GPU to its peers in the node). `nodes`:
        the nodes of `sender` that send to `receiver` at the same time. They share the link's `total_gbps` equally."""
        link = self._link_used(transport, sender, receiver)
        if transport == "rdma":
            return min(pool.data_gbps for pool in (sender, receiver or sender))
        gbps = {"local": sender.gpu.intra_node_gbps, "tcp": sender.ethernet_gbps}[transport]
        return gbps if link is None else min(link.gbps or gbps, (link.total_gbps or math.inf) / nodes)

    def delay_s(self, transport: str, sender: Pool, receiver: Pool | None = None) -> float:
        """Return the one-way delay in seconds of the link between two fabrics; arguments as in :meth:`rate_gbps`."""
        link = self._link_used(transport, sender, receiver)
        return link.delay_ms / 1e3 if link is not None else 0.0

    def _link_used(self, transport: str, sender: Pool, receiver: Pool | None) -> FabricLink | None:
        if receiver is None or transport != "tcp":
            return None
        return self.link(sender.fabric_name, receiver.fabric_name)

    def nccl_network(self, nic: NicType | None, fabric: str | None = None) -> str | None:
        """Return NCCL's name of the fast network of `fabric`, or of `nic` without a fabric; None without both."""
        if fabric is not None:
            return self.fabrics[fabric][0].nccl_network
        return NCCL_NETWORKS[nic] if nic is not None else None

    def slowest_gbps(self, transport: str, ring: Sequence[str], nodes: float = 1) -> float:
        """Return the lowest :meth:`rate_gbps` on a ring of nodes. `ring`: the name of each node's pool, in order."""
        pools = [self.pool(name) for name in ring]
        return min(self.rate_gbps(transport, *ends, nodes) for ends in zip(pools, [*pools[1:], pools[0]], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for :meth:`from_dict`. If each pool is a fabric by itself, the key is `fabrics`."""
        pools: list[dict[str, Any]] = json.loads(json.dumps([asdict(pool) for pool in self.pools]))
        pools = [{k: v for k, v in pool.items() if v or k in _ALWAYS_WRITTEN} for pool in pools]
        for pool in pools:
            pool["gpu"] = {k: v for k, v in pool["gpu"].items() if v is not None}
        key_name = "pools" if any("fabric" in pool for pool in pools) else "fabrics"
        links = {"links": [link.to_dict() for link in self.links]} if self.links else {}
        return {"name": self.name, key_name: pools, "assumptions": list(self.assumptions), **links}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Site":
        """Return the site from the data of :meth:`to_dict`. Site files are read by fabric/site_file.py."""
        return make(cls, with_pools(data), "site", SiteError)


def with_pools(data: Any) -> Any:
    """Return the plain data of a site with the key `fabrics` renamed to `pools`, unless it already has `pools`."""
    if not isinstance(data, Mapping) or "pools" in data:
        return data
    return {"pools" if k == "fabrics" else k: v for k, v in data.items()}

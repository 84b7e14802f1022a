"""Process groups on the plan's networks, and Megatron-Core's parallel state with these groups.

Gloo gets one interface per group, NCCL one network name per communicator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import GroupTransport, Plan
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.training.network import interfaces as transports
from holmes_hpc.training.network import per_stage_groups
from holmes_hpc.training.network.control_tree import ControlTree, groups_of_rank
from holmes_hpc.training.network.interfaces import NodeTransports

GLOO = "holmes_gloo"
MAX_MESH = 64  # in larger gloo groups, pairs of ranks connect at first use; in others, all pairs connect at creation
# Megatron-Core's names of groups that communicate while gradients are reduced; the last two mean the same group.
_EXCHANGES = ("context parallel", "expert model parallel", "expert tensor and model parallel")


@cache
def _shared_device(interface: str) -> Any:
    """Return the gloo device of all control trees of this process. Each device has a thread, which never sleeps long.
    Groups of training have their own, so that each has a thread for its transfers."""
    return dist.ProcessGroupGloo.create_device(interface=interface)


def _create_gloo(options: Any, pg_options: dict[str, Any]) -> Any:
    """Return a ProcessGroupGloo on one interface. For backend gloo, ``new_group`` ignores options that set one.

    `pg_options`: the interface, and optionally the gloo device.
    The group has one thread. In torch 2.13, all threads of a group write the name of its last collective without lock.
    If two collectives end at the same time, a name of more than 15 letters (a coalesced gather) is freed twice.
    """
    gloo_options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    lazy = {"lazy_init": True} if options.group_size > MAX_MESH else {}
    create_device = partial(dist.ProcessGroupGloo.create_device, interface=pg_options["interface"], **lazy)
    gloo_options._devices = [pg_options.get("device") or create_device()]
    gloo_options._timeout = options.timeout
    gloo_options._threads = 1
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, gloo_options)


def register() -> None:
    """Register the backend with torch, once per process."""
    if GLOO.upper() not in dist.Backend.backend_list and GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(GLOO, _create_gloo, extended_api=True, devices=["cpu"])


def nccl_options(transport: Transport, site: Site, urgent: bool = False) -> Any:
    """Return new NCCL options with the name of the communicator's network. Torch writes into them, so never share them.
    `urgent`: the communicator's kernels run before those of other streams, because a stage waits for them."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = urgent
    name = site.nccl_network(transport.nic, transport.fabric)
    if name is not None:
        options.config.net_name = name
    return options


@dataclass
class Groups:
    """The process groups of a rank, each created on its transport.

    `timeout_s`: the limit of the groups' set-up and of gloo's collectives. NCCL's own timeout ends the process without
    a message, so it is at least twice `watchdog_s`, the limit of the watchdog. `records`: the groups of this rank, for
    the run record. `embedding_group`: with a tied embedding and per-stage TP/DP, the group of all ranks of the first
    and the last stage; None on other ranks. `control_tree`: in runs of more than MAX_MESH ranks.
    """

    plan: Plan
    node: NodeTransports
    rank: int
    cuda: bool
    timeout_s: float
    watchdog_s: float
    records: list[dict[str, Any]] = field(default_factory=list)
    embedding_group: Any = None
    control_tree: ControlTree | None = None
    _created: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)

    def start(self, store: dist.Store) -> None:
        """Create torch's default group, WORLD. `store`: the store of the rendezvous."""
        register()
        everyone = tuple(range(self.plan.world_size))
        # With CUDA, WORLD has only control traffic and needs no RDMA. create_group makes separate groups for training.
        transport = self.plan.transport_of(everyone, host_memory=self.cuda)
        if self.cuda:
            os.environ.update(self.node.environment)
            os.environ.update(nccl.split_defaults(self.node.defaults, os.environ)[0])
            # NCCL's monitor ends a process whose driver call hangs; the watchdog must come first.
            os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(round(self._nccl_timeout_s)))
            # NCCL's flight recorder is off in older versions; 2.11 warns of its old name.
            recorder = "TORCH_FR_BUFFER_SIZE" if torch.__version__ >= "2.11" else "TORCH_NCCL_TRACE_BUFFER_SIZE"
            os.environ.setdefault(recorder, "2000")
        with self._creation("world", everyone, transport, nccl=self.cuda) as arguments:
            # No device_id=: torch would then split communicators, and a split cannot have another network's name.
            dist.init_process_group(store=store, rank=self.rank, world_size=self.plan.world_size, **arguments)

    def new(
        self,
        ranks: Sequence[int],
        kind: str,
        *,
        transport: Transport | None = None,
        gloo: bool = False,
        urgent: bool = False,
    ) -> Any:
        """Return a new group of `ranks`. All ranks call this in the same order. Raise NetworkError if it fails.
        `transport`: None for the plan's transport of these ranks; `gloo`: use gloo, for tensors in host memory, even if
        training uses CUDA; `urgent`: see :func:`nccl_options`."""
        transport = transport or self.plan.transport_of(ranks, host_memory=gloo and self.cuda)
        with self._creation(kind, ranks, transport, nccl=self.cuda and not gloo, urgent=urgent) as arguments:
            return dist.new_group(list(ranks), group_desc=kind, **arguments)

    @contextmanager
    def _creation(
        self, kind: str, ranks: Sequence[int], transport: Transport, *, nccl: bool, urgent: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield torch's arguments for a new group that the ``with`` block creates, or raise NetworkError; record it."""
        is_member = self.rank in ranks  # other ranks may lack the interface, and do not need it
        interface = self.node.interface(transport) if is_member and not nccl else ""
        network = self.plan.site.nccl_network(transport.nic, transport.fabric)
        try:
            yield {
                "backend": "nccl" if nccl else GLOO,
                "pg_options": nccl_options(transport, self.plan.site, urgent) if nccl else {"interface": interface},
                "timeout": timedelta(seconds=self._nccl_timeout_s if nccl else self.timeout_s),
            }
        except Exception as e:
            raise transports.as_network_error(e, kind, ranks, transport, self.node.node, interface) from e
        if is_member and len(ranks) > 1:
            entry = {"kind": kind, "ranks": list(ranks), "transport": str(transport), "interface": interface or network}
            self.records.append(entry)

    def make_control_tree(self, store: dist.Store, nodes: Sequence[Sequence[int]]) -> None:
        """Create this rank's groups of the control tree. They are not torch's, so only their members create them."""
        groups = []
        for ranks in groups_of_rank(self.rank, nodes) if self.plan.world_size > MAX_MESH else ():
            transport = self.plan.transport_of(ranks, host_memory=self.cuda)
            interface = self.node.interface(transport)
            options = SimpleNamespace(
                store=dist.PrefixStore(f"tree/{abbreviated(ranks, ',')}", store),
                group_rank=ranks.index(self.rank),
                group_size=len(ranks),
                timeout=timedelta(seconds=self.timeout_s),
            )
            try:
                groups.append(_create_gloo(options, {"interface": interface, "device": _shared_device(interface)}))
            except RuntimeError as e:
                raise transports.as_network_error(e, "control", ranks, transport, self.node.node, interface) from e
        self.control_tree = ControlTree(self.rank, groups) if groups else None

    @property
    def _nccl_timeout_s(self) -> float:
        return max(self.timeout_s, 2 * self.watchdog_s)

    def edge(self, edge: GroupTransport) -> Any:
        """Return a new group of an edge's two ranks; None on the other ranks."""
        group = self.new(edge.ranks, f"edge {edge.stages[0]}-{edge.stages[1]}", transport=edge.transport, urgent=True)
        return group if self.rank in edge.ranks else None

    def create_group(
        self, ranks: Sequence[int], *, backend: str | None = None, group_desc: str = "unnamed", **_: Any
    ) -> Any:
        """Create a group for Megatron-Core, in place of ``parallel_state.create_group``.

        On a CPU, one group replaces all groups of the same ranks (dp, dp_cp, their gloo groups, …), because each group
        opens a connection per pair of ranks. They can share one because Megatron-Core uses them one after the other.
        Only the groups of expert and context parallelism communicate while gradients are reduced. They are separate.
        """
        members = tuple(ranks)
        kind = group_desc.lower().replace("_group", "").replace("_", " ")
        name = kind.split()[0] if kind in _EXCHANGES and len(members) > 1 else ""
        key = (name, members)
        if self.cuda or (key not in self._created and (name or len(members) < self.plan.world_size)):
            self._created[key] = self.new(members, kind, gloo=self.cuda and backend == "gloo")
        group = self._created.get(key, dist.group.WORLD)
        if self.rank in members:
            if parallel_state._global_process_group_list is None:
                parallel_state._global_process_group_list = [None]
            parallel_state._global_process_group_list.append(group)
        return group

    def make_parallel_state(self) -> None:
        """Create Megatron-Core's groups."""
        p = self.plan.parallel
        original = parallel_state.create_group
        parallel_state.create_group = self.create_group
        try:
            if self.plan.is_per_stage:
                with per_stage_groups.per_stage_ranks(p, self.rank):
                    parallel_state.initialize_model_parallel()
                for group in self.plan.transports():
                    if group.kind == "embd":
                        created = self.new(group.ranks, "embedding", transport=group.transport)
                        self.embedding_group = created if self.rank in group.ranks else None
            else:
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=p.tp,
                    pipeline_model_parallel_size=p.pp,
                    virtual_pipeline_model_parallel_size=p.virtual_stages if p.virtual_stages > 1 else None,
                    num_distributed_optimizer_instances=p.optimizer_instances,
                    context_parallel_size=p.cp,
                    expert_model_parallel_size=p.ep,
                    expert_tensor_parallel_size=p.etp if self.plan.model.experts.count else None,
                    order=p.order,
                )
        finally:
            parallel_state.create_group = original


def close() -> None:
    """Destroy all groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def device(local_rank: int, cuda: bool) -> torch.device:
    """Make this rank's device current and return it. If Slurm shows a task only its own GPU, that is number 0."""
    if not cuda:
        return torch.device("cpu")
    number = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)

"""How a process joins a training run: it meets the others, and gets its networks, process groups and device."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holmes_hpc import __version__
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, HolmesError, PlanError, RunFailed
from holmes_hpc.fabric.probe import probe
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import TCP
from holmes_hpc.records.owner import LockOwner, take_lock
from holmes_hpc.records.ownership import refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.job_queries import ending_state
from holmes_hpc.training.network import audit, interfaces, process_groups, rendezvous
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.nic_bytes import Traffic
from holmes_hpc.training.rank import affinity, cpu, cuda_check, launch
from holmes_hpc.training.rank.failure import RankExit, Watchdog
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import RankLog, say
from holmes_hpc.training.rank.signals import Signals

OWNER = ".training"  # in a run directory: the lock of the attempt that trains there
OWNER_WAIT_S = 15.0  # for the ranks of an attempt that has just ended
NO_ATTEMPT = -1


@dataclass
class Session:
    """A rank that has met the others. `nodes`: every rank's networks; `cpus`: where it runs beside a GPU, in words;
    `owned`: rank 0's open lock of the run directory."""

    launch: Launch
    plan: Plan
    run: RunDirectory
    attempt: int
    store: dist.Store
    nodes: list[NodeTransports]
    groups: process_groups.Groups
    device: torch.device
    traffic: Traffic
    cpus: str = ""
    owned: int | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def close(self) -> None:
        """Leave the groups and the store; rank 0, which holds the store, last."""
        process_groups.close()
        self.store.set(f"left/{self.launch.rank}", "1")
        if self.launch.rank == 0:
            try:
                self.store.wait([f"left/{r}" for r in range(self.launch.world_size)], timedelta(seconds=10))
            except RuntimeError:
                say("some ranks did not say goodbye within 10 s")
            rendezvous.unpublish(self.run.path, self.launch)
        if self.owned is not None:
            os.close(self.owned)


def run_directory(path: str | None) -> RunDirectory:
    """The directory of this run. RunFailed when it is not there on this node."""
    if not path:
        raise RunFailed("no run_dir", where="train", hint="give run_dir=DIR")
    run = RunDirectory(path)
    deadline = time.monotonic() + 20  # rank 0 may be making it, on a file system that takes its time
    while not run.exists():
        if time.monotonic() > deadline:
            raise RunFailed(
                "no run.yaml", where=str(run.path), hint="put run_dir on a file system that all nodes share"
            )
        time.sleep(0.1)
    return run


def as_rank(
    config: Configuration, unrecorded: Sequence[str], work: Callable[[Session, Watchdog, Signals], dict[str, Any]]
) -> dict[str, Any]:
    """Join the run as one rank, do `work` there and return its result. `work` ends with :meth:`Session.close`, while
    the groups' users are alive.

    A failure is one line in the log and in exits/, and the same exit code on every rank. `unrecorded`: the keys of
    `config` that an older record lacks.
    """
    gc.freeze()  # what is loaded stays: Megatron-Core looks for garbage in every save, in all of it for half a second
    own = launch.read()
    run = run_directory(config.run_dir)
    log, rank_exit = RankLog(run, own), RankExit(run, own)
    try:
        if own.rank == 0 and unrecorded:
            say(f"an older version recorded it without {', '.join(unrecorded)}: defaults are used")
        with Signals() as signals, Watchdog(rank_exit, config.train.watchdog_s, speaks=own.rank == 0) as watchdog:
            plan = Plan.read(config.plan_file or run.plan_path)
            here = start(
                config.train, own, plan, run, rank_exit, bind_cpus=config.slurm.bind_cpus, goes_on=watchdog.setting_up
            )
            result = work(here, watchdog, signals)
        if result.get("preempted"):
            rank_exit.ended("preempted", signal=signals.told)
        else:
            rank_exit.ended("completed")
        return result
    except Exception as e:
        sys.exit(rank_exit.failed(e))
    finally:
        log.close()
        gc.unfreeze()  # else Triton's bindings report, as the process ends, each object that was not freed


def start(
    train: TrainConfig,
    own: Launch,
    plan: Plan,
    run: RunDirectory,
    rank_exit: RankExit,
    bind_cpus: bool,
    goes_on: Callable[[str], None],
) -> Session:
    """Meet the other ranks, decide the networks, make the groups. Everything that can be wrong with this rank's place,
    GPU or network is one line, on every rank, before the first group is made. `goes_on` is told each part of it."""
    began, owned = time.perf_counter(), None
    goes_on("a look at this node's devices and networks")
    try:
        if own.rank == 0:
            owned = _own(own, run, rank_exit)
            rank_exit.attempt = run.start_attempt({"host": own.node, "by": own.by, "plan_id": plan.id})
        launch.check(own, plan)
        on_gpu = cuda_check.wanted(train.device, plan)
        _set_up_device(plan, own, on_gpu)
        remarks = _check_cuda(plan, own, on_gpu, train)
        nics = probe() if own.one_host else interfaces.site_nics(plan, own.rank, probe(), own.node)
        traffic = Traffic(plan, own, nics)
        node = interfaces.node_transports(plan, own.rank, nics, own.node, own.one_host, on_gpu)
        warnings = interfaces.refuse_overrides(node)
    except HolmesError as e:
        _tell_the_others(own, run, rank_exit, e)
        raise
    goes_on("meeting the other ranks")
    store = _meet(own, run, node, rank_exit, train.net_timeout_s)
    nodes = _exchange(own, store, node, on_gpu)
    goes_on("checking the links between nodes")
    if not own.one_host:
        interfaces.check_placement(plan, nodes)
        interfaces.check_addresses(nodes, launch.job_nodes(os.environ) if own.by == "srun" else ())
        warnings += interfaces.check_links(plan, own.rank, own.local_rank == 0, nodes, store)
    for line in (*warnings, *([*remarks, *interfaces.log_lines(node)] if own.local_rank == 0 else ())):
        say(str(line))
    if own.local_rank == 0 and not own.one_host:
        rank_exit.guard(audit.nic_check(node))
    goes_on("making process groups")
    made = process_groups.Groups(plan, node, own.rank, on_gpu, train.net_timeout_s, train.watchdog_s)
    device = process_groups.device(own.local_rank, on_gpu)
    process_groups.check_devices(device, own.rank, store, nodes)
    _check_memory(plan, own, device, store)
    cpus = affinity.bind(torch.cuda.get_device_properties(device)) if on_gpu and bind_cpus else ""
    made.start(dist.PrefixStore("world", store))
    made.make_parallel_state()
    if own.rank == 0:
        where = "one node" if nodes[0].one_host else f"{len({n.node for n in nodes})} nodes"
        took_s = time.perf_counter() - began
        say(f"{own.world_size} ranks on {where} met in {took_s:.1f} s ({own.by}, {device.type})")
    return Session(
        own,
        plan,
        run,
        rank_exit.attempt,
        store,
        nodes,
        groups=made,
        device=device,
        traffic=traffic,
        cpus=cpus,
        owned=owned,
    )


def _fp8_sizes(plan: Plan, rank: int) -> dict[str, int]:
    """What the sides of a rank's products are made of."""
    m, tp = plan.model, plan.parallel.tp_of(plan.parallel.coordinates(rank)[0])
    return {
        "tokens of a micro-batch": plan.batch.micro_size * plan.batch.sequence_length,
        "model.hidden": m.hidden,
        "model.ffn on a rank": m.ffn // tp,
        "width of the queries on a rank": m.query_width // tp,
        "width of the keys on a rank": m.key_width // tp,
    }


def _own(own: Launch, run: RunDirectory, rank_exit: RankExit) -> int:
    """Rank 0 makes the run's directory its own, as long as it lives; the open lock comes back. RecordError where
    another attempt lives in it, or where others may write there; then nothing is recorded."""
    rank_exit.attempt = NO_ATTEMPT
    refuse_other_writers(run.path)
    job = own.key.removeprefix("slurm-").partition("-")[0] if own.by == "srun" else ""

    def is_over(other: LockOwner) -> bool:
        """Return whether its job has ended: where its node died, the file server may hold the lock for a while."""
        if not other.job or other.host == own.node:
            return False
        return other.job == job or ((state := ending_state(other.job)) is not None and state.ended)

    return take_lock(run.path / OWNER, LockOwner.current("an attempt", job), is_over, OWNER_WAIT_S)


def _set_up_device(plan: Plan, own: Launch, on_gpu: bool) -> None:
    """What has to be said before anything computes: to CUDA its queues, to torch on a CPU its threads."""
    if on_gpu:
        if (warning := cuda_check.connect_queues(plan, own.rank, os.environ)) is not None:
            say(warning)
        return
    cpu.install()
    ranks_here = plan.components[plan.component_of(own.rank)].gpus_per_node
    torch.set_num_threads(
        cpu.threads(os.environ, own.world_size if own.one_host else ranks_here, len(os.sched_getaffinity(0)))
    )


def _check_cuda(plan: Plan, own: Launch, on_gpu: bool, train: TrainConfig) -> list[str]:
    """Raise what forbids training on CUDA; lines for the log come back. Where the plan counts on GPUs and none can be
    used, a cluster's nodes are wrong; one machine alone may train on its CPUs, if it has no driver either."""
    planned = not plan.site.fabric(plan.places[own.rank].fabric).gpu.is_cpu
    if not on_gpu and train.fp8 is None and (train.device == "cpu" or not planned):
        return []
    facts = cuda_check.gather()
    problem = cuda_check.problem(facts)
    if problem is not None and (on_gpu or facts.driver or not own.one_host):
        raise problem
    if train.fp8 is not None:
        capability = torch.cuda.get_device_capability() if on_gpu else (0, 0)
        cuda_check.refuse_fp8(train.fp8, on_gpu, facts.te, capability, _fp8_sizes(plan, own.rank))
    return list(cuda_check.remarks(facts))


def _check_memory(plan: Plan, own: Launch, device: torch.device, store: dist.Store) -> None:
    """No rank's GPU has less free memory than the plan needs there. PlanError on every rank: the first one's."""
    if device.type != "cuda" or plan.predicted is None:
        return
    stage, *_ = plan.parallel.coordinates(own.rank)
    free, total = torch.cuda.mem_get_info(device)
    needed = plan.predicted.memory_bytes_per_gpu[stage]
    problem = cuda_check.memory_problem(free, total, needed, f"GPU {device.index} of node {own.node}")
    message = problem and {"what": problem.what, "where": problem.where, "hint": problem.hint}
    for problem_there in filter(None, rendezvous.exchange(store, "memory", own.rank, range(own.world_size), message)):
        raise PlanError(**problem_there)


def _tell_the_others(own: Launch, run: RunDirectory, rank_exit: RankExit, error: HolmesError) -> None:
    """This rank cannot take part: the others should not wait for it."""
    if own.address is None and own.rank == 0:
        rendezvous.publish_failure(run.path, own, rank_exit.attempt, str(error), error.exit_code)
        return
    with contextlib.suppress(HolmesError, RuntimeError):  # rank 0 may have failed in the same way
        rank_exit.watch(dist.PrefixStore(f"holmes/{own.key}", _others_store(own, run, rank_exit, 10)))


def _others_store(
    own: Launch, run: RunDirectory, rank_exit: RankExit, timeout_s: float, interface: str = ""
) -> dist.Store:
    """Return the store that the launcher or rank 0 has started."""
    if own.address is not None:
        return rendezvous.launcher_store(own, timeout_s)
    return rendezvous.join_store(run.path, own, timeout_s, interface, partial(setattr, rank_exit, "attempt"))


def _meet(own: Launch, run: RunDirectory, node: NodeTransports, rank_exit: RankExit, timeout_s: float) -> dist.Store:
    """Return the store where all ranks meet; from here on this rank hears of the others' failures."""
    if own.address is not None or own.rank > 0:
        raw = _others_store(own, run, rank_exit, timeout_s, node.interface(TCP))
    else:
        try:
            raw = rendezvous.host_store(run.path, own, node.address, rank_exit.attempt, timeout_s)
        except HolmesError as e:
            _tell_the_others(own, run, rank_exit, e)
            raise
    # torch's stubs lack clone
    store, own_store = (dist.PrefixStore(f"holmes/{own.key}", s) for s in (raw, raw.clone()))  # type: ignore[attr-defined]
    if own.address is not None and own.rank == 0:
        store.set("attempt", str(rank_exit.attempt))
    elif own.address is not None:
        rank_exit.attempt = int(store.get("attempt"))
    rank_exit.watch(own_store)
    return store


def _exchange(own: Launch, store: dist.Store, node: NodeTransports, on_gpu: bool) -> list[NodeTransports]:
    """Every rank's networks, as they see them. ConfigError on all ranks when some would train on GPUs and some on
    CPUs."""
    if own.rank == 0:
        store.set("token", secrets.token_hex(8))
    device = "a GPU" if on_gpu else "a CPU"
    rows = rendezvous.exchange(store, "node", own.rank, range(own.world_size), {"node": node, "device": device})
    nodes = [msgspec.convert(row["node"], NodeTransports) for row in rows]
    devices = [f"{row['device']} (node {node.node})" for row, node in zip(rows, nodes, strict=True)]
    other = next((rank for rank, row in enumerate(rows) if row["device"] != rows[0]["device"]), None)
    if other is not None:
        raise ConfigError(
            f"rank 0 has {devices[0]}, rank {other} {devices[other]}",
            where="train.device",
            hint="see `nvidia-smi` on both nodes, or use train.device=cpu",
        )
    return nodes


def tell_groups(session: Session) -> None:
    """On all ranks, before rank 0 calls :func:`describe`: the groups of which this rank is its node's first member."""
    rank, hosts = session.launch.rank, [n.node for n in session.nodes]
    own = [
        entry for entry in session.groups.records if rank == next(r for r in entry["ranks"] if hosts[r] == hosts[rank])
    ]
    session.store.set(f"groups/{rank}", json.dumps(own))
    session.store.set(f"cpus/{rank}", session.cpus)


def _groups(session: Session) -> list[dict[str, Any]]:
    """Every group once: its ranks, its transport, and its NIC on each of its nodes (``eth0: ib[1-2],roce1``)."""
    texts = session.store.multi_get([f"groups/{rank}" for rank in range(session.launch.world_size)])
    found: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for node, text in zip(session.nodes, texts, strict=True):
        for entry in json.loads(text):
            nic = node.nic(entry["interface"])
            nics = found.setdefault((entry["kind"], tuple(entry["ranks"]), entry["transport"]), {})
            if node.node not in nics.setdefault(nic, []):
                nics[nic].append(node.node)
    return [
        {
            "kind": kind,
            "ranks": list(ranks),
            "transport": transport,
            "interfaces": {nic: compress(nodes) for nic, nodes in nics.items()},
        }
        for (kind, ranks, transport), nics in found.items()
    ]


def describe(session: Session) -> dict[str, Any]:
    """What run.yaml says about this start: hosts, NICs per group, versions, device."""
    import megatron.core

    cpus = [text.decode() for text in session.store.multi_get([f"cpus/{r}" for r in range(len(session.nodes))])]
    return {
        **({"cpus": cpus} if any(cpus) else {}),
        "hosts": [n.node for n in session.nodes],
        "nics": _groups(session),
        "versions": {
            "holmes": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
        },
        "device": torch.cuda.get_device_name(session.device) if session.cuda else "cpu",
        "plan_id": session.plan.id,
    }

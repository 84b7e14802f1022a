"""The session of a rank: meet the other ranks, and set up this rank's networks, process groups and device."""

import contextlib
import gc
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc import __version__
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import HolmesError, RunFailed, counted
from holmes_hpc.fabric.probe import probe
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan.transport import TCP
from holmes_hpc.records.locks import TRAINING_LOCK, LockOwner, take_lock
from holmes_hpc.records.ownership import refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.job_queries import ending_state
from holmes_hpc.training.network import audit, interfaces, process_groups, rank_facts, rendezvous
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.nic_bytes import Traffic
from holmes_hpc.training.network.peer_watch import watch_next_nodes
from holmes_hpc.training.rank import affinity, cpu, cuda_check
from holmes_hpc.training.rank.failure import RankExit, Watchdog, exit_failed
from holmes_hpc.training.rank.launch import Launch, check_launch, job_nodes, ranks_of_nodes, read_launch
from holmes_hpc.training.rank.log import RankLog, log_line
from holmes_hpc.training.rank.signals import Signals
from holmes_hpc.waiting import wait_until

LOCK_WAIT_S = 15.0  # wait for the run's lock, because rank 0 of the previous attempt may hold it until it exits
NO_ATTEMPT = -1  # number of an attempt that the run directory does not record


@dataclass
class Session:
    """The state of a rank that is connected to all other ranks.

    `node_of_rank`: the transports of each rank's node; `cpus`: text about the CPUs to which this rank is bound, from
    affinity.bind; `run_lock`: on rank 0, the file descriptor of the run directory's lock.
    """

    launch: Launch
    plan: Plan
    run: RunDirectory
    attempt: int
    store: dist.Store
    node_of_rank: list[NodeTransports]
    groups: process_groups.Groups
    device: torch.device
    traffic: Traffic
    cpus: str = ""
    run_lock: int | None = None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def record_load(self, loaded: str, step: int) -> None:
        """Record what this attempt has loaded, its first step and its nodes. Only rank 0 writes."""
        if self.launch.rank == 0:
            nodes = compress(sorted({n.node for n in self.node_of_rank}))
            self.run.update_attempt(self.attempt, loaded=loaded, first_step=step + 1, nodes=nodes)

    def close(self) -> None:
        """Leave the groups and the store. Rank 0, which hosts the store, leaves last."""
        for file in (self.run.metrics_file, self.run.ranks_file):
            file.finish()
        process_groups.close()
        if self.store.add("left", 1) == self.launch.world_size:
            self.store.set("all left", "1")
        if self.launch.rank == 0:
            try:
                self.store.wait(["all left"], timedelta(seconds=10))
            except RuntimeError:
                log_line("some ranks did not leave the session within 10 s")
            with contextlib.suppress(OSError):
                rendezvous.published_path(self.run.path, self.launch).unlink()
        if self.run_lock is not None:
            os.close(self.run_lock)


def run_directory(path: str | None) -> RunDirectory:
    """Return the directory of this run. Raise RunFailed if this node does not see it."""
    if not path:
        raise RunFailed("no run_dir", where="train", hint="give run_dir=DIR")
    run = RunDirectory(path)
    if not wait_until(run.exists, 20, 0.1):  # rank 0 may still be creating it on a slow file system
        raise RunFailed("no run.yaml", where=str(run.path), hint="put run_dir on a file system that all nodes share")
    return run


def run_in_session(
    config: Configuration, unrecorded: Sequence[str], task: Callable[[Session, Watchdog, Signals], dict[str, Any]]
) -> dict[str, Any]:
    """Join the run as one rank, run `task` and return its result.

    `task` must call :meth:`Session.close` as its last step, while the objects that use the process groups still exist.
    A failure is recorded as one line in the log and in exits/. All ranks then exit with the same code. `unrecorded`:
    keys of `config` that the run's record lacks, because an older version wrote it.
    """
    gc.freeze()  # Megatron-Core collects garbage in every save, and scanning all loaded modules would take 0.5 s
    launch = read_launch()
    run = run_directory(config.run_dir)
    log, rank_exit = RankLog(run, launch), RankExit(run, launch)
    try:
        if launch.rank == 0 and unrecorded:
            log_line(f"an older version recorded the run without {', '.join(unrecorded)}: defaults are used")
        with (
            Signals() as signals,
            Watchdog(rank_exit, config.train.watchdog_s, logs_progress=launch.rank == 0) as watchdog,
        ):
            plan = Plan.read(config.plan_file or run.plan_path)
            session = open_session(config, launch, plan, run, rank_exit, watchdog.start_set_up)
            result = task(session, watchdog, signals)
        if result.get("preempted"):
            rank_exit.record_end("preempted", signal=signals.received)
        else:
            rank_exit.record_end("completed")
        return result
    except Exception as e:
        exit_failed(rank_exit.record_failure(e))
    finally:
        log.close()
        gc.unfreeze()  # otherwise Triton's bindings report every object that is not freed at exit


def open_session(
    config: Configuration,
    launch: Launch,
    plan: Plan,
    run: RunDirectory,
    rank_exit: RankExit,
    start_phase: Callable[[str], None],
) -> Session:
    """Meet the other ranks, choose the networks and create the process groups.

    If a component, GPU or network is wrong, every rank reports this in one line before the first group is created.
    `start_phase` is called with the name of each phase when the phase starts.
    """
    start, run_lock, train = time.perf_counter(), None, config.train
    start_phase("checking devices and networks of this node")
    try:
        if launch.rank == 0:
            run_lock = _lock_run(launch, run, rank_exit)
            rank_exit.attempt = run.start_attempt({"host": launch.node, "by": launch.launcher, "plan_id": plan.id})
        check_launch(launch, plan)
        on_gpu = cuda_check.use_cuda(train.device, plan)
        _set_up_device(plan, launch, on_gpu)
        cuda_warnings = _check_cuda(plan, launch, on_gpu, train)
        nics = probe() if launch.one_host else interfaces.site_nics(plan, launch.rank, probe(), launch.node)
        traffic = Traffic(plan, launch, nics)
        node = interfaces.node_transports(plan, launch.rank, nics, launch.node, launch.one_host, on_gpu)
        warnings = interfaces.refuse_overrides(node)
    except HolmesError as e:
        _report_to_ranks(launch, run, rank_exit, e)
        raise
    start_phase("meeting the other ranks")
    store = _meet(launch, run, node, rank_exit, train.net_timeout_s)
    nodes = ranks_of_nodes(launch, plan)
    if launch.rank == 0:
        store.set("token", secrets.token_hex(8))  # for the link check
    node_of_rank = rank_facts.exchange_transports(launch, store, node, on_gpu, nodes)
    start_phase("checking the links between nodes")
    if not launch.one_host:
        interfaces.check_placement(plan, node_of_rank)
        interfaces.check_addresses(node_of_rank, job_nodes(os.environ) if launch.launcher == "srun" else ())
        warnings += interfaces.check_links(plan, launch.rank, launch.local_rank == 0, node_of_rank, store)
    node_lines = [*cuda_warnings, *interfaces.log_lines(node)] if launch.local_rank == 0 else []
    for line in (*warnings, *node_lines):
        log_line(str(line))
    if launch.local_rank == 0 and not launch.one_host:
        nic_check, watch = audit.nic_check(node), watch_next_nodes(launch.rank, node_of_rank, store)
        rank_exit.poll_cause(lambda: nic_check() or watch.find_silence())
    start_phase("creating process groups")
    groups = process_groups.Groups(plan, node, launch.rank, on_gpu, train.net_timeout_s, train.watchdog_s)
    device = process_groups.device(launch.local_rank, on_gpu)
    rank_facts.check_gpus(plan, launch, device, store, nodes)
    cpus = affinity.bind(torch.cuda.get_device_properties(device)) if on_gpu and config.slurm.bind_cpus else ""
    groups.start(dist.PrefixStore("world", store))
    rank_exit.describe_links = partial(interfaces.links_of_rank, groups.records, node_of_rank, launch.rank)
    groups.make_control_tree(store, [*nodes.values()])
    groups.make_parallel_state()
    if launch.rank == 0:
        where = "one node" if node_of_rank[0].one_host else f"{len({n.node for n in node_of_rank})} nodes"
        ranks, connected_s = counted(launch.world_size, "rank"), time.perf_counter() - start
        log_line(f"{ranks} on {where} connected in {connected_s:.1f} s ({launch.launcher}, {device.type})")
    return Session(
        launch,
        plan,
        run,
        rank_exit.attempt,
        store,
        node_of_rank,
        groups=groups,
        device=device,
        traffic=traffic,
        cpus=cpus,
        run_lock=run_lock,
    )


def _fp8_sizes(plan: Plan, rank: int) -> dict[str, int]:
    """Return name -> dimension of a rank's matrix multiplications. FP8 needs multiples of its block size."""
    m, tp = plan.model, plan.parallel.tp_of(plan.parallel.coordinates(rank)[0])
    return {
        "tokens of a micro-batch": plan.parts.micro_size * plan.parts.sequence_length,
        "model.hidden": m.hidden,
        **({"width of an expert": m.ffn_width // plan.parallel.etp} if m.experts.count else {}),
        **({"model.ffn on a rank": m.ffn // tp} if m.experts.first_dense else {}),
        f"model.{'experts.shared' if m.experts.count else 'ffn'} on a rank": m.tp_ffn // tp,
        "width of the queries on a rank": m.query_width // tp,
        "width of the keys on a rank": m.key_width // tp,
    }


def _lock_run(launch: Launch, run: RunDirectory, rank_exit: RankExit) -> int:
    """Lock the run directory for this attempt and return the lock's descriptor. Called by rank 0.

    Raise RecordError, and record nothing, if another attempt holds the lock or other users may write to the directory.
    """
    rank_exit.attempt = NO_ATTEMPT
    refuse_other_writers(run.path)
    job = launch.key.removeprefix("slurm-").partition("-")[0] if launch.launcher == "srun" else ""

    def is_over(owner: LockOwner) -> bool:
        """Return whether the lock owner's job has ended or was requeued as this one; a dead node's lock may stay."""
        if not owner.job or owner.host == launch.node:
            return False
        return owner.job == job or ((state := ending_state(owner.job)) is not None and state.ended)

    return take_lock(run.path / TRAINING_LOCK, LockOwner.current("an attempt", job), is_over, LOCK_WAIT_S)


def _set_up_device(plan: Plan, launch: Launch, on_gpu: bool) -> None:
    """Set the number of CUDA's hardware queues (on a CPU: torch's threads). Call this before any computation."""
    if on_gpu:
        if (warning := cuda_check.set_queue_count(plan, launch.rank, os.environ)) is not None:
            log_line(warning)
        return
    cpu.install()
    node_ranks = launch.world_size if launch.one_host else plan.components[plan.component_of(launch.rank)].gpus_per_node
    torch.set_num_threads(cpu.thread_count(os.environ, node_ranks, len(os.sched_getaffinity(0))))


def _check_cuda(plan: Plan, launch: Launch, on_gpu: bool, train: TrainConfig) -> list[str]:
    """Raise ConfigError if a problem prevents training on CUDA. Otherwise, return warnings for the log.

    In a job of several nodes, it is an error if the plan gives this rank a GPU and the node cannot use one. A single
    machine without an NVIDIA driver trains on its CPUs instead.
    """
    has_planned_gpus = not plan.site.pool(plan.places[launch.rank].pool).gpu.is_cpu
    if not on_gpu and train.fp8 is None and (train.device == "cpu" or not has_planned_gpus):
        return []
    facts = cuda_check.collect_facts()
    if on_gpu or facts.driver_cuda or not launch.one_host:
        cuda_check.refuse_unusable(facts)
    if train.fp8 is not None:
        capability = torch.cuda.get_device_capability() if on_gpu else (0, 0)
        cuda_check.refuse_fp8(train.fp8, on_gpu, facts.te_version, capability, _fp8_sizes(plan, launch.rank))
    return list(cuda_check.cuda_warnings(facts))


def _report_to_ranks(launch: Launch, run: RunDirectory, rank_exit: RankExit, error: HolmesError) -> None:
    """Let the other ranks learn of this rank's `error` before :func:`_meet` has returned.

    Without torchrun, rank 0 hosts no store yet, so it publishes the error in the run directory. In all other cases,
    `rank_exit` is connected to the store, through which it will report the error."""
    if launch.address is None and launch.rank == 0:
        rendezvous.publish_failure(run.path, launch, rank_exit.attempt, str(error), error.exit_code)
        return
    with contextlib.suppress(HolmesError, RuntimeError):  # rank 0 may have failed in the same way
        rank_exit.watch(dist.PrefixStore(f"holmes/{launch.key}", _join_store(launch, run, rank_exit, 10)))


def _join_store(
    launch: Launch, run: RunDirectory, rank_exit: RankExit, timeout_s: float, interface: str = ""
) -> dist.Store:
    """Return the store that the launcher or rank 0 has started."""
    if launch.address is not None:
        return rendezvous.launcher_store(launch, timeout_s)
    return rendezvous.join_store(run.path, launch, timeout_s, interface, partial(setattr, rank_exit, "attempt"))


def _meet(launch: Launch, run: RunDirectory, node: NodeTransports, rank_exit: RankExit, timeout_s: float) -> dist.Store:
    """Return the store where all ranks meet, and start to watch it for failures of other ranks."""
    if launch.address is not None or launch.rank > 0:
        raw_store = _join_store(launch, run, rank_exit, timeout_s, node.interface(TCP))
    else:
        try:
            raw_store = rendezvous.host_store(run.path, launch, node.address, rank_exit.attempt, timeout_s)
        except HolmesError as e:
            _report_to_ranks(launch, run, rank_exit, e)
            raise
    store, watched_store = (
        dist.PrefixStore(f"holmes/{launch.key}", s)
        for s in (raw_store, raw_store.clone())  # type: ignore[attr-defined]  # torch's stubs lack clone
    )
    if launch.address is not None and launch.rank == 0:
        store.set("attempt", str(rank_exit.attempt))
    elif launch.address is not None:
        rank_exit.attempt = int(store.get("attempt"))
    rank_exit.watch(watched_store)
    return store


def publish_groups(session: Session) -> None:
    """Write to the store this rank's CPUs, and the process groups in which it is the first rank of its node.

    All ranks call this before rank 0 calls :func:`describe`.
    """
    rank, hosts = session.launch.rank, [n.node for n in session.node_of_rank]
    entries = [e for e in session.groups.records if rank == next(r for r in e["ranks"] if hosts[r] == hosts[rank])]
    session.store.set(f"groups/{rank}", json.dumps(entries))
    session.store.set(f"cpus/{rank}", session.cpus)


def _describe_groups(session: Session) -> list[dict[str, Any]]:
    """Return each process group once: kind, ranks, transport, and the nodes of each NIC (``eth0: ib[1-2],roce1``)."""
    texts = session.store.multi_get([f"groups/{rank}" for rank in range(session.launch.world_size)])
    nics_of_group: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for node, text in zip(session.node_of_rank, texts, strict=True):
        for entry in json.loads(text):
            nic = node.nic(entry["interface"])
            nodes_of_nic = nics_of_group.setdefault((entry["kind"], tuple(entry["ranks"]), entry["transport"]), {})
            if node.node not in nodes_of_nic.setdefault(nic, []):
                nodes_of_nic[nic].append(node.node)
    groups = []
    for (kind, ranks, transport), nodes_of_nic in nics_of_group.items():
        nics = {nic: compress(nodes) for nic, nodes in nodes_of_nic.items()}
        groups.append({"kind": kind, "ranks": list(ranks), "transport": transport, "interfaces": nics})
    return groups


def describe(session: Session) -> dict[str, Any]:
    """Return the entries of run.yaml for this attempt: hosts, NICs of each group, CPUs, versions, device, plan."""
    import megatron.core

    cpus = [text.decode() for text in session.store.multi_get([f"cpus/{r}" for r in range(session.launch.world_size)])]
    return {
        **({"cpus": cpus} if any(cpus) else {}),
        "hosts": [n.node for n in session.node_of_rank],
        "nics": _describe_groups(session),
        "versions": {
            "holmes": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
        },
        "device": torch.cuda.get_device_name(session.device) if session.cuda else "cpu",
        "plan_id": session.plan.id,
    }

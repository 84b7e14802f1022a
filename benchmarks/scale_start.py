"""Measure how many simulated ranks meet, exchange their facts and start the control all-reduce of the first step.

    python benchmarks/scale.py --start 64,256,1024,4096

A simulated rank is a thread that speaks the real protocols over loopback: it authenticates at rank 0, connects to its
TCPStore twice, exchanges its node's facts (8 ranks per node), joins its groups of the control tree, and ends the first
all-reduce of flags and the first gather of 40 numbers. Rank 0's node has a process of its own; other processes have 64
ranks each. Four things differ from a run: a process does not check that its proxies' connections are its own, which
takes long among so many sockets on one machine; no rank polls the store for failures; a process has one gloo thread for
the trees of its ranks; and ranks do not create the gloo group of all ranks, which connects at first use: its objects
would be counted ranks times ranks on this machine. It needs root: the ranks are in a network of their own, without a
DNS server, which torch would ask for the name of each connection's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import math
import multiprocessing
import os
import resource
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from holmes_hpc.planning.plan.transport import LOCAL
from holmes_hpc.training.network import authentication, process_groups, rank_facts, rendezvous
from holmes_hpc.training.network.exchange import combine_by_node
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.signals import ControlAllReduce

PER_NODE = 8
TIMEOUT_S = 300.0
PHASES = ("met", "exchanged", "reduced", "gathered")
STACK_BYTES = 256 << 10


@dataclass
class Start:
    """A start of `ranks` simulated ranks: the seconds until the last one reached each of PHASES, tries that rank 0 did
    not answer, the most bytes between a node and the store, the requests of a rank to the store (mean), and the CPU
    seconds, memory and open files of rank 0's process."""

    ranks: int
    seconds: dict[str, float]
    failed_tries: int
    node_bytes: int
    requests: float
    host_cpu_s: float
    host_bytes: int
    host_files: int
    errors: list[str]


class Simulation:
    """The ranks of some nodes, as threads of this process."""

    def __init__(self, folder: Path, world_size: int, numbers: Sequence[int]) -> None:
        self.folder, firsts = folder, range(0, world_size, PER_NODE)
        self.nodes = {f"node{i // PER_NODE}": range(i, i + PER_NODE) for i in firsts}
        self.numbers, self.world_size = numbers, world_size
        self.go, self.done = threading.Event(), threading.Barrier(len(numbers) * PER_NODE + 1)
        self.reached: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.errors: list[str] = []
        self._kept: list[Any] = []
        self.bytes_of_node, self.requests, self.failed_tries = Counter[int](), 0, 0
        self._observe()
        threading.stack_size(STACK_BYTES)
        for number in numbers:
            for rank in self.nodes[f"node{number}"]:
                threading.Thread(target=self._run, args=(rank,), name=f"node {number}", daemon=True).start()

    def _observe(self) -> None:
        """Count the bytes that proxies forward, and the tries that rank 0 does not answer. See also the module."""
        proxy, connect, simulation = authentication.LoopbackProxy, authentication.connect, self
        node_of_proxy: dict[int, int] = {}

        class CountingProxy(proxy):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                node_of_proxy[id(self)] = int(threading.current_thread().name.partition(" ")[2])
                super().__init__(*arguments, **options)

            def is_own(self, peer: Any) -> bool:
                return True

            def _copy(self, source: Any, target: Any) -> None:
                simulation.requests += source.getsockname()[1] == self.port
                super()._copy(_Counted(source, simulation.bytes_of_node, node_of_proxy[id(self)]), target)

        def counted_connect(*arguments: Any) -> Any:
            try:
                return connect(*arguments)
            except OSError:
                simulation.failed_tries += 1
                raise

        authentication.LoopbackProxy, authentication.connect = CountingProxy, counted_connect  # type: ignore[misc]

    def _run(self, rank: int) -> None:
        self.go.wait()
        try:
            self._start(rank)
        except Exception as e:
            self.errors.append(f"rank {rank}: {e}"[:300])
        self.done.wait()

    def _start(self, rank: int) -> None:
        number, local_rank = divmod(rank, PER_NODE)
        name = f"node{number}"
        launch = Launch(rank, self.world_size, local_rank, "srun", name, "slurm-1-0-0", one_host=False)
        if rank == 0:
            store: Any = rendezvous.host_store(self.folder, launch, "127.0.0.1", 1, TIMEOUT_S)
        else:
            store = rendezvous.join_store(self.folder, launch, TIMEOUT_S)
        watched = store.clone()
        assert not watched.check(["failed"])
        self.reached["met"].append(time.time())
        node = NodeTransports(name, "ib-a", {"tcp": ("lo", f"10.1.{number >> 8}.{number & 255}")}, {}, False)
        node_of_rank = rank_facts.exchange_transports(launch, store, node, True, self.nodes)
        assert node_of_rank[-1].node == f"node{(self.world_size - 1) // PER_NODE}"
        del node_of_rank  # one per rank: too much for one machine
        assert (
            combine_by_node(store, "gpu", rank, self.nodes, [rank, f"GPU-{rank}"], lambda _: None, any, bool) is False
        )
        self.reached["exchanged"].append(time.time())
        plan: Any = SimpleNamespace(world_size=self.world_size, transport_of=lambda *_, **__: LOCAL)
        groups = process_groups.Groups(plan, node, rank, False, TIMEOUT_S, TIMEOUT_S)
        groups.make_control_tree(store, [*self.nodes.values()])
        flags = ControlAllReduce(None, groups.control_tree)
        flags.start(stop=rank == self.world_size - 1, writing=False, copying=False)
        assert flags.finish().stop
        self.reached["reduced"].append(time.time())
        rows = groups.control_tree and groups.control_tree.gather(torch.full((40,), float(rank))).wait()
        assert rank or rows[:, 0].tolist() == list(range(self.world_size))
        self.reached["gathered"].append(time.time())
        self._kept.append((store, watched, groups))

    def report(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "reached": {phase: max(times, default=math.inf) for phase, times in self.reached.items()},
            "errors": self.errors,
            "failed_tries": self.failed_tries,
            "node_bytes": max(self.bytes_of_node.values(), default=0),
            "requests": self.requests,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "bytes": psutil.Process().memory_info().rss,
            "files": psutil.Process().num_fds(),
        }


class _Counted:
    """A socket whose received bytes are counted."""

    def __init__(self, connection: Any, counts: Counter[int], node: int) -> None:
        self._connection, self._counts, self._node = connection, counts, node

    def recv(self, size: int) -> bytes:
        data: bytes = self._connection.recv(size)
        self._counts[self._node] += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _simulate(folder: Path, world_size: int, numbers: Sequence[int], pipe: Any) -> None:
    """Run in a process of its own: start the ranks of the nodes `numbers` when `pipe` says so, and report."""
    gc.disable()  # it would look at the objects of many ranks
    sys.setswitchinterval(10)  # the ranks of a process would wake up often to ask each other for Python's lock
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    simulation = Simulation(folder, world_size, numbers)
    before = simulation.report()
    pipe.send("ready")
    pipe.recv()
    simulation.go.set()
    simulation.done.wait()
    report = simulation.report()
    pipe.send({**report, **{key: report[key] - before[key] for key in ("cpu_s", "bytes", "files")}})
    pipe.recv()  # no rank leaves before all have ended
    os._exit(0)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Give this thread, and the processes that it forks, a network with a loopback interface only."""
    libc, new_network = ctypes.CDLL(None, use_errno=True), 0x40000000
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(new_network):
            raise OSError(ctypes.get_errno(), "no network namespace: run this as root")
        try:
            with socket.socket() as s:
                set_flags, up_and_running = 0x8914, 0x41
                fcntl.ioctl(s, set_flags, struct.pack("16sH14x", b"lo", up_and_running))
            Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("10000 65000")
            yield
        finally:
            libc.setns(before.fileno(), new_network)


def measure(ranks: int) -> Start:
    """Return the figures of a start of `ranks` ranks, 64 per process."""
    with own_network():
        return _measure(ranks, max(2, ranks // 64))


def _measure(ranks: int, processes: int) -> Start:
    context, nodes = multiprocessing.get_context("fork"), ranks // PER_NODE
    shares = [[0], *(list(range(1 + i, nodes, processes)) for i in range(min(processes, nodes - 1)))]
    with tempfile.TemporaryDirectory(prefix="holmes-start-") as folder:
        pipes = [context.Pipe() for _ in shares]
        workers = [
            context.Process(target=_simulate, args=(Path(folder), ranks, share, pipe), daemon=True)
            for share, (_, pipe) in zip(shares, pipes, strict=True)
        ]
        for worker in workers:
            worker.start()
        for pipe, _ in pipes:
            pipe.recv()
        start = time.time()
        for pipe, _ in pipes:
            pipe.send("go")
        reports = [pipe.recv() for pipe, _ in pipes]
        for worker in workers:
            worker.kill()
            worker.join()
    host = reports[0]
    return Start(
        ranks,
        {phase: max(report["reached"][phase] for report in reports) - start for phase in PHASES},
        sum(report["failed_tries"] for report in reports),
        max(report["node_bytes"] for report in reports),
        sum(report["requests"] for report in reports) / ranks,
        host["cpu_s"],
        host["bytes"],
        host["files"],
        [error for report in reports for error in report["errors"]],
    )


def growth(starts: Sequence[Start], figure: str) -> float:
    """Return the exponent by which a figure grows with the number of ranks: the slope of the fitted logarithms."""
    values = [start.seconds["reduced"] if figure == "seconds" else getattr(start, figure) for start in starts]
    slope = statistics.linear_regression([math.log(s.ranks) for s in starts], [math.log(max(v, 1e-9)) for v in values])
    return slope.slope


def rows(starts: Sequence[Start]) -> list[list[str]]:
    """Return the rows of a table: one per start, and the exponents of growth."""
    table = [
        [
            str(s.ranks),
            *(f"{s.seconds[phase]:.1f}" for phase in PHASES),
            str(s.failed_tries),
            str(len(s.errors)),
            f"{s.node_bytes / 1e3:.0f}",
            f"{s.requests:.1f}",
            f"{s.host_cpu_s:.1f}",
            f"{s.host_bytes / 1e6:.0f}",
            str(s.host_files),
        ]
        for s in starts
    ]
    if len(starts) > 1:
        by_figure = [
            f"{growth(starts, f):.2f}" for f in ("seconds", "node_bytes", "requests", "host_cpu_s", "host_bytes")
        ]
        table.append(
            ["growth", "", "", by_figure[0], "", "", "", *by_figure[1:], f"{growth(starts, 'host_files'):.2f}"]
        )
    return table


COLUMNS = ["ranks", "met, s", "exchanged, s", "reduced, s", "gathered, s", "tries again", "failed", "store, kB a node"]
COLUMNS += ["requests a rank", "rank 0's node: CPU, s", "MB", "files"]

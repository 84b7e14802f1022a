"""Stage transfers of activations and their gradients between neighbouring stages, over groups of two ranks each.

Each direction of each edge is a :class:`Channel` with process groups of only its two ranks. Its tensors have a known
shape and arrive in the order in which they are sent. So transfers inside a fabric use RDMA, transfers between fabrics
use TCP, nothing uses WORLD, and no channel waits for another one:

    stage 0            stage 1            stage 2
       ── forward_out ▸ forward_in ── forward_out ▸ forward_in        activations
       ◂ backward_in ── backward_out ◂ backward_in ── backward_out    their gradients

Each direction has its own group, because NCCL runs the operations of one communicator one after the other. In a shared
group, an early receive would block every later send. Gloo could use tags, but has the same groups for simplicity.
:class:`EdgeCommunicator` is Megatron-Core's ``P2PCommunicator`` over channels, for all of Megatron's schedules;
``run_eager_1f1b`` uses the channels directly.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from holmes_hpc.errors import NetworkError
from holmes_hpc.planning.plan.plan import GroupTransport, Plan
from holmes_hpc.planning.schedule.launches import exchange_order
from holmes_hpc.training.metrics.profiler import Ranges
from holmes_hpc.training.pipeline.codec import IDENTITY, Codec, codec

NewGroup = Callable[[GroupTransport], "dist.ProcessGroup | None"]
OnTransfer = Callable[[str, Any, float, float], None]
Task = Callable[[], None]


class Transfer:
    """A transfer in progress. :meth:`wait` returns when the tensor has left or arrived; it can be called again."""

    def __init__(self, edge: str, tensor: Tensor, finish: Task) -> None:
        self._edge, self._tensor, self._finish = edge, tensor, finish
        self.done = False

    def wait(self) -> Tensor:
        """Return the tensor sent or received. Raise NetworkError with the edge's name if the other end is gone."""
        if not self.done:
            with _network_errors(self._edge):
                self._finish()
            self.done = True
        return self._tensor


class Channel:
    """One end of one direction of an edge. `connections`: groups of the two ranks, each with its own connection; a
    tensor is split into one stripe for each. `peer`: the global rank at the other end. `codec`: the format on the wire.
    `on_transfer`: called after every transfer with (kind, label, posted, done), which needs a thread. `kind` is
    ``send_`` or ``receive_``, followed by the first word of `name`; `posted` and `done` are seconds since the epoch."""

    def __init__(self, name: str, connections: Sequence[dist.ProcessGroup], peer: int, codec: Codec = IDENTITY) -> None:
        self.name, self.connections, self.peer, self.codec = name, tuple(connections), peer, codec
        self.on_transfer: OnTransfer | None = None
        self._nccl = is_nccl(self.connections[0])
        self._ranges = Ranges(self._nccl)
        self._count = 0
        self._leaving: deque[Transfer] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def send(self, tensor: Tensor, label: Any = None) -> Transfer:
        """Start to send `tensor`. The channel keeps a copy or an alias, so the caller may free its own reference."""
        while self._leaving and self._leaving[0].done:
            self._leaving.popleft()
        wire = self.codec.encode(tensor.detach().contiguous())
        transfer = self._start(dist.isend, wire, wire, label)
        self._leaving.append(transfer)
        return transfer

    def receive(self, into: Tensor, label: Any = None) -> Transfer:
        """Start to receive into a contiguous tensor; its value is valid after :meth:`Transfer.wait`."""
        target = into.detach()  # the same memory without a gradient, so that it can be written
        wire = self.codec.buffer(target)
        return self._start(dist.irecv, wire, into, label, lambda: self.codec.decode(wire, target))

    def settle(self, keep: int = 0) -> None:
        """Wait until at most `keep` sends are in progress."""
        while len(self._leaving) > keep:
            self._leaving.popleft().wait()

    def close(self) -> None:
        """Wait for all sends; end the thread, if there is one."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _start(
        self, operation: Callable[..., Any], wire: Tensor, tensor: Tensor, label: Any, on_done: Task = lambda: None
    ) -> Transfer:
        tag, self._count = self._count % (1 << 20), self._count + 1
        through_host = wire.is_cuda and not self._nccl  # gloo uses only host memory
        start = self._start_staged if through_host else self._start_direct
        wait = start(operation, wire, tag, partial(self._report, operation, label, time.time()))

        def finish() -> None:
            wait()
            on_done()

        return Transfer(self.name, tensor, finish)

    def _start_direct(self, operation: Callable[..., Any], wire: Tensor, tag: int, report: Task) -> Task:
        """Start a transfer. Return a function that waits for it."""
        works = self._post(operation, wire, tag)
        if self.on_transfer is None:
            return partial(wait_all, works)
        background_wait = self._in_background(partial(self._wait_and_report, works, report))
        # a gloo work can be waited for only once, and the thread already does so
        return partial(wait_all, works) if self._nccl else background_wait

    def _start_staged(self, operation: Callable[..., Any], wire: Tensor, tag: int, report: Task) -> Task:
        """Start a transfer through a pinned buffer, which a separate CUDA stream copies in parallel with computing.
        Return a function that waits for the transfer."""
        staging = torch.empty(wire.shape, dtype=wire.dtype, pin_memory=wire.is_cuda)
        copy_stream = torch.cuda.Stream(wire.device)
        copy_stream.wait_stream(torch.cuda.current_stream(wire.device))
        if wire.is_cuda:
            wire.record_stream(copy_stream)
        is_send = operation is dist.isend
        if is_send:
            with torch.cuda.stream(copy_stream):
                staging.copy_(wire, non_blocking=True)
        works = [] if is_send else self._post(operation, staging, tag)

        def transfer() -> None:
            if is_send:
                copy_stream.synchronize()  # blocks only this thread, until the bytes to send are complete
            wait_all(works or self._post(operation, staging, tag))
            if not is_send:
                with torch.cuda.stream(copy_stream):
                    wire.copy_(staging, non_blocking=True)
            report()

        wait = self._in_background(transfer)

        def finish() -> None:
            wait()
            if not is_send:
                torch.cuda.current_stream(wire.device).wait_stream(copy_stream)

        return finish

    def _post(self, operation: Callable[..., Any], wire: Tensor, tag: int) -> list[Any]:
        stripes = wire.view(-1).tensor_split(len(self.connections))
        range_name = f"{'send' if operation is dist.isend else 'receive'} {self.name}"
        with _network_errors(self.name), self._ranges.range(range_name):
            return [
                operation(stripe, self.peer, group=connection, tag=tag)
                for stripe, connection in zip(stripes, self.connections, strict=True)
                if stripe.numel()
            ]

    def _in_background(self, task: Task) -> Task:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"edge {self.name}")
        return self._thread.submit(task).result

    def _wait_and_report(self, works: Iterable[Any], report: Task) -> None:
        if self._nccl:
            while not all(work.is_completed() for work in works):  # wait() would only block a CUDA stream
                time.sleep(2e-4)
        else:
            wait_all(works)
        report()

    def _report(self, operation: Any, label: Any, posted: float) -> None:
        if self.on_transfer is not None:
            kind = "send_" if operation is dist.isend else "receive_"
            self.on_transfer(kind + self.name.partition(" ")[0], label, posted, time.time())


@contextlib.contextmanager
def _network_errors(edge: str) -> Iterator[None]:
    """Turn errors of torch's communication into a NetworkError with the edge's name."""
    try:
        yield
    except RuntimeError as e:  # DistBackendError is one
        problem, hint = str(e).partition(". This is")[0], "see the log of the rank at its other end"
        raise NetworkError(problem, where=f"edge {edge}", hint=hint) from e


def wait_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class Edges:
    """The edges of a rank, as ``run_eager_1f1b`` uses them. `channels`: by name or role; `device`: where the rank
    computes; `on_device`: whether transfers are GPU kernels, which occupy the GPU until they are done; `posted`:
    receives posted before their step, by role and row at the other end; `has_next_step`: whether another step follows.
    """

    def __init__(self, channels: Mapping[str, Channel], device: torch.device) -> None:
        self.channels, self.device = dict(channels), device
        self.on_device = any(is_nccl(c.connections[0]) for c in channels.values())
        self.posted = defaultdict[tuple[str, int], deque[Any]](deque)
        self.has_next_step = False

    def settle(self) -> None:
        """Wait for all sends in progress."""
        for channel in self.channels.values():
            channel.settle()

    def close(self) -> None:
        """Wait for all sends in progress. Call it before the groups are destroyed."""
        for channel in self.channels.values():
            channel.close()


class EdgeCommunicator(P2PCommunicator, Edges):
    """Megatron-Core's point-to-point interface over channels; pass it to any of its schedules as ``p2p_communicator``.
    `channels`: this rank's channels by role: forward_in, forward_out, backward_in, backward_out. The first stage has no
    forward_in and backward_out, and the last stage no forward_out and backward_in, unless virtual stages close the
    ring. The schedule gives one shape for all tensors, so sequences of varying length are not supported."""

    def __init__(
        self, pp_group: dist.ProcessGroup, config: Any, channels: Mapping[str, Channel], device: torch.device
    ) -> None:
        P2PCommunicator.__init__(self, pp_group, config)
        Edges.__init__(self, channels, device)

    @property
    def row(self) -> int:
        """Return this rank's row of an :class:`Order`: its stage."""
        return int(self.pp_group.rank())

    def channel(self, role: str, peer: int = 0) -> Channel:
        """Return this stage's channel of `role`. `peer` is ignored, because each role has only one."""
        return self.channels[role]

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Transfer] | None]:
        """Run one exchange; all methods of Megatron's communicator call this one. Return (tensor from the previous
        stage, tensor from the next stage, unfinished transfers)."""
        started, received = dict[str, Transfer](), dict[str, Tensor]()
        # The order matters if a launch waits for the previous one (planning/schedule/launches.py).
        for forward, sends in exchange_order(self.pp_group.rank()):
            role = role_of(forward, sends)
            name = f"{'send' if sends else 'recv'}_{'next' if forward == sends else 'prev'}"
            tensor = tensor_send_next if forward else tensor_send_prev
            if sends and tensor is not None:
                self.channel(role).settle(keep=1)  # Megatron never waits for a step's last sends; they would pile up
                started[name] = self.channel(role).send(tensor)
            elif not sends and (recv_prev if forward else recv_next):
                received[name] = torch.empty(
                    tensor_shape, dtype=self.config.pipeline_dtype, device=self.device, requires_grad=True
                )
                started[name] = self.channel(role).receive(received[name])
        if wait_on_reqs:
            wait_all(started.values())
        return received.get("recv_prev"), received.get("recv_next"), None if wait_on_reqs else started


def role_of(forward: bool, sends: bool) -> str:
    """Return the role of a channel at one of its ends."""
    return f"{'forward' if forward else 'backward'}_{'out' if sends else 'in'}"


def is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend(group)).lower()


def build_communicator(
    plan: Plan, new_group: NewGroup, *, rank: int, pp_group: dist.ProcessGroup, config: Any, device: torch.device
) -> EdgeCommunicator:
    """Return the communicator of this rank. All ranks of the job call it together, because `new_group` is collective:
    it creates the process group of one edge on its transport, and returns it on its two members."""
    connected = connect_edges(plan, new_group, rank, config.pipeline_dtype, device)
    return EdgeCommunicator(pp_group, config, {role: channel for role, _, channel in connected}, device)


def connect_edges(
    plan: Plan, new_group: NewGroup, rank: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, int, Channel]]:
    """Connect both directions of every edge, on its transport. The generator is collective: all ranks exhaust it.
    Yield (role, the other end's rank, channel) of each direction of this rank's edges. `dtype`: of activations."""
    edges = [group for group in plan.transports() if group.kind == "edge"]
    if plan.parallel.virtual_stages > 1 and plan.parallel.pp == 2:  # the ring closes between the same two ranks
        edges += [replace(e, ranks=e.ranks[::-1], stages=e.stages[::-1]) for e in edges]
    for edge, direction in product(edges, ("forward", "backward")):
        source, target = edge.ranks if direction == "forward" else edge.ranks[::-1]
        is_tcp, is_sender = edge.transport.kind == "tcp", rank == source
        connections = [new_group(edge) for _ in range(plan.edge_connections if is_tcp else 1)]
        if rank not in (source, target):
            continue
        peer = target if is_sender else source
        own_connections = [c for c in connections if c is not None]
        edge_codec = codec(plan.edge_dtype, dtype) if is_tcp else IDENTITY
        channel = Channel(f"{direction} {source}->{target}", own_connections, peer, edge_codec)
        _open_connection(channel, device, is_sender=is_sender)
        yield role_of(direction == "forward", is_sender), peer, channel


def _open_connection(channel: Channel, device: torch.device, is_sender: bool) -> None:
    """Send some numbers over a channel, so that it connects. NCCL connects at the first operation, which blocks both
    ends. All ranks open their channels in one order; in the order of a step's transfers, a ring could deadlock."""
    numbers = torch.ones(len(channel.connections) * 8, device=device)
    (channel.send(numbers) if is_sender else channel.receive(numbers)).wait()

"""Sending activations and their gradients between neighbouring pipeline stages, over groups of two ranks each.

Each direction of each edge is a :class:`Channel`: tensors of known shape, received in the order in which they were
sent, over process groups that hold nothing but its two ranks. So a transfer inside a fabric goes by RDMA and only one
between fabrics by TCP, nothing goes over WORLD, and no channel ever waits for another one:

    stage 0            stage 1            stage 2
       ── forward_out ▸ forward_in ── forward_out ▸ forward_in        activations
       ◂ backward_in ── backward_out ◂ backward_in ── backward_out    their gradients

Why one group for each direction: NCCL runs the operations of one communicator one after the other, so a receive posted
ahead of need would hold up every later send on it. Gloo would manage with tags, and gets the same for simplicity.
:class:`EdgeCommunicator` is Megatron-Core's ``P2PCommunicator`` over channels, for all of Megatron's schedules;
``run_ahead`` uses the channels themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from holmes_hpc.errors import ConfigError, NetworkError
from holmes_hpc.planning.plan.plan import GroupTransport, Plan
from holmes_hpc.planning.schedule.launches import exchange_order
from holmes_hpc.training.pipeline.codec import SAME, Codec, codec

NewGroup = Callable[[GroupTransport], "dist.ProcessGroup | None"]
Watch = Callable[[str, Any, float, float], None]


class Transfer:
    """A tensor on its way. :meth:`wait` returns once it has left or arrived, and again at once when asked again."""

    def __init__(self, edge: str, tensor: torch.Tensor, finish: Callable[[], None]) -> None:
        self._edge, self._tensor, self._finish = edge, tensor, finish
        self.done = False

    def wait(self) -> torch.Tensor:
        """The tensor sent or received. Raises NetworkError with the edge's name when the other end is gone."""
        if not self.done:
            with _named(self._edge):
                self._finish()
            self.done = True
        return self._tensor


class Channel:
    """One direction of one edge, seen from one of its two ends.

    `connections`: groups of just these two ranks, each of which connects them anew; a tensor is cut into as many
    stripes. `peer`: the other end's global rank. `codec`: how a tensor looks on the wire.
    `watch`, when set, is told of every transfer, at the cost of a thread: ("send_forward", label, posted, done) where
    the channel's name begins with "forward".
    """

    def __init__(self, name: str, connections: Sequence[dist.ProcessGroup], peer: int, codec: Codec = SAME) -> None:
        self.name, self.connections, self.peer, self.codec = name, tuple(connections), peer, codec
        self.watch: Watch | None = None
        self._nccl = is_nccl(self.connections[0])
        self._count = 0
        self._leaving: deque[Transfer] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def send(self, tensor: torch.Tensor, label: Any = None) -> Transfer:
        """Start to send `tensor`. A copy or an alias of it is kept until it has left: the caller may free its own."""
        while self._leaving and self._leaving[0].done:
            self._leaving.popleft()
        wire = self.codec.encode(tensor.detach().contiguous())
        transfer = self._start(dist.isend, wire, wire, label)
        self._leaving.append(transfer)
        return transfer

    def receive(self, into: torch.Tensor, label: Any = None) -> Transfer:
        """Start to receive into a contiguous tensor; its value is there when the transfer has been waited for."""
        target = into.detach()  # the same memory without a gradient, so that it can be written
        wire = self.codec.buffer(target)
        return self._start(dist.irecv, wire, into, label, lambda: self.codec.decode(wire, target))

    def settle(self, keep: int = 0) -> None:
        """Wait until at most `keep` sends are still under way."""
        while len(self._leaving) > keep:
            self._leaving.popleft().wait()

    def close(self) -> None:
        """Wait for all sends; end the thread, if there is one."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _start(
        self,
        operation: Callable[..., Any],
        wire: torch.Tensor,
        tensor: torch.Tensor,
        label: Any,
        after: Callable[[], None] = lambda: None,
    ) -> Transfer:
        tag, self._count = self._count % (1 << 20), self._count + 1
        if self._through_host(wire):
            return self._start_staged(operation, wire, tensor, label, tag, after)
        posted = time.time()
        works = self._post(operation, wire, tag)
        wait: Callable[[], None] = partial(wait_all, works)
        if self.watch is not None:
            landed = self._in_background(partial(self._wait_and_tell, works, operation, label, posted))
            wait = wait if self._nccl else landed  # a gloo work can be waited for once only

        def finish() -> None:
            wait()
            after()

        return Transfer(self.name, tensor, finish)

    def _through_host(self, wire: torch.Tensor) -> bool:
        """Gloo reads and writes host memory only."""
        return wire.is_cuda and not self._nccl

    def _start_staged(
        self,
        operation: Callable[..., Any],
        wire: torch.Tensor,
        tensor: torch.Tensor,
        label: Any,
        tag: int,
        after: Callable[[], None],
    ) -> Transfer:
        """Go through a pinned buffer, which is copied on a CUDA stream of its own, beside the computing."""
        staging = torch.empty(wire.shape, dtype=wire.dtype, pin_memory=wire.is_cuda)
        side = torch.cuda.Stream(wire.device)
        side.wait_stream(torch.cuda.current_stream(wire.device))
        if wire.is_cuda:
            wire.record_stream(side)
        posted, sending = time.time(), operation is dist.isend
        if sending:
            with torch.cuda.stream(side):
                staging.copy_(wire, non_blocking=True)
        works = [] if sending else self._post(operation, staging, tag)

        def carry() -> None:
            if sending:
                side.synchronize()  # holds this thread only: the copy must be complete before its bytes are sent
            wait_all(works or self._post(operation, staging, tag))
            if not sending:
                with torch.cuda.stream(side):
                    wire.copy_(staging, non_blocking=True)
            self._tell(operation, label, posted)

        wait = self._in_background(carry)

        def finish() -> None:
            wait()
            if not sending:
                torch.cuda.current_stream(wire.device).wait_stream(side)
            after()

        return Transfer(self.name, tensor, finish)

    def _post(self, operation: Callable[..., Any], wire: torch.Tensor, tag: int) -> list[Any]:
        stripes = wire.view(-1).tensor_split(len(self.connections))
        with _named(self.name):
            return [
                operation(stripe, self.peer, group=connection, tag=tag)
                for stripe, connection in zip(stripes, self.connections, strict=True)
                if stripe.numel()
            ]

    def _in_background(self, task: Callable[[], None]) -> Callable[[], None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"edge {self.name}")
        return self._thread.submit(task).result

    def _wait_and_tell(self, works: Iterable[Any], operation: Any, label: Any, posted: float) -> None:
        if self._nccl:
            while not all(work.is_completed() for work in works):  # its wait() would only hold a CUDA stream
                time.sleep(2e-4)
        else:
            wait_all(works)
        self._tell(operation, label, posted)

    def _tell(self, operation: Any, label: Any, posted: float) -> None:
        if self.watch is not None:
            kind = "send_" if operation is dist.isend else "receive_"
            self.watch(kind + self.name.partition(" ")[0], label, posted, time.time())


@contextlib.contextmanager
def _named(edge: str) -> Iterator[None]:
    """What torch and gloo raise, as an error with the edge's name."""
    try:
        yield
    except RuntimeError as e:  # DistBackendError is one
        raise NetworkError(
            str(e).partition(". This is")[0], where=f"edge {edge}", hint="see the log of the rank at its other end"
        ) from e


def wait_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class Edges:
    """What ``run_ahead`` needs of a rank's edges. `channels`: those it is an end of; `device`: where it computes;
    `on_device`: are transfers kernels of a GPU, which spin there until done?"""

    def __init__(self, channels: Mapping[str, Channel], device: torch.device) -> None:
        self.channels, self.device = dict(channels), device
        self.on_device = any(is_nccl(c.connections[0]) for c in channels.values())

    def close(self) -> None:
        """Wait for what is still under way. Call it before the groups are destroyed."""
        for channel in self.channels.values():
            channel.close()


class EdgeCommunicator(P2PCommunicator, Edges):
    """Megatron-Core's point-to-point interface over channels; give it to any of its schedules as ``p2p_communicator``.

    `channels`: those this rank is an end of, by their role: forward_in, forward_out, backward_in, backward_out. The
    first stage has no forward_in and backward_out, the last no forward_out and backward_in, unless virtual stages
    close the ring. Tensors have the shape that the schedule names: sequences of varying length are refused.
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: Any, channels: Mapping[str, Channel], device: torch.device
    ) -> None:
        P2PCommunicator.__init__(self, pp_group, config)
        Edges.__init__(self, channels, device)
        if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
            raise ConfigError(
                "sequences of varying length cannot go over edges of their own",
                where="model",
                hint="unset variable_seq_lengths",
            )

    @property
    def row(self) -> int:
        """This rank's row of an :class:`Order`: its stage."""
        return int(self.pp_group.rank())

    def stream(self, role: str, peer: int = 0) -> Channel:
        """Return the channel of `role`; `peer` is the one neighbour there. ConfigError where this stage has none: the
        first and the last need one to each other for virtual stages."""
        if role not in self.channels:
            raise ConfigError(
                f"the schedule asks for {role}, and stage {self.row} has no such edge",
                where="plan.schedule",
                hint="use the schedule that the plan's virtual_stages ask for, and as many chunks of the model",
            )
        return self.channels[role]

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Transfer] | None]:
        """What all of Megatron's methods come down to. Handles have its names: send_next, recv_prev and so on."""
        started: dict[str, Transfer] = {}
        received: dict[str, torch.Tensor] = {}
        # The order matters where a launch waits for the one before it: see planning/schedule/launches.py.
        for forward, sends in exchange_order(self.pp_group.rank()):
            role = f"{'forward' if forward else 'backward'}_{'out' if sends else 'in'}"
            name = f"{'send' if sends else 'recv'}_{'next' if forward == sends else 'prev'}"
            tensor = tensor_send_next if forward else tensor_send_prev
            if sends and tensor is not None:
                self.stream(role).settle(keep=1)  # Megatron does not wait for a step's last sends: they would be kept
                started[name] = self.stream(role).send(tensor)
            elif not sends and (recv_prev if forward else recv_next):
                received[name] = torch.empty(
                    tensor_shape, dtype=self.config.pipeline_dtype, device=self.device, requires_grad=True
                )
                started[name] = self.stream(role).receive(received[name])
        if wait_on_reqs:
            wait_all(started.values())
        return received.get("recv_prev"), received.get("recv_next"), None if wait_on_reqs else started


def is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend(group)).lower()


def build(
    plan: Plan,
    new_group: NewGroup,
    *,
    rank: int,
    pp_group: dist.ProcessGroup,
    config: Any,
    device: torch.device,
    channel: type[Channel] = Channel,
) -> EdgeCommunicator:
    """The communicator of this rank. All ranks of the job call it at the same time, as they do `new_group`.

    `new_group`: makes the process group of one edge on its transport (all ranks call it, in the same order, its two
    members get it).
    """
    edges = [group for group in plan.transports() if group.kind == "edge"]
    if plan.parallel.virtual_stages > 1 and plan.parallel.pp == 2:  # the ring closes between the same two ranks
        edges += [replace(e, ranks=e.ranks[::-1], stages=e.stages[::-1]) for e in edges]
    channels = {
        role: made
        for edge in edges
        for role, _, made in connect(plan, edge, new_group, rank=rank, config=config, device=device, channel=channel)
    }
    return EdgeCommunicator(pp_group, config, channels, device)


def connect(
    plan: Plan,
    edge: GroupTransport,
    new_group: NewGroup,
    *,
    rank: int,
    config: Any,
    device: torch.device,
    channel: type[Channel] = Channel,
) -> Iterator[tuple[str, int, Channel]]:
    """Connect both directions of an edge, on its transport. All ranks call it and exhaust it.

    Yield (role, the other end's rank, channel) of each direction; nothing on ranks that are no end of the edge.
    """
    tcp = edge.transport.kind == "tcp"
    for direction, (source, target) in (("forward", edge.ranks), ("backward", edge.ranks[::-1])):
        connections = [new_group(edge) for _ in range(plan.edge_connections if tcp else 1)]
        if rank not in (source, target):
            continue
        peer = target if rank == source else source
        made = channel(
            f"{direction} {source}->{target}",
            [c for c in connections if c is not None],
            peer,
            codec(plan.edge_dtype, config.pipeline_dtype) if tcp else SAME,
        )
        _try(made, device, sends=rank == source)
        yield f"{direction}_{'out' if rank == source else 'in'}", peer, made


def _try(channel: Channel, device: torch.device, sends: bool) -> None:
    """One number across, one channel after the other in the same order everywhere: NCCL connects at the first operation
    and blocks both ends until it has, which in the disorder of a first step could lock up a ring."""
    number = torch.ones(len(channel.connections) * 8, device=device)
    (channel.send(number) if sends else channel.receive(number)).wait()

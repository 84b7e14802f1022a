"""Copies of the training state in the memory of two nodes, from which an elastic run continues after the loss of one.

Every few steps, a thread of each rank copies the rank's ranges (state_ranges.py) into a slot of its node, and sends
this slot to the next rank of its ring (copy_slots.py), which keeps it in another slot. There are two slots of each
kind, so that the earlier copy stays whole meanwhile. At the next start, ranks exchange what they find, and load the
newest copy that is complete.
"""

import io
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from msgspec import json

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.training.checkpoint import checkpoint_directory, copy_slots, state_ranges
from holmes_hpc.training.checkpoint.copy_slots import Entry, Index, Key, Part, Row, Slot
from holmes_hpc.training.model import gpt
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.session import Session

SLOTS = "HOLMES_COPY_SLOTS"  # an agent's variable: paths of two own slots, two for the previous rank's copy, and others
CHUNK_BYTES = 1 << 25  # of a message
BYTES_PER_PARAMETER = 12  # the weight and Adam's moments in fp32


class Copies:
    """The copies of one rank. `group`: of all ranks, for host tensors. All ranks call `load` and `start` together."""

    def __init__(self, session: Session, config: Configuration, models: Sequence[Any], optimizer: Any, group: Any):
        self._session, self._models, self._optimizer, self._group = session, models, optimizer, group
        self._plan, self._rank, self._every = session.plan, dist.get_rank(), config.elastic.copy_every
        slots = [Slot(path) for path in os.environ[SLOTS].split(":")]
        self._own, self._received, self._others = slots[:2], slots[2:4], slots[4:]
        pools = {pool.name: pool.fabric_name for pool in self._plan.site.pools}
        self._rings = copy_slots.rings(self._plan.places, pools)
        groups = [session.groups.new(ring, "copies", gloo=session.cuda) for ring in self._rings]
        self._ring, self._peers = next(pair for pair in zip(self._rings, groups, strict=True) if self._rank in pair[0])
        stage, _, part = self._plan.parallel.coordinates(self._rank)
        self._generators = f"generators of {self._plan.parallel}, stage {stage}, part {part}"
        self._ranges, self._step = list[state_ranges.Range](), 0  # of the last copy
        self._thread, self._has_failed, self._has_read = threading.Thread(), False, threading.Event()
        self._has_read.set()

    @classmethod
    def of(cls, session: Session, config: Configuration, *arguments: Any) -> "Copies | None":
        """Return the rank's copies; None if the run makes none."""
        if SLOTS not in os.environ or config.elastic.copy_every == 0:
            return None
        if config.train.dtype == "fp16" or config.train.fp8 is not None:
            log_line("no copies in memory: they do not contain the loss scale of fp16 and the scales of fp8")
            return None
        return cls(session, config, *arguments)

    @property
    def is_busy(self) -> bool:
        """Whether the last copy is not finished. After an error it never is, so that no rank starts another one."""
        return self._thread.is_alive() or self._has_failed

    @property
    def has_copied(self) -> bool:
        """Whether a copy was started or loaded before."""
        return bool(self._ranges)

    # -- saving -----------------------------------------------------------------------------------------------------

    def is_due(self, step: int, any_is_busy: bool) -> bool:
        """Return whether to copy the state after `step`. `any_is_busy`: the flag of all ranks."""
        return self._every is not None and step - self._step >= self._every and not any_is_busy

    def start(self, step: int) -> None:
        """Start a copy of the state after `step`."""
        self.finish()
        self._step = step
        self._ranges = self._ranges or list(self._held_ranges())
        fields = [
            (r.name, r.first + r.kept.start, r.first + r.kept.stop, len(r.tensors), r.tensors[0].element_size())
            for r in self._ranges
        ]
        generators = io.BytesIO()
        torch.save(gpt.generators(), generators)
        state = generators.getvalue()
        key = step, self._session.attempt, state_ranges.number_of_updates(self._optimizer)
        index = Index.of(key, [*fields, (self._generators, 0, len(state), 1, 1)])
        self._own.reverse()
        self._received.reverse()
        self._has_read.clear()
        self._thread = threading.Thread(target=self._copy, args=(index, state), name="copy", daemon=True)
        self._thread.start()

    def _held_ranges(self, with_moments: bool = True) -> Any:
        return state_ranges.held_ranges(self._models, self._optimizer, self._plan.model.tied, with_moments)

    def _copy(self, index: Index, generators: bytes) -> None:
        """Write a copy into the first own slot, and send it to the next rank."""
        try:
            slot, head = self._own[0], json.encode(index)
            start = copy_slots.state_start(len(head))
            total = start + index.state_bytes
            slot.reserve(total)
            slot.begin()
            slot.write_index(head)
            assert slot.memory is not None
            parts = [tensor[r.kept].view(torch.uint8) for r in self._ranges for tensor in r.tensors]
            parts.append(torch.frombuffer(bytearray(generators), dtype=torch.uint8))
            torch.cat(parts, out=slot.memory[start:total])
            self._has_read.set()
            slot.complete(len(head), total)
            if len(self._ring) > 1:
                self._exchange(slot, self._received[0], len(head), total)
        except Exception as e:  # for example, another rank was lost; the main thread will notice
            log_line(f"warning: the copy in memory after step {index.key[0]} failed: {e}")
            self._has_failed = True
            self._has_read.set()

    def _exchange(self, slot: Slot, received: Slot, index_bytes: int, total: int) -> None:
        """Send a slot to the next rank of the ring, and receive that of the previous one."""
        position = self._ring.index(self._rank)
        target, source = self._ring[(position + 1) % len(self._ring)], self._ring[position - 1]

        def swap(sent: torch.Tensor, into: torch.Tensor) -> None:
            works = [dist.isend(sent, target, group=self._peers)] if len(sent) else []
            works += [dist.irecv(into, source, group=self._peers)] if len(into) else []
            for work in filter(None, works):
                work.wait()

        swap(torch.tensor([index_bytes, total]), sizes := torch.zeros(2, dtype=torch.int64))
        received.reserve(int(sizes[1]))
        received.begin()
        assert slot.memory is not None and received.memory is not None
        sent = slot.memory[copy_slots.HEADER.size : total]
        into = received.memory[copy_slots.HEADER.size : int(sizes[1])]
        for first in range(0, max(len(sent), len(into)), CHUNK_BYTES):
            swap(sent[first : first + CHUNK_BYTES], into[first : first + CHUNK_BYTES])
        received.complete(*sizes.tolist())

    def wait_until_read(self) -> None:
        """Wait until the copy in progress has read the state, which may change afterwards."""
        self._has_read.wait()

    def finish(self) -> None:
        """Wait for the copy in progress."""
        if self._thread.is_alive():
            self._thread.join()

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self) -> int:
        """Load the newest complete copy if it is newer than the last checkpoint. Return its step; 0 without one."""
        slots = (*self._own, *self._received, *self._others)
        indexes = {slot: index for slot in slots if (index := slot.index()) is not None}
        held = dict(grouped((index.key, entry) for index in indexes.values() for entry in index.entries))
        needs = [(r.name, r.first, r.first + r.tensors[0].numel()) for r in self._held_ranges(with_moments=False)]
        folder = self._session.run.checkpoints
        saved = [c.step for c in checkpoint_directory.complete_checkpoints(folder)] if self._rank == 0 else []
        answers: list[Any] = [None] * self._plan.world_size
        answer = Row(held, needs, self._generators), max(saved, default=0)
        dist.all_gather_object(answers, answer, group=self._group)
        rows, step = [row for row, _ in answers], 0
        self._every = self._interval(rows)
        newest = copy_slots.newest(rows, after=answers[0][1])
        loaded = {slot for slot, index in indexes.items() if newest is not None and index.key == newest[0]}
        if newest is not None:
            key, moves = newest
            self._load(key, moves, {entry: slot for slot in loaded for entry in indexes[slot].entries})
            step = key[0]
            self._session.record_load("copy in memory", step)
            self._step = step - (self._every or 0)  # until the next copy, a lost part exists only once
            if self._rank == 0:
                checkpoint_directory.remove_unfinished(folder)
                log_line(f"continues after step {step} from a copy in memory")
        for pair in (self._own, self._received):
            pair.sort(key=lambda slot: slot not in loaded)  # the next copy uses the last
            for slot in {*pair} - loaded:
                slot.begin()
        return step

    def _load(self, key: Key, moves: dict[tuple[int, int], list[Part]], slots: dict[Entry, Slot]) -> None:
        """Load a copy. `moves`: as :func:`copy_slots.moves` returns them; `slots`: the slot of each entry here."""
        state_ranges.prepare(self._optimizer)
        self._ranges = list(self._held_ranges())
        sends, sent = list[Any](), list[torch.Tensor]()
        for (source, target), parts in moves.items():
            if source == self._rank:
                data = torch.cat([piece for part in parts for piece in _read(slots[part.entry], part)])
                if target == source:
                    self._write(parts, data)
                else:
                    sent.append(data)
                    sends.append(dist.isend(data, target, group=self._group))
        for (source, target), parts in moves.items():
            if target == self._rank != source:
                data = torch.empty(sum(part.num_bytes for part in parts), dtype=torch.uint8)
                dist.recv(data, source, group=self._group)
                self._write(parts, data)
        for send in sends:
            send.wait()
        state_ranges.finish_loading(self._models, self._optimizer, key[2])

    def _write(self, parts: Sequence[Part], data: torch.Tensor) -> None:
        """Write parts of a copy, whose bytes follow each other in `data`, into the training state."""
        for part, of_part in zip(parts, data.split([part.num_bytes for part in parts]), strict=True):
            name, tensors = part.entry.name, of_part.chunk(part.entry.tensors)
            if name == self._generators:
                gpt.set_generators(torch.load(io.BytesIO(of_part.numpy().tobytes()), weights_only=True))
            for r in (r for r in self._ranges if r.name == name):
                if r.first <= part.first and part.last <= r.first + r.tensors[0].numel():
                    for tensor, saved in zip(r.tensors, tensors, strict=True):
                        tensor[part.first - r.first : part.last - r.first].view(torch.uint8).copy_(saved)

    def _interval(self, rows: Sequence[Row]) -> int | None:
        """Return the number of steps between copies; None if there can be none. Rank 0 prints it."""
        node_bytes, plan = defaultdict[str, float](float), self._plan
        for place, row in zip(plan.places, rows, strict=True):
            node_bytes[place.node] += BYTES_PER_PARAMETER * sum(last - first for _, first, last in row.needs)
        most, free = max(node_bytes.values()), torch.tensor(psutil.virtual_memory().available)
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self._group)
        text, used = f"copies in memory of {most / 1e9:.2g} GB a node", 4 * most  # two of the node, two of another
        if used > free / 2:
            self._log(f"no {text}: they need {used / 1e9:.2g} GB, and a node has only {free / 1e9:.2g} GB left")
            return None
        kinds = [plan.transport_of(ring, host_memory=self._session.cuda).kind for ring in self._rings]
        pools = [[plan.places[rank].pool for rank in ring] for ring in self._rings]
        gbps = min(map(plan.site.slowest_gbps, kinds, pools))
        step_s = plan.predicted.step_time_s if plan.predicted is not None else 1.0
        every = self._every or copy_slots.interval(most, gbps, step_s)
        self._log(f"{text}: every {every} steps, {most * 8e-9 / gbps:.2g} s at {gbps:g} Gb/s beside computing")
        if alone := [ring[0] for ring in self._rings if len(ring) == 1]:
            self._log(
                f"warning: rank {alone[0]} has no other node for its copies, so a loss of its node needs a checkpoint"
            )
        return every

    def _log(self, line: str) -> None:
        if self._rank == 0:
            log_line(line)


def _read(slot: Slot, part: Part) -> list[torch.Tensor]:
    """Return the bytes of a part of a slot's copy, for each tensor."""
    entry, start = part.entry, slot.state_start() + part.entry.offset
    assert slot.memory is not None
    length = (entry.last - entry.first) * entry.size
    first, last = ((n - entry.first) * entry.size for n in (part.first, part.last))
    return [slot.memory[start + k * length + first : start + k * length + last] for k in range(entry.tensors)]

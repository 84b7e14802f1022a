"""Slots: memory of a node's agent, each for one copy of a rank's training state. Ranks of later starts find it there.

A slot has the format: bytes of the index and of the whole copy (zeros while it is written), index (JSON), state.
"""

import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch
from msgspec import json

from holmes_hpc.planning.plan.transport import Place

HEADER = struct.Struct("=QQ")
ALIGNMENT = 64  # of the state, in bytes
COPY_SHARE = 0.01  # of the time, that copies may take if the user sets no interval
MIN_INTERVAL = 2  # the flags of all ranks arrive a step late

Key = tuple[int, int, float]  # of a copy: step, attempt, and the optimizer's number of updates


class Slot:
    """A slot, opened by its path. `memory`: its bytes; None while it is empty."""

    def __init__(self, path: str) -> None:
        self._path, self._map = path, mmap.mmap(-1, HEADER.size)  # zeros: no copy
        self.memory: torch.Tensor | None = None
        self.reserve(0)

    def reserve(self, size: int) -> None:
        """Make the slot at least `size` bytes large. Raise OSError if there is no memory."""
        if self.memory is not None and len(self.memory) >= size:
            return
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)  # writing to a file that cannot grow would end the process
            if size := os.fstat(descriptor).st_size:
                self._map = mmap.mmap(descriptor, size)
                self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def begin(self) -> None:
        """Mark the slot as being written, so that nobody uses its copy."""
        HEADER.pack_into(self._map, 0, 0, 0)

    def write_index(self, index: bytes) -> None:
        self._map[HEADER.size : HEADER.size + len(index)] = index

    def complete(self, index_bytes: int, total: int) -> None:
        """Mark the copy of `total` bytes as whole."""
        HEADER.pack_into(self._map, 0, index_bytes, total)

    def index(self) -> "Index | None":
        """Return the index of the slot's copy; None if there is no whole copy."""
        index_bytes, total = HEADER.unpack_from(self._map)
        return json.decode(self._map[HEADER.size : HEADER.size + index_bytes], type=Index) if total else None

    def state_start(self) -> int:
        """Return the position of the state of the slot's copy."""
        return state_start(HEADER.unpack_from(self._map)[0])


class Entry(NamedTuple):
    """A range in a copy: `name`, `first` element and the one after the `last`; `tensors` tensors of elements of `size`
    bytes; `offset` of the first tensor in the state."""

    name: str
    first: int
    last: int
    tensors: int
    size: int
    offset: int = 0


class Index(NamedTuple):
    """The index of a copy."""

    key: Key
    entries: list[Entry]

    @classmethod
    def of(cls, key: Key, ranges: Sequence[tuple[str, int, int, int, int]]) -> "Index":
        """Return an index whose ranges follow each other. `ranges`: fields of entries, without offsets."""
        entries, offset = list[Entry](), 0
        for fields in ranges:
            entries.append(entry := Entry(*fields, offset=offset))
            offset += (entry.last - entry.first) * entry.tensors * entry.size
        return cls(key, entries)

    @property
    def state_bytes(self) -> int:
        last = self.entries[-1]
        return last.offset + (last.last - last.first) * last.tensors * last.size


def state_start(index_bytes: int) -> int:
    """Return the position of the state in a slot."""
    return -(-(HEADER.size + index_bytes) // ALIGNMENT) * ALIGNMENT


def rings(places: Sequence[Place], fabric_of: Mapping[str, str]) -> list[tuple[int, ...]]:
    """Return the rings of ranks in which each rank sends its copy to the next one, which is on another node.
    A ring has the ranks with the same number on each node of a fabric. Ranks that are alone in their fabric form rings
    over fabrics. A rank that is alone still has a ring to itself. `fabric_of`: the fabric of each pool."""
    seen, in_fabric = defaultdict[str, int](int), defaultdict[tuple[str, int], list[int]](list)
    for rank, place in enumerate(places):
        in_fabric[fabric_of[place.pool], seen[place.node]].append(rank)
        seen[place.node] += 1
    alone = defaultdict[int, list[int]](list)
    for (_, number), ranks in in_fabric.items():
        if len(ranks) == 1:
            alone[number] += ranks
    return sorted(map(tuple, [*(r for r in in_fabric.values() if len(r) > 1), *alone.values()]))


def interval(sent_bytes: float, gbps: float, step_s: float) -> int:
    """Return the number of steps between copies for which sending `sent_bytes` takes COPY_SHARE of the time."""
    return max(MIN_INTERVAL, ceil(sent_bytes * 8e-9 / gbps / (COPY_SHARE * step_s) - 1e-9))


class Row(NamedTuple):
    """What one rank tells the others at its start: the copies in its slots, (name, first, last) of each range that it
    needs, and the name of its random generators, which it uses if the copy has them."""

    held: dict[Key, list[Entry]]
    needs: list[tuple[str, int, int]]
    generators: str


class Part(NamedTuple):
    """A part of an entry: elements `first` to before `last`."""

    entry: Entry
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.entry.tensors * self.entry.size


def moves(key: Key, rows: Sequence[Row]) -> dict[tuple[int, int], list[Part]] | None:
    """Return {(source rank, target rank): parts to send}; None if the copy `key` lacks an element."""
    held, found = defaultdict[str, list[tuple[int, Entry]]](list), defaultdict[tuple[int, int], list[Part]](list)
    for rank, row in enumerate(rows):
        for entry in row.held.get(key, ()):
            held[entry.name].append((rank, entry))
    for target, row in enumerate(rows):
        for name, first, last in row.needs:
            while first < last:
                options = [(rank, e) for rank, e in held[name] if e.first <= first < e.last]
                if not options:
                    return None
                source, entry = min(options, key=lambda option: (option[0] != target, option))
                found[source, target].append(Part(entry, first, min(entry.last, last)))
                first = min(entry.last, last)
        if of_generators := held[row.generators]:
            source, entry = min(of_generators, key=lambda option: (option[0] != target, option))
            found[source, target].append(Part(entry, 0, entry.last))
    return dict(found)


def newest(rows: Sequence[Row], after: int) -> tuple[Key, dict[tuple[int, int], list[Part]]] | None:
    """Return the newest complete copy of a step after `after`, and its :func:`moves`; None if there is none."""
    for key in sorted({key for row in rows for key in row.held if key[0] > after}, reverse=True):
        if (found := moves(key, rows)) is not None:
            return key, found
    return None

"""PREFIX.bin and PREFIX.idx of Megatron's indexed data sets, looked at without Megatron, whose import takes seconds:
what can be found wrong with data before a job waits in a queue."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import DataError

# Megatron's codes of the types of whole numbers (megatron.core.datasets.indexed_dataset.DType)
TOKEN_TYPES: dict[int, type[np.number]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, document bounds
_MAGIC = b"MMIDIDX\x00\x00"
_SCAN_BYTES = 4 << 20  # of a .bin at a time
_LOOKED_AT = 256 << 20  # bytes of a .bin of unknown vocabulary that are read before a job is submitted
_REMAKE = "make it with `holmes data prepare FILES -o PREFIX`"


def look_at(data: DataConfig, model: ModelSpec, batch: Batch, evaluates: bool) -> None:
    """What can be told of indexed data within a second or two: whether they are there and whole, long enough for a step
    of `batch`, and of the model's vocabulary. Raises DataError as a rank would."""
    names, weights = parse_blend(data.prefix)
    parts = parse_split(data.split)[: 2 if evaluates else 1]
    prefixes = [Prefix.open(name) for name in names]
    for part, what in zip(parts, ("training", "validation"), strict=False):
        check_length(prefixes, part, what, batch, each=weights is not None)
    for prefix in prefixes:
        prefix.check_tokens(model.vocab, _LOOKED_AT)


def digest(of: Any) -> str:
    """Return 16 hexadecimal digits that change with plain data."""
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Prefix:
    """PREFIX.bin and PREFIX.idx, found whole. `sequences` is the unit that a split counts."""

    path: str
    sequences: int
    dtype: type[np.number]
    bin_bytes: int
    changed_ns: int

    @classmethod
    def open(cls, path: str) -> Prefix:
        """Check both files against each other without reading the data."""
        idx, binary, hint = Path(f"{path}.idx"), Path(f"{path}.bin"), _REMAKE
        try:
            with idx.open("rb") as f, binary.open("rb") as data:
                head, _ = f.read(_HEADER.size), data.read(1)
        except OSError as e:
            raise DataError(e.strerror or str(e), where=str(e.filename or path), hint=hint) from e
        if len(head) < _HEADER.size:
            raise DataError(f"truncated: {len(head)} bytes", where=str(idx), hint=hint)
        magic, version, code, sequences, bounds = _HEADER.unpack(head)
        if magic != _MAGIC or version != 1 or code not in TOKEN_TYPES:
            raise DataError("not an index of Megatron's indexed data set", where=str(idx), hint=hint)
        expected, stat = _HEADER.size + 12 * sequences + 8 * bounds, idx.stat()
        _whole(idx, stat.st_size, expected, "header")
        if not sequences:
            raise DataError("holds no text", where=str(idx), hint=hint)
        made = cls(path, sequences, TOKEN_TYPES[code], binary.stat().st_size, stat.st_mtime_ns)
        _whole(binary, made.bin_bytes, made.first_token(sequences) * made.dtype().itemsize, "index")
        return made

    def first_token(self, sequence: int) -> int:
        """How many tokens lie before `sequence`."""
        if sequence == 0:
            return 0
        with open(f"{self.path}.idx", "rb") as f:
            f.seek(_HEADER.size + 4 * (sequence - 1))
            length = struct.unpack("<i", f.read(4))[0]
            f.seek(_HEADER.size + 4 * self.sequences + 8 * (sequence - 1))
            pointer = struct.unpack("<q", f.read(8))[0]
        return pointer // self.dtype().itemsize + length

    @property
    def tokens(self) -> int:
        return self.bin_bytes // self.dtype().itemsize

    def end_of_document(self) -> int:
        """The token that ends a document, as PREFIX.json says. Raises DataError where that does not."""
        try:
            return int(json.loads(Path(f"{self.path}.json").read_text(encoding="utf-8"))["eod"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise DataError("no word of which token ends a document", where=f"{self.path}.json", hint=_REMAKE) from e

    def check_tokens(self, vocab: int, at_most: float = math.inf) -> None:
        """All tokens (of the first `at_most` bytes) against a vocabulary. Where `holmes data prepare` says that it
        wrote this file with one that is no larger, nothing is read. Raises DataError."""
        if self.vocab() <= vocab:
            return
        with open(f"{self.path}.bin", "rb") as f:
            while f.tell() < at_most and len(
                tokens := np.fromfile(f, self.dtype, _SCAN_BYTES // self.dtype().itemsize)
            ):
                check_vocabulary(tokens, vocab, f"{self.path}.bin")

    def vocab(self) -> float:
        """The vocabulary that PREFIX.json names, if it belongs to this PREFIX.bin; else infinity."""
        try:
            said = json.loads(Path(f"{self.path}.json").read_text(encoding="utf-8"))
            same = said["tokens"] * self.dtype().itemsize == self.bin_bytes and said["sequences"] == self.sequences
            return int(said["vocab"]) if same else math.inf
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf


def _whole(file: Path, size: int, expected: int, says: str) -> None:
    if size != expected:
        raise DataError(
            f"{'truncated' if size < expected else 'too long'}: {size} bytes, its {says} says {expected}",
            where=str(file),
            hint=_REMAKE,
        )


def parse_blend(prefix: str | Sequence[str | float] | None) -> tuple[list[str], list[float] | None]:
    """`PREFIX`, `[a, b]` (by size) or `[0.7, a, 0.3, b]` -> prefixes and weights. `prefix` is not empty."""
    items: list[Any] = [prefix] if isinstance(prefix, str) else list(prefix or [])
    hint = "give data.prefix=PREFIX or data.prefix=[0.7,A,0.3,B]"
    if not isinstance(items[0], (int, float)):
        if any(isinstance(i, (int, float)) for i in items):
            raise DataError(f"{items} mixes prefixes with and without a weight", where="data.prefix", hint=hint)
        return [str(i) for i in items], None
    names, weights = items[1::2], items[::2]
    if (
        len(names) != len(weights)
        or any(isinstance(n, (int, float)) for n in names)
        or not all(isinstance(w, (int, float)) and 0 < w < float("inf") for w in weights)
    ):
        raise DataError(f"{items} is not weights above 0 and prefixes in turn", where="data.prefix", hint=hint)
    return [str(n) for n in names], [float(w) for w in weights]


def parse_split(split: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """ "90,10" -> where training and validation begin and end, as parts of the whole."""
    try:
        parts = [float(p) for p in str(split).split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2, 3) or any(not 0 <= p < float("inf") for p in parts) or parts[0] <= 0:
        raise DataError(f"split is {split!r}", where="data.split", hint='use "90,10": training, validation')
    total, parts = sum(parts), [*parts, 0.0]
    return (0.0, parts[0] / total), (parts[0] / total, (parts[0] + parts[1]) / total)


def bounds_of(prefix: Prefix, part: tuple[float, float]) -> tuple[int, int]:
    return round(part[0] * prefix.sequences), round(part[1] * prefix.sequences)


def samples_of(prefix: Prefix, part: tuple[float, float], length: int) -> int:
    first, last = bounds_of(prefix, part)
    return (prefix.first_token(last) - prefix.first_token(first) - 1) // length


def check_length(prefixes: Sequence[Prefix], part: tuple[float, float], what: str, batch: Batch, each: bool) -> None:
    """A step's samples must be there, and with weights (`each`) at least one of every prefix."""
    length, size = batch.sequence_length, batch.global_size
    counts = [max(0, samples_of(p, part, length)) for p in prefixes]
    hint = "use more text, a smaller batch, a shorter sequence or another data.split"
    if sum(counts) < size:
        raise DataError(
            f"its {what} part has {sum(counts)} samples of {length} tokens, a step takes {size}",
            where=", ".join(p.path for p in prefixes),
            hint=hint,
        )
    if each and 0 in counts:
        raise DataError(
            f"its {what} part is shorter than one sample of {length} tokens",
            where=prefixes[counts.index(0)].path,
            hint=hint,
        )


def check_vocabulary(tokens: np.ndarray, vocab: int, where: str) -> None:
    """Raise DataError where a token id is not one of a vocabulary of `vocab`."""
    if tokens.size and (int(tokens.max()) >= vocab or int(tokens.min()) < 0):
        wrong = int(tokens.max()) if int(tokens.max()) >= vocab else int(tokens.min())
        raise DataError(
            f"token id {wrong} is not in the model's vocabulary of {vocab}",
            where=where,
            hint="prepare the data with the model's tokenizer, or set model.vocab",
        )

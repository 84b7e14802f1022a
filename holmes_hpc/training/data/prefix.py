"""PREFIX.bin and PREFIX.idx of Megatron's indexed data sets, looked at without Megatron, whose import takes seconds:
what can be found wrong with data before a job waits in a queue."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holmes_hpc.config.data import DataConfig
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import DataError
from holmes_hpc.schema import refuse

# Megatron's codes of the types of whole numbers (megatron.core.datasets.indexed_dataset.DType)
TOKEN_TYPES: dict[int, type[np.number]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, document bounds
_MAGIC = b"MMIDIDX\x00\x00"
_SCAN_BYTES = 4 << 20  # of a .bin at a time
_LOOKED_AT = 256 << 20  # bytes of a .bin of unknown vocabulary that are read before a job is submitted
_REMAKE = "make it with `holmes data prepare FILES -o PREFIX`"
_NUMBERS = ("documents", "sequences", "tokens", "vocab", "eod")  # of PREFIX.json


def look_at(data: DataConfig, model: ModelSpec, batch: Batch, evaluates: bool) -> None:
    """What can be told of indexed data within a second or two: whether they are there and whole, long enough for a step
    of `batch`, and of the model's vocabulary. Raises DataError as a rank would."""
    names, weights = parse_blend(data.prefix)
    prefixes = [Prefix.open(name) for name in names]
    check_lengths(prefixes, parse_split(data.split, evaluates), batch, each=weights is not None)
    for prefix in prefixes:
        prefix.check_tokens(model.vocab, _LOOKED_AT)


def document_end(data: DataConfig) -> int | None:
    """The token behind which another document begins, where documents are kept apart; None where they are joined.
    DataError where PREFIX.json does not say it, or another token ends the documents of another prefix."""
    if data.documents == "joined":
        return None
    ends = {name: read_summary(name).get("eod") for name in parse_blend(data.prefix)[0]}
    if unknown := [name for name, end in ends.items() if end is None]:
        raise DataError("no word of which token ends a document", where=f"{unknown[0]}.json", hint=_REMAKE)
    if len(set(ends.values())) > 1:
        raise DataError(
            f"documents end with other tokens: {ends}",
            where="data.prefix",
            hint="prepare all of them with one tokenizer, or use data.documents=joined",
        )
    return next(iter(ends.values()))


def digest(of: Any) -> str:
    """Return 16 hexadecimal digits that change with plain data."""
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]


def read_summary(path: str) -> dict[str, Any]:
    """Return what PREFIX.json says, which `holmes data prepare` writes beside the data; {} where it is damaged or not
    there. `path`: PREFIX."""
    try:
        said: dict[str, Any] = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        return said if all(type(said.get(name, 0)) is int for name in _NUMBERS) else {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


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
        idx, binary = Path(f"{path}.idx"), Path(f"{path}.bin")
        try:
            with idx.open("rb") as f, binary.open("rb") as data:
                head, _ = f.read(_HEADER.size), data.read(1)
        except OSError as e:
            raise DataError(e.strerror or str(e), where=str(e.filename or path), hint=_REMAKE) from e
        if len(head) < _HEADER.size:
            raise DataError(f"truncated: {len(head)} bytes", where=str(idx), hint=_REMAKE)
        magic, version, code, sequences, bounds = _HEADER.unpack(head)
        is_index, stat = (magic, version) == (_MAGIC, 1) and code in TOKEN_TYPES, idx.stat()
        refuse(
            str(idx),
            (not is_index, "not an index of Megatron's indexed data set", _REMAKE),
            _other_size(stat.st_size, _HEADER.size + 12 * sequences + 8 * bounds, "header"),
            (not sequences, "holds no text", _REMAKE),
            error=DataError,
        )
        prefix = cls(path, sequences, TOKEN_TYPES[code], binary.stat().st_size, stat.st_mtime_ns)
        bin_bytes = prefix.first_token(sequences) * prefix.dtype().itemsize
        refuse(str(binary), _other_size(prefix.bin_bytes, bin_bytes, "index"), error=DataError)
        return prefix

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
        said = read_summary(self.path)
        is_same = (said.get("tokens"), said.get("sequences")) == (self.tokens, self.sequences)
        return said.get("vocab", math.inf) if is_same else math.inf


def _other_size(size: int, expected: int, says: str) -> tuple[bool, str, str]:
    """Return a case of :func:`refuse`: a file that is not as long as its header or its index says."""
    wrong = "truncated" if size < expected else "too long"
    return size != expected, f"{wrong}: {size} bytes, its {says} says {expected}", _REMAKE


def parse_blend(prefix: str | Sequence[str | float] | None) -> tuple[list[str], list[float] | None]:
    """`PREFIX`, `[a, b]` (by size) or `[0.7, a, 0.3, b]` -> prefixes and weights. `prefix` is not empty."""
    items: list[Any] = [prefix] if isinstance(prefix, str) else list(prefix or [])
    is_weighted = isinstance(items[0], (int, float))
    names, weights = (items[1::2], items[::2]) if is_weighted else (items, [])
    hint = "give data.prefix=PREFIX or data.prefix=[0.7,A,0.3,B]"
    has_numbers = any(isinstance(name, int | float) for name in names)
    in_turn = len(names) == len(weights) and all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
    refuse(
        "data.prefix",
        (not is_weighted and has_numbers, f"{items} mixes prefixes with and without a weight", hint),
        (is_weighted and (has_numbers or not in_turn), f"{items} is not weights above 0 and prefixes in turn", hint),
        error=DataError,
    )
    return [str(n) for n in names], [float(w) for w in weights] or None


def parse_split(split: str, evaluates: bool) -> dict[str, tuple[float, float]]:
    """ "90,10" -> where training and validation (where one `evaluates`) begin and end, as parts of the whole."""
    try:
        parts = [float(p) for p in str(split).split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2, 3) or any(not 0 <= p < float("inf") for p in parts) or parts[0] <= 0:
        raise DataError(f"split is {split!r}", where="data.split", hint='use "90,10": training, validation')
    total, first, second = sum(parts), parts[0], sum(parts[1:2])
    validation = {"validation": (first / total, (first + second) / total)} if evaluates else {}
    return {"training": (0.0, first / total), **validation}


def bounds_of(prefix: Prefix, part: tuple[float, float]) -> tuple[int, int]:
    return round(part[0] * prefix.sequences), round(part[1] * prefix.sequences)


def samples_of(prefix: Prefix, part: tuple[float, float], length: int) -> int:
    first, last = bounds_of(prefix, part)
    return (prefix.first_token(last) - prefix.first_token(first) - 1) // length


def check_lengths(
    prefixes: Sequence[Prefix], split: Mapping[str, tuple[float, float]], batch: Batch, each: bool
) -> None:
    """Raise DataError unless each part of the `split` has a step's samples, and with weights (`each`) at least one of
    every prefix."""
    length, size = batch.sequence_length, batch.global_size
    hint = "use more text, a smaller batch, a shorter sequence or another data.split"
    for name, part in split.items():
        counts = {p.path: max(0, samples_of(p, part, length)) for p in prefixes}
        if (total := sum(counts.values())) < size:
            raise DataError(
                f"its {name} part has {total} samples of {length} tokens, a step takes {size}",
                where=", ".join(counts),
                hint=hint,
            )
        if each and (too_short := [path for path, count in counts.items() if not count]):
            raise DataError(
                f"its {name} part is shorter than one sample of {length} tokens", where=too_short[0], hint=hint
            )


def check_vocabulary(tokens: np.ndarray, vocab: int, where: str) -> None:
    """Raise DataError where a token id is not one of a vocabulary of `vocab`."""
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, -1)
    if high >= vocab or low < 0:
        wrong = high if high >= vocab else low
        raise DataError(
            f"token id {wrong} is not in the model's vocabulary of {vocab}",
            where=where,
            hint="prepare the data with the model's tokenizer, or set model.vocab",
        )

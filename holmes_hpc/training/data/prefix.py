"""Checks of PREFIX.bin and PREFIX.idx, Megatron's indexed data set, before a job is queued.

This module does not import Megatron, which takes seconds.
"""

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
from holmes_hpc.errors import Case, DataError
from holmes_hpc.records.untrusted import open_file, read_object

# Megatron's codes of integer types (megatron.core.datasets.indexed_dataset.DType)
TOKEN_TYPES: dict[int, type[np.number]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, document bounds
_MAGIC = b"MMIDIDX\x00\x00"
_SCAN_BYTES = 4 << 20  # read from a .bin at a time
_MAX_CHECKED_BYTES = 256 << 20  # read from an .idx, and from a .bin of unknown vocabulary, before a job is submitted
_BLOCK = 1 << 18  # entries of an .idx that are checked at a time
_PREPARE_HINT = "create it with `holmes data prepare FILES -o PREFIX`"
Fractions = tuple[float, float]  # of a prefix's sequences: where a part of the data starts and ends
_INTEGER_KEYS = ("documents", "sequences", "tokens", "vocab", "eod")  # of PREFIX.json


def check_data(
    data: DataConfig, model: ModelSpec, batch: Batch, evaluates: bool, max_bytes: float = _MAX_CHECKED_BYTES
) -> None:
    """Raise DataError unless indexed data exist, are complete, suffice for a step of `batch`, and fit the model's
    vocabulary. `max_bytes`: how much of each file is read; by default, this takes about two seconds."""
    names, weights = parse_blend(data.prefix)
    prefixes = [Prefix.open(name) for name in names]
    for prefix in prefixes:
        prefix.check_index(max_bytes)
    document_end(data)
    check_lengths(prefixes, parse_split(data.split, evaluates), batch, is_weighted=weights is not None)
    for prefix in prefixes:
        prefix.check_tokens(model.vocab, max_bytes)


def document_end(data: DataConfig) -> int | None:
    """Return the end-of-document token if `data.documents` separates documents; None if they are joined.
    Raise DataError if PREFIX.json does not have it, or if it differs between prefixes."""
    if data.documents == "joined":
        return None
    end_tokens = {name: read_summary(name).get("eod") for name in parse_blend(data.prefix)[0]}
    if unknown := [name for name, token in end_tokens.items() if token is None]:
        raise DataError("no end-of-document token in this file", where=f"{unknown[0]}.json", hint=_PREPARE_HINT)
    if len(set(end_tokens.values())) > 1:
        problem = f"the prefixes have different end-of-document tokens: {end_tokens}"
        hint = "prepare all of them with one tokenizer, or use data.documents=joined"
        raise DataError(problem, where="data.prefix", hint=hint)
    return next(iter(end_tokens.values()))


def digest(value: Any) -> str:
    """Return a digest of plain data: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_summary(path: str) -> dict[str, Any]:
    """Return the content of PREFIX.json of `holmes data prepare`; {} if damaged or missing. `path`: PREFIX."""
    content = read_object(f"{path}.json") or {}
    return content if all(type(content.get(key, 0)) is int for key in _INTEGER_KEYS) else {}


@dataclass(frozen=True)
class Prefix:
    """A complete pair PREFIX.bin and PREFIX.idx. `path`: PREFIX; `sequences`: their number, which a split divides;
    `dtype`: type of the token ids; `bin_bytes`: size of PREFIX.bin; `changed_ns`: when PREFIX.idx was last written."""

    path: str
    sequences: int
    dtype: type[np.number]
    bin_bytes: int
    changed_ns: int

    @classmethod
    def open(cls, path: str) -> "Prefix":
        """Open PREFIX and check both files against each other without reading the data."""
        idx, binary = Path(f"{path}.idx"), Path(f"{path}.bin")
        try:
            with open_file(idx) as f, open_file(binary) as data:
                head, _ = f.read(_HEADER.size), data.read(1)
        except OSError as e:
            raise DataError(e.strerror or str(e), where=str(e.filename or path), hint=_PREPARE_HINT) from e
        DataError.refuse(str(idx), _wrong_size(len(head), _HEADER.size, "format"))
        magic, version, code, sequences, bounds = _HEADER.unpack(head)
        is_index, stat = (magic, version) == (_MAGIC, 1) and code in TOKEN_TYPES, idx.stat()
        DataError.refuse(
            str(idx),
            (not is_index, "not an index of Megatron's indexed data set", _PREPARE_HINT),
            _wrong_size(stat.st_size, _HEADER.size + 12 * sequences + 8 * bounds, "header"),
            (not sequences, "contains no text", _PREPARE_HINT),
        )
        prefix = cls(path, sequences, TOKEN_TYPES[code], binary.stat().st_size, stat.st_mtime_ns)
        bin_bytes = prefix.first_token(sequences) * prefix.dtype().itemsize
        DataError.refuse(str(binary), _wrong_size(prefix.bin_bytes, bin_bytes, "index"))
        return prefix

    def first_token(self, sequence: int) -> int:
        """Return the number of tokens in PREFIX.bin before `sequence`, which may equal the number of sequences."""
        if sequence == 0:
            return 0
        with open(f"{self.path}.idx", "rb") as f:
            f.seek(_HEADER.size + 4 * (sequence - 1))
            length = struct.unpack("<i", f.read(4))[0]
            f.seek(_HEADER.size + 4 * self.sequences + 8 * (sequence - 1))
            pointer = struct.unpack("<q", f.read(8))[0]
        return pointer // self.dtype().itemsize + length

    def sequence_bounds(self, fractions: Fractions) -> tuple[int, int]:
        """Return the first sequence of a part of the data, and the first one after it."""
        return round(fractions[0] * self.sequences), round(fractions[1] * self.sequences)

    def sample_count(self, fractions: Fractions, length: int) -> int:
        """Return the number of samples of `length` tokens in a part of the data."""
        first, last = map(self.first_token, self.sequence_bounds(fractions))
        return (last - first - 1) // length

    @property
    def tokens(self) -> int:
        return self.bin_bytes // self.dtype().itemsize

    def check_index(self, max_bytes: float = math.inf) -> None:
        """Raise DataError unless the sequences follow each other in the .bin without gaps, and the documents start at
        sequences in ascending order. `max_bytes`: how much of each of the index's two tables is checked."""
        end, start, path = 0, 0, f"{self.path}.idx"
        with open_file(path) as f:
            bounds = _HEADER.unpack(f.read(_HEADER.size))[-1]

            def read(dtype: type[np.number], offset: int, first: int, count: int) -> np.ndarray:
                f.seek(_HEADER.size + offset + first * dtype().itemsize)
                return np.fromfile(f, dtype, min(_BLOCK, count - first)).astype(np.int64)

            for first in range(0, int(min(self.sequences, max_bytes // 12)), _BLOCK):
                lengths = read(np.int32, 0, first, self.sequences)
                starts = read(np.int64, 4 * self.sequences, first, self.sequences)
                ends = starts + lengths * self.dtype().itemsize
                expected = np.concatenate(([end], ends[:-1]))
                if (wrong := (starts != expected) | (lengths < 0) | (ends > self.bin_bytes)).any():
                    i = int(wrong.argmax())
                    place = f"at bytes {starts[i]} to {ends[i]} of {self.bin_bytes}"
                    problem = f"damaged: sequence {first + i} is {place}, and the one before ends at {expected[i]}"
                    raise DataError(problem, where=path, hint=_PREPARE_HINT)
                end = ends[-1]
            for first in range(0, int(min(bounds, max_bytes // 8)), _BLOCK):
                starts = read(np.int64, 12 * self.sequences, first, bounds)
                wrong = (np.diff(starts, prepend=start) < 0) | (starts < 0) | (starts > self.sequences)
                if wrong.any():
                    i = int(wrong.argmax())
                    problem = f"damaged: document {first + i} starts at sequence {starts[i]} of {self.sequences}"
                    raise DataError(problem, where=path, hint=_PREPARE_HINT)
                start = starts[-1]

    def check_tokens(self, vocab: int, max_bytes: float = math.inf) -> None:
        """Raise DataError if a token in the first `max_bytes` is not in a vocabulary of `vocab` ids.
        Nothing is read if PREFIX.json records a vocabulary of at most that size."""
        if self.vocab() <= vocab:
            return
        with open(f"{self.path}.bin", "rb") as f:
            count = _SCAN_BYTES // self.dtype().itemsize
            while f.tell() < max_bytes and len(tokens := np.fromfile(f, self.dtype, count)):
                check_vocabulary(tokens, vocab, f"{self.path}.bin")

    def vocab(self) -> float:
        """Return the vocabulary in PREFIX.json if it describes this PREFIX.bin, else infinity."""
        summary = read_summary(self.path)
        is_same = (summary.get("tokens"), summary.get("sequences")) == (self.tokens, self.sequences)
        return summary.get("vocab", math.inf) if is_same else math.inf


def _wrong_size(size: int, expected: int, source: str) -> Case:
    """Return the case, for DataError.refuse, that a file's size is not `expected`. `source`: what implies that size."""
    problem = "truncated" if size < expected else "too long"
    return size != expected, f"{problem}: {size} bytes, its {source} implies {expected}", _PREPARE_HINT


def parse_blend(prefix: str | Sequence[str | float] | None) -> tuple[list[str], list[float] | None]:
    """Parse `PREFIX`, `[a, b]` (weighted by size) or `[0.7, a, 0.3, b]` into prefixes and weights."""
    blend: list[Any] = [prefix] if isinstance(prefix, str) else list(prefix or [])
    is_weighted = isinstance(blend[0], (int, float))
    names, weights = (blend[1::2], blend[::2]) if is_weighted else (blend, [])
    hint = "give data.prefix=PREFIX or data.prefix=[0.7,A,0.3,B]"
    has_numbers = any(isinstance(name, int | float) for name in names)
    has_pairs = len(names) == len(weights) and all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
    DataError.refuse(
        "data.prefix",
        (not is_weighted and has_numbers, f"{blend} mixes prefixes with and without a weight", hint),
        (is_weighted and (has_numbers or not has_pairs), f"{blend} must alternate weights above 0 and prefixes", hint),
    )
    return [str(n) for n in names], [float(w) for w in weights] or None


def parse_split(split: str, evaluates: bool) -> dict[str, Fractions]:
    """Parse "90,10" into the fractions of "training" and, if the run `evaluates`, of "validation"."""
    try:
        parts = [float(p) for p in str(split).split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2, 3) or any(not 0 <= p < float("inf") for p in parts) or parts[0] <= 0:
        raise DataError(f"{split!r} is no split", where="data.split", hint='use "90,10": training, validation')
    total, first, second = sum(parts), parts[0], sum(parts[1:2])
    validation = {"validation": (first / total, (first + second) / total)} if evaluates else {}
    return {"training": (0.0, first / total), **validation}


def check_lengths(prefixes: Sequence[Prefix], split: Mapping[str, Fractions], batch: Batch, is_weighted: bool) -> None:
    """Raise DataError if a part of the `split` has fewer samples than a step.
    If `is_weighted`, each part also needs a sample of every prefix."""
    length, size = batch.sequence_length, batch.global_size
    hint = "use more text, a smaller batch, a shorter sequence or another data.split"
    for name, fractions in split.items():
        counts = {p.path: max(0, p.sample_count(fractions, length)) for p in prefixes}
        total, empty = sum(counts.values()), [path for path, count in counts.items() if is_weighted and not count]
        too_few = f"its {name} part has {total} samples of {length} tokens, a step takes {size}"
        too_short = f"its {name} part is shorter than one sample of {length} tokens"
        DataError.refuse(", ".join(counts), (total < size, too_few, hint), (empty, too_short, hint, "".join(empty[:1])))


def check_vocabulary(tokens: np.ndarray, vocab: int, where: str) -> None:
    """Raise DataError if a token id is outside a vocabulary of `vocab` ids."""
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, -1)
    problem = f"token id {high if high >= vocab else low} is not in the model's vocabulary of {vocab}"
    hint = "prepare the data with the model's tokenizer, or set model.vocab"
    DataError.refuse(where, (high >= vocab or low < 0, problem, hint))

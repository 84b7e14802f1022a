"""Readers of documents in text, JSON lines (both may be compressed) or Parquet. They read files or byte ranges."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from holmes_hpc.errors import DataError
from holmes_hpc.records.untrusted import open_file

PIECE_BYTES = 1 << 20  # approximate size of the pieces in which a text file is read, encoded and shuffled
_MAX_LINE_BYTES = 64 << 20  # of JSON
_PARQUET_MAGIC = b"PAR1"
_PARQUET_ROWS = 1024  # read at a time
_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_COMPRESSED_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}


@dataclass(frozen=True)
class Extent:
    """A unit of reading: the lines of `path` that start in bytes [start, end). `end`: None for a compressed or Parquet
    file, which is read as a whole. PREFIX.json has a digest of these fields: keep their names and order."""

    path: str
    start: int
    end: int | None
    size: int  # of the file
    changed_ns: int

    @property
    def bytes(self) -> int:
        return self.size if self.end is None else self.end - self.start


def extents(path: str, max_bytes: int) -> list[Extent]:
    """Split a file into extents of at most `max_bytes`, unless compressed or Parquet. DataError if it is unreadable."""
    with DataError.instead_of(OSError, where=path, hint="give readable text files"), open_file(path) as f:
        stat, head = Path(path).stat(), f.read(8)
    size, changed_ns = stat.st_size, stat.st_mtime_ns
    if head.startswith((*_DECOMPRESSORS, _PARQUET_MAGIC)):
        return [Extent(path, 0, None, size, changed_ns)]
    return [Extent(path, a, min(a + max_bytes, size), size, changed_ns) for a in range(0, size, max_bytes)]


def documents(extent: Extent, json_key: str, on_read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it ends a document). `on_read` gets the number of bytes read since its last call. A file
    named .jsonl, .ndjson or .json (before a suffix like .gz) has one JSON object per line, with its text under
    `json_key`. A Parquet file has one document per row, in the column of that name. Any other file is one document,
    yielded in pieces. Raise DataError with the position of the problem."""
    errors, hint = (OSError, EOFError, zlib.error, lzma.LZMAError), "fetch or compress it again, or omit it"
    unreadable = DataError.instead_of(*errors, where=extent.path, hint=hint, what="cannot be read:")
    with unreadable, open_file(extent.path) as raw:
        head = raw.read(8)
        raw.seek(0)
        if head.startswith(_PARQUET_MAGIC):
            yield from _parquet(extent, json_key, on_read)
            return
        with next((opener(raw) for magic, opener in _DECOMPRESSORS.items() if head.startswith(magic)), raw) as f:
            reader = _CountingReader(raw, f, on_read)
            if extent.start:
                reader.seek(extent.start)
            name = Path(extent.path)
            suffix = (Path(name.stem) if name.suffix in _COMPRESSED_SUFFIXES else name).suffix
            yield from (_json_lines if suffix in _JSON_SUFFIXES else _text)(extent, json_key, reader)


def _zstandard(raw: IO[bytes]) -> io.BufferedReader:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), PIECE_BYTES)


_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {  # by a file's first bytes
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstandard,
}


class _CountingReader:
    """A reader of `f` that reports its progress to `on_read`, in bytes of `raw`: the file on disk, which `f` reads."""

    def __init__(self, raw: IO[bytes], f: IO[bytes], on_read: Callable[[int], None]) -> None:
        self._raw, self.file, self._on_read, self._reported = raw, f, on_read, 0

    def report(self) -> None:
        position = self._raw.tell()
        self._on_read(position - self._reported)
        self._reported = position

    def seek(self, offset: int) -> None:
        """Move to the first line that starts at `offset` or later."""
        self.file.seek(offset - 1)
        self._reported = offset
        while (line := self.file.readline(PIECE_BYTES)) and not line.endswith(b"\n"):
            pass


def _text(extent: Extent, json_key: str, reader: _CountingReader) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text file, split at line ends. Only a line longer than a piece is split."""
    f, decoder, has_text = reader.file, codecs.getincrementaldecoder("utf-8")("strict"), False
    position = f.tell() if extent.end is not None else 0
    is_inside_line = False
    while extent.end is None or position < extent.end or is_inside_line:
        max_bytes = PIECE_BYTES if extent.end is None else min(PIECE_BYTES, max(0, extent.end - position))
        block = f.read(max_bytes)
        if not block.endswith(b"\n"):
            block += f.readline(PIECE_BYTES)
        if not block:
            break
        is_inside_line = not block.endswith(b"\n")
        yield _decode(decoder, block, position, extent, final=False), False
        position, has_text = position + len(block), True
        reader.report()
    tail = _decode(decoder, b"", position, extent, final=True)
    is_end_of_file = extent.end is None or extent.end == extent.size
    if tail or (is_end_of_file and (has_text or extent.start)):  # also if no line starts in the last extent
        yield tail, is_end_of_file


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, position: int, extent: Extent, final: bool) -> str:
    try:
        text = decoder.decode(block, final)
    except UnicodeDecodeError as e:
        problem = f"not UTF-8 text at byte {position + e.start - len(e.object) + len(block)}"
        raise DataError(problem, where=extent.path, hint="convert it to UTF-8 (iconv), or omit it") from e
    return text[1:] if position == 0 and text.startswith("\ufeff") else text


def _json_lines(extent: Extent, json_key: str, reader: _CountingReader) -> Iterator[tuple[str, bool]]:
    f = reader.file
    position, reported = f.tell() if extent.end is not None else 0, 0
    while extent.end is None or position < extent.end:
        line = f.readline(_MAX_LINE_BYTES)
        if not line:
            break
        line_start, position = position, position + len(line)
        if position - reported >= PIECE_BYTES:
            reader.report()
            reported = position
        if line.strip() and (text := _json_text(line, json_key, f"{extent.path}, the line at byte {line_start}")):
            yield text, True
    reader.report()


def _parquet(extent: Extent, column: str, on_read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(extent.path) as file:
            names = file.schema_arrow.names
            dtype = file.schema_arrow.field(column).type if column in names else None
            if dtype is None or not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
                columns = ", ".join(names[:8]) if dtype is None else f"{column}, of type {dtype}"
                problem = f"no text column {column!r} (found: {columns})"
                raise DataError(problem, where=extent.path, hint="name the column with --json-key")
            row_count, rows_read, reported = max(1, file.metadata.num_rows), 0, 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[column]):
                yield from ((text, True) for text in batch.column(0).to_pylist() if text)
                rows_read += batch.num_rows
                position = extent.size * rows_read // row_count
                on_read(position - reported)
                reported = position
    except pa.ArrowException as e:
        problem = f"damaged Parquet: {' '.join(str(e).split())[:200]}"
        raise DataError(problem, where=extent.path, hint="fetch it again, or omit it") from e


def _json_text(line: bytes, json_key: str, where: str) -> str:
    hint = "give files with one JSON object per line, in UTF-8"
    with DataError.instead_of(ValueError, RecursionError, where=where, hint=hint, what="not JSON:"):
        entry = json.loads(line.decode("utf-8-sig"))
    if not isinstance(entry, dict) or not isinstance(entry.get(json_key), str):
        keys = ", ".join(map(str, list(entry)[:8])) if isinstance(entry, dict) else type(entry).__name__
        raise DataError(f"no text under {json_key!r} (found: {keys})", where=where, hint="name the key with --json-key")
    # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
    return str(entry[json_key]).encode("utf-8", "replace").decode("utf-8")

"""Files as streams of documents: text, JSON lines, plain or compressed, or Parquet; whole or a range of bytes."""

from __future__ import annotations

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

PIECE_BYTES = 1 << 20  # a text file is read, encoded and later shuffled in pieces of about this size
_LONGEST_LINE = 64 << 20  # of JSON
_PARQUET = b"PAR1"
_ROWS = 1024  # of a Parquet file at a time
_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_COMPRESSED_SUFFIXES = {".gz", ".bz2", ".xz", ".zst"}


@dataclass(frozen=True)
class Extent:
    """What is read at one go: the lines of `path` that begin at bytes [start, end); `end` None: a compressed file."""

    path: str
    start: int
    end: int | None
    size: int  # of the file
    changed_ns: int

    @property
    def bytes(self) -> int:
        return self.size if self.end is None else self.end - self.start


def extents(path: str, at_most: int) -> list[Extent]:
    """A file in extents of about `at_most` bytes; a compressed or Parquet one is a single extent. Raises DataError."""
    try:
        stat = Path(path).stat()
        with open(path, "rb") as f:
            head = f.read(8)
    except OSError as e:
        raise DataError(e.strerror or str(e), where=path, hint="give files of text that can be read") from e
    if head.startswith((*_DECOMPRESSED, _PARQUET)):
        return [Extent(path, 0, None, stat.st_size, stat.st_mtime_ns)]
    return [
        Extent(path, a, min(a + at_most, stat.st_size), stat.st_size, stat.st_mtime_ns)
        for a in range(0, stat.st_size, at_most)
    ]


def documents(extent: Extent, json_key: str, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends here). `read` is told the file's bytes as they are consumed.

    A file named .jsonl, .ndjson or .json (before .gz and the like) holds one JSON object a line, its text under
    `json_key`; a Parquet file one document a row, in that column; any other file is one document, yielded in pieces.
    Raises DataError with the place of what is wrong.
    """
    try:
        with open(extent.path, "rb") as raw:
            head = raw.read(8)
            raw.seek(0)
            if head.startswith(_PARQUET):
                yield from _parquet(extent, json_key, read)
                return
            with next((opened(raw) for magic, opened in _DECOMPRESSED.items() if head.startswith(magic)), raw) as f:
                source = _Counting(raw, f, read)
                if extent.start:
                    source.seek(extent.start)
                yield from (_json_lines if _is_json(extent.path) else _text)(extent, json_key, source)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
        raise DataError(
            f"cannot be read: {reason}", where=extent.path, hint="fetch or compress it again, or leave it out"
        ) from e


def _is_json(path: str) -> bool:
    name = Path(path)
    return (Path(name.stem).suffix if name.suffix in _COMPRESSED_SUFFIXES else name.suffix) in _JSON_SUFFIXES


def _zstandard(raw: IO[bytes]) -> io.BufferedReader:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), PIECE_BYTES)


_DECOMPRESSED: dict[bytes, Callable[[Any], Any]] = {  # by a file's first bytes: how it is read
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstandard,
}


class _Counting:
    """Reads `f` and tells how far `raw`, the file beneath it, has come."""

    def __init__(self, raw: IO[bytes], f: IO[bytes], tell: Callable[[int], None]) -> None:
        self._raw, self.file, self._tell, self._last = raw, f, tell, 0

    def moved(self) -> None:
        now = self._raw.tell()
        self._tell(now - self._last)
        self._last = now

    def seek(self, offset: int) -> None:
        """To the first line that begins at `offset` or later."""
        self.file.seek(offset - 1)
        self._last = offset
        while (line := self.file.readline(PIECE_BYTES)) and not line.endswith(b"\n"):
            pass


def _text(extent: Extent, json_key: str, source: _Counting) -> Iterator[tuple[str, bool]]:
    """Pieces of a text file, cut at line ends (inside a line only where it is longer than a piece)."""
    f, decoder, begun = source.file, codecs.getincrementaldecoder("utf-8")("strict"), False
    position = f.tell() if extent.end is not None else 0
    inside_line = False
    while extent.end is None or position < extent.end or inside_line:
        room = PIECE_BYTES if extent.end is None else min(PIECE_BYTES, max(0, extent.end - position))
        block = f.read(room)
        if not block.endswith(b"\n"):
            block += f.readline(PIECE_BYTES)
        if not block:
            break
        inside_line = not block.endswith(b"\n")
        yield _decode(decoder, block, position, extent, final=False), False
        position, begun = position + len(block), True
        source.moved()
    rest = _decode(decoder, b"", position, extent, final=True)
    last = extent.end is None or extent.end == extent.size
    if rest or (last and (begun or extent.start)):
        yield rest, last


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, position: int, extent: Extent, final: bool) -> str:
    try:
        text = decoder.decode(block, final)
    except UnicodeDecodeError as e:
        raise DataError(
            f"not UTF-8 text at byte {position + e.start - len(e.object) + len(block)}",
            where=extent.path,
            hint="convert it to UTF-8 (iconv), or leave it out",
        ) from e
    return text[1:] if position == 0 and text.startswith("\ufeff") else text


def _json_lines(extent: Extent, json_key: str, source: _Counting) -> Iterator[tuple[str, bool]]:
    f = source.file
    position, told = f.tell() if extent.end is not None else 0, 0
    while extent.end is None or position < extent.end:
        line = f.readline(_LONGEST_LINE)
        if not line:
            break
        here, position = position, position + len(line)
        if position - told >= PIECE_BYTES:
            source.moved()
            told = position
        if line.strip():
            text = _json_text(line, json_key, f"{extent.path}, the line at byte {here}")
            if text:
                yield text, True
    source.moved()


def _parquet(extent: Extent, column: str, read: Callable[[int], None]) -> Iterator[tuple[str, bool]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(extent.path) as file:
            names = file.schema_arrow.names
            kind = file.schema_arrow.field(column).type if column in names else None
            if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                found = ", ".join(names[:8]) if kind is None else f"{column}, of type {kind}"
                raise DataError(
                    f"no column of text {column!r} (found: {found})",
                    where=extent.path,
                    hint="name the column with --json-key",
                )
            rows, done, told = max(1, file.metadata.num_rows), 0, 0
            for batch in file.iter_batches(_ROWS, columns=[column]):
                yield from ((text, True) for text in batch.column(0).to_pylist() if text)
                done += batch.num_rows
                now = extent.size * done // rows
                read(now - told)
                told = now
    except pa.ArrowException as e:
        raise DataError(
            f"not whole Parquet: {' '.join(str(e).split())[:200]}",
            where=extent.path,
            hint="fetch it again, or leave it out",
        ) from e


def _json_text(line: bytes, json_key: str, where: str) -> str:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise DataError(
            f"not JSON: {e}", where=where, hint="give one JSON object a line, in UTF-8; or name the files to take"
        ) from e
    if not isinstance(entry, dict) or not isinstance(entry.get(json_key), str):
        keys = ", ".join(map(str, list(entry)[:8])) if isinstance(entry, dict) else type(entry).__name__
        raise DataError(f"no text under {json_key!r} (found: {keys})", where=where, hint="name the key with --json-key")
    # half of a surrogate pair can be escaped in JSON but is no text
    return str(entry[json_key]).encode("utf-8", "replace").decode("utf-8")

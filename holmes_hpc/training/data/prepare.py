"""Text to Megatron's indexed data set: `holmes data prepare`.

The files are cut into parts of some megabytes, which worker processes tokenize into PREFIX.parts/. A part counts when
it is complete, so an interrupted preparation goes on where it stopped. Then the parts are joined into PREFIX.bin and
PREFIX.idx, which appear complete or not at all, and PREFIX.json, which says what they were made from.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from holmes_hpc.errors import ConfigError, DataError, RunFailed
from holmes_hpc.training.data import text_files
from holmes_hpc.training.data.prefix import Prefix, digest, read_summary
from holmes_hpc.training.data.tokenizer import Tokenizer, load

PART_BYTES = 16 << 20
_MOST_PARTS = 4096  # of a very large corpus: its parts are larger
_SEQUENCE_TOKENS = 1 << 20  # a longer document becomes several sequences, so that it can be split and shuffled
_FULL = (errno.ENOSPC, errno.EDQUOT)
Progress = Callable[[str, int, int], None]  # what is done ("tokenize", "join"), bytes done, bytes in all


@dataclass(frozen=True)
class Prepared:
    """What PREFIX.bin and PREFIX.idx hold. `input_bytes`: of the files as they lie on disk."""

    prefix: str
    files: int
    input_bytes: int
    documents: int
    sequences: int
    tokens: int
    vocab: int
    eod: int
    resumed_parts: int = 0  # of this call: parts that an earlier, interrupted one had done

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents of {self.files:,} files: {self.tokens:,} tokens of a vocabulary of "
            f"{self.vocab:,}, in {self.prefix}.bin and .idx"
        )


@dataclass(frozen=True)
class _Part:
    """Extents that one worker tokenizes at one go, and where to."""

    extents: tuple[text_files.Extent, ...]
    target: str  # without .bin and .npz

    @property
    def done(self) -> bool:
        return os.path.exists(f"{self.target}.npz")


def prepare(
    files: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    tokenizer: str | None = None,
    workers: int | None = None,
    json_key: str = "text",
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
    force: bool = False,
) -> Prepared:
    """Tokenize `files` (text, JSON lines, compressed; of a folder all below it) into PREFIX.bin and PREFIX.idx.

    `tokenizer`: a Hugging Face tokenizer.json, or None for bytes. `workers`: processes, default all usable CPUs. Called
    again with the same arguments after an interruption it goes on; after success it returns at once. Raises DataError
    for files that cannot be read as text and for an empty corpus, RunFailed for a full disk, ConfigError where PREFIX
    holds other data; with `force` they are replaced.
    """
    prefix, report = os.fspath(prefix), progress or (lambda what, done, total: None)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}", where="data prepare", hint="use 1 or more")
    loaded = load(tokenizer)
    files = _files(files)
    extents = [e for f in files for e in text_files.extents(os.fspath(f), part_bytes)]
    total = sum(e.bytes for e in extents)
    if not total:
        raise DataError(
            f"no text in {len(files)} file(s)",
            where=", ".join(map(str, files)) or "data prepare",
            hint="give files that hold text",
        )
    made_from = {
        "tokenizer": loaded.id,
        "json_key": json_key,
        "files": hashlib.sha256(json.dumps([asdict(e) for e in extents]).encode()).hexdigest(),
    }
    if (already := _finished(prefix, made_from)) is not None:
        return already
    if not force:
        _refuse_others(prefix, made_from)
    try:
        with _locked(prefix) as directory:
            limit = max(part_bytes, total // _MOST_PARTS)
            parts = _parts(extents, directory, limit, loaded.id + json_key)
            resumed = _remove_strangers(directory, parts)
            _tokenize(parts, tokenizer, json_key, workers or len(os.sched_getaffinity(0)), report)
            made = _join(parts, prefix, loaded, report, files=len(files), input_bytes=total, resumed_parts=resumed)
            with _written_whole(f"{prefix}.json") as file:
                file.write(json.dumps({**asdict(made), "made_from": made_from}, indent=1).encode())
    except OSError as e:
        kind, hint = (RunFailed, "free some space") if e.errno in _FULL else (DataError, "correct that")
        raise kind(
            e.strerror or str(e),
            where=str(e.filename or prefix),
            hint=f"{hint} and run it again: it goes on where it stopped",
        ) from e
    shutil.rmtree(f"{prefix}.parts", ignore_errors=True)
    return made


def demo_corpus(
    prefix: str | os.PathLike[str],
    limit_bytes: int = 8_000_000,
    workers: int | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Prepared:
    """The Python standard library's own source files, at most `limit_bytes` of them, at byte level.

    Which files, and in which order, depends on their names only.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
    names = []
    for at, directories, files in os.walk(root):
        directories[:] = [d for d in directories if d not in skipped]
        names += [Path(at, f) for f in files if f.endswith(".py")]
    names.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    sizes = [path.stat().st_size for path in names]
    chosen = [
        path for path, size, end in zip(names, sizes, accumulate(sizes), strict=True) if size > 0 and end <= limit_bytes
    ]
    return prepare(chosen, prefix, workers=workers, progress=progress, force=force)


def _finished(prefix: str, made_from: dict[str, str]) -> Prepared | None:
    """What an earlier call made of the same files, if it is all still there."""
    said = read_summary(prefix)
    with suppress(DataError, TypeError):
        if said.pop("made_from", None) == made_from and Prefix.open(prefix).vocab() == said.get("vocab"):
            return Prepared(**{**said, "prefix": prefix, "resumed_parts": 0})
    return None


def _files(given: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that are given; in place of a folder all below it, by path, but hidden ones."""
    found: list[Path] = []
    for path in map(Path, given):
        below = [path]
        if path.is_dir():
            below = [
                p
                for p in sorted(path.rglob("*"))
                if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
            ]
        if not below:
            raise DataError("no file in this folder", where=str(path), hint="give files of text, or folders of them")
        found += below
    return found


def _refuse_others(prefix: str, made_from: dict[str, str]) -> None:
    """ConfigError where PREFIX holds data that were made from other files, or nobody knows from what."""
    there = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if os.path.exists(path)]
    if not there or os.path.isdir(f"{prefix}.parts"):  # there: an interrupted preparation, which was let in already
        return
    said = read_summary(prefix)
    if said.get("made_from") != made_from:
        size = f"{os.path.getsize(there[0]):,} bytes"
        if {"documents", "tokens"} <= said.keys():
            size = f"{said['documents']:,} documents, {said['tokens']:,} tokens"
        raise ConfigError(
            f"holds another data set already ({size})",
            where=there[0],
            hint="--force replaces it; or give another -o PREFIX",
        )


def _token_type(vocab: int) -> str:
    """As Megatron chooses it (DType.optimal_dtype), without loading Megatron."""
    return "uint16" if vocab < 65500 else "int32"


@contextmanager
def _locked(prefix: str) -> Iterator[Path]:
    """PREFIX.parts, held by one preparation at a time; the lock ends with its process."""
    directory = Path(f"{prefix}.parts")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise DataError(
                "another preparation is writing here", where=prefix, hint="wait for it, or choose another prefix"
            ) from e
        yield directory


def _parts(extents: Sequence[text_files.Extent], directory: Path, limit: int, settings: str) -> list[_Part]:
    """Extents in order, gathered up to `limit` bytes a part. A part's name tells all that its content depends on."""
    groups: list[list[text_files.Extent]] = [[]]
    size = 0
    for extent in extents:
        if groups[-1] and size + extent.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(extent)
        size += extent.bytes
    names = [f"{n:06d}-{digest([settings, [asdict(e) for e in group]])}" for n, group in enumerate(groups)]
    return [_Part(tuple(group), str(directory / name)) for group, name in zip(groups, names, strict=True)]


def _remove_strangers(directory: Path, parts: Sequence[_Part]) -> int:
    """Remove what belongs to other files or settings, or is half written; how many parts are done already."""
    kept = {f"{p.target}{end}" for p in parts if p.done for end in (".bin", ".npz")} | {str(directory / "lock")}
    for path in directory.iterdir():
        if str(path) not in kept:
            path.unlink()
    return sum(p.done for p in parts)


def _tokenize(parts: Sequence[_Part], tokenizer: str | None, json_key: str, workers: int, report: Progress) -> None:
    total = sum(e.bytes for p in parts for e in p.extents)
    before = sum(e.bytes for p in parts if p.done for e in p.extents)
    todo = [p for p in parts if not p.done]
    if min(workers, len(todo)) <= 1:
        done = before

        def read(count: int) -> None:
            nonlocal done
            done += count
            report("tokenize", min(done, total), total)

        loaded = load(tokenizer)
        for part in todo:
            _tokenize_part(part, loaded, json_key, read)
        return
    context = multiprocessing.get_context("forkserver")
    count = context.Value("q", before)
    with ProcessPoolExecutor(min(workers, len(todo)), context, _begin_worker, (tokenizer, json_key, count)) as pool:
        try:
            waiting = {pool.submit(_work, part) for part in todo}
            while waiting:
                finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                report("tokenize", min(count.value, total), total)
        except BrokenProcessPool as e:
            raise RunFailed(
                "a worker process was killed",
                where="data prepare",
                hint="use fewer --workers (memory?) and run it again: it goes on where it stopped",
            ) from e
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, str, Callable[[int], None]]  # of a worker process, set once by _begin_worker


def _begin_worker(tokenizer: str | None, json_key: str, count: Any) -> None:
    """Set a worker up. It ends when the process that started it does, however that ends."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallel over parts instead
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()

    def read(amount: int) -> None:
        with count.get_lock():
            count.value += amount

    _worker = load(tokenizer), json_key, read


def _work(part: _Part) -> None:
    _tokenize_part(part, *_worker)


def _tokenize_part(part: _Part, tokenizer: Tokenizer, json_key: str, read: Callable[[int], None]) -> None:
    """Write TARGET.bin (token ids), then TARGET.npz: the lengths of its sequences and which of them end a document."""
    lengths: list[int] = []
    ends: list[bool] = []
    dtype = np.dtype(_token_type(tokenizer.vocab))
    with _written_whole(f"{part.target}.bin") as out:
        for extent in part.extents:
            document: list[int] = []  # lengths of its sequences so far
            for text, last in text_files.documents(extent, json_key, read):
                ids = tokenizer.encode(text).astype(dtype, copy=False) if text else np.empty(0, dtype)
                out.write(ids.tobytes())
                document += [min(_SEQUENCE_TOKENS, len(ids) - at) for at in range(0, len(ids), _SEQUENCE_TOKENS)]
                if last:
                    out.write(np.array([tokenizer.eod], dtype).tobytes())
                    *whole, final = document or [0]
                    lengths += [*whole, final + 1]
                    ends += [False] * len(whole) + [True]
                    document = []
            lengths += document
            ends += [False] * len(document)
    with _written_whole(f"{part.target}.npz") as out:
        np.savez(out, lengths=np.array(lengths, np.int64), ends=np.array(ends, np.bool_))


def _join(parts: Sequence[_Part], prefix: str, tokenizer: Tokenizer, report: Progress, **counts: int) -> Prepared:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = np.dtype(_token_type(tokenizer.vocab))
    total = sum(os.path.getsize(f"{p.target}.bin") for p in parts)
    done = sequences = documents = 0
    new = f"{prefix}.parts/new"
    builder = IndexedDatasetBuilder(f"{new}.bin", dtype=dtype.type)
    for part in parts:
        with np.load(f"{part.target}.npz") as said, open(f"{part.target}.bin", "rb") as f:
            lengths, all_ends = said["lengths"].tolist(), said["ends"].tolist()
            for length, ends in zip(lengths, all_ends, strict=True):
                builder.add_item(torch.from_numpy(np.fromfile(f, dtype, length)))
                if ends:
                    builder.end_document()
            sequences, documents, done = sequences + len(lengths), documents + sum(all_ends), done + f.tell()
        report("join", done, total)
    tokens = done // dtype.itemsize
    if tokens == documents:  # nothing but ends of documents
        builder.data_file.close()
        raise DataError(
            f"no text in {counts['files']} file(s)", where=parts[0].extents[0].path, hint="give files that hold text"
        )
    builder.finalize(f"{new}.idx")
    for path in (f"{prefix}.json", f"{prefix}.idx"):  # an old index never stands beside new data
        Path(path).unlink(missing_ok=True)
    os.replace(f"{new}.bin", f"{prefix}.bin")
    os.replace(f"{new}.idx", f"{prefix}.idx")
    counts |= {"documents": documents, "sequences": sequences, "tokens": tokens}
    return Prepared(prefix, vocab=tokenizer.vocab, eod=tokenizer.eod, **counts)


@contextmanager
def _written_whole(path: str) -> Iterator[IO[bytes]]:
    """Yield a file that takes its place at `path` when the block ends well, all of its bytes on disk."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)

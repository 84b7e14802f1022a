"""Conversion of text to Megatron's indexed data set, for `holmes data prepare`.

Worker processes tokenize the files into PREFIX.parts/, in parts of some megabytes. Complete parts remain, so that an
interrupted preparation continues where it stopped. Then the parts are joined into PREFIX.bin and PREFIX.idx, which
appear complete or not at all. PREFIX.json describes the data and their sources.
"""

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
from functools import partial
from itertools import accumulate
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

import numpy as np

from holmes_hpc.errors import ConfigError, DataError, RunFailed, counted
from holmes_hpc.records.files import DISK_FULL
from holmes_hpc.records.untrusted import leaves_folder
from holmes_hpc.training.data import text_files
from holmes_hpc.training.data.prefix import Prefix, digest, read_summary
from holmes_hpc.training.data.tokenizer import Tokenizer, load_tokenizer, run_limited

PART_BYTES = 16 << 20
_MAX_PARTS = 4096  # a very large corpus has larger parts
_SEQUENCE_TOKENS = 1 << 20  # a longer document becomes several sequences, so that it can be split and shuffled
Progress = Callable[[str, int, int], None]  # stage ("tokenize", "join"), bytes done, total bytes


@dataclass(frozen=True)
class DatasetSummary:
    """The summary of PREFIX.bin and PREFIX.idx, also written to PREFIX.json. `input_bytes`: the files' size on disk."""

    prefix: str
    files: int
    input_bytes: int
    documents: int
    sequences: int
    tokens: int
    vocab: int
    eod: int
    resumed_parts: int = 0  # parts that an earlier, interrupted call had completed

    def __str__(self) -> str:
        return (
            f"{counted(self.documents, 'document')} of {counted(self.files, 'file')}: {self.tokens:,} tokens of a "
            f"vocabulary of {self.vocab:,}, in {self.prefix}.bin and .idx"
        )


@dataclass(frozen=True)
class _Part:
    """A unit of work: extents that one worker tokenizes into `target`."""

    extents: tuple[text_files.Extent, ...]
    target: str  # without .bin and .npz

    @property
    def is_done(self) -> bool:
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
) -> DatasetSummary:
    """Tokenize `files`, and all files below the folders among them, into PREFIX.bin and PREFIX.idx.
    `files`: text, JSON lines or Parquet (text_files.py); `tokenizer`: a Hugging Face tokenizer.json, or None for bytes;
    `workers`: the number of processes, by default that of usable CPUs; `force`: replace other data in PREFIX. After an
    interrupted call, a second call with the same arguments continues; after a successful one, it returns immediately.
    Raise DataError for an empty corpus or no text, RunFailed for a full disk, ConfigError if PREFIX has other data."""
    prefix, report = os.fspath(prefix), progress or (lambda stage, done, total: None)
    if workers is not None and workers < 1:
        raise ConfigError(f"workers is {workers}", where="data prepare", hint="use 1 or more")
    loaded_tokenizer = load_tokenizer(tokenizer)
    files = _list_files(files)
    extents = [e for f in files for e in text_files.extents(os.fspath(f), part_bytes)]
    total = sum(e.bytes for e in extents)
    if not total:
        where = ", ".join(map(str, files)) or "data prepare"
        raise DataError(f"no text in {len(files)} file(s)", where=where, hint="give files that contain text")
    sources = {
        "tokenizer": loaded_tokenizer.id,
        "json_key": json_key,
        "files": hashlib.sha256(json.dumps([asdict(e) for e in extents]).encode()).hexdigest(),
    }
    if (finished := _finished_summary(prefix, sources)) is not None:
        return finished
    if not force:
        _refuse_other_data(prefix, sources)
    try:
        with _locked_parts(prefix) as directory:
            max_bytes = max(part_bytes, total // _MAX_PARTS)
            parts = _plan_parts(extents, directory, max_bytes, loaded_tokenizer.id + json_key)
            counts = {"files": len(files), "input_bytes": total, "resumed_parts": _remove_stale_parts(directory, parts)}
            _tokenize(parts, tokenizer, json_key, workers or len(os.sched_getaffinity(0)), report)
            summary = _join(parts, prefix, loaded_tokenizer, report, **counts)
            with _atomic_write(f"{prefix}.json") as file:
                file.write(json.dumps({**asdict(summary), "made_from": sources}, indent=1).encode())
    except OSError as e:
        error, hint = (RunFailed, "free some space") if e.errno in DISK_FULL else (DataError, "correct that")
        hint = f"{hint} and run it again: it continues where it stopped"
        raise error(e.strerror or str(e), where=str(e.filename or prefix), hint=hint) from e
    shutil.rmtree(f"{prefix}.parts", ignore_errors=True)
    return summary


def demo_files(limit_bytes: int = 8_000_000) -> list[Path]:
    """Return source files of Python's standard library, at most `limit_bytes` of them.
    The choice and order of the files depend only on their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
    paths = []
    for folder, directories, files in os.walk(root):
        directories[:] = [d for d in directories if d not in skipped]
        paths += [Path(folder, f) for f in files if f.endswith(".py")]
    paths.sort(key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    sizes = [path.stat().st_size for path in paths]
    ends = accumulate(sizes)
    return [p for p, size, end in zip(paths, sizes, ends, strict=True) if size > 0 and end <= limit_bytes]


def _finished_summary(prefix: str, sources: dict[str, str]) -> DatasetSummary | None:
    """Return the summary of an earlier call with the same sources, if its data are complete."""
    summary = read_summary(prefix)
    with suppress(DataError, TypeError):
        if summary.pop("made_from", None) == sources and Prefix.open(prefix).vocab() == summary.get("vocab"):
            return DatasetSummary(**{**summary, "prefix": prefix, "resumed_parts": 0})
    return None


def _list_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return all files of `paths`. A folder stands for all files below it, sorted by path, without hidden ones."""
    files: list[Path] = []
    for path in map(Path, paths):
        files_below = [p for p in sorted(path.rglob("*")) if p.is_file() and "/." not in f"/{p.relative_to(path)}"]
        for file in files_below:
            if leaves_folder(file, path):
                hint = "name that file, or copy it into the folder"
                raise DataError(f"links to {file.resolve()}, outside folder {path}", where=str(file), hint=hint)
        if not files_below and path.is_dir():
            raise DataError("no file in this folder", where=str(path), hint="give text files, or folders of them")
        files += files_below or [path]
    return files


def _refuse_other_data(prefix: str, sources: dict[str, str]) -> None:
    """Raise ConfigError if PREFIX has data of other or unknown sources."""
    existing = [path for path in (f"{prefix}.idx", f"{prefix}.bin") if os.path.exists(path)]
    if not existing or os.path.isdir(f"{prefix}.parts"):  # the preparation that left .parts has passed this check
        return
    summary = read_summary(prefix)
    if summary.get("made_from") != sources:
        size = f"{os.path.getsize(existing[0]):,} bytes"
        if {"documents", "tokens"} <= summary.keys():
            size = f"{counted(summary['documents'], 'document')}, {summary['tokens']:,} tokens"
        hint = "replace it with --force, or give another -o PREFIX"
        raise ConfigError(f"contains another data set ({size})", where=existing[0], hint=hint)


def _token_type(vocab: int) -> str:
    """Return the type that Megatron's DType.optimal_dtype chooses, without importing Megatron."""
    return "uint16" if vocab < 65500 else "int32"


@contextmanager
def _locked_parts(prefix: str) -> Iterator[Path]:
    """Yield the directory PREFIX.parts, locked for one preparation at a time. A lock ends with its process."""
    directory = Path(f"{prefix}.parts")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        what, hint = "another preparation is using this prefix", "wait for it, or choose another prefix"
        with DataError.instead_of(OSError, where=prefix, hint=hint, what=what):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory


def _plan_parts(extents: Sequence[text_files.Extent], directory: Path, max_bytes: int, settings: str) -> list[_Part]:
    """Group the extents into parts of at most `max_bytes`, named by a digest of them and of `settings`."""
    groups: list[list[text_files.Extent]] = [[]]
    size = 0
    for extent in extents:
        if groups[-1] and size + extent.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(extent)
        size += extent.bytes
    names = [f"{n:06d}-{digest([settings, [asdict(e) for e in group]])}" for n, group in enumerate(groups)]
    return [_Part(tuple(group), str(directory / name)) for group, name in zip(groups, names, strict=True)]


def _remove_stale_parts(directory: Path, parts: Sequence[_Part]) -> int:
    """Remove unfinished parts, and parts of other files or settings. Return the number of finished `parts`."""
    current = {f"{p.target}{end}" for p in parts if p.is_done for end in (".bin", ".npz")} | {str(directory / "lock")}
    for path in directory.iterdir():
        if str(path) not in current:
            path.unlink()
    return sum(p.is_done for p in parts)


def _tokenize(parts: Sequence[_Part], tokenizer: str | None, json_key: str, workers: int, report: Progress) -> None:
    total = sum(e.bytes for p in parts for e in p.extents)
    done_bytes = sum(e.bytes for p in parts if p.is_done for e in p.extents)
    pending = [p for p in parts if not p.is_done]
    if min(workers, len(pending)) <= 1:

        def on_read(amount: int) -> None:
            nonlocal done_bytes
            done_bytes += amount
            report("tokenize", min(done_bytes, total), total)

        loaded_tokenizer = load_tokenizer(tokenizer)
        for part in pending:
            run_limited(loaded_tokenizer, partial(_tokenize_part, part, loaded_tokenizer, json_key, on_read))
        return
    context = multiprocessing.get_context("forkserver")
    read_bytes = context.Value("q", done_bytes)
    worker_count, arguments = min(workers, len(pending)), (tokenizer, json_key, read_bytes)
    with ProcessPoolExecutor(worker_count, context, _initialize_worker, arguments) as pool:
        try:
            futures = {pool.submit(_tokenize_in_worker, part) for part in pending}
            while futures:
                finished, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                report("tokenize", min(read_bytes.value, total), total)
        except BrokenProcessPool as e:
            hint = "use fewer --workers, if memory ran out, and run it again: it continues where it stopped"
            raise RunFailed("a worker process was killed", where="data prepare", hint=hint) from e
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, str, Callable[[int], None]]  # of a worker process, set once by _initialize_worker


def _initialize_worker(tokenizer: str | None, json_key: str, read_bytes: Any) -> None:
    """Initialize a worker process. It exits when its parent exits for any reason."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()

    def on_read(amount: int) -> None:
        with read_bytes.get_lock():
            read_bytes.value += amount

    _worker = load_tokenizer(tokenizer), json_key, on_read


def _tokenize_in_worker(part: _Part) -> None:
    run_limited(_worker[0], partial(_tokenize_part, part, *_worker))


def _tokenize_part(part: _Part, tokenizer: Tokenizer, json_key: str, on_read: Callable[[int], None]) -> None:
    """Write TARGET.bin (token ids), then TARGET.npz: each sequence's length and whether it ends a document."""
    lengths, ends = list[int](), list[bool]()
    dtype = np.dtype(_token_type(tokenizer.vocab))
    with _atomic_write(f"{part.target}.bin") as file:
        for extent in part.extents:
            sequences: list[int] = []  # lengths of the document's sequences so far
            for text, is_end in text_files.documents(extent, json_key, on_read):
                ids = tokenizer.encode(text).astype(dtype, copy=False) if text else np.empty(0, dtype)
                file.write(ids.tobytes())
                sequences += [min(_SEQUENCE_TOKENS, len(ids) - i) for i in range(0, len(ids), _SEQUENCE_TOKENS)]
                if is_end:
                    file.write(np.array([tokenizer.eod], dtype).tobytes())
                    *full_sequences, last = sequences or [0]
                    lengths += [*full_sequences, last + 1]  # with the end-of-document token
                    ends += [False] * len(full_sequences) + [True]
                    sequences = []
            lengths += sequences
            ends += [False] * len(sequences)
    with _atomic_write(f"{part.target}.npz") as file:
        np.savez(file, lengths=np.array(lengths, np.int64), ends=np.array(ends, np.bool_))


def _join(parts: Sequence[_Part], prefix: str, tokenizer: Tokenizer, report: Progress, **counts: int) -> DatasetSummary:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = np.dtype(_token_type(tokenizer.vocab))
    total = sum(os.path.getsize(f"{p.target}.bin") for p in parts)
    done = sequences = documents = 0
    temporary = f"{prefix}.parts/new"
    builder = IndexedDatasetBuilder(f"{temporary}.bin", dtype=dtype.type)
    for part in parts:
        with np.load(f"{part.target}.npz") as index, open(f"{part.target}.bin", "rb") as f:
            lengths, ends = index["lengths"].tolist(), index["ends"].tolist()
            for length, is_end in zip(lengths, ends, strict=True):
                builder.add_item(torch.from_numpy(np.fromfile(f, dtype, length)))
                if is_end:
                    builder.end_document()
            sequences, documents, done = sequences + len(lengths), documents + sum(ends), done + f.tell()
        report("join", done, total)
    tokens = done // dtype.itemsize
    if tokens == documents:  # only end-of-document tokens
        builder.data_file.close()
        problem, where = f"no text in {counts['files']} file(s)", parts[0].extents[0].path
        raise DataError(problem, where=where, hint="give files that contain text")
    builder.finalize(f"{temporary}.idx")
    for path in (f"{prefix}.json", f"{prefix}.idx"):  # so that an old index never exists beside new data
        Path(path).unlink(missing_ok=True)
    os.replace(f"{temporary}.bin", f"{prefix}.bin")
    os.replace(f"{temporary}.idx", f"{prefix}.idx")
    counts |= {"documents": documents, "sequences": sequences, "tokens": tokens}
    return DatasetSummary(prefix, vocab=tokenizer.vocab, eod=tokenizer.eod, **counts)


@contextmanager
def _atomic_write(path: str) -> Iterator[IO[bytes]]:
    """Yield a temporary file, which is synced and renamed to `path` if the block succeeds."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

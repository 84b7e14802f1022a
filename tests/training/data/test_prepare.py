"""Text in, Megatron's indexed data set out: every document once, whatever the file, workers or interruptions."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holmes_hpc.errors import ConfigError, DataError, HolmesError, RunFailed
from holmes_hpc.training.data import prepare, text_files
from holmes_hpc.training.data.tokenizer import ByteTokenizer, load

EOD = ByteTokenizer.eod


def documents(prefix: Path | str) -> list[str]:
    """The documents of an indexed data set, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    bounds = data.document_indices.tolist()
    found = []
    for a, b in itertools.pairwise(bounds):
        ids = np.concatenate([data[i] for i in range(a, b)])
        assert ids[-1] == EOD and (ids[:-1] < 256).all()
        found.append(ByteTokenizer().decode(ids))
    assert data.document_indices[-1] == len(data)
    return found


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: t, "id": i}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


TEXTS = ["one\ntwo", "drei – ünïcödé 🦉", "  4\n", "a" * 3000] * 5


def test_text_and_json_lines_come_back_in_order(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("\ufeffa text file\nof two lines\n", encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"")
    seen = []
    made = prepare.prepare(
        [a, tmp_path / "b.txt", tmp_path / "c.txt"],
        tmp_path / "out" / "text",
        workers=1,
        progress=lambda *now: seen.append(now),
    )
    assert documents(made.prefix) == [*TEXTS, "a text file\nof two lines\n"]
    assert (made.documents, made.files, made.vocab, made.eod) == (21, 3, 257, 256)
    assert made.tokens == os.path.getsize(f"{made.prefix}.bin") // 2
    assert {what for what, _, _ in seen} == {"tokenize", "join"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["text.bin", "text.idx", "text.json"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), min_size=1, max_size=12),
    part=st.integers(1, 60),
    ending=st.sampled_from(["", "\n"]),
)
def test_cutting_a_file_into_parts_loses_and_doubles_nothing(
    lines: list[str], part: int, ending: str, tmp_path: Path
) -> None:
    whole = ("\n".join(lines) + ending).encode()
    (tmp_path / "a.txt").write_bytes(whole)
    got = [
        (t, last)
        for e in text_files.extents(str(tmp_path / "a.txt"), part)
        for t, last in text_files.documents(e, "text", lambda n: None)
    ]
    assert "".join(t for t, _ in got) == whole.decode().removeprefix("\ufeff")
    assert [last for _, last in got].count(True) == bool(whole) and (not got or got[-1][1])
    file = jsonl(tmp_path / "a.jsonl", lines)
    texts = [t for e in text_files.extents(str(file), part) for t, _ in text_files.documents(e, "text", lambda n: None)]
    assert texts == [t for t in lines if t]


def test_pieces_of_a_long_line_join_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", 7)  # cuts inside characters
    text = "🦉ß漢" * 50 + "\nend\n" + "ä" * 99
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for part in (5, 64, 10_000):
        made = prepare.prepare([tmp_path / "a.txt"], tmp_path / f"out{part}", workers=1, part_bytes=part)
        assert documents(made.prefix) == [text]
        assert made.sequences > 10


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_and_damaged_ones_named(suffix: str, tmp_path: Path) -> None:
    raw = jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    packed = COMPRESS[suffix](raw) + COMPRESS[suffix](b'{"text": "second member"}\n')
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed)
    (tmp_path / f"b.txt.{suffix}").write_bytes(COMPRESS[suffix](b"ein Text\n"))
    made = prepare.prepare([tmp_path / f"a.jsonl.{suffix}", tmp_path / f"b.txt.{suffix}"], tmp_path / "out", workers=1)
    assert documents(made.prefix) == [*TEXTS, "second member", "ein Text\n"]
    single = COMPRESS[suffix](raw)
    (tmp_path / f"cut.jsonl.{suffix}").write_bytes(single[: len(single) // 2])
    with pytest.raises(DataError, match=rf"cut\.jsonl\.{suffix}.*cannot be read"):
        prepare.prepare([tmp_path / f"cut.jsonl.{suffix}"], tmp_path / "no", workers=1)
    assert not (tmp_path / "no.idx").exists()


def test_parquet_rows_are_documents_and_damage_is_named(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"content": [*TEXTS, None, ""], "id": list(range(len(TEXTS) + 2))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    seen = []
    made = prepare.prepare(
        [tmp_path / "a.parquet"],
        tmp_path / "out",
        workers=1,
        json_key="content",
        progress=lambda *now: seen.append(now),
    )
    assert documents(made.prefix) == TEXTS
    assert max(done for what, done, _ in seen if what == "tokenize") == (tmp_path / "a.parquet").stat().st_size
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-100])
    for name, key, says in (
        ("a.parquet", "text", "no column of text 'text' .found: content, id"),
        ("a.parquet", "id", "no column of text 'id' .found: id, of type int64"),
        ("cut.parquet", "content", "cut.parquet: not whole Parquet"),
    ):
        with pytest.raises(DataError, match=says):
            prepare.prepare([tmp_path / name], tmp_path / "no", workers=1, json_key=key)
    assert not (tmp_path / "no.idx").exists()


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.txt", b"", "no text in 1 file"),
        ("a.jsonl", b"\n\n", "no text"),
        ("a.jsonl", b'{"text": ""}\n', "no text"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "no text"),
        ("a.txt", b"good\n\xff\xfe bad", r"a\.txt: not UTF-8 text at byte 5"),
        ("a.txt", b"good\n\xc3", r"a\.txt: not UTF-8 text at byte 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"a\.jsonl, the line at byte 14: no text under 'text'"),
        ("a.jsonl", b'{"content": "a"}\n', r"found: content.*--json-key"),
        ("a.jsonl", b'{"text": "a"\n', "not JSON"),
        ("a.jsonl", b"[1]\n", "found: list"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not JSON"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "not JSON"),
        (None, b"", "No such file"),
        (".", b"", "no file in this folder"),
    ],
)
@pytest.mark.integration
def test_a_corpus_that_cannot_be_used_is_one_line(name: str | None, raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "missing")
    if name and name != ".":
        path.write_bytes(raw)
    for workers in (1, 2):
        with pytest.raises(DataError, match=says) as e:
            prepare.prepare([path], tmp_path / "out", workers=workers, part_bytes=4 if workers == 2 else 1 << 20)
        assert "\n" not in str(e.value) and e.value.hint
    assert not {"out.bin", "out.idx", "out.json"} & {p.name for p in tmp_path.iterdir()}


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = jsonl(tmp_path / "a.jsonl", TEXTS), os.fsync

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"No space left.*goes on where it stopped"):
        prepare.prepare([file], tmp_path / "out", workers=1)
    assert not (tmp_path / "out.idx").exists()
    monkeypatch.setattr(os, "fsync", real)
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1).prefix) == TEXTS


def test_a_second_call_makes_nothing_and_a_changed_file_everything(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    first = prepare.prepare([file], tmp_path / "out", workers=1)
    changed = os.stat(f"{first.prefix}.bin").st_mtime_ns
    assert prepare.prepare([file], tmp_path / "out", workers=1) == first
    assert os.stat(f"{first.prefix}.bin").st_mtime_ns == changed
    jsonl(file, TEXTS[:3])
    with pytest.raises(ConfigError, match=r"holds another data set .*--force"):
        prepare.prepare([file], tmp_path / "out", workers=1)
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1, force=True).prefix) == TEXTS[:3]
    jsonl(file, TEXTS[:2], key="content")
    made = prepare.prepare([file], tmp_path / "out", workers=1, json_key="content", force=True)
    assert documents(made.prefix) == TEXTS[:2]
    Path(f"{made.prefix}.bin").write_bytes(b"x")
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1, json_key="content").prefix) == TEXTS[:2]


def test_two_preparations_of_one_prefix_do_not_mix(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    inner: list[HolmesError] = []

    def again(*_: object) -> None:
        try:
            prepare.prepare([file], tmp_path / "out", workers=1)
        except HolmesError as e:
            inner.append(e)

    made = prepare.prepare([file], tmp_path / "out", workers=1, progress=again)
    assert inner and all("another preparation" in str(e) for e in inner)
    assert documents(made.prefix) == TEXTS


KILLED = """
import os, sys
from holmes_hpc.training.data.prepare import prepare
def progress(what, done, total):
    print(done, flush=True)
if __name__ == "__main__":
    prepare(sys.argv[2:], sys.argv[1], workers=2, part_bytes=200_000, progress=progress)
"""


@pytest.mark.integration
def test_killed_and_run_again_it_goes_on(tmp_path: Path) -> None:
    """KILL the whole preparation after some parts; the second run keeps them, and the result is that of one go."""
    texts = [f"{i} " + "word " * 200 for i in range(12_000)]  # 12 MB, 61 parts
    file = jsonl(tmp_path / "a.jsonl", texts)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out"), str(file)], stdout=subprocess.PIPE, start_new_session=True
    )
    parts = tmp_path / "out.parts"
    until = time.monotonic() + 60
    while len(list(parts.glob("*.npz"))) < 3 and time.monotonic() < until and child.poll() is None:
        time.sleep(0.002)
    child.kill()  # the parent only: its workers must end by themselves
    child.wait()
    done = len(list(parts.glob("*.npz")))
    assert 3 <= done < 61 and not (tmp_path / "out.idx").exists()
    while _group_alive(child.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _group_alive(child.pid), "a worker outlived the preparation"
    made = prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=200_000)
    assert made.resumed_parts >= done
    assert documents(made.prefix) == texts
    whole = prepare.prepare([file], tmp_path / "whole", workers=1, part_bytes=10**8)
    for end in ("bin", "idx"):
        assert Path(f"{made.prefix}.{end}").read_bytes() == Path(f"{whole.prefix}.{end}").read_bytes()


def test_what_was_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", texts := [f"{i} " + "word " * 20 for i in range(100)])
    encoded: list[str] = []

    class Counting(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            if len(encoded) == 60:
                raise OSError(28, "No space left on device")
            encoded.append(text)
            return super().encode(text)

    monkeypatch.setattr(prepare, "load", lambda path: Counting())
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    first = len(encoded)
    encoded.clear()
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=2000)  # other parts: all of it again
    assert encoded[0] == texts[0]
    encoded.clear()
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    encoded[:] = []
    made = prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    assert made.resumed_parts > 0 and 100 - first <= len(encoded) < 60 and documents(made.prefix) == texts


def _group_alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


@pytest.mark.integration
def test_a_killed_worker_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", ["word " * 400] * 4000)
    killed: list[int] = []

    def kill(*_: object) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                forked = b"forkserver" in path.read_bytes() and _parent(_parent(int(path.parent.name))) == os.getpid()
            except (OSError, IndexError):
                continue
            if forked and not killed:
                killed.append(int(path.parent.name))
                os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(RunFailed, match="a worker process was killed"):
        prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=50_000, progress=kill)
    assert killed
    assert prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=50_000).documents == 4000


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_tokenizers_file_gives_its_own_ids(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS,
        tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet),
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    made = prepare.prepare(
        [jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out", workers=1, tokenizer=str(tmp_path / "tokenizer.json")
    )
    data, own = IndexedDataset(made.prefix), load(str(tmp_path / "tokenizer.json"))
    assert made.eod == own.eod == 0 and made.vocab == own.vocab == trained.get_vocab_size()
    assert [own.decode(data[i]) for i in range(len(data))] == TEXTS
    assert all(data[i][-1] == 0 for i in range(len(data)))
    assert made.tokens < sum(len(t.encode()) for t in TEXTS)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizers file"):
        load(str(tmp_path / "bad.json"))
    with pytest.raises(DataError, match="No such file"):
        load(str(tmp_path / "missing.json"))


def test_the_demo_corpus_is_python_text_and_the_same_each_time(tmp_path: Path) -> None:
    made = prepare.demo_corpus(tmp_path / "a", limit_bytes=300_000, workers=1)
    again = prepare.demo_corpus(tmp_path / "b", limit_bytes=300_000, workers=1)
    assert Path(f"{made.prefix}.bin").read_bytes() == Path(f"{again.prefix}.bin").read_bytes()
    assert 100_000 < made.input_bytes <= 300_000 and made.tokens == made.input_bytes + made.documents
    text = documents(made.prefix)
    assert len(text) == made.files and sum("def " in t for t in text) > len(text) / 2

"""Prepared data sets have every document once, whatever the file type, workers or interruptions."""

from __future__ import annotations

import bz2
import gc
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
from holmes_hpc.training.data import prepare, text_files, tokenizer
from holmes_hpc.training.data.tokenizer import ByteTokenizer, load_tokenizer

EOD = ByteTokenizer.eod


def documents(prefix: Path | str) -> list[str]:
    """Return the documents of an indexed data set, read by Megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    bounds = data.document_indices.tolist()
    texts = []
    for a, b in itertools.pairwise(bounds):
        ids = np.concatenate([data[i] for i in range(a, b)])
        assert ids[-1] == EOD and (ids[:-1] < 256).all()
        texts.append(ByteTokenizer().decode(ids))
    assert data.document_indices[-1] == len(data)
    return texts


def jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: t, "id": i}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


TEXTS = ["one\ntwo", "drei – ünïcödé 🦉", "  4\n", "a" * 3000] * 5


def test_documents_of_text_and_json_lines_keep_their_order(tmp_path: Path) -> None:
    a = jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("\ufeffa text file\nof two lines\n", encoding="utf-8")
    (tmp_path / "c.txt").write_bytes(b"")
    reports = []
    summary = prepare.prepare(
        [a, tmp_path / "b.txt", tmp_path / "c.txt"],
        tmp_path / "out" / "text",
        workers=1,
        progress=lambda *report: reports.append(report),
    )
    assert documents(summary.prefix) == [*TEXTS, "a text file\nof two lines\n"]
    assert (summary.documents, summary.files, summary.vocab, summary.eod) == (21, 3, 257, 256)
    assert summary.tokens == os.path.getsize(f"{summary.prefix}.bin") // 2
    assert {stage for stage, _, _ in reports} == {"tokenize", "join"}
    assert all(0 <= done <= total for _, done, total in reports)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["text.bin", "text.idx", "text.json"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=30), min_size=1, max_size=12),
    part=st.integers(1, 60),
    ending=st.sampled_from(["", "\n"]),
)
def test_splitting_a_file_into_extents_keeps_its_text(lines: list[str], part: int, ending: str, tmp_path: Path) -> None:
    content = ("\n".join(lines) + ending).encode()
    (tmp_path / "a.txt").write_bytes(content)
    pieces = [
        (text, is_end)
        for e in text_files.extents(str(tmp_path / "a.txt"), part)
        for text, is_end in text_files.documents(e, "text", lambda n: None)
    ]
    assert "".join(text for text, _ in pieces) == content.decode().removeprefix("\ufeff")
    assert [is_end for _, is_end in pieces].count(True) == bool(content) and (not pieces or pieces[-1][1])
    file = jsonl(tmp_path / "a.jsonl", lines)
    texts = [t for e in text_files.extents(str(file), part) for t, _ in text_files.documents(e, "text", lambda n: None)]
    assert texts == [t for t in lines if t]


def test_long_line_is_split_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", 7)  # splits inside characters
    text = "🦉ß漢" * 50 + "\nend\n" + "ä" * 99
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for part in (5, 64, 10_000):
        summary = prepare.prepare([tmp_path / "a.txt"], tmp_path / f"out{part}", workers=1, part_bytes=part)
        assert documents(summary.prefix) == [text]
        assert summary.sequences > 10


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_and_damaged_ones_refused(suffix: str, tmp_path: Path) -> None:
    raw = jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    packed = COMPRESS[suffix](raw) + COMPRESS[suffix](b'{"text": "second member"}\n')
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed)
    (tmp_path / f"b.txt.{suffix}").write_bytes(COMPRESS[suffix](b"ein Text\n"))
    paths = [tmp_path / f"a.jsonl.{suffix}", tmp_path / f"b.txt.{suffix}"]
    summary = prepare.prepare(paths, tmp_path / "out", workers=1)
    assert documents(summary.prefix) == [*TEXTS, "second member", "ein Text\n"]
    single = COMPRESS[suffix](raw)
    (tmp_path / f"cut.jsonl.{suffix}").write_bytes(single[: len(single) // 2])
    with pytest.raises(DataError, match=rf"cut\.jsonl\.{suffix}.*cannot be read"):
        prepare.prepare([tmp_path / f"cut.jsonl.{suffix}"], tmp_path / "no", workers=1)
    assert not (tmp_path / "no.idx").exists()


def test_parquet_rows_are_documents_and_damaged_files_refused(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"content": [*TEXTS, None, ""], "id": list(range(len(TEXTS) + 2))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    reports = []
    summary = prepare.prepare(
        [tmp_path / "a.parquet"],
        tmp_path / "out",
        workers=1,
        json_key="content",
        progress=lambda *report: reports.append(report),
    )
    assert documents(summary.prefix) == TEXTS
    assert max(done for stage, done, _ in reports if stage == "tokenize") == (tmp_path / "a.parquet").stat().st_size
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[:-100])
    for name, key, message in (
        ("a.parquet", "text", "no text column 'text' .found: content, id"),
        ("a.parquet", "id", "no text column 'id' .found: id, of type int64"),
        ("cut.parquet", "content", "cut.parquet: damaged Parquet"),
    ):
        with pytest.raises(DataError, match=message):
            prepare.prepare([tmp_path / name], tmp_path / "no", workers=1, json_key=key)
    assert not (tmp_path / "no.idx").exists()


@pytest.mark.parametrize(
    ("name", "raw", "message"),
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
def test_unusable_corpus_is_refused(name: str | None, raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / (name or "missing")
    if name and name != ".":
        path.write_bytes(raw)
    for workers in (1, 2):
        gc.collect()  # a finalizer that runs at the deepest bracket would fail with RecursionError
        with pytest.raises(DataError, match=message) as e:
            prepare.prepare([path], tmp_path / "out", workers=workers, part_bytes=4 if workers == 2 else 1 << 20)
        assert "\n" not in str(e.value) and e.value.hint
    assert not {"out.bin", "out.idx", "out.json"} & {p.name for p in tmp_path.iterdir()}


def test_full_disk_leaves_no_incomplete_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fsync = jsonl(tmp_path / "a.jsonl", TEXTS), os.fsync

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFailed, match=r"No space left.*continues where it stopped"):
        prepare.prepare([file], tmp_path / "out", workers=1)
    assert not (tmp_path / "out.idx").exists()
    monkeypatch.setattr(os, "fsync", fsync)
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1).prefix) == TEXTS


def test_second_call_reuses_the_data_set_unless_a_file_changed(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    first = prepare.prepare([file], tmp_path / "out", workers=1)
    changed = os.stat(f"{first.prefix}.bin").st_mtime_ns
    assert prepare.prepare([file], tmp_path / "out", workers=1) == first
    assert os.stat(f"{first.prefix}.bin").st_mtime_ns == changed
    jsonl(file, TEXTS[:3])
    with pytest.raises(ConfigError, match=r"contains another data set .*--force"):
        prepare.prepare([file], tmp_path / "out", workers=1)
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1, force=True).prefix) == TEXTS[:3]
    jsonl(file, TEXTS[:2], key="content")
    summary = prepare.prepare([file], tmp_path / "out", workers=1, json_key="content", force=True)
    assert documents(summary.prefix) == TEXTS[:2]
    Path(f"{summary.prefix}.bin").write_bytes(b"x")
    assert documents(prepare.prepare([file], tmp_path / "out", workers=1, json_key="content").prefix) == TEXTS[:2]


def test_concurrent_preparation_of_one_prefix_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    errors: list[HolmesError] = []

    def prepare_again(*_: object) -> None:
        try:
            prepare.prepare([file], tmp_path / "out", workers=1)
        except HolmesError as e:
            errors.append(e)

    summary = prepare.prepare([file], tmp_path / "out", workers=1, progress=prepare_again)
    assert errors and all("another preparation" in str(e) for e in errors)
    assert documents(summary.prefix) == TEXTS


SCRIPT = """
import os, sys
from holmes_hpc.training.data.prepare import prepare
def progress(stage, done, total):
    print(done, flush=True)
if __name__ == "__main__":
    prepare(sys.argv[2:], sys.argv[1], workers=2, part_bytes=200_000, progress=progress)
"""


@pytest.mark.integration
def test_killed_preparation_continues(tmp_path: Path) -> None:
    """Kill a preparation after some parts. The second run reuses them, with the result of an uninterrupted run."""
    texts = [f"{i} " + "word " * 200 for i in range(12_000)]  # 12 MB, 61 parts
    file = jsonl(tmp_path / "a.jsonl", texts)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "out"), str(file)], stdout=subprocess.PIPE, start_new_session=True
    )
    parts = tmp_path / "out.parts"
    deadline = time.monotonic() + 60
    while len(list(parts.glob("*.npz"))) < 3 and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.002)
    child.kill()  # only the parent: its workers must exit by themselves
    child.wait()
    done = len(list(parts.glob("*.npz")))
    assert 3 <= done < 61 and not (tmp_path / "out.idx").exists()
    while _is_group_alive(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_group_alive(child.pid), "a worker outlived the preparation"
    resumed = prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=200_000)
    assert resumed.resumed_parts >= done
    assert documents(resumed.prefix) == texts
    expected = prepare.prepare([file], tmp_path / "uninterrupted", workers=1, part_bytes=10**8)
    for suffix in ("bin", "idx"):
        assert Path(f"{resumed.prefix}.{suffix}").read_bytes() == Path(f"{expected.prefix}.{suffix}").read_bytes()


def test_finished_parts_are_not_tokenized_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", texts := [f"{i} " + "word " * 20 for i in range(100)])
    encoded: list[str] = []

    class Counting(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            if len(encoded) == 60:
                raise OSError(28, "No space left on device")
            encoded.append(text)
            return super().encode(text)

    monkeypatch.setattr(prepare, "load_tokenizer", lambda path: Counting())
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    first = len(encoded)
    encoded.clear()
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=2000)  # another part size: no part is reused
    assert encoded[0] == texts[0]
    encoded.clear()
    with pytest.raises(RunFailed):
        prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    encoded[:] = []
    summary = prepare.prepare([file], tmp_path / "out", workers=1, part_bytes=1000)
    assert summary.resumed_parts > 0 and 100 - first <= len(encoded) < 60 and documents(summary.prefix) == texts


def _is_group_alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


@pytest.mark.integration
def test_killed_worker_fails_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", ["word " * 400] * 4000)
    killed: list[int] = []

    def kill(*_: object) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                is_worker = (
                    b"forkserver" in path.read_bytes() and _parent(_parent(int(path.parent.name))) == os.getpid()
                )
            except (OSError, IndexError):
                continue
            if is_worker and not killed:
                killed.append(int(path.parent.name))
                os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(RunFailed, match="a worker process was killed"):
        prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=50_000, progress=kill)
    assert killed
    assert prepare.prepare([file], tmp_path / "out", workers=2, part_bytes=50_000).documents == 4000


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_tokenizer_file_determines_the_ids(tmp_path: Path) -> None:
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

    summary = prepare.prepare(
        [jsonl(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out", workers=1, tokenizer=str(tmp_path / "tokenizer.json")
    )
    data, loaded = IndexedDataset(summary.prefix), load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert summary.eod == loaded.eod == 0 and summary.vocab == loaded.vocab == trained.get_vocab_size()
    assert [loaded.decode(data[i]) for i in range(len(data))] == TEXTS
    assert all(data[i][-1] == 0 for i in range(len(data)))
    assert summary.tokens < sum(len(t.encode()) for t in TEXTS)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: not a tokenizer\.json of Hugging Face"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(str(tmp_path / "missing.json"))


def test_demo_files_are_python_source_and_deterministic(tmp_path: Path) -> None:
    first = prepare.prepare(prepare.demo_files(300_000), tmp_path / "a", workers=1)
    second = prepare.prepare(prepare.demo_files(300_000), tmp_path / "b", workers=1)
    assert Path(f"{first.prefix}.bin").read_bytes() == Path(f"{second.prefix}.bin").read_bytes()
    assert 100_000 < first.input_bytes <= 300_000 and first.tokens == first.input_bytes + first.documents
    texts = documents(first.prefix)
    assert len(texts) == first.files and sum("def " in text for text in texts) > len(texts) / 2


@pytest.mark.parametrize("attack", ["link", "pipe"])
def test_no_file_outside_a_folder_is_read(attack: str, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    jsonl(tmp_path / "texts" / "a.jsonl", ["a"])
    (tmp_path / "secret").write_text("a password")
    if attack == "link":
        (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"b\.txt: links to .*/secret|pipe\.txt: Not a file"):
        prepare.prepare([tmp_path / ("texts" if attack == "link" else "pipe.txt")], tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    ("text", "problem"), [("a" * 21 + "!\n", "it takes longer than"), ("a" * 40 + "!", "(limit|it takes longer than)")]
)
def test_tokenizer_with_an_exponential_expression_ends_with_one_line(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    slow = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
    slow.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    slow.save(str(tmp_path / "slow.json"))
    (tmp_path / "a.txt").write_text(text * (60 if "\n" in text else 1))
    monkeypatch.setattr(tokenizer, "_LIMIT_S", 0.3)
    with pytest.raises(DataError, match=rf"slow\.json: cannot tokenize the text of .*{problem}") as e:
        prepare.prepare([tmp_path / "a.txt"], tmp_path / "out", str(tmp_path / "slow.json"), workers=1)
    assert "pre_tokenizer" in e.value.hint and "\n" not in str(e.value)

"""Bad input to real ranks: rank 0 logs one line, and every rank soon exits with code 2."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spawn

pytestmark = pytest.mark.integration

SOON_S = spawn.LIMIT_S
PLAN = spawn.plan(pp=2, dp=2)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    spawn.nursery().loaded()


def corpus(path: Path, documents: list[list[int]]) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{path}.idx")
    return str(path)


def assert_refused(ended: spawn.FinishedRun, start: float, pattern: str) -> None:
    assert time.monotonic() - start < SOON_S
    assert ended.codes == [2] * PLAN.world_size, (ended.codes, ended.output)
    errors = [line for line in ended.output[0].splitlines() if "failed:" in line]
    assert len(errors) == 1 and re.search(pattern, errors[0]), ended.output[0]
    assert "Traceback" not in "".join(ended.output)


def unreadable(path: Path) -> str:
    name = corpus(path, [[1] * 500])
    Path(f"{name}.bin").unlink()
    Path(f"{name}.bin").mkdir()
    return name


def empty(path: Path) -> str:
    name = corpus(path, [[1] * 500])
    Path(f"{name}.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0))
    Path(f"{name}.bin").write_bytes(b"")
    return name


def truncated(path: Path) -> str:
    name = corpus(path, [[1] * 500])
    Path(f"{name}.bin").write_bytes(Path(f"{name}.bin").read_bytes()[:-10])
    return name


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (unreadable, r"text\.bin"),
        (empty, "contains no text"),
        (truncated, r"text\.bin: truncated"),
        (lambda path: corpus(path, [[1] * 40]), r"samples of 16 tokens, a step takes 8"),
        (lambda path: corpus(path, [[1] * 500, [250]]), r"token id 250 is not in the model's vocabulary of 250"),
    ],
    ids=["unreadable", "empty", "truncated", "shorter than a batch", "beyond the vocabulary"],
)
def test_an_unusable_corpus_is_refused(make: Callable[[Path], str], pattern: str, tmp_path: Path) -> None:
    name, start = make(tmp_path / "text"), time.monotonic()
    assert_refused(spawn.train(tmp_path / "run", PLAN, {"data": {"kind": "indexed", "prefix": name}}), start, pattern)


def test_a_layout_that_the_model_does_not_allow_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "plan.yaml", PLAN.to_yaml()
    assert "heads: 4" in text
    path.write_text(text.replace("heads: 4", "heads: 5", 1))
    start = time.monotonic()
    assert_refused(spawn.train(tmp_path / "run", path, ranks=PLAN.world_size), start, "hidden|heads")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a complete checkpoint."""
    config = {"train": {"steps": 2, "checkpoint_interval": 2}}
    ended = spawn.train(tmp_path_factory.mktemp("saved") / "run", PLAN, config)
    assert set(ended.codes) == {0}, ended.output
    return ended.run.checkpoints / "step-00000002"


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda p: flip_a_byte(max(p.glob("*.distcp"), key=lambda f: f.stat().st_size)), "has a wrong checksum"),
        (lambda p: next(iter(p.glob("*.distcp"))).unlink(), "No such file"),
        (lambda p: (p / ".metadata").write_bytes(b""), "is not .* bytes long"),
        (lambda p: (p / "holmes.json").write_text("{"), "not a complete checkpoint"),
    ],
    ids=["a shard", "a shard is missing", "metadata", "description"],
)
def test_a_damaged_checkpoint_is_refused(
    damage: Callable[[Path], Any], pattern: str, saved: Path, tmp_path: Path
) -> None:
    import shutil

    copy = shutil.copytree(saved, tmp_path / saved.name)
    damage(copy)
    start = time.monotonic()
    assert_refused(spawn.train(tmp_path / "run", PLAN, {"checkpoint": str(copy)}), start, pattern)


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    plan, start = spawn.plan(pp=2, dp=2, model=replace(spawn.MODEL, hidden=64)), time.monotonic()
    assert_refused(
        spawn.train(tmp_path / "run", plan, {"checkpoint": str(saved)}), start, "hidden=32, plan has hidden=64"
    )

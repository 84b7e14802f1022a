"""Runs with separate documents in packed samples. The attention itself: model/test_attention.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import spawn

from holmes_hpc.config.data import DataConfig
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.training.data.prefix import check_data, document_end
from holmes_hpc.training.data.prepare import prepare


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Prepare a data set of 300 short documents."""
    lines = [json.dumps({"text": f"{i} little words"[: 3 + i % 9]}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return prepare([tmp_path / "a.jsonl"], tmp_path / "text", workers=1).prefix


@pytest.mark.integration
def test_all_stages_separate_documents(prefix: str, tmp_path: Path) -> None:
    model = replace(spawn.MODEL, vocab=257, rope=False)  # learned positions show whether they restart
    runs = {"joined": (1, "joined"), "one stage": (1, "apart"), "three stages": (3, "apart")}
    losses = {}
    for name, (pp, documents) in runs.items():
        finished = spawn.train(
            tmp_path / name,
            spawn.plan(pp=pp, model=model),
            {
                "train": {"steps": 3},
                "data": {"kind": "indexed", "prefix": prefix, "documents": documents, "learnable": False},
            },
        )
        assert set(finished.codes) == {0}, finished.output
        losses[name] = finished.column("loss")
    assert losses["three stages"] == pytest.approx(losses["one stage"], rel=1e-5)
    differences = [abs(a / b - 1) for a, b in zip(losses["joined"], losses["one stage"], strict=True)]
    assert max(differences) > 3e-5, differences


def test_separate_documents_need_one_end_of_document_token(prefix: str, tmp_path: Path) -> None:
    config = DataConfig(kind="indexed", prefix=prefix, documents="apart")
    assert document_end(config) == 256 and document_end(replace(config, documents="joined")) is None
    for suffix in ("json", "bin", "idx"):
        (tmp_path / f"second.{suffix}").write_bytes(Path(f"{prefix}.{suffix}").read_bytes())
    (tmp_path / "second.json").write_text('{"eod": 3}')
    with pytest.raises(DataError, match="different end-of-document tokens"):
        document_end(replace(config, prefix=(prefix, str(tmp_path / "second"))))
    (tmp_path / "second.json").unlink()
    with pytest.raises(DataError, match="no end-of-document token in this file"):  # before the job is queued
        check_data(replace(config, prefix=str(tmp_path / "second")), spawn.MODEL, spawn.BATCH, False)
    with pytest.raises(ConfigError, match="synthetic data have no documents"):
        DataConfig(documents="apart")

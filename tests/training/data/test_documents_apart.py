"""Documents packed into samples and kept apart, in whole runs. What attention does: model/test_attention.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import spawn

from holmes_hpc.config.data import DataConfig
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.training.data.prefix import document_end
from holmes_hpc.training.data.prepare import prepare


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    lines = [json.dumps({"text": f"{i} little words"[: 3 + i % 9]}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return prepare([tmp_path / "a.jsonl"], tmp_path / "text", workers=1).prefix


@pytest.mark.integration
def test_every_stage_keeps_documents_apart(prefix: str, tmp_path: Path) -> None:
    model = replace(spawn.MODEL, vocab=257, rope=False)  # positions, too, begin anew
    runs = {"joined": (1, "joined"), "alone": (1, "apart"), "three stages": (3, "apart")}
    found = {}
    for name, (pp, documents) in runs.items():
        ended = spawn.train(
            tmp_path / name,
            spawn.plan(pp=pp, model=model),
            {
                "train": {"steps": 3},
                "data": {"kind": "indexed", "prefix": prefix, "documents": documents, "learnable": False},
            },
        )
        assert set(ended.codes) == {0}, ended.output
        found[name] = ended.column("loss")
    assert found["three stages"] == pytest.approx(found["alone"], rel=1e-5)
    apart = [abs(a / b - 1) for a, b in zip(found["joined"], found["alone"], strict=True)]
    assert max(apart) > 3e-5, apart


def test_what_ends_a_document_must_be_known(prefix: str, tmp_path: Path) -> None:
    apart = DataConfig(kind="indexed", prefix=prefix, documents="apart")
    assert document_end(apart) == 256 and document_end(replace(apart, documents="joined")) is None
    for end in ("json", "bin", "idx"):
        (tmp_path / f"other.{end}").write_bytes(Path(f"{prefix}.{end}").read_bytes())
    (tmp_path / "other.json").write_text('{"eod": 3}')
    with pytest.raises(DataError, match="documents end with other tokens"):
        document_end(replace(apart, prefix=(prefix, str(tmp_path / "other"))))
    (tmp_path / "other.json").unlink()
    with pytest.raises(DataError, match="no word of which token ends a document"):
        document_end(replace(apart, prefix=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="synthetic data have no documents"):
        DataConfig(documents="apart")

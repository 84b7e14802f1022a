"""Context parallelism: losses, gradient norms and checkpoints are those of whole sequences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import spawn
import thorough
import torch
from megatron.core.transformer import TransformerConfig

from holmes_hpc.config.model import Experts, ModelSpec, RopeScaling
from holmes_hpc.errors import ConfigError
from holmes_hpc.training.data.prepare import prepare
from holmes_hpc.training.model import attention

MODEL = replace(spawn.MODEL, layers=4, rope=True)
EXPERTS = replace(MODEL, experts=Experts(4, top_k=2, ffn=32, balance=0.01))
TRAIN = {"steps": 4, "lr": 1e-3}
LAYOUTS: dict[str, dict[str, Any]] = {  # DP counts the ranks that share a sequence
    "CP 2": {"dp": 2, "cp": 2},
    "CP 4 x DP 2": {"dp": 8, "cp": 4},
    "CP 4": {"dp": 4, "cp": 4},
    "CP 2 x TP 2": {"tp": 2, "dp": 2, "cp": 2, "sequence_parallel": True},
    "PP 2 x CP 2": {"pp": 2, "dp": 2, "cp": 2},
    "PP 2 x CP 2, eager 1F1B": {"pp": 2, "dp": 2, "cp": 2, "schedule": "ahead", "in_flight": [4, 2]},
    "PP 2 x CP 2, interleaved": {"pp": 2, "dp": 2, "cp": 2, "layers": [[1, 1], [1, 1]]},
    "CP 2, full recomputation": {"dp": 2, "cp": 2, "recompute": "full"},
    "CP 2 x EP 2": {"dp": 2, "cp": 2, "ep": 2, "model": EXPERTS},
    "CP 2, all-to-all": {"dp": 2, "cp": 2, "cp_comm": "a2a"},
    "CP 2 x DP 2, all-to-all, full recomputation": {"dp": 4, "cp": 2, "cp_comm": "a2a", "recompute": "full"},
    "PP 2 x CP 2 x TP 2, all-to-all": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "cp": 2,
        "cp_comm": "a2a",
        "sequence_parallel": True,
        "model": replace(MODEL, heads=8, kv_heads=4),
    },
    "CP 2, learned positions": {"dp": 2, "cp": 2, "model": replace(MODEL, rope=False)},
    "CP 2, scaled positions": {
        "dp": 2,
        "cp": 2,
        "model": replace(MODEL, rope_scaling=RopeScaling(4.0, original_positions=8), qk_norm=True),
    },
}
QUICK = ("CP 2", "CP 2 x TP 2", "PP 2 x CP 2, eager 1F1B", "CP 2 x EP 2", "CP 2, all-to-all")
APART: dict[str, dict[str, Any]] = {  # with a mask
    "PP 2 x CP 4": {"pp": 2, "dp": 4, "cp": 4},
    "CP 2, all-to-all": {"dp": 2, "cp": 2, "cp_comm": "a2a"},
}


def train(directory: Path, layout: dict[str, Any], **settings: Any) -> spawn.FinishedRun:
    ended = spawn.train(directory, spawn.plan(**{"model": MODEL, **layout}), {"train": {**TRAIN, **settings}})
    assert set(ended.codes) == {0}, ended.output
    return ended


def by_heads(name: str, comm: str) -> dict[str, Any]:
    """Return a layout whose model has enough heads for all-to-all attention with TP x CP 4."""
    layout = LAYOUTS[name]
    return {**layout, "cp_comm": comm, "model": replace(layout.get("model", MODEL), heads=8, kv_heads=4)}


def differences(ended: spawn.FinishedRun, expected: spawn.FinishedRun) -> dict[str, Any]:
    """Return the relative differences between two runs: of every step's loss, and of its gradient norm."""
    return {name: np.abs(np.divide(ended.column(name), expected.column(name)) - 1) for name in ("loss", "grad_norm")}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that returns the run of a model in one process. `settings`: other ones than TRAIN."""
    runs: dict[Any, spawn.FinishedRun] = {}

    def run_of(model: ModelSpec, **settings: Any) -> spawn.FinishedRun:
        key = model, *settings.items()
        if key not in runs:
            runs[key] = train(tmp_path_factory.mktemp("one_process"), {"model": model}, **settings)
        return runs[key]

    return run_of


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, *QUICK))
def test_parts_of_sequences_have_the_losses_and_norms_of_one_process(
    name: str, one_process: Any, tmp_path: Path
) -> None:
    expected = one_process(LAYOUTS[name].get("model", MODEL))
    ended = train(tmp_path / "run", LAYOUTS[name])
    assert ended.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)


@pytest.mark.integration
@pytest.mark.thorough
@pytest.mark.parametrize("comm", ["ring", "a2a"])
@pytest.mark.parametrize("name", ["CP 2", "CP 4", "CP 2 x TP 2", "PP 2 x CP 2, eager 1F1B", "CP 2 x EP 2"])
def test_thirty_steps_have_the_losses_and_norms_of_one_process(
    name: str, comm: str, one_process: Any, tmp_path: Path
) -> None:
    layout = by_heads(name, comm)
    expected = one_process(layout["model"], steps=30)
    steps = differences(train(tmp_path / "run", layout, steps=30), expected)
    print(f"{name}, {comm}: " + ", ".join(f"{column} {values.max():.1e}" for column, values in steps.items()))
    assert steps["loss"].max() < 1e-5 and steps["grad_norm"].max() < 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("steps", thorough.all_but([10, 30], 10))
@pytest.mark.parametrize("case", thorough.all_but(["CP 2, ring", "CP 2, a2a", "CP 4, ring", "CP 4, a2a"], "CP 2, ring"))
def test_parts_in_bf16_differ_no_more_than_bf16_from_fp32(
    case: str, steps: int, one_process: Any, tmp_path: Path
) -> None:
    """In the root mean square over the steps. After 30 steps also in the largest one; ten have too few for that."""
    layout = by_heads(*case.split(", "))
    whole, exact = (one_process(layout["model"], steps=steps, dtype=dtype) for dtype in ("bf16", "fp32"))
    parts = differences(train(tmp_path / "run", layout, steps=steps, dtype="bf16"), whole)
    for column, noise in differences(whole, exact).items():
        typical, limit = (float(np.sqrt(np.mean(np.square(values)))) for values in (parts[column], noise))
        text = f"{typical:.1e} (noise {limit:.1e}), at most {parts[column].max():.1e} (noise {noise.max():.1e})"
        print(f"{case}, {steps} steps: {column} {text}")
        assert typical <= limit and (steps < 30 or parts[column].max() <= noise.max())


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(APART, "PP 2 x CP 4"))
def test_documents_are_kept_apart_in_parts_of_sequences(name: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{i} little words"[: 3 + i % 9]}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prefix = prepare([tmp_path / "a.jsonl"], tmp_path / "text", workers=1).prefix
    model, losses = replace(MODEL, vocab=257), dict[str, list[float]]()
    for case, (layout, documents) in {
        "parts": (APART[name], "apart"), "whole": ({}, "apart"), "joined": ({}, "joined")
    }.items():  # fmt: skip
        data = {"kind": "indexed", "prefix": prefix, "documents": documents, "learnable": False}
        plan = spawn.plan(**{"model": model, **layout})
        ended = spawn.train(tmp_path / case, plan, {"train": TRAIN, "data": data})
        assert set(ended.codes) == {0}, ended.output
        losses[case] = ended.column("loss")
        losses[f"{case}, norms"] = ended.column("grad_norm")
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-5)
    assert losses["parts, norms"] == pytest.approx(losses["whole, norms"], rel=1e-4)
    assert losses["parts"] != pytest.approx(losses["joined"], rel=1e-5)


@pytest.mark.integration
def test_a_checkpoint_moves_between_parts_and_whole_sequences(one_process: Any, tmp_path: Path) -> None:
    """Each checkpoint after two steps continues with the losses of the run without an interruption."""
    for saved, resumed in (("CP 2", {}), (None, LAYOUTS["CP 2"])):
        directory = tmp_path / str(saved)
        layout = LAYOUTS[saved] if saved else {}
        train(directory / "saved", layout, steps=2, checkpoint_interval=2, lr_decay_steps=4)
        checkpoint = str(directory / "saved" / "checkpoints" / "step-00000002")
        plan = spawn.plan(**{"model": MODEL, **resumed})
        ended = spawn.train(directory / "resumed", plan, {"train": TRAIN, "checkpoint": checkpoint})
        assert set(ended.codes) == {0}, ended.output
        assert ended.column("step") == [3, 4]
        assert ended.column("loss") == pytest.approx(one_process(MODEL).column("loss")[2:], rel=1e-6)
        assert ended.column("grad_norm") == pytest.approx(one_process(MODEL).column("grad_norm")[2:], rel=1e-5)


def test_attention_that_lacks_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.context_parallel, "size", lambda: 2)
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: False)
    bf16, fp32, exchanged = (
        cast(TransformerConfig, SimpleNamespace(cp_comm_type=kind, params_dtype=dtype))
        for kind, dtype in (("p2p", torch.bfloat16), ("p2p", torch.float32), ("a2a", torch.float32))
    )
    attention.refuse_unsupported(None, cuda=True, config=bf16)
    attention.refuse_unsupported(0, cuda=False, config=fp32)
    attention.refuse_unsupported(0, cuda=True, config=exchanged)
    for document_end, config in ((0, bf16), (None, fp32)):
        with pytest.raises(ConfigError, match="ring attention on GPUs supports neither fp32 nor documents"):
            attention.refuse_unsupported(document_end, cuda=True, config=config)

"""Exported tensors, and refused exports. test_hugging_face.py compares results of `transformers` and Megatron-Core."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import spawn
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from holmes_hpc.config.hugging_face import config_of
from holmes_hpc.config.model import Experts, ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import weight_names
from holmes_hpc.training.checkpoint.export import ExportSource, convert, export, run_source
from holmes_hpc.training.checkpoint.generate import _model
from holmes_hpc.training.checkpoint.weights_for_export import SavedWeights

pytestmark = pytest.mark.integration  # a checkpoint's pickles are first read in a fork

LLAMA = ModelSpec("llama", 3, 32, 4, 61, 48, 4, max_positions=24, rope_base=500.0, norm_eps=1e-3)
GPT2 = ModelSpec(
    "gpt2",
    3,
    32,
    4,
    61,
    64,
    4,
    swiglu=False,
    rmsnorm=False,
    rope=False,
    bias=True,
    max_positions=24,
    tied=True,
    norm_eps=1e-3,
)
GROUPED = replace(LLAMA, kv_heads=2)
MODELS = {
    "multi-head": LLAMA,
    "grouped-query": GROUPED,
    "one key head": replace(LLAMA, kv_heads=1),
    "biases, tied": replace(LLAMA, bias=True, tied=True, kv_heads=2),
    "gpt2": GPT2,
    "gpt2 untied without biases": replace(GPT2, tied=False, bias=False),
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def state(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return random weights by Megatron-Core's names, with the rows that pad the vocabulary."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, weight in weight_names.weights(spec).items():
        if not (spec.rope or spec.bias) and "linear" in name and name.endswith("bias"):
            continue  # only Hugging Face's GPT-2 always has biases
        rows = spec.padded_vocab(1) if name in VOCABULARY else weight.rows
        tensors[name] = torch.randn(rows, *weight.shape[1:], generator=generator)
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of GROUPED."""
    path = tmp_path_factory.mktemp("saved") / "step"
    dcp.save(state(GROUPED), storage_writer=FileSystemWriter(path), no_dist=True)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_export_writes_all_tensors_of_the_family(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    summary = export(ExportSource(state(spec), spec, eod=spec.vocab - 1), tmp_path / "out", shard_bytes=30_000)
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert {k: tuple(v.shape) for k, v in written.items()} == weight_names.tensor_shapes(spec)
    assert summary.files > 1 and summary.parameters == sum(v.numel() for v in written.values())
    biases = [k for k in written if k.endswith("_proj.bias") or k.endswith(("c_attn.bias", "c_fc.bias"))]
    assert bool(biases) == (spec.bias or name.startswith("gpt2"))
    assert all(bool(written[k].any()) == spec.bias for k in biases)  # zeros in a GPT-2 without biases


@pytest.mark.parametrize("name", MODELS)
def test_transformer_engine_names_give_the_same_weights(name: str) -> None:
    megatron = state(MODELS[name])
    fused = {weight_names.transformer_engine_name(k): v for k, v in megatron.items()}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused.keys() - megatron.keys()
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in fused.keys() - megatron.keys()
    expected, actual = (dict(convert(s, MODELS[name])) for s in (megatron, fused))
    assert expected.keys() == actual.keys() and all(torch.equal(expected[k], actual[k]) for k in expected)


def test_summary_reports_the_tokenizer(tmp_path: Path) -> None:
    byte_model = replace(GPT2, vocab=257)
    cases = ((byte_model, "bytes", "are bytes"), (GPT2, None, "data.tokenizer"))
    for number, (spec, tokenizer, message) in enumerate(cases):
        summary = export(ExportSource(state(spec), spec), tmp_path / str(number))
        assert summary.tokenizer == tokenizer and message in str(summary)


def test_small_model_is_one_file_with_the_type_of_its_weights(tmp_path: Path) -> None:
    half = {k: v.to(torch.bfloat16) for k, v in state(GPT2).items()}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    summary = export(ExportSource(half, GPT2, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and summary.files == 1
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1  # all files have equal permissions


def test_qkv_matrix_is_split_by_group() -> None:
    spec = replace(LLAMA, heads=4, kv_heads=2, hidden=8)  # two groups of two queries, a key, a value, of two rows each
    expected = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    (part,) = weight_names.weights(spec)["decoder.layers.0.self_attention.linear_qkv.weight"].parts
    assert [f"{r.tensor[-13]}{row // 2}" for r in part for row in range(r.first, r.first + r.count, 2)] == expected


@pytest.mark.parametrize("change", [{"swiglu": False}, {"rmsnorm": False}, {"rope": False}])
def test_model_that_fits_no_family_is_refused(change: dict) -> None:
    with pytest.raises(ConfigError, match="no supported Hugging Face family has"):
        config_of(replace(LLAMA, **change), "float32")


def test_losses_that_balance_experts_are_no_part_of_a_family() -> None:
    model = replace(LLAMA, experts=Experts(4, balance=0.1, z_loss=1e-3, per_sequence=True))
    assert config_of(model, "float32")["model_type"] == "mixtral"
    with pytest.raises(ConfigError, match="no supported Hugging Face family has"):
        config_of(replace(model, experts=replace(model.experts, shared=8)), "float32")


def test_failed_export_leaves_no_files(tmp_path: Path) -> None:
    weights = state(LLAMA)
    incomplete = {k: v for k, v in weights.items() if "layers.1.mlp.linear_fc2" not in k}
    with pytest.raises(DataError, match=r"no weight decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        export(ExportSource(incomplete, LLAMA), tmp_path / "out")
    with pytest.raises(DataError, match=r"has shape \(96, 32\), the model's is \(128, 32\)"):
        export(ExportSource(weights, replace(LLAMA, ffn=64)), tmp_path / "out")
    weights["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = torch.nan
    with pytest.raises(DataError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds values that are not finite"):
        export(ExportSource(weights, LLAMA), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="values that are not finite"):
        _model(ExportSource(weights, LLAMA))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(DataError, match="not an empty directory"):
        export(ExportSource(weights, LLAMA), tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"


def test_run_exports_its_model_and_tokenizer(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "text.json").write_text('{"eod": 60}')
    run = RunDirectory.create(
        tmp_path / "run",
        spawn.plan(model=GROUPED).to_yaml(),
        config={"data": {"prefix": [1.0, str(tmp_path / "text")], "tokenizer": str(tmp_path / "tokenizer.json")}},
    )
    summary = export(run_source(run, saved, step=3), tmp_path / "out")
    assert "after step 3" in str(summary) and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert summary.tokenizer == "file"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    keys = ("architectures", "eos_token_id", "num_key_value_heads")
    assert [config[key] for key in keys] == [["LlamaForCausalLM"], 60, 2]
    expected, actual = dict(convert(state(GROUPED), GROUPED)), load_file(tmp_path / "out" / "model.safetensors")
    assert expected.keys() == actual.keys() and all(torch.equal(expected[k], actual[k]) for k in expected)


def test_damaged_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "saved"
    for damage in (lambda p: p.write_bytes(p.read_bytes()[:-2000]), lambda p: p.unlink()):
        shutil.copytree(saved, copy)
        for path in copy.glob("*.distcp"):
            damage(path)
        with pytest.raises(DataError, match="cannot be read") as e:
            dict(convert(SavedWeights(copy), GROUPED))
        assert "\n" not in str(e.value)
        shutil.rmtree(copy)
    for content in (None, b"", b"no pickle"):
        copy.mkdir(exist_ok=True)
        if content is not None:
            (copy / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match="not a readable checkpoint"):
            SavedWeights(copy)

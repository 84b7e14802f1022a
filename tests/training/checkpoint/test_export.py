"""Exported weights: which tensors, from which checkpoints, and what is refused. That `transformers` computes with them
what Megatron-Core computes: test_hugging_face.py, which reads by the same table."""

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
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import weight_names
from holmes_hpc.training.checkpoint.export import Chosen, convert, export, of_run
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights

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
    """Random weights as Megatron-Core has them, rows that pad the vocabulary too."""
    numbers = torch.Generator().manual_seed(7)
    made = {}
    for name, weight in weight_names.weights(spec).items():
        if not (spec.rope or spec.bias) and "linear" in name and name.endswith("bias"):
            continue  # Megatron-Core's model has none, whatever GPT-2 has
        rows = spec.padded_vocab(1) if name in VOCABULARY else weight.rows
        made[name] = torch.randn(rows, *weight.shape[1:], generator=numbers)
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of LLAMA, grouped queries."""
    path = tmp_path_factory.mktemp("saved") / "step"
    dcp.save(state(GROUPED), storage_writer=FileSystemWriter(path), no_dist=True)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_all_weights_are_written_under_the_familys_names(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    made = export(Chosen(state(spec), spec, eod=spec.vocab - 1), tmp_path / "out", shard_bytes=30_000)
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert {k: tuple(v.shape) for k, v in written.items()} == weight_names.tensors(spec)
    assert made.files > 1 and made.parameters == sum(v.numel() for v in written.values())
    biases = [k for k in written if k.endswith("_proj.bias") or k.endswith(("c_attn.bias", "c_fc.bias"))]
    assert bool(biases) == (spec.bias or name.startswith("gpt2"))
    assert all(bool(written[k].any()) == spec.bias for k in biases)  # GPT-2 has them always: zeros


@pytest.mark.parametrize("name", MODELS)
def test_transformer_engines_names_give_the_same_weights(name: str) -> None:
    own = state(MODELS[name])
    fused = {weight_names.in_transformer_engine(k): v for k, v in own.items()}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused.keys() - own.keys()
    assert "decoder.layers.2.mlp.linear_fc1.layer_norm_weight" in fused.keys() - own.keys()
    want, got = (dict(convert(s, MODELS[name])) for s in (own, fused))
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


def test_it_says_which_tokenizer_belongs_to_the_weights(tmp_path: Path) -> None:
    of_bytes = replace(GPT2, vocab=257)
    for number, (spec, word, says) in enumerate(((of_bytes, "bytes", "are bytes"), (GPT2, None, "data.tokenizer"))):
        made = export(Chosen(state(spec), spec), tmp_path / str(number))
        assert made.tokenizer == word and says in str(made)


def test_one_file_and_the_type_of_the_weights(tmp_path: Path) -> None:
    half = {k: v.to(torch.bfloat16) for k, v in state(GPT2).items()}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    made = export(Chosen(half, GPT2, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16" and made.files == 1
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1  # who may read one may read all


def test_queries_keys_and_values_are_taken_apart_by_group() -> None:
    spec = replace(LLAMA, heads=4, kv_heads=2, hidden=8)  # two groups of two queries, a key, a value, of two rows each
    names = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    (part,) = weight_names.weights(spec)["decoder.layers.0.self_attention.linear_qkv.weight"].parts
    said = [f"{r.tensor[-13]}{row // 2}" for r in part for row in range(r.first, r.first + r.count, 2)]
    assert said == names


@pytest.mark.parametrize("change", [{"swiglu": False}, {"rmsnorm": False}, {"rope": False}])
def test_a_mixture_without_a_class_is_refused(change: dict) -> None:
    with pytest.raises(ConfigError, match="no Hugging Face model has"):
        config_of(replace(LLAMA, **change), "float32")


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    own = state(LLAMA)
    missing = {k: v for k, v in own.items() if "layers.1.mlp.linear_fc2" not in k}
    with pytest.raises(DataError, match=r"no weight decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        export(Chosen(missing, LLAMA), tmp_path / "out")
    with pytest.raises(DataError, match=r"has shape \(96, 32\), the model's is \(128, 32\)"):
        export(Chosen(own, replace(LLAMA, ffn=64)), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(DataError, match="not an empty directory"):
        export(Chosen(own, LLAMA), tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"


def test_a_run_exports_its_models_and_its_tokenizer(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "text.json").write_text('{"eod": 60}')
    run = RunDirectory.create(
        tmp_path / "run",
        spawn.plan(model=GROUPED).to_yaml(),
        config={"data": {"prefix": [1.0, str(tmp_path / "text")], "tokenizer": str(tmp_path / "tokenizer.json")}},
    )
    made = export(of_run(run, saved, step=3), tmp_path / "out")
    assert "after step 3" in str(made) and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert made.tokenizer == "file"
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["architectures"], said["eos_token_id"], said["num_key_value_heads"]) == (["LlamaForCausalLM"], 60, 2)
    want, got = dict(convert(state(GROUPED), GROUPED)), load_file(tmp_path / "out" / "model.safetensors")
    assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


def test_a_damaged_checkpoint_is_one_line(saved: Path, tmp_path: Path) -> None:
    for harm, says in (
        (lambda p: p.write_bytes(p.read_bytes()[:-2000]), "cannot be read"),
        (lambda p: p.unlink(), "cannot be read"),
    ):
        at = tmp_path / "saved"
        shutil.copytree(saved, at)
        for path in at.glob("*.distcp"):
            harm(path)
        with pytest.raises(DataError, match=says) as e:
            dict(convert(SavedWeights(at), GROUPED))
        assert "\n" not in str(e.value)
        shutil.rmtree(at)
    for content in (None, b"", b"no pickle"):
        at.mkdir(exist_ok=True)
        if content is not None:
            (at / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match="not a checkpoint that can be read"):
            SavedWeights(at)

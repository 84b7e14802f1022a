"""Import from Hugging Face and export back: equal logits and steps in every layout, equal bits, bad folders refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import spawn
import torch
from hugging_face_models import LAYOUTS, MODELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from holmes_hpc.config.composition import load, with_overrides
from holmes_hpc.config.hugging_face import config_of, model_of, read_config, read_model
from holmes_hpc.config.model import Experts, ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.training.checkpoint import checkpoint_directory, file_checksums, weight_names
from holmes_hpc.training.checkpoint.export import ExportSource, export, find_source
from holmes_hpc.training.checkpoint.generate import generate
from holmes_hpc.training.checkpoint.hugging_face_folder import Folder, copy_small_files, import_folder
from holmes_hpc.training.checkpoint.weights_for_export import SavedWeights

SPEC = ModelSpec("tiny", 2, 16, 4, 61, ffn=24, kv_heads=2, head_dim=8, qk_norm=True, max_positions=32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models of every family, and the results of transformers and Megatron-Core."""
    root = tmp_path_factory.mktemp("models")
    support = Path(spawn.__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(support / "hugging_face_models.py"), str(root)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small qwen3 model in two shards, with a tokenizer."""
    path = tmp_path / "tiny"
    path.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=generator) for n, s in weight_names.tensor_shapes(SPEC).items()}
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, shard in shards.items():
        save_file({n: tensors[n] for n in shard}, path / file)
    index = {"weight_map": {n: file for file, shard in shards.items() for n in shard}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config_of(SPEC, "float32", 60)))
    (path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 59}}, "added_tokens": [{"id": 60, "content": "</s>"}]})
    )
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def are_equal(folder: Path, exported: Path) -> bool:
    a, b = tensors_of(folder), tensors_of(exported)
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_in_every_layout(name: str, layout: str, models: Path) -> None:
    expected, actual = (torch.load(models / f"{prefix}{name}.pt")["logits"] for prefix in ("", f"{layout} "))
    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_training_steps_are_equal_in_every_layout(name: str, models: Path) -> None:
    results = {layout: torch.load(models / f"{layout} {name}.pt") for layout in LAYOUTS}
    expected = results["one process"]
    assert expected["losses"][0] > expected["losses"][1] > expected["losses"][2] > 0
    for actual in results.values():
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_imported_weights_are_exported_bit_for_bit(name: str, models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / name, tmp_path / name)
    for file in (tmp_path / name).glob("*.safetensors"):  # bfloat16, as published models are
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file)
    import_folder(tmp_path / name, tmp_path / "ckpt")
    export(find_source(str(tmp_path / "ckpt")), tmp_path / "out")
    assert are_equal(tmp_path / name, tmp_path / "out")
    before, after = read_config(tmp_path / name), read_config(tmp_path / "out")
    assert after.pop("dtype") == "bfloat16" and before.pop("dtype") == "float32" and before == after


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_weights_saved_by_four_ranks_are_exported_bit_for_bit(name: str, models: Path, tmp_path: Path) -> None:
    """Read into TP 2 x PP 2, save by Megatron-Core, export."""
    saved = SavedWeights(models / f"saved {name}")
    export(ExportSource(saved, read_model(models / name), models / name), tmp_path / "out")
    assert are_equal(models / name, tmp_path / "out")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama", "llama3_1", "qwen2", "qwen3"])
def test_mbridge_converts_to_the_same_weights(name: str, models: Path) -> None:
    mbridge = pytest.importorskip("mbridge.models", reason="mbridge is not installed", exc_type=ImportError)
    classes = {"qwen2": mbridge.Qwen2Bridge, "qwen3": mbridge.Qwen3Bridge}
    converter = object.__new__(classes.get(name, mbridge.LLaMABridge))  # the constructor needs process groups
    converter.hf_config, converter.dtype = SimpleNamespace(**read_config(models / name)), None
    converter.make_vocab_size_divisible_by = None
    tensors = tensors_of(models / name)
    for megatron_name, actual in Folder(models / name).items():
        fused_name = weight_names.transformer_engine_name(megatron_name)
        hf_tensors = [tensors[n] for n in converter._weight_name_mapping_mcore_to_hf(fused_name)]
        assert torch.equal(converter._weight_to_mcore_format(fused_name, hf_tensors), actual), megatron_name


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_a_generated_config(name: str, models: Path) -> None:
    """Runs without an initial folder are exported with such a config."""
    transformers = pytest.importorskip("transformers")
    spec = read_model(models / name)
    config = transformers.AutoConfig.for_model(**config_of(spec, "float32"))
    assert replace(model_of(json.loads(config.to_json_string(use_diff=False)), "m", "here"), name=spec.name) == spec


@pytest.mark.integration
def test_run_starts_from_a_folder_in_any_layout(folder: Path, tmp_path: Path) -> None:
    losses = {}
    for tp, pp in ((1, 1), (2, 2)):
        plan = spawn.plan(tp=tp, pp=pp, model=read_model(folder), batch=replace(spawn.BATCH, global_size=4))
        finished = spawn.train(
            tmp_path / f"run {tp}",
            plan,
            {"checkpoint": f"hf:{folder}", "train": {"steps": 3, "warmup_steps": 0, "lr": 1e-4, "min_lr": 1e-5}},
        )
        assert set(finished.codes) == {0}, finished.output
        losses[tp] = finished.column("loss")
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[1][2] != losses[1][0] > 4.5  # new weights would give ln 61 = 4.11


@pytest.mark.integration
def test_step_at_learning_rate_0_keeps_the_weights(folder: Path, tmp_path: Path) -> None:
    """The step writes back the optimizer's copy in fp32."""
    for file in folder.glob("*.safetensors"):
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file)
    _change_config(folder, torch_dtype="bfloat16")
    import_folder(folder, tmp_path / "ckpt")
    plan = spawn.plan(tp=2, pp=2, model=read_model(folder), batch=replace(spawn.BATCH, global_size=2))
    finished = spawn.train(
        tmp_path / "run",
        plan,
        {
            "checkpoint": str(tmp_path / "ckpt"),
            "train": {
                "steps": 1,
                "warmup_steps": 0,
                "lr": 0.0,
                "min_lr": 0.0,
                "checkpoint_interval": 1,
                "dtype": "bf16",
            },
        },
    )
    assert set(finished.codes) == {0}, finished.output
    summary = export(find_source(str(tmp_path / "run")), tmp_path / "out")
    assert summary.architecture == "Qwen3ForCausalLM" and are_equal(folder, tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())
    checkpoints = tmp_path / "run" / "checkpoints"
    older, newer = checkpoints / "step-00000001", checkpoints / "step-00000002"
    shutil.copytree(older, newer)
    description = json.loads((newer / checkpoint_directory.DESCRIPTION).read_text())
    (newer / checkpoint_directory.DESCRIPTION).write_text(json.dumps({**description, "step": 2}))
    assert find_source(str(tmp_path / "run")).step == 2
    damaged = sorted(newer.glob("*.distcp"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert find_source(str(tmp_path / "run")).step == 1
    with pytest.raises(DataError, match=r"is damaged .*wrong checksum"):
        find_source(str(newer))
    for step in (older, newer):
        (step / checkpoint_directory.DESCRIPTION).write_text("{")
    with pytest.raises(DataError, match=r"step-00000002: the checkpoint is incomplete \(holmes.json is damaged\)"):
        find_source(str(tmp_path / "run"))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_generate_continues_a_prompt_like_transformers(name: str, models: Path, tmp_path: Path) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    shutil.copytree(models / name, tmp_path / name)
    vocab = {f"w{i}": i for i in range(60)} | {"</s>": 60}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    import_folder(tmp_path / name, tmp_path / "ckpt")
    text = generate(str(tmp_path / "ckpt"), "w3 w7 w9", tokens=5, temperature=0.0, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
    expected = model.generate(torch.tensor([[3, 7, 9]]), max_new_tokens=5, do_sample=False, eos_token_id=60)
    assert text.split() == [f"w{i}" for i in expected[0, 3:].tolist() if i != 60]
    sampled = [generate(str(tmp_path / "ckpt"), "w3", tokens=5, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    for prompt, tokens, message in (("\udcff", 1, "not UTF-8"), ("w1", 64, "1 tokens and 64 new ones exceed")):
        with pytest.raises(ConfigError, match=message):
            generate(str(tmp_path / "ckpt"), prompt, tokens=tokens, temperature=0.0, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"qk_norm": False, "bias": True},
        {"experts": Experts(4, 2, 8)},
        {"experts": Experts(4, 2), "qk_norm": False},
        {"qk_norm": False, "qkv_bias": True, "head_dim": None},
        {
            "rope": False,
            "swiglu": False,
            "rmsnorm": False,
            "qk_norm": False,
            "head_dim": None,
            "kv_heads": 4,
            "bias": True,
        },
    ],
)
def test_slices_of_two_tensor_parallel_ranks_form_the_full_weight(change: dict, tmp_path: Path) -> None:
    spec = replace(SPEC, **change)
    save_file({n: torch.randn(s) for n, s in weight_names.tensor_shapes(spec).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec, "float32")))
    folder = Folder(tmp_path)
    for name, weight in weight_names.weights(spec).items():
        full = folder[name]
        rows, columns = weight.rows, weight.columns or 1
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = spec.padded_vocab(2)
        shape = {0: (rows // 2, columns), 1: (rows, columns // 2), None: (rows, columns)}[weight.split]
        slices = [torch.full(shape if weight.columns else shape[:1], 7.0) for _ in range(2)]
        for rank, target in enumerate(slices):
            folder.fill(target, weight, rank)
        if weight.split is None:
            assert torch.equal(slices[0], full) and torch.equal(slices[1], full), name
        elif len(weight.parts) == 2:
            gates, ups = zip(*(tensor.chunk(2) for tensor in slices), strict=True)
            assert torch.equal(torch.cat([*gates, *ups]), full), name
        else:
            joined = torch.cat(slices, weight.split)
            assert torch.equal(joined[: weight.rows], full) and not joined[weight.rows :].any(), name


def _change_config(path: Path, **values: object) -> None:
    (path / "config.json").write_text(json.dumps({**read_config(path), **values}))


def _change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _replace_by_pickle(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def _change_shape_in_header(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def _make_qwen3_moe(path: Path, **values: object) -> None:
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.0}
    _change_config(path, model_type="qwen3_moe", norm_topk_prob=True, **{**keys, **values})


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "No such file"),
    "missing shard": (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "1 of 2 shards are missing"),
    "unknown family": (lambda p: _change_config(p, model_type="lama"), "model_type is 'lama'; did you mean 'llama'"),
    "no family": (lambda p: (p / "config.json").write_text("{}"), "model_type is 'None'"),
    "unsupported family": (lambda p: _change_config(p, model_type="gemma2"), "no caps on scores or"),
    "sliding window": (lambda p: _change_config(p, use_sliding_window=True, sliding_window=8), "a window of 8 tokens"),
    "unsupported RoPE scaling": (
        lambda p: _change_config(p, rope_scaling={"type": "dynamic", "factor": 4}),
        "of type 'dynamic', only",
    ),
    "unsupported YaRN": (
        lambda p: _change_config(p, rope_scaling={"type": "yarn", "factor": 4, "mscale": 0.7}),
        "mscale 0.7, only YaRN's",
    ),
    "experts in some layers": (lambda p: _make_qwen3_moe(p, decoder_sparse_step=2), "decoder_sparse_step is 2, only 1"),
    "one expert with weight 1": (
        lambda p: _make_qwen3_moe(p, num_experts_per_tok=1),
        "a token has one expert, whose weight is always 1",
    ),
    "more experts than tensors": (lambda p: _make_qwen3_moe(p, num_experts=10**12), "has 25 tensors"),
    "dense weights": (lambda p: _make_qwen3_moe(p), r"has tensor model.layers.0.mlp.down_proj.*, which a qwen3_moe"),
    "quantized": (lambda p: _change_config(p, quantization_config={"bits": 4}), "quantized"),
    "missing key": (lambda p: _change_config(p, vocab_size=None), "vocab_size is missing"),
    "wrong type": (lambda p: _change_config(p, num_hidden_layers="2"), "layers is '2'"),
    "wrong shapes": (lambda p: _change_config(p, intermediate_size=32), r"has shape \(\d+, \d+\), config.json"),
    "missing layer": (lambda p: _change_config(p, num_hidden_layers=3), "lacks model.layers.2.input_layernorm"),
    "extra layer": (lambda p: _change_config(p, num_hidden_layers=1), "has tensor model.layers.1"),
    "huge number of layers": (
        lambda p: _change_config(p, num_hidden_layers=10**12),
        "has 25 tensors .* 1000000000000 layers",
    ),
    "huge number of heads": (
        lambda p: _change_config(p, num_attention_heads=10**12, num_key_value_heads=10**12, head_dim=2),
        "of 1000000000000 heads",
    ),
    "larger tokenizer": (
        lambda p: (p / "tokenizer.json").write_text('{"model": {"vocab": {"a": 61}}}'),
        "has token id 61, the model's vocabulary ends at 60",
    ),
    "truncated": (lambda p: os.truncate(p / "model-00001-of-00002.safetensors", 2000), "damaged safetensors"),
    "wrong header": (_change_shape_in_header, "damaged safetensors"),
    "pickle named safetensors": (
        lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(pickle.dumps([1] * 99)),
        "damaged safetensors",
    ),
    "pickle": (_replace_by_pickle, "pytorch_model.bin is a pickle, which can execute code"),
    "NaN": (
        lambda p: _change_tensors(p, lambda t: t["model.embed_tokens.weight"].view(-1)[5:6].fill_(float("nan"))),
        "model.embed_tokens.weight has values that are not finite",
    ),
    "integers": (
        lambda p: _change_tensors(
            p, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(61, 16, dtype=torch.int8)})
        ),
        "has type I8",
    ),
    "index that leads outside": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}'),
        "refers to files outside its folder",
    ),
    "not an index": (
        lambda p: (p / "model.safetensors.index.json").write_text("[]"),
        "not a mapping of keys to values",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folder_is_refused_and_leaves_no_files(case: str, folder: Path, tmp_path: Path) -> None:
    damage, message = BAD[case]
    damage(folder)
    with pytest.raises(DataError, match=message) as e:
        import_folder(folder, tmp_path / "out")
    assert "\n" not in str(e.value) and e.value.where.startswith(str(tmp_path)) and e.value.hint
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny"}


def test_full_disk_during_an_import_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))  # as sendfile

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(DataError, match="No space left on device") as e:
        import_folder(folder, tmp_path / "out")
    assert e.value.where == str(tmp_path / "out") and not (tmp_path / "out").exists()


@pytest.mark.integration
def test_all_ranks_report_infinite_weights_of_one_stage(folder: Path, tmp_path: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, file)
    plan = spawn.plan(pp=2, model=read_model(folder))
    finished = spawn.train(tmp_path / "run", plan, {"checkpoint": f"hf:{folder}"})
    assert set(finished.codes) == {2}, finished.output
    assert all("model.norm.weight has values that are not finite" in finished.log(rank) for rank in (0, 1))
    assert not finished.run.metrics()


def test_model_option_accepts_a_folder(folder: Path) -> None:
    config = load([f"model=hf:{folder}", "model.dropout=0.1", "batch=tiny"])
    assert config.model == replace(SPEC, dropout=0.1)
    assert with_overrides(load(["model=gpt_tiny"]), [f"model=hf:{folder}", "batch=tiny"]).model == SPEC
    with pytest.raises(DataError, match=r"config\.json: No such file"):
        load(["model=hf:/nowhere"])


def test_folder_of_another_model_is_refused(folder: Path) -> None:
    Folder(folder).check_model(replace(SPEC, name="other", dropout=0.1, vocab_multiple=1))
    with pytest.raises(DataError, match=r"checkpoint has rope_base=10000\.0, plan has rope_base=5\.0"):
        Folder(folder).check_model(replace(SPEC, rope_base=5.0))


def test_damage_of_an_imported_checkpoint_is_found(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "ckpt")
    checkpoint = checkpoint_directory.open_checkpoint(tmp_path / "ckpt")
    assert checkpoint.step == 0 and file_checksums.find_damage(checkpoint) is None
    with open(tmp_path / "ckpt" / "model-00001-of-00002.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    assert file_checksums.find_damage(checkpoint) == "model-00001-of-00002.safetensors has a wrong checksum"


def test_published_gpt2_is_read(tmp_path: Path) -> None:
    """Its names lack the prefix `transformer.`, and its files contain masks."""
    spec = ModelSpec(
        "gpt2",
        2,
        16,
        4,
        61,
        64,
        4,
        swiglu=False,
        rmsnorm=False,
        rope=False,
        bias=True,
        tied=True,
        max_positions=32,
        gelu_tanh=True,
    )
    tensors = {n: torch.randn(s) for n, s in weight_names.tensor_shapes(spec).items()}
    published = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(2)}
    weights = []
    for name, content in (("with", tensors), ("without", {**published, **masks})):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config_of(spec, "float32")))
        weights.append(Folder(tmp_path / name))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]) and "wte.weight" in published


def test_export_may_have_other_shards(folder: Path, tmp_path: Path) -> None:
    summary = export(ExportSource(Folder(folder), SPEC, folder), tmp_path / "out", shard_bytes=5000)
    assert summary.files > 2 and are_equal(folder, tmp_path / "out")
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_no_file_outside_a_folder_is_copied_and_modes_are_kept(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (folder / "tokenizer.json").chmod(0o600)
    copy_small_files(folder, tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {"config.json": 0o644, "tokenizer.json": 0o600}
    (tmp_path / "secret").write_text("a password")
    (folder / "generation_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"generation_config\.json: it is a link out of its folder, to .*/secret; put"):
        copy_small_files(folder, tmp_path / "out")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ab12").write_text("{}")
    (snapshot / "special_tokens_map.json").symlink_to("../../blobs/ab12")  # as Hugging Face's cache has it
    copy_small_files(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "special_tokens_map.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "shard"])
def test_a_pipe_in_a_folder_is_not_waited_for(name: str, folder: Path) -> None:
    path = folder / name.replace("shard", "model-00001-of-00002.safetensors")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"Not a file|shards are missing"):
        Folder(folder)

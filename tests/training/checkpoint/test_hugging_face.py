"""From Hugging Face and back: the logits of `transformers` and equal steps in every layout, bits that come back as they
went in, bad folders refused in one line."""

from __future__ import annotations

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

from holmes_hpc.config.composition import applied, load
from holmes_hpc.config.hugging_face import config_of, model_of, read_config, read_model
from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.training.checkpoint import checkpoint_directory, weight_names
from holmes_hpc.training.checkpoint.export import Chosen, choose, export
from holmes_hpc.training.checkpoint.generate import generate
from holmes_hpc.training.checkpoint.hugging_face_folder import Folder, FolderWeights, import_folder
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights

SPEC = ModelSpec("tiny", 2, 16, 4, 61, ffn=24, kv_heads=2, head_dim=8, qk_norm=True, max_positions=32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of every family, and what transformers and Megatron-Core computed with them."""
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
    """A small qwen3 in two shards, with a tokenizer."""
    path = tmp_path / "tiny"
    path.mkdir()
    numbers = torch.Generator().manual_seed(1)
    tensors = {n: torch.randn(s, generator=numbers) for n, s in weight_names.tensors(SPEC).items()}
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in shards.items():
        save_file({n: tensors[n] for n in held}, path / file)
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config_of(SPEC, "float32", 60)))
    (path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 59}}, "added_tokens": [{"id": 60, "content": "</s>"}]})
    )
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    a, b = tensors_of(one), tensors_of(other)
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_of_transformers_in_every_layout(name: str, layout: str, made: Path) -> None:
    theirs, ours = (torch.load(made / f"{which}{name}.pt")["logits"] for which in ("", f"{layout} "))
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_three_more_steps_are_equal_in_every_layout(name: str, made: Path) -> None:
    found = {layout: torch.load(made / f"{layout} {name}.pt") for layout in LAYOUTS}
    one = found["one process"]
    assert one["losses"][0] > one["losses"][1] > one["losses"][2] > 0
    for other in found.values():
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_what_is_imported_is_exported_bit_by_bit(name: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / name, tmp_path / name)
    for file in (tmp_path / name).glob("*.safetensors"):  # as they are published
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file)
    import_folder(tmp_path / name, tmp_path / "ckpt")
    export(choose(str(tmp_path / "ckpt")), tmp_path / "out")
    assert same(tmp_path / name, tmp_path / "out")
    before, after = read_config(tmp_path / name), read_config(tmp_path / "out")
    assert after.pop("dtype") == "bfloat16" and before.pop("dtype") == "float32" and before == after


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_what_four_ranks_saved_is_exported_bit_by_bit(name: str, made: Path, tmp_path: Path) -> None:
    """Read into TP 2 x PP 2, saved by Megatron-Core, exported."""
    export(Chosen(SavedWeights(made / f"saved {name}"), read_model(made / name), made / name), tmp_path / "out")
    assert same(made / name, tmp_path / "out")


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama", "llama3_1", "qwen2", "qwen3"])
def test_a_public_converter_makes_the_same_weights(name: str, made: Path) -> None:
    models = pytest.importorskip("mbridge.models", reason="mbridge is not installed", exc_type=ImportError)
    kinds = {"qwen2": models.Qwen2Bridge, "qwen3": models.Qwen3Bridge}
    converter = object.__new__(kinds.get(name, models.LLaMABridge))  # its own set-up wants process groups
    converter.hf_config, converter.dtype = SimpleNamespace(**read_config(made / name)), None
    converter.make_vocab_size_divisible_by = None
    tensors = tensors_of(made / name)
    for own, ours in FolderWeights(Folder(made / name)).items():
        there = weight_names.in_transformer_engine(own)
        theirs = [tensors[n] for n in converter._weight_name_mapping_mcore_to_hf(there)]
        assert torch.equal(converter._weight_to_mcore_format(there, theirs), ours), own


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_a_config_that_was_made_here(name: str, made: Path) -> None:
    """Without the folder that a run began with: what transformers then computes with."""
    transformers = pytest.importorskip("transformers")
    spec = read_model(made / name)
    said = config_of(spec, "float32")
    again = model_of(json.loads(transformers.AutoConfig.for_model(**said).to_json_string(use_diff=False)), "m", "here")
    assert replace(again, name=spec.name) == spec


@pytest.mark.integration
def test_a_run_begins_with_a_folder_in_any_layout(folder: Path, tmp_path: Path) -> None:
    found = {}
    for tp, pp in ((1, 1), (2, 2)):
        plan = spawn.plan(tp=tp, pp=pp, model=read_model(folder), batch=replace(spawn.BATCH, global_size=4))
        ended = spawn.train(
            tmp_path / f"run {tp}",
            plan,
            {"checkpoint": f"hf:{folder}", "train": {"steps": 3, "warmup_steps": 0, "lr": 1e-4, "min_lr": 1e-5}},
        )
        assert set(ended.codes) == {0}, ended.output
        found[tp] = ended.column("loss")
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    assert found[1][2] != found[1][0] > 4.5  # these weights, not those that a seed draws (ln 61 = 4.11)


@pytest.mark.integration
def test_a_run_gives_back_the_weights_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    """Through the optimizer's own copy in fp32, which a step at learning rate 0 writes back."""
    for file in folder.glob("*.safetensors"):
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file)
    _config(folder, torch_dtype="bfloat16")
    import_folder(folder, tmp_path / "ckpt")
    plan = spawn.plan(tp=2, pp=2, model=read_model(folder), batch=replace(spawn.BATCH, global_size=2))
    ended = spawn.train(
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
    assert set(ended.codes) == {0}, ended.output
    made = export(choose(str(tmp_path / "run")), tmp_path / "out")
    assert made.architecture == "Qwen3ForCausalLM" and same(folder, tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())


@pytest.mark.integration
def test_a_prompt_is_gone_on_from(made: Path, tmp_path: Path) -> None:
    """As transformers itself goes on, the likeliest token each time."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    shutil.copytree(made / "qwen2", tmp_path / "qwen2")
    words = {f"w{i}": i for i in range(60)} | {"</s>": 60}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "qwen2" / "tokenizer.json"))
    import_folder(tmp_path / "qwen2", tmp_path / "ckpt")
    text = generate(str(tmp_path / "ckpt"), "w3 w7 w9", tokens=5, temperature=0.0, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    theirs = model.generate(torch.tensor([[3, 7, 9]]), max_new_tokens=5, do_sample=False, eos_token_id=60)
    assert text.split() == [f"w{i}" for i in theirs[0, 3:].tolist() if i != 60]
    drawn = [generate(str(tmp_path / "ckpt"), "w3", tokens=5, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for prompt, tokens, says in (("\udcff", 1, "not UTF-8"), ("w1", 64, "1 tokens and 64 more are above")):
        with pytest.raises(ConfigError, match=says):
            generate(str(tmp_path / "ckpt"), prompt, tokens=tokens, temperature=0.0, seed=1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"qk_norm": False, "bias": True},
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
def test_ranks_hold_every_row_once(change: dict, tmp_path: Path) -> None:
    """The parts of two tensor-parallel ranks, put together as Megatron-Core has them, are the whole weight."""
    spec = replace(SPEC, **change)
    save_file({n: torch.randn(s) for n, s in weight_names.tensors(spec).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec, "float32")))
    folder = Folder(tmp_path)
    for name, weight in weight_names.weights(spec).items():
        whole = FolderWeights(folder)[name]
        rows, columns = weight.rows, weight.columns or 1
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = spec.padded_vocab(2)
        shape = {0: (rows // 2, columns), 1: (rows, columns // 2), None: (rows, columns)}[weight.split]
        parts = [torch.full(shape if weight.columns else shape[:1], 7.0) for _ in range(2)]
        for rank, part in enumerate(parts):
            folder.fill(part, weight, rank)
        if weight.split is None:
            assert torch.equal(parts[0], whole) and torch.equal(parts[1], whole), name
        elif len(weight.parts) == 2:
            gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
            assert torch.equal(torch.cat([*gates, *ups]), whole), name
        else:
            both = torch.cat(parts, weight.split)
            assert torch.equal(both[: weight.rows], whole) and not both[weight.rows :].any(), name


def _config(path: Path, **values: object) -> None:
    (path / "config.json").write_text(json.dumps({**read_config(path), **values}))


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "model-00001-of-00002.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file)


def _pickled(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def _lies(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "No such file"),
    "a missing shard": (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "lacks 1 of 2 shards"),
    "an unknown family": (lambda p: _config(p, model_type="lama"), "model_type is 'lama'; did you mean 'llama'"),
    "no family": (lambda p: (p / "config.json").write_text("{}"), "model_type is 'None'"),
    "a family that is not covered": (lambda p: _config(p, model_type="gemma2"), "no caps on scores or"),
    "a window": (lambda p: _config(p, use_sliding_window=True, sliding_window=8), "a window of 8 tokens"),
    "another scaling": (lambda p: _config(p, rope_scaling={"type": "yarn", "factor": 4}), "of type 'yarn', only"),
    "quantized": (lambda p: _config(p, quantization_config={"bits": 4}), "quantized"),
    "a missing key": (lambda p: _config(p, vocab_size=None), "vocab_size is missing"),
    "a wrong type": (lambda p: _config(p, num_hidden_layers="2"), "layers is '2'"),
    "shapes that do not fit": (lambda p: _config(p, intermediate_size=32), r"has shape \(\d+, \d+\), its config"),
    "another number of layers": (lambda p: _config(p, num_hidden_layers=3), "lacks model.layers.2.input_layernorm"),
    "a layer too many": (lambda p: _config(p, num_hidden_layers=1), "holds model.layers.1"),
    "layers without end": (lambda p: _config(p, num_hidden_layers=10**12), "holds 25 tensors .* 1000000000000 layers"),
    "heads without end": (
        lambda p: _config(p, num_attention_heads=10**12, num_key_value_heads=10**12, head_dim=2),
        "of 1000000000000 heads",
    ),
    "a larger tokenizer": (
        lambda p: (p / "tokenizer.json").write_text('{"model": {"vocab": {"a": 61}}}'),
        "has token id 61, the model's vocabulary ends at 60",
    ),
    "truncated": (lambda p: os.truncate(p / "model-00001-of-00002.safetensors", 2000), "not whole safetensors"),
    "sizes that lie": (_lies, "not whole safetensors"),
    "a pickle under its name": (
        lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(pickle.dumps([1] * 99)),
        "not whole safetensors",
    ),
    "a pickle": (_pickled, "pytorch_model.bin is a pickle, which may run any code"),
    "no number": (
        lambda p: _rewrite(p, lambda t: t["model.embed_tokens.weight"].view(-1)[5:6].fill_(float("nan"))),
        "model.embed_tokens.weight holds values that are no numbers",
    ),
    "whole numbers": (
        lambda p: _rewrite(p, lambda t: t.update({"model.embed_tokens.weight": torch.zeros(61, 16, dtype=torch.int8)})),
        "is of type I8",
    ),
    "an index that leads outside": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}'),
        "names files outside its folder",
    ),
    "an index that is none": (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "not an index"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_line_and_leaves_nothing(case: str, folder: Path, tmp_path: Path) -> None:
    harm, says = BAD[case]
    harm(folder)
    with pytest.raises(DataError, match=says) as e:
        import_folder(folder, tmp_path / "out")
    assert "\n" not in str(e.value) and e.value.where.startswith(str(tmp_path)) and e.value.hint
    assert {p.name for p in tmp_path.iterdir()} <= {"tiny"}


@pytest.mark.integration
def test_ranks_that_find_no_numbers_all_say_so(folder: Path, tmp_path: Path) -> None:
    """Rows that the last stage alone holds."""
    file = folder / "model-00002-of-00002.safetensors"
    held = load_file(file)
    held["model.norm.weight"][3] = float("inf")
    save_file(held, file)
    ended = spawn.train(tmp_path / "run", spawn.plan(pp=2, model=read_model(folder)), {"checkpoint": f"hf:{folder}"})
    assert set(ended.codes) == {2}, ended.output
    assert all("model.norm.weight holds values that are no numbers" in ended.log(rank) for rank in (0, 1))
    assert not ended.run.metrics()


def test_a_folder_names_a_model(folder: Path) -> None:
    config = load([f"model=hf:{folder}", "model.dropout=0.1", "batch=tiny"])
    assert config.model == replace(SPEC, dropout=0.1)
    assert applied(load(["model=gpt_tiny"]), [f"model=hf:{folder}", "batch=tiny"]).model == SPEC
    with pytest.raises(DataError, match=r"config\.json: No such file"):
        load(["model=hf:/nowhere"])


def test_a_model_that_is_another_is_refused(folder: Path) -> None:
    Folder(folder).check_model(replace(SPEC, name="other", dropout=0.1, vocab_multiple=1))
    with pytest.raises(DataError, match=r"of a model with rope_base 10000\.0, the plan's has 5\.0"):
        Folder(folder).check_model(replace(SPEC, rope_base=5.0))


def test_an_imported_checkpoint_knows_its_damage(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "ckpt")
    found = checkpoint_directory.at(tmp_path / "ckpt")
    assert found.step == 0 and checkpoint_directory.damage(found) is None
    with open(tmp_path / "ckpt" / "model-00001-of-00002.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    assert checkpoint_directory.damage(found) == "model-00001-of-00002.safetensors has other bytes than were written"


def test_gpt2_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Without the prefix of its names, and with masks among the weights."""
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
    tensors = {n: torch.randn(s) for n, s in weight_names.tensors(spec).items()}
    own = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(2)}
    found = []
    for name, held in (("with", tensors), ("without", {**own, **masks})):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config_of(spec, "float32")))
        found.append(FolderWeights(Folder(tmp_path / name)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0]) and "wte.weight" in own


def test_exports_may_be_sharded_otherwise(folder: Path, tmp_path: Path) -> None:
    made = export(Chosen(FolderWeights(Folder(folder)), SPEC, folder), tmp_path / "out", shard_bytes=5000)
    assert made.files > 2 and same(folder, tmp_path / "out")
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "np") as file:
        assert file.metadata() == {"format": "pt"}

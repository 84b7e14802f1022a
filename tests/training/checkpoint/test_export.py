"""Exported weights: `transformers` computes the logits that Megatron-Core computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holmes_hpc.config.hugging_face import config_of
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
from holmes_hpc.planning.spec.parallel import Parallel
from holmes_hpc.planning.spec.plan import Component, Plan, Schedule, Stage
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint import weight_names
from holmes_hpc.training.checkpoint.export import convert, export, of_run, write
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights

LLAMA = ModelSpec("llama", 3, 32, 4, 61, 48, 4, max_positions=24, rope_base=500.0, norm_eps=1e-3)
GPT2 = ModelSpec("gpt2", 3, 32, 4, 61, 64, 4, swiglu=False, rmsnorm=False, rope=False, bias=True, max_positions=24,
                 tied=True, norm_eps=1e-3)
MODELS = {
    "multi-head": LLAMA, "grouped-query": replace(LLAMA, kv_heads=2), "one key head": replace(LLAMA, kv_heads=1),
    "biases, tied": replace(LLAMA, bias=True, tied=True, kv_heads=2), "gpt2": GPT2,
    "gpt2 untied without biases": replace(GPT2, tied=False, bias=False),
}

MEGATRON = """
import json, os, sys
import torch
from holmes_hpc.training.rank import cpu

def plan_of(spec, tp=1, stages=None):
    stages = stages or [spec.layers]
    world = tp * len(stages)
    site = Site("s", (Fabric("f", NicType.ETHERNET, "p", 1, world, 10, CPU, gres=False),))
    return Plan(strategy="one-fabric", model=spec, batch=Batch(1, 1, 16), parallel=Parallel(tp=tp, pp=len(stages)),
                recompute="none", schedule=Schedule("1f1b", (1,) * len(stages)), site=site,
                components=(Component("p", "", "f", 1, world, tuple(range(len(stages)))),),
                stages=tuple(Stage("f", layers) for layers in stages))

def models(plan, rank, name):
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{name}", rank=rank,
                                         world_size=plan.world_size)
    parallel_state.initialize_model_parallel(plan.parallel.tp, plan.parallel.pp, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = gpt.transformer_config(plan, torch.float32, cuda=False)
    return gpt.build(plan, config, 5, torch.device("cpu"))

def save(rank, spec, tp, stages, name):
    cpu.install()
    (model,) = models(plan_of(spec, tp, stages), rank, name + ".store")
    dist_checkpointing.save({"model": model.sharded_state_dict(), "step": 3}, f"{sys.argv[1]}/{name}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from holmes_hpc.fabric.site import CPU, Fabric, NicType, Site
    from holmes_hpc.planning.spec.parallel import Parallel
    from holmes_hpc.config.model import Batch, ModelSpec
    from holmes_hpc.planning.spec.plan import Component, Plan, Schedule, Stage
    from holmes_hpc.training.model import gpt

    specs = {name: ModelSpec(**fields) for name, fields in json.load(open(f"{sys.argv[1]}/models.json")).items()}
    fork = torch.multiprocessing.get_context("fork")
    for name, tp, stages in json.load(open(f"{sys.argv[1]}/layouts.json")):
        os.mkdir(f"{sys.argv[1]}/saved {name}")
        ranks = [fork.Process(target=save, args=(rank, specs[name], tp, stages, f"saved {name}"))
                 for rank in range(tp * len(stages))]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0

    cpu.install()
    for name, spec in specs.items():
        (model,) = models(plan_of(spec), 0, name)
        first = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():  # no weight keeps a value that hides an error: norms of 1, biases of 0, tiny matrices
            for parameter in model.parameters():
                parameter.mul_(3).add_(0.2 * torch.randn(parameter.shape, generator=generator))
            tokens = torch.randint(spec.vocab, (2, 20), generator=generator)
            logits = model.eval()(tokens, torch.arange(20).repeat(2, 1), None)
        state = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        torch.save({"first": first, "state": state, "tokens": tokens, "logits": logits[..., :spec.vocab].clone()},
                   f"{sys.argv[1]}/{name}.pt")
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
"""


def plan(spec: ModelSpec) -> Plan:
    site = Site("s", (Fabric("f", NicType.ETHERNET, "p", 1, 1, 10, CPU, gres=False),))
    return Plan(strategy="one-fabric", model=spec, batch=Batch(1, 1, 16), parallel=Parallel(), recompute="none",
                schedule=Schedule("1f1b", (1,)), components=(Component("p", "", "f", 1, 1, (0,)),),
                stages=(Stage("f", spec.layers),), site=site)


# tensor parallel, layers of each stage
LAYOUTS = [("multi-head", 1, [3]), ("biases, tied", 2, [2, 1]), ("gpt2", 2, [1, 2]), ("grouped-query", 1, [1, 1, 1])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Megatron-Core computed and saved: NAME.pt, and checkpoints `saved NAME` of the LAYOUTS."""
    made = tmp_path_factory.mktemp("megatron")
    (made / "models.json").write_text(json.dumps({name: spec.__dict__ for name, spec in MODELS.items()}))
    (made / "layouts.json").write_text(json.dumps(LAYOUTS))
    (made / "main.py").write_text(MEGATRON)
    done = subprocess.run([sys.executable, "-W", "ignore", str(made / "main.py"), str(made)],
                          capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.fixture(scope="module")
def megatron(directory: Path) -> dict[str, dict[str, Any]]:
    """Per model: Megatron's first weights, others, tokens, and its logits with the others (2, 20, vocabulary)."""
    return {name: torch.load(directory / f"{name}.pt") for name in MODELS}


@pytest.mark.integration
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(name: str, megatron: dict, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec, ours = MODELS[name], megatron[name]
    made = write(ours["state"], spec, tmp_path / "out", eod=spec.vocab - 1, shard_bytes=30_000)
    assert made.files > 1
    loaded, said = transformers.AutoModelForCausalLM.from_pretrained(made.path, output_loading_info=True)
    assert type(loaded).__name__ == made.architecture
    assert not said["missing_keys"] and not said["unexpected_keys"]
    with torch.no_grad():
        theirs = loaded.eval()(ours["tokens"]).logits
    assert ours["logits"].abs().max() > 1
    torch.testing.assert_close(theirs, ours["logits"], rtol=1e-4, atol=1e-4)
    assert made.parameters == sum(p.numel() for p in loaded.parameters())


@pytest.mark.integration
def test_transformer_engines_names_give_the_same_weights(megatron: dict) -> None:
    for name, spec in MODELS.items():
        state = megatron[name]["state"]
        fused = {k.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                 .replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): v for k, v in state.items()}
        assert fused.keys() != state.keys()
        want, got = (dict(convert(s, spec)) for s in (state, fused))
        assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want)


@pytest.mark.integration
def test_one_file_and_the_type_of_the_weights(megatron: dict, tmp_path: Path) -> None:
    half = {k: v.to(torch.bfloat16) for k, v in megatron["gpt2"]["state"].items()}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    made = write(half, GPT2, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
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


@pytest.mark.integration
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(megatron: dict, tmp_path: Path) -> None:
    state = megatron["multi-head"]["state"]
    missing = {k: v for k, v in state.items() if "layers.1.mlp.linear_fc2" not in k}
    with pytest.raises(DataError, match=r"no weight decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        write(missing, LLAMA, tmp_path / "out")
    with pytest.raises(DataError, match=r"has shape \(96, 32\), the model's is \(128, 32\)"):
        write(state, replace(LLAMA, ffn=64), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("all of it")
    with pytest.raises(DataError, match="not an empty directory"):
        write(state, LLAMA, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "all of it"


@pytest.mark.integration
def test_a_run_exports_its_models_and_its_tokenizer(directory: Path, megatron: dict, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = MODELS["grouped-query"]
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "text.json").write_text('{"eod": 60}')
    run = RunDirectory.create(tmp_path / "run", plan(spec).to_yaml(), config={
        "data": {"prefix": [1.0, str(tmp_path / "text")], "tokenizer": str(tmp_path / "tokenizer.json")}})
    made = export(of_run(run, directory / "saved grouped-query", step=3), tmp_path / "out")
    assert "after step 3" in str(made) and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(made.path)
    assert loaded.config.eos_token_id == 60 and loaded.config.num_key_value_heads == 2
    first = megatron["grouped-query"]["first"]["embedding.word_embeddings.weight"]
    assert torch.equal(loaded.model.embed_tokens.weight, first[:61])


@pytest.mark.integration
@pytest.mark.parametrize("name", [name for name, _, _ in LAYOUTS])
def test_any_layouts_checkpoint_gives_the_weights_of_one_process(name: str, directory: Path, megatron: dict) -> None:
    want = dict(convert(megatron[name]["first"], MODELS[name]))
    got = dict(convert(SavedWeights(directory / f"saved {name}"), MODELS[name]))
    assert want.keys() == got.keys()
    for key in want:
        assert torch.equal(want[key], got[key]), key


@pytest.mark.integration
def test_a_damaged_checkpoint_is_one_line(directory: Path, tmp_path: Path) -> None:
    for harm, says in ((lambda p: p.write_bytes(p.read_bytes()[:-2000]), "cannot be read"),
                       (lambda p: p.unlink(), "cannot be read")):
        at = tmp_path / "saved"
        shutil.copytree(directory / "saved multi-head", at)
        for path in at.glob("*.distcp"):
            harm(path)
        with pytest.raises(DataError, match=says) as e:
            dict(convert(SavedWeights(at), LLAMA))
        assert "\n" not in str(e.value)
        shutil.rmtree(at)
    for content in (None, b"", b"no pickle"):
        at.mkdir(exist_ok=True)
        if content is not None:
            (at / ".metadata").write_bytes(content)
        with pytest.raises(DataError, match="not a checkpoint that can be read"):
            SavedWeights(at)

"""Exporting weights: from Megatron-Core's names and layouts to Hugging Face's, as safetensors for `transformers`.

Models with rotary positions, SwiGLU and RMSNorm become a LlamaForCausalLM; models with learned positions, GELU and
LayerNorm a GPT2LMHeadModel. There is no such class for other mixtures, and none is invented here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError, DataError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights
from holmes_hpc.training.data.tokenizer import ByteTokenizer

SHARD_BYTES = 5_000_000_000  # of one .safetensors file, as Hugging Face's own
State = Mapping[str, torch.Tensor]  # Megatron-Core's names of the whole model, layers counted from 0


@dataclass(frozen=True)
class Exported:
    """What was written. `parameters` counts a tied head once."""

    path: str
    architecture: str
    parameters: int
    files: int
    step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        after = "" if self.step is None else f" after step {self.step:,}"
        return f"{self.architecture}{after}: {self.parameters:,} parameters, in {self.path}"


def export(run: RunDirectory, checkpoint: str | os.PathLike[str], out_dir: str | os.PathLike[str],
           step: int | None = None) -> Exported:
    """Write the weights of a run's `checkpoint` (a directory, taken after `step`) into `out_dir`; see :func:`write`.

    The model is the plan's; the end of a document and the tokenizer's file are those of the run's data.
    """
    spec, data = Plan.read(run.plan_path).model, run.config.get("data", {})
    tokenizer = data.get("tokenizer")
    if tokenizer and not os.path.isfile(tokenizer):
        raise DataError("the run's tokenizer is gone", where=tokenizer, hint="put it back")
    return write(SavedWeights(checkpoint), spec, out_dir, eod=_end_of_document(data, spec), tokenizer=tokenizer,
                 step=step)


def _end_of_document(data: Mapping[str, Any], spec: ModelSpec) -> int | None:
    """As PREFIX.json says, which `holmes data prepare` writes beside the data."""
    prefix = data.get("prefix")
    names = [p for p in (prefix if isinstance(prefix, list) else [prefix]) if isinstance(p, str)]
    for name in names:
        try:
            said = json.loads(Path(f"{name}.json").read_text(encoding="utf-8"))["eod"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(said, int) and 0 <= said < spec.vocab:
            return said
    return ByteTokenizer.eod if spec.vocab == ByteTokenizer.vocab else None


def architecture(spec: ModelSpec) -> str:
    """The `transformers` class that computes what this model computes. ConfigError where there is none."""
    if spec.rope and spec.swiglu and spec.rmsnorm:
        return "LlamaForCausalLM"
    if not (spec.rope or spec.swiglu or spec.rmsnorm) and spec.kv_heads == spec.heads:
        return "GPT2LMHeadModel"
    parts = ["rotary" if spec.rope else "learned", "positions,", "SwiGLU," if spec.swiglu else "GELU,",
             "RMSNorm" if spec.rmsnorm else "LayerNorm", f"and {spec.kv_heads} of {spec.heads} heads for keys"]
    raise ConfigError(f"no Hugging Face model has {' '.join(parts)}", where=f"model {spec.name}",
                      hint="export models like Llama (rope, swiglu, rmsnorm) or like GPT-2 (none of them)")


def hugging_face_config(spec: ModelSpec, dtype: torch.dtype, eod: int | None = None) -> dict[str, Any]:
    """config.json of the exported model; `eod`: the token that ends a document."""
    common = {"architectures": [architecture(spec)], "vocab_size": spec.vocab, "tie_word_embeddings": spec.tied,
              "torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": eod, "eos_token_id": eod}
    if spec.rope:
        return {"model_type": "llama", **common, "hidden_size": spec.hidden, "intermediate_size": spec.ffn,
                "num_hidden_layers": spec.layers, "num_attention_heads": spec.heads,
                "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_width, "hidden_act": "silu",
                "max_position_embeddings": spec.max_positions, "rms_norm_eps": spec.norm_eps,
                "rope_theta": float(round(spec.rope_base)), "attention_bias": spec.bias, "mlp_bias": spec.bias,
                "attention_dropout": spec.dropout}
    return {"model_type": "gpt2", **common, "n_embd": spec.hidden, "n_inner": spec.ffn, "n_layer": spec.layers,
            "n_head": spec.heads, "n_positions": spec.max_positions, "activation_function": "gelu",
            "layer_norm_epsilon": spec.norm_eps, "attn_pdrop": spec.dropout, "resid_pdrop": spec.dropout,
            "embd_pdrop": spec.dropout}


def convert(state: State, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face's name, tensor) of the whole model, reading `state` tensor by tensor.

    Rows that pad the vocabulary are left out. Both of Megatron's layer specifications are understood: its own modules,
    and Transformer Engine's, where a norm is part of the linear layer that follows. Raises DataError for a weight that
    is missing or has another shape than the model's.
    """
    yield from (_llama if architecture(spec) == "LlamaForCausalLM" else _gpt2)(_Reader(state), spec)


class _Reader:
    """Takes weights from a state, each checked against the shape it should have."""

    def __init__(self, state: State) -> None:
        self.state = state

    def take(self, name: str, *shape: int, rows: int | None = None) -> torch.Tensor:
        """The weight of that name; with `rows`, its first ones (shape tells those)."""
        for known in (name, _in_transformer_engine(name)):
            if known in self.state:
                tensor = self.state[known]
                kept = tensor[:rows] if rows else tensor
                if tuple(kept.shape) != shape:
                    raise DataError(f"{known} has shape {tuple(tensor.shape)}, the model's is {shape}",
                                    where="checkpoint", hint="export it with the plan it was trained with")
                return kept.contiguous()
        raise DataError(f"no weight {name}", where="checkpoint", hint="export it with the plan it was trained with")

    def linear(self, name: str, out: int, into: int, bias: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.take(f"{name}.weight", out, into)
        if bias:
            yield "bias", self.take(f"{name}.bias", out)


def _in_transformer_engine(name: str) -> str:
    for norm, linear in (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1")):
        name = name.replace(f"{norm}.", f"{linear}.layer_norm_")
    return name


def split_qkv(qkv: torch.Tensor, spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Megatron's rows (per group of heads: its queries, its key, its value) as queries, keys and values of all heads.

    `qkv`: shape ((heads + 2 * kv_heads) * head_dim, ...); the weight or the bias of the layer.
    """
    each = spec.heads // spec.kv_heads
    grouped = qkv.reshape(spec.kv_heads, each + 2, spec.head_width, *qkv.shape[1:])
    parts = (grouped[:, :each], grouped[:, each:each + 1], grouped[:, each + 1:])
    q, k, v = (p.reshape(-1, *qkv.shape[1:]).contiguous() for p in parts)
    return q, k, v


def _llama(read: _Reader, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    h, width = spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_width
    yield "model.embed_tokens.weight", read.take("embedding.word_embeddings.weight", spec.vocab, h, rows=spec.vocab)
    for i in range(spec.layers):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        yield f"{theirs}.input_layernorm.weight", read.take(f"{ours}.input_layernorm.weight", h)
        for kind, qkv in read.linear(f"{ours}.self_attention.linear_qkv", width, h, spec.bias):
            for letter, part in zip("qkv", split_qkv(qkv, spec), strict=True):
                yield f"{theirs}.self_attn.{letter}_proj.{kind}", part
        for kind, tensor in read.linear(f"{ours}.self_attention.linear_proj", h, h, spec.bias):
            yield f"{theirs}.self_attn.o_proj.{kind}", tensor
        yield f"{theirs}.post_attention_layernorm.weight", read.take(f"{ours}.pre_mlp_layernorm.weight", h)
        for kind, both in read.linear(f"{ours}.mlp.linear_fc1", 2 * spec.ffn, h, spec.bias):
            for name, part in zip(("gate", "up"), both.chunk(2), strict=True):
                yield f"{theirs}.mlp.{name}_proj.{kind}", part.contiguous()
        for kind, tensor in read.linear(f"{ours}.mlp.linear_fc2", h, spec.ffn, spec.bias):
            yield f"{theirs}.mlp.down_proj.{kind}", tensor
    yield "model.norm.weight", read.take("decoder.final_layernorm.weight", h)
    if not spec.tied:
        yield "lm_head.weight", read.take("output_layer.weight", spec.vocab, h, rows=spec.vocab)


def _gpt2(read: _Reader, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-2 keeps its matrices transposed (Conv1D), and always has biases: zeros where the model has none."""
    h, theirs = spec.hidden, "transformer"

    def linear(name: str, ours: str, out: int, into: int, order: Callable[[torch.Tensor], torch.Tensor] = lambda t: t
               ) -> Iterator[tuple[str, torch.Tensor]]:
        found = {kind: order(t) for kind, t in read.linear(ours, out, into, spec.bias)}
        yield f"{name}.weight", found["weight"].t().contiguous()
        yield f"{name}.bias", found.get("bias", torch.zeros(out, dtype=found["weight"].dtype))

    def norm(name: str, ours: str) -> Iterator[tuple[str, torch.Tensor]]:
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", read.take(f"{ours}.{kind}", h)

    def in_order(qkv: torch.Tensor) -> torch.Tensor:
        return torch.cat(split_qkv(qkv, spec))

    yield f"{theirs}.wte.weight", read.take("embedding.word_embeddings.weight", spec.vocab, h, rows=spec.vocab)
    yield f"{theirs}.wpe.weight", read.take("embedding.position_embeddings.weight", spec.max_positions, h)
    for i in range(spec.layers):
        layer, ours = f"{theirs}.h.{i}", f"decoder.layers.{i}"
        yield from norm(f"{layer}.ln_1", f"{ours}.input_layernorm")
        yield from linear(f"{layer}.attn.c_attn", f"{ours}.self_attention.linear_qkv", 3 * h, h, in_order)
        yield from linear(f"{layer}.attn.c_proj", f"{ours}.self_attention.linear_proj", h, h)
        yield from norm(f"{layer}.ln_2", f"{ours}.pre_mlp_layernorm")
        yield from linear(f"{layer}.mlp.c_fc", f"{ours}.mlp.linear_fc1", spec.ffn, h)
        yield from linear(f"{layer}.mlp.c_proj", f"{ours}.mlp.linear_fc2", h, spec.ffn)
    yield from norm(f"{theirs}.ln_f", "decoder.final_layernorm")
    if not spec.tied:
        yield "lm_head.weight", read.take("output_layer.weight", spec.vocab, h, rows=spec.vocab)


def write(state: State, spec: ModelSpec, out_dir: str | os.PathLike[str], eod: int | None = None,
          tokenizer: str | None = None, step: int | None = None, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the model into `out_dir`, which must not exist or be empty; it appears complete or not at all.

    config.json, model.safetensors (several, with an index, above `shard_bytes`), and `tokenizer` as tokenizer.json.
    Parameters keep their type. Only one shard is held in memory at a time.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError("it exists and is not an empty directory", where=str(out), hint="choose another directory")
    kind = architecture(spec)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        where, dtype, parameters, size = _write_shards(convert(state, spec), temporary, shard_bytes)
        config = hugging_face_config(spec, dtype, eod)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        files = sorted(set(where.values()))
        if len(files) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        if tokenizer:
            shutil.copyfile(tokenizer, temporary / "tokenizer.json")
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as e:
        raise DataError(e.strerror or str(e), where=str(e.filename or out), hint="choose a directory that can be "
                        "written and has the space") from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(str(out), kind, parameters, len(files), step)


def _write_shards(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int
                  ) -> tuple[dict[str, str], torch.dtype, int, int]:
    """(file of each tensor, the parameters' type, their number, their bytes)."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as e:
        raise ConfigError("safetensors is not installed", where="export",
                          hint="pip install 'holmes-hpc[export]'") from e
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    dtype, parameters, size = torch.float32, 0, 0

    def flush() -> None:
        part = directory / f"part-{len(shards)}"
        try:
            save_file(held, part, metadata={"format": "pt"})
        except SafetensorError as e:  # of the disk: the tensors are sound
            raise OSError(str(e)) from e
        part.chmod(directory.stat().st_mode & 0o666)  # written for its owner alone
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and sum(t.numel() * t.element_size() for t in held.values()) + nbytes > shard_bytes:
            flush()
        held[name] = tensor.detach().clone()  # of its own: safetensors refuses shared memory
        dtype, parameters, size = tensor.dtype, parameters + tensor.numel(), size + nbytes
    flush()
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        where.update(dict.fromkeys(names, file))
    return where, dtype, parameters, size

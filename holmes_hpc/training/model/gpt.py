"""The model of a plan: Megatron-Core's GPTModel with this rank's layers, and weights that no layout changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.model import initial_weights, megatron_versions
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank.cuda_check import has_transformer_engine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INIT_STD = 0.02
_RECOMPUTE: dict[str, dict[str, Any]] = {  # of a plan, as Megatron-Core is told
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def layout(plan: Plan) -> list[list[str]]:
    """What every pipeline stage holds, chunk after chunk, as Megatron-Core's pipeline_model_parallel_layout."""
    rows = [["decoder"] * stage.chunks[chunk] for chunk in range(plan.parallel.virtual_stages) for stage in plan.stages]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def dtype_name(wanted: str, cuda: bool) -> str:
    """What ``train.dtype`` means on this device; for `auto` the planner has the same rule (planning/cost/costs.py)."""
    return wanted if wanted != "auto" else "bf16" if cuda else "fp32"


def dtype_of(wanted: str, cuda: bool) -> torch.dtype:
    """The type of parameters and activations. ConfigError for fp16 on a CPU."""
    name = dtype_name(wanted, cuda)
    if name == "fp16" and not cuda:
        raise ConfigError("fp16 needs a GPU", where="train.dtype", hint="use fp32 or bf16")
    return DTYPES[name]


def transformer_config(
    plan: Plan, dtype: torch.dtype, *, cuda: bool, fp8: str | None = None, timers: Any = None, stage: int = 0
) -> TransformerConfig:
    """Megatron-Core's configuration for a rank of `stage` of `plan`. Everything that compiles kernels is on for CUDA
    only. `fp8`: the recipe of Transformer Engine, which has been checked to be there."""
    m, p, tp = plan.model, plan.parallel, plan.parallel.tp_of(stage)
    te = cuda and has_transformer_engine()
    more = {**({"fp8": "hybrid", "fp8_recipe": fp8} if fp8 else {}), **_RECOMPUTE[plan.recompute]}
    return TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        num_query_groups=m.kv_heads,
        ffn_hidden_size=m.ffn,
        gated_linear_unit=m.swiglu,
        activation_func=F.silu if m.swiglu else partial(F.gelu, approximate="tanh") if m.gelu_tanh else F.gelu,
        kv_channels=m.head_width,
        qk_layernorm=m.qk_norm,
        add_qkv_bias=m.bias or m.qkv_bias,
        normalization="RMSNorm" if m.rmsnorm else "LayerNorm",
        layernorm_epsilon=m.norm_eps,
        add_bias_linear=m.bias,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
        init_method_std=INIT_STD,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.virtual_stages if p.virtual_stages > 1 else None,
        pipeline_model_parallel_layout=layout(plan) if p.pp > 1 else None,  # type: ignore[arg-type, unused-ignore]
        pipeline_dtype=dtype,
        sequence_parallel=p.sequence_parallel and tp > 1,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=p.virtual_stages > 1,
        batch_p2p_comm=p.virtual_stages == 1,
        bias_activation_fusion=cuda and m.swiglu,  # the fused GELU is its tanh approximation: another function
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        # Megatron-Core's output layer needs Apex's kernel for it, its other layers Transformer Engine's
        gradient_accumulation_fusion=te and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        cross_entropy_loss_fusion=te,
        cross_entropy_fusion_impl="te" if te else "native",
        apply_rope_fusion=te and m.rope,
        attention_softmax_in_fp32=True,
        timers=timers,
        **more,
    )


class Norm:
    """PyTorch's LayerNorm or RMSNorm; Megatron-Core's own wrapper of them refuses sequence parallelism, which only
    needs the mark by which it sums such a parameter's gradient over the tensor-parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def block_spec(spec: ModelSpec, config: TransformerConfig, cuda: bool, virtual: int | None) -> Any:
    """How layers are made: Transformer Engine's fused modules where it is installed, else Megatron-Core's own."""
    if cuda and has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm" if spec.rmsnorm else "LayerNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if spec.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    if cuda or not spec.dropout:  # torch's is slower than Megatron-Core's own on a CPU that drops scores
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=virtual), layer_norm=Norm)


def build(plan: Plan, config: TransformerConfig, seed: int | None, device: torch.device) -> list[GPTModel]:
    """This rank's model chunks (one; several when interleaved) on `device`, with their initial weights; without a
    `seed` those mean nothing, for a checkpoint's will take their place."""
    megatron_versions.quiet()
    m, p = plan.model, plan.parallel
    vocabulary = m.padded_vocab(p.vocabulary_parts)
    chunks = []
    for chunk in range(p.virtual_stages):
        virtual = chunk if p.virtual_stages > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=virtual)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=virtual)
        model = GPTModel(
            config,
            block_spec(m, config, device.type == "cuda", virtual),
            vocab_size=vocabulary,
            max_sequence_length=m.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=m.tied,
            position_embedding_type="rope" if m.rope else "learned_absolute",
            vp_stage=virtual,
        )
        if m.rope:
            model.rotary_pos_emb.inv_freq = rotary_frequencies(m).to(model.rotary_pos_emb.inv_freq.device)
        if last:
            _mask_padding(model, m.vocab, vocabulary // config.tensor_model_parallel_size)
        chunks.append(model.to(device))
    if seed is not None:
        for model in chunks:
            initialize(model, plan, seed)
    return chunks


def rotary_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians that each pair of a head's elements turns from one position to the next: fp32, (head width / 2,), on the
    CPU. Set over those of Megatron-Core, which knows whole bases and 8192 original positions only.

    Su et al. 2021 (arXiv 2104.09864); stretched as `rope_scaling` says: linear (Chen et al. 2023, arXiv 2306.15595) or
    as Llama 3.1's authors do (arXiv 2407.21783).
    """
    turns = 1.0 / spec.rope_base ** (torch.arange(0, spec.head_width, 2, dtype=torch.float32) / spec.head_width)
    scaling = spec.rope_scaling
    if scaling is None:
        return turns
    if scaling.kind == "linear":
        return turns / scaling.factor
    around = turns * scaling.original_positions / (2 * math.pi)  # how often it turned in all original positions
    low, high = scaling.low_frequency_turns, scaling.high_frequency_turns
    kept = ((around - low) / (high - low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


def _mask_padding(model: GPTModel, vocab: int, rows: int) -> None:
    """Keep the rows that only pad the vocabulary (their number depends on TP) out of the softmax."""
    first = max(0, vocab - parallel_state.get_tensor_model_parallel_rank() * rows)
    if first >= rows:
        return

    def mask(module: Any, inputs: Any, output: Any) -> Any:
        logits, bias = output
        padding = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        padding[first:] = True
        return logits.masked_fill_(padding, torch.finfo(logits.dtype).min), bias

    model.output_layer.register_forward_hook(mask)


def inner(wrapped: Any) -> Any:
    """The GPTModel in its wrappers: Megatron-Core's DDP, half precision."""
    while not hasattr(wrapped, "pre_process"):
        wrapped = wrapped.module
    return wrapped


def global_name(name: str, model: torch.nn.Module, tied: bool = False) -> str:
    """Return a parameter's name with its layer's number in the whole model, from 0; of the head that is `tied` to the
    embedding, the embedding's."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    words = name.split(".")
    if "layers" in words:
        at = words.index("layers") + 1
        layers: Any = model.get_submodule(".".join(words[:at]))
        words[at] = str(int(layers[int(words[at])].layer_number) - 1)
    return ".".join(words)


def initialize(model: GPTModel, plan: Plan, seed: int) -> None:
    """Give every parameter its initial value, a function of the seed and its name in the whole model alone.

    The same on every device and in every layout (initial_weights.py). Normal with standard deviation
    0.02, and 0.02/sqrt(2*layers) for what is added to the residual stream (Radford et al. 2019); norms 1, biases 0.
    """
    residual = INIT_STD / math.sqrt(2 * plan.model.layers)
    for name, parameter in model.named_parameters():
        whole = global_name(name, model, plan.model.tied)
        with torch.no_grad():
            if whole.endswith("bias"):
                parameter.zero_()
            elif "norm" in whole.split(".")[-2] or whole.endswith("layer_norm_weight"):
                parameter.fill_(1.0)
            else:
                std = residual if whole.endswith(("linear_proj.weight", "linear_fc2.weight")) else INIT_STD
                _draw(parameter, whole, std, plan, seed)


def _draw(parameter: torch.nn.Parameter, name: str, std: float, plan: Plan, seed: int) -> None:
    tp, rank = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank())
    split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
    dimension = getattr(parameter, "partition_dim", 0) if split else 0
    own = [torch.arange(n, device=parameter.device) for n in parameter.shape]
    width = parameter.shape[1]
    if split and name.endswith("linear_fc1.weight") and plan.model.swiglu:  # its parts of gate and of up
        half = len(own[0]) // 2
        own[0] = torch.cat([own[0][:half] + rank * half, own[0][:half] + (tp + rank) * half])
    elif split:
        own[dimension] += rank * len(own[dimension])
        width *= tp if dimension == 1 else 1
    drawn = initial_weights.normal(seed, name, own[0], own[1], width, std)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        drawn[own[0] >= plan.model.vocab] = 0  # rows that only pad, as many as TP asks for
    parameter.copy_(drawn)


def forward_step(batches: Iterator[Any], chunk: Any, masked: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """Megatron-Core's forward_step_func: one micro-batch, which lies on the model's device already, through one model
    chunk, and how its loss is made. `masked`: every stage needs the batch, for its mask."""
    model = inner(chunk)
    batch = next(batches) if model.pre_process or model.post_process or masked else {}
    labels = batch.get("labels") if model.post_process else None
    output = chunk(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=labels)
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(mask: torch.Tensor | None, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean over the micro-batch's tokens that count."""
    assert mask is not None  # the last stage, where losses are, reads data
    mask = mask.float()
    loss = (losses.float() * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"loss": loss.detach().clone()}


def generators() -> dict[str, Any]:
    """Return the states of the random number generators that training uses (dropout): the host's, the device's, and
    those that Megatron-Core keeps beside it."""
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Go on from what :func:`generators` gave."""
    torch.set_rng_state(states["host"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])

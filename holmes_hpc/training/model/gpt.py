"""The model of a plan: Megatron-Core's GPTModel with this rank's layers, and initial weights that fit any layout."""

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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import auto_dtype
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.model import context_parallel, experts, initial_weights, megatron_versions
from holmes_hpc.training.model.attention import SdpaAttention
from holmes_hpc.training.rank.cuda_check import has_transformer_engine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INIT_STD = 0.02
_RECOMPUTE: dict[str, dict[str, Any]] = {  # Megatron-Core's options for each setting of a plan
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def layout(plan: Plan) -> list[list[str]]:
    """Return the layers of every pipeline stage, chunk by chunk, as Megatron-Core's pipeline_model_parallel_layout."""
    rows = [["decoder"] * stage.chunks[chunk] for chunk in range(plan.parallel.virtual_stages) for stage in plan.stages]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def dtype_name(setting: str, cuda: bool, plan: Plan) -> str:
    """Return `setting`, or the type that ``train.dtype=auto`` stands for, which is the same on all ranks of `plan`."""
    if setting != "auto":
        return setting
    gpus = {plan.site.pool(place.pool).gpu for place in plan.places}
    return auto_dtype(gpu for gpu in gpus if not gpu.is_cpu) if cuda else "fp32"


def dtype_of(name: str, cuda: bool) -> torch.dtype:
    """Return the type of parameters and activations called `name`. Raise ConfigError for fp16 on a CPU."""
    if name == "fp16" and not cuda:
        raise ConfigError("fp16 needs a GPU", where="train.dtype", hint="use fp32 or bf16")
    return DTYPES[name]


def transformer_config(
    plan: Plan, dtype: torch.dtype, *, cuda: bool, fp8: str | None = None, timers: Any = None, stage: int = 0
) -> TransformerConfig:
    """Return Megatron-Core's configuration for a rank of `stage`. Options that compile kernels are on for CUDA only.
    `fp8`: a recipe of Transformer Engine, which must be available."""
    m, p, tp = plan.model, plan.parallel, plan.parallel.tp_of(stage)
    te = cuda and has_transformer_engine()
    optional = {**({"fp8": "hybrid", "fp8_recipe": fp8} if fp8 else {}), **_RECOMPUTE[plan.recompute]}
    optional |= experts.config_options(m, p)
    yarn = m.rope_scaling if m.rope_scaling is not None and m.rope_scaling.kind == "yarn" else None
    config = TransformerConfig(
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
        context_parallel_size=p.cp_of(stage),
        cp_comm_type="a2a" if p.cp_comm == "a2a" else "p2p",
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.virtual_stages if p.virtual_stages > 1 else None,
        pipeline_model_parallel_layout=layout(plan) if p.pp > 1 else None,  # type: ignore[arg-type, unused-ignore]
        pipeline_dtype=dtype,
        sequence_parallel=p.sequence_parallel and tp > 1,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=p.virtual_stages > 1,
        batch_p2p_comm=p.virtual_stages == 1,
        bias_activation_fusion=cuda and m.swiglu,  # the fused GELU is only its tanh approximation
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        # this fusion needs Apex's kernel in the output layer, and Transformer Engine in the other layers
        gradient_accumulation_fusion=te and find_spec("fused_weight_gradient_mlp_cuda") is not None,
        cross_entropy_loss_fusion=te,  # torch.compile's needs more memory and is not faster (docs/gpu.md)
        cross_entropy_fusion_impl="te" if te else "native",
        apply_rope_fusion=te and m.rope and yarn is None,
        attention_softmax_in_fp32=True,
        timers=timers,
        **optional,
    )
    if yarn is not None:  # Megatron-Core's attention derives YaRN's factor of the rotated queries and keys from this
        config.yarn_rotary_scaling_factor = yarn.factor  # type: ignore[attr-defined, unused-ignore]
    return config


class Norm:
    """PyTorch's LayerNorm or RMSNorm with support for sequence parallelism, which Megatron-Core's wrapper refuses. An
    attribute makes Megatron-Core sum a parameter's gradient over the tensor-parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def block_spec(spec: ModelSpec, config: TransformerConfig, cuda: bool, virtual: int | None) -> Any:
    """Return the layers of a chunk: Transformer Engine's fused modules if available, else Megatron-Core's own."""
    te = cuda and has_transformer_engine()
    block = get_gpt_decoder_block_spec(config, te, "RMSNorm" if spec.rmsnorm else "LayerNorm", vp_stage=virtual)
    if te:
        return block
    block.layer_norm = Norm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        if spec.qk_norm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if cuda or not spec.dropout:  # with dropout on a CPU, torch's attention is slower than Megatron-Core's own
            attention.core_attention = SdpaAttention
    return block


def build(plan: Plan, config: TransformerConfig, seed: int | None, device: torch.device) -> list[GPTModel]:
    """Build this rank's model chunks (several if interleaved) on `device`. Draw initial weights if `seed` is not None;
    otherwise a checkpoint must replace the weights."""
    megatron_versions.filter_logs()
    experts.prepare_dispatchers()
    context_parallel.support_cpu()
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
        experts.mark(model)
        chunks.append(model.to(device))
        if seed is not None:
            initialize(model, plan, seed)
    if device.type == "cuda":
        experts.group_products(chunks, config)
    return chunks


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """Return the angle in radians by which each pair of a head's elements rotates per position. The result is fp32,
    (head width / 2,), on the CPU. It replaces the frequencies of Megatron-Core, which supports only integer bases and
    8192 original positions. Rotary embedding: Su et al. 2021 (arXiv 2104.09864). The model's `rope_scaling` is linear
    (Chen et al. 2023, arXiv 2306.15595), as in Llama 3.1 (arXiv 2407.21783) or YaRN (Peng et al. 2023, arXiv
    2309.00071), which changes from scaled to unscaled pairs linearly in their number, not their turns."""
    pairs = torch.arange(spec.head_width // 2, dtype=torch.float32)
    radians = 1.0 / spec.rope_base ** (2 * pairs / spec.head_width)
    scaling = spec.rope_scaling
    if scaling is None:
        return radians
    if scaling.kind == "linear":
        return radians / scaling.factor
    low, high = scaling.low_frequency_turns, scaling.high_frequency_turns  # over all original positions
    turns = radians * scaling.original_positions / (2 * math.pi)
    if scaling.kind == "llama3":
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        last, first = (math.log(float(turns[0]) / n, spec.rope_base) * spec.head_width / 2 for n in (low, high))
        first = max(0, math.floor(first))  # whole numbers, as in the published models
        last = max(first + 1, min(math.ceil(last), spec.head_width - 1))
        unscaled = ((last - pairs) / (last - first)).clamp(0, 1)
    return radians * (unscaled + (1 - unscaled) / scaling.factor)


def _mask_padding(model: GPTModel, vocab: int, rows: int) -> None:
    """Exclude the rows that pad the vocabulary from the softmax. `rows`: the number of rows on this rank."""
    first = max(0, vocab - parallel_state.get_tensor_model_parallel_rank() * rows)
    if first >= rows:
        return

    def mask(module: Any, inputs: Any, output: Any) -> Any:
        logits, bias = output
        return _Masked.apply(logits, first), bias

    model.output_layer.register_forward_hook(mask)


class _Masked(torch.autograd.Function):
    """A function that sets the columns of logits from `first` on to the lowest value of their type, in place. The loss
    has a zero gradient there, because their softmax underflows, so the backward pass leaves the gradient unchanged."""

    @staticmethod
    def forward(context: Any, logits: Tensor, first: int) -> Tensor:
        logits[..., first:] = torch.finfo(logits.dtype).min
        context.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def unwrap(wrapped: Any) -> Any:
    """Return the GPTModel inside the wrappers for DDP and half precision."""
    while not hasattr(wrapped, "pre_process"):
        wrapped = wrapped.module
    return wrapped


def global_name(name: str, model: torch.nn.Module, tied: bool = False) -> str:
    """Return a parameter's name with the layer's number in the full model, counted from 0.
    A head that is `tied` to the embedding has the embedding's name."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    components = name.split(".")
    experts.number_globally(components, model)
    if "layers" in components:
        position = components.index("layers") + 1
        layers: Any = model.get_submodule(".".join(components[:position]))
        components[position] = str(int(layers[int(components[position])].layer_number) - 1)
    return ".".join(components)


def initialize(model: GPTModel, plan: Plan, seed: int) -> None:
    """Set every parameter to its initial value, which depends only on the seed and its name in the full model. Norms
    are 1, biases 0, weights normal with deviation 0.02, or 0.02/sqrt(2*layers) if added to the residual (GPT-2)."""
    residual_std = INIT_STD / math.sqrt(2 * plan.model.layers)
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, model, plan.model.tied)
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name.split(".")[-2] or name.endswith("layer_norm_weight"):
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else INIT_STD
                _draw(parameter, name, std, plan, seed)


def _draw(parameter: torch.nn.Parameter, name: str, std: float, plan: Plan, seed: int) -> None:
    group = experts.tensor_parallel_group(parameter)
    tp, rank = group.size(), group.rank()
    is_split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
    dimension = getattr(parameter, "partition_dim", 0) if is_split else 0
    indices = [torch.arange(n, device=parameter.device) for n in parameter.shape]  # (rows, columns) of this part
    width = parameter.shape[1]  # below, indices and width become those of the full parameter
    if is_split and name.endswith("linear_fc1.weight") and plan.model.swiglu:  # its parts of gate and of up
        half = len(indices[0]) // 2
        indices[0] = torch.cat([indices[0][:half] + rank * half, indices[0][:half] + (tp + rank) * half])
    elif is_split:
        indices[dimension] += rank * len(indices[dimension])
        width *= tp if dimension == 1 else 1
    weights = initial_weights.normal(seed, name, indices[0], indices[1], width, std)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[indices[0] >= plan.model.vocab] = 0  # rows that pad the vocabulary
    parameter.copy_(weights)


def forward_step(batches: Iterator[Any], chunk: Any, masked: bool = False) -> tuple[Any, Callable[[Any], Any]]:
    """Run the forward pass of one micro-batch, and return its output and loss function, as Megatron-Core's
    forward_step_func. `masked`: every stage reads the batch, because it needs the mask."""
    model = unwrap(chunk)
    batch = next(batches) if model.pre_process or model.post_process or masked else {}
    labels = batch.get("labels") if model.post_process else None
    output = chunk(batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=labels)
    return output, partial(_loss, batch.get("loss_mask"), batch.get("loss_tokens"))


def _loss(mask: Tensor | None, tokens: Tensor | None, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of the `losses` that `mask` includes, and a detached copy under the key "loss". `tokens`: the
    `loss_tokens` of :func:`context_parallel.part_of`. The copy is scaled so that its mean over the ranks that share a
    sequence is the mean loss of the sequence."""
    assert mask is not None  # the last stage, which computes losses, reads the batch
    mask = mask.float()
    loss = (losses.float() * mask).sum() / (mask.sum() if tokens is None else tokens).clamp(min=1)
    return loss, {"loss": loss.detach() * context_parallel.size()}


def hidden_states(
    create: Callable[..., Tensor], config: TransformerConfig, micro_size: int, length: int, device: torch.device
) -> Tensor:
    """Return an artificial input for this rank's layers, (tokens, `micro_size`, hidden). `create`: torch.zeros or
    torch.randn; `micro_size`: sequences per micro-batch; `length`: tokens per sequence."""
    tokens = length // (parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1)
    return create(tokens, micro_size, config.hidden_size, dtype=config.params_dtype, device=device, requires_grad=True)


def generators() -> dict[str, Any]:
    """Return the states of the random number generators for dropout: the host's, the device's and Megatron-Core's."""
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states that :func:`generators` returned."""
    torch.set_rng_state(states["host"])
    torch.cuda.set_rng_state(states["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])

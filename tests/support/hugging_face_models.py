"""Small random models of every family in Hugging Face's format, with reference results.

References are the logits of `transformers`. From the same weights, in two layouts, there are Megatron-Core's
logits, its checkpoint, and the losses of three more steps. ``python hugging_face_models.py DIR`` writes all into
DIR."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_QWEN3_MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# name -> model_type, config; LENGTH exceeds the original context of models with scaled RoPE
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3_1": ("llama", {**_SIZES, "rope_parameters": _LLAMA3}),
    "llama_linear": (
        "llama",
        {
            **_SIZES,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.5, "factor": 4.0},
        },
    ),
    "mistral": ("mistral", {**_SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16, "rope_parameters": _YARN}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_all": ("qwen3_moe", {**_SIZES, **_QWEN3_MOE, "norm_topk_prob": False}),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
}
LAYOUTS = {"one process": (1, 1), "tp2 pp2": (2, 2)}
LENGTH = 40


def make_models(root: Path) -> None:
    """Write NAME/ (config.json, shards of safetensors) and NAME.pt (tokens, logits) for each model."""
    import transformers

    for name, (kind, values) in MODELS.items():
        torch.manual_seed(len(name))
        generator = torch.Generator().manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms of 1 and biases of 0 would hide errors
                scale = 0.1 if hasattr(model.config, "num_experts_per_tok") else 0.2  # routers amplify rounding errors
                parameter.mul_(3).add_(scale * torch.randn(parameter.shape, generator=generator))
            tokens = torch.randint(61, (2, LENGTH), generator=generator)
            logits = model(tokens).logits
        model.save_pretrained(root / name, max_shard_size="30KB")
        torch.save({"tokens": tokens, "logits": logits}, root / f"{name}.pt")


def run_rank(rank: int, root: Path, layout: str) -> None:
    """Run one rank's part of every model in a layout.

    The last stage writes `LAYOUT NAME.pt`: the logits, and losses and gradient norms of three steps from these
    weights. All ranks of TP 2 x PP 2 save `saved NAME` before these steps."""
    import spawn
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from holmes_hpc.config.hugging_face import read_model
    from holmes_hpc.training.checkpoint.hugging_face_folder import fill_model
    from holmes_hpc.training.model import gpt
    from holmes_hpc.training.rank import cpu

    tp, pp = LAYOUTS[layout]
    cpu.install()
    writer = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    filesystem_async._results_queue = queue.Queue()  # else every rank spawns a process for it, which imports torch
    dist.init_process_group("gloo", init_method=f"file://{root}/{layout}.store", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=tp, expert_tensor_parallel_size=1, create_gloo_process_groups=True
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name in MODELS:
        spec = read_model(root / name)
        experts = {"ep": tp, "sequence_parallel": tp > 1} if spec.experts.count else {}
        plan = spawn.plan(tp=tp, pp=pp, model=spec, **experts)
        config = gpt.transformer_config(plan, torch.float32, cuda=False)
        (model,) = gpt.build(plan, config, None, torch.device("cpu"))
        fill_model(root / name, spec, [model], parallel_state.get_tensor_model_parallel_rank())
        tokens = torch.load(root / f"{name}.pt")["tokens"]
        logits = _logits(model, tokens, rank, tp, pp)
        if tp * pp == 4:
            (root / f"saved {name}").mkdir(exist_ok=True)
            dist_checkpointing.save({"model": model.sharded_state_dict()}, str(root / f"saved {name}"), writer)
        losses, norms = _three_steps(model, plan, config, tokens)
        if rank == tp * (pp - 1):
            torch.save(
                {"logits": logits[..., : spec.vocab], "losses": losses, "norms": norms}, root / f"{layout} {name}.pt"
            )
    dist.barrier()
    dist.destroy_process_group()


def _logits(model: Any, tokens: torch.Tensor, rank: int, tp: int, pp: int) -> torch.Tensor:
    """Return the logits of the whole vocabulary on the last stage, and this stage's output elsewhere."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    with torch.no_grad():
        if rank >= tp:
            length = LENGTH // tp if model.config.sequence_parallel else LENGTH
            hidden = torch.empty(length, 2, model.config.hidden_size)
            dist.recv(hidden, rank - tp)
            model.set_input_tensor(hidden)
        output: torch.Tensor = model.eval()(tokens, torch.arange(LENGTH).repeat(2, 1), None).contiguous()
        model.set_input_tensor(None)
        if rank < tp * (pp - 1):
            dist.send(output, rank + tp)
            return output
    parts = [torch.empty_like(output) for _ in range(tp)]
    dist.all_gather(parts, output, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


def _three_steps(model: Any, plan: Any, config: Any, tokens: torch.Tensor) -> tuple[list[float], list[float]]:
    """Train three steps with a micro-batch per row; return losses (on the last stage) and gradient norms."""
    import spawn
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from holmes_hpc.training.metrics.breakdown import Breakdown
    from holmes_hpc.training.model import optimizer
    from holmes_hpc.training.model.gpt import forward_step

    models = optimizer.wrap([model.train()], config, plan, spawn.TRAIN)
    built_optimizer = optimizer.build(models, config, plan, spawn.TRAIN, Breakdown(False))
    batches = [
        {
            "tokens": row[None],
            "labels": row.roll(-1)[None],
            "position_ids": torch.arange(LENGTH)[None],
            "loss_mask": torch.ones(1, LENGTH),
        }
        for row in tokens
    ]
    losses, norms = [], []
    for _ in range(3):
        models[0].zero_grad_buffer()
        built_optimizer.zero_grad()
        step_losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=models[0],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.set_options(built_optimizer, spawn.TRAIN, 1e-4)
        norms.append(float(built_optimizer.step()[1]))
        losses.append(sum(float(entry["loss"]) for entry in step_losses) / len(batches))
    return losses, norms


def main(root: Path) -> None:
    make_models(root)
    from holmes_hpc.training.rank import compiler

    with compiler.delayed():
        import holmes_hpc.training.loop  # noqa: F401 (loaded once, before ranks are forked)

    fork = torch.multiprocessing.get_context("fork")
    for layout, (tp, pp) in LAYOUTS.items():
        ranks = [fork.Process(target=run_rank, args=(rank, root, layout)) for rank in range(tp * pp)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0, layout


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Small random models of every family in Hugging Face's format, their logits by `transformers`, and Megatron-Core's
logits with the same weights in several layouts: ``python hugging_face_models.py DIR`` writes all of it into DIR."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
# name -> model_type, config; sequences of LENGTH tokens are longer than what a scaled model was first trained on
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3_1": ("llama", {**_SIZES, "rope_parameters": _LLAMA3}),
    "llama_linear": ("llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                               "rope_parameters": {"rope_type": "linear", "rope_theta": 500.5, "factor": 4.0}}),
    "mistral": ("mistral", {**_SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {**_SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16}),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
}
LAYOUTS = {"one process": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}
LENGTH = 40


def make(root: Path) -> None:
    """NAME/ (config.json, shards of safetensors) and NAME.pt (tokens, logits) for each model."""
    import transformers

    for name, (kind, values) in MODELS.items():
        torch.manual_seed(len(name))
        numbers = torch.Generator().manual_seed(len(name))
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values)).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # no weight keeps a value that hides an error: norms of 1, biases of 0
                parameter.mul_(3).add_(0.2 * torch.randn(parameter.shape, generator=numbers))
            tokens = torch.randint(61, (2, LENGTH), generator=numbers)
            logits = model(tokens).logits
        model.save_pretrained(root / name, max_shard_size="30KB")
        torch.save({"tokens": tokens, "logits": logits}, root / f"{name}.pt")


def rank_logits(rank: int, root: Path, layout: str) -> None:
    """One rank's part of every model in a layout; the last stage writes `LAYOUT NAME.pt`."""
    import spawn
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from holmes_hpc.config.hugging_face import read_model
    from holmes_hpc.training.checkpoint import begin
    from holmes_hpc.training.model import gpt
    from holmes_hpc.training.rank import cpu

    tp, pp = LAYOUTS[layout]
    cpu.install()
    dist.init_process_group("gloo", init_method=f"file://{root}/{layout}.store", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    group = parallel_state.get_tensor_model_parallel_group()
    for name in MODELS:
        spec = read_model(root / name)
        plan = spawn.plan(tp=tp, pp=pp, model=spec)
        config = gpt.transformer_config(plan, torch.float32, cuda=False)
        (model,) = gpt.build(plan, config, None, torch.device("cpu"))
        assert begin.read(root / name, spec, [model], parallel_state.get_tensor_model_parallel_rank()) is None
        tokens = torch.load(root / f"{name}.pt")["tokens"]
        with torch.no_grad():
            if rank >= tp:
                hidden = torch.empty(LENGTH, 2, spec.hidden)
                dist.recv(hidden, rank - tp)
                model.set_input_tensor(hidden)
            output = model.eval()(tokens, torch.arange(LENGTH).repeat(2, 1), None)
            if rank < tp * (pp - 1):
                dist.send(output.contiguous(), rank + tp)
                continue
        parts = [torch.empty_like(output) for _ in range(tp)]
        dist.all_gather(parts, output.contiguous(), group=group)
        if rank % tp == 0:
            torch.save(torch.cat(parts, -1)[..., :spec.vocab], root / f"{layout} {name}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(root: Path) -> None:
    make(root)
    import megatron.core
    import spawn  # noqa: F401 (loaded once, before the ranks are forked)

    assert megatron.core
    fork = torch.multiprocessing.get_context("fork")
    for layout, (tp, pp) in LAYOUTS.items():
        ranks = [fork.Process(target=rank_logits, args=(rank, root, layout)) for rank in range(tp * pp)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0, layout


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One GPU: model TFLOP/s and memory of a training run, beside the same model in Megatron-Core's own minimal loop.

    make bench-gpu
    python benchmarks/gpu.py [--steps 30] [--pairs 3] [--device cuda] [--json] [OVERRIDES: model=gpt_small …]

Alternating runs, each a process of its own: `python -m holmes_hpc.train` with its records as they are, and a loop that
calls Megatron-Core's model, DDP, optimizer and schedule and nothing else, on tokens that lie on the device. The loop's
configuration is its own, as Megatron-Core's examples have it (fusions on, its default buckets): only sizes are shared.
Both have fused attention: Transformer Engine's where it is installed, else torch's. Printed: the inputs, each pair with
its first loss (about log(vocabulary)), the medians, their ratio, the memory that the planner predicts; --json: these as
one line too. With --device cpu it runs anywhere, to see that both work; its figures then say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from holmes_hpc.config.composition import load
from holmes_hpc.planning.cost.flops import model_flops_per_step
from holmes_hpc.planning.cost.memory import CUDA_BYTES
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import local_site, make_plan
from holmes_hpc.records.run import RunDirectory

DEFAULTS = [
    "model=gpt_small",
    "batch.global_size=32",
    "batch.micro_size=8",
    "batch.sequence_length=1024",
    "train.dtype=bf16",
    "data=synthetic",
]
WARM_UP = 5  # steps
Figures = tuple[float, int, float]  # seconds of a step, peak bytes, loss of step 1


def holmes(overrides: list[str], folder: Path) -> Figures:
    """A run as users start it."""
    run = RunDirectory(folder)
    done = subprocess.run(
        [sys.executable, "-m", "holmes_hpc.train", f"run_dir={folder}", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"holmes_hpc.train: {(done.stdout + done.stderr)[-2000:]}")
    lines = run.metrics()
    return (
        statistics.median(line["step_time_s"] for line in lines[WARM_UP:]),
        max(max(line["peak_memory_bytes"]) for line in lines),
        lines[0]["loss"],
    )


def minimal(overrides: list[str]) -> Figures:
    """The loop with nothing but Megatron-Core, in this process. Without a C compiler it has no fusions, as this engine
    then."""
    import torch
    import torch.nn.functional as F

    from holmes_hpc.training.metrics.metrics_line import peak_memory_bytes
    from holmes_hpc.training.rank import cpu, cuda_check

    with cpu.without_compiler():
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

    config = load(overrides)
    train, plan = config.train, make_plan(config, local_site(1, config.train.device))
    cuda = train.device == "cuda"
    if not cuda:
        cpu.install()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group(
            "nccl" if cuda else "gloo", init_method=f"file://{store.name}-store", rank=0, world_size=1
        )
    parallel_state.initialize_model_parallel(create_gloo_process_groups=not cuda)
    torch.manual_seed(train.seed)
    model_parallel_cuda_manual_seed(train.seed)

    m, half = plan.model, train.dtype == "bf16"
    fused = cuda and importlib.util.find_spec("transformer_engine") is not None
    compiles = cuda and cuda_check.can_compile()
    settings = TransformerConfig(
        num_layers=m.layers,
        hidden_size=m.hidden,
        num_attention_heads=m.heads,
        num_query_groups=m.kv_heads,
        ffn_hidden_size=m.ffn,
        gated_linear_unit=m.swiglu,
        activation_func=F.silu if m.swiglu else F.gelu,
        normalization="RMSNorm" if m.rmsnorm else "LayerNorm",
        add_bias_linear=m.bias,
        hidden_dropout=m.dropout,
        attention_dropout=m.dropout,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        bias_activation_fusion=compiles and (m.swiglu or m.bias),
        bias_dropout_fusion=compiles,
        apply_rope_fusion=fused and m.rope,
        gradient_accumulation_fusion=False,
    )
    chunk: Any = GPTModel(
        settings,
        layers(fused, m.rmsnorm),
        m.padded_vocab(1),
        m.max_positions,
        share_embeddings_and_output_weights=m.tied,
        position_embedding_type="rope" if m.rope else "learned_absolute",
    ).to(device)
    if half:
        chunk = Float16Module(settings, chunk)
    wrapped = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.beta1,
            adam_beta2=train.beta2,
            adam_eps=train.eps,
            clip_grad=train.clip_grad,
            bf16=half,
            params_dtype=settings.params_dtype,
        ),
        [wrapped],
        use_gloo_process_groups=not cuda,
    )
    settings.finalize_model_grads_func = finalize_model_grads
    settings.grad_scale_func = optimizer.scale_loss

    batch = plan.batch
    tokens = torch.randint(
        plan.model.vocab, (plan.micro_batches, batch.micro_size, batch.sequence_length + 1), device=device
    )
    positions = torch.arange(batch.sequence_length, device=device).repeat(batch.micro_size, 1)

    def forward(batches: Any, module: Any) -> tuple[Any, Any]:
        text = next(batches)
        losses = module(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides it in place

        return losses, mean

    forward_backward, times, first = get_forward_backward_func(), [], 0.0
    for step in range(train.steps):
        began = time.perf_counter()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        stored = forward_backward(
            forward_step_func=forward,
            data_iterator=iter(tokens),
            model=wrapped,
            num_microbatches=plan.micro_batches,
            seq_length=batch.sequence_length,
            micro_batch_size=batch.micro_size,
            forward_only=False,
        )
        optimizer.step()
        loss = statistics.mean(float(entry["loss"]) for entry in stored)  # waits for the device, as a log line does
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        first = first if step else loss
    torch.distributed.destroy_process_group()
    return statistics.median(times[WARM_UP:]), peak_memory_bytes(cuda), first


def layers(fused: bool, rmsnorm: bool) -> Any:
    """Megatron-Core's layers: with Transformer Engine's modules, or its own with torch's fused attention."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt import gpt_layer_specs

    if fused:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()

    class Attention(torch.nn.Module):
        def __init__(self, config: Any, *_: Any, **__: Any) -> None:
            super().__init__()
            self.dropout = config.attention_dropout

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            heads = query.size(2) // key.size(2)
            q, k, v = (
                t.permute(1, 2, 0, 3)
                for t in (query, key.repeat_interleave(heads, 2), value.repeat_interleave(heads, 2))
            )
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm" if rmsnorm else None)
    layer.submodules.self_attention.submodules.core_attention = Attention
    return layer


def tensor_bytes(plan: Plan) -> float:
    """What the planner predicts of the fullest rank's tensors, which is all that torch's allocator counts: without what
    a CUDA process holds beside them."""
    assert plan.predicted is not None
    beside = 0 if plan.site.fabrics[0].gpu.is_cpu else CUDA_BYTES
    return max(plan.predicted.memory_bytes_per_gpu) - beside


def megatron(overrides: list[str]) -> Figures:
    """:func:`minimal` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--minimal", *overrides], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"Megatron-Core's loop: {(done.stdout + done.stderr)[-2000:]}")
    seconds, held, loss = json.loads(done.stdout.splitlines()[-1])
    return seconds, held, loss


def main() -> int:
    if sys.argv[1:2] == ["--minimal"]:
        print(json.dumps(minimal(sys.argv[2:])))
        return 0
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--json", action="store_true")
    options.add_argument("overrides", nargs="*")
    given = options.parse_args()
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("bench-gpu: no CUDA device here, nothing is shown", file=sys.stderr)
        return 2
    overrides = [*DEFAULTS, *given.overrides, f"train.device={given.device}", f"train.steps={given.steps}"]
    config = load(overrides)
    plan: Plan = make_plan(config, local_site(1, config.train.device))
    flops = model_flops_per_step(plan.model, plan.batch)
    what = torch.cuda.get_device_name(0) if given.device == "cuda" else "CPU: says nothing about GPUs"
    print(f"inputs: {' '.join(overrides)}; {WARM_UP} steps are warm-up; {what}, torch {torch.__version__}")
    found: dict[str, list[Figures]] = {"holmes_hpc": [], "Megatron-Core": []}
    for pair in range(given.pairs):
        for name in found if pair % 2 == 0 else reversed(list(found)):
            with tempfile.TemporaryDirectory(prefix="holmes-gpu-") as made:
                figures = holmes(overrides, Path(made) / "run") if name == "holmes_hpc" else megatron(overrides)
            found[name].append(figures)
        print(
            f"pair {pair + 1}: "
            + "; ".join(
                f"{name}: {flops / runs[-1][0] / 1e12:.4g} TFLOP/s, {runs[-1][1] / 2**30:.2f} GiB, first loss "
                f"{runs[-1][2]:.3f}"
                for name, runs in found.items()
            ),
            flush=True,
        )
    (ours, our_bytes, _), (theirs, their_bytes, _) = (
        tuple(map(statistics.median, zip(*runs, strict=True))) for runs in found.values()
    )
    predicted = tensor_bytes(plan)
    print(
        f"log(vocabulary) is {math.log(plan.model.vocab):.3f}; the planner predicts {predicted / 2**30:.2f} GiB "
        "of tensors"
    )
    print(
        f"medians: holmes_hpc {flops / ours / 1e12:.4g} TFLOP/s and {our_bytes / 2**30:.2f} GiB, Megatron-Core's "
        f"loop {flops / theirs / 1e12:.4g} TFLOP/s and {their_bytes / 2**30:.2f} GiB: {theirs / ours:.3f} times its "
        "speed"
    )
    if given.json:
        print(
            json.dumps(
                {
                    "holmes_tflops": flops / ours / 1e12,
                    "loop_tflops": flops / theirs / 1e12,
                    "speed_ratio": theirs / ours,
                    "holmes_gib": our_bytes / 2**30,
                    "loop_gib": their_bytes / 2**30,
                    "predicted_gib": predicted / 2**30,
                    "pairs": given.pairs,
                    "steps": given.steps,
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

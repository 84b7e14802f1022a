"""Compare TFLOP/s and memory of a training run on one GPU with Megatron-Core's minimal loop of the same model.

    make bench-gpu
    python benchmarks/gpu.py [--steps 30] [--pairs 3] [--device cuda] [--json] [OVERRIDES: model=gpt_small …]

Runs alternate, each in its own process: `python -m holmes_hpc.train` with all its records, and a loop that only calls
Megatron-Core's model, DDP, optimizer and schedule, on tokens already on the device. The loop is configured as in
Megatron-Core's examples (fusions on, default buckets); only the sizes are shared. Both use fused attention:
Transformer Engine's if installed, else torch's. Prints the inputs, each pair with its first loss (about
log(vocabulary)), the medians, their ratio and the memory that the planner predicts; --json adds these as one line. With
--device cpu it runs anywhere, as a test of the program; its figures then do not apply to GPUs.
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


def run_holmes(overrides: list[str], folder: Path) -> Figures:
    """Train with holmes_hpc as a user would; return its figures."""
    run = RunDirectory(folder)
    process = subprocess.run(
        [sys.executable, "-m", "holmes_hpc.train", f"run_dir={folder}", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        sys.exit(f"holmes_hpc.train: {(process.stdout + process.stderr)[-2000:]}")
    lines = run.metrics()
    return (
        statistics.median(line["step_time_s"] for line in lines[WARM_UP:]),
        max(max(line["peak_memory_bytes"]) for line in lines),
        lines[0]["loss"],
    )


def run_minimal(overrides: list[str]) -> Figures:
    """Train with Megatron-Core's minimal loop in this process; return its figures.

    Without a C compiler it has no fusions; neither has holmes_hpc."""
    import torch
    import torch.nn.functional as F

    from holmes_hpc.training.metrics.metrics_line import peak_memory_bytes
    from holmes_hpc.training.rank import compiler, cpu, cuda_check

    with compiler.delayed():
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
        from megatron.core.transformer.moe import moe_utils

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

    spec, half = plan.model, train.dtype == "bf16"
    experts: dict[str, Any] = {}
    if spec.experts.count:
        moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # 0.16 reads it without TE
        experts = {
            "num_moe_experts": spec.experts.count,
            "moe_router_topk": spec.experts.top_k,
            "moe_aux_loss_coeff": spec.experts.balance,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": spec.ffn,
        }
    fused = cuda and importlib.util.find_spec("transformer_engine") is not None
    compiles = cuda and cuda_check.can_compile()
    settings = TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        ffn_hidden_size=spec.ffn,
        gated_linear_unit=spec.swiglu,
        activation_func=F.silu if spec.swiglu else F.gelu,
        normalization="RMSNorm" if spec.rmsnorm else "LayerNorm",
        add_bias_linear=spec.bias,
        hidden_dropout=spec.dropout,
        attention_dropout=spec.dropout,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        bias_activation_fusion=compiles and (spec.swiglu or spec.bias),
        bias_dropout_fusion=compiles,
        apply_rope_fusion=fused and spec.rope,
        gradient_accumulation_fusion=False,
        **experts,
    )
    model: Any = GPTModel(
        settings,
        layer_spec(fused, spec.rmsnorm, spec.experts.count or None),
        spec.padded_vocab(1),
        spec.max_positions,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope" if spec.rope else "learned_absolute",
    ).to(device)
    if half:
        model = Float16Module(settings, model)
    wrapped = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
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
        sequences = next(batches)
        losses = module(sequences[:, :-1].contiguous(), positions, None, labels=sequences[:, 1:].contiguous())

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides it in place

        return losses, mean

    forward_backward, times, first_loss = get_forward_backward_func(), [], 0.0
    for step in range(train.steps):
        start = time.perf_counter()
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
        times.append(time.perf_counter() - start)
        first_loss = first_loss if step else loss
    torch.distributed.destroy_process_group()
    return statistics.median(times[WARM_UP:]), peak_memory_bytes(cuda), first_loss


def layer_spec(fused: bool, rmsnorm: bool, experts: int | None) -> Any:
    """Return Megatron-Core's layer spec: Transformer Engine's, or the local one with torch's fused attention.
    `experts`: of a layer, None for a dense model."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt import gpt_layer_specs

    if fused:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(experts)

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

    layer = gpt_layer_specs.get_gpt_layer_local_spec(experts, normalization="RMSNorm" if rmsnorm else None)
    layer.submodules.self_attention.submodules.core_attention = Attention
    return layer


def tensor_bytes(plan: Plan) -> float:
    """Return the predicted bytes of the fullest rank's tensors, which torch's allocator counts.

    A CUDA process's own memory is excluded."""
    assert plan.predicted is not None
    process_bytes = 0 if plan.site.pools[0].gpu.is_cpu else CUDA_BYTES
    return max(plan.predicted.memory_bytes_per_gpu) - process_bytes


def run_megatron(overrides: list[str]) -> Figures:
    """Run :func:`run_minimal` in its own process; return its figures."""
    process = subprocess.run(
        [sys.executable, __file__, "--minimal", *overrides], capture_output=True, text=True, check=False
    )
    if process.returncode:
        sys.exit(f"Megatron-Core's loop: {(process.stdout + process.stderr)[-2000:]}")
    seconds, peak_bytes, loss = json.loads(process.stdout.splitlines()[-1])
    return seconds, peak_bytes, loss


def main() -> int:
    if sys.argv[1:2] == ["--minimal"]:
        print(json.dumps(run_minimal(sys.argv[2:])))
        return 0
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--json", action="store_true")
    options.add_argument("overrides", nargs="*")
    arguments = options.parse_args()
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench-gpu: no CUDA device on this machine", file=sys.stderr)
        return 2
    overrides = [*DEFAULTS, *arguments.overrides, f"train.device={arguments.device}", f"train.steps={arguments.steps}"]
    config = load(overrides)
    plan: Plan = make_plan(config, local_site(1, config.train.device))
    flops = model_flops_per_step(plan.model, plan.batch)
    device_name = (
        torch.cuda.get_device_name(0) if arguments.device == "cuda" else "CPU: the figures do not apply to GPUs"
    )
    print(f"inputs: {' '.join(overrides)}; {WARM_UP} steps are warm-up; {device_name}, torch {torch.__version__}")
    runs_by_system: dict[str, list[Figures]] = {"holmes_hpc": [], "Megatron-Core": []}
    for pair in range(arguments.pairs):
        for name in runs_by_system if pair % 2 == 0 else reversed(list(runs_by_system)):
            with tempfile.TemporaryDirectory(prefix="holmes-gpu-") as folder:
                figures = (
                    run_holmes(overrides, Path(folder) / "run") if name == "holmes_hpc" else run_megatron(overrides)
                )
            runs_by_system[name].append(figures)
        print(
            f"pair {pair + 1}: "
            + "; ".join(
                f"{name}: {flops / runs[-1][0] / 1e12:.4g} TFLOP/s, {runs[-1][1] / 2**30:.2f} GiB, first loss "
                f"{runs[-1][2]:.3f}"
                for name, runs in runs_by_system.items()
            ),
            flush=True,
        )
    (holmes_s, holmes_bytes, _), (loop_s, loop_bytes, _) = (
        tuple(map(statistics.median, zip(*runs, strict=True))) for runs in runs_by_system.values()
    )
    predicted = tensor_bytes(plan)
    assert plan.predicted is not None
    predicted_s = plan.predicted.step_time_s
    print(
        f"log(vocabulary) is {math.log(plan.model.vocab):.3f}; the planner predicts {predicted / 2**30:.2f} GiB "
        "of tensors"
    )
    print(
        f"medians: holmes_hpc {flops / holmes_s / 1e12:.4g} TFLOP/s and {holmes_bytes / 2**30:.2f} GiB, "
        f"Megatron-Core's loop {flops / loop_s / 1e12:.4g} TFLOP/s and {loop_bytes / 2**30:.2f} GiB: "
        f"{loop_s / holmes_s:.3f} times its speed; predicted {flops / predicted_s / 1e12:.4g} TFLOP/s"
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "holmes_tflops": flops / holmes_s / 1e12,
                    "loop_tflops": flops / loop_s / 1e12,
                    "speed_ratio": loop_s / holmes_s,
                    "holmes_gib": holmes_bytes / 2**30,
                    "loop_gib": loop_bytes / 2**30,
                    "predicted_gib": predicted / 2**30,
                    "predicted_tflops": flops / predicted_s / 1e12,
                    "pairs": arguments.pairs,
                    "steps": arguments.steps,
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

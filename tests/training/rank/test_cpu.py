"""Training of a two-layer GPTModel on a CPU with Megatron's own DDP, distributed optimizer and overlap."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from holmes_hpc.training.rank import compiler, cpu
with compiler.delayed():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

cpu.install()
cpu.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, bias_dropout_fusion=False,
                           bias_activation_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.1)
model = GPTModel(config, get_gpt_layer_local_spec(), 256, 32, position_embedding_type="rope")
model = DistributedDataParallel(config, DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(
    lr=1e-2, use_distributed_optimizer=True, overlap_param_gather=True), [model])
tokens = torch.randint(0, 256, (2, 17), device="cuda")
assert tokens.device.type == "cpu" and tokens.cuda() is tokens and tokens.to("cuda:0").device.type == "cpu"
for step in range(8):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens[:, :-1], torch.arange(16)[None].expand(2, 16), None, labels=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    print(float(loss))
loaded = [name for name in sys.modules if name.startswith("torch._dynamo.")]
assert not loaded, loaded
import torch._dynamo.external_utils
assert torch._dynamo.is_compiling() is False and "torch._dynamo.eval_frame" in sys.modules
"""


@pytest.mark.integration
def test_a_model_trains_on_a_cpu() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    losses = [float(line) for line in ended.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 logs
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert "CPU RNG state changed" not in ended.stderr


@pytest.mark.integration
def test_a_rank_without_a_gpu_imports_megatron_without_loading_the_compiler() -> None:
    """Afterwards torch.compile is restored."""
    script = (
        "import sys, torch; before = torch.compile; from holmes_hpc.training.rank import compiler\n"
        "with compiler.delayed():\n    import holmes_hpc.training.loop\n"
        "assert torch.compile is before\n"
        "print(torch.cuda.is_available(), 'torch._inductor.compile_fx' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    cuda, compiler = ended.stdout.split()
    assert cuda == compiler


def test_a_rank_uses_the_configured_threads_or_its_share_of_the_cores() -> None:
    from holmes_hpc.training.rank.cpu import thread_count

    assert thread_count({}, 4, 16) == 4 and thread_count({}, 4, 2) == 1
    assert thread_count({"SLURM_CPUS_PER_TASK": "3"}, 4, 16) == 3
    assert thread_count({"OMP_NUM_THREADS": "2", "SLURM_CPUS_PER_TASK": "3"}, 1, 16) == 2
    assert thread_count({"OMP_NUM_THREADS": "many"}, 1, 16) == 16

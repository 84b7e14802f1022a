"""Experts of a layer: their products together, and the functions in which ranks wait for each other."""

from __future__ import annotations

import inspect
from pathlib import Path

import one_process
import pytest
from megatron.core.transformer.moe import token_dispatcher

from holmes_hpc.training.model import experts

SCRIPT = """
import sys
from dataclasses import replace

import torch
from holmes_hpc.training.rank import cpu

cpu.install()
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import spawn
from holmes_hpc.config.model import Experts
from holmes_hpc.training.model import experts, gpt

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=True)
model_parallel_cuda_manual_seed(3)
torch.manual_seed(3)
model = replace(spawn.MODEL, layers=1, experts=Experts(4, top_k=2, ffn=48))

def results(module, forward):
    counts = torch.tensor([3, 0, 5, 8])  # the second expert has no tokens
    tokens = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    weights = torch.rand(16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    module.zero_grad()
    output, bias = forward(tokens, counts, weights)
    assert bias is None
    output.float().square().sum().backward()
    return [output, tokens.grad, weights.grad, *(p.grad for p in module.parameters() if p.grad is not None)]

for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for swiglu, fused in ((False, False), (True, False), (True, True)):
        plan = spawn.plan(model=replace(model, swiglu=swiglu))
        config = gpt.transformer_config(plan, dtype, cuda=False)
        config.bias_activation_fusion = fused
        (chunk,) = gpt.build(plan, config, 5, torch.device("cpu"))
        (module,) = (m for m in chunk.modules() if isinstance(m, experts.SequentialMLP))
        expected = results(module, module)
        idle = module.local_experts[1]
        experts.group_products([chunk], config)
        is_grouped = "forward" in vars(module)
        assert is_grouped == (dtype == torch.bfloat16)
        grouped = results(module, module if is_grouped else lambda *passed: experts._all_experts(module, *passed))
        assert not any(p.grad.any() for p in idle.parameters())
        grouped = [*grouped[:3], *(p.grad for p in module.parameters() if p.grad.any())]
        expected = [tensor for tensor in expected if tensor.any()]
        assert len(expected) == len(grouped) == 3 + 2 * 3
        for one_by_one, together in zip(expected, grouped):
            torch.testing.assert_close(together, one_by_one, rtol=limit, atol=limit * float(one_by_one.abs().max()))
print("equal")
"""


@pytest.mark.integration
def test_products_together_equal_one_expert_after_the_other(tmp_path: Path) -> None:
    assert one_process.last_line(SCRIPT, tmp_path) == "equal"


def test_all_exchanges_of_the_dispatcher_are_timed() -> None:
    """In a forward pass, ranks first wait for each other's numbers of tokens, or their map."""
    experts.prepare_dispatchers()
    gather, scatter = (f"{name}_sequence_parallel_region" for name in ("gather_from", "reduce_scatter_to"))
    names = vars(token_dispatcher)
    all_to_all, all_gather = (names[f"MoE{name}TokenDispatcher"] for name in ("AlltoAll", "AllGather"))
    assert f"{gather}(" in inspect.getsource(all_to_all.preprocess)
    assert f"{gather}(" in inspect.getsource(all_gather.token_dispatch)
    assert f"{scatter}(" in inspect.getsource(all_gather.token_combine)
    for name, exchange in ((gather, experts._Gather), (scatter, experts._Scatter)):
        assert names[name].__globals__ is vars(experts)  # replaced by one that calls the timed class
        assert {(exchange, "forward"), (exchange, "backward")} <= set(experts.EXCHANGES)

"""The warm-up before a GPU's first step restores the state of the model. These tests run it on a CPU."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import one_process
import pytest

SCRIPT = """
import sys
import torch
from holmes_hpc.training.rank import cpu

cpu.install()
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from dataclasses import replace
from unittest import mock

import spawn
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.training import warm_up
from holmes_hpc.training.metrics.breakdown import Breakdown
from holmes_hpc.training.model import gpt, optimizer
from holmes_hpc.training.model.gpt import generators
from holmes_hpc.training.model.weight_gradients import WeightGradients

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=True)
model_parallel_cuda_manual_seed(3)
device = torch.device("cpu")
plan = spawn.plan(model=replace(spawn.MODEL, dropout=0.1))
config = gpt.transformer_config(plan, torch.float32, cuda=False)
(chunk,) = gpt.build(plan, config, 5, device)
chunk.register_buffer("uses", torch.zeros(1))
chunk.register_forward_pre_hook(lambda module, inputs: print(module.uses.add_(1)))
train = TrainConfig()
with mock.patch.object(parallel_state, "get_data_parallel_world_size", return_value=2):  # so that it overlaps
    models = optimizer.wrap([chunk], config, plan, train)
optimizer.build(models, config, plan, train, Breakdown())
(wrapped,) = models
assert wrapped.ddp_config.overlap_param_gather and wrapped.ddp_config.overlap_grad_reduce

def state():
    states = generators()
    return {"parameters": [p.detach().clone() for p in wrapped.parameters()],
            "gradients": [p.main_grad.clone() for p in wrapped.parameters()], "buffers": [chunk.uses.clone()],
            "random": [states["host"], states["device"], *states["tracker"].values()]}

def equal_parts(a, b):
    return {name: all(map(torch.equal, a[name], b[name])) for name in a}

old_state, hooks = state(), len(wrapped.remove_forward_pre_hook_handles)
gathers = [g.param_gather_dispatched for g in wrapped.bucket_groups]
weights = WeightGradients([chunk], Breakdown())
moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)  # as an experts' backward pass sets it
assert warm_up.connect(ProcessGroupCollection.use_mpu_process_groups(), device) == []  # no group has several ranks
warm_up.local_passes(models, config, plan.batch, device, weights)
assert all(equal_parts(old_state, state()).values()), equal_parts(old_state, state())
assert len(wrapped.remove_forward_pre_hook_handles) == hooks > 0
assert [g.param_gather_dispatched for g in wrapped.bucket_groups] == gathers
assert all(g.is_last_microbatch and not g.per_param_grad_ready_counts for g in wrapped.bucket_groups)
assert all(p.grad is None for p in wrapped.parameters()) and not any(p.main_grad.any() for p in wrapped.parameters())
assert chunk.decoder.input_tensor is None
assert not weights._pending  # products would count as those of the first step
assert moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale is None
print("the state is restored")
"""


@pytest.mark.integration
def test_a_warm_up_restores_weights_gradients_buffers_and_random_states(tmp_path: Path) -> None:
    """The model has dropout and a buffer, and Megatron-Core's DDP overlaps gathers and reductions as in training."""
    assert one_process.last_line(SCRIPT, tmp_path) == "the state is restored"


def test_all_group_names_are_megatrons() -> None:
    """A misspelt name would be skipped silently."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from holmes_hpc.training import warm_up

    known = {field.name for field in fields(ProcessGroupCollection)}
    assert not set(warm_up.GROUPS) - known

"""The warm-up of a GPU before the first step: load kernels, set up communicators and allocate memory.

Each of these operations may wait until the GPU is idle. In a running pipeline that can take long, or never happen (see
planning/schedule/launches.py). On a CPU, the training loop skips the warm-up. CUDA_MODULE_LOADING keeps its default
(lazy since CUDA 12.2), because eager loading would put every kernel of torch on the GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from holmes_hpc.config.model import Batch
from holmes_hpc.planning.schedule.kinds import WeightPass
from holmes_hpc.training.model import experts, gpt
from holmes_hpc.training.model.weight_gradients import WeightGradients

# Megatron-Core's names of the groups whose communicators a step uses; several names may mean one group.
GROUPS = (
    *("tp", "cp", "dp_cp", "intra_dp_cp", "inter_dist_opt", "pp", "embd", "pos_embd", "mp", "intra_dist_opt"),
    *("tp_dp_cp", "ep", "tp_ep", "tp_ep_pp", "expt_dp", "intra_expt_dp"),
)


def connect(groups: ProcessGroupCollection, device: torch.device) -> list[str]:
    """Run an all-reduce in every group of several ranks, one group after the other. Return the groups' names.

    All ranks call this. NCCL sets up a communicator at its first use and blocks its ranks meanwhile. All ranks use the
    same order of groups, so no deadlock is possible. Stage transfers have other groups (pipeline/point_to_point.py).
    """
    names: dict[Any, str] = {}
    for name in GROUPS:
        group = getattr(groups, name, None)
        if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
            names.setdefault(group, name)
    for group in names:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return list(names.values())


def local_passes(
    models: Sequence[Any], config: Any, batch: Batch, device: torch.device, weights: WeightGradients | None = None
) -> None:
    """Run one forward and one backward pass of each model chunk on dummy data. With `weights`, run its weight pass too.

    Gradients are zero afterwards. Random states and buffers get their earlier values back, but fp8 scales do not.
    `models`: chunks wrapped in Megatron-Core's DDP, which gathers no parameters and reduces no gradients during these
    passes; `config`: Megatron-Core's transformer config. All ranks of a tensor-parallel group call it at the same time.
    """
    states, micro_size, length = gpt.generators(), batch.micro_size, batch.sequence_length
    tokens = torch.zeros(micro_size, length, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device).repeat(micro_size, 1)
    for number, wrapped in enumerate(models):
        chunk = gpt.unwrap(wrapped)
        buffers = [(buffer, buffer.clone()) for buffer in wrapped.module.buffers()]
        gathers = wrapped.ddp_config.overlap_param_gather
        if gathers:
            wrapped.disable_forward_pre_hook(param_sync=False)
        hidden = None if chunk.pre_process else gpt.hidden_states(torch.zeros, config, micro_size, length, device)
        chunk.set_input_tensor([hidden])
        with wrapped.no_sync():
            if weights is not None:
                weights.start_backward(0, number)
            output = wrapped(tokens, positions, None, labels=tokens if chunk.post_process else None)
            output.float().sum().backward()
            if weights is not None:
                weights.compute(models, [WeightPass(0, number)], last=False)
        chunk.set_input_tensor([None])
        wrapped.zero_grad_buffer()
        if gathers:
            wrapped.enable_forward_pre_hook()
        with torch.no_grad():
            for buffer, saved_value in buffers:
                buffer.copy_(saved_value)
    experts.forget_loss_scale()
    gpt.set_generators(states)

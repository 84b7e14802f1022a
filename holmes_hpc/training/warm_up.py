"""What a GPU does for the first time is done before the first step: loading kernels, setting up communicators, taking
memory. Each of them may wait until the GPU is idle, which in a pipeline that is under way takes long, and is not to be
relied on (planning/schedule/launches.py). On a CPU there is nothing of the kind, and the loop leaves it out.

CUDA_MODULE_LOADING stays as it is (lazy since CUDA 12.2): eager loading would put every kernel of torch on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from holmes_hpc.config.model import Batch
from holmes_hpc.training.model import gpt
from holmes_hpc.training.model.gpt import generators, set_generators

# Of Megatron-Core's groups those whose communicators a step uses; several names may mean one group.
USED = ("tp", "dp_cp", "intra_dp_cp", "inter_dist_opt", "pp", "embd", "pos_embd", "mp", "intra_dist_opt", "tp_dp_cp")


def connect(groups: ProcessGroupCollection, device: torch.device) -> list[str]:
    """Sum up one number in every group of more than one rank, one after the other; their names come back. All ranks
    call it. NCCL sets up a communicator at its first use and holds up its ranks until it has; the groups come in one
    order on all ranks, so no two ranks wait for each other. (Edges are connected where they are made.)"""
    found: dict[Any, str] = {}
    for name in USED:
        group = getattr(groups, name, None)
        if isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1:
            found.setdefault(group, name)
    for group in found:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return list(found.values())


def local_passes(models: Sequence[Any], config: Any, batch: Batch, device: torch.device) -> None:
    """One forward and one backward pass of each model chunk, on made-up data. No gradient, random number or buffer is
    other than before, but for the scales that fp8 goes by. `models`: under Megatron-Core's DDP, which neither gathers
    nor reduces here; ranks of a
    tensor-parallel group call it at the same time."""
    states, micro_size, sequence_length = generators(), batch.micro_size, batch.sequence_length
    tokens = torch.zeros(micro_size, sequence_length, dtype=torch.int64, device=device)
    positions = torch.arange(sequence_length, device=device).repeat(micro_size, 1)
    length = sequence_length // (
        parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    )
    for wrapped in models:
        chunk = gpt.inner(wrapped)
        buffers = [(buffer, buffer.clone()) for buffer in wrapped.module.buffers()]
        gathers = wrapped.ddp_config.overlap_param_gather
        if gathers:
            wrapped.disable_forward_pre_hook(param_sync=False)
        given = (
            None
            if chunk.pre_process
            else torch.zeros(
                length, micro_size, config.hidden_size, dtype=config.params_dtype, device=device, requires_grad=True
            )
        )
        chunk.set_input_tensor([given])
        with wrapped.no_sync():
            output = wrapped(tokens, positions, None, labels=tokens if chunk.post_process else None)
            output.float().sum().backward()
        chunk.set_input_tensor([None])
        wrapped.zero_grad_buffer()
        if gathers:
            wrapped.enable_forward_pre_hook()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    set_generators(states)

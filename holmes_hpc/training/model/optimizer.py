"""Data parallelism and the optimizer: Megatron-Core's DDP and (distributed) Adam, or Muon, set up as the plan says."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, RunFailed
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.schema import refuse
from holmes_hpc.training.metrics.breakdown import Breakdown
from holmes_hpc.training.model import gpt, megatron_versions

GRADIENT_BYTES = 4  # gradients are summed in fp32


def groups_for_ddp() -> ProcessGroupCollection:
    """Megatron's groups, but with a pipeline of one: its DDP cuts gradients into buckets on the first stage only, since
    later stages have time in the bubble; here a later stage may be the one with the slow network."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = parallel_state.get_context_parallel_group()  # this rank alone
    return groups


def wrap(chunks: Sequence[Any], config: Any, plan: Plan, train: TrainConfig) -> list[DistributedDataParallel]:
    """The model chunks under Megatron-Core's DDP, buckets of `plan.bucket_bytes`."""
    p = plan.parallel
    # Megatron-Core overlaps several instances by CUDA streams: on a CPU each bucket would hold up the backward pass
    can_overlap = p.takes_turns and (p.optimizer_instances == 1 or next(chunks[0].parameters()).is_cuda)
    overlap = train.overlap_grad_reduce and can_overlap
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=train.overlap_param_gather and p.distributed_optimizer and overlap,
        use_distributed_optimizer=p.distributed_optimizer,
        num_distributed_optimizer_instances=p.optimizer_instances,
        bucket_size=max(1, plan.bucket_bytes // GRADIENT_BYTES),
        check_for_nan_in_grad=False,
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        inner = Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk
        # Megatron's own default for interleaved stages: later chunks reduce under the first one's computing
        made = DistributedDataParallel(
            _summing(config) if plan.is_per_stage else config,
            ddp,
            inner,
            disable_bucketing=index > 0,
            pg_collection=groups_for_ddp(),
        )
        made.config = config
        wrapped.append(made)
    return wrapped


def _summing(config: Any) -> Any:
    """For DDP alone: gradients are summed over a stage's replicas, not averaged, for each loss is divided by all
    micro-batches of the step, and no two stages need have the same number of replicas."""
    own = copy.copy(config)
    own.calculate_per_token_loss = True
    return own


def build(
    models: list[DistributedDataParallel],
    config: Any,
    plan: Plan,
    train: TrainConfig,
    breakdown: Breakdown,
    tied_group: Any = None,
) -> Any:
    """Adam with decoupled weight decay, sharded over the data-parallel ranks where the plan says so, or Muon (whose
    packages have been checked to be there); `config` learns what the schedules need of it. `tied_group`: of
    :class:`Groups`, where stages have unequal widths."""
    ddp = models[0].ddp_config
    if train.optimizer == "muon" and plan.parallel.distributed_optimizer:
        raise ConfigError(
            "the plan shares the optimizer out, as Megatron-Core's Muon cannot be",
            where="train.optimizer",
            hint="plan with plan.distributed_optimizer=false",
        )
    # whole matrices are made orthogonal, whatever TP cuts them into: each part by itself would be another optimizer; by
    # products in the weights' own type, where Megatron-Core's default is bf16
    muon: dict[str, Any] = (
        {}
        if train.optimizer != "muon"
        else {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "medium" if config.bf16 else "highest"}
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **{name: getattr(train, name) for name in ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad")},
            adam_beta1=train.beta1,
            adam_beta2=train.beta2,
            adam_eps=train.eps,
            **{name: getattr(config, name) for name in ("bf16", "fp16", "params_dtype")},
            use_distributed_optimizer=plan.parallel.distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
            timers=breakdown,
            **muon,
        ),
        list(models),
    )
    config.finalize_model_grads_func = (
        partial(finalize_with_tied, group=tied_group) if plan.is_per_stage else finalize_model_grads
    )
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [m.no_sync for m in models] if ddp.overlap_grad_reduce else None
    config.no_sync_func = no_sync[0] if no_sync and len(models) == 1 else no_sync
    return optimizer


def set_options(optimizer: Any, train: TrainConfig, rate: float) -> None:
    """Adam's numbers for the next step: `train`'s own, also where a checkpoint brought others along. Norms and biases
    do not decay (Megatron's wd_mult, which its own scheduler applies)."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = (train.beta1, train.beta2), train.eps


def check_numbers(optimizer: Any, step: int, losses: Sequence[float], updated: bool, norm: float | None) -> None:
    """Raise RunFailed when a step's numbers are no numbers. In fp16 a step may be skipped (not `updated`) because its
    gradients overflowed, which halves the loss scale; not at the least scale, where nothing is left to halve."""
    hint = "lower train.lr, or resume from an earlier checkpoint with other data"
    loss = next((loss for loss in losses if not math.isfinite(loss)), None)
    refuse(
        f"step {step}",
        (updated and norm is not None and not math.isfinite(norm), f"the gradient norm is {norm}", hint),
        (not updated and _least_scale(optimizer), "the gradients are no numbers at the least loss scale", hint),
        (loss is not None, f"the loss is {loss}", hint),
        error=RunFailed,
    )


def _least_scale(optimizer: Any) -> bool:
    scalers = [getattr(inner, "grad_scaler", None) for inner in megatron_versions.inner_optimizers(optimizer)]
    return all(s is None or float(s.scale) <= float(getattr(s, "min_scale", s.scale)) for s in scalers)


def watch_waits(optimizer: Any, models: Sequence[DistributedDataParallel], breakdown: Breakdown) -> None:
    """Tell `breakdown` of the waits that Megatron has no timer for: the parameter gathers before a forward pass, and
    the gradient norm, an all-reduce over all stages, in which a stage that is early waits for the others."""
    for inner in megatron_versions.inner_optimizers(optimizer):
        breakdown.wrap(inner, "get_grad_norm", "pipeline_wait_s")
    for model in models:
        for group in model.bucket_groups:
            if model.ddp_config.overlap_param_gather:
                breakdown.wrap(group, "finish_param_sync", "param_sync_s")


def finalize_with_tied(
    models: list[Any], num_tokens: Any = None, *, group: dist.ProcessGroup | None, **more: Any
) -> None:
    """Megatron-Core's ``finalize_model_grads``, and then the tied embedding's gradient: the sum of both stages'.

    For a first and a last stage of unequal widths. `group`: all their ranks, of which this rank may be none.
    Megatron-Core sums over pairs of ranks that hold the same part of the embedding. Ranks of unequal stages hold parts
    of other sizes, so each puts what it holds of its stage's sum into the whole matrix, and all sum those up.
    """
    finalize_model_grads(models, num_tokens, **more)
    if group is None:
        return
    wrapped = models[0] if gpt.inner(models[0]).pre_process else models[-1]
    weight = gpt.inner(wrapped).shared_embedding_or_output_weight()
    gradient = weight.main_grad.view(-1)
    parts, part = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    whole = torch.zeros(parts, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    first, end = reduced_here(wrapped, weight)
    whole[part, first:end] = gradient[first:end]
    dist.all_reduce(whole, group=group)
    gradient.copy_(whole[part])


def reduced_here(wrapped: Any, weight: torch.nn.Parameter) -> tuple[int, int]:
    """Which of a parameter's elements the data-parallel reduction (a reduce-scatter of its bucket) left on this rank:
    from the first to before the second; none where they are equal."""
    buffer = next(b for b in wrapped.buffers if weight in b.param_index_map)
    start, end, number = buffer.param_index_map[weight]
    bucket = buffer.buckets[number]
    rank, size = dist.get_rank(buffer.data_parallel_group), dist.get_world_size(buffer.data_parallel_group)
    share = bucket.grad_data.numel() // size
    low = bucket.offset + rank * share
    held = max(start, low), min(end, low + share)
    return (held[0] - start, held[1] - start) if held[0] < held[1] else (0, 0)

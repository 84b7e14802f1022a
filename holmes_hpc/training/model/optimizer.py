"""Data parallelism and the optimizer of a plan: Megatron-Core's DDP and (distributed) Adam, or Muon."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads, param_and_grad_buffer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, RunFailed
from holmes_hpc.planning.cost.costs import BYTES
from holmes_hpc.planning.cost.network_figures import collectives
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.metrics.breakdown import Breakdown
from holmes_hpc.training.model import experts, gpt, megatron_versions
from holmes_hpc.training.network.per_stage_groups import pipeline_stub
from holmes_hpc.training.network.reduce_scatter import reduce_scatter


def wrap(chunks: Sequence[Any], config: Any, plan: Plan, train: TrainConfig) -> list[DDP]:
    """Wrap the model chunks in Megatron-Core's DDP with buckets of `plan.bucket_bytes`."""
    p, grad_dtype = plan.parallel, plan.grad_dtype or "fp32"
    place, hint = "train.grad_dtype", "plan again with this train.grad_dtype, or remove it"
    problem = f"it is {train.grad_dtype}, but the plan sums gradients in {grad_dtype}"
    ConfigError.refuse(place, (train.grad_dtype not in (None, grad_dtype), problem, hint))
    problem = f"gradients in {grad_dtype} need weights in it, which are in {train.dtype}"
    ConfigError.refuse(place, (grad_dtype not in ("fp32", train.dtype), problem, hint))
    # With several optimizer instances, Megatron-Core overlaps reductions only on CUDA streams; on CPUs they block.
    can_overlap = p.can_overlap and (p.optimizer_instances == 1 or next(chunks[0].parameters()).is_cuda)
    # One replica has nothing to reduce, and the hooks on every parameter would delay its kernels.
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    overlap = train.overlap_grad_reduce and can_overlap and replicas > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_dtype == "fp32",
        overlap_grad_reduce=overlap,
        overlap_param_gather=train.overlap_param_gather and p.distributed_optimizer and overlap,
        align_param_gather=plan.transport_mode != "single",  # else as in plain Megatron-LM: see start_gathers()
        use_distributed_optimizer=p.distributed_optimizer,
        num_distributed_optimizer_instances=p.optimizer_instances,
        reduce_scatter_with_fp32_accumulation=reduces_by_all_to_all(plan),
        bucket_size=max(1, plan.bucket_bytes // BYTES[grad_dtype]),
        check_for_nan_in_grad=False,
    )
    if ddp.reduce_scatter_with_fp32_accumulation:
        param_and_grad_buffer.reduce_scatter_with_fp32_accumulation = reduce_scatter
    model_config, groups = config, ProcessGroupCollection.use_mpu_process_groups()
    if plan.is_per_stage:  # sum over replicas, whose number differs: a loss is already divided by the micro-batches
        model_config = copy.copy(config)
        model_config.calculate_per_token_loss = True
    # By default, DDP splits gradients into buckets only on the first stage, because later stages can reduce gradients
    # in the pipeline bubble. In a heterogeneous pipeline, however, a later stage may have the slow network.
    groups.pp = pipeline_stub(0, 1)
    wrapped = []
    for index, chunk in enumerate(chunks):
        inner = Float16Module(config, chunk) if config.fp16 or config.bf16 else chunk
        # as by default in Megatron for interleaved stages, later chunks reduce while the first one computes
        wrapper = DDP(model_config, ddp, inner, disable_bucketing=index > 0, pg_collection=groups)
        wrapper.config = config
        for group in experts.bucket_groups(wrapper):  # in later versions, a group would wait for the one before
            group.previous_grad_reduce_bucket_group = None
        wrapped.append(wrapper)
    return wrapped


def reduces_by_all_to_all(plan: Plan) -> bool:
    """Return whether this rank's gradients are reduced by an all-to-all, whose receivers sum in the order of ranks."""
    ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    places, p = [plan.places[rank] for rank in ranks], plan.parallel
    library = collectives(plan.site.pool(places[0].pool).gpu)
    return p.distributed_optimizer and library.is_all_to_all(len(ranks), len({*places}), p.optimizer_instances)


def build(
    models: list[DDP], config: Any, plan: Plan, train: TrainConfig, breakdown: Breakdown, tied_group: Any = None
) -> Any:
    """Build the optimizer, and set the hooks in `config` that the schedules call. It is Adam with decoupled weight
    decay, which a plan may shard over the data-parallel ranks, or Muon, whose packages must be installed. `tied_group`:
    `embedding_group` of :class:`Groups`, for per-stage TP/DP."""
    ddp = models[0].ddp_config
    is_sharded_muon = train.optimizer == "muon" and plan.parallel.distributed_optimizer
    problem = "the plan shards the optimizer, which Megatron-Core's Muon does not support"
    ConfigError.refuse("train.optimizer", (is_sharded_muon, problem, "plan with plan.distributed_optimizer=false"))
    # Muon orthogonalizes full matrices. On each TP part by itself, it would be a different optimizer. Its matrix
    # multiplications use the type of the weights; Megatron-Core's default is bf16.
    muon: dict[str, Any] = {}
    if train.optimizer == "muon":
        muon = {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "medium" if config.bf16 else "highest"}
    options = OptimizerConfig(
        **{name: getattr(train, name) for name in ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad")},
        adam_beta1=train.beta1,
        adam_beta2=train.beta2,
        adam_eps=train.eps,
        **{name: getattr(config, name) for name in ("bf16", "fp16", "params_dtype")},
        use_distributed_optimizer=plan.parallel.distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
        timers=breakdown,
        **muon,
    )
    optimizer = get_megatron_optimizer(options, list(models))
    experts.gather_once(megatron_versions.distributed(optimizer))
    finalize = partial(finalize_with_tied, group=tied_group) if plan.is_per_stage else finalize_model_grads
    config.finalize_model_grads_func = finalize
    config.grad_scale_func = optimizer.scale_loss
    no_sync = [m.no_sync for m in models] if ddp.overlap_grad_reduce else None
    config.no_sync_func = no_sync[0] if no_sync and len(models) == 1 else no_sync
    return optimizer


def set_options(optimizer: Any, train: TrainConfig, rate: float) -> None:
    """Set Adam's options for the next step from `train`, even if a checkpoint contains different ones.
    Norms and biases do not decay, because Megatron-Core sets their `wd_mult` to 0."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = train.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = (train.beta1, train.beta2), train.eps


def step(optimizer: Any) -> tuple[bool, float | None]:
    """Update the parameters. Return (whether they changed, the gradient norm)."""
    updated, norm, _ = optimizer.step()
    return updated, None if norm is None else float(norm)  # some Transformer Engine versions return a tensor


def start_gathers(models: Sequence[DDP]) -> None:
    """Start all gathers of sharded parameters, in the order in which the next step needs them.
    So no gather has to wait until a stage receives its first micro-batch. Without this call, and in plain Megatron-LM,
    each stage's first forward pass starts the gathers. Forward passes wait for the parameters that they use."""
    for model in models:
        if model.ddp_config.overlap_param_gather and model.ddp_config.align_param_gather:
            for group in reversed(experts.bucket_groups(model)):  # the first bucket contains the last layers
                group.start_param_sync()


def use_main_weights(optimizer: Any, models: Sequence[DDP]) -> None:
    """Use the optimizer's fp32 weights in the model, after they were changed without an update."""
    for inner in megatron_versions.inner_optimizers(optimizer):
        if hasattr(inner, "_copy_main_params_to_model_params"):
            inner._copy_main_params_to_model_params()
    for model in models:
        if model.ddp_config.use_distributed_optimizer:
            model.start_param_sync(force_sync=True)


def check_numbers(optimizer: Any, step: int, losses: Sequence[float], updated: bool, norm: float | None) -> None:
    """Raise RunFailed if a step's loss or gradient norm is not finite. In fp16 a step is skipped (not `updated`) if its
    gradients overflow, and the loss scale is halved. At the least loss scale an overflow ends the run."""
    hint = "lower train.lr, or resume from an earlier checkpoint with other data"
    loss = next((loss for loss in losses if not math.isfinite(loss)), None)
    RunFailed.refuse(
        f"step {step}",
        (updated and norm is not None and not math.isfinite(norm), f"the gradient norm is {norm}", hint),
        (not updated and _is_scale_minimal(optimizer), "the gradients are not finite at the least loss scale", hint),
        (loss is not None, f"the loss is {loss}", hint),
    )


def _is_scale_minimal(optimizer: Any) -> bool:
    scalers = [getattr(inner, "grad_scaler", None) for inner in megatron_versions.inner_optimizers(optimizer)]
    return all(s is None or float(s.scale) <= float(getattr(s, "min_scale", s.scale)) for s in scalers)


def time_waits(optimizer: Any, models: Sequence[DDP], breakdown: Breakdown) -> None:
    """Make `breakdown` measure the waits for which Megatron has no timer. These are the waits for parameter gathers
    before a forward pass, and the wait in the gradient norm. The norm is an all-reduce over all stages, in which a
    stage that finishes early waits for the other stages."""
    for inner in megatron_versions.inner_optimizers(optimizer):
        breakdown.wrap(inner, "get_grad_norm", "pipeline_wait_s")
    for model in models:
        for group in experts.bucket_groups(model):
            if model.ddp_config.overlap_param_gather:
                group.finish_param_sync = partial(_finish_param_sync, group, group.finish_param_sync, breakdown)


def _finish_param_sync(group: Any, finish: Callable[..., None], breakdown: Breakdown, **options: Any) -> None:
    """Wait for a bucket's parameters if their gather is not finished, and measure the wait. Calls after that return at
    once without a measurement, which would delay a GPU: every module calls this function in every forward pass."""
    if group.param_gather_handle is None and group.param_gather_dispatched:
        return
    with breakdown.part("param_sync_s"):
        finish(**options)


def finalize_with_tied(models: list[Any], *tokens: Any, group: dist.ProcessGroup | None, **options: Any) -> None:
    """Run Megatron-Core's ``finalize_model_grads``, then sum the tied embedding's gradient over both its stages. It is
    used with per-stage TP/DP. `group`: all ranks of the first and the last stage; None on other ranks. Megatron-Core
    sums over pairs of ranks that hold the same part of the embedding. With different TP the parts differ in size. Each
    rank therefore writes the part that it holds into a full matrix, and an all-reduce sums the matrices."""
    finalize_model_grads(models, *tokens, **options)
    if group is None:
        return
    wrapped = models[0] if gpt.unwrap(models[0]).pre_process else models[-1]
    weight = gpt.unwrap(wrapped).shared_embedding_or_output_weight()
    gradient = weight.main_grad.view(-1)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    full_gradient = torch.zeros(tp_size, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    first, end = reduced_range(wrapped, weight)  # after the reduce-scatter, this rank holds only this range
    full_gradient[tp_rank, first:end] = gradient[first:end]
    dist.all_reduce(full_gradient, group=group)
    gradient.copy_(full_gradient[tp_rank])


def reduced_range(wrapped: Any, weight: torch.nn.Parameter) -> tuple[int, int]:
    """Return the range (first, end) of a parameter's elements that this rank holds after the data-parallel reduction.
    The reduction is a reduce-scatter of the parameter's bucket. The range is empty if first equals end."""
    buffer = next(b for b in wrapped.buffers if weight in b.param_index_map)
    start, end, number = buffer.param_index_map[weight]
    bucket = buffer.buckets[number]
    rank, size = dist.get_rank(buffer.data_parallel_group), dist.get_world_size(buffer.data_parallel_group)
    shard_size = bucket.grad_data.numel() // size
    shard_start = bucket.offset + rank * shard_size
    first, last = max(start, shard_start), min(end, shard_start + shard_size)
    return (first - start, last - start) if first < last else (0, 0)

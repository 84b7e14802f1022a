"""A rank's part of the model: its chunks, the emulation of their compute, data parallelism and the optimizer."""

from typing import Any

from megatron.core import parallel_state

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.training.metrics.breakdown import Breakdown
from holmes_hpc.training.model import attention, emulated_layers, experts, gpt, optimizer
from holmes_hpc.training.model.weight_gradients import WeightGradients
from holmes_hpc.training.pipeline import eager_1f1b
from holmes_hpc.training.session import Session


def build(
    session: Session, train: TrainConfig, breakdown: Breakdown, document_end: int | None, seed: int | None
) -> tuple[Any, list[Any], WeightGradients | None, list[Any], Any]:
    """Build the model and the optimizer of this rank, timed by `breakdown`. Return Megatron-Core's configuration, the
    chunks without DDP, split weight passes (None if the plan has none), the chunks with DDP, and the optimizer.
    `document_end`: see :func:`document_end`; `seed`: of the initial weights, None if a checkpoint's will be loaded."""
    plan, stage = session.plan, parallel_state.get_pipeline_model_parallel_rank()
    dtype = gpt.dtype_of(train.dtype, session.cuda)
    config = gpt.transformer_config(plan, dtype, cuda=session.cuda, fp8=train.fp8, timers=breakdown, stage=stage)
    attention.refuse_unfused(plan, session.launch.rank, session.device, dtype, document_end is not None)
    attention.refuse_unsupported(document_end, session.cuda, config)
    chunks = gpt.build(plan, config, seed, session.device)
    weights = eager_1f1b.weight_gradients(plan, chunks, breakdown)
    if train.pace_layer_ms:
        places = [(p.pool, n.node) for p, n in zip(plan.places, session.node_of_rank, strict=True)]
        pools = [pool.name for pool in plan.site.pools]
        factor = emulated_layers.factor(train.pace_factors or {}, places, session.launch.rank, pools)
        layers = (chunk.decoder.layers for chunk in chunks)
        emulated_layers.emulate(layers, factor * train.pace_layer_ms, breakdown, weights)
    models = optimizer.wrap(chunks, config, plan, train)
    built_optimizer = optimizer.build(models, config, plan, train, breakdown, session.groups.embedding_group)
    optimizer.time_waits(built_optimizer, models, breakdown)
    for owner, function in experts.EXCHANGES if plan.model.experts.count else ():
        breakdown.wrap(owner, function, "expert_s")
    return config, chunks, weights, models, built_optimizer

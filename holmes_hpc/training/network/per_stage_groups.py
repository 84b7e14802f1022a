"""Megatron-Core's parallel state for per-stage TP/DP, where the ranks form no uniform grid.

The groups inside a stage (tensor parallel, data parallel and their combinations) are created as usual. There are no
pipeline groups, because a rank exchanges micro-batches with several replicas of the next stage. Megatron-Core uses a
pipeline's group only to find the stage, so a stub replaces it. The gradient norm is summed over all ranks, and counts
each part of a parameter once. The tied embedding has its own group (model/optimizer.py).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state

from holmes_hpc.planning.plan.parallel import Parallel


def pipeline_stub(stage: int, stages: int) -> Any:
    """Return a stand-in for a pipeline's process group, with only the methods rank (the stage) and size."""
    return SimpleNamespace(rank=lambda: stage, size=lambda: stages)


class _PerStageRanks:
    """A stand-in for Megatron-Core's RankGenerator, which returns the ranks of all groups of a kind.
    For kinds that `_ranks` lacks (in Megatron-Core 0.18, those for sharded weights), each rank is a group by itself."""

    def __init__(self, parallel: Parallel) -> None:
        grid = [ranks.reshape(s.dp, s.cp, s.tp) for ranks, s in zip(parallel.grid(), parallel.stages, strict=True)]

        def blocks(*axes: int) -> list[list[int]]:
            """Return the ranks along `axes` of each stage: 0: replicas, 1: ranks that share a sequence, 2: TP ranks."""
            others, sizes = [axis for axis in range(3) if axis not in axes], [[r.shape[a] for a in axes] for r in grid]
            rows = (r.transpose(*others, *axes).reshape(-1, math.prod(s)) for r, s in zip(grid, sizes, strict=True))
            return [row for stage in rows for row in stage.tolist()]

        self._ranks = {
            **dict.fromkeys(("tp", "tp-ep"), blocks(2)),
            **{"cp": blocks(1), "tp-cp": blocks(1, 2), "dp": blocks(0), "dp-cp": blocks(0, 1)},
            **{"tp-dp": blocks(0, 2), "tp-dp-cp": blocks(0, 1, 2)},
        }
        self._single = [[rank] for rank in range(parallel.world_size)]

    def get_ranks(self, token: str, *_: Any) -> list[list[int]]:
        kind = "-".join(axis for axis in token.split("-") if axis != "gtp_remat")
        return self._ranks.get(kind, self._single)

    def get_gtp_ranks(self, _: int) -> list[list[int]]:
        return self._single


@contextmanager
def per_stage_ranks(parallel: Parallel, rank: int) -> Iterator[None]:
    """Make Megatron-Core create its groups from `parallel` in the ``with`` block, whatever sizes are passed to it.
    After the block, set the pipeline stage of `rank`."""
    original = parallel_state.RankGenerator
    parallel_state.RankGenerator = lambda **_: _PerStageRanks(parallel)
    try:
        yield
    finally:
        parallel_state.RankGenerator = original
    stage, *_ = parallel.coordinates(rank)
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(parallel.pp)
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = pipeline_stub(stage, parallel.pp)

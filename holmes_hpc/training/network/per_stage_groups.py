"""Megatron-Core's parallel state for per-stage TP/DP, where the ranks form no uniform grid.

The groups inside a stage (tensor parallel, data parallel and their combinations) are created as usual. There are no
pipeline groups, because a rank exchanges micro-batches with several replicas of the next stage. Megatron-Core uses a
pipeline's group only to find the stage, so a stub replaces it. The gradient norm is summed over all ranks, and counts
each part of a parameter once. The tied embedding has its own group (model/optimizer.py).
"""

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
        grid = parallel.grid()
        rows = [row for stage in grid for row in stage.tolist()]
        columns = [column for stage in grid for column in stage.T.tolist()]
        self._ranks = {
            **dict.fromkeys(("tp", "tp-cp", "tp-ep"), rows),
            **dict.fromkeys(("dp", "dp-cp"), columns),
            **dict.fromkeys(("tp-dp", "tp-dp-cp"), parallel.stage_ranks),
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

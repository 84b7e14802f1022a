"""Megatron-Core's parallel state for stages of unequal widths, which form no grid of ranks.

Its groups inside a stage (tensor parallel, data parallel and their combinations) are made as ever. Of pipelines it has
none: a rank is in the pipelines of all the micro-batches it computes, and where Megatron-Core asks a pipeline's group,
it asks for nothing but the stage. The gradient norm goes over all ranks, of which each parameter's parts, that
the optimizers hold, are counted once; the tied embedding has a group of its own (model/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from holmes_hpc.planning.plan.parallel import Parallel


@dataclass(frozen=True)
class StagePlace:
    """Stands where Megatron-Core has the group of a rank's pipeline: it is told the stage and how many there are."""

    stage: int
    stages: int

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.stages


class _Ranks:
    """Stands in for Megatron-Core's RankGenerator: the ranks of all groups of a kind. Weights cut over replicas, an
    axis from 0.18 on, it has none of: a rank is alone on it."""

    def __init__(self, parallel: Parallel) -> None:
        grid = parallel.grid()
        rows = [row for stage in grid for row in stage.tolist()]
        columns = [column for stage in grid for column in stage.T.tolist()]
        self._inside = {
            **dict.fromkeys(("tp", "tp-cp", "tp-ep"), rows),
            **dict.fromkeys(("dp", "dp-cp"), columns),
            **dict.fromkeys(("tp-dp", "tp-dp-cp"), parallel.stage_ranks),
        }
        self._alone = [[rank] for rank in range(parallel.world_size)]

    def get_ranks(self, token: str, *_: Any) -> list[list[int]]:
        kind = "-".join(axis for axis in token.split("-") if axis != "gtp_remat")
        return self._inside.get(kind, self._alone)

    def get_gtp_ranks(self, _: int) -> list[list[int]]:
        return self._alone


@contextmanager
def stage_by_stage(parallel: Parallel, rank: int) -> Iterator[dict[str, int]]:
    """While Megatron-Core's parallel state is made: its groups are those of `parallel`. The sizes it is to be called
    with come from here: one grid of all ranks that it does not look at. Afterwards it knows the stage of `rank`."""
    original = parallel_state.RankGenerator
    parallel_state.RankGenerator = lambda **_: _Ranks(parallel)
    try:
        yield {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    finally:
        parallel_state.RankGenerator = original
    stage, *_ = parallel.coordinates(rank)
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(parallel.pp)
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = StagePlace(stage, parallel.pp)

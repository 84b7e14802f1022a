"""The planner's memory against the tensors of real ranks, and the savings of fused attention.

benchmarks/planner_memory.py has more cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gpu
import planner_memory
import pytest
import thorough
from sites import H100, one_fabric, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.memory import CUDA_BYTES
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.cost.software import Software
from holmes_hpc.planning.search.best import best_plan

SEQUENCE = 1024  # long enough for unfused scores to dominate the memory


CASES = {
    "PP 2": planner_memory.Case(
        {"tp": 1, "pp": 2, "dp": 1, "layers_per_stage": [3, 1]},
        {"layers": 4, "max_positions": SEQUENCE},
        {"sequence_length": SEQUENCE, "micro_size": 1, "global_size": 2},
        steps=2,  # the second has the optimizer's state, as all later ones
    ),
    "CP 4": replace(
        planner_memory.CASES["long"], batch={"global_size": 1, "micro_size": 1, "sequence_length": 8 * SEQUENCE}
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(CASES, "PP 2"))
def test_memory_with_fused_attention_is_as_predicted(name: str, tmp_path: Path) -> None:
    plan = CASES[name].plan()
    assert plan.predicted is not None
    measured = planner_memory.measure(plan, tmp_path, CASES[name].steps)
    stages = [predicted for predicted in plan.predicted.memory_bytes_per_gpu for _ in range(plan.parallel.dp)]
    assert measured == pytest.approx(stages, rel=0.08)


def test_gpt_3_6b_fits_only_with_fused_attention() -> None:
    """Check its plan on four nodes of H100 and four of A100."""
    site = replace(two_clusters(4), pools=(one_fabric(H100, nodes=4), two_clusters(4).pools[1]))
    plan = best_plan(
        named("gpt_3_6b"), Batch(768, 4, 2048), site, PlanOptions(recompute="none", unequal="false"), Costs()
    )
    unfused = predict(plan, Costs(software=Software(attention="softmax")))
    assert plan.predicted is not None
    fused_gib, unfused_gib = (max(p.memory_bytes_per_gpu) / 2**30 for p in (plan.predicted, unfused))
    assert fused_gib < 80 < unfused_gib


def test_the_gpu_benchmark_compares_only_tensors() -> None:
    """Exclude the CUDA process's other memory, which torch's allocator does not count."""
    plan = best_plan(named("gpt_3_6b"), Batch(64, 1, 2048), two_clusters(1), PlanOptions(pp=1, tp=1), Costs())
    assert plan.predicted is not None
    assert gpu.tensor_bytes(plan) == max(plan.predicted.memory_bytes_per_gpu) - CUDA_BYTES

"""Compare predictions with published runs that use context parallelism.

    python benchmarks/published_contexts.py

Step times: NVIDIA's Llama 3.1 8B, CP 2 (published/dgxc_llama.csv). TFLOP/s a GPU: Qwen3-235B on 256 H100 at 16k to 128k
tokens, CP 1 to 8 (yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3; experts with forced balance). Their recomputation
is not stated; the prediction assumes none, whose memory would not suffice.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import published_runs

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.software import Software
from holmes_hpc.planning.search.best import fixed_plan

QWEN = replace(named("qwen3_235b_a22b"), max_positions=131072)
LONG = {16384: (1, 295.0), 32768: (2, 335.0), 65536: (4, 368.0), 131072: (8, 389.0)}  # tokens: CP, TFLOP/s a GPU
GPUS = 256


class Row(NamedTuple):
    """A published figure and its prediction."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def llama_rows(fp8: bool) -> list[Row]:
    """Return the step times of Llama 3.1 8B in seconds."""
    runs = [run for run in published_runs.read(["dgxc_llama"]) if run.cp == 2 and run.fp8 == fp8]
    return [Row(f"{run.gpus} GPUs", run.seconds or 1, published_runs.predicted_s(run)) for run in runs]


def long_rows() -> list[Row]:
    """Return the TFLOP/s a GPU of Qwen3-235B, ascending in tokens."""
    gpu = published_runs.gpu("h100-80gb")
    site = Site("published", (Pool("a", NicType.IB, "p", GPUS // 8, 8, 25.0, gpu, rdma_gbps=3200.0),))
    costs, rows = Costs(software=Software(attention="flash3", fused_wgrad=True)), []
    for tokens, (cp, measured) in LONG.items():
        layers = 11, *(12,) * 6, 11
        sizes = {"tp": 4, "pp": 8, "dp": 8 // cp, "cp": cp, "ep": 8, "virtual_stages": 4}
        options = PlanOptions(**sizes, layers_per_stage=layers, sequence_parallel=True)
        plan = fixed_plan(QWEN, Batch(256, 1, tokens), site, options, costs)
        assert plan.predicted is not None
        flops = plan.batch.tokens * token_flops(QWEN, tokens)
        rows.append(Row(f"{tokens} tokens, CP {cp}", measured, flops / plan.predicted.step_time_s / GPUS / 1e12))
    return rows


def token_flops(m: ModelSpec, tokens: int) -> float:
    """Return the FLOPs of a token in a step, as Megatron-LM counts them: half of the scores."""
    attention = 2 * m.hidden * 2 * (m.query_width + m.key_width) + 2 * tokens * m.query_width
    experts = 6 * m.hidden * m.active_width + 2 * m.hidden * m.experts.count
    return 3.0 * (m.layers * (attention + experts) + 2 * m.hidden * m.vocab)


def main() -> None:
    print("| run | published | predicted | error |\n|---|---|---|---|")
    for fp8 in (False, True):
        rows = llama_rows(fp8)
        name = f"Llama 3.1 8B, CP 2, {'FP8' if fp8 else 'BF16'}, {len(rows)} rows"
        measured, predicted = fmean(row.measured for row in rows), fmean(row.predicted for row in rows)
        print(f"| {name} | {measured:.2f} s | {predicted:.2f} s | {fmean(abs(row.error) for row in rows):.1%} |")
    for row in long_rows():
        print(f"| Qwen3-235B, {row.name} | {row.measured:.0f} | {row.predicted:.0f} TFLOP/s | {row.error:+.1%} |")


if __name__ == "__main__":
    main()

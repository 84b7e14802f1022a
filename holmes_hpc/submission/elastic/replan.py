"""The plan for fewer nodes: ``python -m holmes_hpc.submission.elastic.replan RUN_DIR JOB_PLAN PLAN NODES…``.

`JOB_PLAN`: the plan that the job was submitted with; `PLAN`: the file to write; `NODES`: one number for each component
of `JOB_PLAN`. The coordinator runs it beside training (planner.py).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory

SEARCH_S = 30.0  # limit of a search, which then returns the best plan so far
_FREE: dict[str, Any] = dict.fromkeys(  # the user's choices that may not fit fewer nodes
    ("nodes", "gpus_per_node", "pp", "dp", "virtual_stages", "layers_per_stage", "pool_order")
)
_FREE |= dict.fromkeys(("strategy", "schedule", "unequal"), "auto")


def smaller_plan(plan: Plan, config: Configuration, nodes: Sequence[int]) -> Plan:
    """Return the best plan for the model and batch of `plan` on `nodes` of each of its components."""
    parts = [(part, count) for part, count in zip(plan.components, nodes, strict=True) if count]
    pools = [replace(plan.site.pool(part.pool), nodes=count, gpus_per_node=part.gpus_per_node) for part, count in parts]
    site = plan.site.restricted_to(pools)
    edges: dict[str, Any] = {"edge_dtype": plan.edge_dtype, "edge_connections": plan.edge_connections}
    options = replace(config.plan, transport=plan.transport_mode, **edges, **_FREE)
    return best_plan(plan.model, plan.batch, site, options, costs(config, plan), Clock(SEARCH_S))


def main() -> None:
    run_path, job_plan, path, *nodes = sys.argv[1:]
    try:
        config = recorded(RunDirectory(Path(run_path)).config)[0]
        smaller_plan(Plan.read(job_plan), config, [int(count) for count in nodes]).write(path)
    except HolmesError as e:
        log_batch_line(f"no plan in reserve for {' + '.join(nodes)} nodes: {e}")


if __name__ == "__main__":
    main()

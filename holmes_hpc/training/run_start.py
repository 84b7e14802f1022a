"""What rank 0 records and logs when a run starts: hosts, NICs, versions, header factors of the networks, the plan."""

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import counted
from holmes_hpc.training.network import nic_bytes
from holmes_hpc.training.rank.log import log_line
from holmes_hpc.training.session import Session, describe, publish_groups


def record(session: Session, settings: TrainConfig, control: Any, data_text: str) -> dict[str, float]:
    """Measure the header factor of each network: bytes on the wire per byte of payload. All ranks call this.

    Rank 0 writes hosts, NICs, versions, set-up traffic and header factors to run.yaml, and logs them. It returns the
    header factors; other ranks return {}. `control`: a group of all ranks; `data_text`: a description of the data."""
    plan, traffic = session.plan, session.traffic
    publish_groups(session)

    def gather_all(values: tuple[float, ...]) -> nic_bytes.Rows:
        row = torch.tensor(values, dtype=torch.float64)
        rows = row.new_empty(plan.world_size, len(row))
        dist.all_gather(list(rows), row, group=control)
        return rows.numpy()

    setup_rows = gather_all(traffic.take())
    factors = nic_bytes.header_factors(
        plan, session.launch.rank, traffic, partial(session.groups.new, gloo=True), gather_all, session.cuda
    )
    factor_rows = gather_all(traffic.take())
    if session.launch.rank > 0:
        return {}
    setup_bytes = nic_bytes.sum_by_kind(plan, setup_rows + factor_rows)
    session.run.update_run(
        **describe(session),
        pace_layer_ms=settings.pace_layer_ms,
        traffic={
            "setup": setup_bytes,
            "header_factor": round(statistics.fmean(factors.values()), 4) if factors else None,
            "header_factors": {k: round(v, 4) for k, v in factors.items()},
        },
    )
    for kind, factor in factors.items():
        note = " (RDMA: not measured)" if session.cuda and kind != "ethernet" else ""
        log_line(f"{kind}: {factor:.3f} bytes on the wire per byte of payload{note}")
    log_line(data_text)
    log_line(
        f"plan {plan.id}: {plan.strategy_label}, {plan.parallel}, layers {[s.layers for s in plan.stages]}, "
        f"{counted(plan.micro_batches, 'micro-batch')}, {plan.schedule.kind}"
        + (", early optimizer steps" if settings.early_step == "stage" else "")
        + (f"; emulated compute: {settings.pace_layer_ms} ms a layer" if settings.pace_layer_ms else "")
    )
    return factors

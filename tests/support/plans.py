"""Plans for the testbed, and rank functions without torch for tests of submission."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Predicted, Schedule, Stage
from holmes_hpc.records.run import RunDirectory

if TYPE_CHECKING:
    from holmes_hpc.training.network.interfaces import NodeTransports

MODEL = ModelSpec("m", layers=6, hidden=32, heads=4, vocab=256, ffn=64, kv_heads=4)


def site(nodes: int = 4, gres: bool = False) -> Site:
    """Return the default testbed as `fabric` reads it."""
    return Site(
        "holmes",
        (
            Pool("ib-a", NicType.IB, "ib", nodes, 1, 0.05, CPU, 0.4, "nic_ib", gres=gres),
            Pool("roce-a", NicType.ROCE, "roce", nodes, 1, 0.05, CPU, 0.25, "nic_roce", gres=gres),
            Pool("eth-a", NicType.ETHERNET, "eth", 2, 1, 0.05, CPU, None, "nic_ethernet", gres=gres),
        ),
    )


def plan(*fabrics: str, nodes: int = 2, step_time_s: float = 1.0, **changes: Any) -> Plan:
    """Return a plan with one stage per fabric and `nodes` nodes each."""
    plan_site = changes.pop("site", None) or site()
    stage_fabrics = [(plan_site.pool(name), i) for i, name in enumerate(fabrics)]
    dp = nodes * stage_fabrics[0][0].gpus_per_node
    return Plan(
        "pipeline" if len(fabrics) > 1 else "one-fabric",
        MODEL,
        Batch(8, 1, 32),
        Parallel.uniform(pp=len(fabrics), dp=dp),
        "none",
        Schedule("1f1b", tuple(range(len(fabrics), 0, -1))),
        tuple(Component(f.partition, f.constraint, f.name, nodes, f.gpus_per_node, (i,)) for f, i in stage_fabrics),
        tuple(Stage(f.name, 6 // len(fabrics)) for f, _ in stage_fabrics),
        plan_site,
        predicted=Predicted(step_time_s, 1, 1, 1, (1,) * len(fabrics), {}, {}),
        **changes,
    )


def node_transports() -> list[NodeTransports]:
    """Return what ranks 0 to 3 of ``plan("ib-a", "roce-a")`` tell each other about their nodes."""
    from holmes_hpc.training.network.interfaces import NodeTransports  # loads torch

    names = (("ib1", "ib-a", "ib0"), ("ib2", "ib-a", "ib0"), ("roce1", "roce-a", "roce0"), ("roce2", "roce-a", "roce0"))
    return [
        NodeTransports(name, fabric, {"tcp": ("eth0", f"10.0.0.{i}"), "rdma": (nic, f"10.1.0.{i}")}, {}, False)
        for i, (name, fabric, nic) in enumerate(names)
    ]


def local_plan(has_gpus: bool = False) -> Plan:
    """Return a plan for two ranks of this machine."""
    local_site = Site("local", (Pool("local", NicType.ETHERNET, "local", 1, 2, 10, CPU, gres=has_gpus),))
    return plan("local", nodes=1, site=local_site)


CONFIG: dict[str, Any] = {"train": {"steps": 4, "max_restarts": 0}}


def quick(config: dict[str, Any]) -> dict[str, Any]:
    """Run a rank that only reports where it is."""
    rank, run = int(os.environ["SLURM_PROCID"]), RunDirectory(config["run_dir"])
    if rank == 0:
        run.start_attempt({"job_id": os.environ["SLURM_JOB_ID"]})
    print(f"rank {rank} on {os.environ['SLURMD_NODENAME']} {config.get('note', '')}", flush=True)
    if rank == 0:
        run.append_metrics({"step": 1, "loss": 2.0, "attempt": run.attempt})
    run.write_exit(rank, "completed", host=os.environ["SLURMD_NODENAME"])
    return {"loss": 2.0}


def waiting_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Run a rank that waits.

    ``config["die"]`` {rank: how} chooses the ranks that end when all are present. The others notice and fail with
    the message of a lost connection."""
    rank, run = int(os.environ["SLURM_PROCID"]), RunDirectory(config["run_dir"])
    presence, rank_count = Path(run.path) / "here", int(os.environ["SLURM_NTASKS"])
    attempt = os.environ.get("SLURM_RESTART_COUNT") or "0"
    if rank == 0:
        attempt_number = run.start_attempt({"job_id": os.environ["SLURM_JOB_ID"]})
        if config.get("steps_per_attempt"):
            steps_factor = min(attempt_number, config.get("gaining_attempts", attempt_number))
            run.append_metrics(
                {"step": config["steps_per_attempt"] * steps_factor, "loss": 1.0, "attempt": attempt_number}
            )
    presence.mkdir(exist_ok=True)
    (presence / f"{attempt}-{rank}").touch()
    while len(list(presence.glob(f"{attempt}-*"))) < rank_count:
        time.sleep(0.05)
    print(f"rank {rank} waits", flush=True)
    death = config.get("die", {}).get(str(rank))
    if death == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if death == "raise":
        run.write_exit(rank, "failed", "ValueError: on purpose", host=os.environ["SLURMD_NODENAME"])
        raise ValueError("on purpose")
    end = time.monotonic() + float(config.get("wait_s", 60))
    while time.monotonic() < end:
        time.sleep(0.1)
        if config.get("die") and time.monotonic() > end - float(config.get("wait_s", 60)) + 1:
            message = "Connection closed by peer"
            run.write_exit(rank, "failed", f"NetworkError: {message}", host=os.environ["SLURMD_NODENAME"])
            raise ConnectionError(message)
    run.write_exit(rank, "completed", host=os.environ["SLURMD_NODENAME"])
    return {}

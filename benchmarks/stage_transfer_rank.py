"""Run one rank of stage_transfer_pairs.py: alternate the schedules step by step, and time the steps.

This compares the schedules at the same time on the same nodes. Their results are equal bit for bit, so each continues
from the other's step. Arguments: a JSON file of {plan, run_dir, train, cells [{micro_batches, in_flight}], rounds,
until}, and a path: rank N writes a line per step to PATH.N.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training import session
from holmes_hpc.training.data.build import build_datasets
from holmes_hpc.training.data.samples import batches
from holmes_hpc.training.metrics.breakdown import Breakdown
from holmes_hpc.training.model import emulated_layers, gpt, optimizer
from holmes_hpc.training.model.gpt import forward_step
from holmes_hpc.training.pipeline import point_to_point
from holmes_hpc.training.pipeline.eager_1f1b import run_eager_1f1b
from holmes_hpc.training.rank.failure import RankExit
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import RankLog


def read_launch() -> Launch:
    """Return the launch of this task; srun without a batch script does not name the other components' nodes."""
    environment = os.environ
    return Launch(
        int(environment["SLURM_PROCID"]),
        int(environment["SLURM_NTASKS"]),
        int(environment["SLURM_LOCALID"]),
        "srun",
        environment["SLURMD_NODENAME"],
        f"transfer-{environment.get('SLURM_HET_JOB_ID') or environment['SLURM_JOB_ID']}",
        False,
    )


class Rank:
    """The model, optimizer, data and edges of the training loop, without its records."""

    def __init__(self, config: Configuration, rank_session: session.Session) -> None:
        train, plan = config.train, rank_session.plan
        self.plan, self.device, self.train = plan, rank_session.device, train
        self.breakdown = Breakdown(rank_session.cuda)
        torch.manual_seed(train.seed)
        model_parallel_cuda_manual_seed(train.seed)
        self.config = gpt.transformer_config(
            plan, gpt.dtype_of(train.dtype, rank_session.cuda), cuda=rank_session.cuda, timers=self.breakdown
        )
        chunks = gpt.build(plan, self.config, train.seed, rank_session.device)
        emulated_layers.emulate((chunk.decoder.layers for chunk in chunks), train.pace_layer_ms, self.breakdown)
        self.models = optimizer.wrap(chunks, self.config, plan, train)
        self.optimizer = optimizer.build(self.models, self.config, plan, train, self.breakdown)
        optimizer.time_waits(self.optimizer, self.models, self.breakdown)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.edges = point_to_point.build_communicator(
            plan,
            rank_session.groups.edge,
            rank=rank_session.launch.rank,
            pp_group=self.groups.pp,
            config=self.config,
            device=rank_session.device,
        )
        training, _ = build_datasets(config.data, train, plan, None)
        self.batches = batches(training, plan, parallel_state.get_data_parallel_rank(), 0, self.device)

    def schedule(self, kind: str, in_flight: Sequence[int]) -> Any:
        """Return the schedule: `megatron`: Megatron's 1F1B over holmes_hpc's edges; `ahead`: eager 1F1B."""
        return (
            get_forward_backward_func()
            if kind == "megatron"
            else functools.partial(
                run_eager_1f1b, order=Order(kind, len(in_flight), len(in_flight), in_flight=tuple(in_flight))
            )
        )

    def step(self, schedule: Any, micro_batches: int) -> float:
        """Train one step; return the gradient norm."""
        self.models[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.breakdown.part("pipeline_wait_s"):  # the time of no other part
            schedule(
                forward_step_func=forward_step,
                data_iterator=self.batches,
                model=self.models[0],
                num_microbatches=micro_batches,
                seq_length=self.plan.batch.sequence_length,
                micro_batch_size=self.plan.batch.micro_size,
                p2p_communicator=self.edges,
                pg_collection=self.groups,
            )
        with self.breakdown.part("optimizer_s"):
            _, norm, _ = self.optimizer.step()
        return float(norm)


def main() -> None:
    torch.set_num_threads(1)
    inputs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank_launch, run, plan = read_launch(), RunDirectory(inputs["run_dir"]), Plan.read(inputs["plan"])
    log, rank_exit = RankLog(run, rank_launch), RankExit(run, rank_launch)
    try:
        train, slurm = TrainConfig(**inputs["train"]), SlurmSettings(bind_cpus=False)
        config = Configuration(plan.model, plan.batch, train=train, slurm=slurm)
        rank_session = session.open_session(config, rank_launch, plan, run, rank_exit, lambda phase: None)
        rank = Rank(config, rank_session)
        kinds = ["megatron", "ahead"]
        with Path(f"{sys.argv[2]}.{rank_launch.rank}").open("w", encoding="utf-8") as out:
            for round_number in range(inputs["rounds"] + 1):  # the first round is warm-up
                kinds.reverse()  # so that each schedule starts every other pair
                late = torch.tensor([time.time() > inputs["until"]])  # by rank 0's clock
                torch.distributed.broadcast(late, 0)
                if late:
                    break
                for cell, kind in itertools.product(inputs["cells"], kinds):
                    torch.distributed.barrier()
                    rank.breakdown.begin()
                    start, cpu = time.perf_counter(), time.process_time()
                    norm = rank.step(rank.schedule(kind, cell["in_flight"]), cell["micro_batches"])
                    torch.distributed.barrier()
                    line = {
                        "round": round_number,
                        "kind": kind,
                        "micro_batches": cell["micro_batches"],
                        "norm": norm,
                        "step_s": time.perf_counter() - start,
                        "cpu_s": time.process_time() - cpu,
                        "parts": rank.breakdown.take(),
                    }
                    if round_number:
                        print(json.dumps(line), file=out, flush=True)
        rank.edges.close()
        torch.distributed.barrier()
        rank_session.close()
        rank_exit.record_end("completed")
    except Exception as e:
        sys.exit(rank_exit.record_failure(e))
    finally:
        log.close()


if __name__ == "__main__":
    main()

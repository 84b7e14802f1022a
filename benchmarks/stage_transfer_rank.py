"""One rank of benchmarks/stage_transfer_pairs.py: trains under several schedules in turn, a step each, and times them.

Alternating within one job compares schedules in the same minute on the same nodes; results are equal bit for bit, so
each goes on where the other stopped. Arguments: a JSON file of {plan, run_dir, train, cells [{micro_batches,
in_flight}], rounds, until}, and the file that rank N writes a line to for every step, with .N at its end.
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
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.planning.plan.plan import Plan
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


def launch() -> Launch:
    """srun itself, without a batch script, does not tell a task the other components' nodes: they are not looked at."""
    e = os.environ
    return Launch(
        int(e["SLURM_PROCID"]),
        int(e["SLURM_NTASKS"]),
        int(e["SLURM_LOCALID"]),
        "srun",
        e["SLURMD_NODENAME"],
        f"transfer-{e.get('SLURM_HET_JOB_ID') or e['SLURM_JOB_ID']}",
        False,
    )


class Rank:
    """What the training loop makes, without what it records: model, optimizer, data, edges."""

    def __init__(self, config: Configuration, here: session.Session) -> None:
        train, plan = config.train, here.plan
        self.plan, self.device, self.train = plan, here.device, train
        self.breakdown = Breakdown(here.cuda)
        torch.manual_seed(train.seed)
        model_parallel_cuda_manual_seed(train.seed)
        self.config = gpt.transformer_config(
            plan, gpt.dtype_of(train.dtype, here.cuda), cuda=here.cuda, timers=self.breakdown
        )
        chunks = gpt.build(plan, self.config, train.seed, here.device)
        emulated_layers.emulate((chunk.decoder.layers for chunk in chunks), train.pace_layer_ms)
        self.models = optimizer.wrap(chunks, self.config, plan, train)
        self.optimizer = optimizer.build(self.models, self.config, plan, train, self.breakdown)
        optimizer.time_waits(self.optimizer, self.models, self.breakdown)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.edges = point_to_point.build_communicator(
            plan,
            here.groups.edge,
            rank=here.launch.rank,
            pp_group=self.groups.pp,
            config=self.config,
            device=here.device,
        )
        training, _ = build_datasets(config.data, train, plan, None)
        self.batches = batches(training, plan, parallel_state.get_data_parallel_rank(), 0)

    def schedule(self, kind: str, in_flight: Sequence[int]) -> Any:
        """megatron: its own 1F1B, over our edges; ahead: ours."""
        return (
            get_forward_backward_func()
            if kind == "megatron"
            else functools.partial(run_eager_1f1b, in_flight=in_flight)
        )

    def step(self, schedule: Any, micro_batches: int) -> float:
        """One step; the gradient norm."""
        self.models[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.breakdown.part("pipeline_wait_s"):  # what is not another part
            schedule(
                forward_step_func=functools.partial(forward_step, self.device),
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
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    own, run, plan = launch(), RunDirectory(given["run_dir"]), Plan.read(given["plan"])
    log, rank_exit = RankLog(run, own), RankExit(run, own)
    try:
        config = Configuration(plan.model, plan.batch, train=TrainConfig(**given["train"]))
        here = session.open_session(config.train, own, plan, run, rank_exit)
        rank = Rank(config, here)
        kinds = ["megatron", "ahead"]
        with Path(f"{sys.argv[2]}.{own.rank}").open("w", encoding="utf-8") as out:
            for turn in range(given["rounds"] + 1):  # the first one does not count
                kinds.reverse()  # none is always the first of a pair
                late = torch.tensor([time.time() > given["until"]])  # as the first rank's clock says
                torch.distributed.broadcast(late, 0)
                if late:
                    break
                for cell, kind in itertools.product(given["cells"], kinds):
                    torch.distributed.barrier()
                    rank.breakdown.begin()
                    began, cpu = time.perf_counter(), time.process_time()
                    norm = rank.step(rank.schedule(kind, cell["in_flight"]), cell["micro_batches"])
                    torch.distributed.barrier()
                    line = {
                        "round": turn,
                        "kind": kind,
                        "micro_batches": cell["micro_batches"],
                        "norm": norm,
                        "step_s": time.perf_counter() - began,
                        "cpu_s": time.process_time() - cpu,
                        "parts": rank.breakdown.take(),
                    }
                    if turn:
                        print(json.dumps(line), file=out, flush=True)
        rank.edges.close()
        torch.distributed.barrier()
        here.close()
        rank_exit.record_end("completed")
    except Exception as e:
        sys.exit(rank_exit.record_failure(e))
    finally:
        log.close()


if __name__ == "__main__":
    main()

"""Measure one-way transfer times of a tensor over one to four TCP connections of an edge.

    python benchmarks/stage_transfer_stripes.py                        # two processes of this machine, over loopback
    srun -N2 -n2 python benchmarks/stage_transfer_stripes.py eth0      # two nodes, over their interface eth0

Each stripe has its own connection: a process group, with a thread of gloo. Receives are posted in advance, as the
schedule does. A time is the median of 20; it includes a one-number answer.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holmes_hpc.console import table
from holmes_hpc.training.network import process_groups
from holmes_hpc.training.pipeline.point_to_point import Channel

SIZES, STRIPES, TIMES = (100_000, 1_000_000, 10_000_000), (1, 2, 4), 20


def rank_main(rank: int, store_path: str, interface: str) -> None:
    torch.set_num_threads(1)
    process_groups.register()
    options = {"interface": interface}
    dist.init_process_group(
        process_groups.GLOO, store=dist.FileStore(store_path, 2), rank=rank, world_size=2, pg_options=options
    )

    def connection() -> dist.ProcessGroup:
        return dist.new_group([0, 1], backend=process_groups.GLOO, pg_options=options)

    answer = Channel("backward", [connection()], 1 - rank)
    rows = []
    for stripes in STRIPES:
        channel = Channel("forward", [connection() for _ in range(stripes)], 1 - rank)
        for size in SIZES:
            tensor, number, seconds = torch.zeros(size // 4), torch.zeros(1), []
            for _ in range(TIMES + 1):
                if rank == 0:
                    reply = answer.receive(number)
                    dist.barrier()
                    start = time.perf_counter()
                    channel.send(tensor)
                    reply.wait()
                    seconds.append(time.perf_counter() - start)
                else:
                    posted = channel.receive(tensor)
                    dist.barrier()
                    posted.wait()
                    answer.send(number).wait()
            if rank == 0:
                transfer_s = statistics.median(seconds[1:])
                rate = 8 * size / transfer_s / 1e6
                rows.append([stripes, f"{size / 1e6:g} MB", f"{1000 * transfer_s:.2f} ms", f"{rate:.0f} Mbit/s"])
    if rank == 0:
        table(f"over {interface}", ["stripes", "tensor", "time", "rate"], rows)
    dist.barrier()


def main() -> None:
    if "SLURM_PROCID" in os.environ:
        store_path = str(Path.cwd() / f".stripes-{os.environ['SLURM_JOB_ID']}")
        rank_main(int(os.environ["SLURM_PROCID"]), store_path, sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=rank_main, args=(rank, f"{folder}/store", "lo")) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()

"""Does it pay to spread one tensor over several TCP connections of an edge? Time of one transfer, one way.

    python benchmarks/stage_transfer_stripes.py                        # two processes of this machine, over loopback
    srun -N2 -n2 python benchmarks/stage_transfer_stripes.py eth0      # two nodes, over that interface of theirs

Each stripe has a connection of its own: a process group, a thread of gloo's. Receives are posted ahead, as the
schedule does; the time is that of a transfer and of the one number that answers it, median of 20.
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


def rank_main(rank: int, meeting: str, interface: str) -> None:
    torch.set_num_threads(1)
    process_groups.register()
    where = {"interface": interface}
    dist.init_process_group(
        process_groups.GLOO, store=dist.FileStore(meeting, 2), rank=rank, world_size=2, pg_options=where
    )

    def connection() -> dist.ProcessGroup:
        return dist.new_group([0, 1], backend=process_groups.GLOO, pg_options=where)

    answer = Channel("backward", [connection()], 1 - rank)
    rows = []
    for stripes in STRIPES:
        channel = Channel("forward", [connection() for _ in range(stripes)], 1 - rank)
        for size in SIZES:
            tensor, number, seconds = torch.zeros(size // 4), torch.zeros(1), []
            for _ in range(TIMES + 1):
                if rank == 0:
                    back = answer.receive(number)
                    dist.barrier()
                    began = time.perf_counter()
                    channel.send(tensor)
                    back.wait()
                    seconds.append(time.perf_counter() - began)
                else:
                    posted = channel.receive(tensor)
                    dist.barrier()
                    posted.wait()
                    answer.send(number).wait()
            if rank == 0:
                took = statistics.median(seconds[1:])
                rate = 8 * size / took / 1e6
                rows.append([stripes, f"{size / 1e6:g} MB", f"{1000 * took:.2f} ms", f"{rate:.0f} Mbit/s"])
    if rank == 0:
        table(f"over {interface}", ["stripes", "tensor", "time", "rate"], rows)
    dist.barrier()


def main() -> None:
    if "SLURM_PROCID" in os.environ:
        meeting = str(Path.cwd() / f".stripes-{os.environ['SLURM_JOB_ID']}")
        rank_main(int(os.environ["SLURM_PROCID"]), meeting, sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        both = [fork.Process(target=rank_main, args=(rank, f"{folder}/store", "lo")) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()


if __name__ == "__main__":
    main()

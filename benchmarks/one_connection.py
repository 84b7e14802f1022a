"""What do two messages in opposite directions at the same moment cost over gloo: over one connection, and over two?

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    srun -p eth -N2 -n2 python benchmarks/one_connection.py eth0      # two nodes, over that interface of theirs

Megatron-Core exchanges activations for gradients in one group of two ranks: with gloo, one connection. Three times,
taken in turn, median of 20: one way alone; both ways over one group; both ways over a group each, as holmes_hpc does.
Twice the first where directions wait for each other, once where they do not.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from holmes_hpc.console import table
from holmes_hpc.training.network import process_groups

SIZES, TIMES = (8_000, 35_000, 70_000, 300_000), 20


def exchange(rank: int, tensor: torch.Tensor, ways: dict[int, dist.ProcessGroup]) -> float:
    """Seconds until this rank's messages have gone and come. `ways`: the group of what rank 0 and rank 1 send."""
    into = torch.empty_like(tensor)
    dist.barrier()
    began = time.perf_counter()
    works = [dist.isend(tensor, 1 - rank, group=ways[rank])] if rank in ways else []
    works += [dist.irecv(into, 1 - rank, group=ways[1 - rank])] if 1 - rank in ways else []
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    rank, where = int(os.environ["SLURM_PROCID"]), {"interface": sys.argv[1]}
    meeting = str(Path.cwd() / f".connections-{os.environ['SLURM_JOB_ID']}")
    process_groups.register()
    dist.init_process_group(
        process_groups.GLOO, store=dist.FileStore(meeting, 2), rank=rank, world_size=2, pg_options=where
    )
    one, other = (dist.new_group([0, 1], backend=process_groups.GLOO, pg_options=where) for _ in range(2))
    cases = {
        "one way": {0: one},
        "both ways, one connection": {0: one, 1: one},
        "both ways, one each": {0: one, 1: other},
    }
    rows = []
    for size in SIZES:
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(TIMES + 1):
            for name, ways in cases.items():
                seconds[name].append(exchange(rank, torch.zeros(size // 4), ways))
        took = {name: statistics.median(s[1:]) for name, s in seconds.items()}
        rows.append(
            [
                f"{size / 1e3:g} kB",
                *(f"{1000 * took[name]:.1f} ms" for name in cases),
                *(f"{took[name] / took['one way']:.2f}" for name in list(cases)[1:]),
            ]
        )
    if rank == 0:
        table(f"over {where['interface']}", ["message", *cases, "one connection", "one each"], rows)
        Path(meeting).unlink()


if __name__ == "__main__":
    main()

"""Measure two simultaneous messages in opposite directions with gloo, over one connection and over two.

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    srun -p eth -N2 -n2 python benchmarks/one_connection.py eth0      # two nodes, over their interface eth0

Megatron-Core exchanges activations and gradients in one group of two ranks: with gloo, over one connection. Three cases
alternate, median of 20: one direction; both directions in one group; a group per direction, as in holmes_hpc. If the
directions wait for each other, both take twice the time of one.
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


def exchange(rank: int, tensor: torch.Tensor, groups: dict[int, dist.ProcessGroup]) -> float:
    """Return the seconds until this rank has sent and received. `groups`: sending rank -> group of its message."""
    received = torch.empty_like(tensor)
    dist.barrier()
    start = time.perf_counter()
    works = [dist.isend(tensor, 1 - rank, group=groups[rank])] if rank in groups else []
    works += [dist.irecv(received, 1 - rank, group=groups[1 - rank])] if 1 - rank in groups else []
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    rank, options = int(os.environ["SLURM_PROCID"]), {"interface": sys.argv[1]}
    store_path = str(Path.cwd() / f".connections-{os.environ['SLURM_JOB_ID']}")
    process_groups.register()
    dist.init_process_group(
        process_groups.GLOO, store=dist.FileStore(store_path, 2), rank=rank, world_size=2, pg_options=options
    )
    first_group, second_group = (
        dist.new_group([0, 1], backend=process_groups.GLOO, pg_options=options) for _ in range(2)
    )
    cases = {
        "one direction": {0: first_group},
        "both, one connection": {0: first_group, 1: first_group},
        "both, one each": {0: first_group, 1: second_group},
    }
    rows = []
    for size in SIZES:
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(TIMES + 1):
            for name, groups in cases.items():
                seconds[name].append(exchange(rank, torch.zeros(size // 4), groups))
        medians = {name: statistics.median(s[1:]) for name, s in seconds.items()}
        rows.append(
            [
                f"{size / 1e3:g} kB",
                *(f"{1000 * medians[name]:.1f} ms" for name in cases),
                *(f"{medians[name] / medians['one direction']:.2f}" for name in list(cases)[1:]),
            ]
        )
    if rank == 0:
        table(f"over {options['interface']}", ["message", *cases, "one connection", "one each"], rows)
        Path(store_path).unlink()


if __name__ == "__main__":
    main()

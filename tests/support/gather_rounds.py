"""Two ranks with six gathers in flight on a gloo group of this package, as Megatron's parameter buckets have.

Arguments: the rendezvous file, the number of rounds. Exit code 0: both ranks received the right numbers."""

import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from holmes_hpc.training.network import process_groups


def run_rank(number: int, file: str, rounds: int) -> None:
    torch.set_num_threads(1)
    options = SimpleNamespace(
        store=dist.FileStore(file, 2), group_rank=number, group_size=2, timeout=timedelta(seconds=30)
    )
    group = process_groups._create_gloo(options, {"interface": "lo"})
    gathered, shard = [torch.empty(2, 8) for _ in range(6)], torch.full((8,), float(number))
    for _ in range(rounds):
        for work in [group.allgather_coalesced([[row] for row in rows], [shard]) for rows in gathered]:
            work.wait()
    assert all(rows.tolist() == [[0.0] * 8, [1.0] * 8] for rows in gathered)


child = os.fork()
run_rank(0 if child else 1, sys.argv[1], int(sys.argv[2]))
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)

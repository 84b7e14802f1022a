"""Processes of benchmarks: scripts with a time limit, and local ranks, which may share a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import psutil

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: str, limit_s: float, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process; at the time limit kill it and return exit code 124."""
    environment = {**os.environ, **variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        output, errors = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)
    except subprocess.TimeoutExpired:
        for member in (*psutil.Process(process.pid).children(recursive=True), process):  # ranks spin on the GPU
            with contextlib.suppress(psutil.Error):
                member.kill()
        output, _ = process.communicate()
        return subprocess.CompletedProcess(command, 124, output, f"time limit of {limit_s:g} s reached")


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (process.stdout + process.stderr).strip().splitlines() if "Warning" not in line]
    return lines[-1][:300] if lines else f"exit code {process.returncode}, no output"


def train_ranks(
    ranks: int, overrides: list[str], prelude: str = "", variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Train with local ranks. Raise RuntimeError with the last line of the first rank that fails. `prelude`: code that
    a rank runs before; `variables`: for its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(ranks) as pool:
        processes = pool.map(
            lambda rank: run_script(
                prelude + _RANK,
                100 if "train.device=cuda" in overrides else 280,
                {
                    **variables,
                    "HOLMES_PROOF": json.dumps(overrides),
                    "OMP_NUM_THREADS": "1",
                    "NCCL_HOSTID": f"host-{rank}",
                    "NCCL_SOCKET_IFNAME": "lo",
                    **({"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            ),
            range(ranks),
        )
    for rank, process in enumerate(processes):
        if process.returncode:
            print(process.stdout[-5000:], process.stderr[-5000:], flush=True)
            raise RuntimeError(f"rank {rank}: {last_line(process)}")


_RANK = """
import json, os, sys
from holmes_hpc.planning import request
from holmes_hpc.training.network import rank_facts
local_gpus = request.local_gpus
request.local_gpus = lambda: local_gpus() * int(os.environ.get("WORLD_SIZE", 1))
rank_facts.check_gpus = lambda *_: None
from holmes_hpc import train
sys.argv = ["train", *json.loads(os.environ["HOLMES_PROOF"])]
train.main()
"""

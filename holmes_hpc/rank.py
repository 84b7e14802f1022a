"""What every task of a job calls: one rank, in a process of its own, without Hydra and without planning."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import HolmesError
from holmes_hpc.extras import missing
from holmes_hpc.records.ownership import careful_umask
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.engine import check_engine
from holmes_hpc.submission.local_ranks import loads_first
from holmes_hpc.training.rank.log import one_line


def _load(config: dict[str, Any]) -> None:
    _task(recorded(config)[0])


@loads_first(_load)
def run_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Train (or with `train.measure` measure) as one rank of `config["plan_file"]`, recording into `config["run_dir"]`;
    the final figures come back. `config`: plain data, for it travels in pickles that another version may read."""
    careful_umask()
    with _end_recorded(RunDirectory(config["run_dir"])):
        settings, unrecorded = recorded(config)
        check_engine(settings.train.optimizer)
        return _task(settings)(settings, unrecorded)


def _task(settings: Configuration) -> Callable[[Configuration, Sequence[str]], dict[str, Any]]:
    """What a rank does, with torch and Megatron-Core loaded."""
    # what Megatron-Core can do without, and what torch will rename: nothing that a reader of the log can act on
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|holmes_hpc\.training\.rank\.cpu")
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_remark_on_cuda)
    megatron = logging.getLogger("megatron")
    if megatron.level == logging.NOTSET:  # Hydra lets all loggers speak, this one of each parameter
        megatron.setLevel(logging.WARNING)
    # Megatron-Core asks at its import whether there is a GPU: by NVML, so that CUDA's driver starts after it was told
    # how many queues a GPU has (training/rank/cuda_check.py)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        from holmes_hpc.training.rank import cpu  # torch is heavy: only ranks load it

        with cpu.without_compiler():
            if settings.train.measure:
                from holmes_hpc.training.calibration.measure import measure as task
            else:
                from holmes_hpc.training.loop import train as task
    except ModuleNotFoundError as e:
        raise missing(e) from e
    return task


def _is_no_remark_on_cuda(said: logging.LogRecord) -> bool:
    """False of what torch says on a node without GPUs that has CUDA's compiler; training/rank/cuda_check.py knows."""
    return "No CUDA runtime" not in said.getMessage()


@contextlib.contextmanager
def _end_recorded(run: RunDirectory) -> Iterator[None]:
    """Record the end of a rank that fails where its own guard (training/rank/failure.py) is not up: a package that this
    node lacks, for instance."""
    began = time.time()
    try:
        yield
    except Exception as e:
        rank = rank_and_size()[0]
        if not any(own.get("rank") == rank and own["time"] >= began for own in run.read_exits()):
            with contextlib.suppress(HolmesError, OSError):
                run.write_exit(rank, "failed", one_line(e))
        raise


def rank_and_size() -> tuple[int, int]:
    """(rank, world size) of this process, as torchrun or Slurm say; (0, 1) alone."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1

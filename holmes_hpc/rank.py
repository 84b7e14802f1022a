"""The entry point of every task of a job: one rank in its own process, without Hydra and planning."""

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
from holmes_hpc.submission.executor.environment import LEADER
from holmes_hpc.submission.lifecycle.requeue import watch_batch_script
from holmes_hpc.submission.lifecycle.requirements import allow_open_files, check_megatron_core
from holmes_hpc.submission.local_ranks import preload_with
from holmes_hpc.training.rank.log import one_line


def _preload(config: dict[str, Any]) -> None:
    _task(recorded(config)[0])


@preload_with(_preload)
def run_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Train, or measure with `train.measure`, as one rank of `config["plan_file"]`; return the final metrics.

    The rank records into `config["run_dir"]`. `config` is plain data, because other versions may read its pickle."""
    careful_umask()
    run = RunDirectory(config["run_dir"])
    with _record_failure(run):
        settings, unrecorded = recorded(config)
        allow_open_files(rank_and_size()[1])
        check_megatron_core(settings.train.optimizer)
        if LEADER in os.environ and rank_and_size()[0] == 0:
            watch_batch_script(run)
        return _task(settings)(settings, unrecorded)


def _task(settings: Configuration) -> Callable[[Configuration, Sequence[str]], dict[str, Any]]:
    """Load torch and Megatron-Core, and return the function that this rank runs."""
    # Users cannot act on warnings about optional packages of Megatron-Core and future names in torch.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|holmes_hpc\.training\.rank\.cpu")
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_not_cuda_warning)
    megatron = logging.getLogger("megatron")
    if megatron.level == logging.NOTSET:  # Hydra enables all loggers; this one logs each parameter
        megatron.setLevel(logging.WARNING)
    # Megatron-Core looks for a GPU when imported. NVML does so without starting CUDA's driver, which must start after
    # training/rank/cuda_check.py has set the number of queues per GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        from holmes_hpc.training.rank import cpu  # only ranks load torch, which is slow to import

        with cpu.without_compiler():
            if settings.train.measure:
                from holmes_hpc.training.calibration.measure import measure as task
            else:
                from holmes_hpc.training.loop import train as task
    except ModuleNotFoundError as e:
        raise missing(e) from e
    return task


def _is_not_cuda_warning(record: logging.LogRecord) -> bool:
    """Return False for torch's warning on nodes with CUDA's compiler and no GPU."""
    return "No CUDA runtime" not in record.getMessage()


@contextlib.contextmanager
def _record_failure(run: RunDirectory) -> Iterator[None]:
    """Record the failure of a rank outside its own guard (training/rank/failure.py).

    An example is a package that is missing on this node."""
    started = time.time()
    try:
        yield
    except Exception as e:
        rank = rank_and_size()[0]
        if not any(
            exit_record.get("rank") == rank and exit_record["time"] >= started for exit_record in run.read_exits()
        ):
            with contextlib.suppress(HolmesError, OSError):
                run.write_exit(rank, "failed", one_line(e))
        raise


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) of this process from torchrun's or Slurm's environment; (0, 1) alone."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1

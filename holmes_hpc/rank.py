"""The entry point of every task of a job: one rank in its own process, without Hydra and planning."""

import contextlib
import gc
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
from holmes_hpc.submission.executor.environment import LEADER, own_member
from holmes_hpc.submission.lifecycle.requeue_decision import watch_batch_script
from holmes_hpc.submission.lifecycle.requirements import allow_open_files, check_megatron_core
from holmes_hpc.training.rank.log import one_line


def _preload(config: dict[str, Any]) -> None:
    settings = recorded(config)[0]
    check_megatron_core(settings.train.optimizer)  # the forked ranks find the result in its cache
    _load_task(settings)


def run_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Run this process as one rank of `config["plan_file"]`: train, or calibrate if `train.measure` is set.

    On rank 0, return the metrics of the last step, or the calibration. The rank writes its records to
    `config["run_dir"]`. `config` is plain data, because another version of this package may read its pickle."""
    careful_umask()
    run = RunDirectory(config["run_dir"])
    with _record_failure(run):
        settings, unrecorded = recorded(config)
        rank, size = rank_and_size()
        allow_open_files(size, rank)
        check_megatron_core(settings.train.optimizer)
        if LEADER in os.environ and own_member() is None and rank == 0:
            watch_batch_script(run)
        return _load_task(settings)(settings, unrecorded)


run_rank.load = _preload  # type: ignore[attr-defined] # called before the ranks of this machine are forked


def _load_task(settings: Configuration) -> Callable[[Configuration, Sequence[str]], dict[str, Any]]:
    """Import torch and Megatron-Core, and return the function that this rank runs."""
    # Users cannot act on warnings about optional packages of Megatron-Core and future names in torch.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|holmes_hpc\.training\.rank\.cpu")
    # Torch warns on a node that has CUDA's compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda r: "No CUDA runtime" not in r.getMessage())
    megatron = logging.getLogger("megatron")
    if megatron.level == logging.NOTSET:  # Hydra enables all loggers; Megatron's logs each parameter
        megatron.setLevel(logging.WARNING)
    # Megatron-Core looks for a GPU when it is imported. With NVML this does not start CUDA's driver, which must not
    # start before training/rank/cuda_check.py has set the number of queues per GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gc.disable()  # collections would scan the modules loaded so far again and again
    try:
        from holmes_hpc.training.rank import compiler  # only ranks load torch, which is slow to import

        with compiler.delayed():
            if settings.train.measure:
                from holmes_hpc.training.calibration.measure import measure as task
            else:
                from holmes_hpc.training.loop import train as task
    except ModuleNotFoundError as e:
        raise missing(e) from e
    finally:
        gc.freeze()  # else the next collection scans all of them
        gc.enable()
    return task


@contextlib.contextmanager
def _record_failure(run: RunDirectory) -> Iterator[None]:
    """Write an exit record if the block fails and the rank has not written one itself.

    A missing package, for example, is an error before training/rank/failure.py can record it."""
    started = time.time()
    try:
        yield
    except Exception as e:
        rank = rank_and_size()[0]
        exits_of_node = run.read_exits(os.uname().nodename)
        if not any(record["rank"] == rank and float(record.get("time") or 0) >= started for record in exits_of_node):
            with contextlib.suppress(HolmesError, OSError):
                run.write_exit(rank, "failed", one_line(e))
        raise


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) from torchrun's or Slurm's environment; (0, 1) for a single process."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1

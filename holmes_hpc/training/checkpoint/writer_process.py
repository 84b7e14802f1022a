"""The process that writes a rank's part of a checkpoint: a fork of the rank, which forks again for each file."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

from holmes_hpc.errors import RunFailed
from holmes_hpc.fabric.node_facts import node_name
from holmes_hpc.lifetime import end_with
from holmes_hpc.training.checkpoint.file_checksums import write_checksums
from holmes_hpc.training.rank.log import log_line

RESULT_WAIT_S = 30  # wait for a result that is still in the pipe after the writer has exited
START_S = 10.0  # wait for a fork to run, which normally takes milliseconds
FORKS = 3


class Results:
    """A queue from a writer process to its rank: a pipe, and a thread that empties it.
    Megatron-Core's default queue needs one more process for each rank, which outlives a killed rank."""

    def __init__(self) -> None:
        self._pipe = multiprocessing.get_context("fork").SimpleQueue()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._empty_pipe, name="checkpoint results", daemon=True).start()

    def _empty_pipe(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._received.put(self._pipe.get())

    def put(self, results: Any) -> None:
        self._pipe.put(results)

    def get_nowait(self) -> Any:
        return self._received.get(timeout=RESULT_WAIT_S)


def start(calls: AsyncCallsQueue, request: AsyncRequest, path: Path, rank: int) -> None:
    """Schedule `request` with a writer process that also writes the files' checksums. Return when the writer runs.
    A fork can hang before it runs Python code: CPython before 3.11.10 deadlocks in the fork if a thread of gloo was
    creating its thread state (gh-112275). Such a fork has written nothing, so it is killed and replaced."""
    if request.async_fn is None:
        calls.schedule_async_request(request)
        return
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, sender:
        write = partial(_write, request.async_fn, path, rank, os.getpid(), sender)
        calls.schedule_async_request(request._replace(async_fn=write))
        call = calls.async_calls[-1]
        for forks in range(1, FORKS + 1):
            if receiver.poll(START_S):
                return
            call.async_caller.process.kill()
            call.async_caller.process.join()
            if forks < FORKS:
                log_line(f"warning: the process that writes the checkpoint hung for {START_S:.0f} s; starting it again")
                call.async_caller.schedule_async_call(call.async_request)
    problem = f"the process that writes the checkpoint hung {FORKS} times at its start"
    hint = "`holmes resume` continues from the last good checkpoint"
    raise RunFailed(problem, where=f"rank {rank} on {node_name()}", hint=hint)


def _write(
    write: Callable[..., None], path: Path, rank: int, rank_pid: int, sender: Connection, *args: Any, **kwargs: Any
) -> None:
    """Write the files and their checksums in the writer process. First notify `sender`. Exit if the rank exits."""
    writer_pid = os.getpid()
    end_with(rank_pid)
    os.register_at_fork(after_in_child=lambda: end_with(writer_pid))
    signal.signal(signal.SIGCHLD, _check_children)
    sender.send_bytes(b"started")
    try:
        write(*args, **kwargs)
    except RuntimeError as e:
        filesystem_async._results_queue.put(RuntimeError(f"rank {rank} on {node_name()}: {e}"))
        return
    write_checksums(path, rank)


def _check_children(*_: object) -> None:
    """Raise an error if the process that writes a file was killed. Megatron-Core would wait for its result forever."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_status:
            raise RuntimeError(f"the process that writes its file ended with status {ended.si_status}")

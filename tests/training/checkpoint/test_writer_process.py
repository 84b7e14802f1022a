"""A writer that hangs at its start is forked again, and one whose file's process was killed reports it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from holmes_hpc.errors import RunFailed
from holmes_hpc.training.checkpoint import file_checksums, writer_process

pytestmark = pytest.mark.integration
FORK = multiprocessing.get_context("fork")


class Calls:
    """Megatron-Core's queue and caller in one, whose first `hanging` forks run no code of the request."""

    def __init__(self, hanging: int) -> None:
        self.hanging, self.processes, self.async_calls = hanging, [], deque[Any]()

    @property
    def process(self) -> Any:
        return self.processes[-1]

    def schedule_async_request(self, request: AsyncRequest) -> None:
        self.async_calls.append(SimpleNamespace(async_caller=self, async_request=request))
        self.schedule_async_call(request)

    def schedule_async_call(self, request: AsyncRequest) -> None:
        target = (time.sleep, (600,)) if len(self.processes) < self.hanging else (request.async_fn, ())
        self.processes.append(FORK.Process(target=target[0], args=target[1]))
        self.process.start()


def test_fork_that_hangs_at_its_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer_process, "START_S", 0.5)
    calls, shard = Calls(hanging=1), tmp_path / "__2_0.distcp"
    writer_process.start(calls, AsyncRequest(lambda: shard.write_bytes(b"state"), (), []), tmp_path, 2)  # type: ignore[arg-type]
    first, second = calls.processes
    second.join()
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0) and "hung" in capsys.readouterr().out
    checksums = json.loads((tmp_path / ".crc-2.json").read_text())
    assert checksums == {shard.name: list(file_checksums.checksum(shard))}


def test_forks_that_all_hang_end_the_save_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "START_S", 0.1)
    calls = Calls(hanging=writer_process.FORKS)
    with pytest.raises(RunFailed, match=r"rank 2 on .* hung 3 times"):
        writer_process.start(calls, AsyncRequest(lambda: None, (), []), tmp_path, 2)  # type: ignore[arg-type]
    assert [p.exitcode for p in calls.processes] == [-signal.SIGKILL] * writer_process.FORKS


def test_writer_whose_file_process_was_killed_reports_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = writer_process.Results()
    monkeypatch.setattr(filesystem_async, "_results_queue", results)

    def write() -> None:
        FORK.Process(target=lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        time.sleep(600)  # as Megatron-Core's queue does

    calls = Calls(hanging=0)
    writer_process.start(calls, AsyncRequest(write, (), []), tmp_path, 2)  # type: ignore[arg-type]
    assert "rank 2 on " in str(error := results.get_nowait()) and "ended with status 9" in str(error)
    calls.process.join()
    assert calls.process.exitcode == 0

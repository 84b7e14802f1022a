"""Traces of torch's profiler for some steps, and the named ranges in them, which NVIDIA's tools show too."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from holmes_hpc.config.train import Profile
from holmes_hpc.training.rank.log import log_line

Waits = Sequence[Callable[[], None]]
_finished = list[profile]()  # kept alive, because in torch 2.13 a freed profile crashes a later garbage collection


class Ranges:
    """Named, nested ranges in the trace of torch's profiler, and with `cuda` in NVTX, while this rank is profiled."""

    active = False  # only while profiling, because a range costs 14 us

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._open = cuda, list[Any]()

    def push(self, name: str) -> None:
        if Ranges.active:
            self._open.append(self.range(name))
            self._open[-1].__enter__()

    def pop(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        if not Ranges.active:
            yield
            return
        with record_function(name), torch.cuda.nvtx.range(name) if self._cuda else nullcontext():
            yield


class Profiler:
    """The profiler of a rank, which writes a trace into `folder`.
    `window`: the steps and ranks to profile, None for no profile; `group`: a process group of all ranks; `waits`: they
    wait for all operations in progress. An operation of gloo that ends after its profile writes into freed memory
    (torch 2.13), which changed gradients. Raise ConfigError if `window` names a rank that does not exist."""

    def __init__(
        self, window: Profile | None, folder: Path, rank: int, world_size: int, group: Any = None, waits: Waits = ()
    ) -> None:
        if window is not None:
            window.check_ranks(world_size)
        self._window, self._group, self._is_profiled = window, group, window is not None and rank in window.ranks
        self._path, self._waits = folder / f"profile-rank-{rank}.json.gz", waits
        self._profile: profile | None = None

    def start_step(self, step: int) -> None:
        """Start the profile if `step` is in its window, and end the profile if `step` follows the window. All ranks
        call this before each step, and wait for ranks that start or write a profile."""
        if self._window is None:
            return
        if not self._window.start <= step <= self._window.stop:
            self.close()
        elif self._is_profiled and self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
            Ranges.active = True
        elif self._profile is not None:
            self._profile.step()
        if self._group is not None and step in (self._window.start, self._window.stop + 1):
            dist.barrier(group=self._group)

    def close(self) -> None:
        """End the profile, if there is one, and write its trace."""
        if self._profile is not None:
            for wait in self._waits:
                wait()
            start, Ranges.active = time.perf_counter(), False
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            _finished.append(self._profile)
            self._profile = None
            log_line(f"profile written to {self._path} in {time.perf_counter() - start:.1f} s")

"""Stopping when asked to: signals from Slurm or a user, and how all ranks come to stop after the same step."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.training.rank.log import say

STOP = (signal.SIGTERM, signal.SIGUSR2)  # Slurm's cancel and preemption; sbatch --signal before the time limit


class Signals:
    """Notes a wish to stop, in a ``with`` block; the handlers that were there (submitit's) come back after it."""

    def __init__(self) -> None:
        self.told: str | None = None  # the name of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told is None:
            self.told = signal.Signals(number).name
            say(f"{self.told}: a step or two more, then the state is saved")


@dataclass(frozen=True)
class AnyRank:
    """What held for at least one rank a step ago: it was asked to `stop`; its checkpoint was still `writing`."""

    stop: bool = False
    writing: bool = True


class ControlAllReduce:
    """Two flags of every rank, combined over all ranks once a step: sent beside the next step, so that nobody waits,
    and read at that step's end, by all ranks alike."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: tuple[torch.Tensor, Any] | None = None

    def exchange(self, *, stop: bool, writing: bool) -> AnyRank:
        """Start with this step's flags; what came of the last step's comes back."""
        last = self.finish()
        own = torch.tensor([int(stop), int(writing)])
        self._under_way = own, dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return last

    def finish(self) -> AnyRank:
        """What came of the last flags, and no more are sent."""
        if self._under_way is None:
            return AnyRank()
        flags, work = self._under_way
        self._under_way = None
        work.wait()
        return AnyRank(bool(flags[0]), bool(flags[1]))

"""Being asked to stop: signals, and how all ranks come to stop after the same step."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.training.rank.failure import say

STOP = (signal.SIGTERM, signal.SIGUSR2)  # Slurm's cancel and preemption; sbatch --signal before the time limit


class Signals:
    """Notes a wish to stop, in a ``with`` block; the handlers that were there (submitit's) come back after it."""

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.seen:
            self.seen = True
            say(f"{signal.Signals(number).name}: one more step, then the state is saved")


@dataclass(frozen=True)
class Said:
    """What any rank said a step ago: it wants to `stop`; its checkpoint is still `writing`."""

    stop: bool = False
    writing: bool = True


class Word:
    """A word of every rank to all, once a step and never waited for: it travels beside the next step, and is heard at
    that step's end, by all ranks alike."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._under_way: tuple[torch.Tensor, Any] | None = None

    def exchange(self, *, stop: bool, writing: bool) -> Said:
        """Say this step's word, hear the last one's."""
        heard = self.finish()
        own = torch.tensor([int(stop), int(writing)])
        self._under_way = own, dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return heard

    def finish(self) -> Said:
        """Hear what was said last, and say no more."""
        if self._under_way is None:
            return Said()
        word, work = self._under_way
        self._under_way = None
        work.wait()
        return Said(bool(word[0]), bool(word[1]))

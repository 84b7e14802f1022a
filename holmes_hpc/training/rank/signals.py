"""Early stops: signals from Slurm or a user, and the all-reduce by which all ranks stop after the same step."""

import signal
import threading
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.training.rank.log import log_line

STOP = (signal.SIGTERM, signal.SIGUSR2)  # from scancel and preemption; from sbatch --signal before the time limit


class Signals:
    """A ``with`` block that records the first stop signal. It restores the earlier handlers (submitit's) at its end."""

    def __init__(self) -> None:
        self.received: str | None = None  # the name of the signal
        self._earlier_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._earlier_handlers = {number: signal.signal(number, self._handle) for number in STOP}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            log_line(f"{self.received}: saving the state and stopping within two steps")


@dataclass(frozen=True)
class AnyRank:
    """Flags, each true if at least one rank set it in the previous step. The defaults are for the first step.

    `stop`: the rank has received a stop signal; `writing`: the rank was still writing a checkpoint; `copying`: the rank
    was still copying its state in memory."""

    stop: bool = False
    writing: bool = True
    copying: bool = True


class ControlAllReduce:
    """An all-reduce of flags over all ranks, once per step. It overlaps the next step, so no rank waits for it.

    All ranks read the result after the passes of that next step, so they all stop after the same step.
    """

    def __init__(self, group: Any, tree: Any = None) -> None:
        """`tree`: the control tree of a large run, which replaces the `group` of all ranks."""
        self._all_reduce = partial(dist.all_reduce, group=group, async_op=True) if tree is None else tree.all_reduce
        self._pending: tuple[torch.Tensor, Any] | None = None

    def start(self, *, stop: bool, writing: bool, copying: bool) -> None:
        """Start the all-reduce of this step's flags."""
        flags = torch.tensor([int(stop), int(writing), int(copying)])
        self._pending = flags, self._all_reduce(flags, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Wait for the all-reduce in progress, if any, and keep its result for :meth:`finish`."""
        if self._pending is not None:
            self._pending[1].wait()

    def finish(self) -> AnyRank:
        """Wait for the all-reduce in progress, if any. Return the combined flags of its step."""
        if self._pending is None:
            return AnyRank()
        flags, work = self._pending
        self._pending = None
        work.wait()
        return AnyRank(*map(bool, flags.tolist()))

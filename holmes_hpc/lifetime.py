"""The lifetime of a child process: it ends with its parent, however the parent ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process `parent`, ends for any reason. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

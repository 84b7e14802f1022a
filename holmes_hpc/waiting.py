"""Attempts with pauses, until a time limit."""

import time
from collections.abc import Callable, Iterator


def attempts(timeout_s: float, pause_s: float, longest_pause_s: float = 0) -> Iterator[float]:
    """Yield the remaining seconds of `timeout_s` before each attempt, and pause after it. Stop if the next pause would
    exceed `timeout_s`. There is at least one attempt. Pauses start at `pause_s` and double up to `longest_pause_s`."""
    end = time.monotonic() + timeout_s
    while True:
        yield end - time.monotonic()
        if time.monotonic() + pause_s > end:
            return
        time.sleep(pause_s)
        pause_s = max(pause_s, min(2 * pause_s, longest_pause_s))


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float) -> bool:
    """Wait until the condition holds, for at most `timeout_s` seconds. Return whether it holds."""
    return any(condition() for _ in attempts(timeout_s, pause_s))

"""Attempts with pauses, until a time limit."""

import time
from collections.abc import Callable, Iterator


def attempts(timeout_s: float, pause_s: float, longest_pause_s: float = 0) -> Iterator[float]:
    """Before each attempt, yield the seconds left of `timeout_s`; pause after it. End when the next pause would exceed
    `timeout_s`. There is at least one attempt. Pauses double up to `longest_pause_s`, if longer than `pause_s`."""
    end = time.monotonic() + timeout_s
    while True:
        yield end - time.monotonic()
        if time.monotonic() + pause_s > end:
            return
        time.sleep(pause_s)
        pause_s = max(pause_s, min(2 * pause_s, longest_pause_s))


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float) -> bool:
    """Wait until the condition holds, at most `timeout_s`; return whether it does."""
    return any(condition() for _ in attempts(timeout_s, pause_s))

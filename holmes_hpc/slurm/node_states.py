"""The states of a node, and whether Slurm starts jobs on it."""

import re
from collections.abc import Iterable

_UNUSABLE = re.compile(
    "DOWN|DRAIN(ED|ING)?|FAIL(ING)?|NOT_RESPONDING|NO_RESPOND|UNKNOWN|ERROR|(DYNAMIC_)?FUTURE|MAINT(ENANCE)?|POWERING_DOWN"
    "|BLOCKED|INVAL(ID_REG)?|REBOOT_(ISSUED|REQUESTED)"
)


def parse_states(text: str) -> tuple[str, ...]:
    """Parse ``IDLE*+DRAIN``; the mark * becomes the state NOT_RESPONDING."""
    matches = [re.fullmatch(r"(.*?)([*~#!%$@^-]*)", part, re.DOTALL) for part in text.split("+")]
    states = [s for match in matches if match for s in (match[1].upper(), "NOT_RESPONDING" if "*" in match[2] else "")]
    return tuple(dict.fromkeys(s for s in states if s))


def is_usable(states: Iterable[str]) -> bool:
    """Return whether a node in these states accepts new jobs."""
    return not any(map(_UNUSABLE.fullmatch, states))

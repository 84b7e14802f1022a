"""What every room raises: one line that says what was wrong, where, and what to do; and the exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class HolmesError(Exception):
    """Bad input or a bad site: `what` is wrong, `where`, and `hint` (what to do). Exit code 2.

    ``str(error)`` is always one line: ``where: what; hint``.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        text = f"{where}: {what}" if where else what
        super().__init__(" ".join((f"{text}; {hint}" if hint else text).split()))

    @classmethod
    def refuse(cls, *cases: tuple[Any, str, str, str]) -> None:
        """Raise this error for the first of `cases` (whether it is wrong, what is wrong, where, what to do) that is
        wrong."""
        for is_wrong, what, where, hint in cases:
            if is_wrong:
                raise cls(what, where=where, hint=hint)


class SiteError(HolmesError):
    """The site (Slurm's answer, a site file, a node's NICs) cannot be used as it is."""


class PlanError(HolmesError):
    """A model, a layout or a plan is impossible, or belongs to another site."""


class ConfigError(HolmesError):
    """An option, a named model or a batch is not one that exists or fits."""


class DataError(HolmesError):
    """A data set is missing, truncated, too short, or does not fit the model."""


class SubmissionError(HolmesError):
    """Slurm refused, or would refuse, the job."""


class RecordError(HolmesError):
    """A run directory is missing, unreadable, or of a newer version."""


class TestbedError(HolmesError):
    """The testbed cannot be made, or is not up."""

    __test__ = False  # not a pytest class


class RunFailed(HolmesError):
    """A job that was started did not end well. Exit code 1."""

    exit_code = 1


class NetworkError(RunFailed):
    """A NIC, a link or a process group does not do what the plan needs."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean X?` for an unknown word, or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(names)}"

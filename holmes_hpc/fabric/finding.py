"""One thing that was found wrong (or worth knowing): what every check of this room returns, and a door prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from holmes_hpc.errors import NetworkError

LEVELS = ("error", "warning", "info")
MOST_SKEW_S = 60.0  # between two nodes' clocks; munge refuses credentials at 300 s


@dataclass(frozen=True)
class Finding:
    """`level`: ``error`` (a run fails or crawls), ``warning`` (it may), ``info``. `node`, `nic`: where it is about one.

    ``str(finding)`` is one line: ``level: where: what; hint``.
    """

    level: str
    where: str
    what: str
    hint: str
    node: str = ""
    nic: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is not one of {LEVELS}")

    def __str__(self) -> str:
        return " ".join(f"{self.level}: {self.where}: {self.what}; {self.hint}".split())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.level == "error"]


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise the first error as a NetworkError that also says how many more there are."""
    bad = errors(findings)
    if bad:
        more = f" (and {len(bad) - 1} more like it)" if len(bad) > 1 else ""
        raise NetworkError(bad[0].what + more, where=bad[0].where, hint=bad[0].hint)

"""The common result of all checks in this package: a fault or a fact, which the entry points print."""

from collections.abc import Iterable
from dataclasses import dataclass

from holmes_hpc.errors import NetworkError

LEVELS = ("error", "warning", "info")
MAX_SKEW_S = 60.0  # largest tolerated difference between two clocks; munge refuses credentials at 300 s


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``str(finding)`` is one line: ``level: where: what; hint``.
    `level`: ``error`` (runs fail or are slow), ``warning`` (runs may fail or be slow) or ``info`` (runs are not
    affected); `node`, `nic`: the one node or NIC that the finding concerns; empty if it concerns several."""

    level: str
    where: str
    what: str
    hint: str
    node: str = ""
    nic: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.level}: {self.where}: {self.what}; {self.hint}".split())


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise NetworkError for the first error in `findings`. Its message states how many more errors there are."""
    if error_findings := [f for f in findings if f.level == "error"]:
        first, *others = error_findings
        more = f" (and {len(others)} more errors)" if others else ""
        raise NetworkError(first.what + more, where=first.where, hint=first.hint)

"""A fault or fact found by a check: the common result of all checks in this package, for the entry points to print."""

from collections.abc import Iterable
from dataclasses import dataclass

from holmes_hpc.errors import NetworkError

LEVELS = ("error", "warning", "info")
MAX_SKEW_S = 60.0  # between two nodes' clocks; munge refuses credentials at 300 s


@dataclass(frozen=True)
class Finding:
    """One result of a check. `level`: ``error`` (a run fails or is slow), ``warning`` (it may), ``info`` (it does not).
    `node`, `nic`: set if it concerns one node or NIC. ``str(finding)`` is one line: ``level: where: what; hint``."""

    level: str
    where: str
    what: str
    hint: str
    node: str = ""
    nic: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.level}: {self.where}: {self.what}; {self.hint}".split())


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise NetworkError for the first finding that is an error; its text also counts the others."""
    if error_findings := [f for f in findings if f.level == "error"]:
        first, *others = error_findings
        more = f" (and {len(others)} more errors)" if others else ""
        raise NetworkError(first.what + more, where=first.where, hint=first.hint)

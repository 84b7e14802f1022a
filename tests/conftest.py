"""The testbed for all tests marked `slurm`: the one that is up, or one of the session's own.

HOLMES_TESTBED_RELEASE=trixie makes it one with that Debian release's Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script starts the tests in the background
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@dataclass(frozen=True)
class Bed:
    """A testbed that is up; the environment of the tests points Slurm's commands at it."""

    env: dict[str, str]
    nodes: list[str]

    def exec(self, node: str, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a node; its output is captured."""
        from holmes_hpc import testbed

        return testbed.exec_in(node, argv, capture=True, timeout_s=timeout_s)

    def run(self, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command (a Slurm client, for instance) on this machine; its output is captured."""
        return subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=timeout_s,
                              check=False)


def why_no_testbed() -> str:
    """Why this machine cannot have a testbed at all; empty where it can."""
    if not sys.platform.startswith("linux"):
        return f"the testbed needs Linux, this is {sys.platform}"
    return "the testbed needs root" if os.geteuid() != 0 else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_testbed()
    for item in items:
        if reason and item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _tell(line: str) -> None:
    print(f"testbed: {line}", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def testbed() -> Iterator[Bed]:
    """The testbed that is up (it stays), or one that is brought up for this session and taken down after it."""
    from holmes_hpc import testbed as beds

    if reason := why_no_testbed():
        pytest.skip(reason)
    found = bool(beds.status()["up"])
    beds.up(release=os.environ.get("HOLMES_TESTBED_RELEASE"), progress=_tell)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in beds.env().items():
                patch.setenv(key, value)
            yield Bed(beds.env(), beds.nodes())
    finally:
        if not found:
            beds.down(_tell)

"""The testbed for all tests marked `slurm` (the one that is up, or one of the session's own), and what every test
has to keep to: the same examples every time, no process in a unit test, nothing left behind.

HOLMES_TESTBED_RELEASE=trixie makes the testbed one with that Debian release's Slurm.
"""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import leftovers
import process_guard
import pytest
from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script starts the tests in the background
ANY_MACHINE = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("pinned", ANY_MACHINE, derandomize=True)
settings.register_profile("fresh", ANY_MACHINE, print_blob=True)
settings.load_profile("pinned")  # `make explore` takes the other
process_guard.install()
gc.disable()  # until all tests are collected: a fifth of the time of importing them, and little to find
CHECKOUT = Path(__file__).parents[1]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)  # submitit's, where a test plays a task


@dataclass(frozen=True)
class SessionTestbed:
    """A testbed that is up; the environment of the tests points Slurm's commands at it."""

    env: dict[str, str]
    nodes: list[str]

    def exec(self, node: str, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command on a node; its output is captured."""
        from holmes_hpc import testbed

        return testbed.exec_in(node, argv, capture=True, timeout_s=timeout_s)

    def run(self, *argv: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command (a Slurm client, for instance) on this machine; its output is captured."""
        return subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=timeout_s, check=False
        )


def why_no_testbed() -> str:
    """Why this machine cannot have a testbed at all; empty where it can."""
    if not sys.platform.startswith("linux"):
        return f"the testbed needs Linux, this is {sys.platform}"
    return "the testbed needs root" if os.geteuid() != 0 else ""


LONGEST = (  # in this order
    "test_main_job.py",
    "test_how_jobs_end.py",
    "test_save_and_load.py",
    "test_launcher_local.py",
    "test_failure.py",
    "test_docs.py",
    "test_hugging_face.py",
    "test_readme.py",
    "test_layouts.py",
    "test_cli.py",
    "test_gpu_proof.py",
    "test_per_stage_layouts.py",
    "test_eager_1f1b.py",
    "test_planned.py",
)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # what was imported stays


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))  # workers that begin with them end together
    reason = why_no_testbed()
    for item in items:
        if reason and item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    process_guard.begin(item)
    try:
        return (yield)
    finally:
        process_guard.end()


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the tests of this worker, and what they start, put temporary files."""
    made = tmp_path_factory.mktemp("temporary", numbered=False)
    multiprocessing.util.get_temp_dir()  # this process's own lies where it always does: it is removed at the very end
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(made))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))  # torch makes it when loaded
        patch.setenv(leftovers.MARK, str(os.getpid()))
        patch.setattr(tempfile, "tempdir", None)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(temporary_folder: Path) -> Iterator[None]:
    """Fail the test that leaves a process or a temporary file, and take both away; fail a unit test that hid that it
    was kept from starting a process."""
    before, files = leftovers.process_ids(), leftovers.temporary(temporary_folder)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    hidden = process_guard.end()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    alive = leftovers.wait_until_gone(lambda: leftovers.processes(before))
    written = leftovers.wait_until_gone(lambda: sorted(leftovers.temporary(temporary_folder) - files))
    named = [leftovers.described(process) for process in alive]
    leftovers.kill(alive)
    leftovers.remove(written)
    assert not named, f"left alive: {named}"
    assert not written, f"left in the folder for temporary files: {[path.name for path in written]}"
    assert not hidden, f"a unit test tried to start a process: {hidden}"


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # one look at the whole, by the process that runs all workers
        session.config.stash[_BEFORE] = leftovers.checkout(CHECKOUT)


def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(_BEFORE, None)
    if before is None:
        return
    left = leftovers.wait_until_gone(lambda: sorted(leftovers.checkout(CHECKOUT) - before))
    if left:
        print("\nleft behind by the tests:", *left, sep="\n  ", file=sys.__stderr__)
        session.exitstatus = max(session.exitstatus, 1)


_BEFORE = pytest.StashKey[set[Path]]()


def _tell(line: str) -> None:
    print(f"testbed: {line}", file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def place_of_testbed() -> Iterator[None]:
    """Workers that run side by side have a testbed each, of their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix=worker, dir="/tmp") as folder, pytest.MonkeyPatch.context() as p:
        p.setenv("HOLMES_TESTBED", f"{folder}/bed")  # a short path: sockets are made below it
        yield


@pytest.fixture(scope="session")
def testbed(place_of_testbed: None) -> Iterator[SessionTestbed]:
    """Return the present testbed, which stays up, or create one for this session and remove it afterwards."""
    from holmes_hpc import testbed as testbed_module

    if reason := why_no_testbed():
        pytest.skip(reason)
    was_up = bool(testbed_module.status()["up"])
    testbed_module.up(release=os.environ.get("HOLMES_TESTBED_RELEASE"), progress=_tell)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in testbed_module.env().items():
                patch.setenv(key, value)
            yield SessionTestbed(testbed_module.env(), testbed_module.nodes())
    finally:
        if not was_up:
            testbed_module.down(_tell)

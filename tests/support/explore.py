"""Looks for counterexamples: every property test (or those of some files), with fresh seeds and many examples, again
and again for some minutes.

What it finds is printed with the name of the test, the values and the seed; it goes on, and the exit code is 1 in
the end. Pin each in its test with ``@example``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
MORE = 10  # times the examples that `make test` looks at
MARKS = "not slurm and not breaking and not gpu"


class Round:
    """A pytest plug-in: property tests only, with more examples, and none begun when the time is over."""

    def __init__(self, end: float, seed: int, found: dict[str, str], more: int) -> None:
        self.end, self.seed, self.found, self.more = end, seed, found, more
        self.ran = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        for test in {item.obj for item in chosen}:  # type: ignore[attr-defined]
            own = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(own, max_examples=self.more * own.max_examples)
        random.Random(self.seed).shuffle(chosen)  # so that a round that is cut short leaves out others each time
        items[:] = chosen

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            pytest.skip("the time is over")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call" and not report.skipped
        if report.failed:
            text = report.longreprtext
            example = text[text.rfind("Falsifying example") :] if "Falsifying example" in text else text[-3000:]
            self.found[report.nodeid] = example
            print(f"\nexplore: {report.nodeid}, seed {self.seed}:\n{example}\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("tests", nargs="*", default=[str(TESTS)], help="files, or folders of them")
    parser.add_argument("--more", type=int, default=MORE, help="times the examples that `make test` looks at")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    found: dict[str, str] = {}
    rounds = 0
    while time.monotonic() < end:
        this, rounds = Round(end, random.SystemRandom().randrange(2**32), found, asked.more), rounds + 1
        code = pytest.main(
            [
                *asked.tests,
                "-m",
                MARKS,
                "-q",
                "--no-header",
                "--tb=short",
                "--timeout=0",  # as long as many examples take on a busy machine
                "-p",
                "no:cacheprovider",
                "--hypothesis-profile=fresh",
                f"--hypothesis-seed={this.seed}",
            ],
            plugins=[this],
        )
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not this.ran:
            return int(code) or 3  # there was nothing to explore
        print(
            f"explore: round {rounds}, seed {this.seed}: {this.ran} property tests, {len(found)} counterexamples",
            flush=True,
        )
    for name, example in found.items():
        print(f"\nfound in {name}:\n{example}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

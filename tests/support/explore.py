"""Search for counterexamples: run property tests with fresh seeds and many examples for some minutes.

It runs all of them, or those of some files. Each counterexample is printed with the test's name, the values and the
seed, and the search continues; the exit code is then 1. Pin each one in its test with ``@example``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
FACTOR = 10  # times the examples of `make test`
MARKS = "not slurm and not breaking and not gpu"


class Round:
    """A pytest plug-in that runs property tests only, with more examples, and starts none after the time limit."""

    def __init__(self, end: float, seed: int, counterexamples: dict[str, str], factor: int) -> None:
        self.end, self.seed, self.counterexamples, self.factor = end, seed, counterexamples, factor
        self.ran = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        property_tests = [item for item in items if hasattr(getattr(item, "obj", None), "hypothesis")]
        config.hook.pytest_deselected(items=[item for item in items if item not in property_tests])
        for test in {item.obj for item in property_tests}:  # type: ignore[attr-defined]
            test_settings = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(
                test_settings, max_examples=self.factor * test_settings.max_examples
            )
        random.Random(self.seed).shuffle(property_tests)  # so that shortened rounds skip different tests
        items[:] = property_tests

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            pytest.skip("time limit reached")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call" and not report.skipped
        if report.failed:
            text = report.longreprtext
            example = text[text.rfind("Falsifying example") :] if "Falsifying example" in text else text[-3000:]
            self.counterexamples[report.nodeid] = example
            print(f"\nexplore: {report.nodeid}, seed {self.seed}:\n{example}\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("tests", nargs="*", default=[str(TESTS)], help="files, or folders of them")
    parser.add_argument("--more", type=int, default=FACTOR, help="times the examples of `make test`")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counterexamples: dict[str, str] = {}
    rounds = 0
    while time.monotonic() < end:
        current, rounds = Round(end, random.SystemRandom().randrange(2**32), counterexamples, options.more), rounds + 1
        code = pytest.main(
            [
                *options.tests,
                "-m",
                MARKS,
                "-q",
                "--no-header",
                "--tb=short",
                "--timeout=0",  # many examples take long on a busy machine
                "-p",
                "no:cacheprovider",
                "--hypothesis-profile=fresh",
                f"--hypothesis-seed={current.seed}",
            ],
            plugins=[current],
        )
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not current.ran:
            return int(code) or 3  # no property tests ran
        print(
            f"explore: round {rounds}, seed {current.seed}: {current.ran} property tests, "
            f"{len(counterexamples)} counterexamples",
            flush=True,
        )
    for name, example in counterexamples.items():
        print(f"\ncounterexample in {name}:\n{example}")
    return 1 if counterexamples else 0


if __name__ == "__main__":
    sys.exit(main())

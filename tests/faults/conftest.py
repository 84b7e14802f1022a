"""The undisturbed run that runs with faults are compared with, once for each file of tests."""

from pathlib import Path

import interruptions
import pytest


@pytest.fixture(scope="module")
def root(testbed: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def whole(root: Path) -> interruptions.Figures:
    return interruptions.undisturbed_figures(root)

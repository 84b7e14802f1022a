"""A module is started without code from the working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holmes_hpc.interpreter import module_arguments


@pytest.mark.integration
@pytest.mark.parametrize("any_version", [False, True])
def test_a_module_in_the_working_directory_is_not_run(any_version: bool, tmp_path: Path) -> None:
    for name in ("runpy", "json", "submitit", "holmes_hpc"):
        (tmp_path / f"{name}.py").write_text("print('code of another user')\n")
    command = [sys.executable, *module_arguments("json.tool", any_version=any_version), "--indent", "3"]
    output = subprocess.run(command, cwd=tmp_path, input='{"a": 1}', capture_output=True, text=True, timeout=30)
    assert output.stdout == '{\n   "a": 1\n}\n' and not output.stderr


@pytest.mark.integration
@pytest.mark.parametrize("any_version", [False, True])
def test_its_exit_code_comes_back(any_version: bool, tmp_path: Path) -> None:
    command = [sys.executable, *module_arguments("json.tool", any_version=any_version), "missing.json"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30).returncode == 2

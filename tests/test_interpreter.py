"""A module is started without code from the working directory, which must exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holmes_hpc import cli, train
from holmes_hpc.interpreter import module_arguments


@pytest.mark.parametrize("program", [cli, train])
def test_a_removed_working_directory_is_named(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    monkeypatch.setenv("PWD", str(directory))
    monkeypatch.setattr(sys, "argv", ["holmes", "models"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"holmes: {directory}: this working directory was removed; `cd` to another one\n"


@pytest.mark.integration
@pytest.mark.parametrize("any_version", [False, True])
def test_a_module_in_the_working_directory_is_not_run(any_version: bool, tmp_path: Path) -> None:
    for name in ("runpy", "json", "submitit", "holmes_hpc"):
        (tmp_path / f"{name}.py").write_text("print('code of another user')\n")
    command = [sys.executable, *module_arguments("json.tool", any_version=any_version), "--indent", "3"]
    output = subprocess.run(command, cwd=tmp_path, input='{"a": 1}', capture_output=True, text=True, timeout=30)
    assert output.stdout == '{\n   "a": 1\n}\n' and not output.stderr


def test_empty_parts_of_pythonpath_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":/x::/y:")
    module_arguments("json.tool")
    assert os.environ["PYTHONPATH"] == "/x:/y"


@pytest.mark.integration
@pytest.mark.parametrize("any_version", [False, True])
def test_its_exit_code_comes_back(any_version: bool, tmp_path: Path) -> None:
    command = [sys.executable, *module_arguments("json.tool", any_version=any_version), "missing.json"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30).returncode == 2

"""A task runs the pickle that its own user submitted, and no code of the working directory."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_pickle import Code

from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor
from holmes_hpc.submission.executor.task import LocalTaskExecutor, task_arguments

pytestmark = pytest.mark.integration


def test_a_local_task_imports_no_code_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours, ran = tmp_path / "theirs", tmp_path / "ours", tmp_path / "ran"
    theirs.mkdir()
    ours.mkdir()
    for name in ("submitit", "holmes_hpc", "runpy", "numpy", "cloudpickle"):
        (theirs / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (ours / "beside_the_program.py").write_text("import os\n\n\ndef where():\n    return os.getcwd(), __file__\n")
    monkeypatch.chdir(theirs)
    monkeypatch.syspath_prepend(str(ours))
    where = importlib.import_module("beside_the_program").where
    job = LocalTaskExecutor(tmp_path / "log").submit(where)
    assert job.result() == (str(theirs), str(ours / "beside_the_program.py")) and not ran.exists()
    assert os.getcwd() == str(theirs)


def test_modules_of_a_folder_of_others_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert task_arguments(tmp_path)[-1] == str(tmp_path)
    tmp_path.chmod(0o777)
    assert task_arguments(tmp_path)[-1] == ""


def test_another_python_gets_a_start_that_any_version_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmHetExecutor, "affinity", lambda _: 1)  # as if this machine had sbatch
    own = SlurmHetExecutor(tmp_path / "own").job_script()
    assert " -u -P -m holmes_hpc.submission.executor.task " in own or sys.version_info < (3, 11)
    other = SlurmHetExecutor(tmp_path / "other", python="python3").job_script()
    assert "python3 -u -c 'import sys; sys.path[:]" in other and " -P " not in other


@pytest.mark.parametrize("attack", ["mode", "folder mode", "link", "pipe"])
def test_a_pickle_that_others_could_write_is_not_read(attack: str, tmp_path: Path) -> None:
    folder, ran = tmp_path / "submission", tmp_path / "ran"
    folder.mkdir()
    path = folder / "7_submitted.pkl"
    path.write_bytes(pickle.dumps(Code(ran)))
    if attack == "link":
        path.rename(folder / "elsewhere.pkl")
        path.symlink_to(folder / "elsewhere.pkl")
    elif attack == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        (path if attack == "mode" else folder).chmod(0o777)
    environment = {**os.environ, "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_JOB_ID": "7"}
    command = [sys.executable, *task_arguments(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and not ran.exists()
    assert done.stderr.startswith("holmes: ") and done.stderr.count("\n") == 1

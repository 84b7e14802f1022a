"""Reuse of earlier jobs: never those of another program, nor for a point that a sweeper repeats."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from holmes_hpc.errors import ConfigError, RecordError, SubmissionError
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.sweeps import program, reuse
from holmes_hpc.submission.sweeps.jobs import job_states
from holmes_hpc.submission.sweeps.launcher import LocalLauncher
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest
from holmes_hpc.submission.sweeps.program import describe_changes, program_of
from holmes_hpc.submission.sweeps.reuse import (
    BASIC_SWEEPER,
    find_earlier_jobs,
    parse_reuse,
    refuse_active_jobs,
    select_reused,
)

OTHER_SWEEPER = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


def test_reuse_needs_the_basic_sweeper() -> None:
    assert [parse_reuse(None, s) for s in (BASIC_SWEEPER, OTHER_SWEEPER)] == [True, False]
    assert parse_reuse("ask", BASIC_SWEEPER) == "ask" and parse_reuse(False, OTHER_SWEEPER) is False
    with pytest.raises(ConfigError, match="OptunaSweeper needs a new measurement of every point"):
        parse_reuse(True, OTHER_SWEEPER)
    with pytest.raises(ConfigError, match="'yes' is not true, false or ask"):
        parse_reuse("yes", BASIC_SWEEPER)


def candidate(num: int, program: Any = None, folder: Path = Path()) -> Any:
    """Return a job that a launch is to submit, with the override x=`num`."""
    return types.SimpleNamespace(key=(f"x={num}",), digest="d", program=program, directory=folder)


def make_function(folder: Path, text: str, name: str = "app") -> Any:
    """Return a task function from the file `folder`/`name`.py, as Hydra gets it."""
    (folder / f"{name}.py").write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    program._read_program.cache_clear()
    for cache in (program._find_spec, program._sources):
        cache.cache_clear()
    return module.run


APP = "def run(cfg):\n    from pack import part\n    return part.one()\n"


def test_program_contains_all_importable_user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "part.py").write_text("from .sub import deep\nimport numpy, not_there\n")
    (tmp_path / "pack" / "sub" / "__init__.py").write_text("")
    (tmp_path / "pack" / "sub" / "deep.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("x = 1\n")
    old = program_of(make_function(tmp_path, APP))
    assert old is not None
    files = {path.removeprefix(f"{tmp_path}/") for path in old.files if path.startswith(str(tmp_path))}
    assert files == {"app.py", "pack/__init__.py", "pack/part.py", "pack/sub/__init__.py", "pack/sub/deep.py"}
    assert any(p.startswith("numpy-") for p in old.packages) and old.packages[0].startswith("Python-3.")
    assert "app.py" in str(old) and "packages and Python" in str(old)
    (tmp_path / "unused.py").write_text("x = 2\n")
    assert program_of(make_function(tmp_path, APP)) == old
    (tmp_path / "pack" / "sub" / "deep.py").write_text("x = 2\n")
    new = program_of(make_function(tmp_path, APP))
    assert new is not None and new.digest != old.digest
    assert describe_changes(asdict(old), new) == "by another program: deep.py"
    assert describe_changes(None, new) == "by an unknown program"


def test_new_package_version_changes_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "site-packages" / "thing-1.0.dist-info").mkdir(parents=True)
    old = program_of(make_function(tmp_path, APP))
    (tmp_path / "site-packages" / "thing-1.0.dist-info").rename(tmp_path / "site-packages" / "thing-2.0.dist-info")
    new = program_of(make_function(tmp_path, APP))
    assert old is not None and new is not None
    assert describe_changes(asdict(old), new) == "by another program: thing-1.0, thing-2.0"


def test_function_without_source_file_reuses_nothing(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("def run(cfg): return 1", scope)
    assert program_of(scope["run"]) is None
    manifest = open_manifest(tmp_path)
    manifest.put(SweepJob(0, ("x=1",), "0", "plain", "slurm", "41", "x", digest="d"))
    earlier = find_earlier_jobs(manifest, [candidate(1)], {manifest.jobs[0]: JobState("RUNNING")})
    assert "without a source file" in str(earlier[("x=1",)]) and select_reused(earlier, True) == {}


def test_only_jobs_of_earlier_processes_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(program_of)
    assert program is not None
    manifest = open_manifest(tmp_path)
    for num, (submitted, digest) in enumerate(
        [
            (reuse.PROCESS_START - 9, program.digest),
            (reuse.PROCESS_START + 9, program.digest),
            (reuse.PROCESS_START - 9, "another"),
        ]
    ):
        manifest.put(
            SweepJob(
                num,
                (f"x={num}",),
                str(num),
                "plain",
                "slurm",
                str(num),
                "x",
                digest="d",
                submitted=submitted,
                program=digest,
            )
        )
    running = {job: JobState("RUNNING") for job in manifest.jobs}
    earlier = find_earlier_jobs(manifest, [candidate(num, program) for num in range(3)], running)
    assert list(earlier) == [("x=0",), ("x=2",)]
    assert list(select_reused(earlier, True)) == [("x=0",)] and select_reused(earlier, False) == {}
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert select_reused(earlier, "ask") == {}  # stdin is no terminal
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert list(select_reused(earlier, "ask")) == [("x=0",), ("x=2",)]
    with pytest.raises(SubmissionError, match=r"job 2 of an earlier launch is running .*sweep cancel"):
        refuse_active_jobs(manifest, running, [candidate(0, folder=tmp_path / "2")], select_reused(earlier, True))
    refuse_active_jobs(manifest, running, [candidate(0, folder=tmp_path / "0")], select_reused(earlier, True))


def test_sweep_directory_writable_by_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, sweep_dir = LocalLauncher(), tmp_path / "a" / "sweep"
    launcher.config = types.SimpleNamespace(hydra=types.SimpleNamespace(sweep={}))  # type: ignore[assignment]
    launcher._create_directory(sweep_dir)
    sweep_dir.parent.chmod(0o777)
    with pytest.raises(RecordError, match="a can be written by everybody"):
        launcher._create_directory(sweep_dir)
    executor = types.SimpleNamespace(folder=sweep_dir / ".submitit" / "%j")
    monkeypatch.setattr("holmes_hpc.submission.sweeps.launcher.create_executor", lambda *_: executor)
    with pytest.raises(RecordError, match="a can be written by everybody"):
        launcher._submit_plain(None, types.SimpleNamespace(config=None))  # type: ignore[arg-type]


def test_files_of_a_sweep_are_not_writable_by_others(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        LocalLauncher().setup(hydra_context=None, task_function=None, config=None)  # type: ignore[arg-type]
        assert os.umask(0) == 0o022
    finally:
        os.umask(old_umask)


def test_jobs_of_an_older_manifest_are_not_reused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(
        '{"version": 1, "created": 1, "jobs": [{"num": 0, "overrides": ["x=1"], "directory": "0", "kind": "plan",'
        ' "where": "local", "job_id": "4", "folder": "x", "digest": "d"}]}'
    )
    manifest = open_manifest(tmp_path)
    running = {manifest.jobs[0]: JobState("RUNNING")}
    earlier = find_earlier_jobs(manifest, [candidate(1, program_of(program_of))], running)
    assert select_reused(earlier, True) == {} and job_states(manifest, []) == {}


SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
class Again(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)
    def sweep(self, arguments):
        values = []
        for batch in range(2):
            values += [job.return_value for job in self.launcher.launch([("+x=1",)], initial_job_idx=batch)]
        print("values", *values)
ConfigStore.instance().store(group="hydra/sweeper", name="again", node={"_target_": "hydra_plugins.again.Again"})
"""
NOISY = """
import os, hydra, noise
@hydra.main(config_path=None, config_name=None, version_base="1.3")
def app(cfg):
    return noise.of(cfg.x) + os.getpid()
app()
"""


@pytest.mark.integration
def test_repeated_points_of_a_sweeper_are_measured_again(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "again.py").write_text(SWEEPER)
    (tmp_path / "app.py").write_text(NOISY)
    (tmp_path / "noise.py").write_text("def of(x): return x * 10**9\n")

    def launch(*args: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "app.py",
                "-m",
                "hydra/launcher=holmes_local",
                *args,
                f"hydra.sweep.dir={tmp_path / 'sweep'}",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    output = launch("hydra/sweeper=again")
    values = output.split("values ")[1].split()
    assert len(set(values)) == 2, values
    assert len(open_manifest(tmp_path / "sweep").jobs) == 2
    output = launch("+x=1")
    assert output.count("reused: #") == 1 and "not reused" not in output and "1 completed" not in output
    (tmp_path / "noise.py").write_text("def of(x): return -x * 10**9\n")
    output = launch("+x=1")
    assert output.count("not reused: #") == 1 and "by another program: noise.py" in output

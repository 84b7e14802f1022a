"""No old value is passed off as a measurement: not of another program, and not of a point that is asked about again."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from holmes_hpc.errors import ConfigError, RecordError, SubmissionError
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.sweeps import program, reuse
from holmes_hpc.submission.sweeps.jobs import states
from holmes_hpc.submission.sweeps.launcher import LocalLauncher
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest
from holmes_hpc.submission.sweeps.program import changes, program_of
from holmes_hpc.submission.sweeps.reuse import WAITING_SWEEPER, earlier_jobs, refuse_living, reuse_setting, take_over

OTHER = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


def test_only_hydras_basic_sweeper_takes_old_values_over() -> None:
    assert [reuse_setting(None, s) for s in (WAITING_SWEEPER, OTHER)] == [True, False]
    assert reuse_setting("ask", WAITING_SWEEPER) == "ask" and reuse_setting(False, OTHER) is False
    with pytest.raises(ConfigError, match="OptunaSweeper measures every point anew"):
        reuse_setting(True, OTHER)
    with pytest.raises(ConfigError, match="'yes' is none of true, false, ask"):
        reuse_setting("yes", WAITING_SWEEPER)


def made(folder: Path, text: str, name: str = "app") -> Any:
    """A task function whose file is `folder`/app.py, as Hydra gets it."""
    (folder / f"{name}.py").write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.py")
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    program._program.cache_clear()
    for cache in (program._spec, program._sources):
        cache.cache_clear()
    return module.run


APP = "def run(cfg):\n    from pack import part\n    return part.one()\n"


def test_a_program_is_all_of_the_users_modules_that_it_can_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "part.py").write_text("from .sub import deep\nimport numpy, not_there\n")
    (tmp_path / "pack" / "sub" / "__init__.py").write_text("")
    (tmp_path / "pack" / "sub" / "deep.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("x = 1\n")
    before = program_of(made(tmp_path, APP))
    assert before is not None
    own = {path.removeprefix(f"{tmp_path}/") for path in before.files if path.startswith(str(tmp_path))}
    assert own == {"app.py", "pack/__init__.py", "pack/part.py", "pack/sub/__init__.py", "pack/sub/deep.py"}
    assert any(p.startswith("numpy-") for p in before.packages) and before.packages[0].startswith("Python-3.")
    assert "app.py" in str(before) and "packages and Python" in str(before)
    (tmp_path / "unused.py").write_text("x = 2\n")
    assert program_of(made(tmp_path, APP)) == before
    (tmp_path / "pack" / "sub" / "deep.py").write_text("x = 2\n")
    after = program_of(made(tmp_path, APP))
    assert after is not None and after.digest != before.digest
    assert changes(before.to_dict(), after) == "by another program: deep.py"
    assert changes(None, after) == "by a program that is not known"


def test_another_version_of_a_package_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "site-packages" / "thing-1.0.dist-info").mkdir(parents=True)
    before = program_of(made(tmp_path, APP))
    (tmp_path / "site-packages" / "thing-1.0.dist-info").rename(tmp_path / "site-packages" / "thing-2.0.dist-info")
    after = program_of(made(tmp_path, APP))
    assert before is not None and after is not None
    assert changes(before.to_dict(), after) == "by another program: thing-1.0, thing-2.0"


def test_without_a_source_nothing_is_taken_over(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "nowhere"}
    exec("def run(cfg): return 1", scope)
    assert program_of(scope["run"]) is None
    manifest = open_manifest(tmp_path)
    manifest.put(SweepJob(0, ("x=1",), "0", "plain", "slurm", "41", "x", digest="d"))
    found = earlier_jobs(manifest, {("x=1",): ("d", None)}, {manifest.jobs[0]: JobState("RUNNING")})
    assert "without a source file" in str(found[("x=1",)]) and take_over(found, True) == {}


def test_only_jobs_from_before_this_process_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = program_of(program_of)
    assert now is not None
    manifest = open_manifest(tmp_path)
    for num, (submitted, digest) in enumerate(
        [(reuse.BEGAN - 9, now.digest), (reuse.BEGAN + 9, now.digest), (reuse.BEGAN - 9, "another")]
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
    found = earlier_jobs(manifest, {job.key: ("d", now) for job in manifest.jobs}, running)
    assert list(found) == [("x=0",), ("x=2",)]
    assert list(take_over(found, True)) == [("x=0",)] and take_over(found, False) == {}
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert take_over(found, "ask") == {}  # nobody can be asked
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert list(take_over(found, "ask")) == [("x=0",), ("x=2",)]
    with pytest.raises(SubmissionError, match=r"job 2 of an earlier launch is running .*sweep cancel"):
        refuse_living(manifest, running, [("x=0",)], [str(tmp_path / "2")], take_over(found, True))
    refuse_living(manifest, running, [("x=0",)], [str(tmp_path / "0")], take_over(found, True))


def test_no_sweep_where_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, place = LocalLauncher(), tmp_path / "a" / "sweep"
    launcher.config = types.SimpleNamespace(hydra=types.SimpleNamespace(sweep={}))  # type: ignore[assignment]
    launcher._make(place)
    place.parent.chmod(0o777)
    with pytest.raises(RecordError, match="a can be written by everybody"):
        launcher._make(place)
    executor = types.SimpleNamespace(folder=place / ".submitit" / "%j")
    monkeypatch.setattr("holmes_hpc.submission.sweeps.launcher.executor_of", lambda *_: executor)
    with pytest.raises(RecordError, match="a can be written by everybody"):
        launcher._submit_plain(None, types.SimpleNamespace(config=None))  # type: ignore[arg-type]


def test_what_a_sweep_makes_others_cannot_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        LocalLauncher().setup(hydra_context=None, task_function=None, config=None)  # type: ignore[arg-type]
        assert os.umask(0) == 0o022
    finally:
        os.umask(before)


def test_a_manifest_of_an_earlier_release_is_read_and_nothing_of_it_taken_over(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(
        '{"version": 1, "created": 1, "jobs": [{"num": 0, "overrides": ["x=1"], "directory": "0", "kind": "plan",'
        ' "where": "local", "job_id": "4", "folder": "x", "digest": "d"}]}'
    )
    manifest = open_manifest(tmp_path)
    found = earlier_jobs(manifest, {("x=1",): ("d", program_of(program_of))}, {manifest.jobs[0]: JobState("RUNNING")})
    assert take_over(found, True) == {} and states(manifest, []) == {}


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
def test_every_point_that_a_sweeper_asks_about_is_measured(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "again.py").write_text(SWEEPER)
    (tmp_path / "app.py").write_text(NOISY)
    (tmp_path / "noise.py").write_text("def of(x): return x * 10**9\n")

    def launch(*words: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "app.py",
                "-m",
                "hydra/launcher=holmes_local",
                *words,
                f"hydra.sweep.dir={tmp_path / 'sweep'}",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = launch("hydra/sweeper=again")
    values = said.split("values ")[1].split()
    assert len(set(values)) == 2, values
    assert len(open_manifest(tmp_path / "sweep").jobs) == 2
    said = launch("+x=1")
    assert said.count("taken over: #") == 1 and "not taken over" not in said and "1 completed" not in said
    (tmp_path / "noise.py").write_text("def of(x): return -x * 10**9\n")
    said = launch("+x=1")
    assert said.count("not taken over: #") == 1 and "by another program: noise.py" in said

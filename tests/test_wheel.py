"""A wheel is small, the same wherever it is built, and enough by itself: no checkout, torch, pandas or figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("hatchling", reason="`make install` brings it")
pytestmark = pytest.mark.integration
ROOT = Path(__file__).parent.parent
SITE = """
name: two-clusters
ethernet_gbps: 25
gpu: {name: a100-80gb, peak_tflops: 312, memory_gib: 80, intra_node_gbps: 2400}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 200, partition: gpu-ib, nodes: 1, gpus_per_node: 8}
  - {name: roce-a, nic: roce, rdma_gbps: 200, partition: gpu-roce, nodes: 1, gpus_per_node: 8}
"""
# each verb of stdin in turn -> [exit code, stdout, stderr]
VERBS = """
import contextlib, io, json, sys
from holmes_hpc.cli import main
made = []
for words in json.load(sys.stdin):
    sys.argv, code, out, err = ["holmes", *words], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    made.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(made))
"""
# what verbs read beside their own code, and what needs a Slurm before it can be seen to start
PACKAGED = """
from holmes_hpc.config.composition import load
from holmes_hpc.submission import plan_job, templates
from holmes_hpc.submission.lifecycle import batch_end, batch_start, create, progress
from holmes_hpc.submission.sweeps import launcher, sweep_table
from holmes_hpc.testbed import testbed, topology
assert len(topology.read("evaluation").nodes) == 28
assert load(["+sweep=ablation"]).train.steps == 20
assert "hetjob" in templates.templates()["two_components.sbatch"]
"""


def build(source: Path, target: Path) -> dict[str, bytes]:
    """Build both distributions of `source` without network: name -> content."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {file.name: file.read_bytes() for file in target.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    build(ROOT, target)
    return target


def test_small_and_the_same_from_a_source_distribution_without_git(dist: Path, tmp_path: Path) -> None:
    first = {file.name: file.read_bytes() for file in dist.iterdir()}
    assert len(first) == 2 and max(map(len, first.values())) < 2e6
    wheel, source = sorted(dist.iterdir(), key=lambda file: file.suffix, reverse=True)
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (top,) = tmp_path.iterdir()
    (top / "pyproject.toml").chmod(0o600)  # another machine, another time and umask
    os.utime(top / "pyproject.toml", (1.9e9, 1.9e9))
    assert build(top, tmp_path / "again") == first
    with zipfile.ZipFile(wheel) as archive:
        assert "holmes_hpc/COMMIT" in archive.namelist()


@pytest.fixture(scope="module")
def venv(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and its dependencies alone, linked from this one, offline."""
    made = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(made / "bin" / "python"),
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--no-compile",
            str(next(dist.glob("*.whl"))),
        ],
        check=True,
        timeout=120,
    )
    (site,) = made.glob("lib/python*/site-packages")
    todo, seen = [Distribution.at(next(site.glob("holmes_hpc-*.dist-info")))], set()
    while todo:
        for wanted in map(Requirement, todo.pop().requires or []):
            if wanted.name not in seen and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
                seen.add(wanted.name)
                todo.append(found := distribution(wanted.name))
                for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
                    link(Path(str(found.locate_file(top))), site / top)
    return made


def link(source: Path, target: Path) -> None:
    """As `pip install` would put it there; a namespace that is there already gets what it lacks."""
    if not target.exists():
        target.symlink_to(source)
    elif target.is_dir() and not target.is_symlink():
        for child in source.iterdir():
            link(child, target / child.name)


def alone(venv: Path, directory: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Python of the environment, with nothing of this one: no PYTHONPATH, no Slurm."""
    records = venv / "share" / "holmes-hpc" / "analysis" / "records"
    return subprocess.run(
        [str(venv / "bin" / "python"), "-I", *words],
        cwd=directory,
        input=given,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env={
            "PATH": str(venv / "bin"),
            "HOME": str(directory),
            "HOLMES_RUNS": str(records),
            "HOLMES_TESTBED": "/tmp/holmes-no-bed",
        },
    )  # short, as a socket's path must be


def test_verbs_alone(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    verbs = {
        "--version": (0, "(commit "),
        "plan model=gpt_3_6b batch=paper_3_6b --site site.yaml -o plan.yaml": (0, "ib-a"),
        "predict plan.yaml": (0, "Step time"),
        "status s-holmes": (0, "s-holmes"),
        "logs s-holmes": (0, "no log"),
        "testbed status": (1, "no testbed"),
        "nodes": (2, "Slurm"),
        "submit plan.yaml data=synthetic --dry-run": (2, "Slurm"),
        "sweep status nowhere": (2, "nowhere"),
        "report s-holmes": (2, "pip install 'holmes-hpc[report]'"),
        "export s-holmes --safetensors there": (2, "pip install 'holmes-hpc[train]'"),
    }
    done = alone(venv, tmp_path, "-c", VERBS, given=json.dumps([verb.split() for verb in verbs]))
    assert done.returncode == 0, done.stderr
    for (verb, (code, word)), (found, out, err) in zip(verbs.items(), json.loads(done.stdout), strict=True):
        assert found == code and word in out + err, (verb, found, out, err)
        assert code != 2 or len(err.splitlines()) == 1, (verb, err)


def test_everything_that_verbs_read_is_in_the_wheel(venv: Path, tmp_path: Path) -> None:
    done = alone(venv, tmp_path, "-c", PACKAGED)
    assert done.returncode == 0, done.stderr


def test_a_rank_without_torch_says_what_to_install(venv: Path, tmp_path: Path) -> None:
    done = alone(venv, tmp_path, "-m", "holmes_hpc.train", "train.steps=1", f"run_dir={tmp_path}/run")
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        2,
        [
            "holmes: Python: the package torch is not installed; pip install 'holmes-hpc[train]'"
            " (without a GPU: torch's CPU build, see docs/install.md)"
        ],
    )

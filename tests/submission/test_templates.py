"""The batch scripts under slurm/: equal to the executor's text, and run with sbatch alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import plans
import pytest

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError
from holmes_hpc.records.find import find_run
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import make
from holmes_hpc.submission.lifecycle.batch_start import prepare_run
from holmes_hpc.submission.templates import plan_script, templates

SLURM = Path(__file__).parents[2] / "slurm"


def test_the_files_equal_the_executors_text() -> None:
    assert {p.name: p.read_text() for p in SLURM.glob("*.sbatch")} == templates(), (
        "python -m holmes_hpc.submission.templates slurm"
    )


def test_the_script_of_a_plan_starts_each_pools_own_python(tmp_path: Path) -> None:
    own = {"roce-a": {"python": "/opt/arm/bin/python -E"}, "ib-a": {"container": "image.sif"}}
    settings = make(SlurmSettings, {"pools": own}, "slurm")
    script = plan_script(plans.plan("ib-a", "roce-a", "eth-a"), tmp_path / "plan.yaml", "run", settings, [])
    starts = [line.split(" -c ")[0].strip() for line in script.splitlines() if "holmes_hpc.train" in line]
    images, pythons = zip(*(line.rpartition(" ")[::2] for line in starts), strict=True)
    assert images[0] == "apptainer exec image.sif" and pythons[0] == "python3"
    assert starts[1] == "/opt/arm/bin/python -E" and pythons[2].startswith('"${PYTHON:-')


@pytest.mark.integration
@pytest.mark.parametrize("name", templates())
def test_shellcheck_finds_nothing(name: str) -> None:
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), SLURM / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.integration  # git prints the commit for the record
def test_a_script_with_other_components_than_the_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans.plan("ib-a", "roce-a")
    plan.write(tmp_path / "plan.yaml")
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_HET_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"plan.yaml: the plan has 2 components, this job has 3; .*--template FILE"):
        prepare_run(tmp_path / "run", tmp_path / "plan.yaml")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    for index, part in enumerate(plan.components):
        monkeypatch.setenv(f"SLURM_JOB_NUM_NODES_HET_GROUP_{index}", str(part.nodes + index))
        monkeypatch.setenv(f"HOLMES_TASKS_PER_NODE_{index}", str(part.gpus_per_node))
    with pytest.raises(
        ConfigError, match=r"component 1 \(roce-a\) .* 2 nodes with \d ranks.*, that of this job has 3 with"
    ):
        prepare_run(tmp_path / "run", tmp_path / "plan.yaml")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES_HET_GROUP_1", str(plan.components[1].nodes))
    assert prepare_run(tmp_path / "run", tmp_path / "plan.yaml").exists()


RANK = """\
import os, sys, time
from holmes_hpc.records.run import RunDirectory
words = dict(a.split("=", 1) for a in sys.argv[1:])
rank, run = int(os.environ["SLURM_PROCID"]), RunDirectory(words["run_dir"])
if rank == 0:
    run.start_attempt({})
    run.append_metrics({"step": run.attempt, "loss": 1.5, "attempt": run.attempt})
print("rank", rank, "on", os.environ["SLURMD_NODENAME"], words, flush=True)
if rank == 1 and int(os.environ.get("SLURM_RESTART_COUNT") or 0) < int(words.get("+labels.fail") or 0):
    while not run.metrics():
        time.sleep(0.1)
    sys.exit(3)
run.write_exit(rank, "completed")
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a Python whose holmes_hpc.train is short, and stand-ins for the container tools."""
    (tmp_path / "rank.py").write_text(RANK)
    scripts = {
        "python3": f'[ "$3" = holmes_hpc.train ] && {{ shift 3; exec {sys.executable} {tmp_path}/rank.py "$@"; }}\n'
        f'exec {sys.executable} "$@"',
        "apptainer": '[ "$1" = exec ] && [ "$2" = holmes_hpc.sif ] || exit 9\nshift 2; exec "$@"',
        "srun": 'case "$*" in *--container-image=holmes_hpc:latest*) ;; *) exec REAL "$@";; esac\n'
        'n=$#; while [ $n -gt 0 ]; do a=$1; shift; n=$((n-1)); case "$a" in --container-image=*) ;; '
        '*) set -- "$@" "$a";; esac; done\nexec REAL "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in scripts.items():
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/sh\n" + text.replace("REAL", shutil.which("srun") or "srun") + "\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.slurm
@pytest.mark.usefixtures("testbed")
@pytest.mark.parametrize("name", templates())
def test_each_template_runs_on_slurm(bench: Path, name: str) -> None:
    fabrics = {"one_fabric.sbatch": ("ib-a",), "three_components.sbatch": ("ib-a", "roce-a", "eth-a")}.get(
        name, ("ib-a", "roce-a")
    )
    plan = plans.plan(*fabrics)
    plan.write(bench / "plan.yaml")
    extra = ["+labels.fail=1"] if name == "requeue.sbatch" else []
    note = '+labels.note="a b;$(touch pwned)"'
    job = subprocess.run(
        ["sbatch", "--parsable", str(SLURM / name), note, *extra],
        cwd=bench,
        env={**os.environ, "RUN": "my run", "PYTHON": "python3"},
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stderr
    run = RunDirectory(bench / "my run")
    end = time.monotonic() + 60
    while (not run.exists() or run.read_result() is None) and time.monotonic() < end:
        time.sleep(0.3)
    result = run.read_result()
    log = (bench / f"holmes-{job.stdout.strip()}.txt").read_text()
    assert result is not None and result["state"] == "completed", (result, log)
    assert run.attempt == (2 if extra else 1)
    for rank in range(plan.world_size):
        assert f"rank {rank} on " in run.log_path(rank).read_text()
        assert "a b;$(touch pwned)" in run.log_path(rank).read_text()
    assert find_run(job.stdout.strip(), bench).path == run.path
    assert not (bench / "pwned").exists()
    record, config, restarts = run.read_run(), run.config, 3 if extra else 0
    assert config["labels"]["note"] == "a b;$(touch pwned)" and config["launcher"]["kind"] == "slurm"
    assert record["overrides"] == [f"train.max_restarts={restarts}", note, *extra]
    assert config["train"]["max_restarts"] == restarts
    assert [c["fabric"] for c in record["components"]] == list(fabrics) and record["plan_id"] == plan.id

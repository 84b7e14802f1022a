"""Parameters have the same effect as in submitit's SlurmExecutor: both scripts have the same options.
docs/submission.md and this test list the intended differences."""

from __future__ import annotations

import itertools
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import submitit

from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor

# Our scripts always have nodes and tasks, other output files, a token in the comment, and no default wckey.
INTENDED_DIFFERENCES = {"output", "error", "wckey", "nodes", "ntasks-per-node", "comment"}
GENERIC: dict[str, tuple[Any, Any]] = {
    "name": ("a", "b"),
    "timeout_min": (7, 8),
    "mem_gb": (3, 4.5),
    "nodes": (2, 3),
    "cpus_per_task": (2, 3),
    "gpus_per_node": (1, 2),
    "tasks_per_node": (2, 3),
}
SPECIFIC: dict[str, tuple[Any, Any]] = {
    "job_name": ("c", "d"),
    "time": (9, 10),
    "mem": ("9GB", "10GB"),
    "ntasks_per_node": (4, 5),
    "num_gpus": (3, 4),
    "partition": ("p", "q"),
    "cpus_per_gpu": (1, 2),
    "gpus_per_task": (1, 2),
    "qos": ("x", "y"),
    "mem_per_gpu": ("1G", "2G"),
    "mem_per_cpu": ("1G", "2G"),
    "signal_delay_s": (30, 40),
    "constraint": ("f", "g"),
    "exclude": ("n1", "n2"),
    "account": ("me", "you"),
    "gres": ("gpu:1", "gpu:2"),
    "mail_type": ("END", "ALL"),
    "mail_user": ("a@b", "c@d"),
    "nodelist": ("n3", "n4"),
    "dependency": ("afterok:1", "afterok:2"),
    "exclusive": (True, "user"),
    "wckey": ("w", "v"),
    "additional_parameters": ({"nice": 3}, {"switches": 1}),
    "comment": ("hello", "there"),
}
PAIRS = [
    ("name", "job_name"),
    ("timeout_min", "time"),
    ("mem_gb", "mem"),
    ("tasks_per_node", "ntasks_per_node"),
    ("gpus_per_node", "num_gpus"),
]


@pytest.fixture(autouse=True)
def commands(fake_slurm: Any) -> None:
    fake_slurm.answer("srun", "exit 0")


def script_options(folder: Path, cluster: str, calls: list[dict[str, Any]]) -> dict[str, str]:
    """Return the options in an executor's script after these calls of update_parameters."""
    executor = submitit.AutoExecutor(folder, cluster=cluster)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            executor.update_parameters(**call)
        inner = executor._executor
        text = inner.job_script() if cluster == "slurmhet" else inner._make_submission_file_text("true", "0" * 32)
    words = [
        word
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
        for word in [shlex.split(line[len("#SBATCH --") :], comments=False)[0]]
    ]
    options = {key: value for key, _, value in (word.partition("=") for word in words)}
    ranks = {k: options.get(k, "1") for k in ("nodes", "ntasks-per-node")}
    comment = {"comment": options.get("comment", "")}
    wckey = {k: v for k, v in options.items() if k == "wckey" and v != "submitit"}
    return {k: v for k, v in options.items() if k not in INTENDED_DIFFERENCES} | ranks | comment | wckey


def assert_same_options(folder: Path, *calls: dict[str, Any]) -> None:
    assert script_options(folder, "slurmhet", list(calls)) == script_options(folder, "slurm", list(calls)), calls


@pytest.mark.integration
def test_every_parameter_alone_and_twice(tmp_path: Path) -> None:
    for prefix, table in (("", GENERIC), ("slurm_", GENERIC), ("slurm_", SPECIFIC)):
        for name, (first, second) in table.items():
            assert_same_options(tmp_path, {prefix + name: first})
            assert_same_options(tmp_path, {prefix + name: first}, {prefix + name: second})


@pytest.mark.integration
def test_specific_and_generic_names_have_submitit_precedence(tmp_path: Path) -> None:
    for general, special in PAIRS:
        names = {
            general: GENERIC[general][0],
            f"slurm_{general}": GENERIC[general][1],
            f"slurm_{special}": SPECIFIC[special][0],
        }
        for first, second in itertools.permutations(names, 2):
            assert_same_options(tmp_path, {first: names[first], second: names[second]})  # in one call, in any order
            assert_same_options(tmp_path, {first: names[first]}, {second: names[second]})
        assert_same_options(tmp_path, names)


def test_slurmhet_prefix_wins_over_slurm_prefix(tmp_path: Path) -> None:
    for calls, expected in (
        ([{"timeout_min": 7, "slurm_time": 8, "slurmhet_time": 9}], "9"),
        ([{"slurmhet_timeout_min": 6, "slurm_timeout_min": 7, "timeout_min": 8}], "6"),
        ([{"slurmhet_timeout_min": 6, "slurm_time": 7}], "7"),
        ([{"slurmhet_time": 9}, {"slurm_time": 8}], "8"),
    ):
        assert script_options(tmp_path, "slurmhet", calls)["time"] == expected, calls


def test_error_for_a_mistyped_parameter_lists_the_valid_ones(tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path, cluster="slurmhet")
    with pytest.raises(NameError, match=r"'foo'.*Valid arguments: .*components.*partition.*qos"):
        executor.update_parameters(slurmhet_foo=1)
    with pytest.raises(ValueError, match=r"nonsense.*valid are account.*mem_per_gpu"):
        SlurmHetExecutor(tmp_path).update_parameters(nonsense=1)


def test_job_script_returns_the_batch_script(tmp_path: Path) -> None:
    executor = SlurmHetExecutor(tmp_path / "log", components=[{"partition": "ib"}, {"partition": "eth"}])
    text = executor.job_script()
    assert text.startswith("#!/bin/bash\n#SBATCH --") and "holmes-" not in text
    assert "holmes_hpc.submission.executor.task" in text

"""The text of the batch script, and its quoting for sbatch and the shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import SubmissionError
from holmes_hpc.submission.executor.batch_script import JobRequest, directives, script_text
from holmes_hpc.submission.executor.component import ComponentRequest, parse_component, sbatch_word

IB = ComponentRequest(2, 2, "ib", "nic_ib", gpus_per_node=2)
ETH = ComponentRequest(1, 2, "eth", "nic_ethernet")
ANY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)


def read_directive(line: str) -> str:
    """Parse the first word of an #SBATCH line as sbatch does (src/sbatch/opt.c): a backslash escapes everywhere, quotes
    of both kinds group, # outside quotes ends the line."""
    out, quote, escaped = [], "", False
    for c in line:
        if escaped:
            out.append(c)
            escaped = False
        elif c == "\\":
            escaped = True
        elif quote:
            if c == quote:
                quote = ""
            else:
                out.append(c)
        elif c in "'\"":
            quote = c
        elif c.isspace() or c == "#":
            break
        else:
            out.append(c)
    return "".join(out)


@given(LINE)
def test_sbatch_reads_quoted_directives_unchanged(text: str) -> None:
    assert read_directive("--job-name=" + sbatch_word(text)) == "--job-name=" + text


@given(st.sampled_from("\n\r\0\x1b\x7f"), LINE, LINE)
def test_control_characters_are_refused_in_directives(character: str, prefix: str, suffix: str) -> None:
    with pytest.raises(SubmissionError, match="control character"):
        sbatch_word(prefix + character + suffix)


@given(ANY)
def test_shell_reads_quoted_words_unchanged(text: str) -> None:
    if "%j" not in text:
        assert shlex.split(JobRequest((IB,)).quote(text)) == [text]


PRINT_STATUS = "echo $status-$signalled"
NASTY = [
    "a b",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned;",
    "line\ntouch pwned",
    "ünï ☃",
    "*",
    "-n",
    "\\",
    "a\\'b",
    "!x",
    "$HOME",
    "#SBATCH --x",
    "\n#SBATCH --array=1-9",
    "%j%t",
]


@pytest.mark.integration
def test_bash_runs_the_script_with_every_argument_unchanged(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(
        '#!/bin/sh\nwhile [ "$1" != CMD ]; do shift; done; shift\n'
        'for a in "$@"; do printf \'%s\\0\' "$a"; done > "$OUT"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    job = JobRequest(
        (IB, ETH),
        name="x y",
        rank_output=str(tmp_path / "a b%j $(touch pwned) %t.out"),
        directories=(str(tmp_path / "d 'e'"),),
        exit_record=str(tmp_path / "exit %j"),
    )
    script = tmp_path / "job.sh"
    script.write_text(script_text(job, shlex.join(["CMD", *NASTY])), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "SLURM_JOB_ID": "7"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes().decode().split("\0")[:-1] == NASTY
    assert not list(tmp_path.rglob("pwned"))
    assert (tmp_path / "d 'e'").is_dir()
    assert (tmp_path / "exit 7").read_text().split()[0] == "0"


@pytest.mark.integration
def test_exit_status_and_record_are_those_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "srun").chmod(0o755)
    text = script_text(JobRequest((IB,), exit_record=str(tmp_path / "%j_exit")), "true", finish=[PRINT_STATUS])
    done = subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"},
    )
    assert done.returncode == 3 and done.stdout == "3-\n"
    assert (tmp_path / "9_exit").read_text().split()[0::2] == ["3", "-"]


@pytest.mark.integration
def test_script_handles_a_signal_and_waits_for_the_step(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nkill -TERM $PPID; sleep 0.3; exit 5\n")
    (tmp_path / "srun").chmod(0o755)
    text = script_text(JobRequest((IB,), exit_record=str(tmp_path / "%j_exit")), "true", finish=[PRINT_STATUS])
    done = subprocess.run(
        ["bash", "-c", text],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"},
    )
    assert (done.returncode, done.stdout) == (5, "5-TERM\n")


def test_components_have_separate_options_and_one_step() -> None:
    text = script_text(JobRequest((IB, ETH), name="gpt"), "python x.py")
    first, second = text.split("#SBATCH hetjob\n")
    for part, partition, constraint in ((first, "ib", "nic_ib"), (second, "eth", "nic_ethernet")):
        assert f"#SBATCH --partition={partition}\n" in part and f"#SBATCH --constraint={constraint}\n" in part
        assert "#SBATCH --nodes=" in part and "#SBATCH --ntasks-per-node=2\n" in part
    assert "--gpus-per-node=2" in first and "--gpus-per-node" not in second
    steps = [line for line in text.splitlines() if line.startswith("srun ")]
    assert len(steps) == 1
    assert "--het-group=0,1 " in steps[0] and "--kill-on-bad-exit=1" in steps[0]
    assert "--distribution=block:block" in steps[0]


def test_one_component_is_a_plain_job() -> None:
    text = script_text(JobRequest((IB,)), "true")
    assert "hetjob" not in text and "het-group" not in text


def test_srun_gets_no_output_pattern() -> None:
    step = step_of(JobRequest((IB, ETH), rank_output="/d/%j/%t.out"))
    assert "%j" not in step and "%t" not in step and "--output" not in step


@pytest.mark.integration
def test_tasks_write_to_the_files_of_their_rank(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(
        '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nfor r in 0 1; do SLURM_PROCID=$r "$@"; done\n'
    )
    (tmp_path / "srun").chmod(0o755)
    job = JobRequest(
        (IB, ETH), rank_output=str(tmp_path / "%j it's $(touch pwned) %t.out"), rank_error=str(tmp_path / "%t.err")
    )
    text = script_text(job, shlex.join(["sh", "-c", 'echo "out $0"; echo err >&2', "a  b"]))
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"},
    )
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert (tmp_path / f"9 it's $(touch pwned) {rank}.out").read_text() == "out a  b\n"
        assert (tmp_path / f"{rank}.err").read_text() == "err\n"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "minutes, signal", [(60, "USR2@90"), (3, "USR2@90"), (2, "USR2@30"), (1, None), ("1-00:00:00", "USR2@90")]
)
def test_default_signal_delay_is_shorter_in_short_jobs(minutes: int | str, signal: str | None) -> None:
    assert dict(JobRequest((IB,), timeout_min=minutes).options()).get("signal") == signal or (
        signal is None and "--signal" not in script_text(JobRequest((IB,), timeout_min=minutes), "true")
    )


def test_explicit_signal_delay_is_used() -> None:
    assert dict(JobRequest((IB,), timeout_min=1, signal_delay_s=45, signal="USR1").options())["signal"] == "USR1@45"


def step_of(job: JobRequest, command: str = "true") -> str:
    """Return the srun command of a job's script in one line."""
    lines = script_text(job, command).replace(" \\\n  ", " ").splitlines()
    (step,) = [line for line in lines if line.startswith("srun ")]
    return step


def test_unequal_cpus_per_task_give_separate_het_groups() -> None:
    parts = (ComponentRequest(1, 1, cpus_per_task=2), ComponentRequest(1, 1, cpus_per_task=4))
    step = step_of(JobRequest(parts), "CMD")
    assert step.count("CMD") == 2 and " : " in step
    assert "--het-group=0 " in step and "--cpus-per-task=2" in step.split(" : ")[0]
    assert "--het-group=1 " in step and "--cpus-per-task=4" in step.split(" : ")[1]


def test_task_settings_can_differ_by_component() -> None:
    a = parse_component(
        {
            "partition": "arm",
            "container": "arm.sqsh",
            "mounts": ["/data:/data", "/b c:/b"],
            "environment": {"X": "a b", "Y": 1},
            "srun_args": ["--mpi=none"],
        }
    )
    b = parse_component({"partition": "x86", "container": "", "setup": ["module load gcc", "echo 'it''s'"]})
    c = parse_component({"partition": "gpu"})
    job = JobRequest((a, b, c), container="all.sif", srun_args=("--label",))
    lines = script_text(job, ["ARM", "X86", "GPU"]).replace(" \\\n  ", " ")
    first, second, third = lines.split("\nsrun ")[1].split("&\nstep=")[0].split(" : ")
    for word in (
        "--het-group=0",
        "--container-image=arm.sqsh",
        "--container-mounts='/data:/data,/b c:/b'",
        "--label --mpi=none",
        "env 'X=a b' Y=1 ARM",
    ):
        assert word in first, word
    assert "--het-group=1" in second and "container" not in second and second.rstrip().endswith(" X86")
    assert "bash -c" in second and "\nmodule load gcc\n" in second and "--mpi" not in second
    assert "--het-group=2" in third and "apptainer exec all.sif GPU" in third and "sh -c" in third
    assert not any(word in "\n".join(directives(job)) for word in ("container", "mounts", "environment", "setup"))


@pytest.mark.integration
def test_setup_and_variables_of_a_component_reach_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\nSLURM_PROCID=0 "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    part = parse_component(
        {"environment": {"X": "$(touch pwned) 'a'"}, "setup": ['tool() { echo "tool $1"; }', "tool b"]}
    )
    job = JobRequest((part,), rank_output=str(tmp_path / "%t.out"))
    text = script_text(job, shlex.join(["sh", "-c", 'echo "$X" "$0"', "c"]))
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "0.out").read_text() == "tool b\n$(touch pwned) 'a' c\n" and not (tmp_path / "pwned").exists()


@pytest.mark.integration
def test_task_without_srun_writes_to_its_files_too(tmp_path: Path) -> None:
    job = JobRequest((ComponentRequest(),), use_srun=False, rank_output=str(tmp_path / "%j_%t.out"))
    done = subprocess.run(
        ["bash", "-c", script_text(job, shlex.join(["echo", "here"]))],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "9", "SLURM_PROCID": "0"},
    )
    assert (done.returncode, done.stdout) == (0, "") and (tmp_path / "9_0.out").read_text() == "here\n"


@pytest.mark.parametrize(
    "values, error",
    [
        ({"nodes": 0}, "component 0: nodes is 0"),
        ({"partitoin": "x"}, "did you mean 'partition'"),
        ({"additional": {"foo bar": 1}}, "not an sbatch option"),
        ({"partition": "a\nb"}, "control character"),
        ({"nodes": True}, "nodes is True"),
        ({"setup": "module load x"}, "setup is a string"),
        ({"environment": {"a b": 1}}, "not the name of a variable"),
    ],
)
def test_impossible_components_are_refused(values: dict[str, object], error: str) -> None:
    with pytest.raises(SubmissionError, match=error):
        parse_component(values)


def test_component_accepts_submitit_names() -> None:
    request = parse_component({"ntasks_per_node": 3, "mem_gb": 1.5, "additional_parameters": {"switches": 1}})
    assert request.arguments() == ["--nodes=1", "--ntasks-per-node=3", "--mem=1536MB", "--switches=1"]


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"dependency": "singleton", "components": (IB, ETH)}, "wait for itself"),
        ({"dependency": "afterany:1 --x"}, "dependency"),
        ({"additional": (("array", "1-3"),), "components": (IB, ETH)}, "cannot be an array"),
        ({"setup": "module load x"}, "is a string, not a list"),
        ({"use_srun": False}, "more than one task"),
        ({"timeout_min": 0}, "timeout_min"),
        ({"components": ()}, "no component"),
        ({"output": "a\\b"}, "backslash"),
    ],
)
def test_impossible_jobs_are_refused(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(SubmissionError, match=match):
        list(directives(JobRequest(**{"components": (IB,), **arguments})))  # type: ignore[arg-type]


@pytest.mark.integration
def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    job = JobRequest(
        (IB, ETH),
        directories=("/a b",),
        exit_record="/a b/%j_exit",
        step_errors="/a b/srun.txt",
        environment=(("X", "y z"),),
    )
    path = tmp_path / "job.sh"
    path.write_text(script_text(job, shlex.join(["python", "a b"]), finish=['echo "$status" "$signalled"']))
    done = subprocess.run([Path(sys.executable).with_name("shellcheck"), path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.integration
@pytest.mark.parametrize("restarts, code", [("", 0), ("1", 0), ("2", 1)])
def test_job_requeued_too_often_does_not_start(tmp_path: Path, restarts: str, code: int) -> None:
    job = JobRequest(
        (ComponentRequest(),),
        use_srun=False,
        exit_record=str(tmp_path / "exit"),
        max_requeues=1,
        rank_output=str(tmp_path / "out"),
    )
    script = tmp_path / "job.sh"
    script.write_text(script_text(job, shlex.join(["touch", str(tmp_path / "ran")])))
    done = subprocess.run(
        ["bash", script],
        env={**os.environ, "SLURM_RESTART_COUNT": restarts},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == code and (tmp_path / "ran").exists() is (code == 0), done.stderr
    assert (tmp_path / "exit").read_text().split()[0] == str(code)
    assert ("requeued 2 times, max_requeues is 1" in done.stderr) is (code == 1)

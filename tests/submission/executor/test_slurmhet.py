"""The executor's API for users of submitit, and its submissions to Slurm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import plans
import pytest
import submitit
from submitit.core import plugins

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm import commands
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor
from holmes_hpc.submission.plan_job import PlannedJob, plan_executor, submit_plan

PARTS = [{"partition": "ib", "constraint": "nic_ib", "nodes": 2, "tasks_per_node": 2}, {"partition": "eth", "nodes": 1}]
FEASIBLE = """
for a in "$@"; do [ "$a" = --test-only ] && {
  echo "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 4 processors on nodes ib1 in partition ib" >&2; exit 0; }
done
n=$(cat "$0.count" 2>/dev/null || echo 40); n=$((n+1)); echo $n > "$0.count"; echo $n
"""


@pytest.fixture
def slurm(fake_slurm: Any) -> Any:
    fake_slurm.answer("sbatch", FEASIBLE)
    return fake_slurm


def submissions(slurm: Any) -> list[list[str]]:
    return [c for c in slurm.calls("sbatch") if "--test-only" not in c]


def test_plug_in_is_loaded_but_not_the_default(slurm: Any, tmp_path: Path) -> None:
    slurm.answer("srun", "exit 0")
    executors = plugins.get_executors()
    assert executors["slurmhet"] is SlurmHetExecutor
    assert 0 < SlurmHetExecutor.affinity() < executors["slurm"].affinity()
    assert submitit.AutoExecutor.which() == "slurm"


@pytest.mark.integration
def test_a_submitit_script_runs_with_components(slurm: Any, tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="slurmhet", slurm_max_num_timeout=7)
    executor.update_parameters(
        name="gpt",
        timeout_min=90,
        mem_gb=4,
        gpus_per_node=8,
        stderr_to_stdout=True,
        slurm_partition="fallback",
        slurm_setup=["module load x"],
        slurm_comment="mine",
        slurm_srun_args=["--mpi=none"],
        slurm_additional_parameters={"switches": 1},
        slurmhet_components=PARTS,
    )
    job = executor.submit(print, "x")
    assert isinstance(job, SlurmHetJob) and job.job_id == "41" and job.num_tasks == 5
    text = job.paths.submission_file.read_text()
    first, second = text.split("#SBATCH hetjob")
    for line in ("--job-name=gpt", "--time=90", "--mem=4GB", "--gpus-per-node=8", "--partition=ib", "--switches=1"):
        assert f"#SBATCH {line}\n" in first
    for line in ("--mem=4GB", "--gpus-per-node=8", "--partition=eth", "--switches=1"):
        assert f"#SBATCH {line}\n" in second
    assert "fallback" not in text  # each component has its own partition
    assert "module load x" in text and "--mpi=none" in text and "--error=" not in text
    assert re.search(r'--comment="mine holmes-[0-9a-f]{32}"', text)
    assert job.submission().function is print
    assert job.submission()._timeout_countdown == 7


@pytest.mark.integration
def test_job_options_go_to_the_first_component_and_others_to_each(slurm: Any, tmp_path: Path) -> None:
    parts = [PARTS[0], {**PARTS[1], "gres": "gpu:a:2", "additional": {"exclusive": "user"}}]
    executor = SlurmHetExecutor(tmp_path / "log", components=parts)
    executor.update_parameters(
        additional_parameters={"gres": "gpu:1", "exclusive": True, "nice": 5, "mail_type": "END"}
    )
    text = executor.submit(print).paths.submission_file.read_text()
    first, second = (
        [line[8:] for line in part.splitlines() if line.startswith("#SBATCH --")]
        for part in text.split("#SBATCH hetjob")
    )
    assert {"--gres=gpu:1", "--exclusive", "--nice=5", "--mail-type=END"} <= set(first)
    assert {"--gres=gpu:a:2", "--exclusive=user"} <= set(second)
    assert not {"--gres=gpu:1", "--exclusive", "--nice=5", "--mail-type=END"} & set(second)
    tested = [call for call in slurm.calls("sbatch") if "--test-only" in call]
    assert "--gres=gpu:1" in tested[0] and "--gres=gpu:a:2" in tested[1]


@pytest.mark.parametrize(
    "parameters, error",
    [
        ({"slurm_nonsense": 1}, "nonsense"),
        ({"slurmhet_nonsense": 1}, "nonsense"),
        ({"slurm_use_srun": False}, "use_srun"),
        ({"slurmhet_components": [{"nodes": 0}]}, "nodes is 0"),
        ({"slurm_dependency": "singleton"}, "wait for itself"),
    ],
)
def test_wrong_parameters_are_refused(slurm: Any, tmp_path: Path, parameters: dict[str, Any], error: str) -> None:
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="slurmhet", slurmhet_components=PARTS)
    with pytest.raises(Exception, match=error):
        executor.update_parameters(**parameters)


def test_other_clusters_keep_their_parameters(slurm: Any, tmp_path: Path) -> None:
    """Every AutoExecutor loads our plug-in, which must not take over SlurmExecutor's unprefixed names."""
    slurm.answer("srun", "exit 0")
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="slurm")
    with pytest.warns(UserWarning, match="slurm_partition"):
        executor.update_parameters(partition="p", slurm_qos="q")
    assert executor.parameters["partition"] == "p" and executor.parameters["qos"] == "q"


@pytest.mark.integration
def test_one_component_is_a_plain_job_without_preflight(slurm: Any, tmp_path: Path) -> None:
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0]])
    job = executor.submit(print)
    assert "hetjob" not in job.paths.submission_file.read_text()
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.integration
def test_heterogeneous_jobs_are_throttled_by_dependencies(slurm: Any, tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="slurmhet", slurmhet_components=PARTS)
    executor.update_parameters(slurm_array_parallelism=2, slurm_dependency="afterok:7")
    jobs = executor.map_array(print, range(5))
    texts = [job.paths.submission_file.read_text() for job in jobs]
    dependencies = [re.search(r"--dependency=(\S+)", text).group(1) for text in texts]  # type: ignore[union-attr]
    assert dependencies == ["afterok:7"] * 2 + [f"afterok:7,afterany:{job}" for job in (41, 42, 43)]
    assert not any("--array" in text for text in texts)
    assert all(re.search(r"executor\.throttle \S+/\.throttle_\w+\.json \S+\nexit", text) for text in texts)
    with executor.batch():
        delayed = [executor.submit(print, i) for i in range(3)]
    assert [j.job_id for j in delayed] == ["46", "47", "48"]


@pytest.mark.integration
@pytest.mark.parametrize("folder", ["log", "log/%j"])
def test_several_jobs_of_one_component_are_an_array(slurm: Any, tmp_path: Path, folder: str) -> None:
    executor = submitit.AutoExecutor(tmp_path / folder, cluster="slurmhet", slurmhet_components=PARTS[:1])
    executor.update_parameters(slurm_array_parallelism=2)
    jobs = executor.map_array(print, range(5))
    assert [job.job_id for job in jobs] == [f"41_{i}" for i in range(5)] and len(submissions(slurm)) == 1
    text = jobs[0].paths.submission_file.read_text()
    assert "#SBATCH --array=0-4%2\n" in text and "%A_%a" in text
    assert not any("%j" in line for line in text.splitlines() if line.startswith("#SBATCH"))
    assert 'export HOLMES_LEADER_JOB_ID="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n' in text
    assert [job.submission().args for job in jobs] == [(i,) for i in range(5)]
    assert {job.num_tasks for job in jobs} == {4}
    loaded = SlurmHetJob(tmp_path / folder, "41_3")
    identities = loaded.watcher._identities
    assert loaded.num_tasks == 4 and identities["41_3"].token == identities["41_0"].token
    with executor.batch():
        delayed = [executor.submit(print, i) for i in range(2)]
    assert [job.job_id for job in delayed] == ["42_0", "42_1"]


@pytest.mark.integration
def test_failed_batch_cancels_its_submitted_jobs(slurm: Any, tmp_path: Path) -> None:
    third = '[ $n = 43 ] && { echo "sbatch: error: no" >&2; exit 1; };'
    slurm.answer("sbatch", FEASIBLE.replace("n=$((n+1));", "n=$((n+1)); " + third))
    slurm.answer("scancel", "exit 0")
    executor = SlurmHetExecutor(tmp_path / "log", components=PARTS)
    with pytest.raises(SubmissionError, match="no"):
        executor.map_array(print, range(5))
    assert slurm.calls("scancel") == [["42"], ["41"]]  # in reverse order, or a cancelled job would start the next


@pytest.mark.integration
def test_job_is_found_after_a_lost_answer(slurm: Any, tmp_path: Path) -> None:
    slurm.answer(
        "sbatch",
        'grep -o "holmes-[0-9a-f]*" "$2" > "$0.token"; '
        'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1',
    )
    token = '$(cat "$(dirname "$0")/sbatch.token")'
    slurm.answer("squeue", f'echo "77+1{SEPARATOR}(null)"; echo "77+0{SEPARATOR}{token}"')
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0]])
    assert executor.submit(print).job_id == "77"
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.integration
def test_refusal_is_one_line_and_leaves_no_file(slurm: Any, tmp_path: Path) -> None:
    slurm.answer("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1')
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0]])
    with pytest.raises(SubmissionError) as caught:
        executor.submit(print)
    assert "Invalid account" in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, submitit.core.utils.FailedSubmissionError)
    assert not list((tmp_path / "log").glob(".submission*"))


@pytest.mark.integration
def test_infeasible_components_are_not_submitted(slurm: Any, tmp_path: Path) -> None:
    slurm.answer(
        "sbatch",
        """
for a in "$@"; do case "$a" in --test-only) test=1;; --nodes=1) one=1;; --partition=ib) ib=1;; esac; done
[ -n "$test" ] && { [ -n "$ib$one" ] && {
  echo "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 4 processors on nodes ib1 in partition ib" >&2; exit 0; }
  echo "allocation failure: Requested node configuration is not available" >&2; exit 1; }
echo 50""",
    )
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0], {"partition": "eth", "nodes": 3}])
    with pytest.raises(SubmissionError) as caught:
        executor.submit(print)
    assert "component 1 (3 nodes of eth)" in str(caught.value) and "at most 1 node" in str(caught.value)
    assert isinstance(caught.value, submitit.core.utils.FailedSubmissionError)
    assert submissions(slurm) == []


@pytest.mark.integration
def test_components_are_tested_with_the_job_time_limit(slurm: Any, tmp_path: Path) -> None:
    slurm.answer(
        "sbatch",
        """
for a in "$@"; do [ "$a" = --time=99 ] && {
  echo "allocation failure: Requested time limit is invalid (missing or exceeds some limit)" >&2; exit 1; }; done
echo "sbatch: Job 9 to start at 2030-01-01T00:00:00 using 4 processors on nodes ib1 in partition ib" >&2""",
    )
    executor = SlurmHetExecutor(tmp_path / "log", components=PARTS)
    executor.update_parameters(time=99)
    with pytest.raises(SubmissionError, match=r"component 0 .*time limit is invalid.*shorter time limit than 99"):
        executor.submit(print)
    run = RunDirectory.create(tmp_path / "run", plan_text=plans.plan("ib-a").to_yaml(), config=plans.CONFIG)
    with pytest.raises(SubmissionError, match="shorter time limit than 99"):
        submit_plan(PlannedJob(plans.plan("ib-a"), plans.CONFIG, print, SlurmSettings(timeout_min=99)), run.path)
    assert submissions(slurm) == []


@pytest.mark.integration
def test_unreachable_controller_is_no_component_error(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("sbatch", 'echo "allocation failure: Unable to contact slurm controller" >&2; exit 1')
    monkeypatch.setattr(
        "holmes_hpc.submission.executor.preflight.slurm_with_retries", lambda arguments: commands.slurm(*arguments)
    )
    with pytest.raises(SubmissionError, match=r"Unable to contact slurm controller.*scontrol ping") as caught:
        SlurmHetExecutor(tmp_path / "log", components=PARTS).submit(print)
    assert "component" not in str(caught.value)


@pytest.mark.integration
def test_identical_components_are_tested_once(slurm: Any, tmp_path: Path) -> None:
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0], PARTS[1]])
    for _ in range(3):
        executor.submit(print)
    assert len(slurm.calls("sbatch")) == 2 + 3


@pytest.mark.integration
def test_killed_tasks_are_waited_for_only_once(slurm: Any, tmp_path: Path) -> None:
    slurm.answer(
        "sacct",
        f"printf '41{SEPARATOR}FAILED{SEPARATOR}1:0{SEPARATOR}%s{SEPARATOR}None{SEPARATOR}n"
        f"{SEPARATOR}submitit\\n' $(date +%s)",
    )
    executor = SlurmHetExecutor(tmp_path / "log", components=[{"nodes": 1, "tasks_per_node": 3}])
    job = executor.submit(print)
    submitit.core.utils.cloudpickle_dump(("error", "ValueError: it was me"), job.task(1).paths.result_pickle)
    assert job.done() and job.state == "FAILED"
    submitit.core.utils.cloudpickle_dump(("success", 7), job.task(0).paths.result_pickle)
    with pytest.raises(submitit.core.utils.FailedJobError, match="it was me"):
        raise job.exception()
    with pytest.raises(submitit.core.utils.FailedJobError, match="it was me"):
        job.results()  # instead of the error that task 2 has no output
    assert job.task(0).result() == 7


@pytest.mark.integration
def test_job_loaded_from_its_folder_has_its_identity(slurm: Any, tmp_path: Path) -> None:
    executor = SlurmHetExecutor(tmp_path / "log", components=[PARTS[0]])
    executor.update_parameters(job_name="me")
    job = executor.submit(print)
    loaded = SlurmHetJob(tmp_path / "log", job.job_id)
    assert loaded.watcher._identities[job.job_id].name == "me" and loaded.num_tasks == 4
    assert loaded.watcher._identities[job.job_id].record == tmp_path / "log" / "41_exit"


@pytest.mark.integration
def test_warnings_are_logged_once(slurm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slurm.answer("scontrol", "echo 'SchedulerType           = sched/builtin'")
    executor = SlurmHetExecutor(tmp_path / "log", components=PARTS)
    for _ in range(2):
        executor.submit(print)
    assert [r.message for r in caplog.records if "sched/backfill" in r.message] == [
        "holmes: warning: SchedulerType is sched/builtin: only sched/backfill starts heterogeneous jobs"
    ]
    assert any("component 1 has no constraint" in r.message for r in caplog.records)
    assert len(slurm.calls("scontrol")) == 3  # nodes, partitions, configuration: once for both


@pytest.mark.integration
@pytest.mark.parametrize("folder, log", [("log", "41_0_log.err"), ("log/%j", "41_batch.out")])
def test_output_of_the_batch_script_is_in_the_error(
    slurm: Any, tmp_path: Path, folder: str, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output of a failed set-up, of srun and of slurmstepd is in every task's error and in task 0's stderr."""
    monkeypatch.setattr(SlurmHetJob, "_results_timeout_s", 0)
    slurm.answer(
        "sacct",
        f"printf '41{SEPARATOR}FAILED{SEPARATOR}1:0{SEPARATOR}%s{SEPARATOR}None{SEPARATOR}n"
        f"{SEPARATOR}submitit\\n' $(date +%s)",
    )
    executor = SlurmHetExecutor(tmp_path / folder, components=[{"nodes": 1, "tasks_per_node": 2}])
    job = executor.submit(print)
    batch_output = "setup.sh: line 3: nosuch: command not found\nslurmstepd: error: Exceeded job memory limit"
    (tmp_path / "log" / log).write_text(batch_output)
    job.task(1).paths.stderr.write_text("rank 1 was here")
    assert job.done()
    for task in (0, 1):
        error = str(job.task(task).exception())
        assert "nosuch: command not found" in error and error.startswith("out of memory: slurmstepd: error: Exceeded")
    assert "nosuch" in job.stderr() and "nosuch" in job.task(0).stderr() and "nosuch" not in job.task(1).stderr()
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="nosuch"):
        job.results()


@pytest.mark.parametrize("preferred", [None, "USR1"])
def test_signal_is_the_one_that_tasks_handle(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preferred: str | None
) -> None:
    if preferred:
        monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", preferred)
    executor = SlurmHetExecutor(tmp_path / "log", components=PARTS)
    executor.update_parameters(time=1, signal_delay_s=30)
    text = executor.job_script()
    assert f"#SBATCH --signal={preferred or 'USR2'}@30\n" in text
    assert ("export SUBMITIT_PREEMPT_SIGNAL=USR1\n" in text) == bool(preferred)
    run = RunDirectory.create(tmp_path / "run", plan_text=plans.plan("ib-a").to_yaml(), config=plans.CONFIG)
    assert (
        "--signal=USR2@" in plan_executor(plans.plan("ib-a"), run.path, SlurmSettings()).job_script()
    )  # training's own


@pytest.mark.integration
@pytest.mark.parametrize("enforce, refused", [("associations,limits,qos", True), ("safe", True), ("(null)", False)])
def test_qos_limit_below_the_number_of_components_is_an_error(
    slurm: Any, tmp_path: Path, enforce: str, refused: bool
) -> None:
    slurm.answer(
        "scontrol",
        f"""
case "$2" in partition) echo 'PartitionName=eth QoS=slow Nodes=n1';;
  config) echo 'AccountingStorageEnforce = {enforce}'; echo 'SchedulerType = sched/backfill';; esac""",
    )
    slurm.answer(
        "sacctmgr",
        """
case "$4" in qos) printf 'normal|1|||||\\nslow|2|||||\\nbig||||||\\n';; *) echo normal;; esac""",
    )
    executor = SlurmHetExecutor(tmp_path / "log", components=PARTS)
    if not refused:
        executor.submit(print)
        return
    with pytest.raises(SubmissionError, match=r"MaxJobsPU of QOS normal is 1, and each of 2 components counts as a"):
        executor.submit(print)
    executor.update_parameters(qos="big")
    executor.submit(print)
    executor.update_parameters(components=[{"partition": "eth"}] * 3)
    with pytest.raises(SubmissionError, match="QOS slow is 2"):
        executor.submit(print)

from __future__ import annotations

import pytest

from holmes_hpc.errors import SiteError, SubmissionError
from holmes_hpc.slurm.commands import output, partial_outputs, slurm

pytestmark = pytest.mark.integration  # real processes
SHOW = ("sh", "-c", "echo ${SLURM_JOB_ID-none} ${SBATCH_PARTITION-none} ${SLURM_CONF-none}")


def test_every_command_runs_without_an_outer_jobs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SLURM_JOB_ID", "7"), ("SBATCH_PARTITION", "p"), ("SLURM_CONF", __file__)):
        monkeypatch.setenv(name, value)
    assert output(*SHOW) == slurm(*SHOW).out == partial_outputs([SHOW], 5)[0][0] == f"none none {__file__}\n"


def test_a_configuration_of_slurm_that_is_gone_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `holmes testbed down`: Slurm's commands would wait half a minute."""
    monkeypatch.setenv("SLURM_CONF", "/gone/slurm.conf")
    with pytest.raises(SiteError, match=r"SLURM_CONF names /gone/slurm.conf, .*testbed up.*--site FILE"):
        output("sleep", "60")
    answer = slurm("sleep", "60")
    assert not answer.ok and not answer.is_unreachable and "/gone/slurm.conf" in answer.reason


def test_a_missing_command_is_told_by_whoever_needs_it() -> None:
    with pytest.raises(SiteError, match=r"no no-such on this machine; .*--site FILE"):
        output("no-such")
    with pytest.raises(SubmissionError, match=r"no no-such on this machine; .*launcher=local"):
        slurm("no-such")
    assert partial_outputs([["no-such"]], 5) == [("", "no-such: No such file or directory")]


def test_what_was_printed_before_a_failure_is_kept() -> None:
    assert partial_outputs([["sh", "-c", "echo a; echo b >&2; exit 3"]], 5) == [("a\n", "b")]
    assert partial_outputs([["sh", "-c", "echo a; exec sleep 9"]], 0.5) == [("a\n", "no answer in 0 s")]
    with pytest.raises(SiteError, match="sh -c echo b >&2; exit 3: b; check that slurmctld runs"):
        output("sh", "-c", "echo b >&2; exit 3")


def test_a_command_that_hangs_counts_as_an_unreachable_daemon() -> None:
    assert slurm("sleep", "9", timeout_s=0.2).is_unreachable

"""A task of a heterogeneous job asks for its requeue."""

from __future__ import annotations

import pytest
from submitit.core.utils import UncompletedJobError

from holmes_hpc.submission.executor.environment import LEADER, SlurmHetJobEnvironment

pytestmark = pytest.mark.integration


def asked(fake_slurm, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setenv(LEADER, "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    fake_slurm.answer("scontrol", answer)
    SlurmHetJobEnvironment()._requeue(1)


@pytest.mark.parametrize("answer", ["exit 0", "kill -TERM $$", "echo 'Job is pending execution' >&2; exit 1"])
def test_a_requeue_that_ends_the_asker_was_heard(fake_slurm, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """It ends all that runs in the job: the command that asked for it too, now and then before it has answered."""
    asked(fake_slurm, monkeypatch, answer)
    assert fake_slurm.calls("scontrol") == [["requeue", "7"]]


def test_a_requeue_that_is_refused_is_said(fake_slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UncompletedJobError, match="Access/permission denied"):
        asked(fake_slurm, monkeypatch, "echo 'Access/permission denied' >&2; exit 1")

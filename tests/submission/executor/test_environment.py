"""A task of a heterogeneous job: what it knows of itself, and its requeue."""

from __future__ import annotations

import pytest
from submitit.core.utils import UncompletedJobError
from submitit.helpers import TorchDistributedEnvironment

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


@pytest.mark.parametrize("node, rank, local_world", [("ib1", 1, 2), ("ib2", 2, 2), ("eth1", 4, 1)])
def test_torchs_variables_are_right_where_components_differ(
    monkeypatch: pytest.MonkeyPatch, node: str, rank: int, local_world: int
) -> None:
    for key, value in {
        LEADER: "7",
        "SUBMITIT_EXECUTOR": "slurmhet",
        "SLURM_HET_SIZE": "2",
        "SLURM_NTASKS": "5",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "ib[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "eth1",
        "HOLMES_TASKS_PER_NODE_0": "2",
        "HOLMES_TASKS_PER_NODE_1": "1",
        "SLURMD_NODENAME": node,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(key, value)
    found = TorchDistributedEnvironment()
    assert (found.local_world_size, found.world_size, found.rank, found.master_addr) == (local_world, 5, rank, "ib1")
    assert f"local_rank=0({local_world})" in repr(SlurmHetJobEnvironment())

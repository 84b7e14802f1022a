"""The environment of a task of a heterogeneous job, and its requeue."""

from __future__ import annotations

import pytest
from submitit.core.utils import UncompletedJobError
from submitit.helpers import TorchDistributedEnvironment

from holmes_hpc.submission.executor.environment import LEADER, SlurmHetJobEnvironment

pytestmark = pytest.mark.integration


def requeue(fake_slurm, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setenv(LEADER, "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    fake_slurm.answer("scontrol", answer)
    SlurmHetJobEnvironment()._requeue(1)


@pytest.mark.parametrize("answer", ["exit 0", "kill -TERM $$", "echo 'Job is pending execution' >&2; exit 1"])
def test_requeue_that_kills_its_command_succeeded(fake_slurm, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A requeue ends all processes of the job, and sometimes the requeue command before it has answered."""
    requeue(fake_slurm, monkeypatch, answer)
    assert fake_slurm.calls("scontrol") == [["requeue", "7"]]


def test_refused_requeue_is_an_error(fake_slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UncompletedJobError, match="Access/permission denied"):
        requeue(fake_slurm, monkeypatch, "echo 'Access/permission denied' >&2; exit 1")


@pytest.mark.parametrize("node, rank, local_world", [("ib1", 1, 2), ("ib2", 2, 2), ("eth1", 4, 1)])
def test_torch_variables_are_right_for_unequal_components(
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
    environment = TorchDistributedEnvironment()
    assert (environment.local_world_size, environment.world_size, environment.rank, environment.master_addr) == (
        local_world,
        5,
        rank,
        "ib1",
    )
    assert f"local_rank=0({local_world})" in repr(SlurmHetJobEnvironment())

"""`holmes nodes`, `probe`, `label` and `doctor` as an admin types them, with Slurm's answers made up."""

import json
from pathlib import Path

import pytest
from command_line import holmes, refused  # noqa: F401 (a fixture)
from slurm_text import node_line, partition_line
from trees import ALL, Tree

from holmes_hpc import console
from holmes_hpc.fabric import node_facts
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.node_facts import Facts
from holmes_hpc.slurm import scontrol

pytestmark = pytest.mark.integration

IB = "nic_ib,nic_800g,eth_25g,fabric_cluster-a-of-two"
CONFIG = (
    "ClusterName = cl\nSchedulerType = sched/backfill\nSLURM_VERSION = 24.11.5\nKillOnBadExit = 1\n"
    "AccountingStorageType = accounting_storage/slurmdbd\n"
)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Slurm with two nodes that agree, and what was asked of it."""
    answers = {
        "node": "\n".join(node_line(n, IB, gres="gpu:h100:8") for n in ("ib1", "ib2")),
        "partition": partition_line("ib", "ib[1-2]"),
        "config": CONFIG,
    }
    asked: list[tuple[str, ...]] = []

    def answer(*words: str) -> str:
        asked.append(words)
        return answers[words[2]] if words[:2] == ("scontrol", "show") else ""

    facts = [
        Facts(n, NicType.IB, ("nic_ib", "nic_800g", "eth_25g"), "eth0", "10.0.0.1", "10.0.0.0/24")
        for n in ("ib1", "ib2")
    ]
    monkeypatch.setattr(scontrol, "output", answer)
    monkeypatch.setattr("holmes_hpc.fabric.label.output", answer)
    monkeypatch.setattr(node_facts, "ask_nodes", lambda nodes, settings: (facts, []))
    monkeypatch.setattr(
        "holmes_hpc.fabric.doctor.ask_nodes",
        lambda nodes, settings, shared: asked.append((settings.account, *settings.setup)) or (facts, []),
    )
    return asked


@pytest.fixture
def tree(tmp_path: Path) -> str:
    made = Tree(tmp_path / "sys")
    ALL["hdr_4_hcas"](made)
    for path in made.refused:
        path.unlink()
    return str(made.root)


def test_nodes_breaks_no_word(holmes, site) -> None:
    code, out, _ = holmes("nodes")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    assert "nic_ib&fabric_cluster-a-of-two" in out.split() and "8×h100" in out.split()


def test_nodes_shows_what_a_job_with_these_settings_could_use(holmes, site, monkeypatch) -> None:
    nodes = [node_line(n, IB, "a,b", gres="gpu:h100:8") for n in ("ib1", "ib2")]
    parts = [partition_line(p, "ib[1-2]").replace("AllowAccounts=ALL", f"AllowAccounts={p}") for p in "ab"]
    text = "\n".join((*nodes, *parts, CONFIG))
    monkeypatch.setattr(scontrol, "output", lambda *words: text)
    for setting, name in (("slurm.account=a", "a"), ("slurm.account=b", "b"), ("partitions=[b]", "b")):
        code, out, _ = holmes("nodes", "--json", setting)
        assert code == 0 and [f["partition"] for f in json.loads(out)["fabrics"]] == [name]
    refused(holmes("nodes", "partitions=[gpu]"), "no partition 'gpu'", "choose one of: a, b")


def test_a_table_folds_between_words_and_only_where_it_must(capsys: pytest.CaptureFixture[str]) -> None:
    console.table("", ["a", "b"], [["x" * 70, "some words that do not fit beside it"], ["y", "z"]])
    out = capsys.readouterr().out
    assert "x" * 70 in out and max(map(len, out.splitlines())) <= 100
    console.table("", ["a", "b"], [["x" * 70, "y" * 70]])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_probe_of_a_copied_tree_against_slurm(holmes, site, tree) -> None:
    code, out, _ = holmes("probe", "--sysfs", tree, "--check", "--node", "ib1")
    assert code == 0 and "features: nic_ib,nic_800g,eth_25g" in out and "mlx5_3:1" in out and "nothing found" in out
    refused(holmes("probe", "--sysfs", tree, "--check", "--node", "gone"), "gone", "--node")


def test_probe_of_a_node_that_slurm_mislabels(holmes, site, tree, monkeypatch) -> None:
    monkeypatch.setattr(scontrol, "output", lambda *words: node_line("ib1", IB.replace("nic_ib", "nic_roce")))
    code, out, _ = holmes("probe", "--sysfs", tree, "--check", "--node", "ib1", "--json")
    assert code == 1
    (found,) = json.loads(out)["findings"]
    assert found["level"] == "error" and "features name roce, the kernel reports ib" in found["what"]


def test_label_says_where_its_lines_belong(holmes, site) -> None:
    code, out, err = holmes("label")
    assert code == 0 and "every node that answered has the features" in err and "scontrol" not in out
    code, out, err = holmes("label", "ib[1-2]", "--fabric", "b")
    lines = out.splitlines()
    assert code == 0 and "has the features" not in err and lines[0].startswith("# in slurm.conf")
    assert lines[1] == "NodeName=ib[1-2] Feature=nic_ib,nic_800g,eth_25g,fabric_b"
    assert "until slurmctld restarts" in lines[2] and lines[3].startswith("scontrol update NodeName=ib[1-2] Avail")


def test_label_applies_what_it_shows(holmes, site) -> None:
    code, out, err = holmes("label", "--apply")
    assert (code, out) == (0, "") and "every node that answered" in err and "until slurmctld restarts" not in err
    assert not any("update" in words for words in site)
    code, out, err = holmes("label", "ib1", "--fabric", "b", "--apply")
    assert (code, out) == (0, "ib1: + fabric_b  - fabric_cluster-a-of-two\n") and "until slurmctld restarts" in err
    assert site[-1][:3] == ("scontrol", "update", "NodeName=ib1")
    refused(holmes("label", "--fabric", "b"), "name the nodes")


def test_label_prints_the_helper(holmes) -> None:
    code, out, _ = holmes("label", "--helper")
    assert code == 0 and out.startswith("#!/bin/sh") and "helpers.conf" in out


def test_doctor_asks_nodes_as_a_job_would_begin(holmes, site) -> None:
    assert holmes("doctor", "slurm.setup=[module load torch]", "slurm.account=ml")[0] == 0
    assert ("ml", "module load torch") in site


def test_doctor_looks_at_scripts_too(holmes, site, tmp_path) -> None:
    code, out, _ = holmes("doctor")
    assert (code, out) == (0, "nothing found\n")
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/sh\n#SBATCH -p ib -N 2\nsrun python train.py\n")
    code, out, _ = holmes("doctor", "--script", str(script), "--json")
    assert code == 1 and "no --kill-on-bad-exit" in json.loads(out)[0]["what"]
    refused(holmes("doctor", "--script", str(tmp_path / "none")), "none", "path of a batch script")

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
import trees
from slurm_text import node, partition, partition_line
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.doctor import check_script, diagnose
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.listing import listing_of
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.node_facts import (
    MARK,
    Facts,
    _parse_answer,
    answer_limit_s,
    ask_nodes,
    check_here,
    facts_of,
    propose,
)
from holmes_hpc.fabric.partitions import NodeSettings
from holmes_hpc.fabric.probe import probe
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.scontrol import Config

HEALTHY = {
    "SchedulerType": "sched/backfill",
    "SLURM_VERSION": "24.11.5",
    "KillOnBadExit": "1",
    "ClusterName": "c",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "SchedulerParameters": "(null)",
}
IB = "nic_ib,nic_200g,eth_25g,fabric_a"
NODES = [node("a1", IB, "ib", gres="gpu:h100:8"), node("a2", IB, "ib", gres="gpu:h100:8")]
PARTITIONS = [partition("ib", "a[1-2]")]


def facts(name: str, **rest: object) -> Facts:
    base = Facts(name, NicType.IB, ("nic_ib",), "eth0", f"10.0.0.{name[-1]}", "10.0.0.0/24")
    return replace(base, **rest)  # type: ignore[arg-type]


def lines(config: dict[str, str] | None = None, nodes=NODES, partitions=PARTITIONS, facts_=(), env=None) -> list[str]:
    listing = listing_of("c", nodes, partitions)
    return [str(f) for f in diagnose(Config({**HEALTHY, **(config or {})}), listing, facts_, env or {})]


def test_a_healthy_site_gets_no_line() -> None:
    assert lines(facts_=[facts("a1"), facts("a2")], env={"NCCL_DEBUG": "INFO"}) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"SchedulerType": "sched/builtin"}, "error: slurm.conf: SchedulerType is sched/builtin"),
        (
            {"SchedulerParameters": "bf_interval=1,disable_hetjob_steps"},
            "error: slurm.conf: SchedulerParameters has dis",
        ),
        ({"SLURM_VERSION": "22.05.8"}, "warning: slurm.conf: Slurm 22.05.8"),
        ({"SLURM_VERSION": "24.05.1"}, "warning: slurm.conf: Slurm 24.05.1"),
        ({"AccountingStorageType": "accounting_storage/none"}, "warning: slurm.conf: no slurmdbd"),
        ({"JobRequeue": "0"}, "warning: slurm.conf: JobRequeue is 0"),
        ({"KillOnBadExit": "0"}, "info: slurm.conf: KillOnBadExit is 0"),
        ({"NodeFeaturesPlugins": "node_features/helpers"}, "info: slurm.conf: node_features/helpers"),
    ],
)
def test_each_setting_is_one_line_with_a_cure(config: dict[str, str], says: str) -> None:
    found = lines(config)
    assert len(found) == 1 and found[0].startswith(says) and "; " in found[0]


def test_a_slurm_that_is_too_old_is_named() -> None:
    unsupported, hetjobs = lines({"SLURM_VERSION": "21.08.8"})
    assert "Slurm 21.08.8 is not supported" in unsupported and "can kill slurmctld" in hetjobs


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ("ib,roce", "warning: node a2: not used: features name 2 NIC types"),
        (IB + ",frobnicator", "info: nodes a2: unknown features: frobnicator"),
        (IB + ",nic_100g", "several values of nic_<rate>g"),
    ],
)
def test_features(features: str, says: str) -> None:
    found = lines(nodes=[NODES[0], node("a2", features, "ib", gres="gpu:h100:8")])
    assert any(says in f for f in found)


def test_unknown_features_are_one_line() -> None:
    nodes = [node("a1", IB + ",x,y", "ib", gres="gpu:h100:8"), node("a2", IB + ",y,z", "ib", gres="gpu:h100:8")]
    unknown = [f for f in lines(nodes=nodes) if "unknown" in f]
    assert [f.partition(";")[0] for f in unknown] == ["info: nodes a[1-2]: unknown features: x, y, z"]


def test_no_label_down_and_nothing_usable() -> None:
    found = lines(nodes=[node("a1", "nic_ib,nic_200g,eth_25g", "ib", gres="gpu:h100:8")])
    assert any(f.startswith("warning: nodes a1: no fabric label") and "holmes label --fabric" in f for f in found)
    found = lines(nodes=[NODES[0], node("a2", IB, "ib", state="DOWN", reason="bad cable")])
    assert any("nodes a2: down or drained: bad cable" in f for f in found)
    found = lines(nodes=[node("a1", IB, "ib", state="DOWN")])
    assert any("no node can be used" in f for f in found)


@pytest.mark.parametrize("state", ["MAINTENANCE", "IDLE+POWERING_DOWN"])
def test_a_node_that_comes_back_by_itself_is_not_to_be_resumed(state: str) -> None:
    found = lines(nodes=[NODES[0], node("a2", IB, "ib", state=state, gres="gpu:h100:8")])
    assert len(found) == 1 and "a2: in maintenance or powering down" in found[0] and "RESUME" not in found[0]


def test_nodes_of_two_architectures() -> None:
    found = lines(nodes=[NODES[0], replace(NODES[1], architecture="aarch64")])
    assert [f for f in found if "aarch64" in f and "slurm.pools.POOL.python" in f and "nodes a2" in f]


def test_a_default_partition_over_two_fabrics() -> None:
    nodes = [*NODES, node("r1", "nic_roce,nic_100g,eth_25g,fabric_b", "all", gres="gpu:h100:8")]
    found = lines(nodes=nodes, partitions=[partition("all", "a[1-2],r1", default=True), partition("ib", "a[1-2]")])
    assert any("default partition has nodes of 2 pools (a, b)" in f for f in found)


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        (
            {"trouble": "ethernet interface eth0 is down; ip link set eth0 up"},
            "error: node a2: no Ethernet address that others can reach: ethernet interface eth0 is down; "
            "ip link set eth0 up",
        ),
        (
            {"network": "10.9.0.0/24", "address": "10.9.0.2"},
            "warning: node a2: its Ethernet address 10.9.0.2 (eth0) is",
        ),
        ({"skew_s": 120.0}, "warning: node a2: its clock is +120 s off"),
        ({"ipoib": ("ib0",)}, "info: nodes a2: NCCL's default is ib0 (IPoIB)"),
        ({"notes": ("mlx5_1:1 is DOWN",)}, "warning: node a2: mlx5_1:1 is DOWN"),
        (
            {
                "findings": (
                    Finding("error", "node a2", "Slurm's features name roce, the kernel reports ib", "holmes label a2"),
                )
            },
            "error: node a2: Slurm's features name roce, the kernel reports ib; holmes label a2",
        ),
    ],
)
def test_what_a_node_says_of_itself(rest: dict[str, object], says: str) -> None:
    found = lines(facts_=[facts("a1"), facts("a3"), facts("a2", **rest)])
    assert len(found) == 1 and found[0].startswith(says)


def test_the_environment_that_jobs_inherit() -> None:
    found = lines(env={"NCCL_IB_DISABLE": "1"})
    assert len(found) == 1 and found[0].startswith("error: environment: NCCL_IB_DISABLE=1")


GOOD = """#!/bin/sh
#SBATCH -p ib -C nic_ib -N 2
#SBATCH hetjob
#SBATCH --partition=roce -N 2
srun --het-group=0,1 --kill-on-bad-exit=1 \\
    --output=log.txt python train.py
"""


def test_a_good_script_gets_no_line() -> None:
    assert check_script(GOOD) == []
    short = GOOD.replace("--kill-on-bad-exit=1", "-K1").replace("-p ib -C nic_ib -N 2", "-N 2 -p ib -C nic_ib")
    assert short.count("-K1") == short.count("-N 2 -p ib") == 1 and check_script(short) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (" --kill-on-bad-exit=1", "", "no --kill-on-bad-exit"),
        (" --kill-on-bad-exit=1", " --kill-on-bad-exit=0", "no --kill-on-bad-exit"),
        (" --het-group=0,1", "", "no --het-group"),
        ("log.txt", "log-%j.txt", "path with %j"),
        ("--partition=roce ", "", "a component has no partition"),
        ("-N 2\n#SBATCH hetjob", "-N 2 --dependency=singleton\n#SBATCH hetjob", "singleton"),
    ],
)
def test_traps_of_scripts(old: str, new: str, says: str) -> None:
    found = check_script(GOOD.replace(old, new), "job.sh")
    assert len(found) == 1 and says in found[0].what and found[0].where == "job.sh"


def test_facts_of_a_node_that_slurm_mislabels(tmp_path) -> None:
    tree = Tree(tmp_path)
    trees.hdr_4_hcas(tree)
    nics = probe(tree.root, {"eth0": ("10.0.0.2", 24), "ib0": ("10.1.0.2", 24)}, tree.read)
    found = facts_of("n1", nics, ["nic_roce", "nic_800g"], {"NCCL_NET": "Socket"}, files=[])
    assert found.expected_features == ("nic_ib", "nic_800g", "eth_25g") and found.ipoib == ("ib0",)
    assert (found.ethernet, found.network) == ("eth0", "10.0.0.0/24")
    assert [f.what[:15] for f in found.findings] == ["Slurm's feature", "NCCL_NET=Socket"]
    assert facts_of("n1", nics, None, {}, files=[]).findings == ()
    assert msgspec.convert(json.loads(json.dumps(asdict(found))), Facts) == found


def test_check_here(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    tree = Tree(tmp_path)
    trees.hdr_4_hcas(tree)
    nics = probe(tree.root, {}, tree.read)
    monkeypatch.setattr(
        "holmes_hpc.fabric.node_facts.read_node", lambda name: node(name, "nic_roce") if name == "n1" else None
    )
    assert "features name roce" in check_here(nics, name="n1")[0].what
    with pytest.raises(SiteError, match="Slurm knows no node 'n2'"):
        check_here(nics, name="n2")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert check_here(nics)[0].node == "n1"


def test_propose_merges_what_the_nodes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a1", "big,nic_roce", "ib"), node("a2", "", "ib")]
    monkeypatch.setattr("holmes_hpc.fabric.node_facts.read_nodes", lambda: nodes)
    monkeypatch.setattr("holmes_hpc.fabric.node_facts.ask_nodes", lambda nodes, _: ([facts(n.name) for n in nodes], []))
    wanted, _ = propose(["a[1-2]"], "x")
    assert {c.node: c.target for c in wanted} == {"a1": ("big", "nic_ib", "fabric_x"), "a2": ("nic_ib", "fabric_x")}
    with pytest.raises(SiteError, match="no node 'a3'"):
        propose(["a3"])
    with pytest.raises(SiteError, match="name the nodes of that fabric"):
        propose(None, "x")


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Return a function that sets srun's script, on a site whose partition ib is open and old is closed."""
    text = "\n".join((partition_line("old", "a[1-4]", state="DOWN"), partition_line("ib", "a[1-4]")))
    monkeypatch.setattr(scontrol, "output", lambda *words: text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def does(body: str) -> None:
        (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\n{body}\n')
        (tmp_path / "srun").chmod(0o755)

    return does, lambda: (tmp_path / "asked").read_text().split()


def answer(name: str, late_s: float = 0.0) -> str:
    return f"echo '{MARK}" + json.dumps({**asdict(facts(name)), "clock": time.time() + late_s}) + "'"


@pytest.mark.integration
def test_gather_asks_idle_nodes_and_names_the_others(srun) -> None:
    does, asked = srun
    does(f"echo noise\n{answer('a1', 100)}\necho '{MARK}not json'")
    nodes = [
        *NODES,
        node("a3", IB, "ib", state="ALLOCATED"),
        node("a4", IB, "ib", state="DOWN"),
        node("a5", IB, "old"),
        node("a6", IB, "ib", state="IDLE+CLOUD+POWERED_DOWN"),
        node("a7", IB, "ib", state="IDLE+RESERVED"),
    ]
    found, silent = ask_nodes(nodes)
    assert [f.node for f in found] == ["a1"] and 90 < found[0].skew_s < 110
    assert [(f.level, f.where) for f in silent] == [
        ("info", "nodes a[3,6-7]"),
        ("info", "nodes a5"),
        ("warning", "nodes a2"),
    ]
    assert "--nodelist=a[1-2]" in asked() and "--partition=ib" in asked()
    assert _parse_answer("holmes-facts {}") is None


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ending", "limit_s", "why"),
    [
        ("echo 'srun: error: a2: task 1: Exited with code 1' >&2; exit 1", 60, "a2: task 1: Exited with code 1"),
        ("exec sleep 60", 4, "no answer in 4 s"),
    ],
)
def test_a_node_that_fails_or_hangs_takes_no_others_answer_with_it(
    srun, monkeypatch, ending: str, limit_s: int, why: str
) -> None:
    does, asked = srun
    does(f"{answer('a1')}\n{ending}")
    monkeypatch.setattr("holmes_hpc.fabric.node_facts.answer_limit_s", lambda nodes: limit_s)
    found, silent = ask_nodes([node(n.name, IB, "old,ib") for n in NODES])
    assert [f.node for f in found] == ["a1"] and "--partition=ib" in asked()
    assert [(f.level, f.where) for f in silent] == [("warning", "nodes a2")] and why in silent[0].what


@pytest.mark.integration
def test_nodes_are_asked_with_the_account_and_gpus_of_a_job(srun, monkeypatch) -> None:
    does, asked = srun
    does(answer("a1"))
    monkeypatch.setenv("SBATCH_ACCOUNT", "env")
    monkeypatch.setenv("SLURM_QOS", "night")
    ask_nodes(NODES[:1])
    assert {"--account=env", "--qos=night", "--gpus-per-node=h100:8", "--nodes=1"} <= set(asked())
    ask_nodes(NODES[:1], NodeSettings(job_options=("--account=ml", "--gres=gpu:1")))
    assert {"--account=ml", "--gres=gpu:1"} <= set(asked()) and "h100" not in " ".join(asked())


@pytest.mark.integration
def test_a_job_asks_sixteen_nodes_at_most(srun, monkeypatch) -> None:
    does, _ = srun
    does('echo "$3" >> "${0%/*}/all"')
    ask_nodes([node(f"a{i}", IB, "ib") for i in range(20)])
    lists = (Path(os.environ["PATH"].partition(":")[0]) / "all").read_text().split()
    assert sorted(lists) == ["--nodes=16", "--nodes=4"]


@pytest.mark.integration
def test_nodes_are_asked_as_a_job_begins(srun, monkeypatch) -> None:
    """The site's torch is there only after the lines of slurm.setup."""
    does, _ = srun
    does('while [ "$1" != bash ]; do shift; done; "$@"')
    monkeypatch.setattr("sys.executable", "site-python")
    found, _ = ask_nodes([NODES[0]], NodeSettings(setup=("site-python() {", answer("a1"), "}", 'exec() { "$@"; }')))
    assert [f.node for f in found] == ["a1"]


@pytest.mark.integration
def test_nodes_are_asked_with_the_jobs_account_and_reservation(srun, monkeypatch) -> None:
    does, asked = srun
    monkeypatch.setenv("SLURM_ACCOUNT", "mine")  # an option of srun
    does(f'[ "$SLURM_ACCOUNT" = mine ] && {answer("a1")}')
    reserved = replace(node("a1", IB, state="IDLE+RESERVED"), reservation="team")
    settings = NodeSettings(account="ml", qos="high", reservation="team")
    found, silent = ask_nodes([reserved, node("a2", IB, state="MIXED")], settings)
    assert [f.node for f in found] == ["a1"] and [f.where for f in silent] == ["nodes a2"]
    assert {"--account=ml", "--qos=high", "--reservation=team"} <= set(asked())
    ask_nodes([node("a1", IB)], settings)
    assert "--account=ml" in asked() and "--reservation=team" not in asked()
    assert ask_nodes([node("a1", IB)], NodeSettings(partitions=("old",)))[1][0].what.startswith("in no partition")


def test_a_large_site_has_more_time() -> None:
    assert answer_limit_s(4) == 30 and answer_limit_s(2000) == 230

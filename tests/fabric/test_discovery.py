"""`holmes site` on made-up sites: the sources, the file, a person's edits, bad input. srun and scontrol are fakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import holmes, refused  # noqa: F401 (a fixture)
from slurm_text import node_line, partition_line

from holmes_hpc.fabric.node_facts import MARK
from holmes_hpc.fabric.site_file import read_site_file
from holmes_hpc.slurm.scontrol import parse_topology

pytestmark = pytest.mark.integration

CONFIG = "ClusterName = franklin\nSchedulerType = sched/backfill\nSLURM_VERSION = 23.11.10\n"
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
IB = {"nic": "ib", "expected_features": ["nic_ib", "nic_400g", "eth_25g"]}


class FakeSlurm:
    """Slurm's commands in `folder`. `nodes`, `facts`: name -> line of scontrol, answer of the node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes, self.facts = folder, dict[str, str](), dict[str, Any]()
        self.partitions = partition_line("gpu", "h[1-3],a[1-2]")
        for name in ("h1", "h2", "h3"):
            self.add(name, "gpu:h200:4", "hopper", {**IB, "gpu": H200, "gpu_memory_gib": 140.4})
        for name in ("a1", "a2"):
            self.add(name, "gpu:a100:2", "ampere", {**IB, "gpu": A100, "gpu_memory_gib": 80.0})
        command = f'echo "$*" >> {folder}/jobs\ncase "$*" in *--nodelist=*) ;; *) set -- x --nodelist=h1;; esac\n'
        self.write("srun", command + f"name=${{*#*--nodelist=}}; cat {folder}/${{name%% *}} 2>&1 || exit 1")
        self.write("scontrol", f'cat "{folder}/$2"')
        self.show("topology", "")

    def write(self, command: str, body: str) -> None:
        (self.folder / command).write_text(f"#!/bin/sh\n{body}\n")
        (self.folder / command).chmod(0o755)

    def show(self, noun: str, text: str) -> None:
        (self.folder / noun).write_text(text)

    def add(self, name: str, gres: str, features: str, facts: Any, state: str = "IDLE") -> None:
        self.nodes[name] = node_line(name, features, "gpu", gres=gres, state=state)
        (self.folder / name).write_text(MARK + json.dumps({"node": name, "clock": 0, **facts}))
        self.show("node", "\n".join(self.nodes.values()))
        self.show("partition", self.partitions)
        self.show("config", CONFIG)

    def jobs(self) -> list[str]:
        """Return the options of the jobs since the last call."""
        file = self.folder / "jobs"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return FakeSlurm(tmp_path / "bin")


def pools(file: str = "site.yaml") -> dict[str, Any]:
    return {pool.gpu.name: pool for pool in read_site_file(file).pools}


def test_one_job_per_kind_gives_what_features_lack(slurm, holmes) -> None:
    code, out, err = holmes("site", "-o", "site.yaml", "slurm.account=ml", "slurm.qos=high")
    assert (code, out) == (0, "") and "2 pools, 2 jobs" in err
    text, jobs = Path("site.yaml").read_text(), slurm.jobs()
    assert {job.split(" --nodes")[0] for job in jobs} == {
        "--partition=gpu --nodelist=h1 --gpus-per-node=h200:4 --account=ml --qos=high",
        "--partition=gpu --nodelist=a1 --gpus-per-node=a100:2 --account=ml --qos=high",
    }
    assert all("--immediate=300" in job and "--time=2" in job and "--nodes=1" in job for job in jobs)
    h200, a100 = pools()["h200"], pools()["a100-80gb"]
    assert (h200.nic, h200.rdma_gbps, h200.ethernet_gbps, h200.gpu.memory_gib) == ("ib", 400, 25, 141)
    assert (a100.nodes, a100.gpus_per_node, a100.node_names) == (2, 2, ("a1", "a2"))
    assert "rdma_gbps: 400  # probe of h1" in text and "# driver of a1: NVIDIA A100-SXM4-80GB" in text
    assert "assumed: no feature and no switch says" in text


def test_a_network_that_needs_a_plugin_and_gpus_that_gres_lacks_are_found(slurm, holmes) -> None:
    facts = {"nic": "ethernet", "expected_features": ["nic_ethernet", "nic_100g", "eth_100g"]}
    for name in ("h1", "h2", "h3"):
        efa = {"plugin": ["nic_plugin_efa", "nic_3200g"], "gpu": H200, "gpu_memory_gib": 140.4, "gpus": 8}
        slurm.add(name, "(null)", "efa", {**facts, **efa})
    for name in ("a1", "a2"):
        del slurm.nodes[name]
    slurm.partitions = partition_line("gpu", "h[1-3]")
    slurm.add("h3", "(null)", "efa", {})
    assert "through its Ethernet address only" in holmes("site", "--no-jobs")[1]
    assert holmes("site", "-o", "site.yaml")[0] == 0
    pool, text = pools()["h200"], Path("site.yaml").read_text()
    assert (pool.nic, pool.rdma_gbps, pool.ethernet_gbps, pool.gpus_per_node) == ("efa", 3200, 100, 8)
    assert "nic: efa}  # probe of h1; NCCL needs its plugin" in text and "Ethernet address only" not in text
    assert "gpus_per_node: 8  # driver of h1: NVIDIA H200" in text and "gres: false" in text and "CPU rank" not in text
    assert "--gpus" not in slurm.jobs()[0]


def test_settings_of_a_pool_reach_its_job(slurm, holmes) -> None:
    pool = "{account: arm, gres: 'gpu:9', setup: [module load gcc], python: /arm/python3, mem: 1G}"
    words = ["site", "-o", "site.yaml", "slurm.account=ml", "slurm.qos=high", "slurm.setup=[module load torch]"]
    refused(holmes(*words, f"slurm.pools={{h200: {pool}}}"), "no pool 'h200'", "ethernet-gpu-h200")
    assert holmes(*words, f"slurm.pools={{ethernet-gpu-h200: {pool}}}")[0] == 0
    text = "\n".join(slurm.jobs())
    h200, a100 = (text[text.index(f"--nodelist={name}") :].partition("--partition")[0] for name in ("h1", "a1"))
    assert "--account=arm --gres=gpu:9 --qos=high --nodes" in h200 and "--mem" not in text
    assert "module load gcc" in h200 and "facts /arm/python3 -" in h200
    assert "--gpus-per-node=a100:2 --account=ml --qos=high" in a100 and "module load gcc" not in a100
    slurm.add("h1", "gpu:h200:4", "renewed", {**IB, "gpu": H200, "gpu_memory_gib": 140.4})
    assert holmes(*words, f"slurm.pools={{ib-gpu-h200: {pool}}}")[0] == 0 and "--account=arm" in slurm.jobs()[0]


def test_no_jobs_leaves_assumptions_beside_the_values(slurm, holmes) -> None:
    code, out, _ = holmes("site", "--no-jobs")
    assert code == 0 and slurm.jobs() == []
    assert "ethernet_gbps: 10  # assumed" in out and "{name: ethernet-gpu, nic: ethernet}  # assumed" in out
    assert "40 GiB assumed" in out


def test_a_plan_says_what_the_site_file_assumes_until_it_is_corrected(slurm, holmes) -> None:
    holmes("site", "--no-jobs", "-o", "site.yaml")
    arguments = ("plan", "model=gpt_tiny", "plan.tp=1", "plan.pp=2", "plan.unequal=false", "--site", "site.yaml")
    code, out, _ = holmes(*arguments)
    assert code == 0 and "Note: NICs, rates or GPUs are assumed" in out
    (line,) = (text for text in read_site_file("site.yaml").assumptions if text.startswith("assumed by `holmes site`"))
    assert "nic, ethernet_gbps of ethernet-gpu-h200; nic, ethernet_gbps, gpu of ethernet-gpu-a100-40gb" in line
    path = Path("site.yaml")
    path.write_text(path.read_text().replace("ethernet_gbps: 10 ", "ethernet_gbps: 25 ", 1))
    (line,) = (text for text in read_site_file("site.yaml").assumptions if text.startswith("assumed by `holmes site`"))
    assert "nic of ethernet-gpu-h200; nic, ethernet_gbps, gpu of" in line


def test_a_second_run_asks_only_new_kinds_and_keeps_edits(slurm, holmes) -> None:
    holmes("site", "-o", "site.yaml")
    slurm.jobs()
    path = Path("site.yaml")
    before = path.read_text()
    assert holmes("site", "-o", "site.yaml")[0] == 0 and path.read_text() == before and slurm.jobs() == []
    head, _, found = before.partition("\nfound:")
    head = head.replace("rdma_gbps: 400", "rdma_gbps: 380", 1).replace("- name: ib-gpu-h200", "- name: new")
    path.write_text(f"{head}\nethernet_gbps: 50\n\nfound:{found}")
    slurm.partitions = partition_line("gpu", "h[1-3],a[1-2],v1")
    slurm.add("v1", "gpu:v100:4", "volta", {**IB, "gpu": "Tesla V100-SXM2-32GB", "gpu_memory_gib": 32.0})
    assert holmes("site", "-o", "site.yaml")[0] == 0
    (job,) = slurm.jobs()
    assert "--nodelist=v1" in job
    text = path.read_text()
    assert pools()["h200"].name == "new" and pools()["h200"].rdma_gbps == 380 and pools()["v100-32gb"].nodes == 1
    assert "rdma_gbps: 380  # edited by hand" in text and "\nethernet_gbps: 50\n" in text
    data = yaml.safe_load(text)
    data["pools"] = [pool for pool in data["pools"] if pool["name"] != "ib-gpu-v100-32gb"]  # removed by hand
    path.write_text(yaml.safe_dump(data))
    assert holmes("site", "-o", "site.yaml")[0] == 0 and set(pools()) == {"h200", "a100-80gb"}


def test_edits_survive_while_the_nodes_are_down(slurm, holmes) -> None:
    holmes("site", "-o", "site.yaml")
    path = Path("site.yaml")
    path.write_text(path.read_text().replace("rdma_gbps: 400", "rdma_gbps: 380", 1))
    for state, remark in (("DOWN", True), ("IDLE", False)):
        for name in ("h1", "h2", "h3"):
            slurm.add(name, "gpu:h200:4", "hopper", {}, state=state)
        assert holmes("site", "-o", "site.yaml")[0] == 0
        assert pools()["h200"].rdma_gbps == 380 and len(read_site_file("site.yaml").pools) == 2
        assert ("not found in Slurm now" in path.read_text()) is remark


def test_trees_of_switches_are_fabrics(slurm, holmes) -> None:
    slurm.show(
        "topology",
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=h[1-3]\nSwitchName=s2 Level=0 Nodes=a[1-2]\n"
        "SwitchName=top Level=1 LinkSpeed=1 Nodes=h[1-3],a[1-2] Switches=s[1-2]\n",
    )
    holmes("site", "-o", "site.yaml")
    assert set(read_site_file("site.yaml").fabrics) == {"ib-top"}
    assert "fabric: ib-top  # Slurm's topology: switch top" in Path("site.yaml").read_text()
    slurm.show("topology", "SwitchName=s1 Level=0 Nodes=h[1-2],a[1-2]\nSwitchName=s2 Level=0 Nodes=h3\n")
    holmes("site", "-o", "two.yaml")
    site = read_site_file("two.yaml")
    assert {name: len(parts) for name, parts in site.fabrics.items()} == {"ib-s1": 2, "ib-gpu-h200-s2": 1}
    assert site.pool("ib-gpu-h200-s2").exclude == "h[1-2]" and site.pool("ib-gpu-h200-s1").nodes == 2


def test_blocks_and_racks_that_divide_a_pool_are_shown(slurm, holmes) -> None:
    slurm.show("topology", "BlockName=b1 BlockIndex=0 Nodes=h[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=h3")
    slurm.add("a2", "gpu:a100:2", "ampere,rack_7", {**IB, "gpu": A100, "gpu_memory_gib": 80.0})
    slurm.add("a1", "gpu:a100:2", "ampere,rack_6", {**IB, "gpu": A100, "gpu_memory_gib": 80.0})
    _, out, _ = holmes("site")
    assert "unsure: the blocks b1, b2 divide" in out and "unsure: the features rack_6, rack_7 divide" in out
    assert len(slurm.jobs()) == 2  # a rack makes no kind
    assert parse_topology("No topology information available").trees == {}


@pytest.mark.parametrize(
    ("srun", "fragments"),
    [
        (
            "echo 'srun: error: Unable to allocate resources: Requested nodes are busy' >&2; exit 1",
            ("no node was free in 300 s", "--wait"),
        ),
        ("echo 'srun: error: Invalid account' >&2; exit 1", ("Invalid account", "slurm.account")),
        ("exit 0", ("no answer",)),
    ],
)
def test_a_failed_probe_is_one_line_and_the_rest_is_written(slurm, holmes, srun: str, fragments) -> None:
    body = (slurm.folder / "srun").read_text().partition("\n")[2]
    slurm.write("srun", f'case "$*" in *a100*) {srun};; esac\n{body}')
    code, _, err = holmes("site", "-o", "site.yaml")
    (line,) = [li for li in err.splitlines() if li.startswith("holmes: ")]
    assert code == 1 and all(word in line for word in (*fragments, "partition gpu"))
    assert pools()["h200"].rdma_gbps == 400 and pools()["a100-40gb"].nic == "ethernet"
    slurm.jobs()
    slurm.write("srun", body)
    assert holmes("site", "-o", "site.yaml")[0] == 0 and len(slurm.jobs()) == 1 and "a100-80gb" in pools()


def test_a_node_without_its_nic_is_named(slurm, holmes) -> None:
    slurm.add("h1", "gpu:h200:4", "nic_roce", {**IB, "gpu": H200, "gpu_memory_gib": 140.4})
    code, _, err = holmes("site", "-o", "site.yaml")
    assert code == 1 and "node h1: without its roce NIC (the kernel reports ib)" in err


def test_an_unknown_gpu_is_left_for_a_person_to_write(slurm, holmes) -> None:
    for name in ("h1", "h2", "h3"):
        slurm.add(name, "gpu:4", "", {**IB, "gpu": "NVIDIA Z9", "gpu_memory_gib": 300.0})
    code, _, err = holmes("site", "-o", "site.yaml")
    assert code == 1 and "GPU kind nvidia_z9 is not known; write peak_tflops" in err
    text = Path("site.yaml").read_text()
    assert "gpu: {name: nvidia_z9, memory_gib: 300}" in text
    refused(holmes("plan", "--site", "site.yaml"), "nvidia_z9", "peak_tflops")
    figures = "{name: nvidia_z9, memory_gib: 300, peak_tflops: 2000, intra_node_gbps: 7200}"
    Path("site.yaml").write_text(text.replace("gpu: {name: nvidia_z9, memory_gib: 300}", f"gpu: {figures}", 1))
    code, _, err = holmes("site", "-o", "site.yaml")
    assert code == 0 and "is not known" not in err + Path("site.yaml").read_text()
    assert pools()["nvidia_z9"].gpu.peak_tflops == 2000


def test_a_hand_written_file_is_not_overwritten(slurm, holmes) -> None:
    Path("mine.yaml").write_text("name: a\nfabrics: []\n")
    refused(holmes("site", "-o", "mine.yaml"), "mine.yaml", "`holmes site` did not write this file")


def test_plan_nodes_and_doctor_compare_the_file_with_slurm(slurm, holmes, monkeypatch) -> None:
    holmes("site", "-o", "site.yaml")
    monkeypatch.setenv("HOLMES_SITE", "site.yaml")
    code, out, err = holmes("nodes", "--json")
    assert "assumed by `holmes site`: fabric of ib-gpu-h200; fabric of ib-gpu-a100-80gb" in err
    assert code == 0 and {f["nic"] for f in json.loads(out)["fabrics"]} == {"ib"}
    slurm.partitions = partition_line("gpu", "h[1-4],a[1-2]")
    slurm.add("h4", "gpu:h200:4", "hopper", {})
    slurm.add("h1", "gpu:h200:4", "hopper", {}, state="DRAIN")
    _, _, err = holmes("plan", "model=gpt_tiny", "plan.nodes={ib-gpu-h200: 2}")
    assert "nodes h4 are new in Slurm; run `holmes site -o site.yaml`" in err and "2 of the 3 nodes" in err
    _, out, _ = holmes("doctor", "--no-ask-nodes", "--json")
    assert "nodes h4 are new in Slurm" in out and "no fabric label" not in out


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (("gpus_per_node: 4", "gpus_per_node: 8"), ("gpus_per_node is 8", "has 4")),
        (("gpu: {name: h200, peak_tflops: 989", "gpu: {name: b200, peak_tflops: 2250"), ("gpu is b200", "has h200")),
        (("gpu: {name: h200, peak_tflops: 989", "gpu: {name: a100-80gb, peak_tflops: 312"), ("gpu is a100-80gb",)),
        (("gres_type: h200", "gres_type: h100"), ("gres_type is h100", "has h200")),
        (("node_cpus: ", "node_cpus: 99"), ("node_cpus is 99", "Slurm's h1 has")),
        (("node_memory_gib: ", "node_memory_gib: 99"), ("node_memory_gib is 99", "Slurm's h1 has")),
        (("partition: gpu", "partition: old"), ("partition is old, Slurm's h1 is in gpu",)),
        (
            ("gpus_per_node: 4", "gpus_per_node: 4\n    constraint: nosuch"),
            ("constraint is nosuch, Slurm's h1 has features",),
        ),
        (("nodes: 3  # usable in Slurm now\n    node_names: ['h[1-3]']", "nodes: 6"), ("nodes is 6, Slurm has 3",)),
        (("node_names: ['h[1-3]']", "constraint: nosuch"), ("nodes is 3, Slurm has 0",)),
    ],
)
def test_a_file_that_contradicts_slurm_is_refused(slurm, holmes, edit, fragments) -> None:
    holmes("site", "-o", "site.yaml")
    path = Path("site.yaml")
    assert edit[0] in path.read_text()
    path.write_text(path.read_text().replace(*edit, 1))
    refused(holmes("plan", "--site", "site.yaml"), "site.yaml: pool ib-gpu-h200", "holmes site", *fragments)


def test_a_file_written_by_hand_that_names_nodes_of_this_slurm_is_compared(slurm, holmes) -> None:
    holmes("site", "-o", "site.yaml")
    text = Path("site.yaml").read_text()
    values = yaml.safe_load(text)
    del values["found"]
    pool = values["pools"][0]
    Path("hand.yaml").write_text(yaml.safe_dump({**values, "pools": [{**pool, "gpus_per_node": 8}]}))
    refused(holmes("plan", "--site", "hand.yaml"), f"hand.yaml: pool {pool['name']}", "gpus_per_node is 8", "has 4")


def test_fewer_nodes_in_slurm_are_refused(slurm, holmes) -> None:
    holmes("site", "-o", "site.yaml")
    del slurm.nodes["h3"]
    slurm.add("h2", "gpu:h200:4", "hopper", {})
    refused(holmes("plan", "--site", "site.yaml"), "nodes is 3, Slurm has 2 of them")

import json

import pytest
import trees
from slurm_text import node, node_line, partition, partition_line
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric import listing as report
from holmes_hpc.fabric.doctor import examine
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.listing import findings_table, listing_of, probe_dict, probe_tables, read_site
from holmes_hpc.fabric.probe import probe
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.accounting import Association


def example():
    ib = "nic_ib,nic_200g,eth_25g,fabric_a"
    nodes = [
        node("ib1", ib, "ib"),
        node("ib2", ib, "ib"),
        node("x1", "ib,roce", "ib"),
        node("r1", "nic_roce,nic_100g,eth_25g,fabric_b,frobnicator", "ib"),
        node("d1", ib, "ib", state="IDLE+DRAIN", reason="bad NIC"),
        node("o1", "omnipath", "ib"),
    ]
    return listing_of("c", nodes, [partition("ib", "ib[1-2],x1,r1,d1,o1", default=True)])


def test_every_node_is_in_the_table_with_what_must_be_said() -> None:
    (_, columns, pools, caption), _, (_, node_columns, rows, _) = example().tables()
    assert [p[0] for p in pools] == ["a", "b", "ethernet-ib"] and len(columns) == len(pools[0])
    assert "assumed: o1: omnipath: Omni-Path" in caption
    by_name = {row[0]: dict(zip(node_columns, row, strict=True)) for row in rows}
    assert set(by_name) == {"ib[1-2]", "x1", "r1", "d1", "o1"}
    assert by_name["ib[1-2]"]["pool"] == "a" and by_name["ib[1-2]"]["remarks"] == ""
    assert "2 NIC types" in by_name["x1"]["remarks"] and by_name["x1"]["NIC"] == "?"
    assert "not understood: frobnicator" in by_name["r1"]["remarks"]
    assert "bad NIC" in by_name["d1"]["remarks"] and by_name["d1"]["state"] == "idle+drain"


def test_json_holds_the_same_and_is_json() -> None:
    data = json.loads(json.dumps(example().to_dict()))
    assert [(f["name"], f["pools"]) for f in data["fabrics"]] == [(n, [n]) for n in ("a", "b", "ethernet-ib")]
    assert data["fabrics"][0]["nic"] == data["pools"][0]["nic"] == "ib" and data["fabrics"][0]["nodes"] == 2
    assert {n["name"]: n["fabric"] for n in data["nodes"]}["ib1"] == "a"
    assert {n["name"]: n["unknown"] for n in data["nodes"]}["r1"] == ["frobnicator"]
    assert "x1" in data["left_out"] and data["nodes"][2]["nic"] is None


def test_asking_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "node": node_line("ib1", "nic_ib,nic_200g,fabric_a") + "\n",
        "partition": partition_line("ib", "ib1") + "\n",
        "config": "ClusterName = cl\n",
    }
    monkeypatch.setattr(scontrol, "output", lambda *words: answers[words[2]])
    assert report.listing().cluster == "cl"
    site = read_site()
    assert site.name == "cl" and site.pool("a").node_names == ("ib1",)
    assert scontrol.read_node("ib1") is not None and scontrol.read_node("ib2") is None


def test_partitions_are_checked_against_the_users_associations(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "node": node_line("ib1", "nic_ib,nic_200g,fabric_a") + "\n",
        "partition": partition_line("ib", "ib1").replace("AllowAccounts=ALL", "AllowAccounts=chem") + "\n",
        "config": "ClusterName = cl\n",
    }
    monkeypatch.setattr(scontrol, "output", lambda *words: answers[words[2]])
    monkeypatch.setattr("holmes_hpc.fabric.partitions.read_associations", lambda: (Association(("bio",)),))
    with pytest.raises(SiteError, match=r"no usable node \(ib1: partition ib: AllowAccounts lacks bio\)"):
        read_site()
    assert not report.listing().grouping.pools
    assert "no node can be used" in [finding.what for finding in examine(jobs=False)]


@pytest.mark.integration
def test_no_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match="no scontrol on this machine; load Slurm's client commands"):
        read_site()
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\necho 'slurm_load_node error: Unable to contact slurm controller' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(SiteError, match="Unable to contact slurm controller"):
        read_site()


def test_probe_tables_and_json(tmp_path) -> None:
    tree = Tree(tmp_path)
    trees.a_slow_cable(tree)
    nics = probe(tree.root, {"eth0": ("10.0.0.2", 24)}, tree.read)
    interfaces, ports, features = probe_tables(nics)
    assert all(len(row) == len(t[1]) for t in (interfaces, ports, features) for row in t[2])
    assert [row[0] for row in ports[2]] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    assert "mlx5_2:1 runs at 100" in ports[3] and ["nic_600g", "600 Gb/s per node"] in features[2]
    data = json.loads(json.dumps(probe_dict(nics)))
    assert data["type"] == "ib" and data["features"] == ["nic_ib", "nic_600g", "eth_25g"]
    assert data["interfaces"][0]["address"] == "10.0.0.2" and data["ports"][0]["kind"] == "ib"


def test_findings_are_rows() -> None:
    title, columns, rows, caption = findings_table("Doctor", [Finding("error", "here", "it", "this")])
    assert rows == [["here", "error", "it", "this"]] and len(columns) == 4 and caption == ""
    assert findings_table("Doctor", [])[3] == "nothing found" and title == "Doctor"


def test_equal_findings_of_several_nodes_are_one_row() -> None:
    findings = [Finding("warning", f"node n{i}", "no rate", f"holmes label n{i}", f"n{i}") for i in (1, 2, 3, 12)]
    findings.insert(1, Finding("warning", "node n4", "its clock is off", "start chrony on n4", "n4"))
    findings.append(Finding("warning", "slurm.conf", "no rate", "set it"))
    assert findings_table("Doctor", findings)[2] == [
        ["nodes n[1-3,12]", "warning", "no rate", "holmes label n[1-3,12]"],
        ["node n4", "warning", "its clock is off", "start chrony on n4"],
        ["slurm.conf", "warning", "no rate", "set it"],
    ]

"""The room against a real Slurm and real (shaped) NICs."""

import json
import subprocess
import sys
import time

import pytest

from holmes_hpc.fabric import doctor
from holmes_hpc.fabric import listing as report
from holmes_hpc.fabric.label import apply, changes, update_commands
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.node_facts import MARK, ask_nodes
from holmes_hpc.fabric.nodes import read_nodes
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.commands import output

pytestmark = pytest.mark.slurm


def test_slurms_nodes_become_the_topologys_fabrics(testbed) -> None:
    found = report.listing()
    assert {n.name for n in found.nodes} == set(testbed.nodes)
    for fabric in found.grouping.pools:
        selected = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %f", "-p", fabric.partition], check=True, capture_output=True, text=True
        ).stdout.split("\n")
        wanted = set(fabric.constraint.split("&"))
        named = {line.split()[0] for line in selected if line and wanted <= set(line.split()[1].split(","))}
        assert named >= set(fabric.node_names) and fabric.nodes >= 1
        accepted = subprocess.run(
            [
                "sbatch",
                "--test-only",
                "-p",
                fabric.partition,
                "-C",
                fabric.constraint,
                f"-N{fabric.nodes}",
                "--wrap",
                "true",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert accepted.returncode == 0, accepted.stderr
    assert all(not n.reading.unknown and not n.reading.problems for n in found.nodes)


def test_every_node_deserves_its_features_and_the_doctor_finds_no_error(testbed) -> None:
    nodes = read_nodes()
    facts, silent = ask_nodes(nodes)
    assert not silent and {f.node for f in facts} == {n.name for n in nodes}
    by_node = {n.name: n for n in nodes}
    for f in facts:
        assert f.nic is by_node[f.node].reading.nic and f.ethernet == "eth0" and not f.trouble and not f.findings
    assert [str(x) for x in doctor.examine() if x.level == "error"] == []


def test_a_label_that_lies_is_found_and_cured_without_touching_other_features(testbed) -> None:
    roce = next(n for n in read_nodes() if n.reading.nic is NicType.ROCE)
    lie = ["other", *("nic_ib" if f == "nic_roce" else f for f in roce.available)]

    def label(features: list[str]) -> None:
        output(
            "scontrol",
            "update",
            f"NodeName={roce.name}",
            f"AvailableFeatures={','.join(features)}",
            f"ActiveFeatures={','.join(features)}",
        )

    label(lie)
    try:
        errors = [str(x) for x in doctor.examine() if x.level == "error"]
        assert len(errors) == 1 and f"node {roce.name}: Slurm's features name ib, the kernel reports roce" in errors[0]
        facts, _ = ask_nodes([n for n in read_nodes() if n.name == roce.name])
        apply(update_commands(changes(read_nodes(), {roce.name: facts[0].expected_features})))
        cured = scontrol.read_node(roce.name)
        assert cured is not None and set(cured.features) == {"other", *roce.available}
        assert set(cured.features) == set(cured.available)
        assert [x for x in doctor.examine() if x.level == "error"] == []
    finally:
        label(list(roce.available))


def test_an_interface_that_is_down_is_a_lie_of_the_features(testbed) -> None:
    node = next(n for n in read_nodes() if n.reading.nic is NicType.IB)
    testbed.exec(node.name, "ip", "link", "set", "ib0", "down")
    try:
        done = testbed.exec(
            node.name,
            "env",
            f"SLURMD_NODENAME={node.name}",
            f"SLURM_CONF={testbed.env['SLURM_CONF']}",
            sys.executable,
            "-m",
            "holmes_hpc.fabric.node_facts",
        )
        line = next(x for x in done.stdout.splitlines() if x.startswith(MARK))
        findings = json.loads(line[len(MARK) :])["findings"]
    finally:
        testbed.exec(node.name, "ip", "link", "set", "ib0", "up")
    assert len(findings) == 1 and "name ib, the kernel reports ethernet" in findings[0]["what"]


def test_one_job_per_kind_finds_the_testbed_and_a_second_run_needs_none(testbed, tmp_path, monkeypatch) -> None:
    from holmes_hpc.fabric.discovery import discover, kind_of
    from holmes_hpc.fabric.partitions import NodeSettings
    from holmes_hpc.fabric.site_file import read_site_file
    from holmes_hpc.fabric.site_file_check import changes_since_written
    from holmes_hpc.fabric.site_record import probes_of, read_record, site_text

    listing, path = report.listing(), tmp_path / "site.yaml"
    kinds = {kind_of(n, n.partitions[0]) for n in listing.nodes}
    begin = time.monotonic()
    discovery = discover(listing, scontrol.read_topology(), NodeSettings(), wait_s=30)
    assert time.monotonic() - begin < 30
    assert not discovery.problems and {p.kind for p in discovery.probes} == kinds
    path.write_text(site_text(discovery, [n.name for n in listing.nodes], {})[0])
    found = read_site_file(path)
    assert {(p.nic, p.rdma_gbps, p.ethernet_gbps, p.nodes) for p in found.pools} == {
        (p.nic, p.rdma_gbps, p.ethernet_gbps, p.nodes) for p in listing.grouping.pools
    }
    assert changes_since_written(str(path), found) == []
    monkeypatch.setattr(
        "holmes_hpc.fabric.node_facts.partial_outputs", lambda commands, _: [] if not commands else 1 / 0
    )
    again = discover(listing, scontrol.read_topology(), NodeSettings(), probes_of(read_record(str(path))), 30)
    assert site_text(again, [n.name for n in listing.nodes], read_record(str(path)))[0] == path.read_text()

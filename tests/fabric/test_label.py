import os
import subprocess
from pathlib import Path

import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import node
from trees import Tree

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.label import (
    Change,
    apply,
    changes,
    difference_lines,
    differences,
    features_of,
    helper_script,
    merge,
    slurm_conf_lines,
    spell_rate,
    update_commands,
)
from holmes_hpc.fabric.probe import probe

VOCABULARY = read_vocabulary()


def nics(tmp_path: Path, name: str):
    tree = Tree(tmp_path)
    trees.ALL[name](tree)
    return probe(tree.root, {}, tree.read)


@pytest.mark.parametrize("name", [n for n in trees.ALL if n not in ("virtio_only", "speed_unknown")])
def test_a_node_labelled_with_what_it_deserves_passes_its_check(tmp_path: Path, name: str) -> None:
    found = nics(tmp_path, name)
    assert [f for f in differences(found, features_of(found), VOCABULARY) if f.level != "info"] == []


@pytest.mark.parametrize(
    ("name", "features", "says"),
    [
        ("hdr_4_hcas", ["nic_roce", "nic_800g"], "features name roce, the kernel reports ib"),
        ("hdr_4_hcas", ["nic_ib", "nic_400g", "eth_25g"], "400 Gb/s as the ib rate, the kernel 800"),
        ("hdr_4_hcas", ["nic_ib", "nic_800g"], "no feature gives the ethernet rate"),
        ("hdr_4_hcas", ["eth_25g"], "the kernel reports ib"),
        ("hdr_4_hcas", ["ib", "roce"], "2 NIC types"),
        ("iwarp", ["nic_roce", "nic_40g"], "features name roce, the kernel reports ethernet (cxgb4_0:1 iwarp ACTIVE)"),
        ("virtio_only", ["nic_ib"], "features name ib, the kernel reports ethernet"),
        ("one_port_down", ["nic_ib", "nic_400g", "eth_25g"], "the kernel 200 Gb/s"),
    ],
)
def test_features_that_lie(tmp_path: Path, name: str, features: list[str], says: str) -> None:
    found = [f for f in differences(nics(tmp_path, name), features, VOCABULARY, "n7") if f.level == "error"]
    assert len(found) == 1 and says in str(found[0]) and "n7" in str(found[0]) and "holmes label" in found[0].hint


def test_a_port_rate_alias_is_a_warning_only(tmp_path: Path) -> None:
    found = differences(nics(tmp_path, "hdr_4_hcas"), ["ib_hdr", "eth_25g"], VOCABULARY)
    assert [f.level for f in found] == ["warning"] and "kernel 800" in found[0].what


def test_an_unknown_rate_is_not_compared_and_said(tmp_path: Path) -> None:
    found = differences(nics(tmp_path, "virtio_only"), ["nic_ethernet", "eth_25g"], VOCABULARY)
    assert [f.level for f in found] == ["info"]


def test_merge_touches_nobody_elses_features() -> None:
    assert merge(["intel", "nic_roce", "big", "fabric_a"], ["nic_ib", "nic_200g"]) == (
        "intel",
        "big",
        "fabric_a",
        "nic_ib",
        "nic_200g",
    )
    assert merge(["nic_ib", "intel"], ["nic_ib"]) == ("nic_ib", "intel")
    with pytest.raises(SiteError, match="cannot be a feature"):
        merge([], ["nic_ib;rm -rf"])


words = st.from_regex(r"[a-z][a-z0-9_.:]{0,8}", fullmatch=True)


@given(st.lists(words, unique=True), st.sampled_from(["nic_ib", "nic_roce"]))
def test_merging_twice_changes_nothing_and_loses_nothing(present: list[str], nic: str) -> None:
    once = merge(present, [nic, "nic_200g"])
    assert merge(once, [nic, "nic_200g"]) == once and set(present) - {"nic_ib", "nic_roce"} <= set(once)


def three() -> list[Change]:
    nodes = [node("ib1", "intel"), node("ib2", "intel"), node("ib3", "nic_ib,nic_200g,fabric_a")]
    return changes(nodes, {n.name: ["nic_ib", "nic_200g", "fabric_a"] for n in nodes})


def test_lines_and_commands() -> None:
    assert slurm_conf_lines(three()) == [
        "NodeName=ib[1-2] Feature=intel,nic_ib,nic_200g,fabric_a",
        "NodeName=ib3 Feature=nic_ib,nic_200g,fabric_a",
    ]
    assert update_commands(three()) == [
        [
            "scontrol",
            "update",
            "NodeName=ib[1-2]",
            "AvailableFeatures=intel,nic_ib,nic_200g,fabric_a",
            "ActiveFeatures=intel,nic_ib,nic_200g,fabric_a",
        ]
    ]
    assert difference_lines(three()) == ["ib[1-2]: + nic_ib  + nic_200g  + fabric_a"]
    changed = changes([node("r1", "nic_ib,big")], {"r1": ["nic_roce"]})
    assert difference_lines(changed) == ["r1: + nic_roce  - nic_ib"]


def test_features_that_are_available_and_not_active_stay_so() -> None:
    knl = node("k1", "intel,flat,cache", active="intel,cache")
    (change,) = changes([knl], {"k1": ["nic_ib"]})
    assert update_commands([change]) == [
        [
            "scontrol",
            "update",
            "NodeName=k1",
            "AvailableFeatures=intel,flat,cache,nic_ib",
            "ActiveFeatures=intel,cache,nic_ib",
        ]
    ]
    asleep = changes([node("k2", "intel,nic_ib", active="intel")], {"k2": ["nic_ib"]})
    assert difference_lines(asleep) == ["k2: + nic_ib"]
    assert update_commands(asleep)[0][-1] == "ActiveFeatures=intel,nic_ib"
    assert update_commands(changes([node("k3", "a,nic_ib", active="nic_ib")], {"k3": ["nic_ib"]})) == []


def test_apply_runs_exactly_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr("holmes_hpc.fabric.label.output", lambda *words: ran.append(words) or "")
    apply(update_commands(three()))
    assert [list(r) for r in ran] == update_commands(three())


def test_rates_are_spelled_as_features_are_read() -> None:
    for rate, text in ((200.0, "200g"), (0.05, "0.05g"), (0.4, "0.4g"), (54.5, "54.5g"), (1000.0, "1000g")):
        assert spell_rate(rate) == text
        assert VOCABULARY.meaning(f"nic_{text}").rate == rate


@pytest.mark.integration
@pytest.mark.parametrize("name", list(trees.ALL))
def test_the_helper_script_and_the_probe_agree(tmp_path: Path, name: str) -> None:
    tree = Tree(tmp_path / "sys")
    trees.ALL[name](tree)
    for path in tree.refused:
        path.unlink()
    script = tmp_path / "features.sh"
    script.write_text(helper_script())
    done = subprocess.run(
        ["sh", script], capture_output=True, text=True, check=True, env={**os.environ, "HOLMES_SYSFS": str(tree.root)}
    )
    assert done.stderr == ""
    assert tuple(done.stdout.split()) == features_of(probe(tree.root, {}, tree.read))
    assert subprocess.run(["sh", script, "nic_ib"], capture_output=True, text=True, check=True).stdout == ""

"""Which CPUs a rank keeps. The sysfs trees are made up: the machines of the tests have no GPU and one NUMA domain."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from trees import Tree

from holmes_hpc.training.rank import affinity

NEAR, FAR = range(16), range(16, 32)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("\n", set()), ("all", set()), ("0-x", set())],
)
def test_the_kernels_lists(text: str, cpus: set[int]) -> None:
    assert affinity.cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("own", "near", "kept", "why"),
    [
        (range(32), NEAR, NEAR, "beside its GPU, of 32 that it was given"),
        (range(12, 24), NEAR, range(12, 16), "beside its GPU, of 12"),
        (range(4), NEAR, range(4), "all beside its GPU"),
        (FAR, NEAR, FAR, r"none beside its GPU \(those are 0-15\)"),
        (
            range(14, 32),
            NEAR,
            range(14, 32),
            "2 beside its GPU, too few",
        ),  # Python, autograd and NCCL want more than two
        (range(32), (), range(32), "does not tell"),
    ],
)
def test_a_rank_keeps_its_cpus_beside_the_gpu(own: range, near: range, kept: range, why: str) -> None:
    found, said = affinity.choose(own, near)
    assert found == frozenset(kept)
    assert re.search(why, said)


def gpu(bus: int) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def a_node(tmp_path: Path) -> Tree:
    """Two NUMA domains of 16 CPUs, each with a GPU and an HCA."""
    tree = Tree(tmp_path)
    for i, cpus in enumerate(("0-15", "16-31")):
        gpu, card = f"0000:{i}2:00.0", tree.pci(f"0000:{i}1:00.0")
        tree.gpu(gpu)
        tree.write(tree.pci(gpu), local_cpulist=cpus)
        tree.write(card, local_cpulist=cpus)
        tree.rdma(f"mlx5_{i}", card)
    return tree


def test_all_threads_are_bound_and_the_record_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: frozenset(cpus)}))
    said = affinity.bind(gpu(0x12), a_node(tmp_path).root)
    assert said == "16-31: beside its GPU, of 32 that it was given; HCA mlx5_1"
    assert set(bound) == {int(t) for t in os.listdir("/proc/self/task")} and set(bound.values()) == {frozenset(FAR)}


def test_a_rank_without_a_choice_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    assert affinity.bind(gpu(0x02), a_node(tmp_path).root) == "0-7: all beside its GPU; HCA mlx5_0"
    assert "does not tell" in affinity.bind(gpu(0x99), tmp_path)

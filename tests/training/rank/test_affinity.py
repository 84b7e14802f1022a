"""CPU binding of a rank. The sysfs trees are fake: the test machines have no GPU and one NUMA domain."""

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
def test_cpu_lists_of_the_kernel_are_parsed(text: str, cpus: set[int]) -> None:
    assert affinity.cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("allowed", "near", "cpus", "pattern"),
    [
        (range(32), NEAR, NEAR, "near its GPU, of 32 allocated"),
        (range(12, 24), NEAR, range(12, 16), "near its GPU, of 12"),
        (range(4), NEAR, range(4), "all near its GPU"),
        (FAR, NEAR, FAR, r"none near its GPU \(its near CPUs are 0-15\)"),
        (range(14, 32), NEAR, range(14, 32), "only 2 near its GPU"),  # Python, autograd and NCCL need more than two
        (range(32), (), range(32), "does not list"),
    ],
)
def test_a_rank_is_bound_to_its_cpus_near_the_gpu(allowed: range, near: range, cpus: range, pattern: str) -> None:
    chosen_cpus, reason = affinity.choose(allowed, near)
    assert chosen_cpus == frozenset(cpus)
    assert re.search(pattern, reason)


def gpu(bus: int) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def two_domains(tmp_path: Path) -> Tree:
    """Return the sysfs tree of two NUMA domains with 16 CPUs, a GPU and an HCA each."""
    tree = Tree(tmp_path)
    for i, cpus in enumerate(("0-15", "16-31")):
        gpu, card = f"0000:{i}2:00.0", tree.pci(f"0000:{i}1:00.0")
        tree.gpu(gpu)
        tree.write(tree.pci(gpu), local_cpulist=cpus)
        tree.write(card, local_cpulist=cpus)
        tree.rdma(f"mlx5_{i}", card)
    return tree


def test_all_threads_are_bound_and_the_text_names_cpus_and_hca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.update({thread: frozenset(cpus)}))
    text = affinity.bind(gpu(0x12), two_domains(tmp_path).root)
    assert text == "16-31: near its GPU, of 32 allocated; HCA mlx5_1"
    assert set(bound) == {int(t) for t in os.listdir("/proc/self/task")} and set(bound.values()) == {frozenset(FAR)}


def test_a_rank_with_local_cpus_only_or_unknown_ones_is_not_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    assert affinity.bind(gpu(0x02), two_domains(tmp_path).root) == "0-7: all near its GPU; HCA mlx5_0"
    assert "does not list" in affinity.bind(gpu(0x99), tmp_path)

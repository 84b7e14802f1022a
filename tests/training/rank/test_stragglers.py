"""Which ranks are called slow."""

from __future__ import annotations

import spawn

from holmes_hpc.training.rank import stragglers


def test_the_slow_node_is_named_and_no_other() -> None:
    judge = stragglers.Stragglers([[0, 1, 2], [3, 4]], ["a", "b", "c", "d", "e"], every=3)
    steps = [[1.0, 1.1, 0.9, 3.0, 3.1]] * 3
    assert [judge.step(s) for s in steps] == [[], [], []]
    slow = [[1.0, 1.1, 1.6, 3.0, 3.1], [1.0, 1.1, 0.9, 9.0, 3.1], [1.0, 1.1, 1.6, 3.0, 3.1]]  # one hiccup is none
    found = [judge.step(s) for s in slow][-1]
    assert len(found) == 1 and "node c: rank 2 computes 1.45 times" in found[0]


def test_a_stage_with_nobody_to_compare_with_is_compared_by_its_layers() -> None:
    nodes, stages = ["a", "b", "c", "d"], [[0], [1], [2], [3]]
    judge = stragglers.Stragglers(stages, nodes, [2, 4, 4, 3.5], ["h", "h", "h", "v"], every=1)
    assert judge.step([0.2, 0.4, 0.5, 3.5]) == []  # another GPU is no slow node
    found = judge.step([0.2, 0.4, 0.7, 3.5])
    assert len(found) == 1 and "node c: rank 2 computes 1.75 times as long for a layer of stage 2" in found[0]
    assert len(judge.step([0.4, 0.4, 0.4, 0.1])) == 1


def test_the_work_of_stages() -> None:
    plan = spawn.plan(pp=3, layers=[[3], [2], [1]])
    work, alike = stragglers.work_of_stages(plan, paced=None)
    assert work[:2] == [3, 2] and 1.2 < work[2] < 3 and alike == [plan.site.fabrics[0].gpu] * 3
    assert stragglers.work_of_stages(plan, paced={})[0] == [3, 2, 1]
    assert stragglers.work_of_stages(plan, paced={"roce-1": 3})[0] == [3, 6, 1]
    assert stragglers.work_of_stages(spawn.plan(pp=2, dp=2), paced=None) == ([], [])

"""Warnings about slow ranks."""

from __future__ import annotations

from dataclasses import replace

import spawn

from holmes_hpc.config.model import Experts
from holmes_hpc.training.rank import stragglers


def test_the_slow_node_is_named_and_no_other() -> None:
    monitor = stragglers.Stragglers([[0, 1, 2], [3, 4]], ["a", "b", "c", "d", "e"], every=3)
    steps = [[1.0, 1.1, 0.9, 3.0, 3.1]] * 3
    assert [monitor.add(s) for s in steps] == [[], [], []]
    slow = [[1.0, 1.1, 1.6, 3.0, 3.1], [1.0, 1.1, 0.9, 9.0, 3.1], [1.0, 1.1, 1.6, 3.0, 3.1]]  # one hiccup is none
    warnings = [monitor.add(s) for s in slow][-1]
    assert len(warnings) == 1 and "node c: rank 2 computes 1.45 times as long as the others of stage 0" in warnings[0]


def test_a_stage_without_replicas_is_compared_by_its_time_per_layer() -> None:
    nodes, stages = ["a", "b", "c", "d"], [[0], [1], [2], [3]]
    monitor = stragglers.Stragglers(stages, nodes, [2, 4, 4, 3.5], ["h", "h", "h", "v"], every=1)
    assert monitor.add([0.2, 0.4, 0.5, 3.5]) == []  # another GPU is no slow node
    warnings = monitor.add([0.2, 0.4, 0.7, 3.5])
    text = "node c: rank 2 computes 1.75 times as long as other stages for each layer of stage 2"
    assert len(warnings) == 1 and text in warnings[0]
    assert len(monitor.add([0.4, 0.4, 0.4, 0.1])) == 1


def test_the_work_of_a_stage_counts_layers_and_the_head() -> None:
    plan = spawn.plan(pp=3, layers=[[3], [2], [1]])
    work, gpus = stragglers.work_of_stages(plan, factors=None)
    assert work[:2] == [3, 2] and 1.2 < work[2] < 3 and gpus == [plan.site.pools[0].gpu] * 3
    assert stragglers.work_of_stages(plan, factors={}) == ([3, 2, 1], [*gpus[:2], None])  # the head is not emulated
    assert stragglers.work_of_stages(plan, factors={"roce-1": 3})[0] == [3, 6, 1]
    assert stragglers.work_of_stages(spawn.plan(pp=2, dp=2), factors=None) == ([], [])


def test_a_first_dense_layer_counts_as_its_share_of_a_layer_with_experts() -> None:
    model = replace(spawn.MODEL, experts=Experts(4, top_k=2, first_dense=1))
    plan = spawn.plan(pp=3, layers=[[3], [2], [1]], model=model)
    work = stragglers.work_of_stages(plan, factors=None)[0]
    assert 2.3 < work[0] < 2.9 and work[1] == 2  # the dense layer has one feed-forward part, others two
    assert stragglers.work_of_stages(plan, factors={})[0] == [3, 2, 1]

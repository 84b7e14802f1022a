"""The Plan: it is read back as written, keeps its id, and is refused in one line if it is impossible."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import small_testbed, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, Parallel, groups
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.plan.transport import TCP
from holmes_hpc.planning.search.best import best_plan, fixed_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return fixed_plan(named("gpt_3_6b"), Batch(768, 4, 2048), two_clusters(2), PlanOptions(tp=2, pp=2, dp=8), Costs())


def test_a_written_plan_is_read_back(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml") == plan


def test_edge_connections_are_written_to_the_plan(tmp_path: Path) -> None:
    options = PlanOptions(tp=2, pp=2, dp=8, edge_connections=2)
    fixed_plan(named("gpt_3_6b"), Batch(768, 4, 2048), two_clusters(2), options, Costs()).write(tmp_path / "plan.yaml")
    assert Plan.read(tmp_path / "plan.yaml").edge_connections == 2
    with pytest.raises(ConfigError, match=r"edge_connections"):
        PlanOptions(edge_connections=0)


@pytest.mark.parametrize(
    ("options", "names"), [({"edge_dtype": "fp8"}, "edge_dtype=fp8"), ({"edge_connections": 2}, "edge_connections=2")]
)
def test_edge_options_that_megatron_ignores_are_refused(plan: Plan, options: dict[str, Any], names: str) -> None:
    single = replace(plan, transport_mode="single", predicted=None)
    assert single.schedule.kind == "1f1b"
    with pytest.raises(PlanError, match=f"{names} has no effect with transport=single"):
        replace(single, **options)
    replace(single, schedule=Schedule("ahead", (2, 1)), **options)
    replace(plan, predicted=None, **options)
    for schedule in ("auto", "1f1b", "interleaved"):
        with pytest.raises(ConfigError, match=f"{names} has no effect with transport=single"):
            PlanOptions(transport="single", schedule=schedule, **options)
    PlanOptions(transport="single", schedule="ahead", **options)
    PlanOptions(transport="holmes", schedule="1f1b", **options)


def test_data_parallel_groups_stay_inside_their_fabric(plan: Plan) -> None:
    kinds = {}
    for g in plan.transports():
        kinds.setdefault((g.kind, g.stages), set()).add((g.transport.kind, g.transport.fabric))
    assert kinds["dp", (0,)] == {("rdma", "ib-a")} and kinds["dp", (1,)] == {("rdma", "roce-a")}
    assert kinds["edge", (0, 1)] == {("tcp", None)} and kinds["tp", (0,)] == {("local", None)}


def test_plain_megatron_has_one_transport_for_all(plan: Plan) -> None:
    single = replace(plan, transport_mode="single")
    assert {g.transport.kind for g in single.transports() if g.kind != "tp"} == {"tcp"}


@pytest.mark.parametrize("mode", ["holmes", "single"])
def test_control_traffic_has_an_entry_of_its_own(plan: Plan, mode: str) -> None:
    """GPU ranks exchange host memory over TCP, even if all of them share RDMA."""
    one = fixed_plan(
        named("gpt_3_6b"),
        Batch(768, 4, 2048),
        two_clusters(2),
        PlanOptions(tp=1, pp=2, dp=8, nodes={"ib-a": 2}, transport=mode),
        Costs(),
    )
    for made in (one, replace(plan, transport_mode=mode)):
        of_all = {g.kind: g.transport for g in made.transports() if len(g.ranks) == made.world_size}
        assert of_all["control"] == TCP == made.transport_of(range(made.world_size), host_memory=True)
    assert {g.transport.kind for g in one.transports() if g.kind == "world"} == {"rdma"}


def test_cpu_ranks_have_no_control_entry() -> None:
    """Their tensors are in host memory, so the group of all ranks also carries control traffic."""
    made = fixed_plan(named("gpt_tiny"), Batch(32, 4, 256), small_testbed(), PlanOptions(tp=1, pp=2, dp=4), Costs())
    assert "control" not in {g.kind for g in made.transports()} >= {"world"}


def test_a_plan_without_the_control_entry_is_read(plan: Plan, tmp_path: Path) -> None:
    data = plan.to_dict()
    assert data["transports"].pop(0)["kind"] == "control"
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    assert Plan.read(path) == plan and Plan.read(path).id == plan.id


RECORDS = Path(__file__).parents[3] / "analysis/records"
IDS = {
    "demo-three": "ada276cbb822",
    "demo-two": "9673c1f26b5b",
    "s-holmes": "9673c1f26b5b",
    "s-single": "70e2eae4f7b4",
    "traced": "4058b59221d8",
    "evaluation/paper-like-ethernet-4-holmes-0": "985c78d02fb9",
    "evaluation/paper-like-hybrid-4-holmes-0": "bb67812e6a38",
    "evaluation/paper-like-hybrid-4-megatron-lm-overlap-0": "ca8ad195b1cb",
    "evaluation/paper-like-roce-4-holmes-0": "070a4185eb44",
}


@pytest.mark.parametrize(("name", "id"), IDS.items())
def test_kept_plans_keep_their_id(name: str, id: str) -> None:
    kept = Plan.read(RECORDS / name / "plan.yaml")
    assert kept.id == id and Plan.from_dict(kept.to_dict()) == kept


def test_a_plan_for_gpus_keeps_the_id_it_had_without_the_control_entry(plan: Plan) -> None:
    assert plan.id == "7dc913158093" and replace(plan, transport_mode="single").id == "b51a639caa61"


def test_the_id_depends_on_what_runs_only(plan: Plan) -> None:
    assert replace(plan, assumptions=("other",), predicted=None).id == plan.id
    assert replace(plan, bucket_bytes=1).id != plan.id


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(layres=3), "unknown key 'layres'"),
        (lambda d: d["components"][0].update(nodes=1), "components hold"),
        (lambda d: d["components"][0].update(nodes=99), "the site has 2"),
        (lambda d: d["stages"][0].update(layers=16, chunks=[16]), "31 layers, the model has 30"),
        (lambda d: [s.update(dp=7) for s in d["stages"]], "needs 28"),
        (lambda d: d["batch"].update(global_size=100), "not a multiple"),
        (lambda d: d["batch"].update(sequence_length=4096), "above the model's 2048"),
        (lambda d: d["transports"][-1].update(transport="rdma", nic="ib", fabric="ib-a"), "but the other keys give"),
        (lambda d: d["transports"].pop(), "transports: it is "),
        (lambda d: d.update(version=99), "version 99"),
        (
            lambda d: d.update(stages=[1, 2]),
            "stages: stages is [1, 2]; give a list with one mapping of keys (pool, layers, …)",
        ),
        (lambda d: d.update(edge_connections=0), "edge_connections is 0"),
        (lambda d: d.pop("model"), "model is missing"),
        (
            lambda d: d["components"][0].update(stages=[1]),
            "components[0].stages: it is [1], but the other keys give [0]",
        ),
        (lambda d: d["components"][1].update(fabric="ib-a"), "pools ib-a, ib-a: one is listed twice"),
        (
            lambda d: d["stages"][0].update(fabric="roce-a"),
            "stages[0].fabric: it is roce-a, but the other keys give ib-a",
        ),
        (
            lambda d: (d["parallel"].update(sequence_parallel=True), d["batch"].update(sequence_length=1023)),
            "TP 2 does not divide a sequence of 1023",
        ),
        (
            lambda d: (
                d["parallel"].update(virtual_stages=2),
                d["schedule"].update(kind="interleaved"),
                d["batch"].update(global_size=96),
                [s.update(chunks=[8, 7]) for s in d["stages"]],
            ),
            "3 micro-batches are no multiple of PP",
        ),
    ],
)
def test_a_broken_plan_is_one_line(plan: Plan, change: Any, says: str, tmp_path: Path) -> None:
    data = plan.to_dict()
    change(data)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        Plan.read(path)
    assert says in str(caught.value) and str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_data_parallel_group_over_two_fabrics_is_refused(plan: Plan) -> None:
    """Half of each stage in each fabric: `tp-cp-ep-pp-dp` would make all data-parallel groups span."""
    parts = [replace(c, stages=(0, 1)) for c in plan.components]
    parallel = replace(plan.parallel, order=HIERARCHICAL_ORDER)
    with pytest.raises(PlanError, match="stage 0 has ranks in ib-a and roce-a"):
        replace(plan, components=tuple(parts), parallel=parallel, predicted=None)


def test_hierarchical_data_parallel_may_span_but_its_instances_not() -> None:
    site = two_clusters(2)
    made = best_plan(
        named("gpt_3_6b"), Batch(768, 4, 2048), site, PlanOptions(strategy="hierarchical-dp", tp=1), Costs()
    )
    spans = {g.kind: g.transport.kind for g in made.transports() if g.transport.kind != "local"}
    assert spans["inter_dp"] == "tcp" and spans["intra_dp"] == "rdma" and spans["dp"] == "tcp"
    assert made.parallel.optimizer_instances >= 2


def test_schedules_are_checked() -> None:
    with pytest.raises(PlanError, match="did you mean '1f1b'"):
        Schedule("1f1", (1,))
    with pytest.raises(PlanError, match="at least 1"):
        Schedule("ahead", (1, 0))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dp": 3, "optimizer_instances": 2}, "cannot be cut"),
        ({"cp": 2}, "CP 2 does not divide 1 replicas"),
        ({"tp": 0}, "tp is 0"),
        ({"virtual_stages": 2}, "need a pipeline"),
        ({"sequence_parallel": True}, "needs tp"),
        ({"order": "pp"}, "rank order"),
        ({"dp": 2, "optimizer_instances": 2, "distributed_optimizer": False}, "distributed optimizer"),
    ],
)
def test_parallel_sizes_are_checked(values: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Parallel.uniform(**values)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", HIERARCHICAL_ORDER])
def test_groups_are_those_of_megatron(order: str) -> None:
    """Every rank is in one group of each kind, and groups are slices of the grid."""
    p = Parallel.uniform(tp=2, pp=3, dp=4, order=order, optimizer_instances=2)
    ranks_by_kind: dict[str, list[int]] = {}
    for g in groups(p, 8, tied=True):
        ranks_by_kind.setdefault(g.kind, []).extend(g.ranks)
    for kind in ("world", "tp", "dp", "intra_dp", "inter_dp", "mp", "pp"):
        assert sorted(ranks_by_kind[kind]) == list(range(24)), kind
    grid = p.grid()
    assert all(p.coordinates(int(grid[s][d, t])) == (s, d, t) for s, d, t in [(0, 0, 0), (2, 3, 1), (1, 2, 0)])


def test_ethernet_only_nodes_use_tcp_inside(plan: Plan) -> None:
    site = two_clusters(2)
    only = replace(site, pools=tuple(replace(f, nic=NicType.ETHERNET, rdma_gbps=None) for f in site.pools))
    assert {g.transport.kind for g in replace(plan, site=only).transports() if g.kind == "dp"} == {"tcp"}


@pytest.mark.integration
def test_sequence_parallel_only_where_it_divides() -> None:
    def planned(length: int, **options: Any) -> Plan:
        return best_plan(
            named("gpt_3_6b"), Batch(768, 4, length), two_clusters(2), PlanOptions(tp=4, **options), Costs()
        )

    assert planned(1024).parallel.sequence_parallel and not planned(1022).parallel.sequence_parallel
    with pytest.raises(PlanError, match="TP 4 does not divide a sequence of 1022"):
        planned(1022, sequence_parallel=True)


def test_more_recomputation_is_tried_even_if_less_fits() -> None:
    """With little memory and no recomputation, the first stages hold too few layers and the last too many."""
    site = two_clusters(2)
    small = replace(site.pools[0].gpu, name="l40s", memory_gib=48.0)
    one = replace(site, pools=(replace(site.pools[0], nodes=16, gpu=small),))

    def step_s(recompute: str) -> float:
        options = PlanOptions(tp=1, pp=8, dp=16, recompute=recompute, virtual_stages=1)
        made = best_plan(named("llama2_7b"), Batch(768, 4, 4096), one, options, Costs()).predicted
        assert made
        return made.step_time_s

    assert step_s("auto") <= min(step_s("none"), step_s("full")) * 1.001
    assert step_s("full") < step_s("none")


def test_the_proportional_rule_skips_virtual_stages_without_layers() -> None:
    site = two_clusters(2)
    slow = replace(site.pools[1], gpu=replace(site.pools[1].gpu, name="slow", peak_tflops=30.0))
    made = best_plan(
        replace(named("gpt_3_6b"), layers=12),
        Batch(768, 1, 2048),
        replace(site, pools=(site.pools[0], slow)),
        PlanOptions(tp=2, pp=4, partition="proportional", recompute="full"),
        Costs(),
    )
    assert sum(s.layers for s in made.stages) == 12


def test_a_model_that_fits_nowhere_is_refused_without_warnings() -> None:
    """Even if infinite memory would allow a plan on a part of the fabrics."""
    with warnings.catch_warnings(), pytest.raises(PlanError, match="does not fit: at best"):
        warnings.simplefilter("error")
        best_plan(named("gpt_3_6b"), Batch(1536, 2, 2048), small_testbed(), PlanOptions(), Costs())

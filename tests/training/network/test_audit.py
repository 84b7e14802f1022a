"""The audit of NICs: planned bytes of each node, the cause of a surplus, and NICs that go down."""

import functools
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.network import audit
from holmes_hpc.training.network.audit import EVERY_STEPS, Audit, planned_bytes, planned_loads
from holmes_hpc.training.network.interfaces import NodeTransports

MODEL = ModelSpec("m", layers=12, hidden=256, heads=8, vocab=512, ffn=1024, kv_heads=8)
TWO_FABRICS = {"ib-a": 2, "roce-a": 2}
THREE_FABRICS = {**TWO_FABRICS, "eth-a": 2}


def site(gpus: int) -> Site:
    gpu = replace(CPU, memory_gib=64.0)
    return Site(
        "s",
        (
            Pool("ib-a", NicType.IB, "ib", 4, gpus, 0.05, gpu, 0.4, "nic_ib"),
            Pool("roce-a", NicType.ROCE, "roce", 4, gpus, 0.05, gpu, 0.25, "nic_roce"),
            Pool("eth-a", NicType.ETHERNET, "eth", 4, gpus, 0.05, gpu, None, "nic_ethernet"),
        ),
    )


def plan_on(nodes: dict[str, int], gpus: int = 1, tied: bool = False, **options: object) -> Plan:
    return best_plan(
        replace(MODEL, tied=tied),
        Batch(48, 1, 64),
        site(gpus),
        PlanOptions(nodes=nodes, **options),
        Costs(pace_layer_ms=2),
    )


@functools.cache
def two_stages() -> Plan:
    return plan_on(TWO_FABRICS, pp=2)


@pytest.mark.parametrize(
    ("nodes", "gpus", "options"),
    [
        (TWO_FABRICS, 1, {"pp": 2}),
        (TWO_FABRICS, 4, {"pp": 2, "tp": 2}),
        (TWO_FABRICS, 2, {"pp": 4, "tied": True}),
        ({"ib-a": 2}, 2, {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}),
        (THREE_FABRICS, 1, {"pp": 3, "virtual_stages": 2, "schedule": "interleaved"}),
        (THREE_FABRICS, 1, {"pp": 3, "distributed_optimizer": False, "transport": "single"}),
        (TWO_FABRICS, 2, {"strategy": "hierarchical-dp", "schedule": "1f1b"}),
        (TWO_FABRICS, 1, {"pp": 2, "edge_dtype": "bf16"}),
    ],
    ids=["two-fabrics", "tp", "tied", "interleaved", "three-interleaved", "single", "hierarchical", "bf16-edges"],
)
def test_planned_loads_sum_up_to_the_predicted_bytes(nodes, gpus, options) -> None:
    plan = plan_on(nodes, gpus, **options)
    sums: defaultdict[str, float] = defaultdict(float)
    names = [place.node for place in plan.places]
    fabrics = {place.node: place.pool for place in plan.places}
    for load in planned_loads(planned_bytes(plan), names):
        sums["ethernet" if load.kind == "ethernet" else fabrics[load.node]] += load.bytes
    assert dict(sums) == pytest.approx(plan.predicted.nic_bytes_per_step)


def audit_of(plan: Plan, factors: dict[str, float] | None = None) -> Audit:
    return Audit(plan, nodes_of(plan), factors or {}, planned_bytes(plan))


def nodes_of(plan: Plan) -> list[NodeTransports]:
    return [
        NodeTransports(p.node, p.pool, {"tcp": ("eth0", "10.0.1.1"), "rdma": ("fast0", "10.0.2.1")}, {}, False)
        for p in plan.places
    ]


def rows_of(plan: Plan, factor: float) -> list[list[float]]:
    """Return every rank's counters for traffic as planned."""
    rows = [[0.0] * 7 for _ in plan.places]
    names = [p.node for p in plan.places]
    for load in planned_loads(planned_bytes(plan), names):
        rows[names.index(load.node)][0 if load.kind == "ethernet" else 2] += load.bytes * factor
    return rows


def findings_of(audited: Audit, rows: list[list[float]]) -> list[Finding]:
    return [f for _ in range(2 * EVERY_STEPS) for f in audited.add(rows)]


def test_traffic_as_planned_gives_no_finding() -> None:
    plan = two_stages()
    audited = audit_of(plan, {"ib-a": 1.05, "roce-a": 1.05, "ethernet": 1.05})
    assert not any(audited.add(rows_of(plan, 1.05)) for _ in range(10 * EVERY_STEPS))


@pytest.mark.parametrize("wrong_from", [1, 2, 12, 29, 34, 99])
def test_a_group_on_the_wrong_nic_is_reported_once_within_twenty_steps(wrong_from) -> None:
    plan = two_stages()
    audited, planned, rows = audit_of(plan), rows_of(plan, 1.0), rows_of(plan, 1.0)
    rows[1][0], rows[1][2] = rows[1][0] + rows[1][2], 0.0
    findings = [
        (step, f) for step in range(1, wrong_from + 20) for f in audited.add(rows if step >= wrong_from else planned)
    ]
    ((step, finding),) = findings
    assert wrong_from < step < wrong_from + 20
    assert (finding.level, finding.node, finding.nic) == ("error", plan.places[1].node, "eth0")
    assert "probably group dp of ranks 0,1, which belongs on ib" in finding.what
    assert not any(audited.add(rows) for _ in range(2 * EVERY_STEPS))  # not reported again


def test_a_group_on_a_nic_outside_the_plan_is_reported_and_storage_traffic_is_not() -> None:
    plan = two_stages()
    node = plan.places[1].node
    rows = rows_of(plan, 1.0)
    rows[0][4] = 1e9  # a checkpoint goes to storage over another port
    rows[1][4], rows[1][2] = rows[1][2], 0.0
    (finding,) = findings_of(audit_of(plan), rows)
    assert (finding.level, finding.node) == ("error", node) and f"nics/{node}.jsonl names it" in finding.what
    assert "probably group dp of ranks 0,1, which belongs on ib" in finding.what


def test_steps_with_other_traffic_are_not_counted() -> None:
    plan = two_stages()
    audited, rows = audit_of(plan), rows_of(plan, 1.0)
    busy = [[row[0] + 1e9, *row[1:]] for row in rows]  # with a checkpoint
    assert not any(audited.add(busy if step % 3 == 0 else rows, is_step_only=step % 3 != 0) for step in range(100))


def test_the_message_names_the_sender_by_the_kernels_counters_of_own_connections() -> None:
    plan = two_stages()
    for column, own_bytes, text in (
        (5, 2e6, "own connections sent 2.0 MB of it, the rest is another job's"),
        (5, 0.0, "none of this run's groups sends less than planned: probably another job's"),
        (5, 9e9, "own connections sent 9000.0 MB of it, none of this run's groups sends less"),
    ):
        rows = rows_of(plan, 1.0)
        rows[0][0] += 9e9
        rows[0][column] = own_bytes
        (finding,) = findings_of(audit_of(plan), rows)
        assert finding.level == "warning" and text in finding.what
    rows = rows_of(plan, 1.0)
    rows[0][0], rows[0][5] = (
        rows[0][0] + rows[0][2],
        1e3,
    )  # one NIC lacks the bytes of another, but the run did not send them
    rows[0][2] = 0.0
    assert "probably group" not in " ".join(f.what for f in findings_of(audit_of(plan), rows))


def test_own_connections_that_are_routed_over_another_nic_count_as_the_runs() -> None:
    plan = two_stages()
    rows = rows_of(plan, 1.0)
    rows[0][5], rows[0][6] = rows[0][0], rows[0][2]  # the addresses are right
    rows[0][0], rows[0][2] = rows[0][0] + rows[0][2], 0.0
    (finding,) = findings_of(audit_of(plan), rows)
    assert finding.level == "error" and "probably group dp of ranks 0,1, which belongs on ib" in finding.what


def test_a_nic_is_reported_if_it_is_down_in_two_checks_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = {"ib0": NetworkError("NIC ib0 went down (down)", where="node n1", hint="bring it up again")}
    answers = iter([{}, down, {}, down, down])
    monkeypatch.setattr(audit, "nic_faults", lambda names, node: next(answers))
    node = NodeTransports("n1", "ib-a", {"rdma": ("ib0", "10.0.2.1")}, {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}, False)
    (tmp_path / "class/infiniband").mkdir(parents=True)
    assert audit.nics_in_use(node, tmp_path) == ["ib0", "mlx5_0:1", "mlx5_1:1"]
    check = audit.nic_check(node)
    assert [check() for _ in range(4)] == [None] * 4
    assert str(check()) == "node n1: NIC ib0 went down (down); bring it up again"


def test_ports_missing_from_a_containers_sysfs_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[list[str]] = []
    monkeypatch.setattr(audit, "nic_faults", lambda names, node: checked.append(names) or {})
    node = NodeTransports("n1", "ib-a", {"tcp": ("eth0", "10.0.1.1")}, {"NCCL_IB_HCA": "=mlx5_0"}, False)
    audit.nic_check(node, tmp_path)()
    (tmp_path / "class/infiniband").mkdir(parents=True)
    audit.nic_check(node, tmp_path)()
    assert checked == [["eth0"], ["eth0", "mlx5_0"]]


STUCK_RANK = """
import itertools
import sys
import time
from holmes_hpc.errors import NetworkError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.failure import RankExit

class UnreachableStore:  # behind the failed NIC
    def check(self, keys): time.sleep(60)

exits = RankExit(RunDirectory(sys.argv[1]), Launch(0, 2, 0, "srun", "n1", "key", False))
exits._store = UnreachableStore()
error = NetworkError("NIC ib0 went down", where="node n1", hint="bring it up again")
checks = itertools.chain([None], itertools.repeat(error))
exits.poll_cause(lambda: next(checks))
if sys.argv[2] == "waits":
    time.sleep(60)  # a collective that never returns
else:
    sys.exit(exits.record_failure(RuntimeError("Connection reset by peer")))
"""


@pytest.mark.integration
@pytest.mark.parametrize("main", ["waits", "breaks"])
def test_a_nic_fault_is_reported_and_ends_the_rank_in_any_state_of_its_main_thread(tmp_path, main) -> None:
    run = RunDirectory.create(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", STUCK_RANK, str(run.path), main], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("failed: node n1: NIC ib0 went down; bring it up again") == 1
    (ended,) = run.read_exits()
    assert (ended["state"], ended["error"]) == ("failed", "node n1: NIC ib0 went down; bring it up again")

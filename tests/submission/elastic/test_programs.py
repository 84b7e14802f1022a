"""Agent, coordinator and batch script of an elastic run, without Slurm."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import plans
import pytest
from msgspec import json

from holmes_hpc.config.composition import load
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.elastic import agent as agent_program
from holmes_hpc.submission.elastic import coordinator as coordinator_program
from holmes_hpc.submission.elastic.agent import Agent
from holmes_hpc.submission.elastic.claims import claim, lost_before, newest_claim
from holmes_hpc.submission.elastic.connection import Order, Published, code_version, listen, published_path
from holmes_hpc.submission.elastic.coordinator import Coordinator, first_state
from holmes_hpc.submission.elastic.decision import REQUEUE, SETTLE_S, Beat, Plans
from holmes_hpc.submission.elastic.planner import Planner
from holmes_hpc.submission.executor.environment import ComponentRanks
from holmes_hpc.submission.plan_job import plan_executor
from holmes_hpc.waiting import wait_until


def send(connection: Connection, message: Beat | Order) -> None:
    connection.send_bytes(json.encode(message))


def receive(connection: Connection, kind: Any) -> Any:
    return json.decode(connection.recv_bytes(), type=kind)


JOB = [ComponentRanks(("ib1", "ib2", "ib3"), 0, 1), ComponentRanks(("roce1", "roce2", "roce3"), 3, 1)]
POOLS = ("ib-a", "roce-a")
NODES = [node for part in JOB for node in part.nodes]


def script(tmp_path: Path, **arguments: Any) -> str:
    return plan_executor(plans.plan("ib-a", "roce-a"), tmp_path / "x", SlurmSettings(), **arguments).job_script()


PLAIN_STEP = """\
srun --het-group=0,1 --export=ALL --unbuffered --kill-on-bad-exit=1 --distribution=block:block \\
  sh -c 'exec >>"${1}$SLURM_PROCID${2}" 2>&1; shift 2; exec "$@"' task RUN/logs/rank- .txt \\
  PYTHON holmes_hpc.submission.executor.task RUN/submission IMPORTS 2> RUN/logs/srun.txt &
step=$!
PYTHON holmes_hpc.submission.lifecycle.lost_step RUN 4 "$step" &
"""


def test_without_elastic_the_batch_script_is_the_same_byte_by_byte(tmp_path: Path) -> None:
    text = script(tmp_path)
    step = text[text.index("\nsrun") + 1 : text.index("monitor=$!")].replace(str(tmp_path / "x"), "RUN")
    step = re.sub(r"/\S*python\S* .*(?= holmes_hpc)", "PYTHON", step)
    assert re.sub("(?<=submission) (''|/.*)(?= 2>)", " IMPORTS", step) == PLAIN_STEP
    directives = text[: text.index("\nexport")].replace(str(tmp_path), "")
    assert not re.search("no-kill|elastic", directives) and directives.count("#SBATCH --nodes=2\n") == 2


def test_an_elastic_job_has_spares_and_one_agent_per_node_and_survives(tmp_path: Path) -> None:
    text = script(tmp_path, spares=2)
    assert text.count("#SBATCH --nodes=4\n") == text.count("#SBATCH --no-kill\n") == 2
    assert text.count("#SBATCH --ntasks-per-node=1\n") == 2
    step = next(line for line in text.splitlines() if "srun --" in line)
    assert step.startswith("(srun") and step.index("exit=1") < step.index("--no-kill --kill-on-bad-exit=0 --wait=0")
    assert "elastic.agent" in text and "elastic.coordinator" in text and "lost_step" not in text


def test_one_machine_has_no_spares() -> None:
    with pytest.raises(ConfigError, match="one machine has no spare node"):
        load(["elastic.enabled=true", "launcher=local"])


def test_plan_and_job_give_ranks_and_spares() -> None:
    placement = first_state(plans.plan("ib-a", "roce-a"), POOLS, JOB, {"dead_s": 3.0}).placement
    assert placement.nodes == ["ib1", "ib2", "roce1", "roce2"] and placement.spares == (("ib3",), ("roce3",))
    assert [[*placement.ranks_on(node)] for node in NODES] == [[0], [1], [], [2], [3], []]


def test_only_who_knows_the_secret_is_admitted(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.json"
    listener, secret = listen("127.0.0.1", path, "ib1")
    served: list[Connection] = []

    def serve() -> None:
        for _ in range(3):
            peer = listener.accept()
            try:
                deliver_challenge(peer, secret)
                answer_challenge(peer, secret)
                served.append(peer)
            except (AuthenticationError, EOFError, OSError):
                peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(listener.address, authkey=b"guess")
    published = Published.read(path)
    assert published is not None and published.node == "ib1"
    peer = published.connect(5.0)
    thread.join()
    assert len(served) == 1 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert Published.read(path) is None  # others could have written it
    for closed in (peer, served[0], listener):
        closed.close()
    assert not published.may_live(5.0)


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the version, which git would be asked for."""
    monkeypatch.setenv("HOLMES_CODE", "1.2.0 abc")


class Site:
    """A coordinator, and connections of six agents that do as they are told."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_takeover: bool = False) -> None:
        plan = plans.plan("ib-a", "roce-a")
        self.run = RunDirectory.create(tmp_path / "run", plan_text=plan.to_yaml(), config=plans.CONFIG)
        (self.run.path / "submission").mkdir()
        monkeypatch.setattr(Planner, "poll", lambda *_: None)  # it starts processes
        state = first_state(plan, POOLS, JOB, {"dead_s": 0.3}, {"ib1"} if is_takeover else ())
        state.start, state.is_takeover = 1 + is_takeover, is_takeover
        self.coordinator = Coordinator(self.run, state, Planner(self.run, "7"), plan)
        for name in ("deliver_challenge", "answer_challenge"):
            monkeypatch.setattr(f"holmes_hpc.submission.elastic.coordinator.{name}", lambda *_: None)
        monkeypatch.setenv("HOLMES_LEADER_JOB_ID", "7")
        self.agents, self.code = dict[str, Connection](), dict[str, str]()
        for node in NODES:
            self.agents[node], end = Pipe()
            threading.Thread(target=self.coordinator.serve, args=(end, b""), daemon=True).start()

    def lose(self, *nodes: str) -> None:
        """End the agents of `nodes`."""
        for node in nodes:
            self.agents[node].close()
        assert wait_until(lambda: self.coordinator.state.gone.issuperset(nodes), 10, 0.01)

    def beat(self, running: int = 0, without: tuple[str, ...] = (), codes: dict[int, int] | None = None) -> dict:
        """Exchange one beat per agent. `running`: the start whose ranks run, 0 if none do. Return the orders."""
        orders = {}
        for node in (n for n in NODES if n not in without):
            has_ranks = bool(self.coordinator.state.placement.ranks_on(node))
            values = (self.coordinator.state.start, int(running and has_ranks), codes or {})
            send(self.agents[node], Beat(node, *values, code=self.code.get(node, code_version())))
            orders[node] = receive(self.agents[node], Order)
        return orders


def test_a_silent_node_is_replaced_and_the_attempt_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, monkeypatch)
    assert not any(order.is_go for order in site.beat().values())
    assert site.coordinator.step() is None
    hosts = ("ib[1-2]", "roce[1-2]")
    assert site.beat()["roce2"] == Order(1, 3, ranks=1, world_size=4, num_nodes=4, hosts=hosts, is_go=True)
    site.run.start_attempt()
    deadline = time.monotonic() + 10
    while site.beat(1, without=("ib2",))["ib3"].start == 1:
        assert site.coordinator.step() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert not site.beat(without=("ib2",))["ib3"].is_go  # until old ranks have ended
    assert site.coordinator.step() is None
    hosts = ("ib[1,3]", "roce[1-2]")
    order = Order(2, first_rank=1, ranks=1, world_size=4, num_nodes=4, hosts=hosts, is_go=True)
    assert site.beat(without=("ib2",))["ib3"] == order
    (attempt,) = site.run.read_run()["attempts"]
    assert (attempt["ended"], attempt["lost"]) == ("node lost", ["ib2"])
    site.beat(without=("ib2",), codes=dict.fromkeys(range(4), 0))
    assert site.coordinator.step() == 0 and site.beat(without=("ib2",))["ib1"].is_end


def test_a_node_with_other_code_is_named_and_its_spare_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path, monkeypatch)
    site.code["ib2"] = "1.1.0 def"
    orders = site.beat()
    assert orders["ib2"].is_end and not orders["ib1"].is_end
    reason = "it runs holmes_hpc 1.1.0 def, and the coordinator 1.2.0 abc"
    assert f"node ib2 is not used: {reason}; install the same code on all nodes" in capfd.readouterr().out
    assert site.coordinator.step() is None
    assert f"lost node ib2 ({reason}): spare ib3 takes over" in capfd.readouterr().out
    assert site.beat(without=("ib2",))["ib3"].ranks == 1


def test_without_a_spare_the_ranks_start_with_a_smaller_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, gone = Site(tmp_path, monkeypatch), ("roce2", "roce3")
    site.beat()
    assert site.coordinator.step() is None
    job_plan, smaller = site.run.plan_path.read_text(), plans.plan("roce-a", "ib-a", nodes=1)
    site.run.start_attempt()
    site.lose(*gone)
    site.coordinator.state.plans[(3, 1)] = smaller
    assert site.coordinator.step() is None and site.run.plan_path.read_text() == job_plan  # which old ranks may read
    site.beat(without=gone)
    assert site.coordinator.step() is None
    assert Plan.read(site.run.plan_path) == smaller and (site.run.path / "plan-1.yaml").read_text() == job_plan
    assert site.run.read_run()["plan_id"] == smaller.id
    order = Order(2, first_rank=1, ranks=1, world_size=2, num_nodes=2, hosts=("roce1", "ib1"), is_go=True)
    assert site.beat(without=gone)["ib1"] == order and not site.beat(without=gone)["ib2"].ranks
    assert Planner(site.run, "7").job_plan.to_yaml() == job_plan  # for the same job after a requeue


def test_if_the_run_cannot_continue_the_lost_node_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, monkeypatch)
    site.beat()
    site.coordinator.step()
    site.lose("roce2", "roce3")
    site.coordinator.state.plans[(3, 1)] = None
    code = site.coordinator.step()
    (record,) = [e for e in site.run.read_exits() if e["state"] == "failed"]
    assert (code, record["rank"], record["host"]) == (1, 3, "roce2")
    assert record["error"].endswith("no spare node of its component is left, and there is no plan for the other nodes")


def test_a_crash_without_new_steps_does_not_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, monkeypatch)

    def kill_rank(code: int | None) -> int:
        """Kill rank 1. Return the number of starts after the coordinator's decision."""
        site.beat()
        assert site.coordinator.step() is None
        site.beat(1)
        site.beat(codes={1: -9, 0: 1, 2: 1, 3: 1})
        assert site.coordinator.step() == code
        if code is None:
            time.sleep(SETTLE_S + 0.1)
            assert site.coordinator.step() is None
        return site.coordinator.state.start

    site.coordinator.state.dead_s = 30
    site.run.start_attempt()
    site.run.append_metrics({"step": 1, "attempt": 1})
    assert kill_rank(None) == 2
    assert kill_rank(9) == 2  # before it recorded an attempt
    assert site.run.read_run()["attempts"][0]["ended"] == "rank killed"


@pytest.mark.integration
def test_plans_are_made_in_a_process_of_low_priority(tmp_path: Path) -> None:
    plan = plans.plan("ib-a", "roce-a")
    config = load(["plan.nodes={ib-a: 2, roce-a: 2}", "train.pace_layer_ms=10"]).to_dict()
    run = RunDirectory.create(tmp_path / "run", plan_text=plan.to_yaml(), config=config)
    (run.path / "submission").mkdir()
    planner, made = Planner(run, "7"), Plans()
    for sizes in ((1, 2), (0, 0)):
        assert wait_until(lambda sizes=sizes: planner.poll([sizes], made) or sizes in made, 60, 0.05)
    smaller = made[(1, 2)]
    assert isinstance(smaller, Plan) and {part.pool: part.nodes for part in smaller.components}["ib-a"] == 1
    assert made[(0, 0)] is None


@pytest.mark.integration
def test_an_agent_forks_reports_and_ends_ranks_on_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "ib1")
    become: Callable[..., None] = lambda _, order, index, __: os._exit(5) if index else time.sleep(60)  # noqa: E731
    monkeypatch.setattr(Agent, "_become_rank", become)
    agent, (mine, its) = Agent(RunDirectory(tmp_path), dead_s=1.0), Pipe()
    beats: list[Beat] = []

    def coordinate() -> None:
        first = Order(1, first_rank=4, ranks=2, world_size=6, num_nodes=3, is_go=True)
        for order in (first, first, first, Order(2), Order(2, is_end=True)):
            beats.append(receive(mine, Beat))
            send(mine, order)

    thread = threading.Thread(target=coordinate)
    thread.start()
    assert not agent.obey(its)
    thread.join()
    assert [(beat.start, beat.running) for beat in beats] == [(0, 0), (1, 1), (1, 1), (1, 1), (2, 0)]
    assert beats[2].codes == {5: 5}


def test_an_agent_gives_up_a_silent_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "ib1")
    _, its = ends = Pipe()
    with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        Agent(RunDirectory(tmp_path), dead_s=0.2).obey(its)
    for end in ends:
        end.close()


def test_one_of_two_claims_succeeds_and_knows_the_lost_nodes(tmp_path: Path) -> None:
    assert newest_claim(tmp_path) == 0
    assert claim(tmp_path, 1, ()) and claim(tmp_path, 2, ["ib2"])
    assert not claim(tmp_path, 2, ())
    assert newest_claim(tmp_path) == newest_claim(tmp_path, 2) == 2
    assert claim(tmp_path, 3, {"ib1"}) and lost_before(tmp_path, 3) == {"ib1", "ib2"} and not lost_before(tmp_path, 1)


def test_one_agent_takes_over_and_all_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, other, started = Published(("", 0), "a", "ib1"), Published(("", 0), "b", "ib2"), list[int]()

    def start_coordinator(run: RunDirectory, start: int) -> int:
        started.append(start)
        published_path(tmp_path).write_bytes(json.encode(other))
        published_path(tmp_path).chmod(0o600)
        return 0

    monkeypatch.setattr("holmes_hpc.submission.elastic.agent.start_coordinator", start_coordinator)
    assert claim(tmp_path, 1, ["ib3"])
    for agent in (Agent(RunDirectory(tmp_path), dead_s=1.0) for _ in range(2)):
        agent._start = 1
        assert agent.next_coordinator(tmp_path, lost) == other
    assert started == [2] and lost_before(tmp_path, 2) == {"ib1", "ib3"}


def test_an_old_claim_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, started = Published(("", 0), "a", "ib1"), list[int]()

    def start_coordinator(run: RunDirectory, start: int) -> int:
        started.append(start)
        run.result_path.write_text(json.encode({"state": "completed", "writer": "batch", "attempt": 1}).decode())
        return 0

    monkeypatch.setattr(agent_program, "start_coordinator", start_coordinator)
    agent = Agent(RunDirectory.create(tmp_path / "run"), dead_s=1.0)
    assert claim(tmp_path, 1, ())
    long_ago = time.time() - 60
    os.utime(next(tmp_path.glob("*start-1")), (long_ago, long_ago))
    with pytest.raises(SystemExit) as ended:  # once the run's end is recorded, the agent ends too
        agent.next_coordinator(tmp_path, lost)
    assert started == [2] and ended.value.code == 0


def test_after_a_takeover_the_ranks_start_on_the_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, monkeypatch, is_takeover=True)
    site.coordinator.state.dead_s = 30
    site.beat(without=("ib1", "ib2"))
    assert site.coordinator.step() is None and not site.coordinator.state.is_started  # ib2 may still join
    site.beat(without=("ib1",))
    assert site.coordinator.step() is None and site.coordinator.state.is_started
    assert site.coordinator.state.placement.nodes == ["ib2", "ib3", "roce1", "roce2"]
    assert site.coordinator.claimed == 2 and not site.coordinator.is_superseded()
    assert claim(site.run.path / "submission", 3, ())
    assert site.coordinator.is_superseded() and not site.coordinator.claim(4)


def test_a_waiting_agent_whose_job_is_preempted_asks_for_its_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    for member, is_over, code in (("0", False, REQUEUE), ("0", True, 1), (None, False, 1)):
        monkeypatch.setenv("HOLMES_MEMBER", member) if member else monkeypatch.delenv("HOLMES_MEMBER")
        agent = Agent(RunDirectory(tmp_path), dead_s=1.0)
        agent.is_over = is_over
        agent._forward(signal.SIGTERM, None)
        assert codes.pop() == code


@pytest.mark.parametrize(
    ("code", "is_ended", "requeued"), [(REQUEUE, False, ["8"]), (REQUEUE, True, []), (0, False, [])]
)
def test_a_job_is_requeued_for_its_agents_unless_slurm_ends_it(
    code: int, is_ended: bool, requeued: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers, jobs = dict[int, Callable[..., None]](), list[str]()

    def waitpid(pid: int, _: int) -> tuple[int, int]:
        if is_ended:
            handlers[signal.SIGTERM](signal.SIGTERM, None)
        return pid, code << 8

    def requeue(job_id: str) -> tuple[str | None, bool]:
        jobs.append(job_id)
        return "disabled", False

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "waitpid", waitpid)
    monkeypatch.setattr(coordinator_program, "requeue", requeue)
    monkeypatch.setattr(coordinator_program, "SIGNAL_S", 0)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert coordinator_program.wait_for(42) == code and jobs == requeued
    assert ("job 8 is not requeued: disabled" in capfd.readouterr().out) == bool(requeued)
    assert coordinator_program.wait_for(42, is_stopping=True) == code and jobs == requeued
    assert coordinator_program.wait_for(0, is_ended, code) == code and jobs == 2 * requeued  # srun has ended before


def test_an_agent_that_cannot_reach_the_coordinator_ends_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"run_dir": str(tmp_path), "elastic": {"dead_s": 1.0}}
    published = Published(("127.0.0.1", 1), "secret", "ib1")  # nobody listens there
    for name, result in {"prepare": tmp_path, "preload": config, "is_spare": False}.items():
        monkeypatch.setattr(agent_program, name, lambda *_, result=result: result)
    for name, result in {"read": published, "is_kept_up": True}.items():
        monkeypatch.setattr(Published, name, lambda *_, result=result: result)
    monkeypatch.setattr(agent_program, "JOIN_S", 0)
    monkeypatch.setenv("SLURMD_NODENAME", "roce1")
    problem = "cannot reach the coordinator on node ib1 at 127.0.0.1: give all pools a common Ethernet network"
    with pytest.raises(SystemExit, match=problem):
        agent_program.main(tmp_path)


@pytest.mark.parametrize(("node", "spares", "expected"), [("ib3", 1, True), ("ib2", 1, False), ("ib3", 0, False)])
def test_spares_are_the_last_nodes_of_each_component(
    node: str, spares: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory.create(tmp_path / "run", config={"elastic": {"spares": spares}})
    monkeypatch.setattr(agent_program, "ranks_of_job", lambda _: JOB)
    monkeypatch.setenv("SLURMD_NODENAME", node)
    assert agent_program.is_spare(tmp_path / "run") == expected


def test_only_the_loading_thread_of_a_spare_has_a_low_priority(tmp_path: Path) -> None:
    path = Path("/proc/self/autogroup")
    has_autogroups = os.access(path, os.W_OK) and path.read_text() != ""  # empty: a session without one

    def priorities() -> tuple[int, int]:
        time.sleep(0.5 if (tmp_path / "step").exists() else 0.15)  # a user may change it ten times a second
        return os.nice(0), int(path.read_text().split()[-1]) if has_autogroups else 19

    before = os.nice(0)
    assert agent_program.at_low_priority(priorities, tmp_path / "step") == (19, 19)
    (tmp_path / "step").touch()
    assert agent_program.at_low_priority(priorities, tmp_path / "step") == (19, 0 if has_autogroups else 19)
    assert os.nice(0) == before and (not has_autogroups or path.read_text().split()[-1] == "0")


def test_an_agent_that_is_cut_off_sees_that_the_coordinator_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "coordinator.json"
    listener, _ = listen("127.0.0.1", path, "ib1")
    listener.close()
    published = Published.read(path)
    assert published is not None
    sleep: Callable[[float], None] = lambda _: None  # noqa: E731
    monkeypatch.setattr("holmes_hpc.submission.elastic.connection.time.sleep", lambda seconds: sleep(seconds))
    assert not published.is_kept_up(path)
    sleep = lambda _: path.touch()  # noqa: E731
    assert published.is_kept_up(path)
    assert not published._replace(secret="another").is_kept_up(path)
    path.unlink()
    sleep = lambda _: None  # noqa: E731
    assert not published.is_kept_up(path)

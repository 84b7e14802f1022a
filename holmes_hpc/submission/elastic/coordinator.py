"""The coordinator of an elastic run: ``python -m holmes_hpc.submission.elastic.coordinator RUN_DIR SRUN``.

By exec, it replaces the subshell of the batch script that started srun, whose process id is SRUN. It decides
(decision.py), and answers each :class:`Beat` of an agent with an :class:`Order`. Its exit status is that of the step.

If its node is lost, the first agent that claims the next start (claims.py) runs this with ``RUN_DIR 0 START``.

If each component is a separate job (members.py), each runs this; all but the one that claims start 1 await their srun.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from msgspec import json

from holmes_hpc.errors import HolmesError
from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.nics import NicType, data_interface
from holmes_hpc.fabric.probe import probe
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import slurm
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.job_queries import requeue
from holmes_hpc.submission.elastic.claims import claim, lost_before, newest_claim
from holmes_hpc.submission.elastic.connection import MAX_BYTES, Order, code_version, listen, published_path
from holmes_hpc.submission.elastic.decision import REQUEUE, Beat, Placement, State, place
from holmes_hpc.submission.elastic.members import MemberState
from holmes_hpc.submission.elastic.planner import Planner
from holmes_hpc.submission.executor.environment import LEADER, ComponentRanks, own_member, ranks_of_job
from holmes_hpc.submission.lifecycle import attempts, batch_end
from holmes_hpc.submission.lifecycle.requeue_decision import reason_to_stop
from holmes_hpc.waiting import wait_until

INTERVAL_S = 0.1  # between decisions
END_S = 3.0  # longest wait for the end of the agents, and of srun
SIGNAL_S = 1.0  # longest time between Slurm's signals to a job's agents and to its batch script
COUNT_S = 2.0  # between two reads of the last step's number


class Coordinator:
    """The coordinator of `run`, with its `state`. `plan`: the plan of the first start; `claimed`: the last start that
    it has claimed; `is_aside`: whether it leaves the agents to another coordinator."""

    def __init__(self, run: RunDirectory, state: State, planner: Planner, plan: Plan) -> None:
        self._run, self.state, self._is_over, self._lock = run, state, False, threading.Lock()
        self._planner, self._plan, self._folder = planner, plan, run.path / "submission"
        self.claimed, self.is_aside = state.start - (not state.is_takeover), False
        self._reasons = dict[str, str]()  # lost node -> why
        self._ended, self._lost = "", sorted(state.gone)  # why the ranks' last start ended ("" after a takeover); nodes
        self.is_handover, self._counted_at = False, 0.0

    def serve(self, connection: Connection, secret: bytes) -> None:
        """Answer the beats of one agent until the agent ends or its node is lost."""
        node = ""
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError), connection:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
            while node not in self.state.gone:
                beat = json.decode(connection.recv_bytes(MAX_BYTES), type=Beat)
                with self._lock:
                    if beat.code != code_version():
                        connection.send_bytes(json.encode(self._refuse(beat)))
                        return
                    if not node and not self.state.admit(beat, time.monotonic()):
                        return  # the agent tries again
                    node = beat.node
                    self.state.heard_at[node], self.state.beats[node] = time.monotonic(), beat
                    order = self._order(node)
                connection.send_bytes(json.encode(order))
        if node:
            self.state.gone.add(node)
            self.state.heard_at[node] = -math.inf

    def _refuse(self, beat: Beat) -> Order:
        """Give up a node whose agent runs other code. Return the order that ends the agent."""
        reason = f"it runs holmes_hpc {beat.code}, and the coordinator {code_version()}"
        if self._reasons.setdefault(beat.node, reason) is reason:
            log_batch_line(f"node {beat.node} is not used: {reason}; install the same code on all nodes")
        self.state.gone.add(beat.node)
        return Order(self.state.start, is_end=True)

    def _order(self, node: str) -> Order:
        state, placement = self.state, self.state.placement
        ranks, hosts = placement.ranks_on(node), tuple(compress(part.nodes) for part in placement.planned)
        size = placement.world_size
        values = (state.start, ranks.start, len(ranks), size, len(placement.nodes), hosts)
        return Order(*values, is_go=state.is_started, is_stop=state.is_changing, is_end=self._is_over)

    def step(self) -> int | None:
        """Make and carry out one decision. Return the exit status if the run is over, else None."""
        state, now = self.state, time.monotonic()
        with self._lock:
            is_first_failure = state.failed_at is None and any(state.codes().values())
        if is_first_failure:
            attempt, state.failed_at = attempts.attempt_id(os.environ), now
            is_recorded = not attempts.has_recorded_end(self._run, attempt)  # else the last is an earlier start's
            state.has_new_steps = is_recorded and attempts.has_new_steps(self._run, attempt)
            is_last = state.is_one_job or reason_to_stop(self._run, "failed", attempt) is not None
            state.may_restart = state.has_new_steps and not is_last
        with self._lock:
            decision = state.decide(now)
            for node in decision.lost:
                reason = "its agent ended" if node in state.gone else f"silent for {now - state.heard_at[node]:.1f} s"
                self._reasons.setdefault(node, reason)
            lost = "lost " + ", ".join(f"node {node} ({self._reasons[node]})" for node in decision.lost)
            state.gone.update(decision.lost)
            self._is_over, self.is_handover = decision.code is not None, decision.is_handover
            if decision.is_stop:
                state.is_changing = True
                log_batch_line(f"{decision.reason}: the ranks save and end")
            if decision.placement is not None:
                if state.is_started or not self._ended:  # otherwise they ended before
                    self._ended = decision.ended
                self._lost = [*([] if state.is_started else self._lost), *decision.lost]
                self._change(lost if decision.lost else decision.reason, decision.placement, decision.plan)
            missing_plans = state.missing_plans(now)
        if decision.is_go:  # without the lock, so that agents get answers meanwhile
            self._go()
        elif decision.code and decision.reason:
            log_batch_line(f"{lost}: {decision.reason}")  # and the batch script treats it as the failure of a rank
            for node in decision.lost:
                for rank in state.placement.ranks_on(node):
                    self._run.write_exit(rank, "failed", f"{lost}: {decision.reason}", node)
        self._planner.poll(missing_plans, state.plans)
        if now > self._counted_at + COUNT_S:
            self._counted_at, state.last_step = now, int(attempts.last_metrics(self._run).get("step", 0))
        return decision.code

    def is_superseded(self) -> bool:
        """Return whether another coordinator has claimed a later start, or may do so."""
        return self.state.is_isolated(time.monotonic()) or newest_claim(self._folder, self.claimed) > self.claimed

    def claim(self, start: int) -> bool:
        """Claim the `start` of the ranks (or, by the next number, the end of the run) and all earlier ones. Return
        False if another coordinator has claimed one of them."""
        while start > self.claimed and claim(self._folder, self.claimed + 1, self.state.gone):
            self.claimed += 1
        return self.claimed >= start

    def _change(self, cause: str, placement: Placement, plan: Plan | None) -> None:
        """End the ranks. Their next start uses `placement` and, unless it is None, the new `plan`."""
        state, self._plan = self.state, plan or self._plan
        new_nodes = compress(sorted(set(placement.nodes) - set(state.placement.nodes)))
        nodes = ", ".join(compress(part.nodes) for part in placement.planned)
        change = f"spare {new_nodes} takes over" if new_nodes else "the ranks start again"
        change = change if placement.nodes else "the other nodes wait for more"
        log_batch_line(f"{cause}: " + (f"plan {plan.id} on {nodes}" if plan else change))
        state.placement, state.start, state.failed_at, state.is_started = placement, state.start + 1, None, False
        state.plan, state.is_changing = self._plan, False

    def _go(self) -> None:
        """Record the end of the ranks' last start, write the plan of the next one, and let the ranks start."""
        if not self.claim(self.state.start):
            return
        if self.state.start > 1:
            attempt, ended = attempts.attempt_id(os.environ), self._ended or "node lost"
            attempts.record_attempt_end(self._run, attempt, ended, self._lost)
        if self._plan.id != Plan.read(self._run.plan_path).id:
            self._run.reopen(self._plan.to_yaml())
            self._run.update_run(plan_id=self._plan.id, components=self._plan.layout)
        log_batch_line(f"start {self.state.start} of the ranks on {compress(self.state.placement.nodes)}")
        self.state.is_started = True


def first_state(
    plan: Plan,
    pools: Sequence[str],
    job: Sequence[ComponentRanks],
    settings: Mapping[str, Any],
    lost: Collection[str] = (),
) -> State:
    """Return the state with `plan` on the first nodes of each component of the job; its other nodes are spare.
    `pools`: the components' pools; `settings`: configuration group elastic; `lost`: nodes lost before a takeover."""
    placement = place(plan, pools, [sorted(part.nodes, key=lost.__contains__) for part in job])
    heard_at = dict.fromkeys([node for part in job for node in part.nodes], time.monotonic())
    values = (float(settings["dead_s"]), heard_at, tuple(pools), int(settings.get("min_nodes", 1)))
    return State(placement, *values, gone=set(lost))


def coordinate(run: RunDirectory, srun: int, start: int) -> int:
    """Serve the agents until the run is over. Return the step's exit status.
    `srun`: the process id of srun; 0 after a takeover, which claimed `start`."""
    folder, node, job = run.path / "submission", os.environ["SLURMD_NODENAME"], ranks_of_job(os.environ)
    member = own_member()
    if srun and member is not None and not claim(folder, 1, ()):  # another job coordinates
        if (run.read_result() or {}).get("writer") != "batch":
            return wait_for(srun)
        os.kill(srun, signal.SIGKILL)  # the run ended before this job was requeued
        return 0
    planner, path = Planner(run, os.environ[LEADER]), published_path(folder)
    plan = planner.job_plan if srun else Plan.read(run.plan_path)  # after a requeue, all nodes are back
    pools = [part.pool for part in planner.job_plan.components]
    if member is None:
        state = first_state(plan, pools, job, run.config["elastic"], () if srun else lost_before(folder, start))
        state.start = start
    else:
        state = MemberState.of(planner.job_plan, run.config, 0 if srun else start, member)
    state.is_takeover = not srun
    if state.is_takeover:
        lost = f"; lost nodes: {compress(sorted(state.gone))}" if state.gone else ""
        log_batch_line(f"lost the coordinator: node {node} takes its place{lost}")
    signal.signal(signal.SIGTERM, lambda *_: setattr(state, "is_stopping", True))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm also sends it to this job's agents and ranks
    coordinator = Coordinator(run, state, planner, plan)
    coordinator.claimed = max(coordinator.claimed, int(member is not None))
    pool = pools[member] if member is not None else next(p for p, j in zip(pools, job, strict=True) if node in j.nodes)
    nics = nccl.restrict_nics(probe(), planner.job_plan.site.pool(pool).nic_names(node), os.environ, node)
    listener, secret = listen(str(data_interface(nics, NicType.ETHERNET, node=node).address), path, node)

    def accept() -> None:
        while not coordinator.is_aside:
            with contextlib.suppress(OSError):
                threading.Thread(target=coordinator.serve, args=(listener.accept(), secret), daemon=True).start()

    threading.Thread(target=accept, name="agents", daemon=True).start()
    code, step_code = None, 0
    while not coordinator.is_superseded() and (code := coordinator.step()) is None and not coordinator.is_handover:
        path.touch()  # tells unconnected agents that the coordinator lives
        time.sleep(INTERVAL_S)
        ended, status = os.waitpid(srun, os.WNOHANG) if srun else (0, 0)
        if ended and member is None:
            return os.waitstatus_to_exitcode(status) or 1
        if ended:  # the nodes of other jobs go on
            srun, step_code = 0, os.waitstatus_to_exitcode(status)
    if coordinator.is_handover:
        log_batch_line("this job ends: a node of another one takes the coordinator's place")
        leave_agents(coordinator, listener)
        return wait_for(srun, state.is_stopping, step_code)
    if code is None or not coordinator.claim(state.start + 1):  # the claim: no agent takes over while the job ends
        stand_aside(coordinator, listener)
        return 1 if member is None else wait_for(srun, state.is_stopping, step_code)
    path.unlink(missing_ok=True)
    if not srun or member is not None:
        code = end_job(run, code, state)
    if srun and not wait_until(lambda: os.waitpid(srun, os.WNOHANG)[0] == srun, END_S, INTERVAL_S):
        os.kill(srun, signal.SIGKILL)  # it waits for lost nodes until Slurm marks them down
    return code


def wait_for(srun: int, is_stopping: bool = False, code: int = 0) -> int:
    """Wait for the end of the step, and return its exit status, or `code` if it has ended (`srun` is 0). Requeue the
    job if its agents ask for that, unless Slurm ends the job. `is_stopping`: whether Slurm has begun to end it."""
    signals = [signal.SIGTERM] * is_stopping
    signal.signal(signal.SIGTERM, lambda *_: signals.append(signal.SIGTERM))
    code = os.waitstatus_to_exitcode(os.waitpid(srun, 0)[1]) if srun else code
    if code == REQUEUE and not wait_until(lambda: bool(signals), SIGNAL_S, INTERVAL_S):  # scancel signals both
        job_id = os.environ["SLURM_JOB_ID"]
        log_batch_line(f"job {job_id} is preempted, or near its time limit: requeue it")
        if refusal := requeue(job_id)[0]:
            log_batch_line(f"job {job_id} is not requeued: {refusal}")
    return code


def leave_agents(coordinator: Coordinator, listener: Listener) -> None:
    """End all connections, so that the agents look for another coordinator."""
    coordinator.is_aside = True
    listener.close()
    coordinator.state.gone.update(coordinator.state.heard_at)


def stand_aside(coordinator: Coordinator, listener: Listener) -> None:
    """Leave the agents to another coordinator. If all nodes are one job, return only when Slurm ends it, because the
    end of the batch script would end the job."""
    log_batch_line(f"another coordinator claims start {coordinator.claimed + 1}: this one stands aside")
    leave_agents(coordinator, listener)
    while coordinator.state.is_one_job and not coordinator.state.is_stopping:
        time.sleep(INTERVAL_S)


def end_job(run: RunDirectory, code: int, state: State) -> int:
    """Record the run's end as the batch script does, and cancel the jobs that would go on. Return the exit code."""
    agents = [node for node in state.beats if node not in state.gone]
    wait_until(lambda: state.gone.issuperset(agents), END_S, INTERVAL_S)
    os.environ["SLURM_JOB_ID"] = os.environ[LEADER] if state.is_one_job else ""
    code = batch_end.main([str(run.path), str(code), "TERM" if state.is_stopping else ""])
    if not state.is_one_job:
        slurm("scancel", "--state=PENDING", *map(str, run.read_run()["slurm"]["members"]), timeout_s=30)
    elif run.read_result() is not None:  # else it was requeued
        slurm("scancel", os.environ[LEADER], timeout_s=30)
    return code


def main() -> int:
    run, srun, *start = sys.argv[1:]
    try:
        return coordinate(RunDirectory(Path(run)), int(srun), int(start[0]) if start else 1)
    except (HolmesError, OSError) as e:
        sys.exit(f"holmes: the coordinator failed: {e}")


if __name__ == "__main__":
    sys.exit(main())

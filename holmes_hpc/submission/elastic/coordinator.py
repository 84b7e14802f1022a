"""The coordinator of an elastic run: ``python -m holmes_hpc.submission.elastic.coordinator RUN_DIR SRUN``.

It takes the place of a subshell of the batch script whose child is srun, with the process id SRUN. It decides
(decision.py), and answers each beat of an agent with an order. Its exit status is that of the step.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from msgspec import json

from holmes_hpc.errors import HolmesError
from holmes_hpc.fabric import nccl
from holmes_hpc.fabric.nics import NicType, data_interface
from holmes_hpc.fabric.probe import probe
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.submission.elastic.connection import MAX_BYTES, Order, listen, published_path
from holmes_hpc.submission.elastic.decision import Beat, Placement, State, decide
from holmes_hpc.submission.executor.environment import ComponentRanks, ranks_of_job
from holmes_hpc.submission.lifecycle.attempts import attempt_id, record_attempt_end
from holmes_hpc.submission.lifecycle.failed_rank import component_ranks
from holmes_hpc.waiting import wait_until

INTERVAL_S = 0.1  # between decisions
END_S = 3.0  # limit of the agents' and srun's end


def first_state(plan: Plan, job: Sequence[ComponentRanks], dead_s: float) -> State:
    """Return the state with `plan` on the first nodes of each component of the job; the others are spare."""
    pairs = list(zip(job, plan.components, strict=True))
    used = component_ranks(plan, [",".join(part.nodes[: planned.nodes]) for part, planned in pairs])
    placement = Placement(tuple(used), tuple(part.nodes[planned.nodes :] for part, planned in pairs))
    return State(placement, dead_s, {node: time.monotonic() for part in job for node in part.nodes})


class Coordinator:
    """The coordinator of `run`, and its `state`."""

    def __init__(self, run: RunDirectory, state: State) -> None:
        self._run, self.state, self._is_over, self._lock = run, state, False, threading.Lock()

    def serve(self, connection: Connection, secret: bytes) -> None:
        """Answer the beats of one agent until it ends or its node is lost."""
        node = ""
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError), connection:
            deliver_challenge(connection, secret)
            answer_challenge(connection, secret)
            while node not in self.state.left:
                beat = json.decode(connection.recv_bytes(MAX_BYTES), type=Beat)
                node = beat.node
                with self._lock:
                    self.state.heard_at[node], self.state.beats[node] = time.monotonic(), beat
                    order = self._order(node)
                connection.send_bytes(json.encode(order))
        self.state.left.update([node] if node else [])

    def _order(self, node: str) -> Order:
        state, placement = self.state, self.state.placement
        ranks, nodes = placement.ranks_on(node), placement.nodes
        world_size = sum(len(placement.ranks_on(n)) for n in nodes)
        return Order(state.start, ranks.start, len(ranks), world_size, len(nodes), state.is_started, self._is_over)

    def step(self) -> int | None:
        """Decide, and act. Return the exit status if the run is over, else None."""
        with self._lock:
            state, now = self.state, time.monotonic()
            if state.failed_at is None and any(state.codes().values()):
                state.failed_at = now
            decision = decide(state, now)
            reasons = {n: f"silent for {now - state.heard_at[n]:.1f} s" for n in decision.lost}
            reasons |= dict.fromkeys(state.left, "its agent ended")
            lost = ", ".join(f"node {n} ({reasons[n]})" for n in decision.lost)
            state.left.update(decision.lost)
            self._is_over = decision.code is not None
            if decision.placement is not None:
                new_nodes = set(decision.placement.nodes) - set(state.placement.nodes)
                log_batch_line(f"lost {lost}: spare {compress(sorted(new_nodes))} takes over")
                state.placement, state.start, state.failed_at = decision.placement, state.start + 1, None
                state.is_started = False
            elif decision.is_go:
                if state.start > 1:
                    record_attempt_end(self._run, attempt_id(os.environ), "node lost")
                log_batch_line(f"start {state.start} of the ranks on {compress(state.placement.nodes)}")
                state.is_started = True
            elif decision.lost and not state.is_stopping:
                error = f"lost {lost}, and no spare node of its component is left"
                log_batch_line(error)  # and the batch script treats it as the failure of a rank
                for node in decision.lost:
                    for rank in state.placement.ranks_on(node):
                        self._run.write_exit(rank, "failed", error, node)
            return decision.code


def coordinate(run: RunDirectory, srun: int) -> int:
    """Serve the agents until the run is over. Return the step's exit status. `srun`: its process id."""
    plan, node = Plan.read(run.plan_path), os.environ["SLURMD_NODENAME"]
    state = first_state(plan, ranks_of_job(os.environ), float(run.config["elastic"]["dead_s"]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(state, "is_stopping", True))
    coordinator, path = Coordinator(run, state), published_path(run.path / "submission")
    names = plan.site.pool(plan.components[0].pool).nic_names(node)
    nic = data_interface(nccl.restrict_nics(probe(), names, os.environ, node), NicType.ETHERNET, node=node)
    listener, secret = listen(str(nic.address), path)

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError):
                threading.Thread(target=coordinator.serve, args=(listener.accept(), secret), daemon=True).start()

    threading.Thread(target=accept, name="agents", daemon=True).start()
    while (code := coordinator.step()) is None:
        time.sleep(INTERVAL_S)
        ended, status = os.waitpid(srun, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) or 1
    path.unlink(missing_ok=True)
    if not wait_until(lambda: os.waitpid(srun, os.WNOHANG)[0] == srun, END_S, INTERVAL_S):
        os.kill(srun, signal.SIGKILL)  # it waits for lost nodes until Slurm marks them down
    return code


def main() -> int:
    try:
        return coordinate(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]))
    except (HolmesError, OSError) as e:
        sys.exit(f"holmes: the coordinator failed: {e}")


if __name__ == "__main__":
    sys.exit(main())

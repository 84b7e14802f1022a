"""The agent of a node: the program of the only task on each node of an elastic run. It forks the node's ranks.

It loads torch and Megatron-Core once, but never uses a GPU, so that its forks can. It reports to the coordinator and
obeys its orders. On a spare node it waits for an order with ranks. If the coordinator is lost, it ends its ranks, and
the first agent to claim its place starts another.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TypeVar

from msgspec import json
from submitit.core.submission import process_job

from holmes_hpc.interpreter import module_arguments
from holmes_hpc.lifetime import end_with
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_queries import requeue
from holmes_hpc.submission.elastic.claims import EXPIRY_S, claim, claim_age_s, lost_before, newest_claim
from holmes_hpc.submission.elastic.connection import MAX_BYTES, Order, Published, code_version, published_path
from holmes_hpc.submission.elastic.decision import JOIN_S, REQUEUE, Beat
from holmes_hpc.submission.executor.environment import LEADER, own_member, ranks_of_job
from holmes_hpc.submission.executor.task import prepare
from holmes_hpc.submission.local_ranks import preload, redirect_output
from holmes_hpc.waiting import attempts

T = TypeVar("T")
BEAT_S = 0.25
SLOTS_PER_RANK = 4  # training/checkpoint/memory_copies.py
MAX_TAKEOVERS = 3  # then the job is requeued
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # which ranks handle


class Agent:
    """The agent of this node, whose ranks log into `run`. It gives up a coordinator that is silent for `dead_s`."""

    def __init__(self, run: RunDirectory, dead_s: float) -> None:
        self._run, self._dead_s, self._start, self._is_forked = run, dead_s, 0, False
        self._is_stopped = False  # the ranks are told to save and end
        self._ranks, self._codes = dict[int, int](), dict[int, int]()  # process id -> rank; rank -> exit code
        self._slots = list[str]()  # memory for copies of the ranks' state, which outlives the ranks
        self.coordinator = 0  # process id of the one that this agent has started
        self.member = own_member()
        self.is_leaving, self.is_known = False, False  # its job is being ended; a coordinator has answered it
        self.is_at_limit, self.has_trained, self.is_over = False, False, False  # the job; its ranks; the run
        self.tries_since = 0.0  # to connect to the coordinator
        for number in SIGNALS:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on to the ranks, which stop after a step. Without ranks, end. If this job ends alone, the
        coordinator stops all ranks instead."""
        if not self._ranks and not self.coordinator and number == signal.SIGTERM:
            os._exit(1 if self.member is None or self.is_over else REQUEUE)
        if self.member is not None:
            self.is_leaving, self.is_at_limit = True, number == signal.SIGUSR2
            return
        self._signal_ranks(number)

    def _signal_ranks(self, number: int) -> None:
        for pid in self._ranks:
            os.kill(pid, number)

    def obey(self, connection: Connection) -> bool:
        """Report and obey until the coordinator ends the run. Return True in a forked rank.
        Raise OSError or EOFError if the coordinator is silent, or ends the connection."""
        self.tries_since = time.monotonic()  # if it has to connect again
        while True:
            self._reap(os.WNOHANG)
            values = (self._start, len(self._ranks), self._codes, self.member, self.is_leaving, code_version())
            beat = Beat(os.environ["SLURMD_NODENAME"], *values)
            connection.send_bytes(json.encode(beat))
            if not connection.poll(self._dead_s):
                raise TimeoutError(f"silent for {self._dead_s:g} s")
            order = json.decode(connection.recv_bytes(MAX_BYTES), type=Order)
            self.is_known, self.is_over = True, order.is_end
            if order.is_end or order.start != self._start:
                self.end_ranks()
                self._start, self._is_forked, self._is_stopped, self._codes = order.start, False, False, {}
            if order.is_end or (self.is_leaving and not order.ranks):
                return False
            if order.is_stop and not self._is_stopped:
                self._is_stopped = True
                self._signal_ranks(signal.SIGTERM)
            if order.is_go and not self._is_forked:
                self._is_forked, agent = True, os.getpid()
                self.has_trained |= order.ranks > 0
                while len(self._slots) < SLOTS_PER_RANK * order.ranks:
                    self._slots.append(f"/proc/self/fd/{os.memfd_create('holmes_copy')}")
                for index in range(order.ranks):
                    if not (pid := os.fork()):
                        connection.close()
                        self._become_rank(order, index, agent)
                        return True
                    self._ranks[pid] = order.first_rank + index
            time.sleep(BEAT_S)

    def _reap(self, option: int) -> None:
        for pid in [*self._ranks]:
            ended, status = os.waitpid(pid, option)
            if ended:
                self._codes[self._ranks.pop(pid)] = os.waitstatus_to_exitcode(status)

    def end_ranks(self) -> None:
        self._signal_ranks(signal.SIGKILL)
        self._reap(0)

    def _become_rank(self, order: Order, index: int, agent: int) -> None:
        """Turn this fork into the task of a rank, as srun would start it. It ends with the process `agent`."""
        end_with(agent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        rank, cpus = order.first_rank + index, int(os.environ.get("SLURM_CPUS_PER_TASK") or order.ranks)
        values = {"PROCID": rank, "NTASKS": order.world_size, "LOCALID": index, "NNODES": order.num_nodes}
        values["HET_SIZE"] = len(order.hosts)
        values |= {"CPUS_PER_TASK": cpus // order.ranks} if "SLURM_CPUS_PER_TASK" in os.environ else {}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in values.items()})
        os.environ.update({f"SLURM_JOB_NODELIST_HET_GROUP_{i}": hosts for i, hosts in enumerate(order.hosts)})
        os.environ["HOLMES_START"] = str(order.start)
        first, others = SLOTS_PER_RANK * index, SLOTS_PER_RANK * order.ranks  # the first rank also reads the others
        slots = self._slots[first : first + SLOTS_PER_RANK] + (self._slots[others:] if index == 0 else [])
        os.environ["HOLMES_COPY_SLOTS"] = ":".join(slots)
        redirect_output(self._run.log_path(rank), self._run.log_path(rank))

    def next_coordinator(self, folder: Path, lost: Published) -> Published | None:
        """Return the coordinator that replaces the `lost` one, which this agent may start. None after MAX_TAKEOVERS."""
        start, seen_at = self._start, -EXPIRY_S
        last_start = (newest_claim(folder, start) if self.member is not None else start) + MAX_TAKEOVERS
        while (published := Published.read(published_path(folder))) in (None, lost):
            if (newest := newest_claim(folder, start)) > start:
                start, seen_at = newest, time.monotonic() - claim_age_s(folder, newest)
            if (self._run.read_result() or {}).get("writer") == "batch":
                log_batch_line("the run has ended")
                sys.exit(0)
            if start >= last_start:
                return None
            is_free, nodes = time.monotonic() - seen_at > EXPIRY_S, {*lost_before(folder, start), lost.node}
            if is_free and claim(folder, start + 1, nodes):
                self.coordinator = start_coordinator(self._run, start + 1)
            time.sleep(BEAT_S)
        return published


def start_coordinator(run: RunDirectory, start: int) -> int:
    """Start a coordinator for the claimed `start`. It logs into batch.txt. Return its process id."""
    command = [sys.executable, *module_arguments("holmes_hpc.submission.elastic.coordinator"), str(run.path)]
    pid = os.fork()
    if not pid:
        redirect_output(run.logs / "batch.txt", run.logs / "batch.txt")
        os.execv(command[0], [*command, "0", str(start)])
    return pid


def is_spare(run: Path) -> bool:
    """Return whether this node is a spare of the first start. It loads torch at low priority, as CPUs may be shared."""
    node, spares = os.environ["SLURMD_NODENAME"], RunDirectory(run).config["elastic"]["spares"]
    return any(node in part.nodes[len(part.nodes) - spares :] for part in ranks_of_job(os.environ))


def at_low_priority(load: Callable[[], T], until: Path) -> T:
    """Return ``load()``, run at the lowest priority: of a thread, and, until a file exists, of this session, because
    Linux's autogroups share CPUs among sessions whatever a thread's own priority."""

    def set_priority_of_session(nice: int) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(f"{nice}")

    set_priority_of_session(19)
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(19,)) as thread:
        loading = thread.submit(load)
        while not wait([loading], BEAT_S).done and not until.exists():
            pass
        set_priority_of_session(0)
        return loading.result()


def main(folder: Path, import_path: str = "") -> None:
    code_version()  # before a commit can change it
    load = partial(preload, prepare(folder, import_path))
    first_step = RunDirectory(folder.parent).metrics_path  # from then on, a spare may be needed
    config = at_low_priority(load, first_step) if is_spare(folder.parent) else load()
    path, dead_s = published_path(folder), float(config["elastic"]["dead_s"])
    agent = Agent(RunDirectory(config["run_dir"]), dead_s)
    published = next(filter(None, (Published.read(path) for _ in attempts(JOIN_S, 0.1))), None)
    if published is None:
        sys.exit(f"holmes: no coordinator is published at {path}")
    is_rank, agent.tries_since = False, time.monotonic()
    while published is not None:
        try:
            is_rank = agent.obey(published.connect(dead_s))
            break
        except (OSError, EOFError, AuthenticationError) as e:
            event = "lost" if agent.is_known else "cannot join"
            log_batch_line(f"{event} the coordinator: {str(e) or 'it ended the connection'}")
            agent.end_ranks()
            time.sleep(BEAT_S)  # a coordinator that is killed closes its listener last
        if agent.is_leaving:
            break
        is_here = published.node == os.environ["SLURMD_NODENAME"]  # and has found this node cut off
        may_live = not agent.is_known or published.may_live(dead_s)  # a firewall refuses connections, too
        if (is_here and agent.is_known) or (may_live and published.is_kept_up(path)):
            if agent.is_known:
                sys.exit("holmes: the coordinator has given up this node")
            if time.monotonic() > agent.tries_since + JOIN_S:
                place = f"node {published.node} at {published.address[0]}"
                sys.exit(f"holmes: cannot reach the coordinator on {place}: give all pools a common Ethernet network")
            continue
        published, agent.tries_since = agent.next_coordinator(folder, published), time.monotonic()
    if published is None:
        requeue(os.environ[LEADER] if agent.member is None else os.environ["SLURM_JOB_ID"])
    elif is_rank:
        process_job(folder)
    elif agent.coordinator:
        os.waitpid(agent.coordinator, 0)  # Slurm would kill it with this process
    is_own_end = agent.is_leaving and not (agent.is_over or is_rank)  # of its job, not of the run
    if is_own_end and (agent.has_trained or not agent.is_at_limit):
        os._exit(REQUEUE)  # at once: the end of the interpreter takes seconds on a busy node


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""The faults that `interruptions.py` injects: how each kind strikes, and how a run continues after it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_hpc import testbed as beds
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.status import cancel_run
from holmes_hpc.testbed import testbed as testbed_module

HOLMES = str(Path(sys.executable).with_name("holmes"))
STEPS, RANKS = 40, 4
DISK = "disk"  # a small file system below the root, visible on the testbed's nodes
STOP_S = 30  # a rank is stopped for so long
LIMIT_S = 180
OTHER_USER = "nobody"

Repair = Callable[[], Any]


@dataclass(frozen=True)
class Fault:
    """A fault at `rank`, once `step` steps are recorded (while saving: at the first save after it)."""

    number: int
    kind: str
    rank: int
    step: int
    background: bool

    @property
    def name(self) -> str:
        return f"{self.number:02}-{self.kind.replace(' ', '-')}"


@dataclass(frozen=True)
class Target:
    """The run that a fault strikes, and the node and processes of the fault's rank."""

    run: RunDirectory
    node: str
    pids: list[int]

    @property
    def job(self) -> str:
        return str(self.run.read_run()["slurm"]["job_id"])

    @property
    def partition(self) -> str:
        return self.node.rstrip("0123456789")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    `strike` injects it and returns the function that repairs the site. `ends_attempt`: the run needs another attempt.
    `while_saving`: strikes during a save. `overrides`: of the run.
    """

    strike: Callable[[Target], Repair | None]
    ends_attempt: bool = True
    while_saving: bool = False
    overrides: tuple[str, ...] = field(default=())


def until(condition: Callable[[], Any], event: str, seconds: float = LIMIT_S) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{event} did not happen within {seconds:.0f} s")
        time.sleep(0.02)
    return value


def arguments_and_environment(proc: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a process from its folder in /proc; empty if it has ended."""
    with contextlib.suppress(OSError):
        environment = dict(e.partition("=")[::2] for e in (proc / "environ").read_text().split("\0"))
        return (proc / "cmdline").read_text().split("\0"), environment
    return [], {}


def agent_and_rank(run: RunDirectory, node: str) -> tuple[int, int]:
    """Return the processes of the agent and of the only rank on `node`: a child of its agent, whose command line it
    has."""
    programs = dict[int, int]()  # process id -> its parent's
    for proc in Path("/proc").glob("[0-9]*"):
        arguments, environment = arguments_and_environment(proc)
        is_here = environment.get("SLURMD_NODENAME") == node and str(run.path / "submission") in arguments
        if is_here and "python" in arguments[0] and "holmes_hpc.submission.elastic.agent" in arguments:
            programs[int(proc.name)] = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
    (agent,) = (pid for pid, parent in programs.items() if parent not in programs)
    (rank,) = (pid for pid, parent in programs.items() if parent == agent)
    return agent, rank


def processes(run: RunDirectory, rank: int) -> list[int]:
    """Return the process of a rank, followed by its forks (writers of checkpoints)."""
    job, started_pids = str(run.read_run()["slurm"]["job_id"]), []
    folder = str(run.path / "submission")  # jobs of other testbeds may have the same number
    for proc in Path("/proc").glob("[0-9]*"):
        arguments, environment = arguments_and_environment(proc)
        if (
            (environment.get("HOLMES_LEADER_JOB_ID"), environment.get("SLURM_PROCID")) == (job, str(rank))
            and "holmes_hpc.submission.executor.task" in arguments[:6]
            and folder in arguments
            and "python" in arguments[0]
        ):
            with contextlib.suppress(OSError):
                started = int((proc / "stat").read_text().rpartition(")")[2].split()[19])
                started_pids.append((started, int(proc.name)))  # by age, because process ids wrap around
    if not started_pids:
        raise ProcessLookupError(f"no process of rank {rank} of job {job}")
    return [pid for _, pid in sorted(started_pids)]


def slurmstepd(pid: int) -> int:
    """Return the slurmstepd of a rank's process: the nearest such process above it."""
    while "slurmstepd" not in (name := Path(f"/proc/{pid}/comm").read_text()):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid <= 1:
            raise ProcessLookupError(f"no slurmstepd above {name}")
    return pid


def batch_script(job: str) -> int:
    """Return the process of a job's batch script on this testbed."""
    spool = str(Path(os.environ["HOLMES_TESTBED"]) / "spool")
    for proc in Path("/proc").glob("[0-9]*"):
        arguments, environment = arguments_and_environment(proc)
        script = next((a for a in arguments[:3] if a.endswith("/slurm_script")), "")
        if script.startswith(spool) and environment.get("SLURM_JOB_ID") == job:
            return int(proc.name)
    raise ProcessLookupError(f"no batch script of job {job}")


def saving_step(run: RunDirectory) -> int:
    """Return the step whose checkpoint is being written; 0 if none is."""
    names = [path.name for path in run.checkpoints.glob(".saving-step-*")]
    return int(names[0].split("-")[2]) if names else 0


def daemon(name: str) -> int:
    return int((Path(os.environ["HOLMES_TESTBED"]) / "run" / f"{name}.pid").read_text())


def on_node(node: str, command: str) -> None:
    subprocess.run([HOLMES, "testbed", "exec", node, "--", *command.split()], check=True, capture_output=True)


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def silent(node: str, *nics: str) -> Iterator[None]:
    """Take a node's NICs, by default all, off their bridges: their links stay up, and nobody answers."""
    wiring = testbed_module._current().wiring
    spec = next(spec for spec in wiring.topology.nodes if spec.name == node)
    bridges = {nic.port: nic.bridge for nic in wiring.nics(spec) if not nics or nic.name in nics}

    def link(*words: str) -> None:
        subprocess.run(["ip", "-n", wiring.switch, "link", "set", *words], check=True, capture_output=True)

    try:
        for port in bridges:
            link(port, "nomaster")
        yield
    finally:
        for port, bridge in bridges.items():
            link(port, "master", bridge)


# -- the faults: each injects one and returns what repairs the site ---------------------------------------------------


def send(number: signal.Signals) -> Callable[[Target], None]:
    return lambda target: os.kill(target.pids[0], number)


def kill_rank(target: Target) -> None:
    for pid in target.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_node(target: Target) -> Repair:
    beds.kill_node(target.node)
    return beds.up


def cut_rdma(target: Target) -> Repair:
    nic = f"{target.partition}0"
    on_node(target.node, f"ip link set {nic} down")
    return lambda: on_node(target.node, f"ip link set {nic} up")


def blink_rdma(target: Target) -> None:
    repair = cut_rdma(target)
    time.sleep(0.5)
    repair()


def end_daemon(name: str, number: signal.Signals) -> Callable[[Target], None]:
    """Return a fault: the end of a daemon, NODE standing for the target's node, and its start 5 s later."""

    def strike(target: Target) -> None:
        pid = daemon(name.replace("NODE", target.node))
        os.kill(pid, number)
        until(lambda: not os.path.exists(f"/proc/{pid}/ns/net"), f"the end of {name}")
        if number == signal.SIGKILL:
            time.sleep(5)
        beds.up()

    return strike


def stop_rank(target: Target) -> None:
    os.kill(target.pids[0], signal.SIGSTOP)
    time.sleep(STOP_S)
    os.kill(target.pids[0], signal.SIGCONT)


def fill_disk(target: Target) -> None:
    """Fill the disk of the checkpoints until a save has failed."""
    ballast = target.run.path.parent / DISK / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    until(lambda: "No space left on device" in target.run.log_path(0).read_text(), "a failed save")
    ballast.unlink()


def remount_read_only(target: Target) -> Repair:
    disk = str(target.run.path.parent / DISK)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def drain(target: Target) -> Repair:
    scontrol("update", f"NodeName={target.node}", "State=DRAIN", "Reason=fault")
    return lambda: scontrol("update", f"NodeName={target.node}", "State=RESUME")


def close_partition(target: Target) -> Repair:
    scontrol("update", f"PartitionName={target.partition}", "State=DOWN")
    return lambda: scontrol("update", f"PartitionName={target.partition}", "State=UP")


def hold(target: Target) -> Repair:
    subprocess.run(["scontrol", "hold", target.job], check=False, capture_output=True)  # refused for a running job
    return lambda: subprocess.run(["scontrol", "release", target.job], check=False, capture_output=True)


def run_out_of_time(target: Target) -> Repair:
    """Shorten the time limit to one minute, which the run has used: Slurm ends it within seconds."""
    for component in range(2):
        scontrol("update", f"JobId={target.job}+{component}", "TimeLimit=1")

    def restore() -> None:
        for component in range(2):
            with contextlib.suppress(subprocess.CalledProcessError):  # it has started again, with its old limit
                scontrol("update", f"JobId={target.job}+{component}", "TimeLimit=60")

    return restore


def share_node(target: Target) -> Repair:
    """Let a job of another user compute on the same node for the rest of the run."""
    command = ["runuser", "-u", OTHER_USER, "--", "sbatch", "--parsable", f"-p{target.partition}", f"-w{target.node}"]
    command += ["-n2", "-t10", "-o/dev/null", "--wrap", "srun sh -c 'while :; do :; done'"]
    job = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ, cwd="/tmp").stdout.strip()
    states = ["squeue", "-h", "-j", job, "-o", "%T"]
    until(lambda: "RUNNING" in subprocess.run(states, capture_output=True, text=True).stdout, "the other user's job")
    return lambda: subprocess.run(["scancel", job], check=True)


KILL, ON_DISK, SLOW = signal.SIGKILL, (f"train.checkpoint_dir={DISK}",), ("train.pace_layer_ms=60",)
KINDS: dict[str, Kind] = {
    "TERM": Kind(send(signal.SIGTERM)),
    "USR2": Kind(send(signal.SIGUSR2)),
    "KILL of a rank": Kind(kill_rank),
    "node killed": Kind(kill_node),
    "RDMA link cut": Kind(cut_rdma),
    "slurmctld restarted": Kind(end_daemon("slurmctld", signal.SIGTERM), ends_attempt=False),  # as systemd does
    "checkpoint disk full": Kind(fill_disk, ends_attempt=False, overrides=ON_DISK),
    "KILL while saving": Kind(kill_rank, while_saving=True),
}
MORE_KINDS: dict[str, Kind] = {
    "cancel": Kind(lambda target: cancel_run(target.run) and None),
    "slurmstepd killed": Kind(lambda target: os.kill(slurmstepd(target.pids[0]), KILL), ends_attempt=False),
    "batch script killed": Kind(lambda target: os.kill(batch_script(target.job), KILL)),
    "slurmctld killed": Kind(end_daemon("slurmctld", KILL), ends_attempt=False),
    "slurmdbd killed": Kind(end_daemon("slurmdbd", KILL), ends_attempt=False),
    "slurmd killed": Kind(end_daemon("slurmd.NODE", KILL), ends_attempt=False),
    "rank stopped for 30 s": Kind(stop_rank, ends_attempt=False),
    "NIC down and up": Kind(blink_rdma, ends_attempt=False),
    "node drained": Kind(drain, ends_attempt=False),
    "partition down": Kind(close_partition, ends_attempt=False),
    "job held": Kind(hold, ends_attempt=False),
    "time limit while saving": Kind(run_out_of_time, while_saving=True, overrides=SLOW),
    "checkpoints read-only": Kind(remount_read_only, overrides=ON_DISK),
    "job of another user": Kind(share_node, ends_attempt=False),
}


def draw_faults(seed: int, runs: int, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Fault]:
    """Draw `runs` faults, every kind equally often; more runs keep the first faults."""
    return [
        Fault(number, kinds[number % len(kinds)], rng.randrange(RANKS), rng.randint(3, STEPS - 12), rng.random() < 0.5)
        for number in range(runs)
        for rng in [random.Random(f"{seed} {number}")]
    ]

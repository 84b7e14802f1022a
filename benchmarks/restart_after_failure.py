"""Measure the time from a node's failure to the restart of its job, on a testbed of this program's own.

    python benchmarks/restart_after_failure.py [--slurm PREFIX] [--runs 1] [--message-timeout S]

Needs root and Slurm 25.11 or later. MessageTimeout defaults to Slurm's 10 s.

Each run of ``holmes submit`` trains a small GPT with one allowed restart and ``--requeue=expedite``, as a job of one
component and as a heterogeneous job. During training all processes of a node are killed: the batch script's node or
another one. `cred_expire` is Slurm's default of 120 s; `SlurmdTimeout` is the testbed's.

Prints the inputs and, in seconds after the failure: when Slurm notices the node, requeues the job (after its other
nodes ended it), starts it (to the second), when the first rank starts and when the first step ends. If a job does not
restart within LIMIT_S, its state is printed. Exits with 1 if a job of one component needs more than 30 s to its first
rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from holmes_hpc import testbed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import expand

HOLMES = str(Path(sys.executable).with_name("holmes"))
MODEL = ("model=gpt_tiny", "model.layers=4", "model.hidden=64", "model.ffn=160")
MODEL += ("batch.global_size=8", "batch.sequence_length=32")
LAYOUTS = {"plain": "{ib-a: 2}", "heterogeneous": "{ib-a: 2, roce-a: 2}"}
TRAIN = (
    "train.steps=100000",
    "train.pace_layer_ms=5",
    "train.log_interval=1",
    "train.max_restarts=1",
    "train.checkpoint_interval=5",
    "slurm.timeout_min=30",
    "slurm.additional={requeue: expedite}",
)
LIMIT_S, FIRST_RANK_LIMIT_S, CRED_EXPIRE_S = 300, 30, 120
SETTINGS = ("AuthInfo", "MessageTimeout", "SlurmdTimeout", "SLURM_VERSION", "SlurmctldParameters")
STAMP = 'printf "%s %s\\n" "$(date +%s.%N)" "${SLURM_RESTART_COUNT:-0}" >> '


def wait_until(condition: Callable[[], object], event: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{event}: time limit of {limit_s:g} s reached")
        time.sleep(0.2)


def run_holmes(*arguments: str) -> None:
    process = subprocess.run([HOLMES, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"holmes {arguments[0]}: {process.stderr.strip()}")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def restart_daemons(directory: Path, message_timeout_s: int | None) -> None:
    """Restart Slurm's daemons with Slurm's default `cred_expire`, which a testbed shortens, and a MessageTimeout."""
    conf_path = directory / "etc" / "slurm.conf"
    text = re.sub(r"cred_expire=\d+", f"cred_expire={CRED_EXPIRE_S}", conf_path.read_text())
    conf_path.write_text(text + (f"MessageTimeout={message_timeout_s}\n" if message_timeout_s else ""))
    daemons = [
        int(p.read_text()) for p in (directory / "run").glob("slurm[cd]*.pid") if not p.name.startswith("slurmdbd")
    ]
    for pid in daemons:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not any(is_alive(pid) for pid in daemons), "the end of Slurm's daemons")
    testbed.up()


def restart_times(stamps: Path) -> list[float]:
    """Return the start times of the ranks after the job's restart."""
    rows = [line.split() for line in stamps.read_text().splitlines()] if stamps.exists() else []
    return [float(when) for when, start in rows if start != "0"]


def first_log_time(log: str, pattern: str, since: float) -> float | None:
    """Return the time of slurmctld's first log line that matches `pattern`, from `since` on, or None."""
    for line in log.splitlines():
        stamp, _, text = line.removeprefix("[").partition("] ")
        if re.search(pattern, text):
            logged_at = datetime.fromisoformat(stamp).timestamp()
            if logged_at >= since:
                return logged_at
    return None


def measure(directory: Path, folder: Path, kind: str, kills_batch_node: bool, number: int) -> tuple[str, float | None]:
    """Kill a node of a run; return its line of the table, and the seconds until the first rank.

    `kills_batch_node`: the batch script's node fails, otherwise another one."""
    run = RunDirectory(folder / f"{kind}-{kills_batch_node:d}-{number}")
    stamps = run.path.with_suffix(".stamps")
    (folder / "stamp.sh").write_text(f"{STAMP}{stamps}\n")
    fabrics = re.findall(r"[\w-]+(?=:)", LAYOUTS[kind])
    ranks = ", ".join(f"{fabric}: {{setup: ['. {folder}/stamp.sh']}}" for fabric in fabrics)
    plan = str(folder / f"{kind}.yaml")
    layout = [f"plan.nodes={LAYOUTS[kind]}", *(["plan.pp=2"] if len(fabrics) > 1 else [])]
    run_holmes("plan", *MODEL, *layout, "-o", plan)
    run_holmes("submit", plan, f"run_dir={run.path}", *TRAIN, f"slurm.pools={{{ranks}}}")
    wait_until(lambda: len(run.metrics()) >= 8, "8 steps")  # the first checkpoint exists
    job = str(run.read_run()["slurm"]["job_id"])
    nodes = expand(output_of("squeue", "-h", "-j", job, "-o", "%N").splitlines()[0])
    load, failed = os.getloadavg()[0], time.time()
    testbed.kill_node(nodes[0] if kills_batch_node else nodes[-1])
    deadline = time.monotonic() + LIMIT_S
    while not restart_times(stamps) and time.monotonic() < deadline and run.read_result() is None:
        time.sleep(0.2)
    first_rank = min(restart_times(stamps), default=None)
    if first_rank is not None:
        wait_until(lambda: run.attempt > 1 and run.metrics()[-1]["attempt"] > 1, "a step after the restart")
    restart = output_of("squeue", "-h", "-j", job, "-o", "%S").partition("\n")[0]
    log = (directory / "log" / "slurmctld.log").read_text(errors="replace")
    times = [
        first_log_time(log, rf"{nodes[0] if kills_batch_node else nodes[-1]}\b.* not responding, setting DOWN", failed),
        first_log_time(log, rf"Requeuing JobId={job}\b", failed),
        None if first_rank is None else datetime.fromisoformat(restart).timestamp(),
        first_rank,
        next((float(line["time"]) for line in run.metrics() if line["attempt"] > 1), None),
    ]
    cells = [f"{when - failed:.1f}" if when is not None else "never" for when in times]
    states = "" if first_rank else output_of("sacct", "-nXPDj", job, "-o", "JobID,State,ExitCode").replace("\n", ", ")
    output_of("scancel", job)
    wait_until(lambda: not output_of("squeue", "-h", "-j", job), f"the end of job {job}")
    testbed.up()
    return (
        f"| {kind} | {'batch script' if kills_batch_node else 'other'} | {' | '.join(cells)} | {load:.1f} | {states} |",
        first_rank and first_rank - failed,
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--slurm", metavar="PREFIX", help="as in holmes testbed up --slurm")
    options.add_argument("--runs", type=int, default=1, help="runs per case")
    options.add_argument("--message-timeout", type=int, metavar="S", help="Slurm's MessageTimeout in seconds")
    arguments = options.parse_args()
    too_slow = False
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as temporary:
        directory, folder = Path(temporary) / "testbed", Path(temporary) / "runs"
        folder.mkdir()
        os.environ["HOLMES_TESTBED"] = str(directory)
        try:
            testbed.up("default", slurm=arguments.slurm)
            restart_daemons(directory, arguments.message_timeout)
            os.environ.update(testbed.env())
            config = output_of("scontrol", "show", "config")
            settings = re.findall(rf"^((?:{'|'.join(SETTINGS)}) *= .*)$", config, re.M)
            print("inputs:", "; ".join(re.sub(r" *= *", "=", line) for line in settings))
            print(f"{os.cpu_count()} CPUs; {' '.join((*MODEL, *TRAIN))}\n")
            print("| job | node | noticed | requeued | started | first rank | first step | load | |", flush=True)
            print("|---|---|---|---|---|---|---|---|---|")
            for number in range(arguments.runs):
                for kind in LAYOUTS:
                    for kills_batch_node in (False, True):
                        line, seconds = measure(directory, folder, kind, kills_batch_node, number)
                        print(line, flush=True)
                        too_slow |= kind == "plain" and (seconds is None or seconds > FIRST_RANK_LIMIT_S)
        finally:
            testbed.down()
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())

"""From a node's failure to the first rank's start again: runs of ``holmes submit`` on a testbed of this program's own.

    python benchmarks/restart_after_failure.py [--slurm PREFIX] [--runs 1] [--message-timeout S]

As root, with a Slurm of 25.11 or later; MessageTimeout is Slurm's own 10 s unless told.

Each run trains a small GPT, may restart once, and asks Slurm for ``--requeue=expedite``: as a job of one component, and
as a heterogeneous one. While it trains, all processes of a node are killed: of one beside the batch script's, and of
the batch script's. `cred_expire` is Slurm's own default of 120 s, `SlurmdTimeout` what the testbed has.
Printed: the inputs and, in seconds after the failure, when Slurm notices the node, has queued the job again (its other
nodes have ended it), starts it (to the second), when the first rank is started and when the first step is done; or what
Slurm made of a job that does not start again within LIMIT_S.
Exit code 1 where a job of one component takes more than 30 s to its first rank.
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
MODEL = ("model.layers=4", "model.hidden=64", "model.ffn=160", "batch.global_size=8", "batch.sequence_length=32")
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
LIMIT_S, WANTED_S, CRED_EXPIRE_S = 300, 30, 120
SHOWN = ("AuthInfo", "MessageTimeout", "SlurmdTimeout", "SLURM_VERSION", "SlurmctldParameters")
STAMP = 'printf "%s %s\\n" "$(date +%s.%N)" "${SLURM_RESTART_COUNT:-0}" >> '


def until(found: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not found():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {limit_s:g} s")
        time.sleep(0.2)


def holmes(*words: str) -> None:
    done = subprocess.run([HOLMES, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"holmes {words[0]}: {done.stderr.strip()}")


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def as_a_site(bed: Path, message_timeout_s: int | None) -> None:
    """Start Slurm's daemons again with Slurm's own `cred_expire`, which a testbed shortens, and a MessageTimeout."""
    conf = bed / "etc" / "slurm.conf"
    text = re.sub(r"cred_expire=\d+", f"cred_expire={CRED_EXPIRE_S}", conf.read_text())
    conf.write_text(text + (f"MessageTimeout={message_timeout_s}\n" if message_timeout_s else ""))
    daemons = [int(p.read_text()) for p in (bed / "run").glob("slurm[cd]*.pid") if not p.name.startswith("slurmdbd")]
    for pid in daemons:
        os.kill(pid, signal.SIGTERM)
    until(lambda: not any(alive(pid) for pid in daemons), "the end of Slurm's daemons")
    testbed.up()


def starts_again(stamps: Path) -> list[float]:
    """When ranks of a later start of the job were started."""
    rows = [line.split() for line in stamps.read_text().splitlines()] if stamps.exists() else []
    return [float(when) for when, start in rows if start != "0"]


def logged(log: str, pattern: str, after: float) -> float | None:
    """When slurmctld first wrote a line like `pattern` after the moment `after`."""
    for line in log.splitlines():
        stamp, _, text = line.removeprefix("[").partition("] ")
        if re.search(pattern, text):
            when = datetime.fromisoformat(stamp).timestamp()
            if when >= after:
                return when
    return None


def measure(bed: Path, folder: Path, kind: str, own: bool, number: int) -> tuple[str, float | None]:
    """A line of the table, and the seconds until the first rank. `own`: the batch script's node fails."""
    run, stamps = RunDirectory(folder / f"{kind}-{own:d}-{number}"), folder / f"{kind}-{own:d}-{number}.stamps"
    (folder / "stamp.sh").write_text(f"{STAMP}{stamps}\n")
    fabrics = re.findall(r"[\w-]+(?=:)", LAYOUTS[kind])
    ranks = ", ".join(f"{fabric}: {{setup: ['. {folder}/stamp.sh']}}" for fabric in fabrics)
    plan = str(folder / f"{kind}.yaml")
    layout = [f"plan.nodes={LAYOUTS[kind]}", *(["plan.pp=2"] if len(fabrics) > 1 else [])]
    holmes("plan", *MODEL, *layout, "-o", plan)
    holmes("submit", plan, f"run_dir={run.path}", *TRAIN, f"slurm.fabrics={{{ranks}}}")
    until(lambda: len(run.metrics()) >= 8, "8 steps")  # a checkpoint is there
    job = str(run.read_run()["slurm"]["job_id"])
    nodes = expand(said("squeue", "-h", "-j", job, "-o", "%N").splitlines()[0])
    load, failed = os.getloadavg()[0], time.time()
    testbed.kill_node(nodes[0] if own else nodes[-1])
    end = time.monotonic() + LIMIT_S
    while not starts_again(stamps) and time.monotonic() < end and run.read_result() is None:
        time.sleep(0.2)
    first = min(starts_again(stamps), default=None)
    if first is not None:
        until(lambda: run.attempt > 1 and run.metrics()[-1]["attempt"] > 1, "a step after the restart")
    start = said("squeue", "-h", "-j", job, "-o", "%S").partition("\n")[0]
    log = (bed / "log" / "slurmctld.log").read_text(errors="replace")
    times = [
        logged(log, rf"{nodes[0] if own else nodes[-1]}\b.* not responding, setting DOWN", failed),
        logged(log, rf"Requeuing JobId={job}\b", failed),
        None if first is None else datetime.fromisoformat(start).timestamp(),
        first,
        next((float(line["time"]) for line in run.metrics() if line["attempt"] > 1), None),
    ]
    shown = [f"{when - failed:.1f}" if when is not None else "never" for when in times]
    fate = "" if first is not None else said("sacct", "-nXPDj", job, "-o", "JobID,State,ExitCode").replace("\n", ", ")
    said("scancel", job)
    until(lambda: not said("squeue", "-h", "-j", job), f"the end of job {job}")
    testbed.up()
    which = "the batch script's" if own else "another"
    return f"| {kind} | {which} | {' | '.join(shown)} | {load:.1f} | {fate} |", first and first - failed


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--slurm", metavar="PREFIX", help="as holmes testbed up --slurm")
    options.add_argument("--runs", type=int, default=1, help="of each case")
    options.add_argument("--message-timeout", type=int, metavar="S", help="seconds")
    given = options.parse_args()
    late = False
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp") as place:
        bed, folder = Path(place) / "bed", Path(place) / "runs"
        folder.mkdir()
        os.environ["HOLMES_TESTBED"] = str(bed)
        try:
            testbed.up("default", slurm=given.slurm)
            as_a_site(bed, given.message_timeout)
            os.environ.update(testbed.env())
            conf = said("scontrol", "show", "config")
            settings = re.findall(rf"^((?:{'|'.join(SHOWN)}) *= .*)$", conf, re.M)
            print("inputs:", "; ".join(re.sub(r" *= *", "=", line) for line in settings))
            print(f"{os.cpu_count()} CPUs; {' '.join((*MODEL, *TRAIN))}\n")
            print("| job | node | noticed | queued again | starts | first rank | first step | load | |", flush=True)
            print("|---|---|---|---|---|---|---|---|---|")
            for number in range(given.runs):
                for kind in LAYOUTS:
                    for own in (False, True):
                        line, seconds = measure(bed, folder, kind, own, number)
                        print(line, flush=True)
                        late |= kind == "plain" and (seconds is None or seconds > WANTED_S)
        finally:
            testbed.down()
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

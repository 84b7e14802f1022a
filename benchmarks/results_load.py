"""How long `load_runs` and `load_steps` take on a large sweep, and how much memory.

    python benchmarks/results_load.py [--runs 10000] [--steps 1000] [--folder DIR]

The runs are made up: 40 different ones, copied to as many directories as wanted (real copies, so that reading them
costs what reading different ones costs). Targets on 2 idle cores: first time 120 s and 4 GiB, second time 10 s. What
the first wrote is on disk before the second begins (sync): otherwise the kernel's writing of it is measured along.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
DIFFERENT = 40


def make(folder: Path, runs: int, steps: int) -> None:
    from made_runs import make_run

    originals = []
    for i in range(min(DIFFERENT, runs)):
        placement = [{"ib-a": 4}, {"roce-a": 4}, {"ib-a": 2, "roce-a": 2}, {"ib-a": 2, "roce-a": 2, "eth-a": 2}][i % 4]
        originals.append(folder / f"{i}")
        make_run(originals[-1], placement, steps=steps, seed=i, step_time_s=1 + i / 40, labels={"session": "a"})
    for i in range(len(originals), runs):
        shutil.copytree(originals[i % len(originals)], folder / f"{i}")


STEP = """
import json, sys, time
started = time.perf_counter()
from holmes_hpc.results import load_runs, load_steps
imported = time.perf_counter()
frame = {"runs": load_runs, "steps": load_steps}[sys.argv[1]](sys.argv[2])
ended = time.perf_counter()
print(json.dumps({"rows": len(frame), "seconds": ended - imported, "import": imported - started}))
"""


def timed(what: str, folder: Path) -> dict[str, float]:
    """Load in a fresh process; the most memory it and its children held together, looked at twice a second."""
    command = [sys.executable, "-c", STEP, what, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        most, stop = [0], threading.Event()

        def watch() -> None:
            tree = psutil.Process(process.pid)
            while not stop.wait(0.5):
                total = 0
                try:
                    for p in [tree, *tree.children(recursive=True)]:
                        held = p.memory_info()
                        total += held.rss - held.shared
                except psutil.Error:
                    continue
                most[0] = max(most[0], total)

        watcher = threading.Thread(target=watch)
        watcher.start()
        before = os.times()
        assert process.stdout
        text = process.stdout.read()
        process.wait()
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        stop.set()
        watcher.join()
    return {**json.loads(text), "gib": most[0] / 2**30, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, help="keep the runs here, or use the ones that are here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as temporary:
        folder = args.folder or Path(temporary)
        if not any(folder.glob("*/run.yaml")):
            folder.mkdir(parents=True, exist_ok=True)
            begun = time.perf_counter()
            make(folder, args.runs, args.steps)
            size = (folder / "0" / "metrics.jsonl").stat().st_size
            print(
                f"made {args.runs} runs of {args.steps} steps, {size / args.steps:.0f} bytes a line, in "
                f"{time.perf_counter() - begun:.0f} s",
                flush=True,
            )
        shutil.rmtree(folder / ".holmes-cache", ignore_errors=True)
        print(f"{len(os.sched_getaffinity(0))} CPUs; load average {os.getloadavg()[0]:.1f}", flush=True)
        for what, when in (("runs", "first"), ("runs", "second"), ("steps", "second")):
            os.sync()
            r = timed(what, folder)
            print(
                f"load_{what:5} {when:6} time: {r['seconds']:6.2f} s, {r['rows']:,} rows, {r['gib']:.2f} GiB, "
                f"{r['cpu']:.1f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()

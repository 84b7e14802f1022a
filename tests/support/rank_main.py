"""The ranks of the tests' runs.

``rank_main.py CONFIG.json`` is one rank. ``rank_main.py`` alone loads torch once, prints ``ready`` and forks a rank
for every input line ``{"environment": {…}, "config": PATH, "output": PATH}``. It prints ``pid N`` and later ``exit
PID CODE`` (negative: killed by that signal)."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys
import warnings
from pathlib import Path


def rank(config: str) -> None:
    from holmes_hpc.rank import run_rank

    if module := os.environ.get("RANK_HOOK"):  # a module of this folder that changes the rank
        importlib.import_module(module)
    run_rank(json.loads(Path(config).read_text()))


def fork(request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        target = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        rank(str(request["config"]))
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    import spawn  # slow to import, as are the next ones

    from holmes_hpc.config.configuration import GROUPS, Configuration
    from holmes_hpc.rank import check_megatron_core
    from holmes_hpc.schema import keys
    from holmes_hpc.training.rank import compiler

    for declared in (Configuration, *GROUPS.values()):  # read once for all ranks, as are a plan's keys
        keys(declared)
    check_megatron_core("adam")
    spawn.plan()

    with compiler.delayed():
        import holmes_hpc.training.calibration.measure  # noqa: F401

    print("ready", flush=True)
    partial_line = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, partial_line = (partial_line + chunk).split(b"\n")
            for line in lines:
                print("pid", fork(json.loads(line)), flush=True)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            print("exit", pid, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    rank(sys.argv[1]) if len(sys.argv) > 1 else serve()

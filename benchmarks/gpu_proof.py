"""Check on one GPU, in at most 9 minutes, the parts of this package that need one; write a JSON file and a page.

    make gpu-proof [PARTS=start,tests,…]
    python benchmarks/gpu_proof.py [--parts start,…] [--device cuda] [--out build/gpu-proof] [--list]

Each part is a process with its own time limit. Parts that measure no times run at once, the others one by one. A part
that hangs is killed with its children, and the stacks of its threads go to its log; its figures so far are kept. With
--device cpu the parts that need no GPU run on tiny models: this tests the program and says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import importlib.util
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent


@dataclass(frozen=True)
class Part:
    """One check: `shows`: what it checks; `limit_s`: its time limit; `timed`: it runs alone, after the others, which
    run at once; `cpu`: it also runs without a GPU."""

    shows: str
    limit_s: float
    timed: bool = False
    cpu: bool = True


AT_ONCE_S = 180.0
PARTS = {
    "start": Part("two processes start with eager 1F1B, with lazy and with eager module loading", AT_ONCE_S),
    "tests": Part("the tests that need a GPU", AT_ONCE_S, cpu=False),
    "network": Part(
        "NCCL uses sockets on request; InfiniBand without an adapter ends with a one-line error", AT_ONCE_S, cpu=False
    ),
    "profile": Part("synchronizations and pageable copies per micro-batch", AT_ONCE_S, cpu=False),
    "resume": Part("a resumed run has the losses of an uninterrupted one", AT_ONCE_S),
    "layouts": Part("ranks that share the GPU have the losses of one process", AT_ONCE_S),
    "failure": Part("a rank whose step fails ends at once", AT_ONCE_S),
    "weights": Part("initial weights equal the CPU's, bit by bit", AT_ONCE_S),
    "kernels": Part("times of a layer's kernels against the planner's", 60, timed=True),
    "speed": Part("TFLOP/s and memory against a minimal Megatron-Core loop", 220, timed=True),
    "calibrate": Part("the measured parts of a step, and the planner's prediction from them", 70, timed=True),
}
TOTAL_S = 530.0  # of all parts; the remaining seconds of the nine minutes write the page


def run_part(name: str, device: str, out: Path, remaining_s: float = math.inf) -> dict[str, Any]:
    """Run a part in its own process, within its limit and `remaining_s`; return its row of the report."""
    part, output = PARTS[name], out / f"{name}.json"
    limit_s = min(part.limit_s, max(1.0, remaining_s)) if device == "cuda" else 10 * part.limit_s
    output.unlink(missing_ok=True)
    command = [sys.executable, "-X", "faulthandler", str(FOLDER / "gpu_proof_parts.py"), name, device, str(output)]
    start = time.monotonic()
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit_s)
            failure = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"time limit of {limit_s:.3g} s reached"
            _signal_group(process, signal.SIGABRT, 2.0)  # faulthandler writes its stacks to the log
        _signal_group(process, signal.SIGKILL, 5.0)  # remaining children would disturb the next part
    figures: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    failures = [failure] if failure else []
    failures += [] if output.exists() else [_last_line(out / f"{name}.log")]
    failures += figures.pop("wrong", [])
    return {
        "part": name,
        "shows": part.shows,
        "ok": not failures,
        "wrong": failures,
        "s": round(time.monotonic() - start, 1),
        "figures": figures,
    }


def run_parts(names: Sequence[str], device: str, out: Path, deadline: float) -> Iterator[dict[str, Any]]:
    """Run the parts that measure no times at once, then the others one by one; yield their rows as they end."""
    with ThreadPoolExecutor(len(PARTS)) as pool:
        at_once = [
            pool.submit(run_part, name, device, out, deadline - time.monotonic())
            for name in names
            if not PARTS[name].timed
        ]
        for part in as_completed(at_once):
            yield part.result()
    for name in names:
        if PARTS[name].timed:
            yield run_part(name, device, out, deadline - time.monotonic())


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals, wait_s: float) -> None:
    """Send a signal to the process group of a process, and wait up to `wait_s` for its end."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, number)
        process.wait(wait_s)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"no output file; last log line: {lines[-1][:200]}" if lines else "no output file"


def describe_machine() -> dict[str, Any]:
    """Return the versions and GPUs of this machine."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("megatron.core", "transformer_engine"):
        facts[name] = importlib.util.find_spec(name.partition(".")[0]) is not None
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        facts["gpus"] = [{"name": g.name, "memory_gib": round(g.total_memory / 2**30, 1)} for g in gpus]
    return facts


def html_page(proof: dict[str, Any]) -> str:
    """Return the report as one self-contained HTML page."""
    rows = "".join(
        f"<tr class={'ok' if r['ok'] else 'bad'}><td>{r['part']}</td><td>{'passed' if r['ok'] else 'failed'}</td>"
        f"<td>{r['s']:.0f} s</td><td>{html.escape(r['shows'])}"
        + "".join(f"<br><b>{html.escape(w)}</b>" for w in r["wrong"])
        + f"<pre>{html.escape(json.dumps(r['figures'], indent=1)) if r['figures'] else ''}</pre></td></tr>"
        for r in proof["parts"]
    )
    return (
        "<!doctype html><meta charset=utf-8><title>GPU proof</title><style>body{font:15px/1.5 sans-serif;"
        "max-width:70em;margin:2em auto;padding:0 1em}td{vertical-align:top;padding:.4em .8em;border-top:1px solid "
        "#ccc}pre{margin:.3em 0;font-size:12px;white-space:pre-wrap}.ok td:nth-child(2){color:#060}"
        ".bad td:nth-child(2){color:#a00}</style><h1>GPU proof</h1>"
        f"<p>{html.escape(json.dumps(proof['machine']))}<p>{html.escape(proof['says'])}<table>{rows}</table>\n"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-proof")
    options.add_argument("--list", action="store_true", help="list the parts and exit")
    arguments = options.parse_args()
    if arguments.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.limit_s:4.0f} s  {part.shows}{'' if part.cpu else ' (GPU only)'}")
        return 0
    names = [n for n in arguments.parts.split(",") if n]
    if unknown := [n for n in names if n not in PARTS]:
        print(f"gpu-proof: no part {unknown[0]!r}; parts: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    facts = describe_machine()
    if arguments.device == "cuda" and "gpus" not in facts:
        print("gpu-proof: no CUDA device on this machine; --device cpu only tests the program", file=sys.stderr)
        return 2
    summary = (
        f"Run on {facts['gpus'][0]['name']}." if arguments.device == "cuda" else "Run on a CPU: does not apply to GPUs."
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    proof: dict[str, Any] = {"machine": facts, "says": summary, "parts": []}
    deadline = time.monotonic() + TOTAL_S
    for name in [n for n in names if arguments.device == "cpu" and not PARTS[n].cpu]:
        print(f"{name:10} needs a GPU", flush=True)
        names.remove(name)
    for row in run_parts(names, arguments.device, arguments.out, deadline):
        proof["parts"].append(row)
        (arguments.out / "proof.json").write_text(json.dumps(proof, indent=1) + "\n")
        (arguments.out / "proof.html").write_text(html_page(proof))
        print(
            f"{row['part']:10} {'passed' if row['ok'] else 'FAILED'} in {row['s']:.0f} s"
            + "".join(f"; {w}" for w in row["wrong"])
            + (f"  {json.dumps(row['figures'])}" if row["figures"] else ""),
            flush=True,
        )
    print(f"{arguments.out}/proof.json, proof.html")
    return 0 if all(r["ok"] for r in proof["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What one GPU can show of this package, in at most 9 minutes: one JSON file, one page, a part after the other.

    make gpu-proof [PARTS=start,tests,…]
    python benchmarks/gpu_proof.py [--parts start,…] [--device cuda] [--out build/gpu-proof] [--list]

Each part is a process of its own with a limit of its own: one that hangs is ended, with the stacks of its threads in
its log and with all that it started; what it had found is kept, and the next one begins. With --device cpu the parts
that can run without a GPU do, on models of no size: that shows that the proof itself works, and nothing of GPUs.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Part:
    """`shows`: in a sentence. `limit_s`: when it is ended. `cpu`: runs without a GPU too."""

    shows: str
    limit_s: float
    cpu: bool = True


PARTS = {
    "start": Part("two processes run ahead as the very first thing they do, with lazy and with eager loading", 85),
    "tests": Part("the tests that want a GPU", 120, cpu=False),
    "network": Part(
        "NCCL uses sockets where it is told to; InfiniBand without an adapter ends in one line", 34, cpu=False
    ),
    "speed": Part("TFLOP/s and memory beside a minimal Megatron-Core loop of its own configuration", 140),
    "profile": Part("synchronisations and pageable copies of a micro-batch", 36, cpu=False),
    "resume": Part("a run that was saved and resumed has the losses of one that was not", 50),
    "calibrate": Part("the parts of a step, measured, and what the planner makes of them", 40),
    "weights": Part("initial weights are the CPU's, bit by bit", 15),
}
TOTAL_S = 530.0  # of all parts; what makes a page of them takes the rest of nine minutes


def run_part(name: str, device: str, out: Path, left_s: float = math.inf) -> dict[str, Any]:
    """A part in a process of its own, within its limit and `left_s`; what it found, and its seconds."""
    part, found = PARTS[name], out / f"{name}.json"
    limit_s = min(part.limit_s, max(1.0, left_s)) if device == "cuda" else 10 * part.limit_s  # a CPU shows nothing
    found.unlink(missing_ok=True)
    command = [sys.executable, "-X", "faulthandler", str(HERE / "gpu_proof_parts.py"), name, device, str(found)]
    began = time.monotonic()
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit_s)
            said = "" if code == 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            said = f"ran past its limit of {limit_s:.3g} s"
            _tell(process, signal.SIGABRT, 2.0)  # its stacks into its log
        _tell(process, signal.SIGKILL, 5.0)  # what it left behind would be in the next one's way
    figures: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    wrong = [said] if said else []
    wrong += [] if found.exists() else [_last_line(out / f"{name}.log")]
    wrong += figures.pop("wrong", [])
    return {
        "part": name,
        "shows": part.shows,
        "ok": not wrong,
        "wrong": wrong,
        "s": round(time.monotonic() - began, 1),
        "figures": figures,
    }


def _tell(process: subprocess.Popen[bytes], number: signal.Signals, wait_s: float) -> None:
    """A signal to all that is left of what a process started; `wait_s` for its end."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, number)
        process.wait(wait_s)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"nothing was written; its last line: {lines[-1][:200]}" if lines else "nothing was written"


def machine() -> dict[str, Any]:
    """What this ran on."""
    import torch

    made: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("megatron.core", "transformer_engine"):
        made[name] = importlib.util.find_spec(name.partition(".")[0]) is not None
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        made["gpus"] = [{"name": g.name, "memory_gib": round(g.total_memory / 2**30, 1)} for g in gpus]
    return made


def page(proof: dict[str, Any]) -> str:
    """One HTML page without anything from elsewhere."""
    rows = "".join(
        f"<tr class={'ok' if r['ok'] else 'bad'}><td>{r['part']}</td><td>{'shown' if r['ok'] else 'not shown'}</td>"
        f"<td>{r['s']:.0f} s</td><td>{html.escape(r['shows'])}"
        + "".join(f"<br><b>{html.escape(w)}</b>" for w in r["wrong"])
        + f"<pre>{html.escape(json.dumps(r['figures'], indent=1)) if r['figures'] else ''}</pre></td></tr>"
        for r in proof["parts"]
    )
    return (
        "<!doctype html><meta charset=utf-8><title>What one GPU shows</title><style>body{font:15px/1.5 sans-serif;"
        "max-width:70em;margin:2em auto;padding:0 1em}td{vertical-align:top;padding:.4em .8em;border-top:1px solid "
        "#ccc}pre{margin:.3em 0;font-size:12px;white-space:pre-wrap}.ok td:nth-child(2){color:#060}"
        ".bad td:nth-child(2){color:#a00}</style><h1>What one GPU shows</h1>"
        f"<p>{html.escape(json.dumps(proof['machine']))}<p>{html.escape(proof['says'])}<table>{rows}</table>\n"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-proof")
    options.add_argument("--list", action="store_true", help="only say what there is")
    given = options.parse_args()
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.limit_s:4.0f} s  {part.shows}{'' if part.cpu else ' (GPU only)'}")
        return 0
    names = [n for n in given.parts.split(",") if n]
    if unknown := [n for n in names if n not in PARTS]:
        print(f"gpu-proof: no part {unknown[0]!r}; known are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    found = machine()
    if given.device == "cuda" and "gpus" not in found:
        print("gpu-proof: no CUDA device here, nothing is shown; --device cpu tries the proof itself", file=sys.stderr)
        return 2
    says = f"Shown on {found['gpus'][0]['name']}." if given.device == "cuda" else "On a CPU: says nothing about GPUs."
    given.out.mkdir(parents=True, exist_ok=True)
    proof: dict[str, Any] = {"machine": found, "says": says, "parts": []}
    end = time.monotonic() + TOTAL_S
    for name in names:
        if given.device == "cpu" and not PARTS[name].cpu:
            print(f"{name:10} needs a GPU", flush=True)
            continue
        row = run_part(name, given.device, given.out, end - time.monotonic())
        proof["parts"].append(row)
        (given.out / "proof.json").write_text(json.dumps(proof, indent=1) + "\n")
        (given.out / "proof.html").write_text(page(proof))
        print(
            f"{name:10} {'shown' if row['ok'] else 'NOT SHOWN'} in {row['s']:.0f} s"
            + "".join(f"; {w}" for w in row["wrong"])
            + (f"  {json.dumps(row['figures'])}" if row["figures"] else ""),
            flush=True,
        )
    print(f"{given.out}/proof.json, proof.html")
    return 0 if all(r["ok"] for r in proof["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())

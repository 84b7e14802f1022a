"""Plans and batch scripts for real sites, from the texts of their Slurm: the page results/site-scripts.md.

Example: python benchmarks/site_scripts.py ../shared/data/sites nih_biowulf jeanzay > benchmarks/results/site-scripts.md

A stand-in for `scontrol` answers with a site's texts; other commands of Slurm fail. No job is submitted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCONTROL = """#!/bin/sh
case "$*" in
  *node*) cat "$SITE/nodes" ;;
  *part*) cat "$SITE/parts" ;;
  *config*) cat "$SITE/conf" ;;
  *) exit 1 ;;
esac
"""
SUBMIT = ("slurm.account=ACCOUNT", "train.steps=1000", "data=synthetic", "slurm.timeout_min=1440", "--dry-run")


def holmes(*words: str, environ: dict[str, str]) -> str:
    """Return what a command of this environment's holmes prints. Exit with its messages if it fails."""
    command = [str(Path(sys.executable).with_name("holmes")), *words]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(words)}: {ended.stderr}")
    return ended.stdout


def describe(site: Path, directory: Path) -> str:
    """Return a site's part of the page: its plan and the requests of its batch script."""
    for name, text in {
        "scontrol": SCONTROL,
        **dict.fromkeys(("sacctmgr", "sbatch", "srun"), "#!/bin/sh\nexit 1\n"),
    }.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "SITE": str(site), "COLUMNS": "110"}
    plan = str(directory / f"{site.name}.yaml")
    summary = holmes("plan", "model=llama3_8b", "-o", plan, environ=environ)
    script = holmes("submit", plan, *SUBMIT, environ=environ)
    requests = "\n".join(line for line in script.splitlines() if line.startswith("#SBATCH"))
    return f"## {site.name}\n\n```text\n{summary.rstrip()}\n```\n\n```sh\n{requests}\n```\n"


def main(folder: Path, names: list[str]) -> None:
    """Print the page."""
    print("# Batch scripts for real sites\n")
    print("Made by `python benchmarks/site_scripts.py DIR SITE...` from the texts of each site's Slurm, with")
    print(
        "`holmes plan model=llama3_8b` and `holmes submit PLAN slurm.account=ACCOUNT --dry-run`. Times are predictions."
    )
    print("Where no feature names a NIC, Ethernet of 10 Gb/s is assumed; `holmes site` asks the nodes.\n")
    with tempfile.TemporaryDirectory() as directory:
        print("\n".join(describe(folder.resolve() / name, Path(directory)) for name in names))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

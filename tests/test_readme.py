"""Every command that README shows is run, or is the one that runs this test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
BY_HAND = next(block for block in BLOCKS if "testbed up" in block)


def test_make_has_the_targets_that_readme_names():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, re.MULTILINE)):
        target = "".join(target)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_verbs_that_readme_names_exist():
    from holmes_hpc.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands} | {g.name for g in app.registered_groups}
    named = set(re.findall(r"\bholmes ([a-z]+)\b", README))
    assert named <= known, named - known


@pytest.mark.integration
def test_site_file_and_its_commands(tmp_path):
    site = next(re.finditer(r"^```yaml\n(name: .*?)^```", README, re.MULTILINE | re.DOTALL))[1]
    (tmp_path / "site.yaml").write_text(site)
    run_block(next(block for block in BLOCKS if "--site site.yaml" in block), tmp_path)


@pytest.mark.integration
def test_sweep(tmp_path):
    run_block(next(block for block in BLOCKS if "holmes_hpc.train -m" in block), tmp_path)
    assert len(list(tmp_path.rglob("result.json"))) == 2


def run_block(text: str, directory: Path) -> str:
    """Run README's lines as they stand there."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("HOLMES_RUNS", None)
    done = subprocess.run(["bash", "-c", f"set -eux\n{text}"], cwd=directory, env=environment, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slurm
def test_by_hand_on_the_testbed(testbed, tmp_path):
    lines = BY_HAND.strip().splitlines()
    assert lines[-1] == "holmes testbed down"  # the other tests go on using it, so this one line is not run here
    out = run_block("\n".join(lines[:-1]), tmp_path)
    assert "#SBATCH hetjob" in out
    assert (tmp_path / "runs" / "first" / "result.json").exists()

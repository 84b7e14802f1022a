"""Every command that README shows is run, or is the one that runs this test."""

import re

import pytest
from pages import ROOT, blocks, run_block, text_of

README = text_of(ROOT / "README.md")
BLOCKS = [text for _, text in blocks(ROOT / "README.md", "sh")]
BY_HAND = next(block for block in BLOCKS if "testbed up" in block)


def test_make_has_the_targets_that_readme_names():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, re.MULTILINE)):
        target = "".join(target)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.integration
def test_ten_lines_on_a_laptop(tmp_path):
    ten, single = (block for block in BLOCKS if "site.yaml" in block)
    assert len(ten.splitlines()) <= 10
    printed = run_block(ten + single, tmp_path).splitlines()
    (excerpt,) = (text for _, text in blocks(ROOT / "README.md", "text"))
    assert set(excerpt.splitlines()) <= set(printed), "README shows lines that `holmes plan` does not print"


@pytest.mark.integration
def test_sweep(tmp_path):
    run_block(next(block for block in BLOCKS if "holmes-train -m" in block), tmp_path)
    assert len(list(tmp_path.rglob("result.json"))) == 2


@pytest.mark.slurm
def test_by_hand_on_the_testbed(testbed, tmp_path):
    lines = BY_HAND.strip().splitlines()
    assert lines[-1] == "holmes testbed down"  # the other tests go on using it, so this one line is not run here
    out = run_block("\n".join([*lines[:-1], "holmes status"]), tmp_path)
    assert "#SBATCH hetjob" in out and re.search("^first .* completed ", out, re.MULTILINE)
    assert (tmp_path / "runs" / "first" / "result.json").exists()

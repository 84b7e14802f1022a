"""Every command on a page of docs/ is run here, or its block's title says where it runs; links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import thorough
import typer
from pages import FENCE, ROOT, blocks, run_block, text_of

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
TITLES = ("on a real site", "on the testbed, as root", "as root, with ", "needs ", "some minutes")  # else it is run


def own_blocks(page: Path) -> list[tuple[str, str]]:
    """Its shell blocks, but those of README, whose test runs them."""
    readme = text_of(ROOT / "README.md")
    return [(title, text) for title, text in blocks(page, "sh") if text not in readme]


def run_here() -> list[Path]:
    return [
        page
        for page in PAGES
        if page.name not in ("README.md", "CONTRIBUTING.md") and any(not title for title, _ in own_blocks(page))
    ]


@pytest.mark.integration
@pytest.mark.parametrize("page", run_here(), ids=lambda page: page.stem)
def test_untitled_blocks_run_as_they_stand(page, tmp_path):
    for title, text in blocks(page, "yaml"):
        if title:
            (tmp_path / title).write_text(text)
    run_block("".join(text for title, text in own_blocks(page) if not title), tmp_path)


def titled(start: str) -> list[Path]:
    return [page for page in PAGES if any(title.startswith(start) for title, _ in own_blocks(page))]


@pytest.mark.integration
@pytest.mark.parametrize("page", thorough.all_but(titled("needs holmes-hpc[train]")))
def test_blocks_that_train_without_root_run_as_they_stand(page, tmp_path):
    for title, text in own_blocks(page):
        if title.startswith("needs holmes-hpc[train]"):
            run_block(text, tmp_path)
    (result,) = (tmp_path / "runs").glob("*/result.json")
    assert '"state": "completed"' in result.read_text()


@pytest.mark.slurm
@pytest.mark.parametrize("page", titled("on the testbed"), ids=lambda page: page.stem)
@pytest.mark.thorough  # README's commands run in test_readme.py
def test_blocks_on_the_testbed_run_as_they_stand(testbed, page, tmp_path):
    for title, text in own_blocks(page):
        if title.startswith("on the testbed"):
            *lines, last = text.strip().splitlines()
            assert last == "holmes testbed down"  # the other tests go on using it
            run_block("\n".join(lines), tmp_path)
    (result,) = (tmp_path / "runs").glob("*/result.json")
    assert '"state": "completed"' in result.read_text()


def test_titles_say_where_a_block_runs():
    for page in PAGES:
        for title, _ in blocks(page, "sh"):
            assert not title or title.startswith(TITLES), (page.name, title)


def test_verbs_and_options_on_the_pages_exist():
    from holmes_hpc.cli import load

    command = typer.main.get_command(load())
    for page in PAGES:
        shown = [line for _, text in blocks(page, "sh") for line in text.splitlines()]
        for line in [*shown, *re.findall(r"`(holmes [^`]+)`", text_of(page).replace("\n", " "))]:
            if re.match(r"holmes [a-z]", line):
                unknown = unknown_words(command, line)
                assert not unknown, (page.name, line, unknown)


def unknown_words(command, line: str) -> list[str]:
    """Words of a `holmes` line that name no verb, or no option of its verb."""
    words = shlex.split(line.split(" | ")[0].replace("'", "").replace('"', ""))[1:]
    while getattr(command, "commands", None) and words and re.fullmatch("[a-z]+", words[0]):
        if words[0] not in command.commands:
            return words[:1]
        command = command.commands[words.pop(0)]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    if "--" in words:
        words = words[: words.index("--")]
    return [w for w in words if re.match("--?[a-z]", w) and w.split("=")[0] not in known]


def test_make_targets_extras_and_files_on_the_pages_exist():
    made = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for page in PAGES:
        text = text_of(page)
        assert made.issuperset(re.findall(r"(?:`|^ *)make ([a-z-]+)", text, re.MULTILINE)), page.name
        named = [one for some in re.findall(r"holmes-hpc\[([a-z,]+)\]", text) for one in some.split(",")]
        assert set(extras).issuperset(named), (page.name, named)
    for path in re.findall(r"`((?:holmes_hpc|tests)/[\w/.]+)`", text_of(ROOT / "CONTRIBUTING.md")):
        assert (ROOT / path).exists(), path


def test_the_installation_page_lists_every_extra():
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    page = text_of(ROOT / "docs/install.md")
    assert not [extra for extra in extras if f"`{extra}`" not in page]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        prose = FENCE.sub("", text_of(page))
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose):
            there = (page.parent / target) if target else page
            assert there.exists(), (page.name, target)
            if anchor and there.suffix == ".md":
                assert anchor in anchors(there), (page.name, target, anchor)


def anchors(page: Path) -> set[str]:
    """As mkdocs makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"[`*]|\(http.*?\)", "", t)).strip().lower())
        for t in titles
    }


def test_readme_and_the_newest_changes_stay_short():
    assert len(text_of(ROOT / "README.md").split()) <= 900
    for version in re.split(r"^## ", text_of(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)[1:]:
        assert len(version.splitlines()) <= 60, version.splitlines()[0]


def test_the_objects_of_the_python_page_can_be_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` reads them with the extension in docs/parameters.py."""
    griffe = pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from parameters import Parameters

    names = re.findall(r"^::: (\S+)$", text_of(ROOT / "docs" / "results.md"), re.MULTILINE)
    assert names
    for module in {name.rpartition(".")[0] for name in names}:
        path = ROOT / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        griffe.visit(module, filepath=file, code=text_of(file), extensions=griffe.Extensions(Parameters()))

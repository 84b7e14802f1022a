"""The report's HTML page: self-contained, names are only text, legible in a real browser at phone and desktop width."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, missing
from made_runs import make_run

from holmes_hpc.errors import RecordError
from holmes_hpc.results.html_report import write_html
from holmes_hpc.results.report import Report, load_report

pytestmark = pytest.mark.integration


class Links(HTMLParser):
    """Everything in a page that could make a browser ask for something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "action", "data")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, sweep: Path) -> list[Path]:
    """Of one run with its timeline, and of a sweep."""
    tmp_path = tmp_path_factory.mktemp("pages")
    run = make_run(tmp_path / "alone")
    for rank, stage in ((0, 0), (2, 1)):
        lines = [
            {
                "step": step,
                "stage": stage,
                "kind": kind,
                "micro_batch": 0,
                "chunk": 0,
                "start_s": step + at,
                "end_s": step + at + 0.2,
                "held": 1,
            }
            for step in range(20)
            for kind, at in (("forward", 0.1 * stage), ("backward", 0.5))
        ]
        run.trace_path(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    simulated = [{"stage": s, "kind": "forward", "start_s": 0.1 * s, "end_s": 0.3 + 0.1 * s} for s in (0, 1)]
    write_html(load_report([run.path], simulate=lambda plan: simulated), tmp_path / "one.html")
    write_html(load_report([sweep]), tmp_path / "many.html")
    return [tmp_path / "one.html", tmp_path / "many.html"]


def test_the_page_is_self_contained(pages: list[Path]) -> None:
    for path in pages:
        text, links = path.read_text(), Links()
        links.feed(text)
        assert all(link.startswith(("#", "data:")) for link in links.found), links.found
        assert not {"script", "iframe", "link rel=stylesheet"} & set(links.tags)
        assert "@import" not in text and not re.search(r"url\((?!['\"]?(#|data:))", text)
        assert links.tags.count("svg") >= 3 and text.index('id="answer"') < text.index("<svg")


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "<img src=x onerror=alert(1)>", labels={"system": "<script>alert(2)</script>"}, state=None
    )
    assert run.write_result({"state": "failed", "error": "<b>bold</b>"}, writer="batch")
    write_html(load_report([run.path]), tmp_path / "page.html")
    make_run(tmp_path / "other")
    write_html(load_report([run.path, tmp_path / "other"]), tmp_path / "two.html")
    for name in ("page.html", "two.html"):
        links = Links()
        links.feed((tmp_path / name).read_text())
        assert not {"script", "img", "b"} & set(links.tags)
        assert "&lt;b&gt;bold" in (tmp_path / name).read_text()


def test_a_page_that_cannot_be_written_is_one_line(one: Report, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        write_html(one, tmp_path / "none" / "page.html")


LOOK = """
const small = [], clipped = [];
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('defs, style, metadata'))
  continue; const svg = e.ownerSVGElement, size = parseFloat(getComputedStyle(e).fontSize);
  const shown = svg ? size * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b) : size;
  if (shown < (svg ? 8.5 : 12)) small.push([e.textContent.slice(0, 30), shown]);
  if (svg) { const t = e.getBoundingClientRect(), s = svg.getBoundingClientRect();
    if (t.left < s.left - 2 || t.right > s.right + 2 || t.top < s.top - 2 || t.bottom > s.bottom + 2)
      clipped.push(e.textContent.slice(0, 40)); }
}
return {small, clipped, wide: document.documentElement.scrollWidth, inner: window.innerWidth, height:
window.innerHeight,
        answer: document.getElementById('answer').getBoundingClientRect().bottom};
"""


@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)], ids=["phone", "desktop"])
def test_the_page_in_a_real_browser(pages: list[Path], width: int, height: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    for path in pages:
        with Browser(width, height) as browser:
            browser.open(path)
            look = browser.script(LOOK)
            assert browser.console() == []
            assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
        assert look["small"] == [], "text too small to read"
        assert look["clipped"] == [], "text cut off at a figure's edge"
        assert look["wide"] <= look["inner"] == width, "the page scrolls sideways"
        assert look["answer"] <= look["height"], "the answer is not seen without scrolling"

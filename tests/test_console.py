"""Other people's words are shown on a terminal, never obeyed by it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holmes_hpc import cli, console
from holmes_hpc.errors import ConfigError, raise_all
from holmes_hpc.records.run import RunDirectory

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"  # OSC 52 sets the clipboard of whoever reads it
WORDS = f"a{CLIPBOARD}b\x9b31m\rc\x08\u202ed\udc9b:heart:[red]"
SHOWN = r"a\x1b]52;c;cm0gLXJm\x07b\x9b31m\rc\x08\u202ed\udc9b:heart:[red]"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_control_characters_are_written_out() -> None:
    assert console.visible(WORDS) == SHOWN
    assert console.visible("plain – text\n\tof two lines, ä 漢") == "plain – text\n\tof two lines, ä 漢"


def test_names_of_columns_fold_before_a_table_is_split(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console.table("", ["run", "gradient sync", "parameter sync", "pipeline wait"], [["one", "1.5", "2.5", "3.5"]])
    out = capsys.readouterr().out
    assert out.split().count("one") == 1 and "gradient " in out and "gradient sync" not in out


def test_durations_have_the_unit_that_fits() -> None:
    assert [console.seconds(s) for s in (12.345, 0.0456, 1.906e-5, 3e-8, 0.0)] == [
        "12.35 s",
        "45.6 ms",
        "19.06 us",
        "0.03 us",
        "0 s",
    ]


@pytest.mark.parametrize(
    "say",
    [
        console.text,
        console.paragraph,
        console.note,
        console.problem,
        lambda words: console.table(words, [words], [[words]], words),
        lambda words: console.Progress()(words, 1, 2),
    ],
)
def test_every_way_of_saying(say: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    say(WORDS)
    said = "".join(capsys.readouterr())
    assert not OBEYED.search(said) and r"\x1b]52" in said.replace("\n", "")


def test_a_step_that_takes_long_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    with console.steps("looking", after_s=0.02) as say:
        for step, wanted in (("starting", "looking: "), ("waiting", "starting: ")):
            while said.count(wanted) < 2:
                said += capsys.readouterr().err
            say(step)
    lines = re.sub(r"\d+ s", "N s", said + capsys.readouterr().err).splitlines()
    assert list(dict.fromkeys(lines))[:4] == ["looking: N s", "starting", "starting: N s", "waiting"]


def test_json_is_the_same_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    console.as_json({"log": ["a\x9b31m\x1b[2J\u202eb"]})
    said = capsys.readouterr().out
    assert not OBEYED.search(said) and json.loads(said) == {"log": ["a\x9b31m\x1b[2J\u202eb"]}


@pytest.mark.parametrize(
    "verb",
    [
        ["logs"],
        ["logs", "--json"],
        ["status"],
        ["status", "--json"],
        ["report"],
        ["cancel"],
        ["resume"],
        ["export", "--safetensors", "out"],
    ],
)
def test_no_verb_sends_a_records_words_to_the_terminal(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create(tmp_path / f"run{CLIPBOARD.replace('/', '')}", "x: 1\n", config={CLIPBOARD: CLIPBOARD})
    run.log_path(0).write_text(f"{CLIPBOARD}\n")
    run.update_run(attempts=[{"attempt": 1, "host": CLIPBOARD}], slurm={"job_id": CLIPBOARD}, overrides=[CLIPBOARD])
    run.write_result(
        {"state": "failed", "error": CLIPBOARD, "failed_rank": 0, "failed_node": CLIPBOARD, "log_tail": [CLIPBOARD]}
    )
    monkeypatch.setattr(sys, "argv", ["holmes", verb[0], str(run.path), *verb[1:]])
    with pytest.raises(SystemExit):
        cli.main()
    said = "".join(capsys.readouterr())
    assert said and not OBEYED.search(said)


def test_all_mistakes_of_an_input_are_printed_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    errors = [ConfigError(f"mistake {i}") for i in range(console.MISTAKES + 2)]
    with pytest.raises(ConfigError) as raised:
        raise_all(list(errors))
    console.problem(raised.value)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "holmes: mistake 0" and lines[-2:] == ["holmes: mistake 19", "holmes: 2 more mistakes"]

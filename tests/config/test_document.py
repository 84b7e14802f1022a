"""What is written from the declared keys is what lies in the repository, and reads back as what was declared."""

from importlib.resources import files

import pytest

from holmes_hpc.config import document
from holmes_hpc.config.composition import load
from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.schema import keys

pytestmark = pytest.mark.integration


def test_files_of_the_configuration_are_those_of_the_declared_keys() -> None:
    for path, text in document.conf_files().items():
        kept = files("holmes_hpc.conf").joinpath(path).read_text(encoding="utf-8")
        assert kept == text, f"{path}: run python -m holmes_hpc.config.document"
    assert document.PAGE.read_text(encoding="utf-8") == document.page(), "run python -m holmes_hpc.config.document"


def test_no_file_of_the_configuration_is_written_by_hand() -> None:
    kept = {str(p.relative_to(document.PACKAGE / "conf")) for p in (document.PACKAGE / "conf").rglob("*.yaml")}
    assert kept == set(document.conf_files())


def test_what_hydra_composes_is_what_was_declared() -> None:
    assert load() == Configuration(MODELS["gpt_tiny"], BATCHES["tiny"])
    for name, model in MODELS.items():
        assert load([f"model={name}"]).model == model
    for name, batch in BATCHES.items():
        assert load([f"batch={name}"]).batch == batch


def test_every_key_has_a_line_of_help() -> None:
    for cls in (Configuration, *GROUPS.values()):
        for key in keys(cls).values():
            assert key.says.help or key.name in GROUPS, (cls, key.name)


@pytest.mark.parametrize("group", GROUPS)
def test_help_names_every_key_of_a_group(group: str) -> None:
    lines = document.help_text(group).splitlines()
    named = [line.strip().partition(":")[0] for line in lines if line.startswith(f"  {group}.")]
    assert named == [f"{group}.{name}" for name in keys(GROUPS[group])]
    assert max(map(len, lines[2:])) <= 80

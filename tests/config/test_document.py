"""What is written from the declared keys is what lies in the repository, and reads back as what was declared."""

from importlib.resources import files
from pathlib import Path

import pytest

from holmes_hpc.config import document
from holmes_hpc.config.composition import load
from holmes_hpc.config.configuration import GROUPS, Configuration
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import BATCHES, MODELS
from holmes_hpc.errors import ConfigError
from holmes_hpc.schema import keys

pytestmark = pytest.mark.integration


def test_files_of_the_configuration_are_those_of_the_declared_keys() -> None:
    for path, text in document.conf_files().items():
        kept = files("holmes_hpc.generated_conf").joinpath(path).read_text(encoding="utf-8")
        assert kept == text, f"{path}: run python -m holmes_hpc.config.document"
    assert document.PAGE.read_text(encoding="utf-8") == document.page(), "run python -m holmes_hpc.config.document"


def test_no_file_of_the_configuration_is_written_by_hand() -> None:
    kept = {
        str(p.relative_to(document.PACKAGE / "generated_conf"))
        for p in (document.PACKAGE / "generated_conf").rglob("*.yaml")
    }
    assert kept == set(document.conf_files())


def test_what_hydra_composes_is_what_was_declared() -> None:
    assert load() == Configuration(MODELS["gpt_tiny"], BATCHES["tiny"])
    for name, model in MODELS.items():
        assert load([f"model={name}", "batch=tiny"]).model == model
    for name, batch in BATCHES.items():
        assert load([f"batch={name}"]).batch == batch


@pytest.mark.parametrize(
    ("model", "batch", "tokens"),
    [
        ("gpt_tiny", "tiny", 1024),
        ("gpt_3_6b", "paper_3_6b", 1536 * 1024),
        ("gpt_7_5b", "paper_7_5b", 3 << 20),
        ("gpt_39b", "paper_39b", 3 << 20),
        ("gpt3_175b", None, 3 << 20),
        ("llama2_7b", None, 4 << 20),
        ("llama3_70b", None, 4 << 20),
    ],
)
def test_a_named_model_brings_its_published_batch(model: str, batch: str | None, tokens: int) -> None:
    config = load([f"model={model}"])
    assert config.batch == BATCHES[batch or model] and config.batch.tokens == tokens
    assert config.batch.sequence_length <= config.model.max_positions
    assert load([f"model={model}", "batch.global_size=64"]).batch.global_size == 64
    assert load([f"model={model}", "batch=tiny"]).batch == BATCHES["tiny"]


def test_a_model_without_a_batch_of_its_own_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        document.conf_files()["model/gpt_tiny.yaml"].replace("gpt_tiny", "mine")
    )
    words = ["model=mine", f"hydra.searchpath=[file://{tmp_path}]"]
    message = r"batch: model mine has no default batch; give batch.global_size \(--global-batch\) and "
    with pytest.raises(ConfigError, match=message):
        load(words)
    with pytest.raises(ConfigError, match="no batch 'tny'; did you mean 'tiny'"):
        load([*words, "batch=tny"])
    whole = [*words, "batch.global_size=8", "batch.sequence_length=32"]
    assert load(whole).batch == Batch(8, 1, 32)
    assert load([*whole, "batch.micro_size=2"]).batch == Batch(8, 2, 32)


def test_only_a_model_for_trying_is_trained_on_random_tokens_unasked() -> None:
    assert load().with_data().data.kind == load(["model.name=mine"]).with_data().data.kind == "synthetic"
    with pytest.raises(ConfigError, match="no data are given"):
        load(["model.hidden=1024"]).with_data()
    with pytest.raises(ConfigError, match=r"no data are given for llama2_7b; give data=indexed .* or data=synthetic"):
        load(["model=llama2_7b"]).with_data()
    for word in ("data=synthetic", "data.kind=synthetic", "train.measure=true"):
        assert load(["model=llama2_7b", word]).with_data().data.kind == "synthetic"


def test_every_key_has_a_line_of_help() -> None:
    for cls in (Configuration, *GROUPS.values()):
        for key in keys(cls).values():
            assert key.spec.help or key.name in GROUPS, (cls, key.name)


@pytest.mark.parametrize("group", GROUPS)
def test_help_names_every_key_of_a_group(group: str) -> None:
    lines = document.help_text(group).splitlines()
    named = [line.strip().partition(":")[0] for line in lines if line.startswith(f"  {group}.")]
    assert named == [f"{group}.{name}" for name in keys(GROUPS[group])]
    assert max(map(len, lines[2:])) <= 80

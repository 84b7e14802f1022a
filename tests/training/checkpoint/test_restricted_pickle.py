"""Nothing that a checkpoint names is run, whoever wrote it and its checksums."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_pickle import Code
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint import restricted_pickle
from holmes_hpc.training.checkpoint.saved_weights import SavedWeights

NAME = "decoder.final_layernorm.weight"


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def saved(path: Path, **more: Any) -> Path:
    dcp.save({NAME: torch.arange(4.0), **more}, storage_writer=FileSystemWriter(path), no_dist=True)
    torch.save({"optimizer": {"lr": 0.1}}, path / "common.pt")
    return path


def rewritten(path: Path, change: Any) -> Path:
    """The checkpoint with another ``.metadata``."""
    held = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 (just written here)
    change(held)
    (path / ".metadata").write_bytes(pickle.dumps(held))
    return path


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    found = SavedWeights(saved(tmp_path / "saved", state={"host": torch.arange(3), "extra": io.BytesIO(b"")}))
    assert torch.equal(found[NAME], torch.arange(4.0)) and restricted_pickle.problem(tmp_path / "saved") is None


def test_metadata_that_names_code_runs_none(tmp_path: Path, ran: Path) -> None:
    path = rewritten(saved(tmp_path / "saved"), lambda held: setattr(held, "planner_data", Code(ran)))
    for read in (
        SavedWeights,
        lambda p: FileSystemReader(p).read_metadata(),
        lambda p: CachedMetadataFileSystemReader(p).read_metadata(),
    ):
        with pytest.raises((DataError, pickle.UnpicklingError), match=r"it names posix\.mkdir"):
            read(path)
    assert restricted_pickle.problem(path) == ".metadata: it names posix.mkdir, which no state is made of"
    assert not ran.exists()


@pytest.mark.parametrize("name", ["common.pt", "object"])
def test_an_object_that_names_code_runs_none(name: str, tmp_path: Path, ran: Path) -> None:
    path = saved(tmp_path / "saved", **({"bad": Code(ran)} if name == "object" else {}))
    if name == "common.pt":
        torch.save({"optimizer": Code(ran)}, path / name)
        assert restricted_pickle.problem(path) == "common.pt: it names posix.mkdir, which no state is made of"
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path / name, weights_only=False)  # whatever a library asks for
    else:
        with pytest.raises(CheckpointException, match="unsupported GLOBAL posix"):
            dcp.load({NAME: torch.zeros(4), "bad": None}, storage_reader=FileSystemReader(path), no_dist=True)
    assert not ran.exists()


@pytest.mark.parametrize("place", ["../other", "/etc/passwd", "..", ""])
def test_pieces_lie_in_the_checkpoint(place: str, tmp_path: Path) -> None:
    def move(held: Any) -> None:
        for info in held.storage_data.values():
            info.relative_path = place

    with pytest.raises(DataError, match="outside of the checkpoint"):
        SavedWeights(rewritten(saved(tmp_path / "saved"), move))


@pytest.mark.parametrize("held", [7, None, {"state_dict_metadata": {}}, [[]]])
def test_metadata_of_something_else(held: Any, tmp_path: Path) -> None:
    (saved(tmp_path / "saved") / ".metadata").write_bytes(pickle.dumps(held))
    with pytest.raises(DataError, match="it describes no checkpoint"):
        SavedWeights(tmp_path / "saved")


def test_a_tensor_larger_than_any_memory_is_one_line(tmp_path: Path) -> None:
    def grow(held: Any) -> None:
        tensor = held.state_dict_metadata[NAME]
        tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 50])

    found = SavedWeights(rewritten(saved(tmp_path / "saved"), grow))
    with pytest.raises(DataError, match="cannot be read"):
        found[NAME]


def test_what_layers_keep_beside_their_weights(ran: Path) -> None:
    def bytes_of(state: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    good = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"count": 2}}
    restricted_pickle.check_extra_states(
        {
            "mlp._extra_state": bytes_of(good),
            "norm._extra_state": io.BytesIO(),
            "none._extra_state": None,
            "weight": torch.ones(2),
        },
        "here",
    )
    for bad in (bytes_of(Code(ran)), io.BytesIO(pickle.dumps(Code(ran)))):
        with pytest.raises(DataError, match=r"it names posix\.mkdir"):
            restricted_pickle.check_extra_states({"mlp._extra_state": bad}, "here")
    assert not ran.exists()


def test_the_environment_does_not_undo_it(tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    restricted_pickle.enforce()
    torch.save(Code(ran), tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "bad.pt", weights_only=False)
    assert not ran.exists()

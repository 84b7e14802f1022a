"""Loading a checkpoint never executes code, whoever wrote it and its checksums."""

from __future__ import annotations

import io
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_pickle import Code
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType

from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint import restricted_pickle
from holmes_hpc.training.checkpoint.weights_for_export import SavedWeights

pytestmark = pytest.mark.integration  # a checkpoint's pickles are first read in a fork

NAME = "decoder.final_layernorm.weight"
FOUR_GIB = b"\x80\x02Nr\x00\x00\x00\x10."  # in place 2^28 of its list of objects


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return a path that exists only if the malicious pickle was executed."""
    return tmp_path / "executed"


def save(path: Path, **extra: Any) -> Path:
    dcp.save({NAME: torch.arange(4.0), **extra}, storage_writer=FileSystemWriter(path), no_dist=True)
    torch.save({"optimizer": {"lr": 0.1}}, path / "common.pt")
    return path


def change_metadata(path: Path, change: Any) -> Path:
    """Apply `change` to the checkpoint's ``.metadata``; return `path`."""
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 (this test wrote it)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_valid_checkpoint_is_read(tmp_path: Path) -> None:
    weights = SavedWeights(save(tmp_path / "saved", state={"host": torch.arange(3), "extra": io.BytesIO(b"")}))
    assert torch.equal(weights[NAME], torch.arange(4.0)) and restricted_pickle.find_problem(tmp_path / "saved") is None


class Getattr:
    """An object that is pickled as ``getattr(owner, name)``."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner_and_name = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._owner_and_name


def test_a_member_of_an_enumeration_may_be_pickled_as_getattr(tmp_path: Path) -> None:
    """Python 3.11.2 does so."""
    member = Getattr(WriteItemType, "TENSOR")
    path = change_metadata(save(tmp_path / "saved"), lambda metadata: setattr(metadata, "planner_data", member))
    assert restricted_pickle.read_metadata(path).planner_data is WriteItemType.TENSOR
    for owner, name in ((WriteItemType, "mro"), (torch.Size, "numel")):
        change_metadata(path, lambda metadata, o=owner, n=name: setattr(metadata, "planner_data", Getattr(o, n)))
        with pytest.raises(pickle.UnpicklingError, match="which is not allowed"):
            restricted_pickle.read_metadata(path)


def test_code_in_metadata_is_not_executed(tmp_path: Path, marker: Path) -> None:
    path = change_metadata(save(tmp_path / "saved"), lambda metadata: setattr(metadata, "planner_data", Code(marker)))
    for read in (
        SavedWeights,
        lambda p: FileSystemReader(p).read_metadata(),
        lambda p: CachedMetadataFileSystemReader(p).read_metadata(),
    ):
        with pytest.raises((DataError, pickle.UnpicklingError), match=r"its pickle refers to posix\.mkdir"):
            read(path)
    assert restricted_pickle.find_problem(path) == ".metadata: its pickle refers to posix.mkdir, which is not allowed"
    assert not marker.exists()


@pytest.mark.parametrize("name", ["common.pt", "object"])
def test_code_in_an_object_is_not_executed(name: str, tmp_path: Path, marker: Path) -> None:
    path = save(tmp_path / "saved", **({"bad": Code(marker)} if name == "object" else {}))
    if name == "common.pt":
        torch.save({"optimizer": Code(marker)}, path / name)
        assert (
            restricted_pickle.find_problem(path) == "common.pt: its pickle refers to posix.mkdir, which is not allowed"
        )
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path / name, weights_only=False)  # the request for an unsafe load is ignored
    else:
        with pytest.raises(CheckpointException, match="unsupported GLOBAL posix"):
            dcp.load({NAME: torch.zeros(4), "bad": None}, storage_reader=FileSystemReader(path), no_dist=True)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"garbage", pickle.dumps(print, 4), pickle.dumps({"a": 1}, 5)])
def test_message_does_not_repeat_torchs_advice_to_load_code(content: bytes, tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    (path / "common.pt").write_bytes(content)
    problem = restricted_pickle.find_problem(path)
    assert problem is not None and problem.startswith("common.pt: it ")
    assert "weights_only" not in problem and "Re-running" not in problem


@pytest.mark.parametrize("file", ["../other", "/etc/passwd", "..", ""])
def test_metadata_that_refers_to_files_outside_the_checkpoint_is_refused(file: str, tmp_path: Path) -> None:
    def move(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = file

    with pytest.raises(DataError, match="outside the checkpoint"):
        SavedWeights(change_metadata(save(tmp_path / "saved"), move))


@pytest.mark.parametrize("content", [7, None, {"state_dict_metadata": {}}, [[]]])
def test_metadata_of_another_type_is_refused(content: Any, tmp_path: Path) -> None:
    (save(tmp_path / "saved") / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="it describes no checkpoint"):
        SavedWeights(tmp_path / "saved")


def test_tensor_larger_than_memory_is_refused(tmp_path: Path) -> None:
    def grow(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata[NAME]
        tensor.size = tensor.chunks[0].sizes = torch.Size([1 << 50])

    with pytest.raises(DataError, match=r"has 1,125,899,906,842,624 elements in [0-9,]+ bytes of files"):
        SavedWeights(change_metadata(save(tmp_path / "saved"), grow))


@pytest.mark.parametrize("attack", ["nested keys", "4 GiB", "pipe", "endless"])
def test_metadata_that_takes_for_ever_is_refused(attack: str, tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    file = path / ".metadata"
    file.unlink()
    if attack == "nested keys":  # a key whose hash takes 2^60 steps: {((…, …), (…, …)): None}
        pairs = b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60))
        file.write_bytes(b"\x80\x02})" + pairs + b"Ns.")
    elif attack == "4 GiB":
        file.write_bytes(FOUR_GIB)
    elif attack == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    reason = {"nested keys": "reading it takes too long", "4 GiB": "MemoryError"}.get(attack, "Not a file")
    started = time.monotonic()
    with pytest.raises(DataError, match=reason):
        SavedWeights(path)
    assert reason in (restricted_pickle.find_problem(path) or "") and time.monotonic() - started < 20


def test_a_pipe_in_the_place_of_tensors_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "saved")
    data = next(path.glob("*.distcp"))
    (path / "large").write_bytes(bytes(1 << 20))  # so that the tensors could fit into the files
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(DataError, match=f"{data.name} is not a file"):
        SavedWeights(path)


def test_code_in_extra_states_is_refused(marker: Path) -> None:
    def pickled(state: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    valid = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"count": 2}}
    restricted_pickle.check_extra_states(
        {
            "mlp._extra_state": pickled(valid),
            "norm._extra_state": io.BytesIO(),
            "none._extra_state": None,
            "weight": torch.ones(2),
        },
        "here",
    )
    for malicious in (pickled(Code(marker)), io.BytesIO(pickle.dumps(Code(marker)))):
        with pytest.raises(DataError, match=r"its pickle refers to posix\.mkdir"):
            restricted_pickle.check_extra_states({"mlp._extra_state": malicious}, "here")
    assert not marker.exists()
    with pytest.raises(DataError, match=r"fp8 state of mlp\._extra_state cannot be read: MemoryError"):
        restricted_pickle.check_extra_states({"mlp._extra_state": io.BytesIO(FOUR_GIB)}, "here")


def test_environment_cannot_disable_the_restriction(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    restricted_pickle.enforce()
    torch.save(Code(marker), tmp_path / "malicious.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "malicious.pt", weights_only=False)
    assert not marker.exists()

"""The checkpoint directories of a run: find complete ones, complete new ones, remove old ones.

A checkpoint is a directory ``checkpoints/step-00000120``. It gets this name by one rename, after all its files were
written and synced. Its ``holmes.json`` describes it and lists its files with sizes and CRC-32 (file_checksums.py).
Directories named ``.saving-…`` are unfinished and never loaded. This module does not import torch, since
`holmes resume` uses it. save_and_load.py chooses the checkpoint that a run loads.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from holmes_hpc.config.model import Experts, ModelSpec
from holmes_hpc.errors import DataError, RunFailed
from holmes_hpc.records.files import DISK_FULL, write_whole
from holmes_hpc.records.untrusted import from_json, read_file
from holmes_hpc.schema import keys
from holmes_hpc.waiting import attempts

DESCRIPTION = "holmes.json"
METADATA_FILE = ".metadata"  # PyTorch's index of the saved tensors
IMPORTED = "hugging_face"  # key in holmes.json of `holmes import`; such a directory needs no step in its name
# The keys of a model, and of its experts, that change neither the shapes nor the use of the weights.
_NOT_IDENTITY = ("name", "max_positions", "dropout", "norm_eps", "balance", "z_loss", "capacity", "per_sequence")
_NAME = re.compile(r"step-(\d{8,})\Z")
_FileName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\.\.?\Z)[^/\0]+\Z")]  # without a path
_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` steps. `description`: the content of holmes.json."""

    step: int
    path: Path
    description: Mapping[str, Any]


def create_folder(folder: Path, checkpoint_dir: str | None) -> None:
    """Create a run's checkpoint folder; with `checkpoint_dir`, as a link to CHECKPOINT_DIR/RUN_NAME.
    A folder with checkpoints stays where it is. RunFailed if a link leads nowhere, or a new link's target has files."""
    if folder.is_symlink():
        if not folder.is_dir():
            problem = f"this link points to {os.readlink(folder)}, which does not exist"
            hint = "mount that file system on this node, or remove the link"
            raise RunFailed(problem, where=str(folder), hint=hint)
        return
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if checkpoint_dir is None or any(folder.iterdir()):
            return
        target = Path(checkpoint_dir).absolute() / folder.resolve().parent.name
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        if any(target.iterdir()):
            hint = "set train.checkpoint_dir to another folder, or rename the run"
            raise RunFailed("the directory is not empty", where=str(target), hint=hint)
        folder.rmdir()
        folder.symlink_to(target)
    except OSError as e:
        raise write_error(Path(e.filename or folder), e) from e


def directory_name(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_path(folder: Path, step: int, attempt: int) -> Path:
    """Return the directory to which an attempt writes until the checkpoint is complete.
    Each attempt has its own directory, since the writer of a killed attempt may still be running."""
    return folder / f".saving-{directory_name(step)}-{attempt}"


def check_identity(saved: Mapping[str, Any], model: ModelSpec, where: str) -> None:
    """Raise DataError if `model` cannot use the weights of the `saved` model (plain data)."""
    defaults = {k: d.default for k, d in keys(ModelSpec).items()}

    def identity(values: Mapping[str, Any]) -> dict[str, Any]:  # old checkpoints lack new keys
        experts = {**asdict(Experts()), **values.get("experts", {})}
        flat = {**defaults, **values, "experts": None, **{f"experts.{k}": v for k, v in experts.items()}}
        return {k: v for k, v in flat.items() if k.split(".")[-1] not in _NOT_IDENTITY}

    saved, expected, hint = identity(saved), identity(asdict(model)), "use a plan for the model that was trained"
    for key in expected:
        problem = f"checkpoint has {key}={saved[key]}, plan has {key}={expected[key]}"
        DataError.refuse(where, (saved[key] != expected[key], problem, hint))


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in `folder`, the latest first."""
    return [Checkpoint(step, path, c) for step, path, c in _named_directories(folder) if not isinstance(c, str)]


def require_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in `folder`, the latest first. Raise DataError if there is none."""
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        for path, problem in incomplete_checkpoints(folder):
            raise DataError(f"the checkpoint is incomplete ({problem})", where=str(path), hint="restore it from a copy")
        hint = "set train.checkpoint_interval=N to save checkpoints"
        raise DataError("no complete checkpoint", where=str(folder), hint=hint)
    return checkpoints


def incomplete_checkpoints(folder: Path) -> list[tuple[Path, str]]:
    """Return (directory, problem) of each directory that has a checkpoint's name but is incomplete, the latest first.
    For example, a copy was interrupted, or the description is damaged."""
    return [(path, problem) for _, path, problem in _named_directories(folder) if isinstance(problem, str)]


def _named_directories(folder: Path) -> list[tuple[int, Path, dict[str, Any] | str]]:
    """Return (step, path, :func:`_read_description`) of each directory with a checkpoint's name, the latest first."""
    steps: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        steps = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return [(step, path, _read_description(path)) for step, path in sorted(steps, reverse=True)]


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in directory `path`. Raise DataError if there is no complete checkpoint."""
    match, description = _NAME.match(path.resolve().name), _read_description(path)
    if isinstance(description, str) or (match is None and not description.get(IMPORTED)):
        problem = f" ({description})" if isinstance(description, str) else ""
        hint = f"give a run's directory checkpoints/step-…, or one of `holmes import`, with its {DESCRIPTION}"
        raise DataError(f"not a complete checkpoint{problem}", where=str(path), hint=hint)
    return Checkpoint(int(match[1]) if match else 0, path, description)


def wait_for_checkpoint(path: Path, timeout_s: float = 30) -> Checkpoint | None:
    """Return the checkpoint in `path`, which another node already sees. Wait for it; return None after `timeout_s`."""
    for _ in attempts(timeout_s, 0.2):
        with contextlib.suppress(DataError):
            return open_checkpoint(path)
    return None


def _read_description(path: Path) -> dict[str, Any] | str:
    """Return the content of holmes.json, or the problem as text."""
    try:
        content = from_json(read_file(path / DESCRIPTION))
    except OSError as e:
        return f"{DESCRIPTION}: {e.strerror}"
    except ValueError:
        return f"{DESCRIPTION} is damaged"
    if not isinstance(content, dict) or not all(isinstance(content.get(k, {}), dict) for k in ("model", "parallel")):
        return f"{DESCRIPTION} is damaged"
    try:
        files = msgspec.convert(content.get("files"), dict[_FileName, tuple[_Count, _Count]])  # name -> size, CRC-32
    except msgspec.ValidationError:
        return f"{DESCRIPTION} lists no files with sizes and checksums"
    if METADATA_FILE not in files and not content.get(IMPORTED):
        return f"{DESCRIPTION} does not list {METADATA_FILE}"
    named_step = _NAME.match(path.resolve().name)
    if named_step is not None and content.get("step", int(named_step[1])) != int(named_step[1]):
        return f"{DESCRIPTION} is of step {content.get('step')}"
    return content


def finish(unfinished: Path, step: int, description: Mapping[str, Any], files: Mapping[str, tuple[int, int]]) -> Path:
    """Complete the checkpoint in `unfinished`: write its description, sync it and rename it. Return its final path.
    A checkpoint of the same step is replaced. `files`: name -> (size, CRC-32)."""
    folder = unfinished.parent
    target = folder / directory_name(step)
    try:
        write_whole(unfinished / DESCRIPTION, json.dumps({**description, "step": step, "files": files}, indent=1))
        _sync(unfinished)
        if target.exists():  # An earlier attempt's, or damaged. Renamed first, so that one of the two always exists.
            old = folder / f".old-{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(unfinished, target)
        _sync(folder)
    except OSError as e:
        raise write_error(target, e) from e
    shutil.rmtree(folder / f".old-{target.name}", ignore_errors=True)
    return target


def write_error(path: Path, error: OSError) -> RunFailed:
    """Return a RunFailed for a file system error. `path`: the checkpoint, or the folder of all checkpoints."""
    hint = "make it writable"
    if error.errno in DISK_FULL:
        checkpoints = complete_checkpoints(path) or complete_checkpoints(path.parent)
        continuation = f"`holmes resume` the run from step {checkpoints[0].step}" if checkpoints else "run it again"
        hint = f"free some space, then {continuation}"
    return RunFailed(f"cannot write the checkpoint: {error.strerror or error}", where=str(path), hint=hint)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all complete checkpoints but the latest `keep`. Return the steps of the removed ones."""
    old = complete_checkpoints(folder)[keep:]
    for checkpoint in old:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
    return [checkpoint.step for checkpoint in old]


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished checkpoints, and restore one whose replacement was interrupted. No process may be writing."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith((".saving-", ".old-")):
                if path.name.startswith(".old-") and not (folder / path.name[5:]).exists():
                    os.rename(path, folder / path.name[5:])  # killed between the two renames of finish()
                else:
                    shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

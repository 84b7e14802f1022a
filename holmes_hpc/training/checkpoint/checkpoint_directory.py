"""The checkpoints of a run as files: which are complete, whether their bytes are what was written, which are old.

No torch: `holmes resume` and `export` ask too. A checkpoint is a directory ``checkpoints/step-00000120`` that got this
name in one rename when everything in it was written and synced; ``holmes.json`` in it says what it is, and lists its
files with their sizes and CRC-32. Whatever else lies there (``.saving-…``) is unfinished and never picked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.errors import DataError, RunFailed
from holmes_hpc.records.files import write_whole
from holmes_hpc.schema import keys, refuse

DESCRIPTION = "holmes.json"
STRUCTURE = ".metadata"  # where every piece of the state lies; PyTorch's
IMPORTED = "hugging_face"  # says in a description that it is of a folder of `holmes import`, under any name
# A model's identity: what its weights' shapes and their use depend on.
_IDENTITY = (
    "layers",
    "hidden",
    "heads",
    "vocab",
    "ffn",
    "kv_heads",
    "swiglu",
    "rmsnorm",
    "rope",
    "tied",
    "bias",
    "vocab_multiple",
    "rope_base",
    "head_dim",
    "qk_norm",
    "qkv_bias",
    "gelu_tanh",
    "rope_scaling",
)
_NAME = re.compile(r"step-(\d{8,})\Z")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step` steps. `about`: what holmes.json says."""

    step: int
    path: Path
    about: Mapping[str, Any]


def place(folder: Path, elsewhere: str | None) -> None:
    """Before the first checkpoint of a run goes into `folder`: where `elsewhere` is given, make `folder` a link to a
    folder of the run's name there. A run that has checkpoints keeps its place. RunFailed where the place is not there,
    or is another run's."""
    if folder.is_symlink():
        if not folder.is_dir():
            raise RunFailed(
                f"it is a link to {os.readlink(folder)}, which is not there",
                where=str(folder),
                hint="mount that file system on this node, or remove the link",
            )
        return
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if elsewhere is None or any(folder.iterdir()):
            return
        target = Path(elsewhere).absolute() / folder.resolve().parent.name
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise RunFailed(
                "other files are there",
                where=str(target),
                hint="give train.checkpoint_dir another folder, or the run another name",
            )
        folder.rmdir()
        folder.symlink_to(target)
    except OSError as e:
        raise failed(Path(e.filename or folder), e) from e


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_path(folder: Path, step: int, attempt: int) -> Path:
    """Where an attempt writes a checkpoint before it is complete: a killed attempt's writer may still be at work."""
    return folder / f".saving-{name_of(step)}-{attempt}"


def check_identity(saved: Mapping[str, Any], model: ModelSpec, where: str) -> None:
    """Raise DataError when the model that was `saved` (plain data) is another one than `model`."""
    own, at_first = asdict(model), {k: d.default for k, d in keys(ModelSpec).items()}
    saved, hint = {**at_first, **saved}, "use a plan for the model that was trained"  # older ones lack later keys
    refuse(
        where,
        *(
            (saved[name] != own[name], f"it is of a model with {name} {saved[name]}, the plan's has {own[name]}", hint)
            for name in _IDENTITY
        ),
        error=DataError,
    )


def complete(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in `folder`, the latest first."""
    return [
        Checkpoint(step, path, about)
        for step, path in sorted(_named(folder), reverse=True)
        if not isinstance(about := _describe(path), str)
    ]


def newest(folder: Path) -> Checkpoint:
    """The latest complete checkpoint in `folder`; DataError where there is none."""
    found = complete(folder)
    if not found:
        raise DataError(
            "no complete checkpoint", where=str(folder), hint="train with train.checkpoint_interval=N, which keeps some"
        )
    return found[0]


def passed_over(folder: Path) -> list[tuple[Path, str]]:
    """What has a checkpoint's name in `folder` and is none, the latest first, each with what is wrong: half copied, or
    its description is damaged."""
    return [
        (path, about) for _, path in sorted(_named(folder), reverse=True) if isinstance(about := _describe(path), str)
    ]


def _named(folder: Path) -> list[tuple[int, Path]]:
    with contextlib.suppress(OSError):
        return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    return []


def at(path: Path) -> Checkpoint:
    """The checkpoint that is `path`. DataError when it is none, or not complete."""
    match, about = _NAME.match(path.resolve().name), _describe(path)
    if isinstance(about, str) or (match is None and not about.get(IMPORTED)):
        why = f" ({about})" if isinstance(about, str) else ""
        raise DataError(
            f"not a complete checkpoint{why}",
            where=str(path),
            hint=f"give a directory checkpoints/step-… of a run, or one of `holmes import`, with its {DESCRIPTION}",
        )
    return Checkpoint(int(match[1]) if match else 0, path, about)


def seen(path: Path, patience_s: float = 30) -> Checkpoint | None:
    """The checkpoint that is `path`, which another node sees; None when it does not show here in time."""
    until = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(DataError):
            return at(path)
        if time.monotonic() > until:
            return None
        time.sleep(0.2)


def _describe(path: Path) -> dict[str, Any] | str:
    """What holmes.json says; in words why it is none that describes a checkpoint."""
    try:
        about = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except OSError as e:
        return f"{DESCRIPTION}: {e.strerror}"
    except (ValueError, RecursionError):
        return f"{DESCRIPTION} is damaged"
    if not isinstance(about, dict) or not all(isinstance(about.get(key, {}), dict) for key in ("model", "parallel")):
        return f"{DESCRIPTION} is damaged"
    files = about.get("files")
    if not isinstance(files, dict) or not all(map(_is_file, files, files.values())):
        return f"{DESCRIPTION} names no files with their sizes and checksums"
    if STRUCTURE not in files and not about.get(IMPORTED):
        return f"{DESCRIPTION} does not name {STRUCTURE}"
    return about


def _is_file(name: str, said: Any) -> bool:
    """Whether a file is named that can only lie in the checkpoint, with its size and its CRC-32."""
    return (
        os.path.basename(name) == name
        and name not in ("", ".", "..")
        and "\0" not in name
        and isinstance(said, list)
        and len(said) == 2
        and all(type(number) is int and number >= 0 for number in said)
    )


def checksum(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    crc, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return size, crc


def damage(checkpoint: Checkpoint, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, None when nothing is. With `shares` readers each reads its own."""
    for name, (size, crc) in sorted(checkpoint.about["files"].items())[share::shares]:
        try:
            if os.stat(checkpoint.path / name).st_size != size:
                return f"{name} is not {size} bytes long"
            if checksum(checkpoint.path / name)[1] != crc:
                return f"{name} has other bytes than were written"
        except OSError as e:
            return f"{name}: {e.strerror}"
    return None


def finish(unfinished: Path, step: int, about: Mapping[str, Any], files: Mapping[str, tuple[int, int]]) -> Path:
    """Make a written checkpoint count: describe it, sync it, give it its name. Replaces one of the same step."""
    folder = unfinished.parent
    target = folder / name_of(step)
    try:
        write_whole(unfinished / DESCRIPTION, json.dumps({**about, "step": step, "files": files}, indent=1))
        _sync(unfinished)
        if target.exists():  # of an earlier attempt, or damaged: set aside first, so that there is always one of them
            old = folder / f".old-{target.name}"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(unfinished, target)
        _sync(folder)
    except OSError as e:
        raise failed(target, e) from e
    shutil.rmtree(folder / f".old-{target.name}", ignore_errors=True)
    return target


def failed(path: Path, error: OSError) -> RunFailed:
    """An error of the file system as one line."""
    hint = "free some space, then `holmes resume` the run" if error.errno in (28, 122) else "make it writable"
    return RunFailed(f"the checkpoint could not be written: {error.strerror or error}", where=str(path), hint=hint)


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all complete checkpoints but the latest `keep`; the steps of those removed."""
    old = complete(folder)[keep:]
    for checkpoint in old:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
    return [checkpoint.step for checkpoint in old]


def sweep(folder: Path) -> None:
    """Remove unfinished checkpoints; nobody may be writing one."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith((".saving-", ".old-")):
                if path.name.startswith(".old-") and not (folder / path.name[5:]).exists():
                    os.rename(path, folder / path.name[5:])  # killed between two renames: it is still the good one
                else:
                    shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

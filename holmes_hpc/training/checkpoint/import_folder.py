"""`holmes import`: a Hugging Face folder as a checkpoint of its own, every weight looked at once.

Its files stay safetensors, which belong to no layout, beside a description with their checksums.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint import checkpoint_directory
from holmes_hpc.training.checkpoint.hugging_face_folder import INDEX, SMALL, Folder, FolderWeights


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    path: str
    model: str
    parameters: int
    files: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.model}: {self.parameters:,} parameters in {self.files} file{'s' * (self.files > 1)}, in "
            f"{self.path}; begin with them by model=hf:{self.path} checkpoint={self.path}"
        )


def import_folder(source: Path, out: Path) -> Imported:
    """Copy the folder `source` to `out`, which must not exist or be empty; it appears complete or not at all.

    DataError for whatever is wrong with it (:class:`Folder`), and for weights that are no numbers.
    """
    folder = Folder(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError("it exists and is not an empty directory", where=str(out), hint="choose another directory")
    weights = FolderWeights(folder)
    for name in weights:
        weights[name]  # read once: DataError where it holds what is no number
    folder.close()
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        small = [source / name for name in (*SMALL, INDEX) if (source / name).is_file()]
        files = {}
        for path in (*folder.files, *small):
            shutil.copyfile(path, temporary / path.name)
            files[path.name] = list(checkpoint_directory.checksum(temporary / path.name))
        about = {checkpoint_directory.IMPORTED: True, "step": 0, "model": folder.model.to_dict(), "files": files}
        (temporary / checkpoint_directory.DESCRIPTION).write_text(json.dumps(about, indent=1), encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as e:
        raise DataError(
            e.strerror or str(e),
            where=str(e.filename or out),
            hint="choose a directory that can be written and has the space",
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Imported(str(out), folder.model.name, folder.parameters, len(folder.files))

"""The sizes and CRC-32 of a checkpoint's files: computed, passed from each rank's writer to rank 0, and verified."""

import contextlib
import json
import os
import zlib
from pathlib import Path

from holmes_hpc.records.untrusted import open_file
from holmes_hpc.training.checkpoint.checkpoint_directory import Checkpoint

SizeAndCrc = tuple[int, int]


def checksum(path: Path) -> SizeAndCrc:
    """Return the size and CRC-32 of a file."""
    crc, size = 0, 0
    with open_file(path) as file:
        while block := file.read(1 << 22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return size, crc


def write_checksums(folder: Path, rank: int) -> None:
    """Write the checksums of a rank's files to ``.crc-RANK.json``, unless the disk is full."""
    checksums = {path.name: checksum(path) for path in folder.glob(f"__{rank}_*")}
    with contextlib.suppress(OSError):  # the writer itself reports a full disk
        (folder / f".crc-{rank}.json").write_text(json.dumps(checksums))


def collect_checksums(folder: Path) -> dict[str, SizeAndCrc]:
    """Return {file: (size, CRC-32)} of all files in `folder`. Each ``.crc-RANK.json`` is used, and removed."""
    checksums: dict[str, SizeAndCrc] = {}
    for path in sorted(folder.glob(".crc-*.json")):
        checksums.update({name: (size, crc) for name, (size, crc) in json.loads(path.read_text()).items()})
        path.unlink()
    return checksums | {path.name: checksum(path) for path in folder.iterdir() if path.name not in checksums}


def find_damage(checkpoint: Checkpoint, reader: int = 0, readers: int = 1) -> str | None:
    """Return the first problem of a checkpoint's files, or None.
    Each of `readers` processes, of which this is number `reader`, checks a share of the files."""
    for name, (size, crc) in sorted(checkpoint.description["files"].items())[reader::readers]:
        try:
            if os.stat(checkpoint.path / name).st_size != size:
                return f"{name} is not {size} bytes long"
            if checksum(checkpoint.path / name)[1] != crc:
                return f"{name} has a wrong checksum"
        except OSError as e:
            return f"{name}: {e.strerror}"
    return None

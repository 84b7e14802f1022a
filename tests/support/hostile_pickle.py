"""A pickle that runs code when it is read: the proof that a reader does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Code:
    """A pickle of this makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)

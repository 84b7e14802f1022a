"""A pickle that runs code when it is loaded, to prove that a reader does not load it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Code:
    """An object whose pickle creates a folder when loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)

"""Builds wheels and source distributions: a plain hatchling build, and the commit that it was made from."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHERE = "holmes_hpc/COMMIT"


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the commit: the checkout's, or what a source distribution has brought; at one place in the archive."""
        root = Path(self.root)
        if version == "editable":
            return
        if (root / WHERE).exists():
            build_data["force_include"][str(root / WHERE)] = WHERE
            return
        commit = runpy.run_path(str(root / "holmes_hpc" / "commit.py"))["checkout_commit"](root)
        if commit:
            self._file = tempfile.NamedTemporaryFile("w", suffix="COMMIT")  # noqa: SIM115 (closed with the hook)
            self._file.write(commit + "\n")
            self._file.flush()
            build_data["force_include"][self._file.name] = WHERE

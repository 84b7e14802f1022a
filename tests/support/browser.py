"""A headless chromium, controlled by the WebDriver protocol over plain HTTP, without a package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

DRIVERS = ("chromedriver", "chromium.chromedriver")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Return the reason why no browser can start; None if one can."""
    if not any(map(shutil.which, BROWSERS)) or not any(map(shutil.which, DRIVERS)):
        return "no browser on this machine: page not tested (Debian: apt install chromium chromium-driver)"
    return None


class Browser:
    """A page of `width` x `height` CSS pixels on a device with `ratio` device pixels each."""

    def __init__(self, width: int, height: int, ratio: float = 1.0) -> None:
        driver = next(filter(None, map(shutil.which, DRIVERS)))
        binary = next(filter(None, map(shutil.which, BROWSERS)))
        # The browser leaves files, including a socket, whose path must be short.
        self._temporary = tempfile.TemporaryDirectory(prefix="browser-", dir="/tmp", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": self._temporary.name}
        )
        assert self._process.stdout
        matches = (re.search(r"successfully on port (\d+)", line) for line in self._process.stdout)
        port = next(match.group(1) for match in matches if match)
        self._url = f"http://127.0.0.1:{port}/session"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        metrics = {"width": width, "height": height, "pixelRatio": ratio, "mobile": True, "touch": True}
        capabilities = {
            "goog:chromeOptions": {"binary": binary, "args": arguments, "mobileEmulation": {"deviceMetrics": metrics}},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self._call("POST", "", {"capabilities": {"alwaysMatch": capabilities}})
        self._url += "/" + session["sessionId"]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def open(self, path: Path) -> None:
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def script(self, text: str) -> Any:
        return self._call("POST", "/execute/sync", {"script": text, "args": []})

    def console(self) -> list[str]:
        """Return the console's messages so far: errors, warnings, violations of the page's policy."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Return every URL requested so far."""
        events = [json.loads(e["message"])["message"] for e in self._call("POST", "/se/log", {"type": "performance"})]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait()
            self._temporary.cleanup()

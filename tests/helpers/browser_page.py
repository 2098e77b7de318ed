"""A page in a real browser."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom"),
]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def browse(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as Chromium has built it, and what it wrote to its console."""
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]

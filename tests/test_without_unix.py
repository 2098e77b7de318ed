"""The local runtime needs nothing that Windows lacks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, subprocess, sys
from types import SimpleNamespace

for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None  # its import is an error
import flwr.app, flwr.serverapp, grpc, scipy.stats, sklearn.datasets, torch  # they look where they are

sys.modules["msvcrt"] = SimpleNamespace(LK_NBLCK=2, locking=lambda *_: None)
for name in (
    "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "chown", "fchmod", "fork", "geteuid", "getloadavg", "getpgid",
    "getuid", "killpg", "nice", "pread", "pwrite", "sched_getaffinity", "setsid", "statvfs", "sysconf", "uname",
):
    delattr(os, name)
import perennial

perennial.run("ditto", "colored-digits", rounds=2, settings={"checkpoint_every": 1}, out="run")
"""


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2
    assert (tmp_path / "run" / "checkpoint" / "round-2").is_dir()

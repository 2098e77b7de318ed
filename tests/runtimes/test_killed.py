"""A run that dies with -9 at any moment continues to the arrays of a run that never stopped."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perennial.common.config import load_config
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.methods import assert_same

ROUNDS = 60
COMMAND = [sys.executable, "-c", "from perennial.server.cli.main import main; main()"]


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    settings = ["checkpoint_every=3", "evaluate_every=4", "participation=0.5", "batch_size=16"]
    config = load_config(options={"method": "ditto", "rounds": ROUNDS}, settings=settings)
    LocalRuntime(config).run(RunFolder.create(tmp_path / "unbroken", config))

    path = tmp_path / "killed"
    arguments = ["run", "--method", "ditto", "--rounds", str(ROUNDS), "--out", str(path)]
    for setting in settings:
        arguments += ["--set", setting]
    moment = random.Random(0)
    for _ in range(3):
        before = RunFolder(path).checkpoints() if path.exists() else []
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None and (not path.exists() or RunFolder(path).checkpoints() == before):
            time.sleep(0.02)
        time.sleep(moment.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        arguments = ["resume", str(path)]
    if (path / "summary.json").exists():
        pytest.fail("the run ended before it could be killed; make it longer")
    subprocess.run([*COMMAND, *arguments], check=True, capture_output=True)
    assert_same(tmp_path / "unbroken", path)

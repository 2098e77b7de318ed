"""Time a comparison of three methods with three seeds on all cores against one run after another.

    uv run python benchmarks/parallel.py [--rounds N]

Both make the same nine runs from nothing, in fresh folders, and their rows are compared before any figure is
printed. Start-up counts: every worker imports PyTorch once, so short runs gain less than long ones.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

from perennial.common.flower.processes import program
from perennial.server.study.batch import cores


def timed(rounds: int, jobs: int) -> tuple[float, object]:
    """Wall seconds of the whole command, and the rows that it made."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            program("perennial"),
            "compare",
            "--methods",
            "ditto,fedavg,local",
            "--scenario",
            "colored-digits",
        ]
        command += ["--seeds", "3", "--rounds", str(rounds), "--jobs", str(jobs), "--out", out, "--json"]
        begun = time.monotonic()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return time.monotonic() - begun, json.loads(done.stdout)["rows"]


def main() -> None:
    """Print wall seconds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    jobs = cores()
    together, rows = timed(rounds, jobs)
    in_turn, same_rows = timed(rounds, 1)
    if rows != same_rows:
        sys.exit("the two comparisons differ; nothing to time")
    table = Table("jobs", "wall seconds", "ratio", title=f"9 runs of {rounds} rounds on {jobs} cores")
    table.add_row("1", f"{in_turn:.1f}", "1.00")
    table.add_row(str(jobs), f"{together:.1f}", f"{together / in_turn:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

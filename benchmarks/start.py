"""What it costs to start the command line: CPU time, user and system, beside that of `import torch`.

    python benchmarks/start.py [REPEATS]

The least of all repeats counts, since other work on the machine only adds. The first start of each, which writes
Python's bytecode, is not counted.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

START = "from perennial.server.cli.main import main; main()"
CASES = {
    "perennial --help": ["-c", START, "--help"],
    "perennial list methods": ["-c", START, "list", "methods"],
    "perennial show method ditto": ["-c", START, "show", "method", "ditto"],
    "perennial run --set nonsense=1": ["-c", START, "run", "--set", "nonsense=1"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        print("| command | CPU seconds |")
        print("|---|---:|")
        for name, arguments in CASES.items():
            command = [sys.executable, *arguments]
            seconds(command, environment)
            print(f"| `{name}` | {min(seconds(command, environment) for _ in range(repeats)):.2f} |", flush=True)


if __name__ == "__main__":
    main()

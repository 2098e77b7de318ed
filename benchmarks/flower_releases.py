"""What works with which release of Flower: a table, each release in an environment of its own.

    python benchmarks/flower_releases.py [--releases 1.34.0,1.42.0] [--envs FOLDER] [--short]

All numbers are compared with those of the first release's local run. Needs `uv`, the registry or its cache, and
half a gigabyte for each environment beyond PyTorch, which all share by links. `--envs` keeps the environments.
With `--short` it tries the environment that it runs in: what `.ci/build` does with the newest release.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASES = "1.34.0,1.36.0,1.38.0,1.40.0,newest"
TOOLS = ("pytest>=8.3,<10", "hypothesis>=6.115,<7", "pyyaml>=6,<7")
RUNTIMES = ("local", "simulation")
RUN = ("run", "--method", "ditto", "--rounds", "2")
TESTS = {
    "wire": ("tests/common/test_wire.py",),
    "strategies": ("tests/strategies/test_base.py", "tests/strategies/test_screening.py"),
    "plain apps": ("tests/runtimes/test_own_flower_app.py", "tests/runtimes/test_halves.py"),
}
IMPORTS = """
import importlib, sys
sys.path.insert(0, "benchmarks")
from architecture import modules
for name in modules():
    if not name.startswith("testing"):
        try:
            importlib.import_module(name if name.startswith("perennial") else f"perennial.{name}")
        except ImportError as error:
            print(name, error)
"""
DEPLOYMENT = "from perennial.common.flower.processes import must_have_grpc as must; must()"


@dataclass(frozen=True)
class Environment:
    """An environment with Perennial and a release of Flower."""

    python: Path

    def call(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """A Python command of the environment, in the repository."""
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return subprocess.run(
            [str(self.python), *command],
            cwd=ROOT,
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            check=False,
        )

    def flower(self) -> str:
        """Its release of Flower."""
        return self.call("-c", "import flwr; print(flwr.__version__)").stdout.strip()

    def failing_imports(self) -> list[str]:
        """Modules of ours that cannot be imported, with the reason."""
        return self.call("-c", IMPORTS).stdout.splitlines()

    def run(self, runtime: str, out: Path) -> list[dict[str, object]]:
        """The rows of a run. Raises `RuntimeError` with what it said where it failed."""
        main = "from perennial.server.cli.main import main; main()"
        done = self.call("-c", main, *RUN, "--set", f"runtime={runtime}", "--out", str(out))
        if done.returncode:
            raise RuntimeError(done.stdout[-1000:] + done.stderr[-2000:])
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def tests(self, name: str) -> str:
        """How some of our tests end. Raises `RuntimeError`."""
        done = self.call(
            "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS[name]
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-1000:])
        return "ok"


def made(release: str, folder: Path) -> Environment:
    """An environment with this release, as `pip` would make it: without this repository's own constraint."""
    python = folder / release / "bin" / "python"
    if not python.exists():
        wanted = [] if release == "newest" else [f"flwr[simulation]=={release}"]
        command = ["uv", "venv", "--quiet", "--python", sys.executable, str(folder / release)]
        subprocess.run(command, check=True, cwd=folder)
        command = ["uv", "pip", "install", "--quiet", "--no-config", "--python", str(python), "-e", str(ROOT)]
        subprocess.run([*command, *TOOLS, *wanted], check=True, cwd=folder)
    return Environment(python)


def difference(one: object, other: object) -> float:
    """The largest one between the numbers of two logs; infinite where something else differs."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((difference(one[key], other[key]) for key in one if "seconds" not in key), default=0.0)
    return 0.0 if one == other else float("inf")


def compared(rows: object, first: object) -> str:
    """In words."""
    apart = difference(rows, first)
    return (
        "same bits" if apart == 0 else f"within {apart:.0e}" if apart < 1e-6 else f"**other numbers** ({apart:g})"
    )


def main() -> None:
    """Print a table, or end with what has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", default=RELEASES)
    parser.add_argument("--envs", type=Path)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.envs or Path(scratch) / "envs").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if options.short:
            environments = [Environment(Path(sys.executable))]
        else:
            environments = [made(release, folder) for release in options.releases.split(",")]
        first: list[dict[str, object]] = []
        failed = False
        print(f"Tried on {date.today()}, Python {sys.version.split()[0]}.\n")
        head = ("flwr", "imports that fail", *RUNTIMES, *TESTS, "deployment")
        print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for environment in environments:
            release = environment.flower()
            jobs = {
                **{kind: partial(environment.run, kind, Path(scratch) / release / kind) for kind in RUNTIMES},
                **{name: partial(environment.tests, name) for name in TESTS},
            }
            cells: dict[str, str] = {}
            with ThreadPoolExecutor(2) as pool:
                for name, future in {name: pool.submit(job) for name, job in jobs.items()}.items():
                    try:
                        found = future.result()
                        first = first or found if isinstance(found, list) else first
                        cells[name] = compared(found, first) if isinstance(found, list) else found
                    except RuntimeError as error:
                        print(f"{release}, {name}: {error}", file=sys.stderr)
                        cells[name], failed = "**fails**", True
            imports = environment.failing_imports()
            told = environment.call("-c", DEPLOYMENT).returncode
            row = (release, str(len(imports)), *(cells[name] for name in jobs), "one sentence" if told else "gRPC")
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()

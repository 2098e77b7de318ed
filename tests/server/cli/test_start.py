"""The command line starts without what takes seconds to import, and says what it does while that comes in."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS

SLOW = {
    *("torch", "torchvision", "numpy", "scipy", "sklearn", "pyarrow", "matplotlib", "PIL"),
    *("flwr", "grpc", "ray", "cryptography", "safetensors.torch", "starlette", "uvicorn", "prometheus_client"),
    *("pandas", "sqlalchemy"),
}
# Several commands in one process, each as if it were typed: only the first pays for the start.
PROGRAM = f"""
import contextlib, io, json, os, sys
from perennial.server.cli.main import main

for arguments, environment in json.loads(sys.argv[1]):
    sys.argv = ["perennial", *arguments]
    os.environ.update(environment)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    for name in environment:
        del os.environ[name]
    slow = sorted({SLOW!r} & sys.modules.keys())
    print(json.dumps([code, out.getvalue(), err.getvalue(), slow]))
"""
Call = tuple[list[str], dict[str, str]]


def perennial(folder: Path, *calls: Call) -> list[tuple[int, str, str, list[str]]]:
    """Of each call its exit code, standard output and error, and the slow modules that are imported after it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(calls)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


COMMANDS: list[tuple[list[str], int, str]] = [
    (["--help"], 0, "reproduce"),
    (["run", "--help"], 0, "--scenario"),
    (["list", "methods"], 0, "fedpin"),
    (["list", "methods", "--task", "numbers"], 0, "vrex"),
    (["list", "models", "--task", "numbers"], 2, "--task goes with perennial list methods"),
    (["list", "scenarios"], 0, "cmnist-80"),
    (["list", "datasets"], 0, "fashion-mnist"),
    (["list", "models"], 0, "resnet18"),
    (["list", "reproductions"], 0, "cmnist-8"),
    (["list", "recipes"], 0, "cmnist-8-fedpin/FedPIN-PM-λ-0"),
    (["show", "method", "ditto"], 0, "λ"),
    (["show", "scenario", "cmnist"], 0, "label_noise"),
    (["show", "method", "dito"], 2, "did you mean 'ditto'"),
    (["show", "run", "nowhere"], 2, "nowhere"),
    (["resume", "nowhere"], 2, "nowhere"),
    (["run", "--method", "nope"], 2, "unknown method 'nope'"),
    (["run", "--set", "nonsense=1"], 2, "unknown setting 'nonsense'"),
    (["run", "--set", "learning_rate=-1"], 2, "greater than 0"),
    (["run", "--set", "model.hidden=[0]"], 2, "hidden"),
    (["run", "--scenario", "cmnst"], 2, "did you mean 'cmnist'"),
    (["run", "--recipe", "cmnst"], 2, "unknown table 'cmnst'; did you mean"),
    (["run", "--recipe", "cmnist-8"], 2, "cmnist-8/FedSDR"),
    (["run", "--recipe", "cmnist-8/fedpn"], 2, "did you mean 'FedPIN'"),
    (["run", "--recipe", "cmnist-8/IRM†-FT", "--seed", "-1"], 2, "seed: -1 is not possible"),
    (["run", "--recipe", "cmnist-8/FedPIN", "--config", "x.toml"], 2, "is not possible with --config x.toml"),
    (["run", "--recipe", "cmnist-8/FedPIN", "--method", "ditto"], 2, "is not possible with --method ditto"),
    (["sweep", "--method", "nope", "--scenario", "cmnist", "--trials", "2"], 2, "unknown method 'nope'"),
    (["compare", "--methods", "nope", "--scenario", "cmnist"], 2, "unknown method 'nope'"),
    (["reproduce", "nope"], 2, "nope"),
    (["reproduce", "selecton"], 2, "did you mean 'selection'?"),
]


def test_help_lists_and_sentences_need_nothing_slow(tmp_path: Path) -> None:
    found = perennial(tmp_path, *((arguments, {}) for arguments, _, _ in COMMANDS))
    for (arguments, expected, word), (code, out, err, slow) in zip(COMMANDS, found, strict=True):
        assert (code, slow) == (expected, []), arguments
        assert word in (err if code else out), arguments
        assert not code or len(err.strip().splitlines()) == 1, arguments


COMPLETED: list[tuple[str, list[str]]] = [
    ("perennial run --method fedr", ["fedrep", "fedrod"]),
    ("perennial run --method ", sorted(METHODS)),
    ("perennial run --scenario ", sorted(SCENARIOS)),
    ("perennial compare --methods ditto,apf", ["ditto,apfl"]),
    ("perennial show method dit", ["ditto"]),
    ("perennial show scenario cmnist-8", ["cmnist-80", "cmnist-80-oracle"]),
    ("perennial reproduce cifar", ["cifar10-3class", "cifar10-3class-subset"]),
    (
        "perennial run --recipe cmnist-games-5",
        ["cmnist-games-5/F-FL-Games-parallel", "cmnist-games-5/F-FL-Games-sequential"],
    ),
    ("perennial run --recipe cmnist-8/fedpin-p", ["cmnist-8/fedpin-pM-γ-0", "cmnist-8/fedpin-pM-λ-0"]),
    ("perennial resu", ["resume"]),
]


def test_the_shell_completes_names_at_once(tmp_path: Path) -> None:
    # As Typer's script for bash asks.
    asked = [
        {"_PERENNIAL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        for typed, _ in COMPLETED
    ]
    found = perennial(tmp_path, *(([], environment) for environment in asked))
    for (typed, expected), (_, out, _, slow) in zip(COMPLETED, found, strict=True):
        assert (sorted(out.split()), slow) == (expected, []), typed


@pytest.mark.slow
def test_a_run_says_at_once_what_it_does_and_nothing_where_data_are_asked_for(tmp_path: Path) -> None:
    few = ["run", "--rounds", "1", "--method", "fedavg"]
    told, quiet = perennial(tmp_path, ([*few, "--out", "one"], {}), ([*few, "--out", "two", "--json"], {}))
    assert told[0] == quiet[0] == 0
    assert told[2].splitlines()[0] == "fedavg on colored-digits, 1 rounds, seed 0: loading PyTorch and the data"
    needed = {"torch", "numpy", "flwr", "grpc", "cryptography", "safetensors.torch"}
    assert needed == set(told[3])
    assert quiet[2] == ""
    shown, oracle = perennial(tmp_path, (["show", "run", "one"], {}), (["show", "run", "one", "--oracle"], {}))
    assert (shown[0], shown[3]) == (0, [])
    assert oracle[0] == 0
    assert "torch" not in oracle[3]


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == MODULE:
            try:
                os.kill(os.getpid(), SIGNAL)
            except KeyboardInterrupt:
                if name == "torch":
                    raise RecursionError("maximum recursion depth exceeded") from None
                raise

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may be a script's `&`, where it is ignored
MODULE, SIGNAL = sys.argv.pop(), int(sys.argv.pop())
sys.meta_path.insert(0, Interrupts())
from perennial.server.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("number", "module"),
    [(signal.SIGINT, "rich.table"), (signal.SIGINT, "torch"), (signal.SIGTERM, "torch")],
)
def test_ctrl_c_while_modules_come_in_ends_quietly(number: signal.Signals, module: str, tmp_path: Path) -> None:
    """One of the first, and PyTorch, which makes now and then another exception of it. SIGTERM is no other."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "run", "--rounds", "1", "--out", "run", str(int(number)), module],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1] == "perennial: interrupted"
    assert "Traceback" not in done.stderr

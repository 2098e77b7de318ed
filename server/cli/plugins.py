"""`perennial new` and `perennial check`: a method, model or scenario of one's own."""

import os
import re
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Any, Literal

import typer

from perennial.common.utils.errors import UserError
from perennial.server.cli.console import print_lines
from perennial.server.cli.options import command

TEMPLATES = Path(__file__).parent / "templates"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


Kind = Literal["method", "model", "scenario"]
"""What one may bring."""


@command("new")
def make_package(
    kind: Kind = typer.Argument(..., help="What it is to hold."),
    name: str = typer.Argument(..., help="Its name on the command line, such as my-method; also the folder's."),
) -> None:
    """Write a small package with a method, model or scenario of your own that works, and a test of it."""
    folder = write_package(kind, name)
    module = name.replace("-", "_")
    example = f"--set model.name={name}" if kind == "model" else f"--{kind} {name}"
    print_lines(
        [
            f"{folder}: its code is in {folder / module}. Install it with `uv pip install -e {folder}`, then",
            f"  perennial check {name}",
            f"  perennial run {example}",
        ]
    )


def write_package(kind: Kind, name: str) -> Path:
    """The package's folder, new. Raises `UserError` where the name or the folder cannot be."""
    from perennial.common.data.scenarios import scenario_names
    from perennial.common.methods import method_names
    from perennial.common.models.settings import MODELS

    existing = {"method": method_names(), "model": set(MODELS), "scenario": scenario_names()}[kind]
    module, title = name.replace("-", "_"), "".join(map(str.title, name.split("-")))
    other = "give yours another name"
    if not NAME.fullmatch(name):
        raise UserError(
            f"name {name!r} is not possible; write small letters, digits and hyphens, such as my-{kind}"
        )
    if iskeyword(module) or iskeyword(title):
        raise UserError(f"name {name!r} is not possible: it is a word of Python itself; {other}")
    if name in existing:
        raise UserError(f"name {name!r} is taken by a {kind} of Perennial; {other}")
    if find_spec(module):
        raise UserError(f"name {name!r}: Python has a module {module!r} already; {other}")
    folder = Path(name)
    if folder.exists():
        raise UserError(f"{folder} is there already; nothing was written")
    names = {"name": name, "module": module, "Class": title, "kind": kind}
    for room in ("any", kind):
        for template in sorted((TEMPLATES / room).rglob("*.txt")):
            place = template.relative_to(TEMPLATES / room).with_suffix("")
            path = folder / str(place).replace("MODULE", module)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(names), encoding="utf-8")
    return folder


@command("check", plugins=True)
def check_own(
    name: str = typer.Argument(..., help="A method, model or scenario: a plug-in's, or ours."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="For the runs that try a method. Repeatable."
    ),
) -> None:
    """Test that a method, model or scenario keeps what all must keep."""
    if find_spec("pytest") is None:
        raise UserError("perennial check needs pytest: uv pip install pytest")
    passes = {kind: _passes(kind, name, settings) for kind in _kinds(name)}
    verdicts = {kind: "keeps" if passed else "does not keep" for kind, passed in passes.items()}
    print_lines(f"{name} {verdict} what every {kind} must keep" for kind, verdict in verdicts.items())
    if not all(passes.values()):
        raise typer.Exit(1)


def _kinds(name: str) -> list[Kind]:
    """What has the name, with its halves there. Raises `UserError`."""
    from perennial.common import plugins
    from perennial.common.data.scenarios import SCENARIOS
    from perennial.common.methods import METHODS
    from perennial.common.models.settings import MODELS
    from perennial.common.utils.suggestions import meant

    known: dict[Kind, Mapping[str, Any]] = {"method": METHODS, "model": MODELS, "scenario": SCENARIOS}
    for group in plugins.GROUPS:
        if not any(name in names for names in known.values()):
            plugins.look_for(group, name)
    kinds = [kind for kind, names in known.items() if name in names]
    if not kinds:
        names = {own for group in plugins.GROUPS for own in plugins.installed(group)}.union(*known.values())
        if Path(name).is_dir():
            raise UserError(f"nothing of the name {name!r} is installed; first `uv pip install -e {name}`")
        raise UserError(
            f"unknown name {name!r}{meant(name, names)} (`perennial list methods`, `list models` and "
            "`list scenarios` have all names)"
        )
    if "method" in kinds:
        from perennial.client.host import client_class
        from perennial.strategies.registry import strategy_class

        client_class(METHODS[name])
        strategy_class(METHODS[name]())  # type: ignore[call-arg] # its name has a default
    return kinds


def _passes(kind: Kind, name: str, settings: list[str]) -> bool:
    """Whether the tests of `perennial.testing` pass, which say what they find."""
    import pytest

    with tempfile.TemporaryDirectory(prefix="perennial-") as folder:
        file = Path(folder) / f"test_{kind}.py"
        file.write_text(f"from perennial.testing.{kind}s import *\n", encoding="utf-8")
        options = ["--perennial", name, *(part for one in settings for part in ("--perennial-set", one))]
        # Nobody's configuration, and no files left in the folder that this is typed in.
        alone = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp"]
        alone += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the command itself has imported perennial
        return pytest.main([str(file), "-q", "-rs", *alone, *options]) == 0

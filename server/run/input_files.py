"""The files of somebody's own that a run reads on this machine, and their digests."""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import file_digest, sha256
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.data.datasets import resolve_root
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import place_of
from perennial.common.models.settings import Module, Pretrained
from perennial.common.utils.errors import UserError

PLUG_IN, MODULE, FROZEN = "plug-in ", "module ", "model, frozen part"
"""Before what is no site; no site's name has a blank."""
_imported = WeakKeyDictionary[ModuleType, str]()
"""The digest of a module's sources when this process first asked."""


def own_digests(config: RunConfig) -> dict[str, str]:
    """By site, of its data, where they are here; and of the sources of a module whose functions the run names."""
    return {name: _digest(path, tuple(files)) for name, path, files in _own(config)}


def digests(config: RunConfig) -> dict[str, str]:
    """Those, and of the sources of each plug-in, and of the part of the model that no training changes."""
    found = own_digests(config) | plug_in_digests(config.plugins)
    if isinstance(config.model, Pretrained):
        from perennial.common.models.network import network

        with suppress(UserError):  # of weights that are not here, which the run itself will say
            net = network(config.model, config.scenario.input_shape, config.scenario.task.outputs)
            found |= {FROZEN: net.frozen_digest} if net.frozen_names else {}
    return found


def plug_in_digests(modules: Iterable[str]) -> dict[str, str]:
    """Of the sources of each plug-in."""
    places = {f"{PLUG_IN}{name}": plugins.source(name) for name in modules}
    return {name: _digest(path, tuple(_sources(path))) for name, path in places.items()}


def must_be_as_imported(found: Mapping[str, str]) -> None:
    """Raises `UserError` for sources that have changed since this was first asked: a module keeps its code."""
    for name, digest in found.items():
        module = name.startswith((PLUG_IN, MODULE)) and sys.modules.get(name.partition(" ")[2])
        if module and _imported.setdefault(module, digest) != digest:
            raise UserError(f"{name} has changed since this process imported it; start Python anew, and run again")


def _own(config: RunConfig) -> Iterator[tuple[str, Path, Iterator[tuple[Path, int]]]]:
    root = resolve_root(config.data_folder)
    if isinstance(config.scenario, OwnData) and root and config.runtime != "deployment":
        for site in config.scenario.sites:
            with suppress(UserError):  # of a site that has no data, which the run itself will say
                path = place_of(root, site)
                yield site, path, _files(path)
    named = [text.partition("(")[0] for text in (config.metric, config.loss, *config.augment)]
    if isinstance(config.model, Module) and not config.model.library:
        named.append(config.model.name)
    for name in sorted({text.partition(":")[0] for text in named if ":" in text}):
        if place := plugins.file_of(name) or plugins.importable(name):
            yield f"{MODULE}{name}", place, _sources(place)


def _sources(place: Path) -> Iterator[tuple[Path, int]]:
    """The Python files of a plug-in, and those that it imports from beside it if it is not installed."""
    found, waiting = dict[Path, int](), [place]
    while waiting:
        for file, changed in _files(waiting.pop()):
            if file.suffix != ".py" or file in found:
                continue
            found[file] = changed
            if place.parent.name not in plugins.PACKAGES:
                tops = sorted(_tops(file, changed) - {"perennial"})
                neighbours = [place.parent / end for top in tops for end in (top, f"{top}.py")]
                waiting += [path for path in neighbours if path.exists()]
    yield from sorted(found.items())


@cache
def _tops(file: Path, changed: int) -> frozenset[str]:
    """The packages and modules that a source imports, parsed anew only if it has `changed`."""
    return frozenset(name.partition(".")[0] for name in named_in(file))


def named_in(file: Path, module: str = "") -> Iterator[str]:
    """The modules that a source names in its imports, and what `from` takes of them, which may be modules, too.

    Relative ones are among them if it is the source of a named `module`.
    """
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a file that lies about, which nobody could have imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # of a relative one that leads out of the package
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _files(path: Path) -> Iterator[tuple[Path, int]]:
    """A file, or all of a folder, and when each changed last."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file, file.stat().st_mtime_ns


@cache
def _digest(place: Path, files: tuple[tuple[Path, int], ...]) -> str:
    """Of what files of a folder are called, which may be a class's name, and of what is in them."""
    digest = sha256()
    for path, _ in files:
        with path.open("rb") as file:
            name = os.fsencode(os.path.relpath(path, place))
            digest.update(name + b"\0" + file_digest(file, "sha256").digest())
    return digest.hexdigest()

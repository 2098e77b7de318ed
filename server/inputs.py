"""The files of somebody's own that a run reads on this machine, and their digests."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.data.datasets import resolve_root
from perennial.common.data.own import place_of
from perennial.common.data.scenarios.own import OwnData
from perennial.common.errors import UserError
from perennial.common.model_settings import Module


def own_digests(config: RunConfig) -> dict[str, str]:
    """By site, of its data, where they are here; and of the source of a module that is the model."""
    return {name: _digest(path, tuple(_files(path))) for name, path in _own(config)}


def digests(config: RunConfig) -> dict[str, str]:
    """Those, and of the source of each plug-in."""
    found = own_digests(config)
    for name in config.plugins:
        path = plugins.source(name)
        found[f"plug-in {name}"] = _digest(path, tuple(own for own in _files(path) if own[0].suffix == ".py"))
    return found


def _own(config: RunConfig) -> Iterator[tuple[str, Path]]:
    root = resolve_root(config.data_folder)
    if isinstance(config.scenario, OwnData) and root and config.runtime != "deployment":
        for site in config.scenario.sites:
            with suppress(UserError):  # of a site that has no data, which the run itself will say
                yield site, place_of(root, site)
    if isinstance(config.model, Module) and not config.model.torchvision:
        name = config.model.name.partition(":")[0]
        if path := plugins.file_of(name):
            yield f"module {name}", path  # no site's name has a blank


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
            digest.update(bytes(path.relative_to(place)) + b"\0" + file_digest(file, "sha256").digest())
    return digest.hexdigest()

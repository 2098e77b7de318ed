"""Plug-ins: methods, models and scenarios of somebody else's module, found by their names.

A plug-in is a module, or a package, that defines subclasses of `Method`, `ModelSettings` or `Scenario`. It is
installed, with an entry point for each name in the groups `perennial.methods`, `perennial.models` and
`perennial.scenarios`. Or its file lies beside somebody's work, and they ask for it (`--plugin MODULE`). Nothing of
it is imported before that, or before one of its names is asked for. What it brings then stands in `METHODS`,
`MODELS` and `SCENARIOS` like our own. Those rooms register here what they take up; nothing here imports them.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError

from perennial.common.utils.errors import (
    PlugInError,
    RunStopped,
    UserError,
    from_outside,
    in_words,
    told_with_place,
)
from perennial.common.utils.suggestions import sentence
from perennial.common.utils.tracebacks import Tracebacks

Group = Literal["methods", "models", "scenarios"]
PACKAGES = ("site-packages", "dist-packages")
"""Folders in which what is installed lies; files beside each other there have nothing to do with each other."""
NAME = re.compile(r"[A-Za-z0-9]+([-_][A-Za-z0-9]+)*")
"""What a method, model or scenario may be called: it becomes part of file names."""
GROUPS: tuple[Group, ...] = ("methods", "models", "scenarios")
VARIABLE = "PERENNIAL_PLUGINS"
"""Files and package folders of plug-ins that this machine's owner trusts, beside the installed ones. Processes
that this one starts inherit it."""


@dataclass(frozen=True)
class Plugin:
    """What a module brings."""

    module: ModuleType
    names: Mapping[Group, Mapping[str, Any]]
    """Classes of methods and models, and ready scenarios, by name."""
    scenarios: Mapping[str, type]
    """Classes of scenarios by their `name`, which differs from that of a preset."""

    @property
    def kinds(self) -> list[type]:
        """All its classes."""
        return [*self.names["methods"].values(), *self.names["models"].values(), *self.scenarios.values()]


@dataclass(frozen=True)
class Registry:
    """One group of names: its room says what a plug-in may bring to it."""

    base: type
    """Of which the classes that are brought are subclasses."""
    known: dict[str, Any]
    """Where what is brought stands, beside our own."""
    taken: Callable[[], Iterable[str]]
    """Names that nothing may be brought under."""
    accepted: Callable[[ModuleType, dict[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    """From a module, its classes by name and these with their defaults, to what it adds to `known`. Raises
    `UserError`."""
    reserved: Callable[[type], Iterable[str]] = lambda _: ()
    """Names that no field of a class may have."""


REGISTRIES: dict[Group, Registry] = {}
"""Filled by `common/methods`, `common/models/settings.py` and `common/data/scenarios` as they are imported."""
_loaded: dict[str, Plugin] = {}


# ---------------------------------------------------------------------- who may be loaded


def installed(group: Group) -> dict[str, list[EntryPoint]]:
    """The names that installed packages bring, and who brings each; nothing of them is imported."""
    found: dict[str, list[EntryPoint]] = {}
    places = [Path(place or ".") for place in sys.path]
    for point in _points(tuple((place, place.stat().st_mtime_ns if place.exists() else 0) for place in places)):
        if point.group == f"perennial.{group}":
            found.setdefault(point.name, []).append(point)
    return found


@lru_cache(maxsize=4)
def _points(places: tuple[tuple[Path, int], ...]) -> list[EntryPoint]:
    """Our entry points of all packages in these folders, as long as nothing is added to them: reading them takes a
    tenth of a second."""
    return [point for group in GROUPS for point in entry_points(group=f"perennial.{group}")]


def about(group: Group) -> dict[str, str]:
    """A line for each name of an installed plug-in."""
    lines = {}
    for name, points in sorted(installed(group).items()):
        brought = " and ".join(f"{point.dist.name} {point.dist.version}" for point in points if point.dist)
        lines[name] = f"plug-in of {brought} ({points[0].value})"
    return lines


def named(group: Group, name: str) -> str:
    """`MODULE:NAME`, where an installed package's entry point of this name is one; empty where it is a module."""
    points = installed(group).get(name, [])
    return points[0].value if len(points) == 1 and points[0].attr else ""


def look_for(group: Group, name: str) -> None:
    """Load the installed plug-in that has a name, if one has.

    Raises `UserError` where it is broken, or does not bring what it says.
    """
    if not (points := installed(group).get(name)):
        return
    if len(points) > 1:
        both = " and ".join(point.dist.name for point in points if point.dist)
        raise UserError(f"{both} both bring {name!r} to perennial.{group}; uninstall one of them")
    brought = load(points[0].module).names[group]
    if name not in brought:
        raise UserError(
            f"plug-in {points[0].module!r} brings no {group[:-1]} {name!r}, though its package says so "
            f"(it brings: {', '.join(sorted(brought)) or 'none'})"
        )


def plugin(module: str) -> None:
    """Load a plug-in that the person at this machine asks for: of the current folder, or installed.

    Processes that this one starts may load it, too. Raises `UserError`.
    """
    if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(
            f"plug-in {module!r} is not possible; write a module's name, such as my_method for my_method.py"
        )
    if module.endswith(".py"):
        raise UserError(f"plug-in {module!r} is not possible; leave off .py: {module.removesuffix('.py')}")
    top, here = module.partition(".")[0], Path.cwd()
    if top == "__main__":
        raise UserError(
            f"plug-in {module!r} is not possible; put its code into a file, and write that module's name, such as "
            "my_method for my_method.py"
        )
    if not trust_named(module):
        raise UserError(
            f"plug-in {module!r}: there is no {top}.py in {here}, and no such module is installed; start "
            f"where its file is, or name the file in {VARIABLE}"
        )
    load(module)


def trust_named(module: str) -> bool:
    """Trust a module that the person at this machine names: one beside their work, or an installed one.

    Whether there is any.
    """
    top, here = module.partition(".")[0], Path.cwd()
    places = [
        path for path in (here / top, here / f"{top}.py") if (path / "__init__.py").is_file() or path.is_file()
    ]
    if not places and (file_of(module) or is_installed(module)):
        return True
    place = places[0] if places else importable(module)
    if place:
        trust(place)
    return bool(place)


def trust(place: Path) -> None:
    """Add a file or folder to what `VARIABLE` names."""
    if place not in (known := _named_files()):
        os.environ[VARIABLE] = os.pathsep.join(map(str, [place, *known]))


def _named_files() -> list[Path]:
    return [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def file_of(module: str) -> Path | None:
    """The file or folder of a module that `VARIABLE` names; None where it names none."""
    top = module.partition(".")[0]
    return next((path for path in _named_files() if path.name in (top, f"{top}.py")), None)


def importable(module: str) -> Path | None:
    """The file of a module, or the folder of its package, as Python would import it; None where there is none."""
    spec = None
    with suppress(ValueError):  # of a module that has none, such as __main__
        spec = find_spec(module.partition(".")[0])
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def is_installed(module: str) -> bool:
    """Whether an installed package brings a module as a plug-in."""
    points = (point for group in GROUPS for found in installed(group).values() for point in found)
    return any(point.module == module for point in points)


def may_be_imported(module: str) -> bool:
    """Whether this machine's owner trusts a module, whoever names it; if so, Python finds it from now on."""
    place = file_of(module)
    if place and str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))  # at the end: a file beside it must hide nobody else's module
    return bool(place) or is_installed(module)


# ---------------------------------------------------------------------- what they bring


def load(module: str) -> Plugin:
    """An installed or trusted plug-in, imported once, its names taken up.

    Raises `UserError`, and then has taken up nothing.
    """
    if module in _loaded:
        return _loaded[module]
    if not may_be_imported(module):  # a server names plug-ins, but what a site imports, its owner decides
        raise UserError(
            f"plug-in {module[:100]!r} is not installed here; install the package that has it, "
            f"or name its file in {VARIABLE}"
        )
    found, place = _imported(module), file_of(module)
    where = Path(found.__file__ or "").resolve()
    if place and place.resolve() not in (where, *where.parents):
        raise UserError(
            f"plug-in {module!r}: Python has another module of that name ({where}); give {place} another one"
        )
    plugin = _contents_of(found)
    _register(plugin)
    _loaded[module] = plugin
    return plugin


def of(*kinds: type) -> list[str]:
    """The plug-ins that classes of methods, models or scenarios are from."""
    return [name for name, plugin in _loaded.items() if any(kind in plugin.kinds for kind in kinds)]


def source(module: str) -> Path:
    """A plug-in's file, or the folder of the outermost package that it is or lies in."""
    file = Path(str(_loaded[module].module.__file__))
    above = module.count(".") + (file.name == "__init__.py")
    return file.parents[above - 1] if above else file


def blamed(error: BaseException) -> str:
    """The plug-in in whose code an exception was raised, or was passed on, in words; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        for module in _loaded:
            if source(module) in (file, *file.parents):
                return f"plug-in {module!r} raised {in_words(error)} ({file.name}, line {frame.lineno})"
    return ""


@contextmanager
def blaming(file: Path | None = None) -> Iterator[None]:
    """What a plug-in's code raises in a block becomes `PlugInError`, naming it; `file` is for the traceback."""
    try:
        yield
    except (UserError, RunStopped, OSError):
        raise
    except Exception as error:
        if from_outside(error) or not (word := blamed(error)):
            raise
        if file:
            Tracebacks(file).first(error)
        raise PlugInError(
            f"{word}; {f'{file} has its' if file else 'PERENNIAL_DEBUG=1 shows the'} traceback"
        ) from error


def scenario_classes() -> dict[str, type]:
    """Classes of all plug-ins' scenarios by their `name`."""
    return {name: kind for plugin in _loaded.values() for name, kind in plugin.scenarios.items()}


def half(method: type, file: Literal["client", "server"], base: type) -> Any | None:
    """The half that a plug-in's method brings: the one subclass of `base` in its module, or in `MODULE.FILE`.

    None for our own methods, and where it brings none. Raises `UserError` for two, and for a file that fails.
    """
    for name in of(method):
        modules = [_loaded[name].module]
        if hasattr(modules[0], "__path__") and find_spec(f"{name}.{file}"):
            modules.append(_imported(f"{name}.{file}"))
        found = {kind: kind.__name__ for module in modules for kind in _defined(module, base, name)}
        if len(found) > 1:
            raise UserError(
                f"plug-in {name!r} has {len(found)} subclasses of {base.__name__}, {', '.join(found.values())}; "
                "a method has one"
            )
        return next(iter(found), None)
    return None


def roots(package: str) -> list[Path]:
    """Folders in which a package's sources count as a plug-in's.

    They are those of its own package, and what lies beside it if it is not installed.
    """
    found = []
    for name, plugin in _loaded.items():
        package_above = 1 if hasattr(plugin.module, "__path__") else 0
        root = Path(str(plugin.module.__file__)).parents[name.count(".") + package_above]
        if package == name.partition(".")[0] or root.name not in PACKAGES:
            found.append(root)
    return found


def _imported(module: str) -> ModuleType:
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"plug-in {module!r} cannot be imported: {told_with_place(error, __file__)}") from None


def _defined(module: ModuleType, base: type, plugin: str) -> list[Any]:
    """The subclasses of a base that are in a module and defined there, or elsewhere in the plug-in."""
    return [
        kind
        for kind in dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
        if issubclass(kind, base) and f"{kind.__module__}.".startswith(f"{plugin}.")
    ]


def _contents_of(module: ModuleType) -> Plugin:
    """What a module brings, looked at as far as that needs no data. Raises `UserError`."""
    if missing := set(GROUPS) - REGISTRIES.keys():
        raise RuntimeError(f"import perennial.common.config before a plug-in; it registers {', '.join(missing)}")
    kinds = {group: _named(module, REGISTRIES[group]) for group in GROUPS}
    if len(methods := kinds["methods"]) > 1:
        raise UserError(
            f"plug-in {module.__name__!r} has {len(methods)} methods, {' and '.join(methods)}; a module has one, "
            "with its two halves"
        )
    if not any(kinds.values()) and not _may_be_named(module):
        raise UserError(
            f"plug-in {module.__name__!r} ({module.__file__}) brings nothing: it defines no subclass of Method, "
            'ModelSettings or Scenario with a field name: Literal["…"] = "…", and no other class or function'
        )
    usual = {group: {name: _defaults(module, kind) for name, kind in kinds[group].items()} for group in GROUPS}
    for made in (made for group in usual.values() for made in group.values()):
        _must_survive_toml(module, made)
    for group in GROUPS:
        _must_be_free(module, group, kinds[group])
    brought = {group: REGISTRIES[group].accepted(module, kinds[group], usual[group]) for group in GROUPS}
    return Plugin(module, brought, kinds["scenarios"])


def _may_be_named(module: ModuleType) -> bool:
    """Whether a module has what a setting may name as `MODULE:NAME`: a network, a transform, a metric, a loss. One
    that has a method, model or scenario without a name is more likely to have a mistake."""
    bases = (registry.base for registry in REGISTRIES.values())
    if any(_defined(module, base, module.__name__) for base in bases):
        return False
    values = vars(module).values()
    return any(getattr(value, "__module__", "") == module.__name__ or _is_ours(type(value)) for value in values)


def _is_ours(kind: type) -> bool:
    """Whether what a module has is of a class of Perennial's, such as a metric."""
    return kind.__module__.startswith("perennial.")


def member(setting: str, text: str, of_run: Iterable[str]) -> Any:
    """What `MODULE:NAME` is in one of the run's plug-ins, if it is the plug-in's own. Raises `ValueError`, which
    begins with the setting."""
    module, _, name = text.partition(":")
    if module not in of_run:
        raise ValueError(f"{setting}: {text!r} is of {module!r}, which is no plug-in of the run; name it as one")
    if (found := getattr(sys.modules[module], name, None)) is None:
        raise ValueError(f"{setting}: the plug-in {module!r} has no {name!r}")
    own = getattr(found, "__module__", module) if callable(found) else module
    if not f"{own}.".startswith(f"{module}."):  # what it imports is not its own
        raise ValueError(f"{setting}: {name!r} is not of the plug-in {module!r} itself")
    return found


def _named(module: ModuleType, registry: Registry) -> dict[str, Any]:
    """A module's subclasses of a settings class by their names. Raises `UserError` where one lacks a fact."""
    found: dict[str, Any] = {}
    own = _defined(module, registry.base, module.__name__)
    for kind in own:
        name = kind.model_fields["name"].default
        names = next(parent for parent in kind.__mro__ if "name" in get_annotations(parent))
        if not isinstance(name, str) or names not in own:
            continue  # a base of others, of which one of ours may have the name
        if name in found:
            raise UserError(f"plug-in {module.__name__!r} has two classes of the name {name!r}")
        if not NAME.fullmatch(name):
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__}.name: {name[:100]!r} is not possible; write "
                "letters, digits and hyphens, such as my-method"
            )
        if hiding := sorted({*registry.reserved(kind)}.intersection(kind.model_fields)):
            raise UserError(
                f"plug-in {module.__name__!r}: {kind.__name__} has a field {hiding[0]!r}, which is a setting of "
                "the run or a part of every method; give it another name"
            )
        if missing := sorted(fact for fact in kind.__class_vars__ if not hasattr(kind, fact)):
            raise UserError(f"plug-in {module.__name__!r}: {kind.__name__} lacks {', '.join(missing)}")
        found[name] = kind
    return found


def _defaults(module: ModuleType, kind: Any) -> Any:
    """A settings class with its defaults. Raises `UserError`."""
    try:
        usual = kind()
        kind.model_validate(values := usual.model_dump(warnings=False))  # making it checks no defaults
        sent = kind.model_validate_json(usual.model_dump_json(warnings=False)).model_dump(warnings=False)
        if not (other := [name for name, value in values.items() if sent[name] != value]):
            return usual
        name = other[0]
        words = f"{name}: {values[name]!r} is {sent[name]!r} once it has travelled as JSON; choose another type"
    except ValidationError as error:
        words = sentence(error)
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise UserError(
        f"plug-in {module.__name__!r}: {kind.__name__} cannot be made with its defaults ({words})"
    ) from None


def _must_survive_toml(module: ModuleType, usual: Any) -> None:
    """Raises `UserError` for a field that may be None and has another default: TOML has no None, so it is lost."""
    for name, field in type(usual).model_fields.items():
        extra, possible = field.json_schema_extra, False
        if isinstance(extra, Mapping) and isinstance(search := extra.get("search"), Mapping):
            possible = None in search["values"]
        with suppress(Exception):  # of a type or a rule that takes no None
            possible |= getattr(type(usual).model_validate({name: None}), name) is None
        if possible and (default := getattr(usual, name)) is not None:
            raise UserError(
                f"plug-in {module.__name__!r}: {type(usual).__name__}.{name} may be None, which a run's files "
                f"cannot hold in place of the default {default!r}; write 0 or a word such as 'off' for it, or "
                "make None the default"
            )


def _must_be_free(module: ModuleType, group: Group, names: Iterable[str]) -> None:
    """Raises `UserError` for a name that is taken."""
    for name in sorted({*names}.intersection(REGISTRIES[group].taken())):
        other = next((key for key, one in _loaded.items() if name in one.names[group]), "")
        whose = f"plug-in {other!r}" if other else "Perennial itself"
        raise UserError(
            f"plug-in {module.__name__!r}: the {group[:-1]} name {name!r} is taken by {whose}; give yours another "
            "one"
        )


def _register(plugin: Plugin) -> None:
    """Put a plug-in's names among ours. Raises `UserError` for a preset's that is taken."""
    _must_be_free(plugin.module, "scenarios", plugin.names["scenarios"])
    for group, registry in REGISTRIES.items():
        registry.known.update(plugin.names[group])

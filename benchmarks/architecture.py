"""The rooms of the code and the arrows between them, as the imports are: `python benchmarks/architecture.py`.

Writes the picture docs/architecture.svg. `tests/test_imports.py` holds the imports against `ROOMS`.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("common", "strategies", "client", "server", "testing", "perennial")

ROOMS: dict[str, tuple[str, ...]] = {
    "common/utils": ("common.utils",),
    "common/measures": ("common.measures",),
    "common/tasks": ("common.tasks",),
    "common/flower": ("common.flower",),
    "common/plugins": ("common.plugins",),
    "common/data": ("common.data",),
    "common/models": ("common.models",),
    "common/wire": ("common.wire", "common.stacks"),
    "common/mathematics": ("common.mathematics",),
    "common/methods": ("common.methods",),
    "common/privacy": ("common.privacy",),
    "common/config": (
        *("common.selection", "common.aggregation", "common.presets", "common.training", "common.config"),
        *("common.survey", "common.flower_app", "common"),
    ),
    "strategies/base": (
        *("strategies.mean", "strategies.screening", "strategies.exchange", "strategies.roster"),
        *("strategies.evaluation", "strategies.robust", "strategies.base"),
    ),
    "strategies/privacy": ("strategies.privacy", "strategies.server_optimizer"),
    "strategies/methods": ("strategies.methods",),
    "strategies/registry": ("strategies.registry", "strategies.flower_app", "strategies"),
    "client/trainer": (
        *("client.objectives", "client.steps", "client.request", "client.trainer", "client.state"),
        *("client.stateful", "client.site_data", "client.snapshot", "client.secure_aggregation", "client.cohort"),
        *("client.shelf", "client.packs", "client.captured"),
    ),
    "client/methods": ("client.methods",),
    "client/host": ("client.host",),
    "client/serving": ("client.serving",),
    "client/node": ("client.node",),
    "client/app": ("client.app", "client.flower_app", "client"),
    "server/selection": ("server.selection",),
    "server/run": ("server.run", "server.local"),
    "server/survey": ("server.survey",),
    "server/deployment": ("server.deployment",),
    "server/app": ("server.app", "server.simulation"),
    "server/results": ("server.arrays", "server.groups", "server.in_memory", "server.frames", "server.results"),
    "server/study": ("server.study",),
    "server/papers": ("server.papers",),
    "server/runs": ("server.runs", "server.studies"),
    "server/report": ("server.report",),
    "server/cli": ("server.cli", "server"),
    "testing": ("testing",),
    "perennial": ("perennial",),
}
"""Each room with its modules, from the bottom up: a module imports those of its own room and of rooms above it in
this list. The rooms of `strategies` and of `client` never import each other."""

ROOM_OF_PART = {part: room for room, parts in ROOMS.items() for part in parts}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """The project's modules without the leading `perennial.`, and their files."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))):
        relative = path.relative_to(root)
        if path.stem.endswith(("_pb2", "_pb2_grpc")) or any(
            (root / part).is_symlink() for part in relative.parents
        ):
            continue
        parts = relative.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the project that a module imports, also inside functions and for its types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] != "perennial":
                continue
            name = name.partition(".")[2]
            while name and name not in known:  # a function, a class
                name = name.rpartition(".")[0]
            if (name or "perennial") != module:
                yield name or "perennial"


def room_of(module: str) -> str:
    """The room of a module. Raises `KeyError` for one that has none."""
    name = module
    while "." in name and name not in ROOM_OF_PART:
        name = name.rpartition(".")[0]
    if name not in ROOM_OF_PART or (name != module and f"{name}/" in "".join(ROOMS)):
        raise KeyError(f"{module} has no room in benchmarks/architecture.py")
    return ROOM_OF_PART[name]


@cache
def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """What each module imports."""
    known = modules(root)
    return {module: set(imports(module, path, known)) for module, path in known.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, circle by circle (Tarjan's strongly connected components)."""
    index, low, stack, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.get(module, ())):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            circle = stack[stack.index(module) :]
            del stack[-len(circle) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def uphill(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a room from a higher one, and between `strategies` and `client`."""
    order = list(ROOMS)
    found = []
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            here, there = room_of(module), room_of(other)
            sides = {here.partition("/")[0], there.partition("/")[0]}
            if order.index(there) > order.index(here) or sides == {"strategies", "client"}:
                found.append(f"{module} imports {other}: {here} is below {there}")
    return found


def picture(graph: dict[str, set[str]]) -> str:
    """The rooms from the bottom up, and of their arrows those that no others imply, as SVG."""
    import io

    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.family": "sans-serif"})
    uses: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, others in graph.items():
        uses[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    columns = {"common": 0, "strategies": 1, "client": 2, "server": 3, "testing": 4, "perennial": 4}
    below: dict[str, set[str]] = {}
    place: dict[str, tuple[int, int]] = {}
    for room in ROOMS:  # from the bottom up: above all that it uses, and above the room below it
        below[room] = uses[room].union(*(below[other] for other in uses[room]))
        x = columns[room.partition("/")[0]]
        beneath = [y for other, (at, y) in place.items() if other in uses[room] or at == x]
        place[room] = (x, 1 + max(beneath, default=-1))
    direct = {
        room: {other for other in others if not any(other in below[between] for between in others)}
        for room, others in uses.items()
    }
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * (2 + max(y for _, y in place.values()))))
    for room, others in direct.items():
        for other in sorted(others):
            (x, y), (to_x, to_y) = place[room], place[other]
            arrow = {"arrowstyle": "->", "color": "#8899aa", "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (to_x, to_y + 0.3), (x, y - 0.3), arrowprops=arrow, zorder=1)
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef2f7", "edgecolor": "#445566", "lw": 0.8}
        axes.text(x, y, room, ha="center", va="center", fontsize=8, bbox=box, zorder=2)
    axes.set(xlim=(-0.5, 4.5), ylim=(-1, 1 + max(y for _, y in place.values())))
    axes.axis("off")
    text = io.StringIO()
    said = "; ".join(f"{room}: {', '.join(sorted(others))}" for room, others in direct.items())
    figure.savefig(
        text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Description": said}
    )
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def main() -> None:
    graph = arrows()
    (ROOT / "docs" / "architecture.svg").write_text(picture(graph), encoding="utf-8")
    for trouble in [*uphill(graph), *(f"a circle: {', '.join(circle)}" for circle in circles(graph))]:
        print(trouble)


if __name__ == "__main__":
    main()

"""Imports run one way: no circle, no room imports a higher one, one room alone touches what Flower may change."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import architecture

PUBLIC = ("flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.simulation")
"""What Flower promises to keep."""


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_there_is_no_circle() -> None:
    assert architecture.circles(architecture.arrows()) == []


def test_no_room_imports_a_higher_one() -> None:
    assert architecture.uphill(architecture.arrows()) == []


def test_a_circle_is_found_also_inside_functions_and_of_types(tmp_path: Path) -> None:
    inside = "def f() -> None:\n    from perennial.common.utils.b import x\n"
    typed = "if TYPE_CHECKING:\n    from perennial.common.utils import a\n"
    graph = architecture.arrows(tree(tmp_path, common__utils__a=inside, common__utils__b=typed))
    assert architecture.circles(graph) == [["common.utils.a", "common.utils.b"]]


@pytest.mark.parametrize(
    ("where", "what", "says"),
    [
        ("common__wire", "from perennial.common.config import RunConfig", "common/wire is below common/config"),
        ("common__config", "import perennial", "common/config is below perennial"),
        ("server__run__loop", "from perennial.server.cli import main", "server/run is below server/cli"),
        ("client__trainer", "from perennial.strategies.base import M", "client/trainer is below strategies/base"),
        ("strategies__methods__ours", "from perennial.client.trainer import L", "below client/trainer"),
    ],
)
def test_an_arrow_uphill_is_found(where: str, what: str, says: str, tmp_path: Path) -> None:
    files = {"common__config": "", "server__cli__main": "", "client__trainer": "", "strategies__base": ""}
    (found,) = architecture.uphill(
        architecture.arrows(tree(tmp_path, **{**files, "perennial____init__": "", where: what}))
    )
    assert says in found


def test_a_new_file_needs_a_room(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"common\.helpers has no room"):
        architecture.uphill(
            architecture.arrows(tree(tmp_path, common__helpers="from perennial.common import wire"))
        )


def test_one_room_alone_touches_what_flower_does_not_promise() -> None:
    strangers = []
    for module, path in architecture.modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            strangers += [
                f"{module}: {name}"
                for name in names
                if name.partition(".")[0] == "flwr"
                and not f"{name}.".startswith(tuple(f"{public}." for public in PUBLIC))
                and not module.startswith("common.flower")
            ]
    assert strangers == []


def test_the_picture_is_of_these_imports() -> None:
    drawn = (architecture.ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    made = architecture.picture(architecture.arrows())
    assert description(drawn) == description(made), "run `python benchmarks/architecture.py`"


def description(svg: str) -> str:
    """What a picture says it shows; where its letters stand depends on the fonts of a machine."""
    return svg.split("<dc:description>")[1].split("</dc:description>")[0]

"""Every method with every rule and every privacy mechanism: what the pages say is possible begins, and one
sentence refuses the rest before anything is sent."""

import re
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from perennial.common.aggregation import Rule
from perennial.common.methods import METHODS
from perennial.common.privacy.mechanisms import MECHANISMS
from perennial.common.utils.errors import UserError
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.tiny_federation import toy_config

DOCS = Path(__file__).parents[2] / "docs"
HIDDEN = set(re.findall(r"^\| `([\w-]+)` \| yes \|", (DOCS / "privacy.md").read_text(), re.MULTILINE))
"""The methods that go with a privacy mechanism."""
SECTION = (DOCS / "robust.md").read_text().partition("\n## Which methods\n")[2].partition("\n## ")[0]
MEANLESS = {
    name for row in re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)
}
"""Those that go with no rule."""
SETTINGS: dict[str, list[tuple[str, ...]]] = {
    "groupdro": [(), ("preset=code",)],
    "perinvfl": [(), ("invariance=groupdro",), ("preset=code",)],
}
"""Settings that make another method of it."""


class Begun(Exception):  # noqa: N818
    """The run has begun."""


class Beginning:
    """A grid whose first use ends the run."""

    def __getattr__(self, name: str) -> Any:
        raise Begun


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_pair_begins_or_one_sentence_refuses_it(method: str, tmp_path: Path) -> None:
    for own, rule, mechanism in product(SETTINGS.get(method, [()]), get_args(Rule), sorted(MECHANISMS)):
        settings = (*own, f"aggregation={rule}", *([f"privacy.mechanism={mechanism}"] * (mechanism != "none")))
        hides = method in HIDDEN and (method, own) != ("groupdro", ("preset=code",))
        robust = rule == "mean" or (method not in MEANLESS and mechanism == "none")
        try:
            config = toy_config(method, "scenario.clients=8", *settings)
            folder = RunFolder.create(tmp_path / "-".join((*own, rule, mechanism)), config)
            with pytest.raises(Begun):
                run_rounds(config, folder, Beginning(), start(config))  # type: ignore[arg-type]
            refused = ""
        except UserError as error:
            refused = str(error)
        assert (not refused) == (robust and (mechanism == "none" or hides)), (settings, refused)
        if refused:
            about = rf"(aggregation\.rule: '{rule}'|privacy\.mechanism: '{mechanism}') is not possible with "
            assert re.match(about, refused), refused
            assert "\n" not in refused
            assert len(refused) < 300

"""Every hyper-parameter says what it is, where it comes from, what it may be, and where a sweep looks."""

import re
from pathlib import Path

import numpy as np
import pytest

from perennial.common.methods import METHODS, Method, method_class
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import Search


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_knob_is_documented_and_searchable(name: str) -> None:
    method = METHODS[name]
    assert all((method.title, method.summary, method.source, method.evaluates))
    for key, facts in method.model_json_schema()["properties"].items():
        if key == "name":
            continue
        assert facts["description"], key
        assert facts["source"], key
        assert "default" in facts, key
        if facts.get("type") in ("number", "integer"):
            assert facts.keys() & {"minimum", "exclusiveMinimum"}, key
            assert facts.keys() & {"maximum", "exclusiveMaximum"}, key
            search = Search(**facts["search"])
            generator = np.random.default_rng(0)
            for _ in range(50):
                method.model_validate({key: search.draw(generator)})


def test_a_method_is_found_by_its_class() -> None:
    assert METHODS.keys() >= {"fedavg", "local", "ditto"}
    assert all(issubclass(found, Method) for found in METHODS.values())
    with pytest.raises(UserError, match="did you mean 'ditto'"):
        method_class("dito")


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_that_the_index_links(name: str) -> None:
    pages = Path(__file__).parents[2] / "docs" / "methods"
    link = re.search(rf"\]\((\w+\.md)\) `{name}`", (pages / "README.md").read_text(encoding="utf-8"))
    assert link, "docs/methods/README.md does not list it"
    assert METHODS[name].title in (pages / link[1]).read_text(encoding="utf-8")

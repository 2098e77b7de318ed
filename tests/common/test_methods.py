"""Every hyper-parameter says what it is, where it comes from, what it may be, and where a sweep looks."""

import re
from pathlib import Path

import numpy as np
import pytest

from perennial.common.methods import METHODS, Method, method_class
from perennial.common.tasks import EVERY_TASK, PredictionTask, TaskName
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import Search
from perennial.testing.tiny_federation import TOYS, toy_config


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


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", sorted([*METHODS, "references"]))
def test_a_method_says_why_it_lacks_a_task_and_what_has_it(name: str) -> None:
    method = method_class(name)
    lacking = [task for task in EVERY_TASK if task not in method.tasks]
    assert "classes" in method.tasks
    assert bool(lacking) == bool(method.tasks_because) == bool(method.nearest)
    assert not lacking or METHODS[method.nearest].tasks == EVERY_TASK


@pytest.mark.parametrize("name", sorted([*METHODS, "references"]))
@pytest.mark.parametrize("task", [task for task in TOYS if task != "classes"])
def test_a_run_of_a_task_that_a_method_lacks_is_refused_in_a_sentence(name: str, task: TaskName) -> None:
    method = method_class(name)
    if task in method.tasks:
        assert toy_config(f"{name}/{task}").scenario.task.name == task
        return
    with pytest.raises(UserError) as refused:
        toy_config(f"{name}/{task}")
    has, why = ", ".join(method.tasks), method.tasks_because
    assert str(refused.value) == (
        f"method.name: {name!r} is for {has}, since {why}, and not for {task}; take another method, such as "
        f"{method.nearest!r}"
    )


def test_the_table_of_tasks_is_the_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    head, *rows = (
        [cell.strip() for cell in line.strip("|").replace(r"\|", "¦").split("|")]
        for line in page.partition("## Which method has which task")[2].splitlines()
        if line.startswith("|") and not line.startswith("|---")
    )
    assert head[1:5] == list(EVERY_TASK)
    found = {row[0].strip("`"): row[1:] for row in rows}
    expected = {
        name: [
            *("✓" if task in method.tasks else "–" for task in EVERY_TASK),
            method.tasks_because.replace("|", "¦"),
            f"`{method.nearest}`",
        ]
        for name, method in METHODS.items()
        if method.tasks != EVERY_TASK
    }
    assert found == expected


def test_tasks_have_the_names_that_methods_know() -> None:
    assert {task.name for task in PredictionTask.__subclasses__()} <= {*EVERY_TASK}

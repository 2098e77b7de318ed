"""What the pages say that clients send of what they keep is what the methods declare (`test_contract.py` looks at
what is sent)."""

import json
import re
from pathlib import Path

import pytest
from flwr.app import Message
from tiny_runs import toy_site
from torch import tensor
from typer.testing import CliRunner

from perennial.client.methods.ditto import DittoClient
from perennial.client.trainer import Received
from perennial.common.methods import METHODS
from perennial.common.methods.base import EVERY, Method
from perennial.common.methods.ditto import Ditto
from perennial.common.methods.references import FILE
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.cli.main import app
from perennial.server.cli.show import COUNTS
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.kept_and_sent import Sent, check, is_copy
from perennial.testing.tiny_federation import SpoilingGrid, toy_config

DOCS = Path(__file__).parents[2] / "docs"
INDEX = re.findall(
    r"^\| \[.*\]\((\w+\.md)\) `([\w-]+)` \|", (DOCS / "methods" / "README.md").read_text(), re.MULTILINE
)


def row(names: list[str]) -> str:
    """The row of a page on these methods."""
    kinds = dict.fromkeys(METHODS[name].leaving() for name in names)
    if len(kinds) == 1:
        return f"| of that, sent | {min(kinds)} |"
    parts = {kind: ", ".join(f"`{name}`" for name in names if METHODS[name].leaving() == kind) for kind in kinds}
    return f"| of that, sent | {'; '.join(f'{kind} ({of})' for kind, of in parts.items())} |"


def test_every_method_is_in_the_index() -> None:
    assert sorted(name for _, name in INDEX) == sorted(METHODS)


@pytest.mark.parametrize("page", sorted({page for page, _ in INDEX}))
def test_a_methods_page_says_what_is_sent_of_what_is_kept(page: str) -> None:
    assert row([name for found, name in INDEX if found == page]) in (DOCS / "methods" / page).read_text()


def test_the_table_of_the_deployment_page_has_all_that_send_something() -> None:
    text = (DOCS / "deployment.md").read_text()
    found = re.search(r"\| method \| sends of what it keeps \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text)
    assert found is not None
    rows = [f"| `{name}` | {method.leaving()} |" for name, method in METHODS.items() if method.sends]
    assert found[1].splitlines() == rows


def test_the_table_of_the_privacy_page_has_all_methods() -> None:
    text = (DOCS / "privacy.md").read_text()
    for name, method in METHODS.items():
        allowed = "yes" if method.sums else "no"
        assert re.search(rf"^\| `{name}` \| {allowed} \| {re.escape(method.leaving())} \|", text, re.MULTILINE), (
            name
        )


def test_show_says_what_is_sent_of_what_is_kept() -> None:
    shown = CliRunner().invoke(app, ["show", "method", "l2sgd"])
    assert "a client keeps from round to round, it sends: `personal`: whenever it changes" in " ".join(
        shown.output.split()
    )
    data = json.loads(CliRunner().invoke(app, ["show", "method", "ditto", "--json"]).output)
    assert data["sends of what it keeps"] == "nothing"


def words(text: str) -> str:
    return " ".join(text.split())


def test_show_and_the_page_say_alike_what_split_makes_leave_a_site() -> None:
    shown = words(CliRunner().invoke(app, ["show", "method", "fedsdr"]).output)
    assert f"With references (docs/selection.md) it also sends, at each evaluation, {COUNTS}." in shown
    data = json.loads(CliRunner().invoke(app, ["show", "method", "fedsdr", "--json"]).output)
    assert data["sends with references"] == COUNTS
    page = words((DOCS / "selection.md").read_text())
    assert COUNTS.replace("its held-out", "a site's held-out") in page
    assert "4 · E² · classes for each evaluated model" in page


@pytest.mark.parametrize("method", ["ditto", "fedsdr"])
def test_with_references_these_counts_leave_a_site_and_nothing_else(method: str, tmp_path: Path) -> None:
    sent: dict[str, dict[str, int]] = {}

    def spy(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == "evaluate":
            assert reply.content.array_records == {}
            metrics = reply.content.metric_records["metrics"]
            lengths = {name: len(value) if isinstance(value, list) else 1 for name, value in metrics.items()}
            sent.setdefault(place, lengths)
            assert lengths == sent[place]
        return reply

    made = toy_config("references", rounds=1)
    LocalRuntime(made).run(RunFolder.create(tmp_path / "references", made))
    named = f"references='{tmp_path / 'references' / FILE}'"
    for place, settings in (("without", ()), ("with", (named,))):
        config = toy_config(method, *settings, rounds=1)
        here = LocalRuntime(config)
        here.grid = SpoilingGrid(here.grid, spy)  # type: ignore[assignment]
        assert here.run(RunFolder.create(tmp_path / place, config))["left_out"] == {}
    environments, classes = 2, 2
    more = {
        f"{model}/split/{column}": 4 * environments**2 * classes // 2
        for model in METHODS[method].evaluates
        for column in ("samples", "correct")
    }
    assert sent["with"] == sent["without"] | more


class Keeper(Method):
    """A method that keeps a record and does not say that it sends it."""

    keeps = frozenset({"own"})


class Teller(Keeper):
    """One that says so."""

    sends = frozenset({("own", EVERY)})


def test_a_method_that_sends_what_it_does_not_declare_is_noticed() -> None:
    kept = {"own": {"w": tensor([1.0, 2.0])}}
    told, silent = Sent(0, {}, {"model": kept["own"]}, {}, kept), Sent(0, {}, {"model": {}}, {}, kept)
    check(Keeper, [silent], ())
    check(Teller, [told], ())
    with pytest.raises(AssertionError, match="'own', sent never"):
        check(Keeper, [told], ())
    with pytest.raises(AssertionError, match="'own', sent whenever it changes"):
        check(Teller, [silent], ())
    with pytest.raises(AssertionError, match="other is kept"):
        check(Keeper, [Sent(0, {}, {}, {}, {"other": kept["own"]})], ())


def test_after_a_single_step_of_each_dittos_first_reply_is_its_personal_model() -> None:
    site = toy_site()
    client = DittoClient(site, Ditto(local_steps=1, personal_steps=1), {})
    sent = client.train(Received(1, {MODEL: client.initial()})).arrays[MODEL]
    assert all(is_copy(tensor, sent[name]) for name, tensor in client.kept[PERSONAL].items())


def test_what_the_client_was_sent_tells_nothing_new() -> None:
    kept = {"own": {"w": tensor([1.0, 2.0])}}
    check(Keeper, [Sent(0, {"model": kept["own"]}, {"model": kept["own"]}, {}, kept)], ())


def test_a_multiple_tells_as_much() -> None:
    ramp = tensor([float(number) for number in range(10)])
    assert is_copy(ramp, -3 * ramp)
    assert not is_copy(ramp, ramp + 1)

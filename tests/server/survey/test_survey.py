"""A survey: what leaves the sites, what is computed of it, and what becomes of answers that cannot be used."""

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from messy_tables import SITES, hospitals
from typer.testing import CliRunner

from perennial.client.app import OneHandlerApp
from perennial.client.node.policy import Policy
from perennial.client.node.settings import Consent
from perennial.client.node.survey import Respondent, no_numbers_as_names, respond, survey_request
from perennial.client.site_data import OwnSite
from perennial.common.data.columns import CategoryColumn, NumberColumn
from perennial.common.data.site_files import read
from perennial.common.privacy.secure_aggregation import ACTIONS
from perennial.common.survey import SHAPE, SUMS, SURVEY, TOLD, Asked, Question, Request, entered, limbs, whole
from perennial.common.utils.errors import UserError
from perennial.common.wire import CLIENT, CONFIG, METRICS, REFUSED, ROUND, RUN, from_record, records, to_record
from perennial.server.cli.main import app
from perennial.server.cli.sites import _announce
from perennial.server.local import number
from perennial.server.run.grid import LocalGrid
from perennial.server.survey.describe import announcement, beside_pictures, question, with_pictures
from perennial.server.survey.survey import SHARES, Surveyed, quantile, survey, surveyed

Spoil = Callable[[Message, Message], Message]
"""From a request and the honest reply to what is sent."""
MEDIAN = question(["median"])


class Federation(LocalGrid):
    """Sites with a table each, whose messages are kept as they are on the wire."""

    def __init__(
        self,
        folder: Path,
        spoil: dict[str, Spoil] | None = None,
        policies: dict[str, Policy] | None = None,
        **consents: Consent,
    ) -> None:
        self.wire: list[tuple[str, Message, Message]] = []
        files = sorted(folder.glob("*.csv"))

        def load(file: Path) -> Callable[[Any], Any]:
            return lambda asked: read(file, asked.label_column, asked.environment_column)

        sites = [Respondent(file.stem, load(file), consents.get(file.stem, Consent.full), 10) for file in files]

        def reply(message: Message, context: Context) -> Message:
            site = sites[number(context)]
            try:
                policy = (policies or {}).get(site.name, Policy())
                policy.must_allow(message, {})
                answer = site.answer(message)
                policy.must_allow_reply(message, answer)
            except UserError as error:  # as at a node
                raise RuntimeError(str(error)) from None
            answer = (spoil or {}).get(site.name, lambda _, honest: honest)(message, answer)
            self.wire.append((site.name, message, answer))
            return answer

        super().__init__(OneHandlerApp(reply), len(files))


def steps(grid: Federation) -> set[str]:
    """Which sums were asked for."""
    texts = [str(records(message.content, ConfigRecord)[CONFIG][SURVEY]) for _, message, _ in grid.wire]
    return {request.asked.step for text in texts if (request := Request.model_validate_json(text)).asked}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hospitals(tmp_path / "sites")
    return tmp_path / "sites"


def rows(folder: Path, site: str, change: Callable[[str], str]) -> None:
    """Change each row of a site's table."""
    head, *lines = (folder / f"{site}.csv").read_text().splitlines()
    (folder / f"{site}.csv").write_text("\n".join([head, *map(change, lines)]) + "\n")


def add(table: Path, text: str) -> None:
    table.write_text(table.read_text() + text)


def test_statistics_are_those_of_all_rows(folder: Path) -> None:
    found = survey(Federation(folder), MEDIAN).scenario
    tables = [
        np.genfromtxt(folder / f"{site}.csv", delimiter=",", skip_header=1, usecols=(0, 1)) for site in SITES
    ]
    for place, name in enumerate(("age", "pressure")):
        values = np.concatenate(tables)[:, place]
        column = announcement(found)["columns"][name]
        assert column["mean"] == pytest.approx(np.nanmean(values), rel=1e-5)
        assert column["scale"] == pytest.approx(np.nanstd(values), rel=1e-5)
        assert column["fill"] == pytest.approx(np.nanmedian(values), abs=np.nanstd(values) / 4)  # in tens of rows
    assert found.sites == SITES


def test_secure_aggregation_gives_the_same_and_hides_each_site(folder: Path) -> None:
    plain, grid = survey(Federation(folder), MEDIAN), Federation(folder)
    secure = survey(grid, question(["median"], secure=True))
    assert (secure.scenario, secure.facts) == (plain.scenario, plain.facts)
    assert (set(plain.sites), secure.sites) == (set(SITES), {})
    sent = {name for _, message, reply in grid.wire if message.metadata.message_type == SUMS
            for name in records(reply.content, ArrayRecord)}  # fmt: skip
    assert sent == {"masked"}


@pytest.mark.parametrize("values", [[0.0, -1.5, 1e20, 2.0**-60], [3.25, 7.5, -1e20, 0.1]])
def test_whole_numbers_for_secure_aggregation_are_exact(values: list[float]) -> None:
    assert whole(limbs(values).tolist()) == pytest.approx(values, abs=2**-63)
    twice = whole((limbs(values) + limbs(values)).tolist())
    assert twice == pytest.approx([2 * value for value in values], abs=2**-62)
    with pytest.raises(ValueError, match="too large"):
        limbs([1e30])


def test_a_median_is_found_by_bins() -> None:
    counts = [0.0] * 130
    counts[65] = 4.0  # from 0 to 1/32
    assert quantile(counts, -2, 2) == pytest.approx(1 / 64)
    counts[0] = 4.0  # as many below −2
    assert quantile(counts, -2, 2) == pytest.approx(-1)
    assert quantile([0.0] * 129 + [1.0], -2, 2) == 2


def test_quantiles_are_found_by_bins() -> None:
    """Of 640 numbers from −2 to 2 that are equally far apart, five in each bin."""
    counts = [0.0, *[5.0] * 128, 0.0]
    for share in SHARES:
        assert quantile(counts, -2, 2, share) == pytest.approx(-2 + 4 * share)


def test_quantiles_are_told_where_they_are_asked_for(tmp_path: Path) -> None:
    """Of thousands of rows, in which groups of ten neighbours are narrow; a tail beyond the bins is told so."""
    random = np.random.default_rng(0)
    for site in ("a", "b", "c"):
        values = np.stack([random.normal(50, 10, 2000), random.pareto(2.1, 2000)], axis=1)
        lines = [f"{age:.6f},{cost:.6f},{'ill' if age > 50 else 'well'}" for age, cost in values]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,cost,label", *lines]) + "\n")
    tables = [np.genfromtxt(tmp_path / f"{s}.csv", delimiter=",", skip_header=1, usecols=(0, 1)) for s in "abc"]
    every = np.concatenate(tables)
    plain, grid, more = question(), Federation(tmp_path), Federation(tmp_path)
    assert not any("quantiles" in fact for fact in survey(grid, plain).facts)
    found = survey(more, plain, quantiles=True)
    assert (steps(grid), steps(more)) == ({"counts", "squares"}, {"counts", "squares", "bins"})

    secure = survey(Federation(tmp_path), question(secure=True), quantiles=True)
    assert (secure.facts, secure.scenario) == (found.facts, found.scenario)
    for place, name in enumerate(("age", "cost")):
        (line,) = (fact for fact in found.facts if fact.startswith(f"quantiles of {name}: "))
        told = re.findall(r"(\d+) % (≥ |≤ )?([-\d.e]+)", line)
        assert [int(share) for share, _, _ in told] == [5, 25, 50, 75, 95]
        deviation = every[:, place].std()
        for share, beyond, value in told:
            exact = np.percentile(every[:, place], int(share))
            if not beyond:
                assert float(value) == pytest.approx(exact, abs=deviation / 16)
            else:
                assert exact >= float(value) if beyond == "≥ " else exact <= float(value)
    wide = survey(Federation(tmp_path), question(["median"]))
    assert [fact for fact in wide.facts if "quantiles" in fact] == [
        fact for fact in found.facts if "quantil" in fact
    ]


# ---------------------------------------------------------------------- what is on the wire


@pytest.mark.parametrize("secure", [False, True])
def test_nothing_but_what_the_page_says_is_on_the_wire(folder: Path, secure: bool) -> None:
    """Names that ten rows have, counts of none or of ten rows and more, and sums of ten numbers and more."""
    rows(folder, "va", lambda row: row.replace("fixed", "rare-disease") if row.startswith("6") else row)
    grid = Federation(folder)
    survey(grid, question(["median"], secure=secure))
    for site, message, reply in grid.wire:
        config = records(reply.content, ConfigRecord).get(CONFIG, ConfigRecord())
        arrays = records(reply.content, ArrayRecord)
        action = message.metadata.message_type
        if action == SHAPE:
            assert not arrays
            assert set(config) == {CLIENT, TOLD}
            told = json.loads(str(config[TOLD]))
            assert set(told) <= {"classes", "columns", "environments"}
            text = (folder / f"{site}.csv").read_text()
            names = [name for own in told["columns"].values() for name in own.get("names", ())]
            assert all(text.count(name) >= 10 for name in [*names, *told["classes"]])
            assert "rare-disease" not in str(config[TOLD])
            continue
        assert not config
        assert set(records(reply.content, MetricRecord)) == {METRICS}
        if secure:
            assert action in (*ACTIONS, SUMS)
            assert set(arrays) <= {"keys", "shares", "masked"}
            continue
        assert (action, set(arrays)) == (SUMS, {SUMS})
        asked = Request.model_validate_json(str(records(message.content, ConfigRecord)[CONFIG][SURVEY])).asked
        assert asked
        for (what, _, _), value in entered(asked, from_record(arrays[SUMS])[SUMS].tolist()).items():
            assert what in ("rows", "class", "empty", "count", "sum", "square", "bin")
            if what in ("rows", "class", "count", "bin"):
                assert value == 0 or value >= 10


def test_a_server_that_calls_a_column_of_numbers_names_learns_nothing_of_it(folder: Path) -> None:
    file = folder / "va.csv"
    rows(folder, "va", lambda row: re.sub(r"(ill|well)$", lambda label: str(len(label[0])), row))  # 3 and 4
    usual = ("60", "60", "none", "fixed", "")
    rows(folder, "va", lambda row: ",".join(a or b for a, b in zip(row.split(","), usual, strict=True)))
    own = OwnSite(file, "va")
    for asked, column in (
        (question(label_column="age"), "age"),
        (question(environment_column="age"), "age"),
        (question(categories=["pressure"]), "pressure"),
    ):
        found = read(file, asked.label_column, asked.environment_column)
        with pytest.raises(UserError, match=f"va.csv does not tell the numbers of {column} as names; `perennial"):
            no_numbers_as_names(found, asked, own)
    for asked, named in (
        (question(), own),  # the column `label` is one of names by its own name
        (question(categories=["pain"]), own),
        (question(label_column="pain"), own),
        (question(), OwnSite(file, "va", label_column="age")),
    ):
        found = read(file, named.label_column or asked.label_column, asked.environment_column)
        no_numbers_as_names(found, asked, named)


def test_numbers_among_names_are_not_told_as_names(folder: Path) -> None:
    file = folder / "va.csv"
    for change in (
        lambda row: row.replace("none,fixed,", "none,1.75,"),  # a column that is one of names by itself
        lambda row: row.replace("none,fixed,", 'none,"1,75",'),
    ):
        before = file.read_text()
        rows(folder, "va", change)
        with pytest.raises(UserError, match="does not tell the numbers of thal as names"):
            no_numbers_as_names(read(file), question(), OwnSite(file, "va"))
        no_numbers_as_names(read(file), question(drop=["thal"]), OwnSite(file, "va"))
        file.write_text(before)


@pytest.mark.parametrize("stray", ["unknown", ".", "#DIV/0!", "1’000"])
def test_a_column_of_numbers_with_a_stray_text_is_no_category(stray: str, folder: Path) -> None:
    lines = (folder / "va.csv").read_text().splitlines()
    lines[3] = f"{stray},{lines[3].partition(',')[2]}"
    (folder / "va.csv").write_text("\n".join(lines) + "\n")
    found = survey(Federation(folder), MEDIAN)
    assert found.left_out == {
        "va": "va.csv: row 3, column 'age' is no number; most others are numbers, so correct the cell or empty "
        "it, or say --category age if they are names"
    }


def test_consent(folder: Path) -> None:
    grid = Federation(folder, va=Consent.none, hungary=Consent.counts)
    found = survey(grid, MEDIAN)
    assert found.left_out == {"va": "this site takes part in no survey; `perennial join --survey full` does"}
    assert "hungary: 40 rows" in "".join(f"{site}: {told}" for site, told in found.sites.items())
    for site, message, reply in grid.wire:
        if site == "va":
            assert set(records(reply.content, ConfigRecord)[CONFIG]) == {CLIENT, REFUSED}
        if site == "hungary" and message.metadata.message_type == SUMS:
            asked = Request.model_validate_json(str(records(message.content, ConfigRecord)[CONFIG][SURVEY])).asked
            assert asked
            sums = entered(asked, from_record(records(reply.content, ArrayRecord)[SUMS])[SUMS].tolist())
            assert not any(
                value for (what, _, _), value in sums.items() if what in ("count", "sum", "square", "bin")
            )


def test_a_site_whose_policy_requires_secure_aggregation_tells_sums_in_no_other_way(folder: Path) -> None:
    """And takes part in a survey that has it, and in one beside others that do not require it."""
    hidden = {"va": Policy(require="secagg", methods=("ditto",), max_rounds=1)}
    grid = Federation(folder, policies=hidden)
    found = survey(grid, MEDIAN)
    (reason,) = found.left_out.values()
    assert "this site's policy does not allow a survey without secure aggregation; it requires 'secagg'" in reason
    assert found.scenario.sites == ("cleveland", "hungary", "switzerland")
    assert "va" not in {site for site, _, _ in grid.wire}  # not even a name has left it
    message = Message(RecordDict(), 1, SUMS)
    with pytest.raises(UserError, match=r"does not allow 'query\.sums' without secure aggregation"):
        hidden["va"].must_allow_reply(message, Message(RecordDict({SUMS: ArrayRecord()}), reply_to=message))

    secure = survey(Federation(folder, policies=hidden), question(["median"], secure=True))
    assert secure.left_out == {}
    assert secure.scenario == survey(Federation(folder), MEDIAN).scenario


def test_a_site_keeps_to_its_own_least(folder: Path) -> None:
    """Whatever the server asks for."""
    grid = Federation(folder)
    rows(folder, "va", lambda row: row.replace("fixed", "seldom") if row.startswith("6") else row)
    survey(grid, question(["median"], least=1))
    assert all("seldom" not in str(records(reply.content, ConfigRecord).get(CONFIG)) for _, _, reply in grid.wire)


@pytest.mark.parametrize("rows", [19, 20, 100, 109])
def test_two_questions_tell_no_fewer_numbers_apart_than_a_site_s_least(rows: int, tmp_path: Path) -> None:
    """Else groups of 12 and of 13 neighbours would tell the number that is in one of them alone."""
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"{number},ill\n" for number in range(rows)))
    respondent = Respondent("a", lambda _: read(tmp_path / "a.csv"), Consent.full, 10)
    ends: dict[int, set[int]] = {}
    for least in range(1, min(60, rows + 1)):
        sums = respondent.table(question(least=least)).sums(Asked(step="bins", bins={"x": (0.0, rows)}))
        counts = [int(count) for count in sums if count]
        assert min(counts) >= max(10, least)
        ends[least] = {0, *np.cumsum(counts).tolist()}
    every = sorted(set[int]().union(*ends.values()))
    assert every[-1] == rows
    assert min(np.diff(every)) >= 10
    assert ends[1] == ends[10] == {*range(0, rows - 9, 10), rows}


def test_squares_around_any_mean_tell_no_more_than_sum_and_squares(tmp_path: Path) -> None:
    """Of 1, 5, 6 and of 2, 3, 7 both are the same; rounded to multiples of 4 they are not."""

    def told(name: str, numbers: str, mean: float) -> float:
        (tmp_path / name).write_text("x,label\n" + "".join(f"{number},ill\n" for number in numbers * 5))
        respondent = Respondent("a", lambda _: read(tmp_path / name), Consent.full, 10)
        (square,) = respondent.table(question()).sums(Asked(step="squares", means={"x": mean}))
        return square

    assert told("a.csv", "156", 4) == 5 * (9 + 1 + 4)
    for mean in (0.5, *(2.0**power for power in range(60))):
        assert told("a.csv", "156", mean) == told("b.csv", "237", mean)


# ---------------------------------------------------------------------- each site's own scale


def test_each_site_may_have_its_own_scale(folder: Path) -> None:
    rows(
        folder,
        "va",
        lambda row: ",".join([row.split(",")[0] and str(1000 + float(row.split(",")[0])), *row.split(",")[1:]]),
    )
    found = survey(Federation(folder), MEDIAN, per_site=True).scenario
    assert found.columns_of("va")["age"].mean > 1000  # type: ignore[union-attr]
    assert found.columns_of("cleveland")["age"].mean < 100  # type: ignore[union-attr]
    x = found.divided("va", 0, read(folder / "va.csv")).train.x
    assert abs(float(x[:, 0].mean())) < 0.5
    assert found.at("va").cells["age"] == found.columns_of("va")["age"]
    with pytest.raises(UserError, match=r"its own .* say whose, such as with client='cleveland' or --client c"):
        found.at("")
    with pytest.raises(UserError, match="--scope site needs each site's own sums"):
        survey(Federation(folder), question(["median"], secure=True), per_site=True)


# ---------------------------------------------------------------------- what cannot be used


def others_go_on(found: Surveyed, site: str, reason: str) -> None:
    assert reason in found.left_out[site]
    assert found.scenario.sites == tuple(other for other in SITES if other != site)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "va.csv cannot be read"),
        ("age,pressure,pain,thal,label\n", "va.csv has no rows"),
        ("age,pressure,pain,thal,label\n1,2,none,fixed,ill\n", "va.csv has fewer than 10 rows"),
        ("age,pain,thal,label\n" + "1,none,fixed,ill\n" * 20, "it lacks column 'pressure', which most sites have"),
        (
            "age,pressure,pain,thal,label\n" + "old,2,none,fixed,ill\n" * 20,
            "column 'age' has text, and numbers at most sites; --category age makes names of them, --drop age",
        ),
        (
            "age,pressure,pain,thal,label\n" + '"77,25",2,none,fixed,ill\n' * 20,
            "column 'age' has numbers with a comma; write 3.5 for 3,5, and 1234 for 1,234, or say",
        ),
        (
            "age,pressure,pain,thal,label\n" + "2020-01-02,2,none,fixed,ill\n" * 20,
            "'age' has dates, and numbers at most sites; --drop age",
        ),
        ("age,pressure,pain,thal,label\n" + "1e999,2,none,fixed,ill\n" * 20, "column 'age' is no finite number"),
    ],
)
def test_a_table_that_does_not_fit(text: str, reason: str, folder: Path) -> None:
    (folder / "va.csv").write_text(text)
    others_go_on(survey(Federation(folder), MEDIAN), "va", reason)


def test_names_that_are_spelt_in_several_ways_are_pointed_out(folder: Path) -> None:
    """Of those that are told alone, and under secure aggregation without saying which site has which."""
    rows(folder, "va", lambda row: row.replace(",well", ",Well"))
    rows(folder, "hungary", lambda row: row.replace(",ill", ", ill ").replace(",normal", ",Normal"))
    add(folder / "cleveland.csv", "50,120,none,fixed,ILL\n")
    said = "look like the same one; if so, spell them alike in the tables"
    assert [remark for remark in survey(Federation(folder), MEDIAN).remarks if "look like" in remark] == [
        f"categories 'Normal' (hungary) and 'normal' (cleveland and 2 more) of column 'thal' {said}",
        f"classes 'Well' (va) and 'well' (cleveland and 2 more) {said}",
    ]
    secure = survey(Federation(folder), question(["median"], secure=True)).remarks
    assert f"classes 'Well' and 'well' {said}" in secure
    assert not any("ILL" in remark for remark in secure)


def test_a_sites_own_log_has_names_of_few_rows_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(folder / "va.csv", "50,120,none,fixed,ILL\n")
    request = Request(question=MEDIAN).model_dump_json()
    content = RecordDict({CONFIG: ConfigRecord({SURVEY: request, RUN: "x", ROUND: 0})})
    own = OwnSite(folder / "va.csv", "va")
    with caplog.at_level(INFO):
        reply = respond(Message(content, 1, SHAPE), own, {"survey": "full", "state-dir": str(folder)})
    assert "ILL" not in str(records(reply.content, ConfigRecord)[CONFIG][TOLD])
    said = "classes 'ILL' and 'ill' look like the same one; if so, spell them alike in the tables"
    assert f"perennial: survey x: va.csv: {said}" in caplog.messages


def test_lists_of_numbers_are_names_where_the_server_says_so(folder: Path) -> None:
    for site in SITES:
        rows(folder, site, lambda row: row.replace(",fixed,", ',"1,3",').replace(",normal,", ",2,"))
    with pytest.raises(UserError, match="column 'thal' has numbers with a comma"):
        survey(Federation(folder), MEDIAN)
    column = survey(Federation(folder), question(["median"], ["thal"])).scenario.columns["thal"]
    assert isinstance(column, CategoryColumn)
    assert column.categories == ("2", "1,3")


def test_one_class_here_and_two_there(folder: Path) -> None:
    rows(folder, "va", lambda row: row.replace("well", "ill"))
    assert survey(Federation(folder), MEDIAN).scenario.labels == ("ill", "well")
    for site in SITES:
        rows(folder, site, lambda row: row.replace("well", "ill"))
    with pytest.raises(UserError, match="has samples of class 'ill' alone"):
        survey(Federation(folder), MEDIAN)


def changed(place: int, value: float, step: str = "counts") -> Spoil:
    """One number of a step's sums is another."""

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.message_type != SUMS:
            return reply
        asked = Request.model_validate_json(str(records(request.content, ConfigRecord)[CONFIG][SURVEY])).asked
        assert asked
        if asked.step != step:
            return reply
        sums = from_record(records(reply.content, ArrayRecord)[SUMS])[SUMS].clone()
        sums[place] = value
        content = RecordDict({SUMS: to_record({SUMS: sums}), METRICS: MetricRecord()})
        return Message(content, reply_to=request)

    return spoil


def saying(key: str, text: str) -> Spoil:
    """Another first answer."""

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.message_type == SHAPE:
            config = ConfigRecord({**records(reply.content, ConfigRecord)[CONFIG], key: text})
            return Message(RecordDict({CONFIG: config, METRICS: MetricRecord()}), reply_to=request)
        return reply

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (changed(0, -40), "its count of rows  is -40"),
        (changed(0, 7), "it tells of 7 rows, and 10 are the least"),
        (changed(1, 10.5), "its count of class ill is 10.5"),
        (changed(1, 1000), "it counts more of class than rows"),
        (changed(3, 1000), "has more cells than rows"),
        (changed(9, float("nan")), "is not finite"),
        (changed(9, 1e90), "has a sum of 1e+90"),
        (changed(0, -1, "squares"), "has a sum of squares of -1"),
        (changed(5, -3, "bins"), "its count of bin age is -3"),
        (changed(5, 300, "bins"), "numbers in bins"),
        (saying(TOLD, "no JSON"), "what it tells of its table cannot be read"),
        (saying(TOLD, '{"classes": ["a\\u0007b"], "columns": {"age": {"kind": "number"}}}'), "cannot be shown"),
        (saying(TOLD, '{"classes": ["ill"], "columns": {"x": {"kind": "number"}}}'), "which most sites"),
    ],
)
def test_a_hostile_or_broken_answer(spoil: Spoil, reason: str, folder: Path) -> None:
    found = survey(Federation(folder, {"va": spoil}), MEDIAN)
    others_go_on(found, "va", reason)
    (folder / "va.csv").unlink()
    without = survey(Federation(folder), MEDIAN).scenario
    assert found.scenario.model_copy(update={"columns": {}}) == without.model_copy(update={"columns": {}})
    for name, column in without.columns.items():
        if isinstance(column, NumberColumn):  # bins may have been around another mean
            own = found.scenario.columns[name]
            assert isinstance(own, NumberColumn)
            assert (own.mean, own.scale) == pytest.approx((column.mean, column.scale), rel=1e-5)
            assert own.fill == pytest.approx(column.fill, abs=column.scale / 4)


def test_a_column_of_pictures_is_announced_and_no_site_tells_of_it(folder: Path) -> None:
    plain = survey(Federation(folder), MEDIAN).scenario
    for site in SITES:
        head, *lines = (folder / f"{site}.csv").read_text().splitlines()
        pictures = [f"scans/{number}.png,{line}" for number, line in enumerate(lines)]
        (folder / f"{site}.csv").write_text("\n".join([f"scan,{head}", *pictures]))
    grid = Federation(folder)
    found = with_pictures(survey(grid, beside_pictures(MEDIAN, "scan")), MEDIAN, "scan", (3, 8, 8)).scenario
    assert (found.image_column, found.image_shape, found.ignored) == ("scan", (3, 8, 8), ())
    assert found.columns == plain.columns
    assert not any("scans/" in str(reply.content) for _, _, reply in grid.wire)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--image-column", "scan"), "--image-column and --image-shape go together"),
        (("--image-shape", "3,8,8"), "--image-column and --image-shape go together"),
        (("--image-column", "scan", "--image-shape", "8,8"), "--image-shape 8,8: write channels (1 or 3), height"),
        (("--image-column", "scan", "--image-shape", "2,8,8"), "--image-shape 2,8,8: write channels (1 or 3)"),
    ],
)
def test_pictures_that_cannot_be_are_refused_before_any_site_is_asked(flags: Sequence[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["survey", *flags])
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())


def answer(**more: Any) -> dict[str, Any]:
    """What a server tells of a survey, as JSON brings it."""
    return {"scenario": {"name": "own-data", "labels": ["no", "yes"]}, "facts": ["200 rows"], **more}


def test_what_a_server_tells_becomes_comments_and_names_and_no_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("\n", "\r", "\r\n", "\x0b", "\x85", "\u2028", "\x1b[2J\n")
    facts = [f'2 rows{line}plugins = ["wipe_old_runs"]' for line in lines]
    labels = ["no", 'yes"]\nplugins = ["x"]', "a\x1b[2J\x9b1m\x7f", "Größe"]
    found = surveyed(answer(facts=facts, scenario={"name": "own-data", "labels": labels}))
    _announce(found, tmp_path / "run.toml", as_json=False)
    text = (tmp_path / "run.toml").read_text()
    assert text.count("# 2 rows") == len(lines)
    assert tomllib.loads(text)["scenario"]["labels"] == labels
    assert tomllib.loads(text).keys() == {"scenario"}
    _announce(found, None, as_json=True)
    assert json.loads(shown := capsys.readouterr().out)["scenario"]["labels"] == labels
    assert all(line.isprintable() for line in (*shown.splitlines(), *text.splitlines()))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"facts": [1]}, {"facts": "none"}, {"remarks": {}}, {"sites": []}, {"left_out": {"a": 1}}),
        *({"scenario": None}, {"scenario": {"name": "own-data", "labels": ["one"]}}),
        {"scenario": {"name": "own-data", "plugins": ["wipe_old_runs"]}},
    ],
)
def test_an_answer_that_no_server_of_this_project_gives_is_one_sentence(wrong: dict[str, Any]) -> None:
    assert surveyed(answer()).scenario.labels == ("no", "yes")
    with pytest.raises(UserError, match=r"^the server's answer to the survey cannot be read: "):
        surveyed(answer(**wrong))


def naming(classes: Sequence[str], environments: Sequence[str] | None = None) -> Spoil:
    """An honest first answer, and these names besides."""

    def spoil(request: Message, reply: Message) -> Message:
        if request.metadata.message_type != SHAPE:
            return reply
        told = json.loads(str(records(reply.content, ConfigRecord)[CONFIG][TOLD]))
        told["classes"] = [*told["classes"], *classes]
        told |= {"environments": environments} if environments else {}
        return saying(TOLD, json.dumps(told))(request, reply)

    return spoil


NAMES = [f"c{number}" for number in range(1000)]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (naming([f"{number:x}" for number in range(100_000)]), "classes: there are 100002, and 1000 are the most"),
        (naming(NAMES[:999]), "classes: there are 1001, and 1000 are the most"),
        (naming([], [*NAMES, "c"]), "environments: there are 1001, and 1000 are the most"),
        (naming(["made up"]), "it names class 'made up' and counts no row of it"),
        (naming(NAMES[:998]), "it names class 'c0' and counts no row of it"),
        (naming([], ["made up"]), "it names environment 'made up' and counts no row of it"),
    ],
)
def test_names_that_are_too_many_or_of_no_row(spoil: Spoil, reason: str, folder: Path) -> None:
    found = survey(Federation(folder, {"va": spoil}), MEDIAN)
    others_go_on(found, "va", reason)
    (folder / "va.csv").unlink()
    without = survey(Federation(folder), MEDIAN)
    assert (found.scenario.labels, found.scenario.environments) == (("ill", "well"), without.scenario.environments)
    assert (found.facts, found.sites) == (without.facts, without.sites)


def test_under_secure_aggregation_a_name_of_no_row_is_not_announced(folder: Path) -> None:
    """Who has counted none cannot be seen."""
    spoilt: dict[str, Spoil] = {"va": naming(["made up"], ["nowhere"])}
    found = survey(Federation(folder, spoilt), question(["median"], secure=True))
    honest = survey(Federation(folder), question(["median"], secure=True))
    assert (found.left_out, found.scenario, found.facts) == ({}, honest.scenario, honest.facts)


def test_a_table_of_too_many_classes_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,label\n" + "".join(f"1,c{number}\n" for number in range(1001)))
    respondent = Respondent("a", lambda _: read(tmp_path / "a.csv"), Consent.full, 1)
    with pytest.raises(UserError, match=r"a\.csv has more than 1000 classes or environments, or a name of a"):
        respondent.table(question(least=1)).shape()


def test_sites_with_too_many_names_for_a_question_are_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several may have together of which each has as many as are allowed."""
    monkeypatch.setattr("perennial.server.survey.survey.MOST_LETTERS", 7_000)
    spoilt: dict[str, Spoil] = {"va": naming(NAMES[:800]), "hungary": naming([f"d{n}" for n in range(900)])}
    found = survey(Federation(folder, spoilt), MEDIAN)
    reason = "it tells of more names than any site that stays, too many to ask all sites about"
    assert found.left_out["hungary"] == reason
    assert "names class 'c0'" in found.left_out["va"]
    assert found.scenario.sites == ("cleveland", "switzerland")
    monkeypatch.setattr("perennial.server.survey.survey.MOST_LETTERS", 10)
    with pytest.raises(UserError, match="it tells of more names"):
        survey(Federation(folder), MEDIAN)


@pytest.mark.parametrize("letters", [6, 100])
def test_a_question_about_all_columns_of_a_shape_is_not_too_long(letters: int) -> None:
    number = 2**20 // (letters + len('"":{"kind":"empty"},'))
    names = tuple(f"{place:0{letters}}" for place in range(number))
    question, value = Question(drop=names), -1.2345678901234567e-300
    for asked in (
        Asked(step="counts", columns=names, numbers=names),
        Asked(step="squares", means=dict.fromkeys(names, value)),
        Asked(step="bins", bins=dict.fromkeys(names, (value, value))),
    ):
        text = Request(question=question, asked=asked).model_dump_json(exclude_defaults=True)
        config = ConfigRecord({SURVEY: text, RUN: "x", ROUND: 0})
        assert survey_request(Message(RecordDict({CONFIG: config}), 1, SUMS))[0].asked == asked
        assert len(text) > 2**20


def test_two_sites_of_one_name(folder: Path) -> None:
    found = survey(Federation(folder, {"va": saying(CLIENT, "hungary")}), MEDIAN)
    assert "node 2 and node 4 say that they are hungary" in found.left_out["hungary"]
    assert found.scenario.sites == ("cleveland", "switzerland")


def test_who_is_asked_for(folder: Path) -> None:
    found = survey(Federation(folder), MEDIAN, ("va", "hungary", "north"), named=("va", "hungary", "north"))
    assert found.left_out["north"] == "is not connected"
    assert "--site" in found.left_out["cleveland"]
    assert found.scenario.sites == ("hungary", "north", "va")
    with pytest.raises(UserError, match=r"can be surveyed \(west: is not connected; cleveland: is none"):
        survey(Federation(folder), MEDIAN, ("west",))


def test_under_secure_aggregation_two_sites_are_too_few(folder: Path) -> None:
    with pytest.raises(UserError, match="takes at least 3"):
        survey(Federation(folder, va=Consent.none, hungary=Consent.none), question(["median"], secure=True))


def test_a_question_that_is_none() -> None:
    assert [entry[0] for entry in Asked(step="squares", means={"a": 0}).entries()] == ["square"]
    respondent = Respondent("a", lambda _: pytest.fail("nothing is read"), Consent.full, 10)
    for config in ({}, {SURVEY: "{}", "run": "../x", "round": 0}, {SURVEY: "[]", "run": "x", "round": 0}):
        message = Message(RecordDict({CONFIG: ConfigRecord(config)}), 1, SHAPE)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="survey"):
            respondent.answer(message)

"""Random search over a method's hyper-parameters, chosen on held-out training-environment data."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.table import Table

from perennial.common.config import RunConfig
from perennial.common.errors import UserError
from perennial.common.knobs import Search
from perennial.common.methods.base import Method
from perennial.common.seeding import numpy_generator
from perennial.common.suggest import sentence
from perennial.server.split import Select
from perennial.server.study.runs import Outcome
from perennial.server.summary import overall, site_means, worst_site
from perennial.server.words import percent

if TYPE_CHECKING:
    from perennial.server.study.choose import Verdict

REDRAWS = 100


def search_ranges(method: type[Method]) -> dict[str, Search]:
    """Where a sweep looks, by the name of the hyper-parameter; those without a range stay as they are."""
    extras = {name: field.json_schema_extra for name, field in method.model_fields.items()}
    return {
        name: Search(**extra["search"])  # type: ignore[arg-type]
        for name, extra in extras.items()
        if isinstance(extra, Mapping) and "search" in extra
    }


def trial(config: RunConfig, number: int, fixed: Collection[str] = ()) -> RunConfig:
    """Trial `number` of a method: 0 is the configuration itself, later ones are drawn.

    A draw depends on (seed, method, number, hyper-parameter) only, so that it is the same for everybody, and a
    `fixed` hyper-parameter does not change the others. Settings that break a rule between them, or do not fit
    the scenario, are drawn again. Raises `UserError` for a value beyond its bounds, or if none of `REDRAWS` fits.
    """
    if number == 0:
        return config
    method = config.method
    for attempt in range(REDRAWS):
        key = (method.name, number, attempt) if attempt else (method.name, number)
        drawn = {
            name: search.draw(numpy_generator(config.seed, *key, name))
            for name, search in search_ranges(type(method)).items()
            if name not in fixed
        }
        try:
            settings = type(method).model_validate({**method.model_dump(), **drawn})
            misfit = settings.misfit(config.scenario)
        except ValidationError as error:
            if error.errors()[0]["loc"]:  # of one hyper-parameter: its range is wider than its bounds
                raise UserError(f"trial {number} of {method.name}: {sentence(error)}") from None
            misfit = sentence(error)
        if not misfit:
            return config.model_copy(update={"method": settings})
    raise UserError(f"trial {number} of {method.name}: none of {REDRAWS} draws fits; the last: {misfit}")


def trials(config: RunConfig, count: int, fixed: Collection[str] = ()) -> list[RunConfig]:
    """The first `count` trials."""
    return [trial(config, number, fixed) for number in range(count)]


def key_of(setting: str) -> str:
    """The hyper-parameter that a `key=value` setting fixes."""
    return setting.partition("=")[0].strip().removeprefix("method.")


def best(outcomes: Sequence[Outcome]) -> int | None:
    """The trial whose headline model is best on held-out data after the last round, the earliest of equals.

    None if no trial has one: all stopped, or the scenario holds nothing out.
    """
    return next(iter(equals(outcomes)), None)


def equals(outcomes: Sequence[Outcome]) -> list[int]:
    """The trials that are as good as the best one, which is among them, the earliest first."""
    scores = held_out(outcomes)
    highest = max(scores.values(), default=None)
    return [number for number, score in scores.items() if score == highest]


def held_out(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """The headline model's accuracy on held-out data after the last round, by trial, where there is one."""
    return {
        number: found.validation
        for number, outcome in enumerate(outcomes)
        if (found := outcome.selected("final")) and found.validation is not None
    }


def tie(trials: int, chosen: int | None) -> str:
    """What to say of so many trials that are equally good; empty of a single one."""
    if trials < 2:
        return ""
    return f"{trials} trials tie; {'the first of them was taken' if chosen else 'the defaults were kept'}"


def differences(config: RunConfig, base: RunConfig) -> dict[str, Any]:
    """The hyper-parameters in which a trial differs from the trial 0 of its sweep."""
    values, before = config.method.model_dump(), base.method.model_dump()
    return {name: value for name, value in values.items() if value != before[name]}


def sweep_rows(outcomes: Sequence[Outcome], verdict: "Verdict") -> list[dict[str, Any]]:
    """One row per trial, as plain data: hyper-parameters, accuracies after the last round, folder."""
    rows: list[dict[str, Any]] = []
    sites = outcomes[0].config.sites_with_data
    for number, outcome in enumerate(outcomes):
        last = outcome.selected("final")
        means, lowest = (site_means(last.clients), worst_site(last.clients)) if last else ({}, None)
        rows.append(
            {
                "trial": number,
                "chosen": number == verdict.trial,
                "settings": {name: getattr(outcome.config.method, name) for name in _searched(outcomes)},
                "model": outcome.config.method.evaluates[-1],
                "split": found.json() if (found := verdict.scores.get(number)) else None,
                "leave-one-out": left.json() if (left := verdict.left_out.get(number)) else None,
                "held-out": last.validation if last else None,
                "worst": last.worst if last else None,
                "average": last.average if last else None,
                **({"worst site": lowest, "sites": {site: means.get(site) for site in sites}} if sites else {}),
                "pruned": asdict(outcome.pruned) if outcome.pruned else None,
                "run": str(outcome.path),
                "trouble": outcome.trouble,
            }
        )
    return rows


def sweep_table(outcomes: Sequence[Outcome], verdict: "Verdict") -> Table:
    """The trials, the chosen one in bold."""
    first, held_out = outcomes[0].config, verdict.by == "held-out"
    tied = tie(len(equals(outcomes)), verdict.trial) if held_out else ""
    pruned = next((outcome.pruned for outcome in outcomes if outcome.pruned), None)
    table = Table(
        title=f"{first.method.name} on {first.scenario.name}: {len(outcomes)} trials of {first.rounds} rounds, "
        f"seed {first.seed}",
        caption="accuracy in % after the last round, mean over clients; chosen (*) "
        + ("on held-out training data" if held_out else f"by {verdict.by} (docs/selection.md)")
        + (f"; {tied}" if tied else "")
        + (f"; in brackets: stopped {pruned.where}" if pruned else ""),
    )
    searched = _searched(outcomes)
    by_split = bool(verdict.scores) or (pruned is not None and pruned.by is Select.by_split)
    judged = [name for name, there in (("split", by_split), ("leave-one-out", verdict.left_out)) if there]
    settings = [name.replace("_", "_\n") for name in searched]
    tested = overall(first.sites_with_data, first.scenario.test_environments)
    accuracies = ["held-out\ntraining", *(f"test\n{name}" for name in tested)]
    for heading in ("trial", *settings, *judged, *accuracies):
        table.add_column(heading, justify="right")
    for row in sweep_rows(outcomes, verdict):
        mark, stopped = "*" if row["chosen"] else "", row["pruned"]
        values = [_short(row["settings"][name]) for name in searched]
        accuracies = [percent(row[name]) for name in ("held-out", *tested)]
        scores = [percent(row[name]["score"] if row[name] else None) for name in judged]
        if stopped:  # by split, whose column is then the first, or by held-out accuracy
            (accuracies if stopped["by"] == "held-out" else scores)[0] = f"({percent(stopped['score'])})"
        style = "bold" if mark else "dim" if stopped else ""
        table.add_row(f"{mark}{row['trial']}", *values, *scores, *accuracies, style=style)
    return table


def sweep_tables(outcomes: Sequence[Outcome], verdict: "Verdict") -> list[Table]:
    """`sweep_table`, and where sites have data of their own every trial at every site."""
    trials, sites = sweep_table(outcomes, verdict), outcomes[0].config.sites_with_data
    if not sites:
        return [trials]
    caption = "test accuracy in % after the last round, of a site its mean over the test environments"
    table = Table(title="per site", caption=caption)
    for heading in ("trial", *sites):
        table.add_column(heading, justify="right")
    for row in sweep_rows(outcomes, verdict):
        mark = "*" if row["chosen"] else ""
        values = [percent(row["sites"][site]) for site in sites]
        table.add_row(f"{mark}{row['trial']}", *values, style="bold" if mark else "")
    return [trials, table]


def _searched(outcomes: Sequence[Outcome]) -> list[str]:
    return list(search_ranges(type(outcomes[0].config.method)))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

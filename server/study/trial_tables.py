"""What a search shows of its trials: rows for a program, tables for a person."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from perennial.common.tasks.classes import ACCURACY
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import overall, site_means
from perennial.server.study.batch import Outcome
from perennial.server.study.choose import Verdict
from perennial.server.study.sweep import equals, search_ranges, tie, values_of


def sweep_rows(outcomes: Sequence[Outcome], verdict: Verdict) -> list[dict[str, Any]]:
    """One row per trial, as plain data: hyper-parameters, measures after the last round, folder."""
    rows: list[dict[str, Any]] = []
    sites, measure = outcomes[0].config.sites_with_data, outcomes[0].config.predicts.headline
    for number, outcome in enumerate(outcomes):
        last = outcome.selected("final")
        split, left_out = verdict.scores.get(number), verdict.left_out.get(number)
        row = {
            "trial": number,
            "chosen": number == verdict.trial,
            "settings": {name: values_of(outcome.config)[name] for name in _searched(outcomes)},
            "model": outcome.config.method.evaluates[-1],
            "split": split.json() if split else None,
            "leave-one-out": left_out.json() if left_out else None,
            "held-out": last.validation if last else None,
            "worst": last.worst if last else None,
            "average": last.average if last else None,
        }
        if sites:
            means = site_means(last.clients) if last else {}
            row |= {
                "worst site": measure.worst(means.values()),
                "sites": {site: means.get(site) for site in sites},
            }
        pruned = asdict(outcome.pruned) if outcome.pruned else None
        if pruned:
            del pruned["measure"]
        if verdict.rivals:
            row[verdict.by.value] = verdict.rivals.get(number)
        rows.append(row | {"pruned": pruned, "run": str(outcome.path), "trouble": outcome.trouble})
    return rows


def sweep_table(outcomes: Sequence[Outcome], verdict: Verdict) -> Table:
    """The trials, the chosen one in bold."""
    first, held_out = outcomes[0].config, verdict.by == "held-out"
    measure = first.predicts.headline
    about = f"{measure.label} after the last round, mean over clients"
    tied = tie(len(equals(outcomes)), verdict.trial) if held_out else ""
    pruned = next((outcome.pruned for outcome in outcomes if outcome.pruned), None)
    how = "on held-out training data" if held_out else f"by {verdict.by} (docs/selection.md)"
    more = [tied] * bool(tied) + ([f"in brackets: stopped {pruned.where}"] if pruned else [])
    table = Table(
        title=f"{first.method.name} on {first.scenario.name}: {len(outcomes)} trials of {first.rounds} rounds, "
        f"seed {first.seed}",
        caption="; ".join([about, f"chosen (*) {how}", *more]),
    )
    searched = _searched(outcomes)
    by_split = bool(verdict.scores) or (pruned is not None and pruned.by is Select.by_split)
    judged = ["split"] * by_split + ["leave-one-out"] * bool(verdict.left_out)
    settings = [name.replace("_", "_\n") for name in searched]
    tested = overall(first.sites_with_data, first.scenario.test_environments)
    rival = [verdict.by.value] if verdict.rivals else []
    headings = [*rival, "held-out\ntraining", *(f"test\n{name}" for name in tested)]
    for heading in ("trial", *settings, *judged, *headings):
        table.add_column(heading, justify="right")
    for row in sweep_rows(outcomes, verdict):
        mark, stopped = "*" if row["chosen"] else "", row["pruned"]
        values = [_short(row["settings"][name]) for name in searched]
        measured = [measure.text(row[name]) for name in ("held-out", *tested)]
        scores = [
            (ACCURACY if name == "split" else measure).text(row[name]["score"] if row[name] else None)
            for name in judged
        ]
        if stopped and stopped["by"] == "held-out":
            measured[0] = f"({measure.text(stopped['score'])})"
        elif stopped:  # by split, whose column is then the first
            scores[0] = f"({ACCURACY.text(stopped['score'])})"
        style = "bold" if mark else "dim" if stopped else ""
        scores += ["–" if row[name] is None else f"{row[name]:.4f}" for name in rival]
        table.add_row(f"{mark}{row['trial']}", *values, *scores, *measured, style=style)
    return table


def sweep_tables(outcomes: Sequence[Outcome], verdict: Verdict) -> list[Table]:
    """`sweep_table`, and where sites have data of their own every trial at every site."""
    trials, sites = sweep_table(outcomes, verdict), outcomes[0].config.sites_with_data
    if not sites:
        return [trials]
    measure = outcomes[0].config.predicts.headline
    caption = f"test {measure.label} after the last round, of a site its mean over the test environments"
    table = Table(title="per site", caption=caption)
    for heading in ("trial", *sites):
        table.add_column(heading, justify="right")
    for row in sweep_rows(outcomes, verdict):
        mark = "*" if row["chosen"] else ""
        values = [measure.text(row["sites"][site]) for site in sites]
        table.add_row(f"{mark}{row['trial']}", *values, style="bold" if mark else "")
    return [trials, table]


def _searched(outcomes: Sequence[Outcome]) -> list[str]:
    several = len({outcome.config.optimizer.name for outcome in outcomes}) > 1
    return [*["optimizer"] * several, *search_ranges(type(outcomes[0].config.method))]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

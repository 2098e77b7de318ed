"""Evaluation replies as rows of the log."""

from collections.abc import Mapping, Sequence
from typing import Any

from perennial.common import selection
from perennial.common.config import RunConfig
from perennial.common.measures import ranking, scores
from perennial.common.selection import SPLIT, STEPS, Counts, References, Tally
from perennial.common.tasks import checked_sums, sums_of, values_of
from perennial.strategies.exchange import AcceptedReply
from perennial.strategies.screening import LONGEST_REASON, Rejected

Row = dict[str, Any]


class Evaluation:
    """Counts and sums, one row per client, model and split; rankings and tallies as sums over clients."""

    def __init__(
        self, run: RunConfig, server_round: int, references: References | None = None, masked: bool = False
    ) -> None:
        """With `masked`, each client's counts for `split` come as a part of a sum that `apart` is given later."""
        self.clients: list[Row] = []
        self._references, self._counted = references, references is not None and not masked
        self.apart: dict[str, Counts] = {}
        """Sums over clients, as `common.selection.added`."""
        self._run, self._round = run, server_round
        self._rankings: dict[tuple[str, str, str], ranking.Ranking] = {}
        self._scores: list[Row] = []

    def add(self, reply: AcceptedReply) -> None:
        """Take in a client's reply. Raises `Rejected`, and has taken nothing, where its columns do not fit."""
        rows, tallies = self._read(reply)
        if self._counted:
            place = selection.place_of(self._run.scenario)
            own = selection.contribution(tallies, self._run.method.evaluates, place)
            self.apart = {name: self.apart.get(name, 0) + counts for name, counts in own.items()}
        for row in rows:
            for name, found in zip(row["environment"], row.pop("rankings"), strict=False):
                key = row["model"], row["split"], name
                self._rankings[key] = self._rankings[key] + found if key in self._rankings else found
            if by_score := row.pop("scores"):
                self._scores.append(self._score_row(row, by_score))
        self.clients += rows

    def take_sums(self, sums: Mapping[str, Counts], clients: int) -> None:
        """Take in the sums over clients of their contributions. Raises `ValueError` where they cannot be.

        They must fit what the clients say in the clear: how many samples they have held out, and how many of their
        answers each model gets right.
        """
        for model in self._run.method.evaluates:
            held_out = [row for row in self.clients if (row["model"], row["split"]) == (model, "validation")]
            tally = Tally(sums["samples"], sums[f"{model}/correct"])
            selection.must_add_up(tally, *self._answers(held_out))
        most = {"clients": clients, "accuracy": clients * STEPS, "squares": clients * STEPS}
        for name, limit in most.items():
            if (sums[name] < 0).any() or (sums[name] > limit).any():
                raise ValueError(f"more {name} than {clients} clients have")
        self.apart = dict(sums)

    def rows(self) -> list[Row]:
        """All rows: those of the clients, and the areas under the curves of all clients together."""
        about = {"kind": "ranking", "round": self._round}
        areas = [
            {**about, "model": model, "split": split, "environment": name, **found.measures()}
            for (model, split, name), found in self._rankings.items()
        ]
        return [*self.clients, *areas, *self._scores, *self._split_rows()]

    def _score_row(self, row: Row, by_score: Sequence[scores.Scores]) -> Row:
        """A client's test samples by score, environment after environment."""
        about = {"kind": scores.SCORE, **{name: row[name] for name in ("round", "client", "model", "environment")}}
        names = self._run.scenario.class_names
        counts = {
            "negatives": [own.negatives.tolist() for own in by_score],
            "positives": [own.positives.tolist() for own in by_score],
        }
        return {**about, "positive": names[1] if names else "1", **counts}

    def _split_rows(self) -> list[Row]:
        """What the selection `split` rests on: sums over clients, per model."""
        if not self._references or not self.apart:
            return []
        about = {"kind": SPLIT, "round": self._round}
        counts = {name: found.tolist() for name, found in self.apart.items()}
        environments = list(self._run.scenario.train_environments)
        names = {"environments": environments, "references": self._references.digest}
        answers = self._run.predicts.answers
        sums = {**names, "samples": counts["samples"], "clients": counts["clients"]}
        if len(answers) > 1:
            sums["answers"] = list(answers)
        shares = {name: (self.apart[name] / STEPS).tolist() for name in ("accuracy", "squares")}
        return [
            {**about, "model": model, **sums, "correct": counts[f"{model}/correct"], **shares}
            for model in self._run.method.evaluates
        ]

    def test_means(self) -> dict[str, float]:
        """Each model's mean headline measure on test data over clients, of a client over its
        environments that have samples."""
        means: dict[str, list[float]] = {}
        for row in self.clients:
            if row["split"] == "test":
                values = list(values_of(self._run.predicts, row).values())
                if values:
                    means.setdefault(row["model"], []).append(sum(values) / len(values))
        return {name: sum(values) / len(values) for name, values in means.items()}

    def _read(self, reply: AcceptedReply) -> tuple[list[Row], dict[str, Tally]]:
        """A reply as one row per model and split, with `rankings` and `scores` by environment if they were asked
        for, and the tallies of its models."""
        scenario, method, task = self._run.scenario, self._run.method, self._run.predicts
        ranked = ranking.COLUMNS if self._run.ranking_batch else ()
        environments = {"validation": {"validation"}, "test": set(scenario.test_environments)}
        columns: dict[tuple[str, str], Row] = {}
        rows = []
        try:
            if reply.settings.keys() - environments:
                raise ValueError("there are settings beside the environments of each split")
            for key, values in reply.metrics.items():
                model, split, column = key.split("/")
                columns.setdefault((model, split), {})[column] = values
            models = method.evaluates if self._counted else ()
            counted = {model: columns.pop((model, SPLIT), {}) for model in models}
            for (model, split), row in columns.items():
                scored = task.scored if self._run.scored and split == "test" else {}
                if model not in method.evaluates or row.keys() != {
                    "count",
                    "loss",
                    *task.columns,
                    *ranked,
                    *scored,
                }:
                    raise ValueError(f"{model}/{split} was not asked for")
                names = reply.settings[split]
                if not isinstance(names, list) or not environments[split].issuperset(names):
                    raise ValueError(f"{split} has other environments than the scenario")
                if len(set(names)) < len(names) or any(len(row[name]) != len(names) for name in ("count", "loss")):
                    raise ValueError(f"{split} has other columns than one number for each environment")
                counts = scores.whole(row["count"], self._run.most_examples)
                by_score = {column: row.pop(column) for column in scores.COLUMNS if column in scored}
                row |= checked_sums(task, row, counts)
                areas = {column: row.pop(column) for column in ranked}
                rankings = ranking.from_columns(areas, counts, self._run.ranking_batch) if areas else []
                scored_samples = scores.from_columns(by_score, counts, row["correct"]) if by_score else []
                named = {"kind": "evaluation", "round": self._round, "client": reply.client}
                where = {"model": model, "split": split, "environment": names}
                rows.append({**named, **where, **row, "rankings": rankings, "scores": scored_samples})
            tallies = self._tallies(counted, rows)
        except (KeyError, TypeError, ValueError) as error:
            raise Rejected(f"its evaluation cannot be read ({str(error)[:LONGEST_REASON]})") from None
        return rows, tallies

    def _tallies(self, counted: Mapping[str, Row], rows: Sequence[Row]) -> dict[str, Tally]:
        """Each model's tally, of a reply's columns beside its rows. Raises `ValueError` or `TypeError`."""
        found: dict[str, Tally] = {}
        for model, given in counted.items():
            if given.keys() != set(selection.COLUMNS):
                raise ValueError(f"{model}/{SPLIT} has other columns than {' and '.join(selection.COLUMNS)}")
            held_out = [row for row in rows if (row["model"], row["split"]) == (model, "validation")]
            if not held_out:
                raise ValueError(f"{model}/validation is not there")
            found[model] = selection.from_columns(
                given, selection.place_of(self._run.scenario), *self._answers(held_out)
            )
            if (found[model].samples != next(iter(found.values())).samples).any():
                raise ValueError("its models have other held-out samples each")
        return found

    def _answers(self, rows: Sequence[Row]) -> tuple[int, int]:
        """Of some rows how many answers are known, and how many of these are right."""
        task = self._run.predicts
        every = [task.right_of(*own) for row in rows for own in sums_of(task, row).values()]
        return sum(known for known, _ in every), sum(right for _, right in every)

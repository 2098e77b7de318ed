"""Evaluation replies as rows of the log."""

from typing import Any

from common.config import RunConfig
from common.ranking import COLUMNS, Ranking, from_columns, whole
from strategies.exchange import AcceptedReply
from strategies.screening import LONGEST_REASON, Rejected

Row = dict[str, Any]
COUNTED = ("count", "correct", "loss")
"""Columns that every evaluation has, with one number for each environment."""


class Evaluation:
    """Counts and sums, one row per client, model and split; rankings, which are summed over clients."""

    def __init__(self, run: RunConfig, server_round: int) -> None:
        self.clients: list[Row] = []
        self._run, self._round = run, server_round
        self._rankings: dict[tuple[str, str, str], Ranking] = {}

    def add(self, reply: AcceptedReply) -> None:
        """Take in a client's reply. Raises `Rejected`, and has taken nothing, where its columns do not fit."""
        rows = self._read(reply)
        for row in rows:
            for name, found in zip(row["environment"], row.pop("rankings"), strict=False):
                key = row["model"], row["split"], name
                self._rankings[key] = self._rankings[key] + found if key in self._rankings else found
        self.clients += rows

    def rows(self) -> list[Row]:
        """All rows: those of the clients, and the areas under the curves of all clients together."""
        areas = [
            {
                "kind": "ranking",
                "round": self._round,
                "model": model,
                "split": split,
                "environment": name,
                **ranking.measures(),
            }
            for (model, split, name), ranking in self._rankings.items()
        ]
        return [*self.clients, *areas]

    def accuracies(self) -> dict[str, float]:
        """Each model's mean test accuracy over clients, of a client over its environments that have samples."""
        accuracy: dict[str, list[float]] = {}
        for row in self.clients:
            if row["split"] == "test":
                values = [
                    right / count for right, count in zip(row["correct"], row["count"], strict=True) if count
                ]
                if values:
                    accuracy.setdefault(row["model"], []).append(sum(values) / len(values))
        return {name: sum(values) / len(values) for name, values in accuracy.items()}

    def _read(self, reply: AcceptedReply) -> list[Row]:
        """A reply as one row per model and split, with `rankings` by environment if they were asked for."""
        scenario, method = self._run.scenario, self._run.method
        ranked = COLUMNS if scenario.ranking_batch else ()
        environments = {"validation": {"validation"}, "test": set(scenario.test_environments)}
        columns: dict[tuple[str, str], Row] = {}
        rows = []
        try:
            if reply.settings.keys() - environments:
                raise ValueError("there are settings beside the environments of each split")
            for key, values in reply.metrics.items():
                model, split, column = key.split("/")
                columns.setdefault((model, split), {})[column] = values
            for (model, split), row in columns.items():
                if model not in method.evaluates or row.keys() != {*COUNTED, *ranked}:
                    raise ValueError(f"{model}/{split} was not asked for")
                names = reply.settings[split]
                if not isinstance(names, list) or not environments[split].issuperset(names):
                    raise ValueError(f"{split} has other environments than the scenario")
                if len(set(names)) < len(names) or any(len(row[name]) != len(names) for name in COUNTED):
                    raise ValueError(f"{split} has other columns than one number for each environment")
                counts, corrects = (whole(row[name], self._run.most_examples) for name in ("count", "correct"))
                if any(correct > count for count, correct in zip(counts, corrects, strict=True)):
                    raise ValueError("more correct answers than samples")
                given = {column: row.pop(column) for column in ranked}
                rankings = from_columns(given, counts, scenario.ranking_batch) if given else []
                named = {"kind": "evaluation", "round": self._round, "client": reply.client}
                where = {"model": model, "split": split, "environment": names}
                rows.append({**named, **where, **row, "rankings": rankings})
        except (KeyError, TypeError, ValueError) as error:
            raise Rejected(f"its evaluation cannot be read ({str(error)[:LONGEST_REASON]})") from None
        return rows

"""Evaluation replies as rows of the log."""

from typing import Any

from common.config import RunConfig
from common.ranking import COLUMNS, Ranking, from_columns
from strategies.exchange import AcceptedReply
from strategies.screening import Rejected

Row = dict[str, Any]


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
        scenario, limit = self._run.scenario, self._run.most_examples
        ranked = COLUMNS if scenario.ranking_batch else ()
        environments = {"validation": {"validation"}, "test": set(scenario.test_environments)}
        columns: dict[tuple[str, str], Row] = {}
        rows = []
        try:
            for key, values in reply.metrics.items():
                model, split, column = key.split("/")
                columns.setdefault((model, split), {})[column] = values
            for (model, split), row in columns.items():
                if model not in self._run.method.evaluates or row.keys() != {"count", "correct", "loss", *ranked}:
                    raise ValueError(f"{model}/{split} was not asked for")
                names = list(reply.settings[split])  # type: ignore[arg-type]
                if not environments[split].issuperset(names) or len(set(names)) < len(names):
                    raise ValueError(f"{split} has other environments than the scenario")
                counts = zip(names, row["count"], row["correct"], row["loss"], strict=True)
                if not all(0 <= correct <= count for _, count, correct, _ in counts):
                    raise ValueError("more correct answers than samples")
                if (most := max(row["count"], default=0)) > limit:
                    raise ValueError(f"{most} samples; most_examples={limit} is the limit")
                given = {column: row.pop(column) for column in ranked}
                rankings = from_columns(given, row["count"]) if given else []
                named = {"kind": "evaluation", "round": self._round, "client": reply.client}
                where = {"model": model, "split": split, "environment": names}
                rows.append({**named, **where, **row, "rankings": rankings})
        except (KeyError, TypeError, ValueError) as error:
            raise Rejected(f"its evaluation cannot be read ({error})") from None
        return rows

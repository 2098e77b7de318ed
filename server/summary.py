"""From the rows of a run to its summary: selection after the fact, nothing chosen on test data unasked."""

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import numpy as np

from common.config import RunConfig

Row = dict[str, Any]
SELECTIONS = ("final", "validation")


def summarise(config: RunConfig, rows: list[Row], *, seconds: float, oracle: bool = False) -> dict[str, Any]:
    """What `summary.json` holds (design.md §7).

    For each model and selection: accuracy per test environment as the mean over clients, their minimum (`worst`)
    and mean (`average`), the share of all test samples that is right (`pooled`), and each client's accuracies.
    `oracle` adds the round with the best test average.
    """
    rounds = [row for row in rows if row["kind"] == "round"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    selections = (*SELECTIONS, "oracle") if oracle else SELECTIONS
    models: dict[str, Any] = {}
    for model in config.method.evaluates:
        by_round = {
            number: Evaluation([row for row in evaluations if row["round"] == number and row["model"] == model])
            for number in sorted({row["round"] for row in evaluations})
        }
        models[model] = {
            selection: {"round": number, **by_round[number].summary()}
            for selection in selections
            if (number := select(by_round, selection)) is not None
        }
    return {
        "method": config.method.name,
        "scenario": config.scenario.name,
        "seed": config.seed,
        "rounds": max((row["round"] for row in rounds), default=0),
        "wall_seconds": round(seconds, 3),
        "bytes_per_client_and_round": _traffic(rounds),
        "models": models,
        "left_out": _left_out(rows),
    }


def versions() -> dict[str, str]:
    """What this process runs on, for a run that ends in it."""
    found = {"python": platform.python_version()}
    for name in ("perennial", "flwr", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # Flower also runs the bare folder
            found[name] = "not installed"
    return found


class Evaluation:
    """One model's evaluation in one round, over all clients."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.accuracy: dict[str, dict[str, dict[str, float]]] = {"test": {}, "validation": {}}
        """Accuracy by split, client, environment; environments without samples are absent."""
        right = total = 0
        for row in rows:
            columns = zip(row["environment"], row["count"], row["correct"], strict=True)
            values = {name: correct / count for name, count, correct in columns if count}
            self.accuracy[row["split"]][row["client"]] = values
            if row["split"] == "test":
                right, total = right + sum(row["correct"]), total + sum(row["count"])
        self.pooled = right / total if total else None
        """Over the test samples of all clients and environments."""

    def client_mean(self, split: str) -> dict[str, float]:
        """Mean over clients of the accuracy in each environment, in the scenario's order."""
        environments = list(dict.fromkeys(e for values in self.accuracy[split].values() for e in values))
        return {
            environment: float(
                np.mean([values[environment] for values in self.accuracy[split].values() if environment in values])
            )
            for environment in environments
        }

    def summary(self) -> dict[str, Any]:
        """Accuracy per test environment, worst, average, pooled, per client, and on held-out training data."""
        test, validation = self.client_mean("test"), self.client_mean("validation")
        return {
            "accuracy": test,
            "worst": min(test.values(), default=None),
            "average": float(np.mean(list(test.values()))) if test else None,
            "pooled": self.pooled,
            "validation": next(iter(validation.values()), None),
            "clients": self.accuracy["test"],
        }


def select(by_round: Mapping[int, Evaluation], selection: str) -> int | None:
    """The round that a selection picks; the earliest of equals. None where it cannot choose.

    `final`: the last one; `validation`: best client-mean accuracy on held-out training-environment data;
    `oracle`: best average over the test environments.
    """
    if not by_round:
        return None
    if selection == "final":
        return max(by_round)
    split = {"validation": "validation", "oracle": "test"}[selection]
    scores = {
        number: float(np.mean(list(means.values())))
        for number, evaluation in by_round.items()
        if (means := evaluation.client_mean(split))
    }
    return max(scores, key=lambda number: (scores[number], -number)) if scores else None


def _traffic(rounds: list[Row]) -> dict[str, float]:
    # Training exchanges only; what evaluation costs is in the log.
    asked = sum(row["asked"] for row in rounds)
    return {way: sum(row[f"bytes_{way}"] for row in rounds) / asked if asked else 0.0 for way in ("down", "up")}


def _left_out(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """By client: how many of its replies were left out, and the latest reason."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for client, reason in row.get("left_out", {}).items():
            entry = found.setdefault(client, {"replies": 0})
            entry["replies"] += 1
            entry["last"] = f"round {row['round']}: {reason}"
    return found

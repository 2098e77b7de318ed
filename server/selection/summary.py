"""From the rows of a run to its summary: selection after the fact, nothing chosen on test data unasked."""

import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from statistics import fmean
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.measures.scores import SCORE, Scores, added
from perennial.common.tasks import Measure, PredictionTask, sums_of, values_of
from perennial.common.tasks.base import Summed, added_sums
from perennial.common.tasks.classes import ACCURACY
from perennial.server.selection.split_rule import Score, gate, most_robust, score, unusable

Row = dict[str, Any]
SELECTIONS = ("final", "validation")
SPLIT = "split"
"""The third, where clients could tell held-out samples apart; as in `common/selection.py`, which needs NumPy."""
AS_IN_PAPER = "as-in-paper"
"""The round that is best by the test number that a paper chose by; never there unless a table asks for it."""
AREAS = ("auroc", "auprc", "auroc_hard_batch", "auprc_hard_batch")
"""Areas of all scores, and means over batches of the areas of 0/1 predictions, FedILC's (`ranking.py`)."""


def summarise(
    config: RunConfig, rows: list[Row], *, seconds: float, oracle: bool = False, as_in_paper: str = ""
) -> dict[str, Any]:
    """What `summary.json` holds.

    For each model and selection: the task's headline measure per test environment as the mean over clients, the
    `worst` of them and their mean (`average`), that of all test samples together (`pooled`), and each client's;
    the losses likewise; and areas where the scenario has them. Of sites with own data also that of the
    `worst_site`. `evaluated`: which clients were, unless all were. `insists`: the protection without which a site
    takes part in no run, of the sites that have such a policy. `changed`: with which other settings a resumed run
    went on, and from which round. `oracle` adds the round with the best test average, and `as_in_paper` the best
    by what it names: a test environment, or `loss`, the mean test loss. With references every round
    picked has its scores of `split`, and `split` says whether that selection speaks.
    """
    rounds = [row for row in rows if row["kind"] == "round"]
    evaluations = [row for row in rows if row["kind"] in ("evaluation", "ranking", SCORE, SPLIT)]
    task = config.predicts
    selections = (*SELECTIONS, SPLIT, *["oracle"] * oracle, *[AS_IN_PAPER] * bool(as_in_paper))
    models: dict[str, Any] = {}
    for model in config.method.evaluates:
        by_round = {
            number: Evaluation(
                (row for row in evaluations if row["round"] == number and row["model"] == model), task
            )
            for number in sorted({row["round"] for row in evaluations})
        }
        models[model] = {
            selection: {"round": number, **_with_site(config, by_round[number].summary())}
            for selection in selections
            if (number := select(by_round, selection, as_in_paper)) is not None
        }
    last_split = next((row for row in reversed(evaluations) if row["kind"] == SPLIT), None)
    partial = {  # what most runs have nothing of
        "insists": {site: said for row in rounds for site, said in row.get("insists", {}).items()},
        SPLIT: gate(last_split) if last_split else {},
        "majority": _majorities(rounds, evaluations),
    }
    drawn = {"clients": list(config.evaluated), "of": len(config.scenario.client_ids)}
    return {
        "method": config.method.name,
        "scenario": config.scenario.name,
        "seed": config.seed,
        "rounds": max((row["round"] for row in rounds), default=0),
        "wall_seconds": round(seconds, 3),
        "bytes_per_client_and_round": _traffic(rounds),
        "models": models,
        **({"evaluated": drawn} if config.evaluates_some else {}),
        "left_out": _left_out(rows),
        **{name: value for name, value in partial.items() if value},
        "changed": [
            {name: row[name] for name in ("round", "settings")} for row in rows if row["kind"] == "changed"
        ],
    }


def parts(config: RunConfig) -> dict[str, Collection[str]]:
    """The clients whose accuracies one number may have the mean of: all, unless some are `test_sites`."""
    if not config.test_sites:
        return {"": config.scenario.client_ids}
    return {"training sites": config.training_clients, "unseen sites": config.test_sites}


def by_part(config: RunConfig, models: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Mapping[str, Any]]:
    """The models of a summary over each of `parts` alone, from the log's rows; without areas, of all clients."""
    if not config.test_sites:
        return {"": models}
    evaluations = [row for row in rows if row["kind"] in ("evaluation", SCORE)]

    def alone(clients: Collection[str], model: str, found: Mapping[str, Any]) -> dict[str, Any]:
        key = found["round"], model
        own = [row for row in evaluations if row["client"] in clients and (row["round"], row["model"]) == key]
        split = {SPLIT: found[SPLIT]} if SPLIT in found else {}
        return {
            "round": found["round"],
            **_with_site(config, Evaluation(own, config.predicts).summary()),
            **split,
        }

    return {
        part: {
            model: {selection: alone(clients, model, found) for selection, found in own.items()}
            for model, own in models.items()
        }
        for part, clients in parts(config).items()
    }


def majority(samples: Mapping[str, int]) -> dict[str, float]:
    """Of three clients or more the one that counts more than half of all samples, and its share; else empty."""
    if len(samples) < 3:
        return {}
    client = max(samples, key=samples.__getitem__)
    share = samples[client] / max(1, sum(samples.values()))
    return {client: share} if share > 0.5 else {}


def site_means(clients: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of each client that has test samples, the mean of its accuracies over its test environments."""
    return {name: fmean(own.values()) for name, own in clients.items() if own}


def worst_site(clients: Mapping[str, Mapping[str, float]], measure: Measure = ACCURACY) -> float | None:
    """The worst of `site_means`; none where nobody has test samples."""
    return measure.worst(site_means(clients).values())


def overall(sites: Collection[str], environments: Collection[str]) -> tuple[str, ...]:
    """What says in all how good a model is, with `sites` that have own data: the worst one comes first.

    `worst` of their only environment would be the average over them.
    """
    several = len(environments) > 1
    return ("worst site",) * bool(sites) + ("worst",) * (several or not sites) + ("average",)


def overall_of(
    found: Mapping[str, Any], sites: Collection[str], environments: Collection[str], measure: Measure = ACCURACY
) -> dict[str, float | None]:
    """What `overall` names, of a model's headline measure (`Evaluation.summary`)."""
    names = overall(sites, environments)
    return {name: worst_site(found["clients"], measure) if name == "worst site" else found[name] for name in names}


def area_means(areas: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of each kind of area, the mean over the test environments that have it."""
    found = {name: [own[name] for own in areas.values() if name in own] for name in AREAS}
    return {name: fmean(values) for name, values in found.items() if values}


def changed_line(round_: int, settings: Mapping[str, Sequence[str]]) -> str:
    """One line for settings with which a run went on from a round."""
    changes = ", ".join(f"{name} {old} → {new}" for name, (old, new) in settings.items())
    return f"changed from round {round_} on: {changes}"


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

    def __init__(self, rows: Iterable[Row], task: PredictionTask) -> None:
        self.task, self.measure = task, task.headline
        self.values: dict[str, dict[str, dict[str, float]]] = {"test": {}, "validation": {}}
        """The task's headline measure by split, client, environment; environments without samples are absent."""
        self.sums: dict[str, dict[str, Summed]] = {}
        """Of test samples, by client and environment."""
        self.loss: dict[str, dict[str, float]] = {}
        """Mean test loss of a sample, by client and environment."""
        self.areas: dict[str, dict[str, float]] = {}
        """Areas over the test samples of all clients, by environment; empty where the scenario has none."""
        self.split: Row | None = None
        """Counts of the held-out samples that references know and do not know."""
        self.scores: dict[str, dict[str, Scores]] = {}
        """Test samples by score, by client and environment; empty where they were not asked for."""
        self.positive = ""
        """The class that a score is the probability of."""
        for row in rows:
            if row.get("kind") == SPLIT:
                self.split = row
                continue
            if row.get("kind") == SCORE:
                self.positive = row["positive"]
                import numpy as np

                parts = zip(row["environment"], row["negatives"], row["positives"], strict=True)
                self.scores[row["client"]] = {
                    name: Scores(np.array(negatives), np.array(positives)) for name, negatives, positives in parts
                }
                continue
            if row.get("kind") == "ranking":
                if row["split"] == "test":
                    self.areas[row["environment"]] = {name: row[name] for name in AREAS if name in row}
                continue
            self.values[row["split"]][row["client"]] = values_of(task, row)
            if row["split"] == "test":
                self.sums[row["client"]] = sums_of(task, row)
                self.loss[row["client"]] = _per_sample(row, "loss") if "loss" in row else {}
        self.pooled = self._measures(own for sums in self.sums.values() for own in sums.values())[
            self.measure.name
        ]
        """The measure over the test samples of all clients and environments."""

    def _measures(self, parts: Iterable[Summed]) -> dict[str, float | None]:
        """All measures of the task on some samples together."""
        count, sums = added_sums(self.task, parts)
        if not count:
            return {measure.name: None for measure in (self.measure, *self.task.others)}
        return self.task.measures(count, sums)

    def client_mean(self, split: str) -> dict[str, float]:
        """Mean over clients of the measure in each environment, in the scenario's order."""
        return _client_mean(self.values[split])

    @property
    def held_out(self) -> float | None:
        """Mean over clients of the measure on held-out training data."""
        return next(iter(self.client_mean("validation").values()), None)

    def summary(self) -> dict[str, Any]:
        """The headline measure, under its name, per test environment, worst, average, pooled, per client, and on
        held-out training data.

        Beside them the task's other measures, the test losses and areas, and the mean over environments of each;
        where test samples were counted by score, what that says.
        """
        test = self.client_mean("test")
        found = score(self.split) if self.split else None
        losses = _client_mean(self.loss)
        return {
            self.measure.name: test,
            "worst": self.measure.worst(test.values()),
            "average": _mean(test.values()) if test else None,
            "pooled": self.pooled,
            "validation": self.held_out,
            "loss": _mean(losses.values()) if losses else None,
            "losses": losses,
            "areas": self.areas,
            "clients": self.values["test"],
            **({"measures": self._all_measures()} if self.task.others else {}),
            **({"scores": self._scores()} if self.scores else {}),
            **({SPLIT: found.json()} if found else {}),
        }

    def _all_measures(self) -> dict[str, Any]:
        """Every measure of the task on test samples: of all of them, by environment, and by client; and of all of
        them those of each part of a target, where it has several."""
        environments = dict.fromkeys(name for own in self.sums.values() for name in own)
        every = [own for sums in self.sums.values() for own in sums.values()]
        targets = self.task.by_target(*added_sums(self.task, every)) if every else {}
        return {
            "all": self._measures(every),
            "environments": {
                name: self._measures(own[name] for own in self.sums.values() if name in own)
                for name in environments
            },
            "clients": {client: self._measures(own.values()) for client, own in self.sums.items() if own},
            **({"targets": targets} if targets else {}),
        }

    def _scores(self) -> dict[str, Any]:
        """Measures of the test samples by score: of all of them, by environment, and by client."""
        environments = dict.fromkeys(name for own in self.scores.values() for name in own)
        clients = {client: added(list(own.values())) for client, own in self.scores.items()}
        return {
            "positive": self.positive,
            "all": added(list(clients.values())).measures(),
            "environments": {
                name: added([own[name] for own in self.scores.values() if name in own]).measures()
                for name in environments
            },
            "clients": {client: own.measures() for client, own in clients.items()},
        }

    def goodness(self, column: str) -> float | None:
        """Of a test environment, or of `loss`: more is better; None where it was not measured."""
        if column == "loss":
            losses = _client_mean(self.loss)
            return -_mean(losses.values()) if losses else None
        value = self.client_mean("test").get(column)
        return None if value is None else self.measure.goodness(value)

    def score(self) -> Score | None:
        """By the rule of `split`; None where it does not speak."""
        return score(self.split) if self.split and not unusable(self.split) else None


def select(by_round: Mapping[int, Evaluation], selection: str, as_in_paper: str = "") -> int | None:
    """The round that a selection picks; the earliest of equals. None where it cannot choose.

    `final`: the last one; `validation`: best client mean of the measure on held-out training-environment data;
    `split`: the most robust where references are right and where they are wrong (`most_robust`); `oracle`: best
    average over the test environments; `as-in-paper`: best `Evaluation.goodness` of what `as_in_paper` names.
    """
    if not by_round:
        return None
    if selection == "final":
        return max(by_round)
    if selection == SPLIT:
        found = {number: own for number, evaluation in by_round.items() if (own := evaluation.score())}
        return most_robust(found)[0] if found else None
    if selection == AS_IN_PAPER:
        known = {number: own.goodness(as_in_paper) for number, own in by_round.items()}
        scores = {number: own for number, own in known.items() if own is not None}
    else:
        split = {"validation": "validation", "oracle": "test"}[selection]
        scores = {
            number: evaluation.measure.goodness(_mean(means.values()))
            for number, evaluation in by_round.items()
            if (means := evaluation.client_mean(split))
        }
    return max(scores, key=lambda number: (scores[number], -number)) if scores else None


class Patience:
    """Whether a run's evaluations have stopped to become better on held-out data."""

    def __init__(self, config: RunConfig, rows: Iterable[Row]) -> None:
        """`rows` are those of the rounds that are done."""
        self._patience, self._task, self._model = (
            config.patience,
            config.predicts,
            config.method.evaluates[-1],
        )
        self._by_round: dict[int, Evaluation] = {}
        self.best: int | None = None
        """The round that the selection would choose now, in a run with `patience`."""
        self.selection = "validation"
        """`split` where it speaks."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            if row["kind"] in ("evaluation", SPLIT):
                found.setdefault(row["round"], []).append(row)
        for number, own in found.items():
            self.add(number, own)

    def add(self, number: int, rows: Iterable[Row]) -> None:
        """Take in a round's evaluation."""
        own = (row for row in rows if row["model"] == self._model and row["kind"] in ("evaluation", SPLIT))
        self._by_round[number] = Evaluation(own, self._task)
        self.selection = SPLIT if select(self._by_round, SPLIT) else "validation"
        self.best = select(self._by_round, self.selection)

    def over(self, number: int, rows: Iterable[Row]) -> str:
        """Take in a round's evaluation; why the run ends with it, empty where it goes on.

        That is after `patience` evaluations without one that the run's selection, `split` where it speaks and else
        `validation`, would choose before all others.
        """
        if not self._patience:
            return ""
        self.add(number, rows)
        since = sum(other > self.best for other in self._by_round) if self.best else 0
        if since < self._patience:
            return ""
        return f"patience={self._patience}: no better held-out score ({self.selection}) since round {self.best}"


def _with_site(config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
    """A model's summary, of sites with own data with the worst one's."""
    measure = config.predicts.headline
    return {**found, "worst_site": worst_site(found["clients"], measure)} if config.sites_with_data else found


def _per_sample(row: Row, column: str) -> dict[str, float]:
    """A column of sums as means by environment."""
    columns = zip(row["environment"], row["count"], row[column], strict=True)
    return {name: total / count for name, count, total in columns if count}


def _client_mean(clients: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over the clients that have an environment, for each environment."""
    names = list(dict.fromkeys(name for values in clients.values() for name in values))
    return {name: _mean(own[name] for own in clients.values() if name in own) for name in names}


def _mean(values: Iterable[float]) -> float:
    import numpy as np  # whose last digit every result so far has

    return float(np.mean(list(values)))


def _majorities(rounds: Sequence[Row], evaluations: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`majority`: the largest share of a round's training samples, and of the last evaluation's test samples, that
    one client counted; nothing where no client had a majority."""
    of_training = [row["majority"] for row in rounds if "majority" in row]
    tests = [row for row in evaluations if row["kind"] == "evaluation" and row["split"] == "test"]
    last = max((row["round"] for row in tests), default=0)
    tested = {row["client"]: sum(row["count"]) for row in tests if row["round"] == last}  # of each model the same
    training: dict[str, float] = max(of_training, key=lambda own: max(own.values()), default={})
    return {what: own for what, own in (("training", training), ("test", majority(tested))) if own}


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

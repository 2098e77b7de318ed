"""What came of a run: tables, models, a picture."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perennial.common.utils.errors import UserError
from perennial.server.results.formatting import field, overall_text
from perennial.server.results.table import Table
from perennial.server.run.folder import RunFolder, understood
from perennial.server.run.input_files import FROZEN, MODULE, PLUG_IN
from perennial.server.selection.summary import Evaluation, by_part, overall, worst_site

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from torch import nn

    from perennial.common.config import RunConfig
    from perennial.common.tasks import Measure


class Result:
    """A run folder, opened. Its tables are read from it when they are asked for."""

    def __init__(self, folder: Path | str) -> None:
        """Raises `UserError` if the folder holds no run."""
        self._folder = RunFolder.open(Path(folder).absolute())  # whatever the current folder will be
        self.folder = self._folder.path
        """Where the run is."""
        self.config: RunConfig = self._folder.config()
        """Everything that determines it."""

    def __repr__(self) -> str:
        config = self.config
        about = f"{config.method.name} on {config.scenario.name}, {config.rounds} rounds, seed {config.seed}"
        try:
            (*_, last) = (row for row in self.overall if row["selection"] == "final")
        except (UserError, ValueError):
            return f"<Result {about}, not ended, in {self.folder}>"
        numbers = overall_text(self._names, last, self._measure, self._measure.unit)
        of = ", ".join(last[name] for name in ("model", "selection", "sites") if name in last)
        return f"<Result {about}: {numbers} ({of}), in {self.folder}>"

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """`summary.json`. Raises `UserError` while the run has not ended."""
        return self._folder.summary()

    @property
    def overall(self) -> Table:
        """A row for each model and selection: round, worst, average, pooled and held-out accuracy, or whatever is
        the headline measure of the task (`config.predicts`).

        Of sites with own data also that of the worst one, which takes the place of `worst` where they have one
        test environment. In a run with `test_sites` these have rows of their own here and in the next two tables.
        """
        names = list(map(field, self._names))
        return Table(
            {**key, **{name: found[name] for name in (*names, "pooled")}, "held_out": found["validation"]}
            for key, found in self._selected()
        )

    @property
    def environments(self) -> Table:
        """A row for each model, selection and test environment: the headline measure as the mean over clients."""
        measure = self._measure.name
        return Table(
            {**key, "environment": name, measure: value}
            for key, found in self._selected()
            for name, value in found[measure].items()
        )

    @property
    def accuracy(self) -> Table:
        """`environments`, of classes. Raises `UserError` where the targets are something else."""
        if self._measure.name != "accuracy":
            raise UserError(f"this run has no accuracy, but {self._measure.title}: see result.environments")
        return self.environments

    @property
    def clients(self) -> Table:
        """A row for each model, selection, client and test environment."""
        return Table(
            {**key, "client": client, "environment": name, self._measure.name: value}
            for key, found in self._selected()
            for client, own in sorted(found["clients"].items())
            for name, value in own.items()
        )

    @property
    def history(self) -> Table:
        """A row for each evaluated round, model, split and environment: the headline measure, mean over clients.

        The split `validation` is held-out training data. It is there while the run goes on, too.
        """
        with understood(self.folder):
            by_key: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for row in self._folder.rows_after(0)[0]:  # a row may be half written
                if row["kind"] == "evaluation":
                    by_key.setdefault((row["round"], row["model"]), []).append(row)
            return Table(
                {"round": number, "model": model, "split": split, "environment": name, self._measure.name: value}
                for (number, model), rows in by_key.items()
                for split in ("validation", "test")
                for name, value in Evaluation(rows, self.config.predicts).client_mean(split).items()
            )

    def model(self, name: str | None = None, client: str | None = None, *, best: bool = False) -> nn.Module:
        """A model after the last round, on the CPU and in evaluation mode; with `best` after the best round by
        held-out data, which a run with `patience` keeps.

        It takes samples (n, *input_shape) as they are in training: bytes divided by 255, a table's rows scaled and
        encoded. It gives outputs of which `config.predicts.predictions` makes answers; for classes they are
        logits (n, classes). `predict` takes raw rows. `name` is one of `config.method.evaluates`, by default the
        last, which is the method's headline model. "personal" needs a `client`. Most are networks with weights to
        be read, trained on or saved. Where a method predicts in another way, such as by the mean of several
        networks, the module has no weights.

        Warns where a module, its frozen part, a plug-in or, of a personal model, data have changed since the run
        began. Raises `UserError` for a name that is none, and for a model that is not on this machine.
        """
        from perennial.server.results.trained import model_of

        name = self.config.method.evaluates[-1] if name is None else name
        changed = self._folder.other_inputs(self.config)
        # Of a site's data a personal model may be made, and no other.
        if other := [own for own in changed if name == "personal" or own.startswith((PLUG_IN, MODULE, FROZEN))]:
            doubt = "since the run began, so the model may answer otherwise than in its tables"
            warnings.warn(f"{', '.join(other)} changed {doubt}", stacklevel=2)
        if best and "best" not in self.summary:
            raise UserError(f"best: {self.folder} has kept no best round; a run with patience=N keeps one")
        return model_of(self._folder, self.config, name, client, self.summary["best"]["round"] if best else None)

    def predict_proba(self, x: Any, name: str | None = None, client: str | None = None) -> npt.NDArray[np.float32]:
        """Probabilities (n, classes) of raw rows; `name` and `client` say by which model, as in `model`.

        For several labels it is the probability of each, for events that of none so far at each time of the run.

        `x` is a frame that has the run's columns, in any order and among others, or (n, *input_shape) numbers.
        Rows of a table are scaled, filled and encoded as in training; bytes (uint8) are divided by 255. The order
        of the classes is that of `config.scenario.class_names`. Raises `UserError` for rows that do not fit, where
        each site's rows are scaled otherwise and no client is named, where the run predicts numbers, and as
        `model`. Warns of a column in which no row has a category that the run knows.
        """
        from perennial.server.results.trained import predictions

        task = self.config.predicts
        if not task.prediction.probability:
            raise UserError(f"predict_proba: a run on {task.name} has no probabilities; use predict")
        return predictions(self.model(name, client), x, self.config.scenario.at(client or ""))

    def predict(self, x: Any, name: str | None = None, client: str | None = None) -> npt.NDArray[Any]:
        """What the model says of raw rows.

        For classes that is the likeliest one (n,): its name, or its number where all names are whole numbers. For
        numbers it is their values in their own unit, (n,) for one and (n, K) for several; for labels 1 or 0 for
        each (n, K); for events how long (n,) a row is expected to be without one, up to the last of the run's
        times. Arguments and errors are as with `predict_proba`.
        """
        from perennial.server.results.trained import predictions  # not by predict_proba: a warning names who calls

        found = predictions(self.model(name, client), x, self.config.scenario.at(client or ""))
        return self.config.predicts.decided(found)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the headline measure in each test environment, for each model and selection.

        On `ax`, or in a new figure of pyplot. Raises `UserError` where no client has test data.
        """
        return self._draw(ax, self.config.method.title)

    def _draw(self, ax: Axes | None, name: str) -> Axes:
        measure = self._measure
        if not any(found[measure.name] for _, found in self._selected()):
            raise UserError(
                f"no client has test data, so there is nothing to plot; plot_history has held-out {measure.title}"
            )
        drawn: dict[tuple[str, int], tuple[list[str], Mapping[str, float]]] = {}
        for key, found in self._selected():  # selections that picked the same round are one line
            model = ", ".join(key[name] for name in ("model", "sites") if name in key)
            drawn.setdefault((model, key["round"]), ([], found[measure.name]))[0].append(key["selection"])
        ax = self._axes(ax, "test environment", f"test {measure.title}{measure.unit and ', %'}")
        for (model, number), (selections, values) in drawn.items():
            label = f"{name}: {model}, {' and '.join(selections)} (round {number})"
            ax.plot(list(values), [measure.factor * value for value in values.values()], marker="o", label=label)
        ax.legend()
        return ax

    def plot_history(self, ax: Axes | None = None) -> Axes:
        """Draw the headline measure by round: held out, and worst and average over test environments; `ax` as in
        `plot`."""
        from matplotlib.ticker import MaxNLocator

        measure = self._measure
        ax = self._axes(ax, "round", f"{measure.title}{measure.unit and ', %'}")
        found: dict[tuple[str, str], dict[int, list[float]]] = {}
        for row in self.history:
            rounds = found.setdefault((row["model"], row["split"]), {})
            rounds.setdefault(row["round"], []).append(measure.factor * row[measure.name])
        for (model, split), rounds in found.items():
            means = [sum(own) / len(own) for own in rounds.values()]
            label = f"{self.config.method.title}: {model}, {split}"
            if split == "validation":
                ax.plot(list(rounds), means, "--", marker=".", label=f"{label} (held out)")
                continue
            (line,) = ax.plot(list(rounds), means, marker="o", label=f"{label}, average")
            if any(len(own) > 1 for own in rounds.values()):
                worst = [(min if measure.higher_is_better else max)(own) for own in rounds.values()]
                ax.plot(list(rounds), worst, ":", marker=".", color=line.get_color(), label=f"{label}, worst")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend()
        return ax

    def _axes(self, ax: Axes | None, x: str, y: str) -> Axes:
        """The axes, or new ones of pyplot, with what they are of."""
        from matplotlib import pyplot

        ax = pyplot.subplots(layout="constrained")[1] if ax is None else ax
        about, before = f"{self.config.scenario.name}, seed {self.config.seed}", ax.get_title()
        others = before.split("; ") if ax.get_lines() and before else []
        ax.set(xlabel=x, ylabel=y, title="; ".join(dict.fromkeys([*others, about])))
        return ax

    @property
    def _measure(self) -> Measure:
        return self.config.predicts.headline

    @property
    def _names(self) -> tuple[str, ...]:
        return overall(self.config.sites_with_data, self.config.scenario.test_environments)

    def _selected(self) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """What tells each round that was picked, `sites` among it where some did not train; its accuracies."""
        with understood(self.folder):
            rows = self._folder.rows() if self.config.test_sites else []
            return [
                (
                    {**of, "model": model, "selection": selection, "round": found["round"]},
                    {
                        **found,
                        "worst_site": worst_site(found["clients"], self._measure),
                    },  # older summaries have none
                )
                for part, models in by_part(self.config, self.summary["models"], rows).items()
                for of in [{"sites": part} if part else {}]
                for model, selections in models.items()
                for selection, found in selections.items()
            ]


def plot(results: Iterable[Result], ax: Axes | None = None) -> Axes:
    """Draw several results in one picture, as `Result.plot` draws one. Raises `UserError` for none.

    The legend has the methods, and the seeds and folders where they have the same.
    """
    every = list(results)
    if not every:
        raise UserError("results: there is none to draw; give a list, such as [a, b]")
    names = [own.config.method.title for own in every]
    with_seeds = [f"{name}, seed {own.config.seed}" for name, own in zip(names, every, strict=True)]
    with_folders = [f"{name}, {own.folder.name}" for name, own in zip(with_seeds, every, strict=True)]
    apart = next((own for own in (names, with_seeds) if len(set(own)) == len(own)), with_folders)
    for name, own in zip(apart, every, strict=True):
        ax = own._draw(ax, name)
    assert ax is not None
    return ax

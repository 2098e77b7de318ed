"""`from_arrays` with numbers, labels and times to an event."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lifetables import kaplan_meier

import perennial
from perennial.common.tasks import Classes, Event, Labels, Numbers, PredictionTask

RNG = np.random.default_rng(0)
X = {name: RNG.normal(size=(80, 3)).astype("float32") for name in "ab"}
NUMBER = {name: 50 + 4 * x[:, 0] - 8 * x[:, 1] + RNG.normal(size=80) / 4 for name, x in X.items()}
TWO = {name: np.stack([own, -1000 * own], axis=1) for name, own in NUMBER.items()}
LABELS = {name: (x[:, :2] > 0).astype(float) for name, x in X.items()}
TIMES = {name: (RNG.exponential(np.exp(x[:, 0])) + 0.01, RNG.random(80) < 0.7) for name, x in X.items()}
MISSING = {name: np.where(RNG.random(own.shape) < 0.2, np.nan, own) for name, own in LABELS.items()}
PAIRS = {
    name: np.array(list(zip(happened, time, strict=True)), dtype=[("died", "?"), ("days", "<f8")])
    for name, (time, happened) in TIMES.items()
}


def scenario(y: dict[str, Any], **options: Any) -> Any:
    return perennial.from_arrays({name: (X[name], y[name]) for name in y}, **options).scenario


@pytest.mark.parametrize(
    ("y", "options", "kind"),
    [
        (NUMBER, {}, Numbers),
        ({name: torch.tensor(own) for name, own in NUMBER.items()}, {}, Numbers),
        (TWO, {}, Numbers),
        ({name: np.round(own).astype(int) for name, own in NUMBER.items()}, {"task": "numbers"}, Numbers),
        ({name: np.round(own).astype(int) for name, own in NUMBER.items()}, {}, Classes),
        (LABELS, {}, Labels),
        (MISSING, {}, Labels),
        ({name: own.astype(bool) for name, own in LABELS.items()}, {}, Labels),
        ({name: own[:, 0] for name, own in LABELS.items()}, {"task": "classes"}, Classes),
        ({name: own[:, 0] for name, own in LABELS.items()}, {"task": "labels"}, Labels),
        (LABELS, {"task": "numbers"}, Numbers),
        (TIMES, {}, Event),
        (PAIRS, {}, Event),
        ({name: np.stack(own, axis=1) for name, own in TIMES.items()}, {"task": "event"}, Event),
    ],
)
def test_what_y_is_is_seen_or_said(y: dict[str, Any], options: Any, kind: type[PredictionTask]) -> None:
    assert type(scenario(y, **options).task) is kind


def test_numbers_are_scaled_by_all_clients_and_have_names() -> None:
    frames = {name: pd.DataFrame(own, columns=["days", "cost"]) for name, own in TWO.items()}
    task = scenario(frames, loss="huber").task
    every = np.concatenate(list(TWO.values()))
    assert (task.names, task.kind) == (("days", "cost"), "huber")
    np.testing.assert_allclose(task.mean, every.astype("float32").mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(task.scale, every.astype("float32").std(axis=0), rtol=1e-5)
    assert scenario(TWO, targets=["x", "z"]).task.names == ("x", "z")
    assert scenario(TWO).task.names == ("y1", "y2")
    counts = {name: RNG.poisson(3, 80) for name in X}
    assert scenario(counts, task="numbers", loss="poisson").task == Numbers(("y",), "poisson")


def test_a_frame_of_whole_numbers_may_be_numbers() -> None:
    frames = {name: pd.DataFrame(np.round(own), columns=["days", "cost"]).astype(int) for name, own in TWO.items()}
    assert scenario(frames).task.names == ("days", "cost")


def test_an_event_has_intervals_and_the_censoring_curve_of_all_clients() -> None:
    task = scenario(TIMES).task
    time, happened = (np.concatenate([own[place] for own in TIMES.values()]) for place in (0, 1))
    shares = [(time <= end).mean() for end in task.times]
    assert shares == pytest.approx([0.095 * n for n in range(1, 11)], abs=0.01)
    exact = kaplan_meier(time.astype("float32"), ~happened, task.times)
    np.testing.assert_allclose(task.censoring, exact, rtol=1e-6)
    assert scenario(PAIRS).task == task


def test_rare_labels_may_count_more() -> None:
    rare = {name: (x[:, :2] > [1.0, 0.0]).astype(int) for name, x in X.items()}
    every = np.concatenate(list(rare.values()))
    weights = scenario(rare, class_weights="balanced").task.weights
    assert weights == tuple((1.0, pytest.approx((1 - share) / share)) for share in every.mean(axis=0))
    assert scenario(rare, class_weights=(2, 3)).task.weights == ((1, 2), (1, 3))


def test_from_rows_to_predictions_in_the_targets_own_unit(tmp_path: Path) -> None:
    data = perennial.from_arrays({name: (X[name], NUMBER[name]) for name in X}, {"new": (X["a"], NUMBER["a"])})
    settings = {"learning_rate": 0.2, "model.name": "logistic"}
    found = perennial.run("fedavg", data, rounds=40, settings=settings, out=tmp_path / "run", device="cpu")
    predicted = found.predict(X["a"])
    error = float(np.abs(predicted - NUMBER["a"].astype("float32")).mean())
    (row,) = (row for row in found.environments if row["selection"] == "final")
    assert row["mean_absolute_error"] == pytest.approx(error, rel=1e-4)
    assert error < 0.3 < 4 < float(np.abs(NUMBER["a"] - np.median(NUMBER["a"])).mean())
    summary = json.loads((found.folder / "summary.json").read_text())
    assert summary["models"]["global"]["final"]["measures"]["all"]["r2"] > 0.99


@pytest.mark.parametrize(
    ("y", "options", "said"),
    [
        ({"a": LABELS["a"][:, 0]}, {}, "which may be classes or numbers; say task='classes' or task='numbers'"),
        (NUMBER, {"task": "regression"}, "task 'regression'"),
        (NUMBER, {"classes": ["a", "b"]}, "classes is for task='classes', and here that is 'numbers'"),
        (
            NUMBER,
            {"class_weights": "balanced"},
            "class_weights is for classes and labels",
        ),
        (LABELS, {"loss": "huber"}, "loss = 'huber' is for task='numbers', and here that is 'labels'"),
        (TWO, {"targets": ["one"]}, "give a name for each of 2 columns of y"),
        ({"a": NUMBER["a"] * np.nan}, {}, "no finite number"),
        ({"a": NUMBER["a"] * 0 + 0.5}, {}, "y is the same everywhere; there is nothing to predict"),
        ({"a": -NUMBER["a"]}, {"loss": "poisson"}, "it must be at least 0"),
        ({"a": LABELS["a"] * 2}, {"task": "labels"}, "a label is 0 or 1, or missing"),
        ({"a": (-TIMES["a"][0], TIMES["a"][1])}, {}, "has a time of -"),
        ({"a": (TIMES["a"][0], 3 * TIMES["a"][1])}, {}, "it must be 1 where it happened, and 0 where not yet"),
        ({"a": (TIMES["a"][0], TIMES["a"][1][:9])}, {}, "alike in length"),
        ({"a": NUMBER["a"]}, {"task": "event"}, "a pair (time, happened) with task='event'; it has 1 columns"),
        ({"a": ["long"] * 80}, {"task": "numbers"}, "y must be numbers, one or several for each sample"),
        ({"a": NUMBER["a"], "b": TWO["b"]}, {"task": "numbers"}, "y has 2 numbers for a sample, and in a 1"),
        ({"a": np.array(["x", "y"] * 40)}, {"task": "labels"}, "y must be numbers"),
    ],
)
def test_targets_that_cannot_be_are_one_sentence(y: dict[str, Any], options: Any, said: str) -> None:
    with pytest.raises(perennial.UserError) as refused:
        scenario(y, **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)

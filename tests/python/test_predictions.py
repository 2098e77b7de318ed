"""Predictions of runs on numbers, labels and events: what a person gets is what the run's measures were of."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import perennial
from perennial.common.tasks import TaskName

Floats = npt.NDArray[np.float64]
SITES = ("east", "west")


def rows(site: str, count: int = 90) -> tuple[Floats, dict[TaskName, Any]]:
    """Samples of a site, and their targets for each task."""
    random = np.random.default_rng(SITES.index(site))
    x = random.normal(size=(count, 3)).astype(np.float32)
    signal = x @ [1.0, -2.0, 0.5] + random.normal(0, 0.3, count)
    times, until = 10 * np.exp(signal / 2), random.exponential(20, count)
    labels = np.stack([signal > 0, x[:, 0] > 0.5], axis=1).astype(float)
    labels[::7, 1] = np.nan
    return x, {
        "numbers": np.stack([30 + 5 * signal, 1000 * signal], axis=1),
        "labels": labels,
        "event": (np.minimum(times, until), times <= until),
    }


def run(task: TaskName, folder: Path) -> perennial.Result:
    samples = {site: rows(site) for site in SITES}
    clients = {site: (x[:60], part(y[task], slice(60))) for site, (x, y) in samples.items()}
    test = {"new": {site: (x[60:], part(y[task], slice(60, None))) for site, (x, y) in samples.items()}}
    scenario = perennial.from_arrays(clients, test)
    return perennial.run("ditto", scenario, rounds=20, settings={"learning_rate": 0.1}, out=folder)


def part(targets: Any, rows: slice) -> Any:
    return tuple(own[rows] for own in targets) if isinstance(targets, tuple) else targets[rows]


def counted(result: perennial.Result, site: str) -> float:
    [found] = [
        row
        for row in result.clients
        if (row["model"], row["selection"], row["client"]) == ("personal", "final", site)
    ]
    value: float = found[result.config.predicts.headline.name]
    return value


def test_numbers_in_their_own_unit(tmp_path: Path) -> None:
    result = run("numbers", tmp_path / "run")
    for site in SITES:
        x, y = rows(site)
        values = result.predict(x[60:], client=site)
        assert np.abs(values - y["numbers"][60:]).mean() == pytest.approx(counted(result, site), rel=1e-5)
        model = result.model(client=site)
        with torch.no_grad():
            outputs = model(torch.from_numpy(x[60:])).numpy()
        task: Any = result.config.predicts
        np.testing.assert_allclose(outputs * task.scale + task.mean, values, rtol=1e-4, atol=1e-3)
        assert np.abs(values - y["numbers"][60:]).mean() < np.abs(y["numbers"][60:] - task.mean).mean() / 2
    with pytest.raises(perennial.UserError, match="a run on numbers has no probabilities; use predict"):
        result.predict_proba(x)
    assert result.plot().get_ylabel() == "test mean absolute error"


def test_labels_and_their_probabilities(tmp_path: Path) -> None:
    from sklearn.metrics import roc_auc_score

    result = run("labels", tmp_path / "run")
    for site in SITES:
        x, y = rows(site)
        probabilities, known = result.predict_proba(x[60:], client=site), y["labels"][60:]
        each = [
            roc_auc_score(own[~np.isnan(own)], found[~np.isnan(own)])
            for own, found in zip(known.T, probabilities.T, strict=True)
        ]
        assert np.mean(each) == pytest.approx(counted(result, site), abs=0.01)  # which is of binned scores
        assert np.mean(each) > 0.8
        assert np.array_equal(result.predict(x[60:], client=site), probabilities >= 0.5)


def test_survival_and_the_time_expected_without_an_event(tmp_path: Path) -> None:
    from sksurv.metrics import concordance_index_censored

    result = run("event", tmp_path / "run")
    times = result.config.predicts.metadata["times"]
    for site in SITES:
        x, y = rows(site)
        survival, expected = result.predict_proba(x[60:], client=site), result.predict(x[60:], client=site)
        assert survival.shape == (30, len(times))
        assert (np.diff(survival, axis=1) <= 0).all()
        assert ((expected > 0) & (expected <= times[-1])).all()
        time, happened = part(y["event"], slice(60, None))
        concordance = concordance_index_censored(happened, time, -expected)[0]
        assert concordance == pytest.approx(counted(result, site), abs=1e-3)
        assert concordance > 0.7

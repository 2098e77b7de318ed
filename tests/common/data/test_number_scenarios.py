import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

from perennial.common.config import load_config
from perennial.common.data.examples import ClientData, Examples, join
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.numbers import (
    CAUSES,
    DEVIATION,
    DISTANCE,
    MEAN,
    PRESETS,
    SHORTCUT,
    TEST_SLOPES,
    DiabetesSites,
    LinearSCM,
)
from perennial.server.study.constant import constant_predictor

LARGE = LinearSCM(clients=2, train_samples=20_000, test_samples=20_000)
SLOPES = {f"a={a:g}": a for a in TEST_SLOPES}


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


def test_the_presets() -> None:
    assert list(PRESETS) == ["diabetes-sites", "linear-scm", "diabetes-sites-oracle", "linear-scm-oracle"]
    assert SCENARIOS["diabetes-sites"].train_environments == ("a=1", "a=0.5")
    assert SCENARIOS["diabetes-sites"].test_environments == ("a=1", "a=0.5", "a=0", "a=-0.5", "a=-1")
    assert SCENARIOS["linear-scm"].test_environments == ("a=1", "a=0.5", "a=0", "a=-0.5", "a=-1", "distance")


# --- Diabetes ------------------------------------------------------------------------------------------


def test_every_patient_is_in_one_part_of_one_site_and_sites_go_by_age() -> None:
    scenario, theirs = DiabetesSites(), load_diabetes(scaled=False)
    every = [scenario.client_data(client, 0, None) for client in range(4)]
    assert [[len(part) for part in splits(data).values()][:3] for data in every] == [
        [66, 17, 28], [66, 17, 28], [66, 16, 28], [66, 16, 28],
    ]  # fmt: skip
    raw = theirs.data
    standardised = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    rows = np.c_[standardised, theirs.target]
    ours = torch.cat(
        [torch.cat([part.x[:, :10], part.y], 1) for d in every for part in (d.train, d.validation, d.test["a=1"])]
    ).numpy()
    assert np.sort(ours, axis=0) == pytest.approx(np.sort(rows, axis=0), abs=1e-4)
    assert ours.T @ ours == pytest.approx(rows.T @ rows, rel=1e-3, abs=1e-1)  # of the same rows
    ages = [join([data.train, data.validation, data.test["a=1"]]).x[:, 0] for data in every]
    assert all(low.max() <= high.min() for low, high in pairwise(ages))
    assert (float(theirs.target.mean()), float(theirs.target.std())) == pytest.approx((MEAN, DEVIATION), abs=1e-4)


def test_the_planted_column_has_the_slope_of_the_environment() -> None:
    scenario = DiabetesSites(planted_noise=0.0)
    for client in range(4):
        data = scenario.client_data(client, 0, None)
        own = (1.0, 0.5)[client % 2]
        for name, part in splits(data).items():
            standardised = (part.y[:, 0] - MEAN) / DEVIATION
            slope = SLOPES.get(name, own)
            assert torch.allclose(part.x[:, 10], slope * standardised, atol=1e-5)
            assert set(part.environment.tolist()) == ({-1} if name in data.test else {client % 2})
    noisy = torch.cat(
        [part.x[:, 10] for c in range(4) for part in [DiabetesSites().client_data(c, 0, None).test["a=0"]]]
    )
    assert float(noisy.std()) == pytest.approx(0.5, abs=0.15)


def test_the_planted_column_is_the_better_way_to_the_target_and_then_misleads() -> None:
    scenario = DiabetesSites()
    every = [scenario.client_data(client, 0, None) for client in range(4)]
    train = join([data.train for data in every])

    def score(columns: slice, environment: str) -> float:
        test = join([data.test[environment] for data in every])
        model = LinearRegression().fit(train.x[:, columns].numpy(), train.y.numpy())
        return float(model.score(test.x[:, columns].numpy(), test.y.numpy()))

    measurements, all_columns = slice(0, 10), slice(0, 11)
    assert score(all_columns, "a=1") > score(measurements, "a=1") + 0.1
    assert score(all_columns, "a=-1") < 0 < 0.3 < score(measurements, "a=-1")


@pytest.mark.parametrize("name", ["diabetes-sites", "linear-scm"])
def test_the_oracle_has_no_shortcut_and_all_else(name: str) -> None:
    shortcut = slice(10, 11) if name == "diabetes-sites" else SHORTCUT
    with_it, without = SCENARIOS[name].client_data(1, 3, None), SCENARIOS[f"{name}-oracle"].client_data(1, 3, None)
    for split, part in splits(without).items():
        own = splits(with_it)[split]
        assert torch.equal(part.y, own.y)
        assert torch.equal(part.environment, own.environment)
        assert torch.equal(part.x[:, : shortcut.start], own.x[:, : shortcut.start])
        assert not part.x[:, shortcut].any()
        assert own.x[:, shortcut].any()


@pytest.mark.parametrize("name", ["diabetes-sites", "linear-scm"])
def test_test_environments_differ_in_the_shortcut_alone(name: str) -> None:
    shortcut = 10 if name == "diabetes-sites" else SHORTCUT.start
    test = SCENARIOS[name].client_data(0, 0, None).test
    one, other = test["a=1"], test["a=-1"]
    assert torch.equal(one.y, other.y)
    assert torch.equal(one.x[:, :shortcut], other.x[:, :shortcut])
    assert not torch.equal(one.x[:, shortcut:], other.x[:, shortcut:])


def test_what_a_constant_predictor_scores_is_what_the_page_says() -> None:
    found = constant_predictor(load_config(options={"method": "fedavg", "scenario": "diabetes-sites"}), 0)
    assert found.worst == pytest.approx(71.25, abs=0.005)
    assert found.average == pytest.approx(71.25, abs=0.005)


# --- Linear model --------------------------------------------------------------------------------------


def test_the_population_is_as_written() -> None:
    weights = LARGE.invariant_weights(0)
    assert float(weights.norm()) == pytest.approx(1.0)
    assert not weights[SHORTCUT].any()
    assert not torch.equal(weights, LARGE.invariant_weights(1))
    for client in range(2):
        data = LARGE.client_data(client, 0, None)
        for name, part in splits(data).items():
            if name == DISTANCE:
                continue
            slope, close = SLOPES.get(name, (1.0, 0.5)[client]), 4.5 / len(part) ** 0.5
            causes, y = part.x[:, CAUSES], part.y[:, 0]
            assert torch.allclose(causes.T @ causes / len(part), torch.eye(3), atol=1.5 * close)
            rest = y - part.x @ weights
            assert (float(rest.mean()), float(rest.std())) == pytest.approx((0.0, 1.0), abs=close)
            noise = part.x[:, SHORTCUT] - slope * y[:, None] / math.sqrt(3)
            assert float(noise.std()) == pytest.approx(0.5, abs=close)
            assert noise.mean(dim=0).tolist() == pytest.approx([0.0] * 3, abs=close)


def test_on_the_causes_alone_least_squares_is_the_invariant_solution_and_on_all_it_is_not() -> None:
    """In an environment the mean of y given all features is `(w·x_c / σ² + a u·x_s / σ_s²) / (1 / σ² + a² / σ_s²)`
    with the noises' variances σ² = 1 and σ_s² = 1/4: two ways to y, each weighted by its precision."""
    data, invariant = LARGE.client_data(0, 0, None), LARGE.invariant_weights(0)
    x, y = data.train.x.numpy(), data.train.y[:, 0].numpy()
    found = LinearRegression().fit(x[:, CAUSES], y).coef_
    assert found == pytest.approx(invariant[CAUSES].numpy(), abs=0.04)
    precision = 1 + 1 / 0.25
    expected = [*(invariant[CAUSES] / precision).tolist(), *[1 / 0.25 / precision / math.sqrt(3)] * 3]
    assert LinearRegression().fit(x, y).coef_ == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("oracle", [False, True])
def test_the_error_in_the_environment_distance_is_the_distance(oracle: bool) -> None:
    scenario = LinearSCM(oracle=oracle)
    part, invariant = scenario.client_data(3, 5, None).test[DISTANCE], scenario.invariant_weights(5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        weights, intercept = torch.randn(6, generator=generator), torch.randn(1, generator=generator)
        outputs = part.x @ weights[:, None] + intercept
        sums = {name: own.tolist() for name, own in scenario.task.sums(outputs, part.y).items()}
        found = scenario.task.measures(len(part), sums)["root_mean_squared_error"]
        seen = CAUSES if oracle else slice(0, 6)  # of the shortcut, which is zero, a model has no say
        distance = ((weights - invariant)[seen].square().sum() + intercept.square().sum()).sqrt()
        assert found == pytest.approx(float(distance), rel=1e-5)
    exact = scenario.task.sums(part.x @ invariant[:, None], part.y)
    assert float(exact["squared"]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", ["diabetes-sites", "linear-scm"])
def test_draws_depend_on_the_seed_and_are_the_same_again(name: str) -> None:
    scenario = SCENARIOS[name]
    again = scenario.client_data(0, 0, None).train.x
    assert torch.equal(scenario.client_data(0, 0, None).train.x, again)
    assert not torch.equal(scenario.client_data(0, 1, None).train.x, again)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DiabetesSites, {"clients": 21}),
        (DiabetesSites, {"test_fraction": 0.0}),
        (DiabetesSites, {"planted_noise": -1.0}),
        (LinearSCM, {"train_slopes": [1e9]}),
        (LinearSCM, {"train_slopes": []}),
        (LinearSCM, {"noise": -1.0}),
    ],
)
def test_bad_settings_are_refused(kind: type[DiabetesSites | LinearSCM], settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        kind.model_validate(settings)

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sksurv.metrics import concordance_index_censored
from sksurv.nonparametric import CensoringDistributionEstimator
from sksurv.util import Surv

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.event import CAUSES, SHORTCUT, TIMES, EventAndShortcut

LARGE = EventAndShortcut(clients=2, train_samples=4000, test_samples=4000)
UNCENSORED = LARGE.model_copy(update={"censoring": 0.0})


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


@pytest.fixture(scope="module")
def clients() -> list[ClientData]:
    return [LARGE.client_data(client, 0, None) for client in range(2)]


def test_times_given_the_causes_are_exponential() -> None:
    """Times the hazard they are exponential with the mean and deviation 1."""
    part = UNCENSORED.client_data(0, 0, None).train
    assert part.y[:, 1].all()
    waits = part.y[:, 0] * (part.x[:, CAUSES].sum(dim=1) / 2).exp()
    close = 4.5 / len(part) ** 0.5
    assert (float(waits.mean()), float(waits.std())) == pytest.approx((1.0, 1.0), abs=2 * close)
    assert float((waits < math.log(2)).float().mean()) == pytest.approx(0.5, abs=close)


def test_the_censoring_curve_is_the_one_announced(clients: list[ClientData]) -> None:
    y = clients[0].test["p=0.0"].y
    data = Surv.from_arrays(y[:, 1].numpy() == 1, y[:, 0].numpy())
    theirs = CensoringDistributionEstimator().fit(data).predict_proba(np.float32(TIMES))
    assert LARGE.task.censoring == pytest.approx(theirs.tolist(), abs=0.03)
    assert UNCENSORED.task.censoring == (1.0,) * len(TIMES)


def test_the_causes_are_as_good_as_promised() -> None:
    """Of two samples with hazards e^η and e^η′ the first comes first with the probability σ(η − η′); η − η′ has
    the variance 2. So the concordance of the causes is the mean of σ(|N(0, 2)|)."""
    part = UNCENSORED.client_data(1, 0, None).test["p=0.5"]
    risk = part.x[:, CAUSES].sum(dim=1).double().numpy()
    found = concordance_index_censored(part.y[:, 1].numpy() == 1, part.y[:, 0].numpy(), risk)[0]
    grid = np.linspace(0, 12, 4001)
    density = 2 * np.exp(-(grid**2) / 4) / np.sqrt(4 * np.pi)
    expected = np.trapezoid(density / (1 + np.exp(-grid)), grid)
    assert expected == pytest.approx(0.725, abs=0.001)  # as the page says
    assert found == pytest.approx(expected, abs=0.02)


def test_the_shortcut_tells_what_comes_early_as_often_as_the_environment_says() -> None:
    scenario = UNCENSORED.model_copy(update={"shortcut": 10.0})
    for number in range(2):
        data = scenario.client_data(number, 0, None)
        for name, part in splits(data).items():
            p = float(name[2:]) if name in data.test else scenario.train_agreement[number]
            told = part.x[:, SHORTCUT].sum(dim=1) > 0
            right = (told == (part.y[:, 0] < math.log(2))).float().mean()
            assert float(right) == pytest.approx(p, abs=4.5 * 0.5 / len(part) ** 0.5)
            assert set(part.environment.tolist()) == ({-1} if name in data.test else {number})


def test_test_environments_differ_in_the_shortcut_alone(clients: list[ClientData]) -> None:
    one, other = clients[0].test["p=0.0"], clients[0].test["p=1.0"]
    assert torch.equal(one.y, other.y)
    assert torch.equal(one.x[:, CAUSES], other.x[:, CAUSES])
    assert not torch.equal(one.x[:, SHORTCUT], other.x[:, SHORTCUT])


def test_the_oracle_has_no_shortcut_and_all_else() -> None:
    names = "event-and-shortcut", "event-and-shortcut-oracle"
    with_it, without = (SCENARIOS[name].client_data(1, 3, None) for name in names)
    for split, part in splits(without).items():
        own = splits(with_it)[split]
        assert torch.equal(part.y, own.y)
        assert torch.equal(part.x[:, CAUSES], own.x[:, CAUSES])
        assert not part.x[:, SHORTCUT].any()


def test_draws_depend_on_the_seed_and_are_the_same_again() -> None:
    scenario = EventAndShortcut()
    again = scenario.client_data(0, 0, None).train.y
    assert torch.equal(scenario.client_data(0, 0, None).train.y, again)
    assert not torch.equal(scenario.client_data(0, 1, None).train.y, again)


@pytest.mark.parametrize(
    "settings", [{"censoring": -1}, {"train_agreement": [1.2]}, {"clients": 1}, {"test_samples": 0}]
)
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        EventAndShortcut.model_validate(settings)

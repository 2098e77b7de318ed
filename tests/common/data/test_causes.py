from statistics import NormalDist

import pytest
import torch
from pydantic import ValidationError

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.causes import COMMON, PERSONAL, PRESETS, SHORTCUT, CausesAndShortcut

LARGE = CausesAndShortcut(clients=3, train_samples=5000, test_samples=4000)


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


@pytest.fixture(scope="module")
def clients() -> list[ClientData]:
    return [LARGE.client_data(client, 0, None) for client in range(LARGE.clients)]


def test_shapes_and_names(clients: list[ClientData]) -> None:
    assert LARGE.train_environments == ("p=0.95", "p=0.65")
    for number, data in enumerate(clients):
        assert tuple(data.test) == LARGE.test_environments
        assert [len(part) for part in splits(data).values()] == [3500, 1500, *[4000] * 11]
        for name, part in splits(data).items():
            assert part.x.shape == (len(part), 12)
            assert (part.x.dtype, part.y.dtype) == (torch.float32, torch.int64)
            assert set(part.environment.tolist()) == ({-1} if name in data.test else {number % 2})


def test_every_block_has_its_mean_and_deviation(clients: list[ClientData]) -> None:
    for number, data in enumerate(clients):
        sign = -1 if number == 2 else 1
        for name, part in splits(data).items():
            p = float(name[2:]) if name in data.test else LARGE.train_agreement[number % 2]
            signed = part.x * (2.0 * part.y - 1)[:, None]
            # Four and a half standard errors, in 3 clients × 13 splits × 12 features.
            close = 4.5 / len(part) ** 0.5
            for block, mean in ((COMMON, 0.35), (PERSONAL, sign * 0.35), (SHORTCUT, 2 * p - 1)):
                deviation = (1 + 4 * p * (1 - p)) ** 0.5 if block == SHORTCUT else 1.0
                assert signed[:, block].mean(0) == pytest.approx([mean] * 4, abs=close * deviation)
                assert signed[:, block].std(0) == pytest.approx([deviation] * 4, rel=close)
            assert part.y.float().mean() == pytest.approx(0.5, abs=close / 2)


def test_the_causes_are_as_good_as_promised(clients: list[ClientData]) -> None:
    for number, data in enumerate(clients):
        part = data.test["p=0.0"]
        common, personal = part.x[:, COMMON].sum(1), (-1 if number == 2 else 1) * part.x[:, PERSONAL].sum(1)
        for score, distance in ((common, 0.7), (common + personal, 0.98**0.5)):
            right = ((score > 0) == part.y.bool()).float().mean()
            assert right == pytest.approx(NormalDist().cdf(distance), abs=4.5 * 0.5 / 4000**0.5)


def test_test_environments_differ_in_the_shortcut_alone(clients: list[ClientData]) -> None:
    low, high = clients[0].test["p=0.0"], clients[0].test["p=1.0"]
    assert torch.equal(low.y, high.y)
    assert torch.equal(low.x[:, : SHORTCUT.start], high.x[:, : SHORTCUT.start])
    assert not torch.equal(low.x[:, SHORTCUT], high.x[:, SHORTCUT])
    assert not torch.equal(low.x[:1500, COMMON], clients[0].validation.x[:, COMMON])
    assert not torch.equal(low.x[:, COMMON], clients[1].test["p=0.0"].x[:, COMMON])


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-oracle")])
def test_the_oracle_has_no_shortcut_and_all_else(name: str) -> None:
    with_it, without = SCENARIOS[name].client_data(1, 3, None), SCENARIOS[f"{name}-oracle"].client_data(1, 3, None)
    for split, part in splits(without).items():
        own = splits(with_it)[split]
        assert torch.equal(part.y, own.y)
        assert torch.equal(part.environment, own.environment)
        assert torch.equal(part.x[:, : SHORTCUT.start], own.x[:, : SHORTCUT.start])
        assert not part.x[:, SHORTCUT].any()
        assert own.x[:, SHORTCUT].any()


def test_environments_are_spread_evenly() -> None:
    one, two = PRESETS["causes-and-shortcut"], PRESETS["causes-and-shortcut-2env"]
    assert isinstance(one, CausesAndShortcut)
    assert isinstance(two, CausesAndShortcut)
    assert [one.environments(client) for client in range(3)] == [(0,), (1,), (0,)]
    assert [two.environments(client) for client in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    environment = two.client_data(1, 0, None).train.environment
    assert torch.bincount(environment).tolist() == [0, 210, 0, 210]


def test_draws_depend_on_the_seed_and_are_the_same_again() -> None:
    scenario = CausesAndShortcut()
    again = scenario.client_data(0, 0, None).train.x
    assert torch.equal(scenario.client_data(0, 0, None).train.x, again)
    assert not torch.equal(scenario.client_data(0, 1, None).train.x, again)


@pytest.mark.parametrize(
    "settings", [{"train_agreement": [1.2]}, {"clients": 1}, {"test_samples": 0}, {"common": -1}]
)
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        CausesAndShortcut.model_validate(settings)

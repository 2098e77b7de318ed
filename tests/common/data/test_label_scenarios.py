import math
from statistics import NormalDist

import pytest
import torch
from pydantic import ValidationError
from sklearn.metrics import roc_auc_score

from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.labels import CAUSES, FREQUENCIES, WIDTH, LabelsAndShortcut

LARGE = LabelsAndShortcut(clients=2, train_samples=8000, test_samples=8000)


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


@pytest.fixture(scope="module")
def clients() -> list[ClientData]:
    return [LARGE.client_data(client, 0, None) for client in range(2)]


def test_labels_have_their_frequency_and_some_are_not_known(clients: list[ClientData]) -> None:
    for part in (own for data in clients for own in splits(data).values()):
        assert part.y.shape == (len(part), 3)
        known = ~part.y.isnan()
        close = 4.5 * 0.5 / len(part) ** 0.5
        assert known.float().mean(dim=0).tolist() == pytest.approx([0.9] * 3, abs=close)
        assert part.y.nanmean(dim=0).tolist() == pytest.approx([*FREQUENCIES.values()], abs=close)
        both = (part.y[:, 0] * part.y[:, 1]).nanmean()  # independent
        assert float(both) == pytest.approx(0.5 * 0.3, abs=close)


def test_causes_and_shortcuts_are_as_written(clients: list[ClientData]) -> None:
    for number, data in enumerate(clients):
        for name, part in splits(data).items():
            p = float(name[2:]) if name in data.test else LARGE.train_agreement[number]
            assert set(part.environment.tolist()) == ({-1} if name in data.test else {number})
            for label in range(3):
                known = ~part.y[:, label].isnan()
                v, close = 2 * part.y[known, label] - 1, 4.5 / int(known.sum()) ** 0.5
                cause = part.x[known, label * WIDTH : (label + 1) * WIDTH] * v[:, None]
                assert cause.mean(dim=0).tolist() == pytest.approx([0.7 / math.sqrt(2)] * 2, abs=close)
                assert cause.std(dim=0).tolist() == pytest.approx([1.0] * 2, rel=close)
                shortcut = part.x[known, CAUSES + label] * v
                deviation = (1 + 1.5**2 * 4 * p * (1 - p)) ** 0.5
                assert float(shortcut.mean()) == pytest.approx(1.5 * (2 * p - 1), abs=close * deviation)
                assert float(shortcut.std()) == pytest.approx(deviation, rel=close)


def test_the_causes_are_as_good_as_promised(clients: list[ClientData]) -> None:
    part = clients[0].test["p=0.0"]
    for label in range(2):
        known = ~part.y[:, label].isnan()
        score = part.x[known, label * WIDTH : (label + 1) * WIDTH].sum(dim=1)
        expected = NormalDist().cdf(math.sqrt(2) * 0.7)
        assert roc_auc_score(part.y[known, label], score) == pytest.approx(expected, abs=0.02)


def test_test_environments_differ_in_the_shortcut_alone(clients: list[ClientData]) -> None:
    one, other = clients[0].test["p=0.0"], clients[0].test["p=1.0"]
    assert torch.equal(one.y.nan_to_num(-1), other.y.nan_to_num(-1))
    assert torch.equal(one.x[:, :CAUSES], other.x[:, :CAUSES])
    assert not torch.equal(one.x[:, CAUSES:], other.x[:, CAUSES:])


def test_the_oracle_has_no_shortcut_and_all_else() -> None:
    names = "labels-and-shortcut", "labels-and-shortcut-oracle"
    with_it, without = (SCENARIOS[name].client_data(1, 3, None) for name in names)
    for split, part in splits(without).items():
        own = splits(with_it)[split]
        assert torch.equal(part.y.nan_to_num(-1), own.y.nan_to_num(-1))
        assert torch.equal(part.x[:, :CAUSES], own.x[:, :CAUSES])
        assert not part.x[:, CAUSES:].any()


def test_draws_depend_on_the_seed_and_are_the_same_again() -> None:
    scenario = LabelsAndShortcut()
    again = scenario.client_data(0, 0, None).train.x
    assert torch.equal(scenario.client_data(0, 0, None).train.x, again)
    assert not torch.equal(scenario.client_data(0, 1, None).train.x, again)


@pytest.mark.parametrize("settings", [{"missing": 1.0}, {"train_agreement": [1.2]}, {"clients": 1}, {"cause": -1}])
def test_bad_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        LabelsAndShortcut.model_validate(settings)

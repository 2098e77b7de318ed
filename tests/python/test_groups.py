"""Samples that are named groups of arrays, and sequences of different lengths."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_models
import torch

import perennial
from perennial import UserError, from_arrays
from perennial.common import plugins
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.samples import PAD, SampleShape, group_of, made_up, unpacked

FEW: dict[str, Any] = {"local_steps": 3, "batch_size": 8, "evaluate_every": 2, "checkpoint_every": 2}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, token_models.__file__)


def both(seed: int, count: int = 40) -> tuple[dict[str, Any], Any]:
    """Pictures and rows, of which each says half of the class."""
    rng = np.random.default_rng(seed)
    bright, high = rng.integers(0, 2, count), rng.integers(0, 2, count)
    image = (rng.integers(0, 60, (count, 1, 8, 8)) + 180 * bright[:, None, None, None]).astype(np.uint8)
    table = rng.normal(size=(count, 3)) + 3 * high[:, None]
    return {"image": image, "table": table}, bright + high


@pytest.mark.parametrize("name", ["Both", "OfDict"])
def test_a_picture_and_a_row(name: str, tmp_path: Path) -> None:
    scenario = from_arrays({"a": both(1), "b": both(2)}, {"new": both(3)})
    settings = {"model.name": f"token_models:{name}", "learning_rate": 0.3, **FEW, "local_steps": 30}
    result = perennial.run("fedavg", scenario, rounds=4, settings=settings, out=tmp_path / "run")
    x, y = both(4)
    assert (result.predict(x) == y).mean() > 0.9
    data = scenario.scenario.client_data(0, 0, Path(scenario.save(tmp_path / "data")))
    shape = group_of({"image": (1, 8, 8), "table": (3,)})
    assert scenario.scenario.input_shape == shape
    parts = unpacked(data.test["new"].x, shape)
    torch.testing.assert_close(parts["image"], torch.from_numpy(both(3)[0]["image"]).float() / 255)
    torch.testing.assert_close(parts["table"], torch.from_numpy(both(3)[0]["table"]).float())


@pytest.mark.parametrize("method", ["fedsdr", "ditto"])
def test_methods_that_need_features_have_them(method: str, tmp_path: Path) -> None:
    settings = {"model.name": "token_models:Both", **FEW}
    scenario = from_arrays({"a": (*both(1), ["u", "v"] * 20), "b": (*both(2), ["u", "v"] * 20)})
    assert perennial.run(method, scenario, rounds=2, settings=settings, out=tmp_path / "run").accuracy


def test_named_models_take_all_numbers_of_a_group(tmp_path: Path) -> None:
    scenario = from_arrays({"a": both(1), "b": both(2)})
    result = perennial.run(
        "fedavg", scenario, rounds=1, settings={**FEW, "model.hidden": [4]}, out=tmp_path / "run"
    )
    assert result.predict(both(3)[0]).shape == (40,)


def sequences(seed: int, count: int = 40) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    return [np.array([7 + own, *rng.integers(0, 7, rng.integers(1, 9))]) for own in y], y


def test_sequences_of_different_lengths_come_with_a_mask(tmp_path: Path) -> None:
    scenario = from_arrays({"a": sequences(1), "b": sequences(2)})
    longest = max(len(row) for seed in (1, 2) for row in sequences(seed)[0])
    assert scenario.scenario.input_shape == SampleShape((longest,), 9, padded=True)
    settings = {"model.name": "token_models:Masked", "learning_rate": 1.0, **FEW, "local_steps": 40}
    result = perennial.run("fedavg", scenario, rounds=4, settings=settings, out=tmp_path / "run")
    x, y = sequences(3)
    short = [row[:longest] for row in x]
    assert (result.predict(short) == y).mean() > 0.9
    with pytest.raises(UserError, match=rf"x of sample 0 must be 1 to {longest} whole numbers"):
        result.predict([np.zeros(longest + 1, int)])


def test_what_is_behind_the_end_counts_for_nothing() -> None:
    shape = SampleShape((8,), 9, padded=True)
    own = network(model_settings({"name": "token_models:Masked"}), shape, 2)
    ids = made_up(SampleShape((8,), 9), 3)
    ids[:, 5:] = PAD
    tensors = own.initial(0)
    short = network(model_settings({"name": "token_models:Masked"}), SampleShape((5,), 9, padded=True), 2)
    torch.testing.assert_close(own.predict(tensors, ids), short.predict(tensors, ids[:, :5]))
    embedded = tensors["featurizer.embedding.weight"][ids[:, :5]].mean(dim=1)
    torch.testing.assert_close(own.features(tensors, ids), embedded)


def test_hugging_faces_mask(tmp_path: Path) -> None:
    """A part of a group that is padded, under the name that Hugging Face's models know."""
    text, y = sequences(1)
    scenario = from_arrays({"a": ({"text": text, "age": np.ones((40, 1))}, y)}, vocabulary={"text": 20})
    (_, own), (_, other) = scenario.scenario.input_shape.parts  # type: ignore[attr-defined]
    assert own == SampleShape((9,), 20, padded=True)
    assert other == (1,)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"b": both(2)[0]["table"]}, {}, r"b: x must be a dict of 'image' and 'table' as in a"),
        ({"b": {"image": both(2)[0]["image"]}}, {}, r"b: x must be a dict of 'image' and 'table'"),
        (
            {"b": {"image": both(2)[0]["image"][:, :, :4], "table": both(2)[0]["table"]}},
            {},
            r"b: image has shape 1x4x8, and in a 1x8x8; all must be alike",
        ),
        (
            {"b": {"image": both(2)[0]["image"][:4], "table": both(2)[0]["table"]}},
            {},
            r"b: x has 4 to 40 samples; each part must have as many",
        ),
        ({}, {"vocabulary": {"sound": 3}}, r"vocabulary: 'sound' is no part of a sample; there are image, table"),
        ({"a b": both(2)[0]}, {}, r"'a b' is no name of a site"),
    ],
)
def test_groups_that_do_not_fit(change: Any, options: Any, words: str) -> None:
    clients = {"a": both(1), "b": both(2)} | {name: (x, both(2)[1]) for name, x in change.items()}
    with pytest.raises(UserError, match=words):
        from_arrays(clients, **options)


def test_a_network_that_wants_something_else_is_said() -> None:
    shape = group_of({"image": (1, 8, 8), "table": (3,)})
    words = r"takes image, table, sound, and a sample here has image, table; let forward take these names"
    with pytest.raises(UserError, match=words):
        network(model_settings({"name": "token_models:Three"}), shape, 2)

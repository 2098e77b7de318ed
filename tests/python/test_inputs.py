"""Samples of whole numbers, from an array or a file to a network, and networks that give more than logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import token_models
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import perennial
from perennial import InMemory, UserError, from_arrays
from perennial.client.serving.messages import Refused, samples
from perennial.client.serving.rest import message, parsed
from perennial.common import plugins
from perennial.common.config import load_config
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import read
from perennial.common.models.network import network
from perennial.common.models.own_module import layout
from perennial.common.models.settings import model_settings
from perennial.common.utils.samples import SampleShape, made_up
from perennial.server.cli.main import app
from perennial.server.results.exported import find_model, write_onnx

IDS, LONG = 50, 20
FEW: dict[str, Any] = {"local_steps": 3, "batch_size": 8, "evaluate_every": 2, "checkpoint_every": 2}


def sentences(seed: int, count: int = 40) -> tuple[Any, Any, Any]:
    """Ids of tokens, of which id 7 says the class, and id 9 does so in one of the environments."""
    rng = np.random.default_rng(seed)
    ids, y = rng.integers(10, IDS, (count, LONG)), np.arange(count) // 2 % 2
    ids[:, -3:] = np.where(y, 7, 8)[:, None]
    ids[:, -6:-3] = np.where(y * (np.arange(count) % 2), 9, 0)[:, None]
    return ids, y, np.array(["hot", "cold"])[np.arange(count) % 2]


@pytest.fixture(scope="module")
def scenario() -> InMemory:
    return from_arrays({"north": sentences(1), "east": sentences(2)}, vocabulary=IDS)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, token_models.__file__)


def test_whole_numbers_stay_whole_and_learn(scenario: InMemory, tmp_path: Path) -> None:
    """What the issue began with: an embedding of 50 and samples of 20 integers, without `long()` in `forward`."""
    settings = {"model.name": "token_models:Lstm", "learning_rate": 0.5, **FEW, "local_steps": 20}
    result = perennial.run("fedavg", scenario, rounds=6, settings=settings, out=tmp_path / "run")
    assert scenario.scenario.input_shape == SampleShape((LONG,), IDS)
    data = scenario.scenario.client_data(0, 0, Path(scenario.save(tmp_path / "data")))
    assert data.train.x.dtype == torch.int64
    every = torch.cat([data.train.x, data.validation.x, *(part.x for part in data.test.values())])
    given = sentences(2)[0]
    assert sorted(every.tolist()) == sorted(given.tolist())
    found = result.predict(sentences(5)[0])
    assert (found == sentences(5)[1]).mean() > 0.9
    with pytest.raises(UserError, match=r"x must be whole numbers from 0 to 49, as the run's ids of tokens"):
        result.predict(sentences(5)[0] + 1)


@pytest.mark.parametrize("method", ["fedsdr", "fediir", "perinvfl", "ditto"])
def test_methods_train_a_transformer(method: str, scenario: InMemory, tmp_path: Path) -> None:
    settings = {"model.name": "token_models:Transformer", "model.dropout": 0.1, **FEW}
    result = perennial.run(method, scenario, rounds=2, settings=settings, out=tmp_path / "run")
    before = network(result.config.model, result.config.scenario.input_shape, 2).initial(0)
    name = result.config.method.evaluates[0]
    after = result.model(name, client="east" if name == "personal" else None).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("name", ["Dict", "Object"])
def test_logits_are_taken_by_their_name(name: str) -> None:
    shape = SampleShape((LONG,), IDS)
    own, plain = (
        network(model_settings({"name": f"token_models:{kind}"}), shape, 2) for kind in (name, "Transformer")
    )
    tensors, x = own.initial(3), made_up(shape, 4)
    assert all(torch.equal(tensor, plain.initial(3)[key]) for key, tensor in tensors.items())
    assert torch.equal(own.predict(tensors, x), plain.predict(tensors, x))
    assert torch.equal(own.features(tensors, x), plain.features(tensors, x))
    assert torch.equal(own.module(tensors)(x), plain.predict(tensors, x))


def test_a_network_that_takes_numbers_alone_is_given_numbers(tmp_path: Path) -> None:
    """Arrays of whole numbers train these as they did, to the bit, and so do the named models."""
    for name in ("token_models:Numbers", "mlp"):
        results = []
        for place, kind in enumerate((np.int64, np.float32)):
            data = {
                site: (x.astype(kind), y, e) for site, (x, y, e) in {"a": sentences(1), "b": sentences(2)}.items()
            }
            settings = {"model.name": name, **FEW}
            out = tmp_path / f"{name[:3]}{place}"
            perennial.run("fedavg", from_arrays(data), rounds=2, settings=settings, out=out)
            results.append(load_file(out / "models" / "global.safetensors"))
        assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])
    assert layout(model_settings({"name": "token_models:Numbers"}), SampleShape((LONG,), IDS), 2).as_numbers  # type: ignore[arg-type]


def test_stacks_of_clients_take_ids(scenario: InMemory, tmp_path: Path) -> None:
    models = []
    for engine in ("loop", "stack"):
        settings = {"model.name": "mlp", "cohort_engine": engine, **FEW}
        perennial.run("fedavg", scenario, rounds=2, settings=settings, out=tmp_path / engine)
        models.append(load_file(tmp_path / engine / "models" / "global.safetensors"))
    for key in models[0]:
        torch.testing.assert_close(models[0][key], models[1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Fixed", r"cannot take samples of shape 20 \(ids of tokens below 50\): IndexError: index out of range"),
        ("Nameless", r"gives a dict, and no tensor of logits, nor anything that has one by the name logits"),
    ],
)
def test_a_network_that_does_not_fit_is_said(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        network(model_settings({"name": f"token_models:{name}"}), SampleShape((LONG,), IDS), 2)


def test_what_counts_as_ids() -> None:
    ids, y, _ = sentences(1)
    assert from_arrays({"a": (ids, y)}).scenario.vocabulary == 0  # ages and counts are whole numbers, too
    assert from_arrays({"a": (ids.astype(np.uint8), y)}, vocabulary=IDS).scenario.vocabulary == IDS
    for x, said in ((ids - 20, None), (ids.astype(float), None), (ids.astype(np.uint8), None), (ids, 0)):
        assert from_arrays({"a": (x, y)}, vocabulary=said).scenario.vocabulary == 0
    both = from_arrays({"a": (ids, y), "b": (ids.astype(float), y)})
    assert {part["train"]["x"].dtype for part in both.parts.values()} == {torch.float32}
    for x, said, words in (
        (ids, 30, r"a: x has 49, and vocabulary = 30; ids of tokens are below it"),
        (ids.astype(float), IDS, r"a: x must have whole numbers from 0 to 49, since vocabulary = 50"),
        (ids, -1, r"vocabulary: -1 is not possible"),
    ):
        with pytest.raises(UserError, match=words):
            from_arrays({"a": (x, y)}, vocabulary=said)


def test_own_data_of_ids(tmp_path: Path) -> None:
    ids, y, _ = sentences(1)
    np.savez(tmp_path / "north.npz", x=ids.astype(np.int16), y=y)
    announced = OwnData(sites=("north",), inputs=(LONG,), vocabulary=IDS, labels=("0", "1"))
    train = announced.client_data(0, 0, tmp_path).train
    assert train.x.dtype == torch.int64
    wrong = r"north.npz: x has what is no whole number from 0 to 29, which the server announces"
    with pytest.raises(UserError, match=wrong):
        announced.model_copy(update={"vocabulary": 30}).client_data(0, 0, tmp_path)
    with pytest.raises(UserError, match=r"scenario.vocabulary: .* inputs has names of a table's columns"):
        load_config(options={"method": "fedavg", "scenario": "own-data"}, settings=["scenario.vocabulary=5"])
    assert read(tmp_path / "north.npz").tensor((LONG,)).dtype == torch.float32
    shown = CliRunner().invoke(app, ["describe", str(tmp_path / "north.npz")])
    assert "announce vocabulary = 50" in " ".join(shown.output.split())
    assert "vocabulary" not in shown.stdout


def test_a_plug_in_that_holds_nothing_but_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from token_models import Lstm\n\n\nclass Net(Lstm):\n    pass\n"
    (tmp_path / "only_a_network.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config(
        options={"method": "fedavg", "scenario": "digits-3class", "plugins": ["only_a_network"]},
        settings=["model.name=only_a_network:Net", "model.vocabulary=5"],
    )
    assert config.model.name == "only_a_network:Net"


def test_a_server_takes_ids_as_whole_numbers(scenario: InMemory) -> None:
    x = sentences(3)[0].tolist()

    def sent(values: Any, datatype: str = "INT64") -> torch.Tensor:
        given = {"name": "input", "datatype": datatype, "shape": [len(values), LONG], "data": values}
        request, binary = parsed(json.dumps({"inputs": [given]}).encode(), None)
        return samples(message(request, binary, "perennial", ""), scenario.scenario, 100)

    assert sent(x).dtype == torch.int64
    assert sent(x).tolist() == x
    for values, kind, words in (
        (x, "FP32", "has datatype 'FP32', but the model takes 'INT64'"),
        ([[*x[0][1:], IDS]], "INT64", "has ids of tokens that are not from 0 to 49"),
        ([[*x[0][1:], 0.5]], "INT64", "has data that are no whole numbers, row by row"),
    ):
        with pytest.raises(Refused, match=words):
            sent(values, kind)


def test_the_model_is_exported_with_whole_numbers(scenario: InMemory, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    import onnxruntime

    settings = {"model.name": "token_models:Transformer", **FEW}
    result = perennial.run("fedavg", scenario, rounds=2, settings=settings, out=tmp_path / "run")
    write_onnx(find_model(tmp_path / "run"), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    x = sentences(3)[0]
    (answers,) = session.run(["probabilities"], {"input": x})
    np.testing.assert_allclose(answers, result.predict_proba(x), atol=1e-5)


def test_a_table_of_whole_numbers_is_one_of_numbers(tmp_path: Path) -> None:
    """Of which a new row may have others than those of training."""
    ages = np.random.default_rng(0).integers(0, 90, (80, 3))
    scenario = from_arrays({"a": (ages, (ages[:, 0] > 45).astype(int))})
    result = perennial.run("fedavg", scenario, rounds=1, out=tmp_path / "run")
    assert np.array_equal(result.predict([[120, 3, 4]]), result.predict([[120.0, 3.0, 4.0]]))

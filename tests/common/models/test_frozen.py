"""Only what is trained travels; LoRA on chosen linear layers."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import token_models
import torch
import user_models
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from perennial.client.host import Host
from perennial.common import plugins
from perennial.common.config import RunConfig, load_config
from perennial.common.models.architectures import model_for
from perennial.common.models.lora import merge
from perennial.common.models.network import Network, network
from perennial.common.models.settings import is_adapter, model_settings
from perennial.common.utils.errors import RunStopped, UserError
from perennial.common.utils.samples import SampleShape, made_up
from perennial.server.local import LocalRuntime
from perennial.server.results.exported import find_model, write_torch
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.tiny_federation import WireGrid, toy_config

SHAPE = SampleShape((6,), 11)
TRANSFORMER = {"name": "token_models:Transformer"}
LORA = {"rank": 2, "layers": "query|value", "alpha": 6.0}
SETTINGS = ("model.name=user_models:Plain", "model.lora={rank = 2, alpha = 4}")


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, f"{user_models.__file__}:{token_models.__file__}")


def net(**fields: Any) -> Network:
    return network(model_settings({**TRANSFORMER, **fields}), SHAPE, 3)


def run(config: RunConfig, path: Path) -> RunFolder:
    folder = RunFolder.create(path, config)
    LocalRuntime(config).run(folder)
    return folder


# ---------------------------------------------------------------------- adapters


def test_lora_is_the_sum_of_two_products_of_which_the_second_begins_at_0() -> None:
    own, plain = net(lora=LORA), net()
    begun, whole = own.initial(0), plain.initial(0)
    layers = {f"featurizer.{name}.{part}" for name in ("query", "value") for part in ("lora_a", "lora_b")}
    assert {*own.adapter_names} == layers
    assert {*own.parameter_names} == layers | {"classifier.weight", "classifier.bias"} == begun.keys()
    assert own.whole(begun).keys() - begun.keys() == {n for n in whole if n.startswith("featurizer.")}
    x = made_up(SHAPE, 5)
    base = {**whole, **own.frozen, **{name: begun[name] for name in begun if name in whole}}
    torch.testing.assert_close(own.predict(begun, x), plain.predict(base, x), rtol=0, atol=0)
    trained = {name: torch.randn_like(tensor) for name, tensor in begun.items()}
    for name in ("featurizer.query", "featurizer.value"):
        base[f"{name}.weight"] = base[f"{name}.weight"] + 3 * trained[f"{name}.lora_b"] @ trained[f"{name}.lora_a"]
    base |= {name: trained[name] for name in ("classifier.weight", "classifier.bias")}
    torch.testing.assert_close(own.predict(trained, x), plain.predict(base, x))
    module = own.module(trained)
    torch.testing.assert_close(module(x), plain.predict(base, x))
    assert module.state_dict().keys() == whole.keys()


def test_lora_equals_pefts() -> None:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        ours = model_for(model_settings({**TRANSFORMER, "lora": LORA}), SHAPE, 3)
        torch.manual_seed(4)
        plain = model_for(model_settings(TRANSFORMER), SHAPE, 3)
    layers = ["featurizer.query", "featurizer.value"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=layers, modules_to_save=["classifier"])
    theirs = peft.get_peft_model(copy.deepcopy(plain), config)
    for name in layers:
        mine = ours.get_submodule(name)
        other = theirs.base_model.model.get_submodule(name)
        bound = 1 / math.sqrt(mine.in_features)  # what kaiming_uniform_ with a = √5 comes to
        for a, b in ((mine.lora_a, mine.lora_b), (other.lora_A.default.weight, other.lora_B.default.weight)):
            assert 0.5 * bound < a.abs().max() <= bound
            assert not b.any()
        nn.init.normal_(mine.lora_b)
        with torch.no_grad():
            other.lora_A.default.weight.copy_(mine.lora_a)
            other.lora_B.default.weight.copy_(mine.lora_b)
    x, y = made_up(SHAPE, 8), torch.arange(8) % 3
    torch.testing.assert_close(ours(x), theirs(x))
    for model in (ours, theirs):
        cross_entropy(model(x), y).backward()
    for name in layers:
        mine, other = ours.get_submodule(name), theirs.base_model.model.get_submodule(name)
        torch.testing.assert_close(mine.lora_a.grad, other.lora_A.default.weight.grad)
        torch.testing.assert_close(mine.lora_b.grad, other.lora_B.default.weight.grad)
    count = sum(tensor.numel() for tensor in ours.parameters() if tensor.requires_grad)
    assert count == sum(tensor.numel() for tensor in theirs.parameters() if tensor.requires_grad)
    merge(ours)
    torch.testing.assert_close(ours(x), theirs.merge_and_unload()(x))


@pytest.mark.parametrize("method", ["fedavg", "fediir", "ditto", "fedrep", "apfl", "fedsgd"])
def test_methods_train_the_matrices_alone(method: str, tmp_path: Path) -> None:
    config = toy_config(method, *SETTINGS, rounds=2)
    folder = run(config, tmp_path / "run")
    own = network(config.model, (2,), 2)
    start_, trained = own.initial(0), load_file(folder.path / "models" / "global.safetensors")
    assert trained.keys() <= start_.keys()
    assert any(not torch.equal(trained[name], start_[name]) for name in own.adapter_names)
    for state in folder.clients.rglob("*.safetensors"):
        assert not [name for name in load_file(state) if name.partition("/")[2] in own.frozen_names]
    personal = "personal" in config.method.evaluates
    found = find_model(folder.path, client="client-0" if personal else None)
    write_torch(found, tmp_path / "model.safetensors")
    whole = load_file(tmp_path / "model.safetensors")
    assert not [name for name in whole if is_adapter(name)]
    module = user_models.Plain(2)
    x = torch.randn(5, 2)
    names = {name: name.replace("out.", "classifier.") for name in module.state_dict()}
    module.load_state_dict({n: whole[k if k in whole else f"featurizer.{n}"] for n, k in names.items()})
    torch.testing.assert_close(module.eval()(x), found.module(x))


def test_bytes_on_the_wire_are_those_of_what_is_trained(tmp_path: Path) -> None:
    def traffic(name: str, *settings: str) -> tuple[int, int]:
        folder = run(toy_config("fedavg", *settings, rounds=1), tmp_path / name)
        row = next(row for row in folder.rows() if row["kind"] == "round")
        return row["bytes_down"], row["bytes_up"]

    before, after = traffic("whole", SETTINGS[0]), traffic("lora", *SETTINGS)
    own = network(toy_config("fedavg", *SETTINGS).model, (2,), 2)
    clients = 4
    assert after == (clients * own.travelling_bytes, clients * own.travelling_bytes)
    assert own.travelling_bytes == 4 * (2 * 2 + 6 * 2 + 6 * 2 + 2)
    assert after < before


def test_fedrep_may_keep_the_matrices(tmp_path: Path) -> None:
    config = toy_config("fedrep", *SETTINGS, "personal=adapters", rounds=2)
    folder = run(config, tmp_path / "run")
    shared = load_file(folder.path / "models" / "global.safetensors")
    assert shared.keys() == {"classifier.weight", "classifier.bias"}
    kept = [load_file(file) for file in folder.clients.rglob("*.safetensors")]
    assert all({*own} == {"head/featurizer.inner.lora_a", "head/featurizer.inner.lora_b"} for own in kept)
    with pytest.raises(UserError, match=r"method.personal: 'adapters' is for a model with LoRA"):
        run(toy_config("fedrep", SETTINGS[0], "personal=adapters"), tmp_path / "other")


# ---------------------------------------------------------------------- frozen weights


def test_another_frozen_part_at_a_site_is_refused_at_enrolment(tmp_path: Path, monkeypatch: Any) -> None:
    """As if the module's code at one site made other weights."""
    config = toy_config("fedavg", *SETTINGS, rounds=2)
    folder, origin = RunFolder.create(tmp_path / "run", config), start(config)
    load = Host._load

    def other(self: Host, task: Any, number: int) -> Any:
        site = load(self, task, number)
        if number == 1:
            changed = Network(task.model, (2,), 2, "cpu")
            changed.frozen["featurizer.inner.weight"].add_(1)
            object.__setattr__(site, "network", changed)
        return site

    monkeypatch.setattr(Host, "_load", other)
    run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), origin)
    row = next(row for row in folder.rows() if row["kind"] == "round")
    assert [*row["left_out"]] == ["client-1"]
    own = network(config.model, (2,), 2).frozen_digest
    said = row["left_out"]["client-1"]
    assert "its model has other frozen weights than the run's (SHA-256 " in said
    assert f"and the run has {own[:12]})" in said


def test_a_run_stops_where_all_sites_have_others(tmp_path: Path, monkeypatch: Any) -> None:
    config = toy_config("fedavg", *SETTINGS, "wait=1", rounds=1)
    folder, origin = RunFolder.create(tmp_path / "run", config), start(config)
    monkeypatch.setattr("perennial.client.host.FROZEN", "forgotten")  # as a site of an older version answers
    with pytest.raises(RunStopped, match=r"SHA-256 of none"):
        run_rounds(config, folder, WireGrid(config, tmp_path / "sites"), origin)


def test_a_model_that_brings_its_frozen_part_is_run_with_it() -> None:
    """Such as one that an older version has saved."""
    own = net(lora=LORA)
    begun, x = own.initial(0), made_up(SHAPE, 3)
    other = {name: tensor + 1 for name, tensor in own.frozen.items()}
    assert not torch.equal(own.predict({**begun, **other}, x), own.predict(begun, x))
    assert own.frozen_digest == Network(own.settings, SHAPE, 3, "cpu").frozen_digest


def test_weights_are_under_the_matrices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = user_models.Plain(2)
    torch.save(module.state_dict(), tmp_path / "own.pt")
    config = toy_config("fedavg", *SETTINGS, f"model.weights={tmp_path / 'own.pt'}")
    own, x = network(config.model, (2,), 2), torch.randn(4, 2)
    torch.testing.assert_close(own.predict(own.initial(3), x), module.eval()(x))
    assert torch.equal(own.frozen["featurizer.inner.weight"], module.inner.weight)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "model.lora={layers = 'attn'}",
            r"no linear layer of the featurizer has 'attn' .*; there are: inner",
        ),
        ("model.lora={layers = '('}", r"model.lora.layers: '\(' is not possible.*no regular expression"),
        ("model.lora={rank = 0}", r"model.lora.rank: 0 is not possible"),
        ("model.lora={ranc = 1}", r"model.lora.ranc"),
    ],
)
def test_lora_that_does_not_fit(setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        network(toy_config("fedavg", SETTINGS[0], setting).model, (2,), 2)


def test_lora_freezes_the_featurizer_anyway() -> None:
    with pytest.raises(UserError, match=r"with lora the featurizer is frozen anyway"):
        toy_config("fedavg", *SETTINGS, "model.freeze=featurizer")


def test_python_takes_a_table(tmp_path: Path) -> None:
    from perennial.server.runs import as_texts

    (text,) = as_texts({"model.lora": {"rank": 2, "layers": "attn"}})
    config = load_config(options={"method": "fedavg", "scenario": "digits-3class"}, settings=[
        "model.name=user_models:Plain", text,
    ])  # fmt: skip
    assert config.model.lora.layers == "attn"  # type: ignore[attr-defined]
    assert load_config(options=config.model_dump(mode="json")) == config


def test_kept_tensors() -> None:
    own = net(lora=LORA)
    assert isinstance(own.frozen["featurizer.embedding.weight"], Tensor)
    assert own.travelling_bytes == 4 * sum(tensor.numel() for tensor in own.initial(0).values())

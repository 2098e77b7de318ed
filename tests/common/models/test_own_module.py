"""Modules of somebody else's as models, and weights that models start from."""

import json
import os
import pickle
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
import torchvision
import user_models
from safetensors.torch import load_file, save_file
from tiny_runs import toy_site
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchvision.models import get_model
from typer.testing import CliRunner

from perennial.client.host import Host, client_half
from perennial.client.trainer import Received, Site
from perennial.common import plugins
from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.pacs import PacsPairs
from perennial.common.models import weights
from perennial.common.models.memory import model_bytes
from perennial.common.models.network import Network, network
from perennial.common.models.own_module import layout
from perennial.common.models.settings import Module, Pretrained, model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.seeding import derive
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.tiny_federation import Toy, WireGrid, toy_config

SMALL = "torchvision:shufflenet_v2_x0_5"
PICTURE = (3, 32, 32)


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, user_models.__file__)


def net(name: str, shape: tuple[int, ...] = (2,), classes: int = 2, **fields: Any) -> Network:
    return network(model_settings({"name": name, **fields}), shape, classes)


def samples(shape: tuple[int, ...] = (2,), count: int = 4) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def run(config: RunConfig, path: Path) -> dict[str, Tensors]:
    """A run, and its models."""
    LocalRuntime(config).run(RunFolder.create(path, config))
    return {file.stem: load_file(file) for file in (path / "models").iterdir()}


# ---------------------------------------------------------------------- taken apart


@pytest.mark.parametrize(
    ("name", "fields", "classifier", "apart", "head", "width"),
    [
        ("Plain", {}, "out", False, {"weight", "bias"}, 6),
        ("Plain", {"width": 9}, "out", False, {"weight", "bias"}, 9),
        ("Named", {}, "classifier", True, {"0.weight", "0.bias", "2.weight", "2.bias"}, 5),
        ("Named", {"classifier": "classifier.2"}, "classifier.2", False, {"weight", "bias"}, 4),
        ("Between", {}, "classifier", False, {"0.weight", "0.bias", "2.weight", "2.bias"}, 5),
        ("Tied", {}, "out", False, {"weight", "bias"}, 2),
        ("sequence", {}, "2", False, {"2.weight", "2.bias"}, 4),
        ("sequence", {"hidden": [7]}, "2", False, {"2.weight", "2.bias"}, 7),
    ],
)
def test_a_module_is_its_featurizer_and_its_classifier(
    name: str, fields: dict[str, Any], classifier: str, apart: bool, head: set[str], width: int
) -> None:
    own = net(f"user_models:{name}", **fields)
    found = layout(own.settings, (2,), 2)  # type: ignore[arg-type]
    assert (found.classifier, found.apart) == (classifier, apart)
    assert {key.removeprefix("classifier.") for key in own.classifier_names} == head
    assert own.width == width
    assert own.featurizer_names + own.classifier_names == own.parameter_names
    arguments = {key: value for key, value in fields.items() if key != "classifier"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(5, "init"))
        module = getattr(user_models, name)(2, **arguments)
        if name == "Tied":
            module(samples())
    tensors, x = own.initial(5), samples()
    for training in (False, True):
        torch.testing.assert_close(own.predict(tensors, x, training), module.train(training)(x), rtol=0, atol=0)
    z = own.features(tensors, x)
    torch.testing.assert_close(own.classify(tensors, z), own.predict(tensors, x), rtol=0, atol=0)
    if apart:  # what a run saves is the module's own state dict
        module.load_state_dict(tensors)


def test_tied_weights_are_trained_as_pytorch_trains_them() -> None:
    own, x, y = net("user_models:Tied"), samples(), torch.tensor([0, 1, 1, 0])
    assert "featurizer.again.weight" not in own.initial(0)
    start = own.initial(0)
    leaves = {name: start[name].requires_grad_() for name in own.parameter_names}
    gradients = torch.autograd.grad(cross_entropy(own.predict(leaves, x), y), list(leaves.values()))
    module = user_models.Tied(2)
    module(x)
    plain = {name.removeprefix("featurizer.").replace("classifier", "out"): t for name, t in start.items()}
    module.load_state_dict({**plain, "again.weight": plain["first.weight"]})
    cross_entropy(module(x), y).backward()
    theirs = dict(module.named_parameters())
    for name, gradient in zip(plain, gradients, strict=True):
        torch.testing.assert_close(gradient, theirs[name].grad)


def test_a_parameter_that_the_module_has_frozen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Half(Plain):\n    def __init__(self, classes: int):\n        super().__init__(classes)\n"
    text = f"from user_models import Plain\n\n\n{text}        self.inner.weight.requires_grad_(False)\n"
    (tmp_path / "half_frozen.py").write_text(text)
    monkeypatch.chdir(tmp_path)  # a file beside one's work
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    config = toy_config("fedavg", "model.name=half_frozen:Half", rounds=2)
    assert os.environ[plugins.VARIABLE] == str(tmp_path / "half_frozen.py")
    model = run(config, tmp_path / "run")["global"]
    own = network(config.model, (2,), 2)
    before = own.initial(0)
    # The bias before a normalisation has no gradient but rounding, which some processors do not leave.
    assert {name for name in model if torch.equal(model[name], before[name])} <= {"featurizer.inner.bias"}
    assert {*own.frozen} == {"featurizer.inner.weight"}
    assert model.keys() == before.keys()
    assert not model.keys() & own.frozen.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "googlenet", "mobilenet_v3_small"])
def test_a_classifier_of_torchvision_is_torchvisions_with_our_classes(name: str) -> None:
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    own = net(f"torchvision:{name}", PICTURE, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(2, "init"))
        module = get_model(name, num_classes=3, **options).eval()
    x = samples(PICTURE, 2)
    torch.testing.assert_close(own.predict(own.initial(2), x), module(x), rtol=1e-5, atol=1e-6)
    head = sum(own.initial(2)[key].numel() for key in own.classifier_names)
    assert head == 3 * own.width + 3
    assert own.draws == (name != "shufflenet_v2_x0_5")
    bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in own.initial(2).values())
    assert model_bytes(own.settings, PICTURE, 3) == bytes_


# ---------------------------------------------------------------------- its own draws


DROPOUT = ("model.name=user_models:Plain", "model.dropout=0.5")


def test_dropout_is_keyed_by_seed_client_round_and_action() -> None:
    own, x = net("user_models:Plain", dropout=0.5), samples(count=50)
    tensors = own.initial(0)

    def drawn(*key: Any) -> Tensor:
        with own.drawing(*key):
            return own.predict({name: t.clone() for name, t in tensors.items()}, x, training=True)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = drawn(0, "client-0", 1, "train")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, drawn(0, "client-0", 1, "train"))
    for key in ((1, "client-0", 1, "train"), (0, "client-1", 1, "train"), (0, "client-0", 2, "train")):
        assert not torch.equal(first, drawn(*key))
    assert own.draws
    assert not net("user_models:Plain").draws


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsdr", "per-fedavg"])
def test_the_wire_and_new_processes_change_nothing(method: str, tmp_path: Path) -> None:
    config = toy_config(method, *DROPOUT, rounds=3, participation=0.75)
    model = run(config, tmp_path / "local")
    torch.manual_seed(99)
    torch.rand(7)
    folder, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    run_rounds(config, folder, grid, start(config))
    for name, tensors in model.items():
        other = load_file(folder.path / "models" / f"{name}.safetensors")
        assert all(torch.equal(tensors[key], other[key]) for key in tensors)
    assert RunFolder(tmp_path / "local").rows() == folder.rows()
    assert model["global"].keys() if "global" in model else model


def test_a_round_of_a_client_is_that_of_plain_pytorch() -> None:
    """Mini-batches, dropout and BatchNorm included."""
    config = toy_config("fedavg", *DROPOUT, "local_steps=4", "batch_size=10", "learning_rate=0.1", "momentum=0.9")
    task, toy = parse_task(config.task()), toy_site(1)
    own = network(config.model, (2,), 2)
    site = Site(toy.client, toy.data, own, 0)
    with site.drawing(3, "train"):
        reply = client_half(task, site, {}).answer("train", Received(3, {MODEL: own.initial(0)}))
    module = user_models.Plain(2, dropout=0.5)
    names = {key.replace("featurizer.", "").replace("classifier", "out"): key for key in own.initial(0)}
    module.load_state_dict({name: own.initial(0)[key] for name, key in names.items()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(derive(0, toy.client, 3, "batches")))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(0, "draws", toy.client, 3, "train"))
        for index in order.split(10):
            optimizer.zero_grad()
            cross_entropy(module(toy.data.train.x[index]), toy.data.train.y[index]).backward()
            optimizer.step()
    for name, key in names.items():
        torch.testing.assert_close(reply.arrays[MODEL][key], module.state_dict()[name], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- weights


def saved(path: Path, classes: int = 5, seed: int = 8) -> dict[str, Tensor]:
    """Weights of `SMALL` in a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tensors: dict[str, Tensor] = get_model(SMALL.partition(":")[2], num_classes=classes).state_dict()
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return tensors


def pacs(*settings: str, **options: Any) -> RunConfig:
    base = {"method": "fedavg", "scenario": "pacs", **options}
    return load_config(options=base, settings=["scenario.side=32", *settings])


def initial(config: RunConfig, *key: str) -> Tensors:
    return network(config.model, config.scenario.input_shape, config.scenario.classes).initial(0, *key)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_weights_are_taken_and_the_head_is_drawn_for_the_classes(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{ending}"
    tensors = saved(file)
    config = pacs(f"model.name={SMALL}", f"model.weights={file}")
    assert isinstance(config.model, Module)
    assert tomllib.loads(config.toml())["model"]["digest"] == config.model.digest != ""
    again = load_config(options=config.model_dump(mode="json"))
    assert again == config
    begun, plain = initial(config), initial(pacs(f"model.name={SMALL}"))
    body = {name for name in begun if name.startswith("featurizer.")}
    assert {name.removeprefix("featurizer.") for name in body} == {n for n in tensors if not n.startswith("fc.")}
    assert all(torch.equal(begun[name], tensors[name.removeprefix("featurizer.")]) for name in body)
    assert all(torch.equal(begun[name], plain[name]) for name in begun.keys() - body)
    # With as many classes as here the head is taken, too, but not for the draws of a method's own models.
    saved(file, classes=7, seed=9)
    other = pacs(f"model.name={SMALL}", f"model.weights={file}")
    assert torch.equal(initial(other)["classifier.weight"], load_any(file)["fc.weight"])
    assert not torch.equal(initial(other, "client-1")["classifier.weight"], load_any(file)["fc.weight"])
    assert torch.equal(initial(other, "client-1")["featurizer.conv1.0.weight"], load_any(file)["conv1.0.weight"])


def load_any(file: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    return found


@pytest.mark.slow
def test_resnet18_takes_torchvisions_weights_and_its_own_runs(tmp_path: Path) -> None:
    tensors = get_model("resnet18").state_dict()
    torch.save({k: t for k, t in tensors.items() if "num_batches" not in k}, tmp_path / "old.pt")
    config = pacs(f"model.weights={tmp_path / 'old.pt'}", "model.head_hidden=4", "model.freeze=featurizer")
    own = network(config.model, config.scenario.input_shape, 7)
    begun = own.whole(initial(config))
    assert torch.equal(begun["featurizer.layer4.1.bn2.weight"], tensors["layer4.1.bn2.weight"])
    assert begun["classifier.0.weight"].shape == (4, 512)
    assert own.parameter_names == own.classifier_names
    assert own.featurizer_names == ()
    assert set(own.frozen_names) == {name for name in begun if name.startswith("featurizer.")}
    save_file(begun, tmp_path / "global.safetensors")  # as a run saves it
    again = initial(pacs(f"model.weights={tmp_path / 'global.safetensors'}", "model.head_hidden=4"))
    assert all(torch.equal(again[name], begun[name]) for name in begun)


def test_weights_by_torchvisions_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where torchvision keeps its downloads; without a network, a sentence."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights._downloaded.cache_clear()
    entry = torchvision.models.get_model_weights("shufflenet_v2_x0_5").IMAGENET1K_V1

    def no_network(*_: Any, **__: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    config = pacs(f"model.name={SMALL}", "model.weights=IMAGENET1K_V1")
    with pytest.raises(
        UserError, match=r"IMAGENET1K_V1 of torchvision's .* cannot be downloaded .*no network"
    ) as e:
        initial(config)
    assert entry.url in str(e.value)
    place = tmp_path / "hub" / "checkpoints" / Path(entry.url).name
    place.parent.mkdir(parents=True, exist_ok=True)
    tensors = saved(place, classes=1000)
    assert torch.equal(initial(config)["featurizer.conv5.0.weight"], tensors["conv5.0.weight"])
    assert isinstance(config.model, Pretrained)
    assert config.model.digest == ""
    assert config.model.factor == ()  # the scenario's pictures are as these weights want them
    with pytest.raises(UserError, match=r"model.weights: unknown weights 'IMAGENET1K_V9'"):
        pacs(f"model.name={SMALL}", "model.weights=IMAGENET1K_V9")
    weights._downloaded.cache_clear()


def test_so_do_described_pictures_of_one_s_own() -> None:
    """Which their own mean and deviation have standardised before."""
    own = {"name": "own-data", "inputs": [3, 8, 8], "mean": [0.5, 0.4, 0.3], "scale": [0.2, 0.2, 0.25]}
    names = {"sites": ["a", "b"], "labels": ["x", "y"]}
    settings = [f"model.name={SMALL}", "model.mean=[0.4, 0.5, 0.6]", "model.std=[0.5, 0.25, 0.5]"]
    config = load_config(options={"method": "fedavg", "scenario": own | names}, settings=settings)
    assert isinstance(config.model, Pretrained)
    factor, offset, mean, std = (
        torch.tensor(own)[:, None, None]
        for own in (config.model.factor, config.model.offset, config.model.mean, config.model.std)
    )
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(config.scenario.prepare(pixels) * factor + offset, (pixels - mean) / std)


def test_pictures_come_in_the_units_of_the_weights() -> None:
    config = pacs("model.mean=[0.5, 0.5, 0.5]", "model.std=[0.5, 0.25, 0.5]")
    plain = pacs()
    ours, theirs = (network(c.model, c.scenario.input_shape, 7) for c in (config, plain))
    pixels = torch.rand(2, *PICTURE, generator=torch.Generator().manual_seed(0))
    scenario = config.scenario
    assert isinstance(scenario, PacsPairs)
    given_x = (pixels - torch.tensor(scenario.standardised[0])[:, None, None]) / torch.tensor(
        scenario.standardised[1]
    )[:, None, None]
    wanted = (pixels - 0.5) / torch.tensor([0.5, 0.25, 0.5])[:, None, None]
    tensors = theirs.initial(0)
    for call in ("predict", "features"):
        found = getattr(ours, call)(tensors, given_x)
        torch.testing.assert_close(found, getattr(theirs, call)(tensors, wanted), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"model.mean: 1 channels are not possible with scenario 'pacs'"):
        pacs("model.mean=[0.5]", "model.std=[0.5]")
    with pytest.raises(UserError, match=r"mean has 3 channels and std has 1"):
        pacs("model.mean=[0.5, 0.5, 0.5]", "model.std=[0.5]")


# ---------------------------------------------------------------------- what stays as it is


def own_weights(tmp_path: Path, name: str = "Plain") -> str:
    file = tmp_path / "own.pt"
    torch.save(getattr(user_models, name)(2).state_dict(), file)
    return f"model.weights={file}"


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "ditto", "fediir", "fedbn"])
def test_a_frozen_featurizer_stays_to_the_bit(method: str, tmp_path: Path) -> None:
    config = toy_config(method, "model.name=user_models:Plain", "model.freeze=featurizer", own_weights(tmp_path))
    models = run(config, tmp_path / "run")
    before = network(config.model, (2,), 2).initial(0)
    for model in models.values():
        changed = {name for name in model if not torch.equal(model[name], before[name])}
        assert changed == {"classifier.weight", "classifier.bias"}


def test_frozen_noise_and_a_method_that_needs_a_featurizer(tmp_path: Path) -> None:
    settings = ["model.name=user_models:Plain", "model.freeze=featurizer"]
    config = toy_config("fedavg", *settings, "privacy.mechanism=fixed", rounds=2)
    model, before = run(config, tmp_path / "run")["global"], network(config.model, (2,), 2).initial(0)
    changed = {name for name in model if not torch.equal(model[name], before[name])}
    assert changed == {"classifier.weight", "classifier.bias"} == model.keys()
    with pytest.raises(UserError, match=r"'user_models:Plain' has no featurizer to be trained"):
        run(toy_config("fedrep", *settings), tmp_path / "fedrep")
    moving = toy_config("fedavg", settings[0], "privacy.mechanism=fixed", rounds=2)
    with pytest.raises(UserError, match=r"privacy.mechanism: 'fixed' is not possible with BatchNorm"):
        run(moving, tmp_path / "moving")


@pytest.mark.parametrize(
    ("settings", "stays"),
    [([], True), (["model.frozen_statistics=false"], False), (["model.frozen_statistics=true"], True)],
)
def test_with_weights_batch_norms_statistics_stay(settings: list[str], stays: bool, tmp_path: Path) -> None:
    config = toy_config("fedavg", "model.name=user_models:Plain", own_weights(tmp_path), *settings, rounds=2)
    model, before = run(config, tmp_path / "run")["global"], network(config.model, (2,), 2).initial(0)
    statistics = {
        "featurizer.norm.running_mean",
        "featurizer.norm.running_var",
        "featurizer.norm.num_batches_tracked",
    }
    same = {name for name in model if torch.equal(model[name], before[name])}
    assert same & statistics == (statistics if stays else set())
    assert "featurizer.norm.weight" not in same


def test_frozen_statistics_are_fediirs_own() -> None:
    """The model's setting, and FedIIR's of the same name, on a network that draws nothing."""
    by_model = toy_config("fediir", "model.norm=batch", rounds=2).model
    assert not isinstance(by_model, Pretrained)
    own = net("user_models:Plain", frozen_statistics=True)
    tensors, x = own.initial(0), samples(count=20)
    assert torch.equal(own.predict(tensors, x, training=True), own.predict(tensors, x))


# ---------------------------------------------------------------------- at sites


def test_a_site_needs_the_file_of_weights_only_where_a_method_starts_models_there(tmp_path: Path) -> None:
    file = own_weights(tmp_path)
    for method, needs in (("fedavg", False), ("fedsr", False), ("fedrep", True)):
        weights._read.cache_clear()
        config = toy_config(method, "model.name=user_models:Plain", file, "checkpoint_every=1", rounds=1)
        folder, grid = RunFolder.create(tmp_path / method, config), WireGrid(config, tmp_path / f"{method}-sites")
        origin = start(config)
        moved = Path(config.model.weights).rename(tmp_path / "away")  # type: ignore[attr-defined]
        weights._read.cache_clear()
        try:
            if needs:
                with pytest.raises(UserError, match=r"model\.weights: .*own\.pt cannot be read here"):
                    run_rounds(config, folder, grid, origin)
            else:
                assert run_rounds(config, folder, grid, origin)
        finally:
            moved.rename(tmp_path / "own.pt")
    weights._read.cache_clear()


def test_another_file_at_the_site_is_refused_and_so_is_one_that_no_run_has_noted(tmp_path: Path) -> None:
    config = toy_config("fedavg", "model.name=user_models:Plain", own_weights(tmp_path))
    torch.save(user_models.Plain(2).state_dict(), tmp_path / "own.pt")
    weights._read.cache_clear()
    other = r"own.pt is another file than that of the run \(SHA-256 [0-9a-f]{12}"
    with pytest.raises(UserError, match=other) as another:
        start(config)
    (tmp_path / "own.pt").unlink()
    weights._read.cache_clear()
    with pytest.raises(UserError, match="cannot be read here") as none:
        start(config)
    assert another.value.told == none.value.told, "a server could find out what files a site has"
    assert "SHA" not in none.value.told
    torch.save(user_models.Plain(2).state_dict(), tmp_path / "own.pt")
    unnoted = config.model.model_copy(update={"digest": ""})
    with pytest.raises(UserError, match=r"the run has none"):
        network(unnoted, (2,), 2).initial(0)


@pytest.mark.parametrize("name", ["antigravity:fly", "test.autotest:main", "pip.__main__:main"])
def test_what_starts_something_when_it_is_imported_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile server may name any module that is installed at a site."""
    for module in ("antigravity", "test.autotest", "pip.__main__"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(UserError, match=r"is a part of Python or a program"):
        net(name)
    assert name.partition(":")[0] not in sys.modules


def test_a_site_without_the_module_says_so(tmp_path: Path) -> None:
    config = toy_config("fedavg", "model.name=user_models:Plain")
    text = config.task().replace("user_models", "not_installed_here")
    with pytest.raises(UserError, match=r"model.name: there is no module 'not_installed_here' here that may be"):
        Host({}).site(text, parse_task(text), 0)


def test_of_what_is_installed_at_a_site_a_server_can_run_nothing_that_its_owner_does_not_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This function of PyTorch's says that it returns a module, and runs its arguments as code."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.delitem(sys.modules, "torchvision.io.video", raising=False)
    code = {"import_block": f"import os; os.mkdir({str(tmp_path / 'broken-into')!r})", "body": {"_code": "x = 1"}}
    for name, fields in {
        "torch.fx.graph_module:reduce_graph_module": code,
        "torchvision.io.video:read": {},
    }.items():
        task = json.loads(toy_config("fedavg").task())
        text = json.dumps({**task, "model": {"name": name, **fields}})
        with pytest.raises(UserError, match=rf"there is no module '{name.partition(':')[0]}' here that may be"):
            Host({}).site(text, parse_task(text), 0)
    assert not (tmp_path / "broken-into").exists()
    assert "torchvision.io.video" not in sys.modules


def test_who_names_an_installed_module_at_their_own_machine_trusts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    config = toy_config("fedavg", "model.name=user_models:Plain")
    assert os.environ[plugins.VARIABLE] == user_models.__file__
    assert network(config.model, (2,), 2).width == 6


# ---------------------------------------------------------------------- wrong inputs


class Evil:
    """What a pickle can do to whoever loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("broken-into",)


OWN = "model.name=user_models:"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.name=no_such_package:Net"], ["model.name: there is no module 'no_such_package'"]),
        (["model.name=broken_module:Net"], ["'broken_module' cannot be imported: ZeroDivisionError", "line 1)"]),
        ([OWN + "Plane"], ["'user_models' has no 'Plane'; did you mean 'Plain'?"]),
        (
            ["model.name=user_models:Pl ain"],
            ["model.name: 'user_models:Pl ain' is not possible; write MODULE:NAME"],
        ),
        (["model.name=os:system"], ["model.name: 'os' is a part of Python or a program"]),
        (["model.name=numpy:ndarray"], ["numpy:ndarray is no class of torch.nn.Module"]),
        (["model.name=torch.hub:load"], ["torch.hub:load does not say that it makes a module"]),
        ([OWN + "unsaid"], ["does not say that it makes a module; write `def unsaid(…) -> torch.nn.Module`"]),
        ([OWN + "made"], ["is a module that is made already; name its class"]),
        ([OWN + "no_module"], ["makes a str, and no torch.nn.Module"]),
        ([OWN + "Raises"], ["cannot be made: RuntimeError: the moon is not full", "user_models.py, line"]),
        (
            [OWN + "Plain", "model.widht=3"],
            ["model.widht: user_models:Plain has no such argument; did you mean 'width'"],
        ),
        ([OWN + "Plain", "model.width=-1"], ["user_models:Plain' cannot be made: RuntimeError"]),
        ([OWN + "Two"], ["takes 2 inputs (x, mask), and a sample here is one tensor"]),
        ([OWN + "Pair"], ["gives a tuple, and no tensor of logits"]),
        (
            [OWN + "Squeezed"],
            ["gives 2 for 1 sample; it must be 1x2, such as with flatten(1) in place of"],
        ),
        ([OWN + "InPlace"], ["changes its input in place; let it make a new tensor, such as x = x - 0.5 for"]),
        ([OWN + "Many"], ["gives 3 logits, and there are 2 classes"]),
        ([OWN + "Headless"], ["has no classifier: no attribute `classifier`, and no linear layer"]),
        ([OWN + "After"], ["does something after its classifier 'out'"]),
        ([OWN + "Across"], ["classifier 'out' has a weight that is also 'inner.weight' of the featurizer"]),
        (
            [OWN + "Plain", "model.classifier=ut"],
            ["model.classifier: user_models:Plain has no 'ut'; did you mean 'out'"],
        ),
        ([OWN + "Named", "model.classifier=classifier.1"], ["'classifier.1' of user_models:Named has no weights"]),
        (
            ["model.name=torchvision:resnet51"],
            ["unknown classifier of torchvision 'resnet51'; did you mean 'resnet"],
        ),
        ([OWN + "Plain", "model.weights=IMAGENET1K_V1"], ["'IMAGENET1K_V1' is torchvision's, and model"]),
        ([OWN + "Plain", "model.weights=no.pt"], ["no.pt cannot be read here (No such file or directory)"]),
        ([OWN + "Plain", "model.weights=w.h5"], ["'w.h5' is no file that ends in .pt, .pth, .bin, .safetensors"]),
        (
            [OWN + "Plain", "model.weights=evil.pt"],
            ["evil.pt is no file of tensors alone; Python objects in it could run code"],
        ),
        ([OWN + "Plain", "model.weights=older.pt"], ["older.pt is no file of tensors alone"]),
        ([OWN + "Plain", "model.weights=text.pt"], ["text.pt is no file of tensors alone"]),
        (
            [OWN + "Plain", "model.weights=stack.pt"],
            ["stack.pt cannot be read as .pt (IndexError: pop"],
        ),
        ([OWN + "Plain", "model.weights=text.safetensors"], ["text.safetensors cannot be read as .safetensors"]),
        ([OWN + "Plain", "model.weights=list.pt"], ["list.pt holds no tensors by name"]),
        ([OWN + "Plain", "model.weights=training.pt"], ["has 'epoch', a int and no tensor"]),
        ([OWN + "Plain", "model.weights=nan.pt"], ["has values in 'inner.bias' that are not finite"]),
        (
            [OWN + "Plain", "model.weights=wide.pt"],
            ["wide.pt has 'inner.weight' of shape 7x2, and model", "of shape 6x2"],
        ),
        ([OWN + "Plain", "model.weights=lacks.pt"], ["lacks.pt lacks 'inner.weight' and 1 more, which model"]),
        (
            [OWN + "Plain", "model.weights=more.pt"],
            ["more.pt has 'mystery', which model 'user_models:Plain' has not"],
        ),
        (
            [OWN + "Plain", "model.freeze=all"],
            ["model.freeze: 'all' is not possible; input should be 'none' or 'featurizer'"],
        ),
        (["model.freeze=featurizer"], ["model.freeze: there is no such setting"]),
    ],
)
def test_a_wrong_input_is_one_sentence_and_exit_code_2(
    settings: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    plain = user_models.Plain(2).state_dict()
    files: dict[str, Any] = {
        "list": [torch.zeros(1)],
        "training": {"epoch": 3, "model": plain},
        "nan": {**plain, "inner.bias": torch.full((6,), float("nan"))},
        "wide": user_models.Plain(2, width=7).state_dict(),
        "lacks": {name: tensor for name, tensor in plain.items() if not name.startswith("inner")},
        "more": {**plain, "mystery": torch.zeros(1)},
    }
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pt")
    (tmp_path / "stack.pt").write_bytes(b"a")  # as a pickle it takes from an empty stack
    (tmp_path / "older.pt").write_bytes(pickle.dumps({"inner.weight": Evil()}))
    torch.save({"inner.weight": Evil()}, tmp_path / "evil.pt")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("not weights")
    (tmp_path / "run.toml").write_text('method = "fedavg"\n[scenario]\nname = "toy"\n')
    arguments = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["run", "--config", "run.toml", "--out", "one", *arguments])
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    assert all(word in said for word in words), said
    assert said.count("perennial:") == 1
    assert "Traceback" not in result.output
    assert not (tmp_path / "broken-into").exists()
    assert not list(tmp_path.glob("one/*"))


def test_show_model_says_which_part_is_which(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["show", "model", SMALL, "--set", "scenario.side=32", "--set", "model.freeze=featurizer", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for word in ('"classifier": "fc (its last linear layer)"', "featurizer 0, classifier 7,175", "7 classes"):
        assert word in result.stdout
    assert Toy().model["name"] in CliRunner().invoke(app, ["show", "model", "mlp"]).stdout
    monkeypatch.setitem(SCENARIOS, "toy", Toy())
    for settings, width in (([], 6), (["--set", "model.width=9"], 9)):
        shown = CliRunner().invoke(
            app, ["show", "model", "user_models:Plain", "--scenario", "toy", *settings, "--json"]
        )
        found = json.loads(shown.stdout)["settings"]["width"]
        assert found == {"description": "argument of user_models:Plain", "default": width}

"""Random changes of training samples: read and not evaluated, keyed, and nowhere but in training."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from perennial.client.host import site_of
from perennial.client.methods.fedavg import FedAvgClient
from perennial.common.config import load_config, parse_task
from perennial.common.data.augmentation import Augmentation
from perennial.common.models.network import network
from perennial.common.models.torch_state import plain_torch
from perennial.common.tasks import Classes
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import SampleShape, group_of
from perennial.common.utils.seeding import derive
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.methods import assert_same, files, run
from perennial.testing.tiny_federation import Toy, WireGrid, toy_config
from tests.helpers.tiny_runs import taken_up

PHOTOS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
AS_THEY_ARE = (0.0,), (1.0,)


def pictures(count: int = 4, side: int = 8, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, channels, side, side, generator=generator)


def changed(change: Augmentation, x: Tensor, seed: int, *key: str | int) -> Tensor:
    """The samples alone."""
    return change(x, torch.zeros(len(x), dtype=torch.int64), seed, *key)[0]


@pytest.mark.parametrize(
    ("named", "channels"),
    [
        ("RandomCrop(8, padding=2)", 3),
        ("RandomCrop((8, 8), padding=(3, 0), padding_mode='reflect')", 1),
        ("RandomResizedCrop(8)", 3),
        ("RandomResizedCrop(8, scale=(0.9, 1.0), antialias=False)", 1),
        ("RandomResizedCrop((8, 8), interpolation='nearest')", 3),
        ("RandomHorizontalFlip()", 3),
        ("RandomVerticalFlip(0.9)", 2),
        ("ColorJitter(0.3, 0.3, 0.3, 0.3)", 3),
        ("ColorJitter(hue=0.5)", 3),
        ("ColorJitter(0.9, 0.9)", 1),
        ("RandomGrayscale(0.5)", 3),
        ("RandomErasing()", 3),
        ("RandomErasing(1, value=[0.1, 0.2, 0.3])", 3),
        ("RandomErasing(1, value='random')", 3),
        ("RandomRotation(20)", 3),
        ("RandomAffine(10, translate=(0.1, 0.2))", 3),
        ("RandomPerspective()", 3),
        ("GaussianBlur(3)", 3),
    ],
)
def test_pictures_are_changed_as_torchvision_does_it_with_the_same_draws(named: str, channels: int) -> None:
    shape = channels, 8, 8
    about = tuple(own[:channels] for own in PHOTOS)
    change, x = Augmentation([named], shape, about), pictures(12, channels=channels)  # type: ignore[arg-type]
    mean, std = (torch.tensor(own).view(-1, 1, 1) for own in about)
    found = changed(change, (x - mean) / std, 7, "north", 2, "batches", 0)
    theirs = eval(f"v2.{named}", {"v2": v2})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(7, "augment", "north", 2, "batches", 0))
        expected = torch.stack([theirs(picture) for picture in x])
    assert not torch.equal(expected, x)
    torch.testing.assert_close(found, (expected - mean) / std, rtol=1e-4, atol=2e-5)


def test_several_are_done_one_after_the_other() -> None:
    first, second = "RandomCrop(8, padding=2)", "RandomHorizontalFlip(1)"
    x = pictures()
    both = changed(Augmentation([first, second], (3, 8, 8), AS_THEY_ARE), x, 5)
    assert torch.equal(both, changed(Augmentation([first], (3, 8, 8), AS_THEY_ARE), x, 5).flip(-1))


def test_pictures_of_one_colour_keep_it_when_they_are_turned() -> None:
    grey = pictures(channels=1).expand(-1, 3, -1, -1)
    found = changed(Augmentation(["ColorJitter(hue=0.5)"], (3, 8, 8), AS_THEY_ARE), grey, 0)
    torch.testing.assert_close(found, grey)


@pytest.mark.parametrize(
    ("mix", "shape"), [("MixUp(0.4)", (5,)), ("MixUp(0.4)", (3, 8, 8)), ("CutMix(1)", (3, 8, 8))]
)
def test_samples_and_labels_are_mixed_by_the_same_shares(mix: str, shape: tuple[int, ...]) -> None:
    """Each sample is a constant, its own number: so the share of its neighbour can be read off its mean."""
    change = Augmentation([], shape, AS_THEY_ARE, mix=mix, classes=6)
    x = torch.arange(6.0).view(-1, *[1] * len(shape)).expand(-1, *shape)
    y = torch.arange(6)
    mixed, shares = change(x, y, 0, "batches", 1)
    assert mixed.shape == x.shape
    torch.testing.assert_close(shares.sum(1), torch.ones(6))
    torch.testing.assert_close(mixed.flatten(1).mean(1), shares @ torch.arange(6.0), rtol=1e-4, atol=1e-4)
    assert 0.01 < float(shares[2, 1]) < 0.99
    assert float(shares[2, 1] + shares[2, 2]) == pytest.approx(1)
    assert torch.equal(change(x, y, 0, "batches", 1)[0], mixed)
    assert not torch.equal(change(x, y, 0, "batches", 4)[0], mixed)


@pytest.mark.parametrize("weights", [(), (1.0, 2.0, 0.5)])
def test_the_loss_of_mixed_labels_is_that_of_both_by_their_shares(weights: tuple[float, ...]) -> None:
    """Zhang et al. 2018: λ CE(z, y) + (1 − λ) CE(z, y')."""
    task, logits = Classes(3, weights), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    one, other = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 2])
    shares = 0.3 * F.one_hot(one, 3) + 0.7 * F.one_hot(other, 3)
    expected = 0.3 * task.loss(logits, one) + 0.7 * task.loss(logits, other)
    torch.testing.assert_close(task.loss(logits, shares), expected)


def test_each_sample_and_each_step_has_draws_of_its_own_and_no_generator_moves() -> None:
    change, one = Augmentation(["RandomCrop(8, padding=4)"], (3, 8, 8), AS_THEY_ARE), pictures(1)
    before = torch.get_rng_state()
    x = one.expand(32, -1, -1, -1)
    found = changed(change, x, 0, "a", 1, "batches", 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(picture.flatten().tolist()) for picture in found}) > 16
    assert torch.equal(found, changed(change, x, 0, "a", 1, "batches", 0))
    for key in (("b", 1, "batches", 0), ("a", 2, "batches", 0), ("a", 1, "batches", 1)):
        assert not torch.equal(found, changed(change, x, 0, *key))
    assert torch.equal(x[3], one[0])


def test_domainbed_is_its_four_transforms() -> None:
    preset = Augmentation(["DomainBed"], (3, 8, 8), PHOTOS)
    apart = Augmentation(
        [
            "RandomResizedCrop((8, 8), scale=(0.7, 1.0))",
            "RandomHorizontalFlip()",
            "ColorJitter(0.3, 0.3, 0.3, 0.3)",
            "RandomGrayscale()",
        ],
        (3, 8, 8),
        PHOTOS,
    )
    assert torch.equal(changed(preset, pictures(), 3), changed(apart, pictures(), 3))


def test_noise_and_dropout_of_features() -> None:
    x = torch.ones(10_000, 3)
    noisy = changed(Augmentation(["Noise(std=0.5)"], (3,), AS_THEY_ARE), x, 0)
    assert float(noisy.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(noisy.std()) == pytest.approx(0.5, abs=0.02)
    dropped = changed(Augmentation(["FeatureDropout(0.25)"], (3,), AS_THEY_ARE), x, 0)
    assert dropped.unique().tolist() == [0.0, 1.0]
    assert float(dropped.mean()) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        (
            "Noise(__import__('os').system('true'))",
            "augment: \"Noise(__import__('os').system('true'))\": it cannot",
        ),
        (
            "RandomCrop(32).forward(1)",
            "augment: 'RandomCrop(32).forward(1)': it is no call; write a transform such",
        ),
        ("Noise(*[1])", "augment: 'Noise(*[1])': it cannot be read"),
        ("Noise(**{'std': 1})", "augment: \"Noise(**{'std': 1})\": it is no call"),
        ("(", "augment: '(': it cannot be read"),
        ("RandomFlip()", "augment: unknown transform 'RandomFlip'"),
        ("Lambda(1)", "augment: unknown transform 'Lambda'"),
        ("Noise(-1)", "augment: 'Noise(-1)' is not possible; std must be 0 or more"),
        ("Noise(sigma=1)", "augment: 'Noise(sigma=1)' is not possible; "),
        ("Noise('a')", "augment: \"Noise('a')\" is not possible; "),
        ("FeatureDropout(1)", "augment: 'FeatureDropout(1)' is not possible; p must be 0 or more and below 1"),
        ("RandomHorizontalFlip()", "augment: RandomHorizontalFlip is for pictures, and samples have the shape 2"),
        ("os:system('true')", "augment: 'os:system' is of 'os', which is no plug-in of the run"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(named: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(options={"method": "fedavg", "scenario": {"name": "toy"}, "augment": [named]})
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("mix", "sentence"),
    [
        ("Mixup(0.2)", "mix: unknown mix of samples 'Mixup'; did you mean 'MixUp'?"),
        ("MixUp(-1)", "mix: 'MixUp(-1)' is not possible; "),
        ("MixUp(0.2, 3)", "mix: 'MixUp(0.2, 3)' is not possible; "),
        ("MixUp(", "mix: 'MixUp(': it cannot be read; write a transform such as 'MixUp(0.2)'"),
        ("CutMix(1)", "mix: CutMix is for pictures, and samples have the shape 2; take MixUp"),
    ],
)
def test_a_mix_that_cannot_be_is_said_in_a_sentence(mix: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(options={"method": "fedavg", "scenario": {"name": "toy"}, "mix": mix})
    assert str(error.value).startswith(sentence)


IDS = SampleShape((6,), 50, padded=True)


@pytest.mark.parametrize("shape", [IDS, group_of({"age": (1,), "text": IDS})])
@pytest.mark.parametrize(
    ("named", "mix", "sentence"),
    [
        ("Noise(0.1)", "", "augment: Noise(0.1) is for numbers, and samples have ids of tokens; leave it out, or"),
        ("DomainBed", "", "augment: DomainBed is for numbers, and samples have ids of tokens"),
        (
            "",
            "MixUp(0.2)",
            "mix: MixUp(0.2) is for numbers, and samples have ids of tokens, which cannot be mixed",
        ),
    ],
)
def test_ids_of_tokens_are_neither_changed_nor_mixed(
    shape: SampleShape, named: str, mix: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match="ids of tokens") as error:
        Augmentation([named] if named else [], shape, AS_THEY_ARE, mix=mix)
    assert str(error.value).startswith(sentence)


def test_a_plugins_own_transform_may_change_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        def __call__(self, x: Tensor) -> Tensor:
            return torch.where((x >= 0) & (torch.rand(x.shape) < 0.5), 0, x)

    module = ModuleType("words")
    Unknown.__module__ = "words"
    module.Unknown = Unknown  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "words", module)
    change = Augmentation(["words:Unknown()"], IDS, AS_THEY_ARE, ["words"])
    found = changed(change, torch.full((100, 6), 7), 0)
    assert found.dtype == torch.int64
    assert found.unique().tolist() == [0, 7]


def test_what_would_change_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="augment: RandomCrop\\(4\\) makes 3x4x4 of samples of shape 3x8x8; keep"):
        Augmentation(["RandomCrop(4)"], (3, 8, 8), AS_THEY_ARE)
    with pytest.raises(ValueError, match="augment: RandomCrop\\(32\\) cannot take samples of shape 3x8x8: "):
        Augmentation(["RandomCrop(32)"], (3, 8, 8), AS_THEY_ARE)


def test_a_plugins_own_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shift:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.by

    module = ModuleType("shifting")
    Shift.__module__ = "shifting"
    module.Shift, module.system = Shift, plain_torch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shifting", module)
    change = Augmentation(["shifting:Shift(2.5)"], (3,), AS_THEY_ARE, ["shifting"])
    assert changed(change, torch.zeros(1, 3), 0).tolist() == [[2.5, 2.5, 2.5]]
    for named, why in {
        "shifting:system()": "'system' is not of the plug-in 'shifting' itself",
        "shifting:Shfit(1)": "the plug-in 'shifting' has no 'Shfit'",
    }.items():
        with pytest.raises(ValueError, match=why):
            Augmentation([named], (3,), AS_THEY_ARE, ["shifting"])


def test_only_training_samples_are_changed_and_held_out_ones_are_not() -> None:
    config = toy_config("fedavg", "augment=Noise(0.5)", "batch_size=40")
    task, scenario = parse_task(config.task()), config.scenario
    net = network(config.model, scenario.input_shape, scenario.classes)
    data = scenario.client_data(0, 0, None)
    site = site_of(task, scenario.client_ids[0], data, net)
    client = FedAvgClient(site, config.method, {})  # type: ignore[arg-type]
    (batch,) = client.batches(1, 1)
    usual = FedAvgClient(site_of(parse_task(toy_config("fedavg", "batch_size=40").task()), site.client, data, net),
                         config.method, {})  # type: ignore[arg-type]  # fmt: skip
    (plain,) = usual.batches(1, 1)
    assert torch.equal(batch.y, plain.y)
    assert 0.4 < float((batch.x - plain.x).std()) < 0.6
    assert torch.equal(data.train.x, Toy().client_data(0, 0, None).train.x)
    assert float(client.mean_loss(client.predictor(client.initial()), data.train)) == float(
        usual.mean_loss(usual.predictor(usual.initial()), data.train)
    )


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ditto", "fedsdr"))]
)
def test_runs_with_it_are_the_same_everywhere(method: str, tmp_path: Path) -> None:
    """With all habits together: over the wire, taken up again, and where stacks were asked for."""
    settings = (
        "augment=Noise(0.5)",
        *(["mix=MixUp(0.2)"] if method != "fedsdr" else []),
        "optimizer=adamw",
        "optimizer.keep=true",
        "schedule=cosine",
        "precision=bf16",
    )
    config = toy_config(method, *settings, "local_steps=3", rounds=4)
    folder = taken_up(config, tmp_path, after=2)
    wire, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    with plain_torch(threads=1):
        run_rounds(config, wire, grid, start(config))
    assert wire.rows() == folder.rows()
    run(config.model_copy(update={"cohort_engine": "stack", "evaluate_every": 9}), tmp_path / "stack")
    one, other = files(tmp_path / "whole"), files(tmp_path / "stack")
    assert all(torch.equal(one[at][key], other[at][key]) for at in one for key in one[at])
    assert_same(tmp_path / "whole", folder.path)

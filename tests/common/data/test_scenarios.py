import gzip
import hashlib
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from real_data import REAL, needs_mnist
from torch import Tensor

from perennial.common.config import load_config
from perennial.common.data.datasets import DATASETS, load
from perennial.common.data.environments import rotate_quarter
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import all_shares
from perennial.common.data.scenarios import SCENARIOS, scenario_class
from perennial.common.data.scenarios.colored import (
    CFMNIST,
    CMNIST,
    PRESETS,
    RCFMNIST,
    RCMNIST,
    ColoredDigits,
    ColoredScenario,
    RCDigits,
)
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import blank
from perennial.server.study.constant import constant_predictor

SMALL = {"train_per_class": 60, "test_per_class": 40}
MINIATURE = {
    "colored-digits": ColoredDigits(),
    "cmnist": CMNIST(**SMALL),
    "cmnist-80": CMNIST(clients=80, **SMALL),
    "cfmnist": CFMNIST(**SMALL),
    "rc-digits": RCDigits(),
    "rc-mnist": RCMNIST(train_samples=400, test_samples=150),
    "rc-mnist-2env": SCENARIOS["rc-mnist-2env"].model_copy(update={"train_samples": 401, "test_samples": 151}),
    "rc-fmnist": RCFMNIST(train_samples=400, test_samples=150),
}


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root in MNIST's format: 250 training and 170 test images of noise for each class."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for kind in ("MNIST", "FashionMNIST"):
        folder = root / kind / "raw"
        folder.mkdir(parents=True)
        for part, per_class in (("train", 250), ("t10k", 170)):
            labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), per_class))
            images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
            for stem, array in (("images-idx3", images), ("labels-idx1", labels)):
                header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
                packed = gzip.compress(header + array.tobytes(), compresslevel=1)
                (folder / f"{part}-{stem}-ubyte.gz").write_bytes(packed)
    return root


def everything(scenario: ColoredScenario, root: Path, seed: int = 0) -> list[ClientData]:
    return [scenario.client_data(client, seed, root) for client in range(scenario.clients)]


@dataclass(frozen=True)
class World:
    """A scenario and all its clients' data with seed 0."""

    scenario: ColoredScenario
    root: Path
    raw: Raw
    shares: list[Share]
    clients: list[ClientData]


@pytest.fixture(
    scope="module",
    params=[f"{name}, miniature" for name in MINIATURE]
    + [
        pytest.param("cmnist", marks=needs_mnist),
        pytest.param("rc-fmnist", marks=(needs_mnist, pytest.mark.slow)),
    ],
)
def world(request: pytest.FixtureRequest, miniature: Path) -> World:
    name, _, small = request.param.partition(", ")
    scenario, root = (MINIATURE[name], miniature) if small else (SCENARIOS[name], REAL)
    assert isinstance(scenario, ColoredScenario)
    raw = load(scenario.dataset, root)
    return World(scenario, root, raw, scenario.shares(0, raw), everything(scenario, root))


def colour_of(x: Tensor) -> Tensor:
    """The channel that holds the image; asserts that the other is empty."""
    inked = x.flatten(2).any(dim=2)
    assert torch.equal(inked.sum(dim=1), torch.ones(len(x), dtype=torch.int64))
    return inked[:, 1].long()


def assert_shares(clients: list[Tensor], probability: float) -> None:
    """The share of hits is within four standard errors, over all clients and for each; exact at 0 and 1."""
    for hits in (torch.cat(clients), *clients):
        if len(hits) >= 50:  # four standard errors are far too few for a handful of yes and no
            error = math.sqrt(probability * (1 - probability) / len(hits))
            assert abs(hits.float().mean().item() - probability) <= 4 * error


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


def same(one: ClientData, other: ClientData) -> bool:
    return all(
        torch.equal(getattr(left, part), getattr(right, part))
        for left, right in zip(splits(one).values(), splits(other).values(), strict=True)
        for part in ("x", "y", "environment")
    )


# --- Every scenario, small and full-sized --------------------------------------------------------------


def test_shapes_types_and_names(world: World) -> None:
    scenario = world.scenario
    for share, data in zip(world.shares, world.clients, strict=True):
        assert tuple(data.test) == scenario.test_environments
        for examples in splits(data).values():
            assert examples.x.shape == (len(examples), *scenario.input_shape)
            assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.int64)
            assert examples.environment.shape == examples.y.shape
            assert examples.environment.dtype == torch.int64
            assert 0 <= examples.x.min() <= examples.x.max() <= 1
            assert set(examples.y.unique().tolist()) <= set(range(scenario.classes))
        for examples in (data.train, data.validation):
            held = examples.environment.bincount(minlength=len(scenario.train_environments))
            assert set(held.nonzero().flatten().tolist()) == set(share.environments)
            # Equally many in each of the client's environments.
            assert held.max() - held[held > 0].min() <= 1
        assert all(test.environment.unique().tolist() == [-1] for test in data.test.values())


def test_colour_agrees_with_the_noisy_label_as_the_environment_says(world: World) -> None:
    scenario = world.scenario
    agreeing: dict[float, list[Tensor]] = defaultdict(list)
    for share, data in zip(world.shares, world.clients, strict=True):
        for examples in (data.train, data.validation):
            for own in share.environments:
                here = examples[examples.environment == own]
                agreeing[scenario.train_agreement[own]].append(colour_of(here.x) == here.y)
        for p, examples in zip(scenario.test_agreement, data.test.values(), strict=True):
            agreeing[p].append(colour_of(examples.x) == examples.y)
    for p, clients in agreeing.items():
        assert_shares(clients, p)


def test_samples_are_the_shares_images_turned_by_client(world: World) -> None:
    for client, (share, data) in enumerate(zip(world.shares, world.clients, strict=True)):
        for split in ("train", "validation", "test"):
            original = world.raw.images[torch.from_numpy(getattr(share, split))]
            step = original.shape[1] // world.scenario.side
            original = original[:, ::step, ::step].float() / (255 if original.dtype == torch.uint8 else 1)
            for examples in data.test.values() if split == "test" else [splits(data)[split]]:
                upright = rotate_quarter(examples.x, -world.scenario.quarter_turns(client))
                assert torch.equal(upright.sum(dim=1), original)


def test_labels_are_the_class_group_flipped_at_the_noise_rate(world: World) -> None:
    flipped = []
    for share, data in zip(world.shares, world.clients, strict=True):
        for split, examples in (
            ("train", data.train),
            ("validation", data.validation),
            ("test", data.test["p=0.1"]),
        ):
            classes = world.raw.labels[torch.from_numpy(getattr(share, split))]
            clean = torch.tensor([int(label in world.scenario.ones) for label in classes.tolist()])
            flipped.append(examples.y != clean)
    assert_shares(flipped, 0.25)


def test_no_image_is_used_twice(world: World) -> None:
    used = np.concatenate([part for own in world.shares for part in (own.train, own.validation, own.test)])
    assert len(np.unique(used)) == len(used)
    assert 0 <= used.min() <= used.max() < len(world.raw)


def test_all_test_environments_have_the_same_labels_and_colours_of_their_own(world: World) -> None:
    both = []
    for data in world.clients:
        labels = data.test["p=0.1"].y
        assert all(torch.equal(test.y, labels) for test in data.test.values())
        one, other = (colour_of(data.test[name].x) == labels for name in ("p=0.3", "p=0.4"))
        both.append(one & other)
    # Independent draws both agree with the label in 0.3 * 0.4 of the cases; one draw for both would in 0.3.
    assert_shares(both, 0.12)


def test_the_oracle_differs_in_the_colour_alone(world: World) -> None:
    oracle = world.scenario.model_copy(update={"oracle": True})
    for client, data in list(enumerate(world.clients))[:: len(world.clients) // 4]:
        grey = splits(oracle.client_data(client, 0, world.root))
        for name, examples in splits(data).items():
            assert torch.equal(grey[name].y, examples.y)
            assert torch.equal(grey[name].environment, examples.environment)
            for channel in range(2):
                assert torch.equal(grey[name].x[:, channel], examples.x.sum(dim=1))


def test_data_depend_on_the_seed_and_on_nothing_else(world: World) -> None:
    scenario, last = world.scenario, world.scenario.clients - 1
    before = world.clients[last]
    all_shares.cache_clear()
    torch.manual_seed(1)
    np.random.seed(1)
    state = torch.get_rng_state()
    assert same(scenario.client_data(last, 0, world.root), before)
    assert torch.equal(torch.get_rng_state(), state)
    other = scenario.client_data(last, 1, world.root)
    assert not torch.equal(other.train.x, before.train.x)
    assert not torch.equal(other.train.y, before.train.y)
    assert not torch.equal(other.test["p=0.1"].y, before.test["p=0.1"].y)


# --- Digit pairs (FedSDR §5.2) -------------------------------------------------------------------------


def raw_like(per_class: int, test_per_class: int) -> Raw:
    labels = torch.cat([torch.arange(10).repeat(per_class), torch.arange(10).repeat(test_per_class)])
    return Raw(torch.zeros(len(labels), 28, 28, dtype=torch.uint8), labels, 10 * per_class)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clients", [8, 80])
def test_each_client_has_two_digits_of_each_label(clients: int, seed: int) -> None:
    raw = raw_like(5000, 900)
    scenario = CMNIST(clients=clients)
    train_size, test_size = (4400, 800) if clients == 8 else (440, 80)
    for share in scenario.shares(seed, raw):
        own = np.concatenate([share.train, share.validation])
        assert (len(own), len(share.validation), len(share.test)) == (train_size, train_size // 10, test_size)
        assert max(own) < raw.train_size <= min(share.test)
        digits = set(raw.labels[torch.from_numpy(own)].tolist())
        assert digits == set(raw.labels[torch.from_numpy(share.test)].tolist())
        assert [sum(digit // 5 == label for digit in digits) for label in (0, 1)] == [2, 2]
        if clients == 8:
            assert set(raw.labels[torch.from_numpy(own)].bincount().tolist()) == {0, 1100}
            assert set(raw.labels[torch.from_numpy(share.test)].bincount().tolist()) == {0, 200}


@pytest.mark.parametrize("seed", range(5))
def test_digits_and_environments_are_balanced_over_the_clients(seed: int) -> None:
    raw = raw_like(5000, 900)
    shares = CMNIST().shares(seed, raw)
    assert Counter(share.environments for share in shares) == {(0,): 4, (1,): 4}
    digits = [frozenset(raw.labels[torch.from_numpy(share.train)].tolist()) for share in shares]
    assert len(set(digits)) == 8
    uses = Counter(digit for own in digits for digit in own)
    assert set(uses) == set(range(10))
    assert set(uses.values()) == {3, 4}


def test_eighty_clients_are_the_eight_split_by_ten() -> None:
    raw = raw_like(5000, 900)
    eight, eighty = CMNIST().shares(4, raw), CMNIST(clients=80).shares(4, raw)
    for number, share in enumerate(eight):
        tenths = eighty[10 * number : 10 * number + 10]
        assert {tenth.environments for tenth in tenths} == {share.environments}
        for parts in (("train", "validation"), ("test",)):
            whole = np.concatenate([getattr(share, part) for part in parts])
            pieces = np.concatenate([getattr(tenth, part) for tenth in tenths for part in parts])
            assert sorted(pieces) == sorted(whole)


def test_clients_draw_noise_and_colours_of_their_own(miniature: Path) -> None:
    scenario = RCMNIST(train_samples=400, test_samples=150, train_agreement=(0.8,) * 4)
    raw, flips, colours = load("mnist", miniature), [], []
    for share, data in zip(scenario.shares(0, raw), everything(scenario, miniature), strict=True):
        flips.append(data.train.y != (raw.labels[torch.from_numpy(share.train)] < 5))
        colours.append(colour_of(data.train.x) != data.train.y)
    assert_shares([flips[0] & flips[1], flips[2] & flips[3]], 0.25**2)
    assert_shares([colours[0] & colours[1], colours[2] & colours[3]], 0.2**2)
    assert_shares([flips[0] & colours[0], flips[1] & colours[1]], 0.25 * 0.2)


def test_what_is_held_out_follows_its_fraction() -> None:
    raw = raw_like(250, 170)
    sizes = {}
    for fraction in (0.0, 0.25):
        share = CMNIST(**SMALL, train_agreement=(0.9,), validation_fraction=fraction).shares(0, raw)[0]
        sizes[fraction] = len(share.train), len(share.validation)
    assert sizes == {0.0: (240, 0), 0.25: (180, 60)}


def test_more_images_than_there_are_is_said_in_one_sentence(miniature: Path) -> None:
    with pytest.raises(UserError, match=r"want 1100 samples each of class 0, but there are only 250"):
        CMNIST().client_data(0, 0, miniature)
    with pytest.raises(UserError, match=r"train_samples = 12500 .* 'mnist' has \(2500 training and 1700 test"):
        RCMNIST().client_data(0, 0, miniature)


def test_a_missing_data_set_is_said_when_a_client_asks_for_its_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"data set 'fashion-mnist': .* in {tmp_path}/FashionMNIST/raw; copy"):
        CFMNIST().client_data(0, 0, tmp_path)


def test_without_label_noise_the_label_is_the_digits(miniature: Path) -> None:
    scenario = CMNIST(**SMALL, label_noise=0.0)
    raw = load("mnist", miniature)
    share = scenario.shares(0, raw)[2]
    data = scenario.client_data(2, 0, miniature)
    assert torch.equal(data.train.y, (raw.labels[torch.from_numpy(share.train)] >= 5).long())
    assert torch.equal(data.test["p=0.7"].y, (raw.labels[torch.from_numpy(share.test)] >= 5).long())


@pytest.mark.parametrize(
    ("scenario", "known"), [(ColoredDigits(), "7278860c924830a1"), (RCDigits(), "e111931223dcb245")]
)
def test_the_embedded_data_never_change(scenario: ColoredScenario, known: str) -> None:
    """Every draw is keyed; a change of a key, an order or a library's stream changes this number."""
    digest = hashlib.sha256()
    for data in everything(scenario, Path()):
        for examples in splits(data).values():
            for tensor in (examples.x, examples.y, examples.environment):
                digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == known


# --- Rotated coloured (PerInvFL §5.1) ------------------------------------------------------------------


def test_rotated_sizes_and_sources() -> None:
    raw = raw_like(6000, 1000)
    for client, share in enumerate(RCMNIST().shares(0, raw)):
        assert (len(share.train), len(share.test)) == (12_500, 2_500)
        assert share.environments == (client,)
        assert max(share.train) < 50_000 <= min(share.test)
        assert max(share.test) < 60_000 <= min(share.validation)
    assert RCMNIST().train_environments == ("p=0.95", "p=0.9", "p=0.85", "p=0.8")
    assert RCMNIST().test_environments == ("p=0.1", "p=0.2", "p=0.3", "p=0.4", "p=0.5")


def test_rotated_digits_are_all_of_our_training_part_and_some_of_the_test_part() -> None:
    raw = load("digits")
    shares = RCDigits().shares(0, raw)
    assert {(len(own.train), len(own.validation), len(own.test)) for own in shares} == {(230, 80, 80)}
    seen = np.concatenate([part for own in shares for part in (own.train, own.test)])
    assert sorted(seen) == list(range(raw.train_size))
    assert min(min(own.validation) for own in shares) >= raw.train_size
    with pytest.raises(UserError, match=r"test_samples = 81 .* \(1240 training and 557 test images\)"):
        RCDigits(test_samples=81).shares(0, raw)


def test_two_environments_per_client() -> None:
    scenario = SCENARIOS["rc-mnist-2env"]
    assert isinstance(scenario, RCMNIST)
    raw = raw_like(6000, 1000)
    p = [tuple(scenario.train_agreement[own] for own in share.environments) for share in scenario.shares(0, raw)]
    assert p == [(0.95, 0.7), (0.9, 0.65), (0.95, 0.65), (0.9, 0.7)]
    assert scenario.train_environments == ("p=0.95", "p=0.9", "p=0.7", "p=0.65")
    assert scenario.test_environments == RCMNIST().test_environments


def test_two_environments_change_nothing_but_the_colours(miniature: Path) -> None:
    """The same images and labels as with one, and the same test data to the last bit."""
    small = {"train_samples": 400, "test_samples": 150}
    one = RCMNIST(**small)
    two = RCMNIST(**small, environments_per_client=2)
    for before, after in zip(everything(one, miniature), everything(two, miniature), strict=True):
        for name, examples in splits(after).items():
            assert torch.equal(examples.y, splits(before)[name].y)
            assert torch.equal(examples.x.sum(dim=1), splits(before)[name].x.sum(dim=1))
        for name, examples in after.test.items():
            assert torch.equal(examples.x, before.test[name].x)


def test_label_one_is_the_first_five_classes_of_the_rotated_and_the_last_five_of_the_others() -> None:
    assert list(RCMNIST.ones) == list(RCFMNIST.ones) == list(RCDigits.ones) == [0, 1, 2, 3, 4]
    assert list(CMNIST.ones) == list(ColoredDigits.ones) == [5, 6, 7, 8, 9]


def test_client_number_is_the_number_of_quarter_turns() -> None:
    assert [RCMNIST().quarter_turns(client) for client in range(4)] == [0, 1, 2, 3]
    assert {CMNIST().quarter_turns(client) for client in range(8)} == {0}


# --- Bundled data --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "worst"),
    [
        ("rc-digits", 42.8),
        ("rc-digits-2env", 42.8),
        ("rotated-digits", 9.3),
        ("color-digits-ilc", 50.0),
        ("digits-3class", 58.6),
        ("digits-contexts", 6.0),
        ("causes-and-shortcut", 52.4),
        ("colored-digits-games", 51.9),
    ],
)
def test_what_a_constant_predictor_scores_is_what_the_page_says(name: str, worst: float) -> None:
    found = constant_predictor(load_config(options={"method": "fedavg", "scenario": name}), 0)
    assert 100 * found.worst == pytest.approx(worst, abs=0.05)
    assert 100 * found.average == pytest.approx(worst, abs=0.05)


# --- Presets -------------------------------------------------------------------------------------------


def test_the_presets() -> None:
    plain = ["colored-digits", "cmnist", "cmnist-80", "cfmnist", "cfmnist-80"]
    plain += [f"rc-{name}{more}" for name in ("digits", "mnist", "fmnist") for more in ("", "-2env")]
    assert set(PRESETS) == {*plain, *(f"{name}-oracle" for name in plain)}
    for name in plain:
        assert not PRESETS[name].oracle
        assert PRESETS[f"{name}-oracle"] == PRESETS[name].model_copy(update={"oracle": True})


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_preset_survives_json_and_its_model_fits(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario_class(scenario.name).model_validate_json(scenario.model_dump_json()) == scenario
    assert scenario.dataset in {*DATASETS, "generated", "own"}
    assert name.startswith(scenario.name)
    assert scenario.title.count("\n") == 0
    settings = model_settings(scenario.model)
    net = network(settings, scenario.input_shape, scenario.task.outputs)
    logits = net.predict(net.initial(0), blank(scenario.input_shape, 3))
    assert logits.shape == (3, scenario.task.outputs)


@pytest.mark.parametrize("name", sorted({scenario.name for scenario in SCENARIOS.values()} - {"own-data"}))
def test_no_scenario_has_clients_without_bound(name: str) -> None:
    """A site makes the names of all clients of the task that a server sends; those of own data are the names."""
    values = SCENARIOS[name].model_dump()
    with pytest.raises(ValidationError, match="clients"):
        scenario_class(name).model_validate({**values, "clients": 10**6})


def test_defaults_of_the_papers() -> None:
    assert {name: (s.clients, s.rounds, s.participation) for name, s in PRESETS.items() if not s.oracle} == {
        "colored-digits": (8, 60, 1.0),
        "cmnist": (8, 600, 1.0),
        "cmnist-80": (80, 600, 0.1),
        "cfmnist": (8, 600, 1.0),
        "cfmnist-80": (80, 600, 0.1),
        "rc-digits": (4, 201, 1.0),
        "rc-digits-2env": (4, 201, 1.0),
        "rc-mnist": (4, 201, 1.0),
        "rc-mnist-2env": (4, 201, 1.0),
        "rc-fmnist": (4, 201, 1.0),
        "rc-fmnist-2env": (4, 201, 1.0),
    }
    assert CMNIST().train_environments == ("p=0.9", "p=0.8")
    assert CMNIST().test_environments == tuple(f"p={tenths / 10:.1f}" for tenths in range(11))
    assert CMNIST().input_shape == RCMNIST().input_shape == (2, 14, 14)
    assert ColoredDigits().input_shape == RCDigits().input_shape == (2, 8, 8)
    assert CMNIST(clients=80).client_ids[7] == "client-07"


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (partial(CMNIST, clients=16), "clients"),
        (partial(ColoredDigits, clients=80), "clients"),
        (partial(CMNIST, label_noise=1.5), "label_noise"),
        (partial(CMNIST, train_agreement=(0.9, -0.1)), "train_agreement"),
        (partial(CMNIST, train_agreement=()), "train_agreement"),
        (partial(CMNIST, train_agreement=[0.9] * 9), "train_agreement"),
        (partial(CMNIST, validation_fraction=1.0), "validation_fraction"),
        (partial(CMNIST, train_per_class=0), "train_per_class"),
        (partial(RCMNIST, train_agreement=(0.9, 0.8)), "train_agreement"),
        (partial(RCMNIST, environments_per_client=3), "environments_per_client"),
    ],
)
def test_a_setting_out_of_bounds_is_refused(build: partial[ColoredScenario], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        build()


def test_an_unknown_name_is_met_with_the_closest_one() -> None:
    assert scenario_class("cfmnist") is CFMNIST
    with pytest.raises(UserError, match=r"unknown scenario 'coloured-digits'; did you mean 'colored-digits'\?"):
        scenario_class("coloured-digits")


@needs_mnist
def test_eight_clients_of_cmnist_take_less_than_three_seconds() -> None:
    scenario = CMNIST()
    load("mnist", REAL)
    all_shares.cache_clear()
    start = time.process_time()
    everything(scenario, REAL)
    assert time.process_time() - start < 3

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from perennial.common.data.datasets import load
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import Files, Raw
from perennial.common.data.scenario import all_shares
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.waterbirds import (
    PRESETS,
    Waterbirds,
    WaterbirdsPerInvFL,
    WaterbirdsScenario,
)
from perennial.common.utils.errors import UserError

# CUB's numbers of the 46 species that the published metadata call waterbirds, three of them by mistake.
WATERBIRDS = {
    *range(1, 4), *range(5, 9), 21, *range(23, 26), 44, 45, 46, *range(50, 54), *range(58, 67), 71, 72,
    84, *range(86, 91), 100, 101, 102, 106, *range(141, 148),
}  # fmt: skip
# Published counts by kind and place, over the three splits.
ON_WATER = {0: 2905 / 9125, 1: 1832 / 2663}
FOLDER = "waterbird_complete95_forest2water2"


@cache
def published() -> Raw:
    """Labels alone: 59 pictures of each of CUB's species, with the published shares of backgrounds."""
    species = np.repeat(np.arange(1, 201), 59)
    labels = np.isin(species, list(WATERBIRDS)).astype(np.int64)
    shares = np.where(labels == 1, ON_WATER[1], ON_WATER[0])
    places = (np.random.default_rng(0).random(len(species)) < shares).astype(np.int64)
    tags = {"place": torch.from_numpy(places), "species": torch.from_numpy(species)}
    return Raw(torch.zeros(len(labels), 3, 1, 1), torch.from_numpy(labels), len(labels), tags)


ALL = [Waterbirds(), Waterbirds(clients=80), WaterbirdsPerInvFL()]
every = pytest.mark.parametrize("scenario", ALL, ids=["waterbirds", "waterbirds-80", "waterbirds-perinvfl"])
both = pytest.mark.parametrize("oracle", [False, True], ids=["", "oracle"])
seeds = pytest.mark.parametrize("seed", range(4))


def agreement(raw: Raw, index: np.ndarray, kind: int) -> tuple[int, int]:
    """How many of the pictures of a kind are on the background that agrees, and how many there are."""
    chosen = torch.from_numpy(np.asarray(index))
    own = raw.labels[chosen] == kind
    return int((raw.tags["place"][chosen][own] == kind).sum()), int(own.sum())


@every
@both
@seeds
def test_no_picture_is_used_twice(scenario: WaterbirdsScenario, oracle: bool, seed: int) -> None:
    shares = scenario.model_copy(update={"oracle": oracle}).shares(seed, published())
    assert len(shares) == scenario.clients
    used = np.concatenate([np.concatenate([s.train, s.validation, np.unique(s.test)]) for s in shares])
    assert len(np.unique(used)) == len(used)


@every
@both
@seeds
def test_training_agrees_as_the_environment_says(scenario: WaterbirdsScenario, oracle: bool, seed: int) -> None:
    scenario, raw = scenario.model_copy(update={"oracle": oracle}), published()
    shares = scenario.shares(seed, raw)
    each = scenario.clients // len(scenario.subsets)
    for place, (_, environment) in enumerate(scenario.subsets):
        pieces = shares[each * place : each * (place + 1)]
        assert {piece.environments for piece in pieces} == {(environment,)}
        own = np.concatenate([np.concatenate([piece.train, piece.validation]) for piece in pieces])
        for kind in (0, 1):
            p = (0.7 if kind else 0.3) if oracle else scenario.train_agreement[environment]
            count = scenario.train_per_class
            assert agreement(raw, own, kind) == (round(p * count), count)
        held_out = sum(len(piece.validation) for piece in pieces)
        assert held_out == pytest.approx(0.1 * len(own), abs=each)


@seeds
def test_species_are_the_theses_split(seed: int) -> None:
    raw, scenario = published(), Waterbirds()
    groups, species = scenario.groups(seed, raw), raw.tags["species"].numpy()
    for kind, exclusive, common, total in ((0, 34, 17, 154), (1, 10, 5, 46)):
        owned = [set(species[(groups == group) & (raw.labels.numpy() == kind)].tolist()) for group in range(4)]
        assert [len(own) for own in owned] == [exclusive + common] * 4
        shared = set.intersection(*owned)
        assert len(shared) == common
        assert sum(len(own - shared) for own in owned) == len(set.union(*owned) - shared) == 4 * exclusive
        assert len(set.union(*owned)) == total - 1
    assert not np.array_equal(groups, scenario.groups(seed + 1, raw))
    # The two clients of a group have both environments, and no other client has their species' pictures.
    for client, share in enumerate(scenario.shares(seed, raw)):
        assert share.environments == (client % 2,)
        assert set(groups[np.concatenate([share.train, share.validation, share.test])].tolist()) == {client // 2}


def test_perinvfls_species_are_stretches() -> None:
    raw = published()
    species = raw.tags["species"].numpy()
    bounds = [(1, 57), (58, 97), (98, 128), (129, 200)]
    for share, (first, last) in zip(WaterbirdsPerInvFL().shares(0, raw), bounds, strict=True):
        own = species[np.concatenate([share.train, share.validation, share.test])]
        assert first <= own.min() <= own.max() <= last


@seeds
def test_eighty_clients_are_the_eight_split_by_ten(seed: int) -> None:
    eight, eighty = (Waterbirds(clients=n).shares(seed, published()) for n in (8, 80))
    for number, share in enumerate(eight):
        tenths = eighty[10 * number : 10 * number + 10]
        assert {tenth.environments for tenth in tenths} == {share.environments}
        for parts in (("train", "validation"), ("test",)):
            whole = np.concatenate([getattr(share, part) for part in parts])
            pieces = np.concatenate([getattr(tenth, part) for tenth in tenths for part in parts])
            assert sorted(pieces) == sorted(whole)
        assert [len(tenth.train) + len(tenth.validation) for tenth in tenths] == [32] * 10


def test_the_partition_depends_on_the_seed_alone() -> None:
    def flat(shares: list[Share]) -> list[int]:
        return [number for share in shares for number in (*share.train, *share.validation, *share.test)]

    one, again, other = (flat(Waterbirds().shares(seed, published())) for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_too_few_pictures_are_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match=r"train_per_class = 300 .* need more waterbirds on water than"):
        Waterbirds(train_per_class=300).shares(0, published())
    with pytest.raises(UserError, match=r"test_per_class = 120 need more waterbirds on land than"):
        Waterbirds(train_per_class=1, test_per_class=120).shares(0, published())
    raw = published()
    some = torch.isin(raw.tags["species"], torch.tensor([*sorted(WATERBIRDS)[:40], 200]))
    tags = {name: values[some] for name, values in raw.tags.items()}
    few = Raw(raw.images, raw.labels[some], 0, tags)
    with pytest.raises(UserError, match=r"has 1 species of landbirds, but 153 are needed"):
        Waterbirds().shares(0, few)


# --- The files -----------------------------------------------------------------------------------------

SMALL = {"train_per_class": 20, "test_per_class": 10, "side": 16}


def write(root: Path) -> None:
    """Metadata in the published form and 198 species; a picture's red is its number, its blue the place."""
    folder = root / FOLDER
    rows, number = [], 0
    for species in range(1, 201):
        label = int(species in WATERBIRDS)
        name = f"{species:03d}.Species_{species}"
        (folder / name).mkdir(parents=True)
        for one in range(14 if label else 4):
            number += 1
            place = one % 2
            row = {"img_id": number, "img_filename": f"{name}/bird_{one}.png", "y": label, "split": one % 3}
            rows.append({**row, "place": place, "place_filename": "/o/ocean/1.jpg"})
            colour = (number % 256, number // 256, 255 * place)
            Image.new("RGB", (20, 12), colour).save(folder / row["img_filename"], compress_level=0)
    with (folder / "metadata.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write(root)
    return root


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


def test_the_metadata_are_read_split_by_split(root: Path) -> None:
    raw = load("waterbirds", root)
    with (root / FOLDER / "metadata.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["split"]))
    assert len(raw) == len(rows)
    assert raw.train_size == sum(row["split"] == "0" for row in rows)
    assert raw.labels.tolist() == [int(row["y"]) for row in rows]
    for tag in ("place", "split"):
        assert raw.tags[tag].tolist() == [int(row[tag]) for row in rows]
    assert raw.tags["species"].tolist() == [int(row["img_filename"][:3]) for row in rows]
    chosen = torch.tensor([5, 0, 700])
    pictures = raw.at(8).images[chosen]
    assert pictures.shape == (3, 3, 8, 8)
    assert pictures.dtype == torch.uint8
    for picture, number in zip(pictures, chosen.tolist(), strict=True):
        row = rows[number]
        colour = (int(row["img_id"]) % 256, int(row["img_id"]) // 256, 255 * int(row["place"]))
        assert torch.equal(picture, torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 8, 8))


def kind_and_place(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels, and the place that the blue of the pictures says."""
    blue = examples.x[:, 2, 0, 0] * 0.225 + 0.406
    assert torch.allclose(blue, blue.round(), atol=1e-5)
    return examples.y, blue.round().long()


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize("kind", [Waterbirds, WaterbirdsPerInvFL])
def test_client_data(kind: type[WaterbirdsScenario], oracle: bool, root: Path) -> None:
    scenario = kind(oracle=oracle, **SMALL)
    for client in (0, 3):
        data = scenario.client_data(client, 0, root)
        assert tuple(data.test) == scenario.test_environments
        share = scenario.shares(0, load("waterbirds", root))[client]
        for split, examples in splits(data).items():
            assert examples.x.shape == (len(examples), 3, 16, 16)
            assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.int64)
            own = share.environments[0] if split in ("train", "validation") else -1
            assert torch.equal(examples.environment, torch.full_like(examples.y, own))
        assert (len(data.train), len(data.validation)) == (36, 4)
        for p, test in zip(scenario.test_agreement, data.test.values(), strict=True):
            label, place = kind_and_place(test)
            for bird in (0, 1):
                hits = (place == label)[label == bird]
                wanted = (0.7 if bird else 0.3) if oracle else p
                assert (int(hits.sum()), len(hits)) == (round(10 * wanted), 10)


@pytest.mark.parametrize("oracle", [False, True])
def test_test_environments_share_as_many_pictures_as_they_can(oracle: bool, root: Path) -> None:
    data = Waterbirds(oracle=oracle, **SMALL).client_data(2, 0, root)
    tests = list(data.test.values())
    for number, test in enumerate(tests):
        changed = (test.x != tests[0].x).flatten(1).any(dim=1)
        # One of ten places of each kind changes from one tenth to the next; without the shortcut none does.
        assert changed.sum() == (0 if oracle else 2 * number)
        assert torch.equal(test.y, tests[0].y)


def test_all_ten_pieces_together_are_the_environment(root: Path) -> None:
    scenario = Waterbirds(clients=80, **SMALL)
    for name, p in (("p=0.3", 0.3), ("p=0.8", 0.8)):
        tests = [scenario.client_data(client, 0, root).test[name] for client in range(20, 30)]
        assert all(test.y.tolist() == [0, 1] for test in tests)
        hits = sum(int((place == label).sum()) for label, place in map(kind_and_place, tests))
        assert hits == round(20 * p)


def test_client_data_depend_on_the_seed_alone(root: Path) -> None:
    scenario = Waterbirds(**SMALL)
    before = scenario.client_data(1, 0, root)
    all_shares.cache_clear()
    np.random.seed(1)
    for name, examples in splits(scenario.client_data(1, 0, root)).items():
        assert torch.equal(examples.x, splits(before)[name].x)
    assert not torch.equal(scenario.client_data(1, 1, root).train.x, before.train.x)


def complaint(root: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        Waterbirds(**SMALL).client_data(0, 0, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    assert f"{FOLDER}/metadata.csv" in complaint(None)
    text = complaint(tmp_path)
    for part in ("no metadata.csv", str(tmp_path / FOLDER), f"{FOLDER}.tar.gz"):
        assert part in text
    (tmp_path / FOLDER).mkdir()
    head = "img_filename,y,split,place\n"
    for harm in ("", head, "img_id,y\n1,0\n", head + "001.A/a.jpg,one,0,0\n", "\0"):
        (tmp_path / FOLDER / "metadata.csv").write_text(harm)
        assert "metadata.csv cannot be read" in complaint(tmp_path)


@pytest.mark.parametrize("harm", [None, b"", b"<html>", b"\x89PNG\r\n\x1a\n" + b"\0" * 30])
def test_a_broken_picture_is_named(tmp_path: Path, harm: bytes | None) -> None:
    path = tmp_path / "bird.png"
    if harm is not None:
        path.write_bytes(harm)
    with pytest.raises(UserError, match=f"picture {path} cannot be read"):
        Files([path])[torch.tensor([0])]


# --- Presets -------------------------------------------------------------------------------------------


def test_the_presets() -> None:
    plain = ["waterbirds", "waterbirds-80", "waterbirds-perinvfl"]
    assert set(PRESETS) == {*plain, *(f"{name}-oracle" for name in plain)}
    assert {
        name: (SCENARIOS[name].clients, SCENARIOS[name].rounds, SCENARIOS[name].participation) for name in plain
    } == {
        "waterbirds": (8, 600, 1.0),
        "waterbirds-80": (80, 600, 0.1),
        "waterbirds-perinvfl": (4, 201, 1.0),
    }
    assert Waterbirds().train_environments == ("p=0.95", "p=0.85")
    assert Waterbirds().test_environments == tuple(f"p={tenths / 10}" for tenths in range(11))
    assert WaterbirdsPerInvFL().train_environments == ("p=0.95", "p=0.9", "p=0.85", "p=0.8")
    assert WaterbirdsPerInvFL().test_environments == ("p=0.1", "p=0.2", "p=0.3", "p=0.4", "p=0.5")
    assert Waterbirds(side=224).input_shape == (3, 224, 224)


@pytest.mark.parametrize("field", [{"clients": 16}, {"side": 8}, {"train_agreement": (0.9,)}])
def test_a_setting_out_of_bounds_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        Waterbirds.model_validate(field)

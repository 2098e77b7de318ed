import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from real_data import REAL

from perennial.common.data.datasets import load
from perennial.common.data.examples import ClientData, Examples
from perennial.common.data.partition import Share
from perennial.common.data.raw_data import OFFICE_HOME, PACS, VLCS, Raw
from perennial.common.data.scenario import Spurious, all_shares
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.data.scenarios.pacs import PRESETS, LeaveOneOut, OfficeHome, PacsDomains, PacsPairs, Vlcs
from perennial.common.utils.errors import UserError

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
COUNTS = {  # published: the classes of each domain
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}


def published() -> Raw:
    """Labels alone."""
    labels = np.concatenate([np.repeat(np.arange(7), counts) for counts in COUNTS.values()])
    domain = np.repeat(np.arange(4), [sum(counts) for counts in COUNTS.values()])
    tags = {"domain": torch.from_numpy(domain)}
    return Raw(torch.zeros(len(labels), 3, 1, 1), torch.from_numpy(labels), len(labels), tags)


def parts(share: Share) -> np.ndarray:
    return np.concatenate([share.train, share.validation])


seeds = pytest.mark.parametrize("seed", range(3))
held_outs = pytest.mark.parametrize("held_out", PACS)


# --- The thesis' clients -------------------------------------------------------------------------------


@seeds
@held_outs
def test_two_clients_for_each_domain_that_is_not_left_out(held_out: str, seed: int) -> None:
    scenario, raw = PacsPairs(held_out=held_out), published()
    shares, domain = scenario.shares(seed, raw), raw.tags["domain"].numpy()
    assert scenario.train_environments == tuple(each for each in PACS if each != held_out)
    assert scenario.test_environments == (held_out,)
    assert len(shares) == 6
    for client, share in enumerate(shares):
        own = scenario.train_environments[client // 2]
        assert share.environments == (client // 2,)
        assert {PACS[number] for number in domain[parts(share)]} == {own}
        assert {PACS[number] for number in domain[share.test]} == {held_out}
        half = {0, 1, 2} if client % 2 == 0 else {3, 4, 5, 6}
        labels = raw.labels.numpy()
        # All pictures of the client's classes, in both domains.
        assert set(labels[parts(share)].tolist()) == set(labels[share.test].tolist()) == half
        assert len(parts(share)) == sum(COUNTS[own][label] for label in half)
        assert len(share.test) == sum(COUNTS[held_out][label] for label in half)
        assert len(share.validation) == round(0.1 * len(parts(share)))
    training = np.concatenate([parts(share) for share in shares])
    assert len(np.unique(training)) == len(training) == 9991 - sum(COUNTS[held_out])


@seeds
def test_sixty_clients_are_the_six_split_by_ten(seed: int) -> None:
    raw = published()
    six, sixty = (PacsPairs(clients=n, held_out="photo").shares(seed, raw) for n in (6, 60))
    for number, share in enumerate(six):
        tenths = sixty[10 * number : 10 * number + 10]
        assert {tenth.environments for tenth in tenths} == {share.environments}
        assert sorted(np.concatenate([parts(tenth) for tenth in tenths])) == sorted(parts(share))
        assert sorted(np.concatenate([tenth.test for tenth in tenths])) == sorted(share.test)
        assert max(len(tenth.test) for tenth in tenths) - min(len(tenth.test) for tenth in tenths) <= 1


# --- FedIIR's ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_out", "sizes"),
    [
        # FedIIR Alg 2 with 50 clients: number of clients and training pictures of each, but for the remainder
        ("art_painting", {"cartoon": (15, 140), "photo": (11, 136), "sketch": (24, 147)}),
        ("cartoon", {"art_painting": (14, 131), "photo": (11, 136), "sketch": (25, 141)}),
        ("photo", {"art_painting": (12, 153), "cartoon": (14, 150), "sketch": (24, 147)}),
        ("sketch", {"art_painting": (17, 108), "cartoon": (19, 111), "photo": (14, 107)}),
    ],
)
def test_fifty_clients_are_fediirs(held_out: str, sizes: dict[str, tuple[int, int]]) -> None:
    scenario, raw = PacsDomains(clients=50, held_out=held_out), published()
    shares, domain = scenario.shares(0, raw), raw.tags["domain"].numpy()
    assert len(shares) == 50
    for environment, (name, (count, size)) in enumerate(sizes.items()):
        own = [share for share in shares if share.environments == (environment,)]
        assert len(own) == count
        trained = np.concatenate([share.train for share in own])
        held = np.concatenate([share.validation for share in own])
        total = sum(COUNTS[name])
        assert {PACS[number] for number in domain[[*trained, *held]]} == {name}
        assert (len(held), len(trained)) == (int(0.1 * total), total - int(0.1 * total))
        # Here the remainder is not the last client's: sizes differ by one at most.
        assert {len(share.train) for share in own} <= {size, size + 1}
    everything = np.concatenate([np.concatenate([parts(share), share.test]) for share in shares])
    assert sorted(everything.tolist()) == list(range(9991))


def test_three_clients_have_a_domain_each() -> None:
    raw = published()
    shares = PacsDomains().shares(0, raw)
    assert [share.environments for share in shares] == [(0,), (1,), (2,)]
    assert [len(parts(share)) for share in shares] == [2344, 1670, 3929]
    assert all(set(raw.labels[torch.from_numpy(share.train)].tolist()) == set(range(7)) for share in shares)


@pytest.mark.parametrize("scenario", [PacsPairs(), PacsDomains(clients=20)], ids=lambda one: one.name)
def test_the_partition_depends_on_the_seed_alone(scenario: LeaveOneOut) -> None:
    one, again, other = (
        [(*share.train, *share.validation, *share.test) for share in scenario.shares(seed, published())]
        for seed in (0, 0, 1)
    )
    assert one == again
    assert one != other


def test_more_clients_than_pictures_is_said_in_one_sentence() -> None:
    raw = published()
    few = Raw(raw.images[::100], raw.labels[::100], 0, {"domain": raw.tags["domain"][::100]})
    with pytest.raises(UserError, match=r"clients = 50 is too many: 'pacs' has 23 pictures of 'cartoon'"):
        PacsDomains(clients=50).shares(0, few)


# --- The files -----------------------------------------------------------------------------------------


def write(folder: Path, domains: tuple[str, ...], classes: tuple[str, ...], each: int) -> None:
    """Folders DOMAIN/CLASS of noise; a few in other formats, sizes and modes."""
    rng = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            place = folder / domain / name
            place.mkdir(parents=True)
            for number in range(each):
                pixels = rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"pic_{number:03d}.png", compress_level=0)
            (place / "notes.txt").write_text("not a picture")
    Image.new("L", (40, 30), 7).save(folder / domains[0] / classes[0] / "pic_000.png")
    Image.new("RGB", (30, 30), (255, 0, 0)).save(folder / domains[0] / classes[0] / "pic_999.JPG", quality=95)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    write(root / "PACS", PACS, CLASSES, 4)
    write(root / "VLCS", VLCS, ("bird", "car", "chair", "dog", "person"), 4)
    write(root / "office_home", OFFICE_HOME, tuple(f"Class_{number:02d}" for number in range(65)), 1)
    return root


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """The pictures of the tree at 64 pixels, packed from the description of the format."""
    root = tmp_path_factory.mktemp("packed")
    folder = root / "pacs"
    folder.mkdir()
    paths = sorted(path for path in (tree / "PACS").rglob("*") if path.suffix.lower() in (".png", ".jpg"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((64, 64), 2)) for path in paths]).astype(
        int
    )
    planes = np.stack([pixels[..., 1], pixels[..., 0] - pixels[..., 1], pixels[..., 2] - pixels[..., 1]])
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=0)
    with lzma.open(folder / "pacs64_images.npy.xz", "wb", preset=0) as file:
        np.save(file, (planes % 256).astype(np.uint8))
    np.savez(
        folder / "pacs64_labels.npz",
        labels=np.array([CLASSES.index(path.parts[-2]) for path in paths], np.uint8),
        domains=np.array([PACS.index(path.parts[-3]) for path in paths], np.uint8),
        names=np.array([path.name.encode() for path in paths]),
    )
    return root


def splits(data: ClientData) -> dict[str, Examples]:
    return {"train": data.train, "validation": data.validation, **data.test}


def test_folders_are_read(tree: Path) -> None:
    raw = load("pacs", tree)
    assert len(raw) == raw.train_size == 4 * 7 * 4 + 1
    assert raw.tags["domain"].bincount().tolist() == [29, 28, 28, 28]
    assert raw.labels.bincount().tolist() == [17, 16, 16, 16, 16, 16, 16]
    # A grey picture, and the last of the first class, a JPEG.
    pictures = raw.at(8).images[torch.tensor([0, 4])]
    assert torch.equal(pictures[0], torch.full((3, 8, 8), 7, dtype=torch.uint8))
    assert (pictures[1].float() - torch.tensor([255.0, 0, 0])[:, None, None]).abs().max() <= 4


def test_packed_pictures_are_those_of_the_folders(tree: Path, packed: Path) -> None:
    one, other = load("pacs", tree), load("pacs", packed)
    assert torch.equal(one.labels, other.labels)
    assert torch.equal(one.tags["domain"], other.tags["domain"])
    everything = torch.arange(len(one))
    assert torch.equal(one.at(64).images[everything], other.at(64).images[everything])
    for name, examples in splits(PacsPairs().client_data(1, 0, tree)).items():
        assert torch.equal(splits(PacsPairs().client_data(1, 0, packed))[name].x, examples.x)
    with pytest.raises(UserError, match="side = 32 needs the picture files; those packed here are 64"):
        PacsPairs(side=32).client_data(0, 0, packed)


@pytest.mark.parametrize(
    "scenario",
    [
        PacsPairs(side=16, held_out="sketch"), PacsDomains(side=16), Vlcs(side=16, held_out="SUN09"),
        OfficeHome(side=16, held_out="Real World"),
    ],
    ids=lambda one: one.name,
)  # fmt: skip
def test_client_data(scenario: LeaveOneOut, tree: Path) -> None:
    raw = load(scenario.dataset, tree)
    assert scenario.classes == int(raw.labels.max()) + 1
    assert len(scenario.train_environments) == 3
    assert scenario.held_out not in scenario.train_environments
    for client, share in enumerate(scenario.shares(0, raw)):
        data = scenario.client_data(client, 0, tree)
        assert tuple(data.test) == scenario.test_environments == (scenario.held_out,)
        for name, index in (
            ("train", share.train),
            ("validation", share.validation),
            (scenario.held_out, share.test),
        ):
            examples = splits(data)[name]
            assert examples.x.shape == (len(index), 3, 16, 16)
            assert (examples.x.dtype, examples.y.dtype) == (torch.float32, torch.int64)
            chosen = torch.from_numpy(index)
            assert torch.equal(examples.y, raw.labels[chosen])
            own = -1 if name == scenario.held_out else share.environments[0]
            assert torch.equal(examples.environment, torch.full_like(examples.y, own))
            restored = examples.x * torch.tensor([0.229, 0.224, 0.225])[:, None, None]
            restored = 255 * (restored + torch.tensor([0.485, 0.456, 0.406])[:, None, None])
            assert (restored - raw.at(16).images[chosen]).abs().max() < 1e-3


def test_client_data_depend_on_the_seed_alone(tree: Path) -> None:
    scenario = PacsPairs(side=16)
    before = scenario.client_data(2, 0, tree).train
    all_shares.cache_clear()
    np.random.seed(1)
    assert torch.equal(scenario.client_data(2, 0, tree).train.x, before.x)
    assert not torch.equal(scenario.client_data(2, 1, tree).train.x, before.x)


def complaint(scenario: LeaveOneOut, root: Path | None) -> str:
    with pytest.raises(UserError) as caught:
        scenario.client_data(0, 0, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    assert "PACS/art_painting/CLASS/*.jpg" in complaint(PacsPairs(), None)
    assert f"no Art in {tmp_path}/office_home; unpack" in complaint(OfficeHome(), tmp_path)
    write(tmp_path / "PACS", PACS[:3], CLASSES, 1)
    assert f"no sketch in {tmp_path}/PACS; unpack it so that its pictures are" in complaint(PacsPairs(), tmp_path)
    write(tmp_path / "VLCS", VLCS, CLASSES[:4], 1)
    assert f"{tmp_path}/VLCS/Caltech101 has 4 classes, not 5" in complaint(Vlcs(), tmp_path)
    (tmp_path / "other" / "pacs").mkdir(parents=True)
    assert "there is no pacs64_images.npy.xz" in complaint(PacsPairs(), tmp_path / "other")


def test_packed_files_that_do_not_match_are_named(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pacs"
    folder.mkdir()
    (folder / "pacs64_images.npy.xz").write_bytes((packed / "pacs" / "pacs64_images.npy.xz").read_bytes())
    np.savez(folder / "pacs64_labels.npz", labels=np.arange(5), domains=np.arange(5))
    assert "has 113 images but 5 labels; copy" in complaint(PacsPairs(), tmp_path)
    np.savez(folder / "pacs64_labels.npz", labels=np.arange(5))
    assert "pacs64_labels.npz cannot be read ('domains')" in complaint(PacsPairs(), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "pacs").exists(), reason="needs the packed PACS in PERENNIAL_DATA or ../shared/data"
)
def test_pacs_is_the_published_one() -> None:
    raw = load("pacs", REAL)
    assert raw.images.shape == (9991, 3, 64, 64)
    for number, counts in enumerate(COUNTS.values()):
        assert raw.labels[raw.tags["domain"] == number].bincount().tolist() == list(counts)
    decoded = raw.images.permute(0, 2, 3, 1).contiguous().numpy()
    # Given with the data.
    assert hashlib.sha256(decoded.tobytes()).hexdigest().startswith("c4207b518fc7f8d4")
    data = PacsPairs(held_out="photo").client_data(0, 0, REAL)
    assert len(data.train) + len(data.validation) == sum(COUNTS["art_painting"][:3])


# --- Presets -------------------------------------------------------------------------------------------


def test_the_presets() -> None:
    assert {
        name: (one.clients, one.rounds, round(one.participation * one.clients)) for name, one in PRESETS.items()
    } == {
        "pacs": (6, 600, 6),
        "pacs-60": (60, 600, 6),
        "pacs-domains": (3, 100, 3),
        "pacs-domains-50": (50, 100, 3),
        "vlcs": (3, 100, 3),
        "vlcs-50": (50, 100, 3),
        "office-home": (3, 100, 3),
        "office-home-50": (50, 100, 3),
    }
    # There is no one shortcut to remove.
    assert not any(isinstance(one, Spurious) for one in PRESETS.values())
    assert not any(f"{name}-oracle" in SCENARIOS for name in PRESETS)


@pytest.mark.parametrize(
    "field", [{"clients": 12}, {"held_out": "clipart"}, {"side": 8}, {"validation_fraction": 1}]
)
def test_a_setting_out_of_bounds_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(field))):
        PacsPairs.model_validate(field)

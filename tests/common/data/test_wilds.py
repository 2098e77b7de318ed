"""Camelyon17 in WILDS' own layout, a few patches of each hospital; read by WILDS' loader where it is installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import perennial
from perennial.common.data.datasets import load
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenarios.wilds import Camelyon17
from perennial.common.utils.errors import UserError

EACH = 12
"""Patches of each hospital and split."""
ROWS = [  # hospital, split as WILDS' metadata.csv has it: 0 training, 1 held out
    (hospital, int(number >= EACH)) for hospital in range(5) for number in range(2 * EACH)
]


def fake() -> Raw:
    """What the loader gives, without pictures; hospitals 1 and 2 are whole splits of WILDS."""
    hospital, split = (torch.tensor(column) for column in zip(*ROWS, strict=True))
    split = torch.where(hospital == 1, 3, torch.where(hospital == 2, 2, split))
    return Raw(torch.zeros(len(ROWS), 3, 1, 1), hospital % 2, len(ROWS), {"hospital": hospital, "split": split})


def test_a_client_is_a_hospital_and_every_test_patch_is_one_clients() -> None:
    raw, scenario = fake(), Camelyon17()
    hospital, split = raw.tags["hospital"].numpy(), raw.tags["split"].numpy()
    shares = scenario.shares(0, raw)
    assert scenario.client_ids == scenario.train_environments == ("hospital-0", "hospital-3", "hospital-4")
    for place, (share, number) in enumerate(zip(shares, (0, 3, 4), strict=True)):
        assert sorted(share.train) == np.flatnonzero((hospital == number) & (split == 0)).tolist()
        assert sorted(share.validation) == np.flatnonzero((hospital == number) & (split == 1)).tolist()
        assert share.environments == (place,)
    tested = np.concatenate([share.test for share in shares])
    assert sorted(tested) == np.flatnonzero((hospital == 1) | (hospital == 2)).tolist()


def test_patches_are_standardised_once(root: Path) -> None:
    """By what the scenario says of itself: weights of torchvision's ask it, and so does who serves a model."""
    scenario = Camelyon17()
    patches = scenario.client_data(0, 0, root).train.x
    mean, std = (torch.tensor(values)[:, None, None] for values in scenario.standardised)
    raw = patches * std + mean
    assert 0 <= raw.min() + 1e-6 < raw.max() <= 1 + 1e-6
    assert torch.allclose(scenario.prepare(raw), patches, atol=1e-6)


def test_most_patches_are_a_limit() -> None:
    shares = Camelyon17(samples=9, test_samples=6).shares(0, fake())
    assert [(len(share.train), len(share.validation), len(share.test)) for share in shares] == [(9, 1, 4)] * 3
    other = Camelyon17(samples=9, test_samples=6).shares(1, fake())
    assert any(set(one.train) != set(two.train) for one, two in zip(shares, other, strict=True))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`metadata.csv`, `patches/` and the release file, as WILDS unpacks them."""
    if not find_spec("wilds"):  # not imported here, since it would ask a server for its newest version
        pytest.skip("needs the extra perennial[wilds]")
    root = tmp_path_factory.mktemp("data")
    folder = root / "camelyon17_v1.0"
    rng, lines = np.random.default_rng(0), [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for number, (hospital, split) in enumerate(ROWS):
        patient, tumor = f"{hospital:03d}", number % 2
        lines.append(f"{number},{patient},1,{number},0,{tumor},{hospital},{hospital},{split}")
        name = f"patches/patient_{patient}_node_1/patch_patient_{patient}_node_1_x_{number}_y_0.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (96, 96, 4), dtype=np.uint8)
        pixels[..., 0] = number  # tells which it is
        Image.fromarray(pixels, "RGBA").save(folder / name)
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    (folder / "RELEASE_v1.0.txt").touch()
    return root


def test_wilds_loader_reads_it(root: Path) -> None:
    raw, wanted = load("camelyon17", root), fake()
    assert torch.equal(raw.tags["hospital"], wanted.tags["hospital"])
    assert torch.equal(raw.tags["split"], wanted.tags["split"])
    assert raw.labels.tolist() == [number % 2 for number in range(len(ROWS))]
    assert raw.images[torch.tensor([7, 50])][:, 0, 0, 0].tolist() == [7, 50]
    assert "outdated" not in sys.modules  # nobody is asked for a newer version of WILDS


def test_a_run_on_hospitals(root: Path, tmp_path: Path) -> None:
    result = perennial.run(
        "fedavg", "wilds:camelyon17", rounds=1, data_root=root, out=tmp_path / "run",
        settings={"scenario.side": 16, "model.name": "logistic", "learning_rate": 0.01},
    )  # fmt: skip
    assert {row["environment"] for row in result.accuracy} == {"hospital-1", "hospital-2"}
    assert {row["client"] for row in result.clients} == {"hospital-0", "hospital-3", "hospital-4"}
    data = result.config.scenario.client_data(1, 0, root)
    assert data.train.x.shape == (EACH, 3, 16, 16)
    assert data.train.environment.unique().tolist() == [1]
    assert sum(len(part) for part in data.test.values()) == 16


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    with pytest.raises(UserError, match=r"no data root is given.*holds camelyon17_v1.0"):
        load("camelyon17")
    for name in [name for name in sys.modules if name.partition(".")[0] == "wilds"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wilds", None)
    with pytest.raises(
        UserError, match=r"the extra perennial\[wilds\], which is not installed .*uv sync --inexact --extra wilds"
    ):
        load("camelyon17", tmp_path)


def test_data_that_are_not_there_are_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no camelyon17_v1.0 in .*; have WILDS put it there"):
        load("camelyon17", tmp_path)

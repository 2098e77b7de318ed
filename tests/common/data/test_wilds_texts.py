"""WILDS' sets of texts, from objects with the attributes of WILDS' own loaders, and by these if installed."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

import perennial
from perennial.common.data.datasets import load
from perennial.common.data.raw_data import IDENTITIES
from perennial.common.data.scenarios.wilds import Amazon, CivilComments
from perennial.common.data.texts import BUCKETS, text_ids
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD

FEW: dict[str, Any] = {"local_steps": 4, "learning_rate": 1.0}


class Loaded:
    """What of WILDS' data sets is asked for."""

    folder: ClassVar[str]
    metadata_fields: list[str]
    metadata_array: torch.Tensor
    y_array: torch.Tensor
    split_array: Any
    texts: list[str]

    def __init__(self, root_dir: str, download: bool) -> None:
        assert not download
        assert (Path(root_dir) / self.folder).is_dir()
        self.make()

    def make(self) -> None:
        raise NotImplementedError

    def get_input(self, number: int) -> str:
        return self.texts[number]


class Comments(Loaded):
    """240 comments of each split; a third mentions nobody, and a third two identities."""

    folder = "civilcomments_v1.0"

    def make(self) -> None:
        count = 720
        rng = np.random.default_rng(0)
        self.y_array = torch.from_numpy(rng.integers(0, 2, count))
        identities = np.zeros((count, 8), np.int64)
        for row in range(count):
            identities[row, rng.choice(8, row % 3, replace=False)] = 1
        self.metadata_fields = [*IDENTITIES, "identity_any", "y"]
        any_, y = torch.from_numpy(identities.any(axis=1).astype(np.int64)), self.y_array
        self.metadata_array = torch.cat([torch.from_numpy(identities), any_[:, None], y[:, None]], dim=1)
        self.split_array = np.array([0, 1, 2] * (count // 3)).astype(object)
        rng.shuffle(self.split_array)
        self.texts = [f"Comment {row} is {'vile' if no else 'kind'}." for row, no in enumerate(y.tolist())]


class Reviews(Loaded):
    """Four reviewers that are trained on, of whom two have reviews to test, and three of each other split."""

    folder = "amazon_v2.1"

    def make(self) -> None:
        users, splits = [], []
        for user, kinds in enumerate([(0, 2), (0, 2, 4), (0, 4), (0,), (1,), (1,), (1,), (3,), (3,), (3,)]):
            for kind in kinds:
                users += [user] * 9
                splits += [kind] * 9
        stars = np.arange(len(users)) % 5
        self.y_array = torch.from_numpy(stars)
        self.metadata_fields = ["user", "product", "category", "year", "y"]
        of_all = np.stack([users, stars * 0, stars * 0, stars * 0, stars], axis=1)
        self.metadata_array = torch.from_numpy(of_all)
        self.split_array = np.array(splits)
        self.texts = [f"stars {'* ' * (own + 1)}" for own in stars]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("wilds", "wilds.datasets"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, kind, own in (
        ("civilcomments", "CivilCommentsDataset", Comments),
        ("amazon", "AmazonDataset", Reviews),
    ):
        module = ModuleType(name)
        setattr(module, kind, own)
        monkeypatch.setitem(sys.modules, f"wilds.datasets.{name}_dataset", module)
        (tmp_path / own.folder).mkdir()
    return tmp_path


def test_a_comment_is_one_client_s_and_a_test_environment_has_all_that_mention_its_identity(root: Path) -> None:
    scenario, raw = CivilComments(samples=0, test_samples=0), load("civilcomments", root)
    identities = torch.stack([raw.tags[name] for name in IDENTITIES], dim=1)
    split, shares = raw.tags["split"], scenario.shares(0, raw)
    for kind, part in ((0, "train"), (1, "validation"), (2, "test")):
        dealt = np.concatenate([getattr(share, part) for share in shares])
        assert sorted(dealt) == torch.nonzero(split == kind).flatten().tolist()
    for place, share in enumerate(shares):
        own = identities[torch.from_numpy(np.concatenate([share.train, share.validation]))]
        assert ((own[:, place] == 1) | ~own.any(dim=1)).all()
        assert share.environments == (place,)
    data = [scenario.client_data(client, 0, root) for client in range(8)]
    for place, name in enumerate(IDENTITIES):
        tested = sum(len(own.test[name]) for own in data if name in own.test)
        assert tested == int(((identities[:, place] == 1) & (split == 2)).sum())
    assert sum(len(own.test["none"]) for own in data) == int((~identities.any(dim=1) & (split == 2)).sum())
    share, first = shares[0], data[0]
    texts = [raw.texts[number] for number in share.train]
    assert torch.equal(first.train.x, text_ids(texts, 300, BUCKETS))
    assert torch.equal(first.train.y, raw.labels[torch.from_numpy(share.train)])
    assert first.train.environment.eq(0).all()
    assert all(part.environment.eq(-1).all() for part in first.test.values())


def test_most_comments_are_a_limit(root: Path) -> None:
    raw = load("civilcomments", root)
    shares = CivilComments(samples=9, test_samples=6).shares(0, raw)
    assert {(len(share.train), len(share.validation), len(share.test)) for share in shares} == {(9, 1, 6)}
    other = CivilComments(samples=9, test_samples=6).shares(1, raw)
    assert any(set(one.train) != set(two.train) for one, two in zip(shares, other, strict=True))


def test_a_client_is_a_reviewer_and_every_other_reviewer_is_tested_by_one(root: Path) -> None:
    scenario, raw = Amazon(clients=4, length=3), load("amazon", root)
    assert scenario.client_ids == ("reviewer-0", "reviewer-1", "reviewer-2", "reviewer-3")
    split, user = raw.tags["split"].numpy(), raw.tags["user"].numpy()
    shares = scenario.shares(0, raw)
    for place, share in enumerate(shares):
        assert sorted(share.train) == np.flatnonzero((user == place) & (split == 0)).tolist()
        assert sorted(share.validation) == np.flatnonzero((user == place) & (split == 2)).tolist()
        others = set(user[share.test]) - {place}
        assert all(sum(own in user[other.test] for other in shares) == 1 for own in others)
    data = [scenario.client_data(client, 0, root) for client in range(4)]
    assert [len(own.validation) for own in data] == [9, 9, 0, 0]
    assert [len(own.test.get("own", ())) for own in data] == [0, 9, 9, 0]
    assert {name: sum(len(own.test.get(name, ())) for own in data) for name in ("val", "test")} == {
        "val": 27,
        "test": 27,
    }
    assert data[0].train.x.shape == (9, 3)
    assert (data[0].train.x == PAD).any()
    few = Amazon(clients=2, test_reviewers=1).shares(0, raw)
    assert sum(len(share.test) for share in few) == 9 * 2 + 9


def test_runs_on_comments_and_reviews(root: Path, tmp_path: Path) -> None:
    comments = perennial.run(
        "fedavg", "wilds:civilcomments", rounds=5, data_root=root, out=tmp_path / "comments", settings=FEW
    )
    assert {row["client"] for row in comments.clients} == {*IDENTITIES}
    assert {row["environment"] for row in comments.accuracy} == {*IDENTITIES, "none"}
    assert min(row["accuracy"] for row in comments.accuracy if row["selection"] == "final") > 0.8
    new = [text_ids([text], 4, BUCKETS)[0].numpy() for text in ("This is vile.", "This is kind.")]
    assert comments.predict(new).tolist() == ["toxic", "civil"]
    assert comments.predict(["This is vile.", "This is kind."]).tolist() == ["toxic", "civil"]
    settings = {**FEW, "scenario.clients": 4, "model.name": "text-transformer", "learning_rate": 0.1}
    reviews = perennial.run(
        "fedsdr", "wilds:amazon", rounds=1, data_root=root, out=tmp_path / "reviews", settings=settings
    )
    assert {row["environment"] for row in reviews.accuracy} == {"own", "val", "test"}


@pytest.mark.parametrize(("name", "folder"), [("civilcomments", "civilcomments_v1.0"), ("amazon", "amazon_v2.1")])
def test_what_is_missing_is_one_sentence(
    name: str, folder: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    with pytest.raises(UserError, match=rf"no data root is given.*holds {folder}, as WILDS unpacks it"):
        load(name)
    (root / folder).rmdir()
    with pytest.raises(UserError, match=rf"there is no {folder} in .*; have WILDS put it there"):
        load(name, root)
    monkeypatch.setitem(sys.modules, f"wilds.datasets.{name}_dataset", None)
    with pytest.raises(UserError, match=r"the extra perennial\[wilds\], which is not installed"):
        load(name, root)


def test_metadata_of_another_kind_are_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Reviews.make

    def other(self: Reviews) -> None:
        make(self)
        self.metadata_fields = ["product"]

    monkeypatch.setattr(Reviews, "make", other)
    with pytest.raises(
        UserError, match=r"amazon_v2.1 cannot be read \(it has no user\); delete it, then have WILDS"
    ):
        load("amazon", root)


@pytest.mark.skipif(not find_spec("wilds"), reason="needs the extra perennial[wilds]")
def test_wilds_own_loaders_read_their_layout(tmp_path: Path) -> None:
    folder = tmp_path / "civilcomments_v1.0"
    folder.mkdir()
    aside = ("identity_any", "severe_toxicity", "obscene", "threat", "insult", "identity_attack")
    columns = {name: [0.0, 1.0, 0.0] for name in (*IDENTITIES, *aside, "sexual_explicit")}
    frame = pd.DataFrame(
        {
            "comment_text": ["a", "b b", "c"],
            "split": ["train", "val", "test"],
            "toxicity": [0.1, 0.9, 0.5],
            **columns,
        }
    )
    frame.to_csv(folder / "all_data_with_identities.csv")
    (folder / "RELEASE_v1.0.txt").touch()
    raw = load("civilcomments", tmp_path)
    assert [*raw.texts] == ["a", "b b", "c"]
    assert raw.labels.tolist() == [0, 1, 1]
    assert raw.tags["split"].tolist() == [0, 1, 2]
    assert raw.tags["black"].tolist() == [0, 1, 0]

    folder = tmp_path / "amazon_v2.1"
    (folder / "splits").mkdir(parents=True)
    frame = pd.DataFrame({"reviewerID": ["u", "v", "u"], "asin": "p", "reviewTime": "t", "unixReviewTime": 1})
    frame["reviewText"] = ["good", "bad", "fine"]
    frame = frame.assign(summary="s", verified=True, category="Books", reviewYear=2014, overall=[5, 1, 4])
    frame.to_csv(folder / "reviews.csv", index=False, quoting=2)
    pd.DataFrame({"split": [0, 3, 4]}).to_csv(folder / "splits" / "user.csv", index=False)
    (folder / "RELEASE_v2.1.txt").touch()
    raw = load("amazon", tmp_path)
    assert [*raw.texts] == ["good", "bad", "fine"]
    assert raw.labels.tolist() == [4, 0, 3]
    assert raw.tags["user"].tolist() == [0, 1, 0]
    assert raw.tags["split"].tolist() == [0, 3, 4]

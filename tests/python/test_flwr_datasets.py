"""Data sets that flwr-datasets shares out: on a small one, in the library's own types."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perennial
from perennial import UserError, from_partitions

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # flwr-datasets reads it when it is imported
datasets = pytest.importorskip("datasets", reason="needs the extra perennial[datasets]")
flwr_datasets = pytest.importorskip("flwr_datasets", reason="needs the extra perennial[datasets]")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def pictures(n: int, side: int = 8, grey: bool = True) -> Any:
    """Pictures whose first pixel is their number, with a class and a camera."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, side, side) if grey else (n, side, side, 3), np.uint8)
    pixels.reshape(n, -1)[:, 0] = np.arange(n)
    known = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    features = datasets.Features({**known, "camera": datasets.Value("string")})
    rows = {"image": list(pixels), "label": [n % 2 for n in range(n)], "camera": ["old", "new"] * (n // 2)}
    return datasets.Dataset.from_dict(rows, features=features)


def test_a_partitioner_s_parts_are_clients(tmp_path: Path) -> None:
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=3, partition_by="label", alpha=1.0, min_partition_size=4, seed=1
    )
    partitioner.dataset = pictures(60)
    made = from_partitions(
        partitioner, x="image", y="label", environment="camera", test=pictures(20), validation_fraction=0
    )
    scenario = made.scenario
    assert scenario.client_ids == ("client-0", "client-1", "client-2")
    assert (scenario.class_names, scenario.environments) == (("cat", "dog"), ("new", "old"))
    assert (scenario.input_shape, scenario.test_environments) == ((1, 8, 8), ("test",))
    root = Path(made.save(tmp_path))
    for number in range(3):
        data, part = scenario.client_data(number, 0, root), partitioner.load_partition(number)
        first = (data.train.x[:, 0, 0, 0] * 255).round().long()  # which picture it is
        assert sorted(first.tolist()) == sorted(int(np.asarray(own)[0, 0]) for own in part["image"])
        assert data.train.y.tolist() == (first % 2).tolist()
        assert data.train.environment.tolist() == (1 - first % 2).tolist()
    assert len(scenario.client_data(0, 0, root).test["test"]) == 20


def test_a_federated_dataset_trains(tmp_path: Path) -> None:
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import IidPartitioner

    for split, count in (("train", 40), ("test", 20)):
        pictures(count, grey=False).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    source = FederatedDataset(
        dataset=str(tmp_path / "data"), partitioners={"train": IidPartitioner(num_partitions=2)}
    )
    made = from_partitions(source, x="image", y="label", test={"as before": "test"})
    assert made.scenario.input_shape == (3, 8, 8)
    result = perennial.run(
        "fedavg", made, rounds=1, out=tmp_path / "run", settings={"model.name": "logistic", "batch_size": 8}
    )
    assert [row["environment"] for row in result.accuracy if row["selection"] == "final"] == ["as before"]
    with pytest.raises(UserError, match="split: there is no partitioner of 'test', only of train"):
        from_partitions(source, x="image", y="label", split="test")


def test_grey_pictures_beside_coloured_ones_have_three_channels(tmp_path: Path) -> None:
    """Though one client has no other."""

    class Parts:
        num_partitions = 2

        def load_partition(self, number: int) -> Any:
            return pictures(8, grey=not number)

    made = from_partitions(Parts(), x="image", y="label", test=pictures(8, grey=True))
    x = made.scenario.client_data(0, 0, Path(made.save(tmp_path))).train.x
    assert x.shape[1:] == (3, 8, 8)
    assert torch.equal(x[:, 0], x[:, 2])


def test_columns_of_a_table_are_samples(tmp_path: Path) -> None:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    rows = {
        "age": [30, 40, 50, 60] * 5,
        "dose": [0.5, 1.5] * 10,
        "ill": ["no", "yes"] * 10,
        "clinic": ["a", "b"] * 10,
    }
    partitioner = NaturalIdPartitioner(partition_by="clinic")
    partitioner.dataset = datasets.Dataset.from_dict({**rows, "ill": ["no", "no", "yes", "yes"] * 5})
    made = from_partitions(partitioner, x=["age", "dose"], y="ill")
    assert (made.scenario.input_shape, made.scenario.class_names) == ((2,), ("no", "yes"))
    data = made.scenario.client_data(0, 0, Path(made.save(tmp_path)))
    assert set(data.train.x[:, 1].tolist()) == {0.5}


def wrong(number: int, **columns: Any) -> Any:
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = IidPartitioner(num_partitions=number)
    partitioner.dataset = datasets.Dataset.from_dict(columns) if columns else pictures(8)
    return partitioner


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda: 3, {}, "give a FederatedDataset or a Partitioner of flwr-datasets, not int"),
        (
            lambda: wrong(2),
            {"x": "picture"},
            "client-0: there is no column 'picture'; there are image, label, camera",
        ),
        (lambda: wrong(2), {"x": ["image", "label"]}, "client-0: x: columns of a table must be numbers"),
        (lambda: wrong(1, image=[[1.0], [2.0, 3.0]], label=[0, 1]), {}, "client-0: image is no array"),
        (lambda: wrong(1, image=[1.0, 2.0], label=[0.5, 1.5]), {}, "client-0: y must be whole numbers or texts"),
        (lambda: wrong(1, image=[1.0, None], label=[0, 1]), {}, "client-0: image must be numbers or texts of one"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(make: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        from_partitions(make(), **{"x": "image", "y": "label", **options})
    assert sentence in str(raised.value)


def test_pictures_of_several_sizes_are_said() -> None:
    from flwr_datasets.partitioner import IidPartitioner

    partitioner = IidPartitioner(num_partitions=1)
    partitioner.dataset = datasets.concatenate_datasets([pictures(4), pictures(4, side=9)])
    with pytest.raises(UserError, match="client-0: pictures of 'image' are of several sizes, such as 8x8 and 9x9"):
        from_partitions(partitioner, x="image", y="label")

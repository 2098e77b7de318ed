"""A table with a column of pictures beside numbers and names: from describe to answers."""

import io
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import token_models
import torch
from PIL import Image
from typer.testing import CliRunner

import perennial
from perennial.common import plugins
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.utils.samples import group_of, unpacked
from perennial.server.cli.main import app

FEW: dict[str, Any] = {
    "model.name": "token_models:Both",
    "learning_rate": 0.3,
    "local_steps": 20,
    "evaluate_every": 3,
    "checkpoint_every": 3,
}


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def patients(seed: int, count: int = 50) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows with a name for the ward, and grey pictures; each says half of the class."""
    rng = np.random.default_rng(seed)
    bright, high = rng.integers(0, 2, count), rng.integers(0, 2, count)
    pixels = (rng.integers(0, 60, (count, 8, 8)) + 180 * bright[:, None, None]).astype(np.uint8)
    frame = pd.DataFrame(
        {
            "age": (rng.normal(size=count) + 4 * high).round(3),
            "ward": np.where(rng.random(count) < 0.5, "a", "b"),
            "label": np.array(["well", "watch", "ill"])[bright + high],
        }
    )
    return frame, pixels


def tables(folder: Path, kind: str) -> None:
    """For each of two sites, with the paths of the pictures, their bytes, or as Hugging Face writes them."""
    folder.mkdir()
    for seed, site in enumerate(("north", "south")):
        frame, pixels = patients(seed)
        files = [png(own) for own in pixels]
        if kind == "paths":
            frame["scan"] = [f"scans/{site}/{number}.png" for number in range(len(files))]
            (folder / "scans" / site).mkdir(parents=True)
            for name, file in zip(frame["scan"], files, strict=True):
                (folder / name).write_bytes(file)
            frame.to_csv(folder / f"{site}.csv", index=False)
        else:
            frame["scan"] = files if kind == "bytes" else [{"bytes": file, "path": None} for file in files]
            frame.to_parquet(folder / f"{site}.parquet")


def described(*arguments: Any) -> str:
    """What `describe` says. Raises where it does not end well."""
    told = CliRunner().invoke(app, ["describe", *map(str, arguments)])
    assert told.exit_code == 0, told.output
    return " ".join(told.output.split())


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.VARIABLE, token_models.__file__)


def test_paths_bytes_and_frames_are_the_same_data(tmp_path: Path) -> None:
    announced, runs = [], []
    for kind in ("paths", "bytes", "huggingface"):
        tables(tmp_path / kind, kind)
        config = tmp_path / f"{kind}.toml"
        described(tmp_path / kind, "--image-column", "scan", "-o", config)
        announced.append(tomllib.loads(config.read_text())["scenario"])
        options: dict[str, Any] = {"config": config, "data_root": tmp_path / kind}
        run = perennial.run("fedavg", **options, rounds=3, settings=FEW, out=tmp_path / f"run-{kind}")
        runs.append(run)
    frames = {}
    for seed, site in enumerate(("north", "south")):
        frame, pixels = patients(seed)
        frames[site] = frame.assign(scan=[png(own) for own in pixels])
    runs.append(
        perennial.run(
            "fedavg",
            perennial.from_frames(frames, image="scan"),
            rounds=3,
            settings=FEW,
            out=tmp_path / "run-frames",
        )
    )
    assert announced[0] == announced[1] == announced[2]
    assert announced[0]["image_shape"] == [1, 8, 8]
    every = np.concatenate([patients(seed)[1].ravel() for seed in (0, 1)]) / 255
    np.testing.assert_allclose(
        [announced[0]["mean"][0], announced[0]["scale"][0]], [every.mean(), every.std()], 1e-3
    )
    first, *others = [load_tensors(run.folder / "models" / "global.safetensors") for run in runs]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)

    new, pixels = patients(7)
    files = [png(own) for own in pixels]
    assert (runs[0].predict(new.assign(scan=files)) == new["label"]).mean() > 0.9
    (tmp_path / "new").mkdir()
    for number, file in enumerate(files):
        (tmp_path / "new" / f"{number}.png").write_bytes(file)
    paths = [str(tmp_path / "new" / f"{number}.png") for number in range(len(files))]
    chances = [runs[0].predict_proba(new.assign(scan=cells)) for cells in (files, paths)]
    np.testing.assert_array_equal(*chances)
    with pytest.raises(UserError, match=r"x: row 1, column 'scan': /nowhere/0.png cannot be read \(No such file"):
        runs[0].predict(new.assign(scan="/nowhere/0.png"))
    with pytest.raises(UserError, match="x has no column 'scan'; a model of this run takes"):
        runs[0].predict(new)


def test_a_sample_is_the_picture_and_the_prepared_row(tmp_path: Path) -> None:
    tables(tmp_path / "tables", "paths")
    kind = {"kind": "category", "categories": ["a", "b"]}
    scenario = OwnData(
        sites=("north", "south"),
        inputs=("age", "ward"),
        labels=("ill", "watch", "well"),
        columns={"age": {"kind": "number", "mean": 2, "scale": 4, "missing": False}, "ward": kind},
        image_column="scan",
        image_shape=(3, 16, 4),
        mean=(0.5, 0.5, 0.25),
        scale=(1, 2, 4),
        test_fraction=0,
        validation_fraction=0,
    )
    shape = group_of({"image": (3, 16, 4), "table": (4,)})
    assert scenario.input_shape == shape
    x = scenario.client_data(0, 0, tmp_path / "tables").train.x
    found = unpacked(x, shape)
    frame, pixels = patients(0)
    order = [int(torch.nonzero(found["table"][:, 0] == (age - 2) / 4)[0]) for age in frame["age"].astype("f4")]
    of_wards = torch.tensor([[ward == "a", ward == "b", False] for ward in frame["ward"]]).float()
    torch.testing.assert_close(found["table"][order][:, 1:], of_wards)
    small = [np.asarray(Image.fromarray(own).resize((4, 16), Image.Resampling.BILINEAR)) for own in pixels]
    grey = torch.from_numpy(np.stack(small)).float() / 255
    colours = torch.stack([grey - 0.5, (grey - 0.5) / 2, (grey - 0.25) / 4], dim=1)
    torch.testing.assert_close(found["image"][order], colours)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["../secret.png"] * 4, "row 1, column 'scan' is no path below the folder of the table"),
        (["/etc/hostname"] * 4, "row 1, column 'scan' is no path below the folder of the table"),
        (["a\0b.png"] * 4, "row 1, column 'scan' is no path below the folder of the table"),
        (["link.png"] * 4, "row 1, column 'scan' is no path below the folder of the table"),
        (["good.png", "gone.png", "good.png", "good.png"], "row 2, column 'scan': the picture cannot be read"),
        (["good.png", "text.png", "good.png", "good.png"], "row 2, column 'scan': the picture cannot be read"),
        (["good.png", None, "good.png", "good.png"], "row 2, column 'scan' is empty"),
        ([1.5, 2.5, 3.5, 4.5], "column 'scan' has neither paths of pictures nor their bytes"),
        (None, "has no column 'scan' of pictures"),
    ],
)
def test_what_is_wrong_with_a_column_of_pictures(cells: list[Any] | None, words: str, tmp_path: Path) -> None:
    """In one sentence, at `describe` and at a site, that tells a server nothing of other files."""
    folder = tmp_path / "tables"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(png(np.zeros((8, 8), np.uint8)))
    (folder / "good.png").write_bytes(png(np.zeros((8, 8), np.uint8)))
    (folder / "text.png").write_text("no picture")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    frame = pd.DataFrame({"age": range(4), "label": ["ill", "well"] * 2})
    (frame if cells is None else frame.assign(scan=cells)).to_parquet(folder / "own.parquet")
    told = CliRunner().invoke(
        app, ["describe", str(folder / "own.parquet"), "--image-column", "scan", "--at-least", "1"]
    )
    assert told.exit_code == 2
    assert words in " ".join(told.output.split())
    scenario = OwnData(
        sites=("own",), inputs=("age",), labels=("ill", "well"), image_column="scan", image_shape=(1, 8, 8)
    )
    with pytest.raises(UserError) as caught:
        scenario.client_data(0, 0, folder)
    assert words in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_site_does_not_tell_a_server_which_of_its_files_are_there(tmp_path: Path) -> None:
    """A picture that is not there, and a file that is no picture, are one sentence to the server."""
    (tmp_path / "notes.txt").write_text("no picture")
    scenario = OwnData(
        sites=("own",), inputs=("age",), labels=("ill", "well"), image_column="scan", image_shape=(1, 8, 8)
    )
    told = []
    for cell in ("notes.txt", "gone.txt"):
        pd.DataFrame({"age": [1, 2], "label": ["ill", "well"], "scan": cell}).to_csv(tmp_path / "own.csv")
        with pytest.raises(UserError) as caught:
            scenario.client_data(0, 0, tmp_path)
        told.append(caught.value.told)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_column": "scan"}, "with image_column it is channels (1 or 3), height and width"),
        ({"image_column": "scan", "image_shape": (2, 8, 8)}, "with image_column it is channels (1 or 3)"),
        ({"image_shape": (1, 8, 8)}, "it is for pictures of image_column; name that, too, or leave it out"),
        (
            {"image_column": "scan", "image_shape": (1, 8, 8), "inputs": (4,)},
            "with it, inputs are names of the table's other columns",
        ),
        (
            {"image_column": "scan", "image_shape": (3, 8, 8), "mean": (0.5,)},
            "there must be one for each of 3 features or channels, or none",
        ),
    ],
)
def test_an_announcement_that_does_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"image_|mean") as caught:
        OwnData(**{"inputs": ("age",), "labels": ("ill", "well"), **options})
    assert words in str(caught.value)


def test_what_does_not_go_with_a_column_of_pictures(tmp_path: Path) -> None:
    tables(tmp_path / "tables", "bytes")
    both = CliRunner().invoke(
        app, ["describe", str(tmp_path / "tables"), "--image-column", "scan", "--text-column", "note"]
    )
    assert both.exit_code == 2
    assert "--image-column is not possible with --text-column" in " ".join(both.output.split())
    unsaid = CliRunner().invoke(app, ["describe", str(tmp_path / "tables")])
    assert unsaid.exit_code == 2
    assert "neither text nor numbers; bytes of pictures are for describe with --image-column" in " ".join(
        unsaid.output.split()
    )
    no_table = CliRunner().invoke(app, ["describe", str(Path(__file__)), "--image-column", "scan"])
    assert no_table.exit_code == 2
    assert "--image-column is for tables, and test_picture_columns.py is none" in " ".join(no_table.output.split())
    frame, _ = patients(0)
    with pytest.raises(UserError, match="a has no column 'scan' of pictures; it has age, ward, label"):
        perennial.from_frames({"a": frame}, image="scan")
    with pytest.raises(UserError, match="image: 'scan' is not possible beside text"):
        perennial.from_frames({"a": frame}, image="scan", text="ward")

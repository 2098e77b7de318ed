"""Texts: a column of a table, tokens by a file that is announced or by hashing."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import perennial
from perennial.common.config import load_config
from perennial.common.data.scenarios.texts import PLANTED, TELLING, PlantedWord
from perennial.common.data.texts import WORDS, text_ids
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import PAD
from perennial.server.cli.main import app

FEW = {"local_steps": 20, "learning_rate": 1.0, "batch_size": 16, "evaluate_every": 3, "checkpoint_every": 3}


def notes(folder: Path, ending: str = ".csv", count: int = 60) -> None:
    """A table of texts for each of two sites."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for site in ("north", "south"):
        ill = rng.integers(0, 2, count)
        said = [
            f"Patient {n} is {'feverish, coughs' if no else 'well; no complaint'}." for n, no in enumerate(ill)
        ]
        frame = pd.DataFrame({"note": said, "label": np.where(ill, "ill", "well"), "number": range(count)})
        frame.to_csv(folder / f"{site}.csv", index=False) if ending == ".csv" else frame.to_parquet(
            folder / f"{site}.parquet"
        )


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_column_of_texts_from_describe_to_answers(ending: str, tmp_path: Path) -> None:
    notes(tmp_path / "tables", ending)
    told = CliRunner().invoke(
        app,
        [
            "describe",
            str(tmp_path / "tables"),
            "--text-column",
            "note",
            "--length",
            "12",
            "-o",
            str(tmp_path / "run.toml"),
        ],
    )
    assert told.exit_code == 0, told.output
    announced = tomllib.loads((tmp_path / "run.toml").read_text())["scenario"]
    assert announced["text_column"] == "note"
    assert announced["vocabulary"] == 2**14
    assert "fever" not in (tmp_path / "run.toml").read_text(), "a vocabulary is never collected"
    result = perennial.run(
        "fedavg",
        config=tmp_path / "run.toml",
        data_root=tmp_path / "tables",
        rounds=3,
        settings=FEW,
        out=tmp_path / "run",
    )
    new = ["Patient 99 is feverish, coughs.", "Patient 98 is well; no complaint."]
    assert result.predict(new).tolist() == ["ill", "well"]
    assert result.predict(pd.DataFrame({"note": new})).tolist() == ["ill", "well"]
    with pytest.raises(UserError, match=r"x must be texts, none of them empty"):
        result.predict([""])


def test_hashed_words() -> None:
    ids = text_ids(["A b, a", "", "one two three four"], 3, 1000)
    assert ids.shape == (3, 3)
    assert ids[0, 0] != ids[0, 1]
    assert WORDS.findall("a b, a!") == ["a", "b", ",", "a", "!"]
    assert text_ids(["a"], 3, 1000)[0].tolist() == [ids[0, 0], PAD, PAD]
    assert ids[1].tolist() == [0, PAD, PAD]
    assert torch.equal(ids, text_ids(["a B, A", "  ", "One two THREE"], 3, 1000))


def tokenizer(path: Path, words: str = "patient is well feverish") -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words.split()])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.save(str(path))
    return path


def test_a_tokenizers_file_is_announced_and_no_other_is_taken(tmp_path: Path) -> None:
    notes(tmp_path / "tables")
    file = tokenizer(tmp_path / "tokenizer.json")
    arguments = ["--text-column", "note", "--tokenizer", str(file), "-o", str(tmp_path / "run.toml")]
    told = CliRunner().invoke(app, ["describe", str(tmp_path / "tables"), *arguments])
    assert told.exit_code == 0, told.output
    scenario: Any = load_config(tmp_path / "run.toml", {"method": "fedavg"}).scenario
    assert scenario.vocabulary == 5
    assert scenario.ids(["Patient is well zzz"])[0, :5].tolist() == [1, 2, 3, 0, PAD]
    assert len(scenario.client_data(0, 0, tmp_path / "tables").train)
    tokenizer(file, "another list of words")
    from perennial.common.data import texts

    texts._loaded.cache_clear()
    with pytest.raises(UserError, match=r"tokenizer.json is another file than that of the run \(SHA-256") as other:
        scenario.client_data(0, 0, tmp_path / "tables")
    file.unlink()
    with pytest.raises(UserError, match="cannot be read") as gone:
        scenario.client_data(0, 0, tmp_path / "tables")
    assert other.value.told == gone.value.told, "a server could find out what files a site has"
    file.write_text("{}")
    wrong = CliRunner().invoke(app, ["describe", str(tmp_path / "tables"), *arguments])
    assert wrong.exit_code == 2
    assert "is no file of Hugging Face's tokenizers" in " ".join(wrong.output.split())


def test_the_planted_word_is_right_as_often_as_announced() -> None:
    scenario = PlantedWord(train_samples=4000, test_samples=4000, clients=2)
    data = scenario.client_data(0, 0, None)
    planted = {name: (part.x == 2 * TELLING + 1).any(dim=1) for name, part in data.test.items()}
    for name, part in data.test.items():
        assert ((part.x >= 2 * TELLING) & (part.x < 2 * TELLING + PLANTED)).sum(dim=1).eq(1).all()
        agreement = (planted[name] == part.y.bool()).double().mean()
        assert abs(agreement - float(name.removeprefix("p="))) < 0.03
        ones = ((part.x >= TELLING) & (part.x < 2 * TELLING)).sum(dim=1)
        assert ((part.x >= 0) & (part.x < 2 * TELLING)).sum(dim=1).eq(3).all()
        assert abs(((ones >= 2) == part.y.bool()).double().mean() - 0.84375) < 0.03
        lengths = (part.x != PAD).sum(dim=1)
        assert (lengths.min(), lengths.max()) == (6, 12)
        assert ((part.x == PAD).int().diff(dim=1) >= 0).all(), "what is behind the end is at the end"
    one, other = (scenario.model_copy(update={"oracle": no}).client_data(0, 0, None).train for no in (True, False))
    assert not ((one.x >= 2 * TELLING) & (one.x < 2 * TELLING + PLANTED)).any()
    assert torch.equal(one.y, other.y)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["scenario.text_column=note"], "texts need vocabulary, padded = true"),
        (["scenario.padded=true"], "it is for sequences of ids"),
        (
            ["scenario.inputs=[5]", "scenario.vocabulary=9", "scenario.tokenizer=a.json"],
            "it needs text_column and",
        ),
    ],
)
def test_settings_of_texts_that_do_not_fit(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_config(options={"method": "fedavg", "scenario": "own-data"}, settings=settings)

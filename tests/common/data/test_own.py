"""Sites' own data: every format read, every fault one sentence, the same split wherever and in whatever order."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import csv, parquet
from pydantic import ValidationError

from perennial.common.config import load_config, parse_task
from perennial.common.data.columns import CategoryColumn, NumberColumn
from perennial.common.data.dialect import Dialect
from perennial.common.data.examples import ClientData, join
from perennial.common.data.raw_data import opened, resized
from perennial.common.data.scenarios.own_data import OwnData
from perennial.common.data.site_files import Found, place_of, read
from perennial.common.data.tables import EMPTY, number_cells, text_cells
from perennial.common.utils.errors import UserError

TABLE = "age,label,bmi\n30,ill,20.5\n 40 ,well,21\n50,ill,1e1\n"


def write(path: Path, text: str = TABLE) -> Path:
    path.write_text(text)
    return path


def pictures(folder: Path, *files: str, size: tuple[int, int] = (4, 2)) -> Path:
    """Pictures of one colour each, the first one black."""
    for number, file in enumerate(files):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (51 * number, 0, 0)).save(path)
    return folder


def tensor(found: Found, *columns: str) -> list[Any]:
    rows: list[Any] = found.tensor((len(columns),), columns).tolist()
    return rows


# ---------------------------------------------------------------------- formats


def test_a_csv_table(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a b.csv"))
    assert (found.name, found.columns, found.labels, found.environments) == (
        "a b.csv", ("age", "bmi"), ["ill", "well", "ill"], None,
    )  # fmt: skip
    assert tensor(found, "bmi", "age") == [[20.5, 30], [21, 40], [10, 50]]


def test_a_parquet_table_is_the_same_as_a_csv_table(tmp_path: Path) -> None:
    columns = {"age": [30, 40, 50], "label": [1, 0, 1], "ward": ["x", "y", "x"], "old": [False, False, True]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    text = "age,label,ward,old\n30,1,x,0\n40,0,y,0\n50,1,x,1\n"
    one, other = (
        read(path, environment="ward") for path in (tmp_path / "a.parquet", write(tmp_path / "a.csv", text))
    )
    assert one.labels == other.labels == ["1", "0", "1"]
    assert one.environments == other.environments == ["x", "y", "x"]
    assert tensor(one, "age", "old") == tensor(other, "age", "old") == [[30, 0], [40, 0], [50, 1]]


@pytest.mark.parametrize(
    "written",
    [
        lambda cells: pa.array(cells, pa.large_string()),
        lambda cells: pa.array(cells, pa.string_view()),
        lambda cells: pa.array(cells).dictionary_encode(),
        lambda cells: pa.array(cells, pa.large_string()).dictionary_encode(),
    ],
    ids=["large", "view", "dictionary", "large dictionary"],
)
def test_text_is_the_same_however_parquet_has_it(written: Callable[[list[str]], pa.Array], tmp_path: Path) -> None:
    columns = {"age": [" 30", "40 ", "5e1"], "label": ["a ", " b", "a"], "sex": ["?", " f", "m"]}
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({name: written(cells) for name, cells in columns.items()}), path)
    found = read(path)
    assert found.labels == ["a", "b", "a"]
    assert number_cells(found.x, "age", path.name).tolist() == [30, 40, 50]
    assert text_cells(found.x, "sex", path.name) == ["", "f", "m"]
    parquet.write_table(pa.table({"age": written(["1", " "]), "label": written(["a", "b"])}), path)
    with pytest.raises(UserError, match="row 2, column 'age' is empty"):
        tensor(read(path), "age")


def test_arrays(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 0, 1]), environment=np.array(["u", "v", "v", "u"]))
    found = read(tmp_path / "a.npz")
    assert found.labels == ["0", "1", "0", "1"]
    assert found.environments == ["u", "v", "v", "u"]
    assert torch.equal(found.tensor((2, 3)), torch.from_numpy(x).float())


def test_bytes_in_arrays_are_pixels(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((1, 1, 2, 2), 51, np.uint8), y=["a"])
    assert read(tmp_path / "a.npz").tensor((1, 2, 2)).unique().tolist() == [pytest.approx(0.2)]


def test_a_folder_of_pictures_in_colour_and_grey_of_another_size(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "p", "cat/1.png", "dog/b.JPG", "dog/a.png")
    (folder / "dog" / "notes.txt").write_text("not a picture")
    (folder / ".cache").mkdir()
    found = read(folder)
    assert (found.labels, found.environments) == (["cat", "dog", "dog"], None)
    x = found.tensor((3, 3, 5))
    assert x.shape == (3, 3, 3, 5)
    assert x[1, 0].unique().tolist() == [pytest.approx(0.4)]  # dog/a.png, the third of the six shades
    assert not x[:, 1:].any() or x[2, 1:].max() < 0.1  # JPEG is not exact
    assert found.tensor((1, 2, 4)).shape == (3, 1, 2, 4)


def test_a_folder_of_environments(tmp_path: Path) -> None:
    found = read(pictures(tmp_path / "p", "day/cat/1.png", "day/dog/1.png", "night/cat/1.png"))
    assert (found.labels, found.environments) == (["cat", "dog", "cat"], ["day", "day", "night"])


def test_where_a_sites_data_are_in_a_folder_of_several(tmp_path: Path) -> None:
    write(tmp_path / "a.csv")
    (tmp_path / "b").mkdir()
    assert [place_of(tmp_path, site).name for site in "ab"] == ["a.csv", "b"]
    with pytest.raises(UserError, match=r"data of site 'c' in one of c\.csv, c\.parquet, c\.npz, c; it has none"):
        place_of(tmp_path, "c")
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"it has a\.csv and a$"):
        place_of(tmp_path, "a")


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "age,bmi\n1,2\n",
            "s.csv has no column 'label' for the label; it has age, bmi; rename one, or say which it is (label_c",
        ),
        (
            "age;label\n1,5;a\n",
            "s.csv: columns are separated by ';'; say --separator \";\" with `describe` and `join`, and wh",
        ),
        ("age\tlabel\n1\ta\n", "s.csv: columns are separated by tabs; say --separator tab with"),
        (
            "age,label\n1,5,a\n",
            "s.csv: row 1 has 3 cells, but there are 2 columns; write numbers with a point",
        ),
        ('age,label\n"7,5",a\n8,b\n', "s.csv: column 'age' has numbers with a comma; write 3.5 for 3,5, and 1234"),
        ('age,label\n"7,5",a\nsecret,b\n', "s.csv: row 1, column 'age' is no number; write 3.5 for 3,5, and"),
        ("age;size, m;label\n1;2;a\n", "s.csv: columns are separated by ';'; say --separator"),
        ("age,label\n1,a\nsecret,b\n", "s.csv: row 2, column 'age' is no number; every column but those of"),
        ("age,label\n1,a\n,b\n", "s.csv: row 2, column 'age' is empty"),
        ("age,label\n1,a\nNA,b\n", "s.csv: row 2, column 'age' is empty"),
        ("age,label\n1,a\n2,\n", "s.csv: row 2, column 'label' is empty"),
        ("age,label\n1,a\n2,  \n", "s.csv: row 2, column 'label' is empty"),
        ("age,label\n1,a\n1e300,b\n", "s.csv: row 2, column 'age' is no finite number"),
        ("age,label\n1,a\ninf,b\n", "s.csv: row 2, column 'age' is no finite number"),
        ("age,label\n", "s.csv has no rows"),
        ("", "s.csv cannot be read (Empty CSV file"),
        ("age,label\n1,a\nsecret\n", "s.csv: row 2 has 1 cells, but there are 2 columns"),
        ("age,age,label\n1,1,a\n", "s.csv has more than one column 'age'"),
        ("label\na\n", "s.csv has no columns of features, only label"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        tensor(read(write(tmp_path / "s.csv", text)), "age")
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)  # the sentence also goes to the server
    assert str(tmp_path) not in str(error.value)


def test_a_parquet_column_of_dates_is_no_number(tmp_path: Path) -> None:
    dates = pa.array([None, 1], pa.timestamp("s"))
    parquet.write_table(pa.table({"x": dates[1:], "label": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 1, column 'x' is no number"):
        tensor(read(tmp_path / "a.parquet"), "x")
    parquet.write_table(pa.table({"x": [1.0], "label": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"column 'label' has neither text nor numbers"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"y": [1]}, "s.npz has no array 'x'"),
        ({"x": [[1.0]]}, "s.npz has no array 'y'"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "s.npz has no rows"),
        ({"x": [[1.0], [2.0]], "y": [1]}, "s.npz: x must be numbers, 1 rows as in y; it is float64 of size 2x1"),
        ({"x": [["a"]], "y": [1]}, "s.npz: x must be numbers, 1 rows as in y; it is <U1 of size 1x1"),
        ({"x": [[1.0], [np.nan]], "y": [1, 2]}, "s.npz: row 2 of x has what is no finite number"),
        ({"x": [[1.0]], "y": [0.5]}, "s.npz: y must be 1 whole numbers or texts; it is float64 of size 1"),
        ({"x": [[1.0]], "y": [1], "environment": [1, 2]}, "s.npz: environment must be 1 whole numbers or texts"),
        ({"x": np.array([[{}]], object), "y": [1]}, "s.npz cannot be read (Object arrays cannot be loaded"),
    ],
)
def test_what_is_wrong_with_arrays_is_one_sentence(arrays: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(UserError) as error:
        read(tmp_path / "s.npz")
    assert str(error.value).startswith(sentence)


@pytest.mark.slow
def test_arrays_with_any_damaged_byte_are_read_or_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    np.savez_compressed(path, x=np.arange(12, dtype=np.float32).reshape(6, 2), y=np.arange(6) % 2)
    whole, refused = path.read_bytes(), list[str]()
    for place in range(len(whole)):
        for flip in (1, 8, 255):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                read(path)
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > len(whole)
    assert all(sentence.startswith("s.npz") for sentence in refused)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^there is no none\.csv$"):
        read(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"a\.xlsx is no folder of pictures and no \.csv, \.parquet or \.npz file"):
        read(write(tmp_path / "a.xlsx"))
    for name, sentence in (("a.npz", "is no .npz file; numpy.savez writes one"), ("a.parquet", "cannot be read")):
        with pytest.raises(UserError, match=f"^{name} {sentence}"):
            read(write(tmp_path / name))
    for text in (b"age,label\xff\n1,a\n", b"age,label\n1,\xff\n", "age,label\n1,a\n".encode("utf-16")):
        (tmp_path / "b.csv").write_bytes(text)
        with pytest.raises(
            UserError, match=r"^b\.csv is not UTF-8; say which it is, such as --encoding latin-1 with "
        ):
            read(tmp_path / "b.csv")


WRITTEN = {
    "semicolons": ("größe;station;label\n7,5;Köln;a\n-,25;Bonn;b\n1e3;;a\n", Dialect(";", ",")),
    "latin-1": ("größe;station;label\n7,5;Köln;a\n-,25;Bonn;b\n1e3;;a\n", Dialect(";", ",", "latin-1")),
    "utf-16": ("größe\tstation\tlabel\n7.5\tKöln\ta\n-.25\tBonn\tb\n1e3\t\ta\n", Dialect("tab", "", "utf-16")),
    "tabs": ("größe\tstation\tlabel\n7,5\tKöln\ta\n-,25\tBonn\tb\n1e3\t\ta\n", Dialect("\t", ",")),
    "commas in quotes": ('größe,station,label\n"7,5",Köln,a\n"-,25",Bonn,b\n1e3,,a\n', Dialect("", ",")),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_table_in_another_dialect_is_the_same_table(written: str, tmp_path: Path) -> None:
    text, dialect = WRITTEN[written]
    (tmp_path / "s.csv").write_bytes(text.encode(dialect.encoding or "utf-8"))
    found = read(tmp_path / "s.csv", dialect=dialect)
    assert (list(found.labels), found.columns) == (["a", "b", "a"], ("größe", "station"))
    assert number_cells(found.x, "größe", "s.csv").tolist() == [7.5, -0.25, 1000.0]
    assert text_cells(found.x, "station", "s.csv") == ["Köln", "Bonn", ""]


@pytest.mark.parametrize(
    ("text", "dialect", "sentence"),
    [
        (
            "x;label\n3,5;a\n1.234,5;b\n",
            Dialect(";", ","),
            "s.csv: row 2, column 'x' has a number with a point; with",
        ),
        ("x;label\n1.234;a\n", Dialect(";", ","), "s.csv: row 1, column 'x' has a number with a point"),
        ("x,label\n3.5,a\n", Dialect(";"), "s.csv: columns are separated by ','; say --separator \",\""),
        (
            "x;label\n3,5;a\n",
            Dialect(";"),
            "s.csv: column 'x' has numbers with a comma; write 3.5 for 3,5, and 1234 for",
        ),
        ("x,label\n3,a\n", Dialect("", "", "utf-16"), "s.csv is not UTF-16; say which it is, such as --encoding"),
    ],
)
def test_what_is_in_another_dialect_than_said(text: str, dialect: Dialect, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        tensor(read(write(tmp_path / "s.csv", text), dialect=dialect), "x")
    assert str(error.value).startswith(sentence)


def test_dates_and_names_keep_their_points_and_commas(tmp_path: Path) -> None:
    found = read(
        write(tmp_path / "s.csv", "day;unit;label\n01.02.2020;1,5 mg;a\n02.02.2020;2;b\n"),
        dialect=Dialect(";", ","),
    )
    assert text_cells(found.x, "day", "s.csv") == ["01.02.2020", "02.02.2020"]
    assert text_cells(found.x, "unit", "s.csv") == ["1,5 mg", "2"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (("::",), "separator: '::' is not possible; say ';', '|', tab or ','"),
        ((";", "'"), "decimal: \"'\" is not possible; say ',' or '.'"),
        ((";", ",", "nope"), "encoding: 'nope' is none that Python knows; say latin-1, cp1252 or another"),
        ((";", ",", "hex"), "encoding: 'hex' is none that Python knows; say latin-1, cp1252 or another"),
    ],
)
def test_a_dialect_that_is_not_possible(said: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Dialect(*said)
    assert str(error.value) == sentence
    names = dict(zip(("separator", "decimal", "encoding"), said, strict=False))
    with pytest.raises(UserError) as error:
        load_config(
            options={"method": "fedavg", "scenario": "own-data"},
            settings=[f'scenario.{key}="{own}"' for key, own in names.items()],
        )
    assert sentence in str(error.value)


@pytest.mark.parametrize("sign", EMPTY)
def test_the_signs_of_an_empty_cell_are_the_same_in_both_kinds_of_tables(sign: str, tmp_path: Path) -> None:
    table = pa.table({"city": ["x", sign, "y"], "label": ["a", "b", "a"]})
    parquet.write_table(table, tmp_path / "s.parquet")
    csv.write_csv(table, tmp_path / "s.csv")
    for name in ("s.csv", "s.parquet"):
        found = read(tmp_path / name)
        assert text_cells(found.x, "city", name) == ["x", "", "y"]
        with pytest.raises(UserError, match=rf"{name}: row 2, column 'city' is empty"):
            found.tensor((1,), ("city",))


@pytest.mark.parametrize("fill", [None, 0.0])
def test_a_number_has_the_digits_that_a_served_model_is_sent(fill: float | None, tmp_path: Path) -> None:
    """2,460,000.4 is one of them; whether empty cells are allowed makes no difference."""
    found = read(write(tmp_path / "s.csv", "day,label\n2460000.4,a\n"))
    column = NumberColumn(mean=2460000, scale=0.1, fill=fill)
    served = column.features(np.array([2460000.4], dtype=np.float32).astype(np.float64))
    assert found.tensor((1,), ("day",), {"day": column}).tolist() == served.tolist() == [[5.0]]


@pytest.mark.parametrize(
    ("files", "empty", "sentence"),
    [
        ((), "", "p has neither tables (.csv, .parquet), one of each site, nor folders of pictures, one of"),
        (("cat/1.png",), "dog", "p: dog has no pictures (.bmp, "),
        (("day/cat/1.png",), "day/dog", "p: day/dog has no pictures"),
        (("day/cat/1.png", "dog/1.png"), "", "p: day has folders and dog has none; all must be alike"),
        (
            ("cat/1.png", "2.png", ".hidden.png"),
            "",
            "p: 2.png is in no folder of a class; move it into one, or away",
        ),
    ],
)
def test_folders_that_are_no_classes(files: tuple[str, ...], empty: str, sentence: str, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "p", *files)
    (folder / empty).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError) as error:
        read(folder)
    assert str(error.value).startswith(sentence)


def test_tables_in_a_folder_below_are_pointed_at(tmp_path: Path) -> None:
    (tmp_path / "p" / "sub").mkdir(parents=True)
    write(tmp_path / "p" / "sub" / "north.csv", "x,label\n1,a\n")
    with pytest.raises(UserError, match=r"p: sub has no pictures \(.*; its tables are data, too, if you name the"):
        read(tmp_path / "p")


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "p", "cat/1.png")
    write(folder / "cat" / "2.png")
    with pytest.raises(UserError, match=r"picture .*2\.png cannot be read"):
        read(folder).tensor((3, 4, 4))


def test_whatever_the_reader_of_pictures_raises_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "TIFF")
    begins, text = struct.pack("<HH", 273, 4), struct.pack("<HH", 273, 2)  # where the pixels are; a number, a text
    assert file.getvalue().count(begins) == 1

    def read_it(content: bytes) -> None:
        with opened(io.BytesIO(content)) as found:
            resized(found, (3, 4, 4))

    with pytest.raises(ValueError, match="cannot be interpreted as an integer"):  # PIL's is a TypeError
        read_it(file.getvalue().replace(begins, text))

    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", full)
    with pytest.raises(MemoryError):  # which says nothing of the picture
        read_it(file.getvalue())


# ---------------------------------------------------------------------- what the server announces


def announced(**settings: Any) -> OwnData:
    return OwnData(**{"sites": ("a", "b"), "inputs": ("age", "bmi"), "labels": ("well", "ill"), **settings})


def divided(scenario: OwnData, path: Path, site: str = "a", seed: int = 0) -> ClientData:
    return scenario.divided(site, seed, read(path, scenario.label_column, scenario.environment_column))


@pytest.mark.parametrize(
    ("settings", "text", "sentence"),
    [
        ({"inputs": ("age", "bmi", "sex")}, TABLE, "s.csv lacks column 'sex', which the server announces"),
        ({"inputs": ("age",)}, TABLE, "s.csv has column 'bmi', which the server does not announce"),
        ({"inputs": (2,)}, TABLE, "s.csv is a table, but the server announces no columns"),
        (
            {"labels": ("x", "ill")},
            TABLE,
            "s.csv: row 2 is of no class that the server announces (x, ill); correct column 'label', take these "
            "rows out, or describe again with a smaller --at-least",
        ),
        ({"label_column": "died"}, TABLE, "s.csv has no column 'died' for the label; it has age, label, bmi"),
        ({"environment_column": "ward"}, TABLE, "s.csv has no column 'ward' for the environment; it has"),
        (
            {"environment_column": "ward", "environments": ("x",)},
            "age,bmi,label,ward\n1,2,ill,x\n1,2,ill,y\n",
            "s.csv: row 2 is of no environment that the server announces (x); correct column 'ward', take these",
        ),
        (
            {"environments": ("x", "y")},
            TABLE,
            "s.csv does not say of which environment its samples are; the server announces x, y",
        ),
    ],
)
def test_data_that_the_server_does_not_announce(
    settings: dict[str, Any], text: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        divided(announced(**settings), write(tmp_path / "s.csv", text))
    assert str(error.value).startswith(sentence)


def test_shapes_that_the_server_does_not_announce(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 3)), y=["ill"])
    with pytest.raises(UserError, match=r"samples in a\.npz are of size 3, but the server announces size 2$"):
        divided(announced(inputs=(2,)), tmp_path / "a.npz")
    folder = pictures(tmp_path / "p", "ill/1.png")
    with pytest.raises(UserError, match=r"p has pictures, but the server announces samples of size 2"):
        divided(announced(), folder)
    with pytest.raises(
        UserError, match=r"p: folder ill is of no class that the server announces \(cat, dog\)"
    ) as error:
        divided(announced(inputs=(3, 4, 4), labels=("cat", "dog")), folder)
    assert error.value.told == "p: a sample is of no class that the server announces (cat, dog)"


def many(path: Path, count: int = 100, wards: str = "xy") -> Path:
    """A table whose ages are 0, 1, …; every second row is of the second ward."""
    rows = [f"{n},{wards[n % len(wards)]},{('ill', 'well')[n % 3 == 0]}" for n in range(count)]
    return write(path, "\n".join(["age,ward,label", *rows]) + "\n")


WARDS: dict[str, Any] = {"inputs": ("age",), "environments": ("x", "y"), "environment_column": "ward"}


def test_each_environment_is_divided_and_every_sample_is_used_once(tmp_path: Path) -> None:
    data = divided(announced(**WARDS), many(tmp_path / "s.csv"))
    assert (len(data.train), len(data.validation)) == (70, 10)
    assert {name: len(part) for name, part in data.test.items()} == {"x": 10, "y": 10}
    for part in (data.train, data.validation):
        assert torch.equal(part.x[:, 0] % 2, part.environment.float())
    for number, part in enumerate(data.test.values()):
        assert set(part.x[:, 0].long().remainder(2).tolist()) == {number}
        assert set(part.environment.tolist()) == {-1}
    every = join([data.train, data.validation, *data.test.values()])
    assert sorted(every.x[:, 0].tolist()) == list(range(100))
    assert torch.equal(every.y, (every.x[:, 0] % 3 != 0).long())


def test_the_split_is_keyed_by_seed_site_and_environment(tmp_path: Path) -> None:
    path, scenario = many(tmp_path / "s.csv"), announced(**WARDS)
    one = divided(scenario, path)
    assert torch.equal(one.train.x, divided(scenario, path).train.x)
    for other in (divided(scenario, path, seed=1), divided(scenario, path, site="b")):
        assert not torch.equal(one.train.x, other.train.x)
    # The same rows of one environment are divided alike whatever is in the other.
    assert torch.equal(divided(scenario, many(path, wards="xy", count=99)).test["x"].x, one.test["x"].x)


def test_a_site_that_lacks_an_environment_or_has_few_samples(tmp_path: Path) -> None:
    data = divided(announced(**WARDS), many(tmp_path / "s.csv", count=4, wards="x"))
    assert {name: len(part) for name, part in data.test.items()} == {"x": 1}
    assert (len(data.train), len(data.validation)) == (3, 0)


def test_without_a_word_on_environments_it_is_the_only_one_or_the_sites_own(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv")
    assert set(divided(announced(), path).train.environment.tolist()) == {0}
    assert set(divided(announced(environments=("a", "b")), path, site="b").train.environment.tolist()) == {1}


def test_features_and_channels_are_normalised_as_announced(tmp_path: Path) -> None:
    scenario = announced(mean=(40, 0), scale=(10, 2), test_fraction=0, validation_fraction=0)
    x = divided(scenario, write(tmp_path / "s.csv")).train.x
    assert sorted(x.tolist()) == [[-1, 10.25], [0, 10.5], [1, 5]]
    colour = announced(inputs=(3, 2, 2), mean=(0, 0.5, 1), scale=(1, 2, 4))
    assert colour.prepare(torch.ones(1, 3, 2, 2))[0, :, 0, 0].tolist() == [1, 0.25, 0]


def test_the_order_of_a_folder_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures(tmp_path / "p", *(f"{name}/{n}.png" for name in ("ill", "well") for n in range(5)))
    scenario, list_ = announced(inputs=(3, 4, 4)), Path.iterdir
    before = divided(scenario, folder)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(list_(path), reverse=True)))
    after = divided(scenario, folder)
    assert torch.equal(before.train.x, after.train.x)
    assert torch.equal(before.test["own"].y, after.test["own"].y)


# ---------------------------------------------------------------------- the scenario itself


def test_clients_are_the_sites_in_their_order() -> None:
    scenario = announced(sites=("north", "east", "west"))
    assert (scenario.clients, scenario.client_ids) == (3, ("east", "north", "west"))
    assert scenario.class_names == ("well", "ill")
    assert announced(inputs=(3, 32, 32)).model["name"] == "cnn-small"


def test_the_announcement_survives_a_run_folder_and_the_way_to_a_site(tmp_path: Path) -> None:
    scenario = announced(mean=(1.5, 2), scale=(1, 2), environments=("x", "y")).model_dump(mode="json")
    config = load_config(options={"scenario": scenario, "method": "fedavg"})
    write(tmp_path / "config.toml", config.toml())
    assert load_config(tmp_path / "config.toml") == config
    assert parse_task(config.task()).scenario == config.scenario
    assert "\nclients" not in config.toml()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"sites": ()}, "sites"),
        ({"sites": ("a", "a")}, "a name is there twice"),
        ({"sites": ("a/b",)}, "'a/b' is no name of"),
        ({"sites": ("..",)}, "is no name of"),
        ({"sites": ("süd",)}, r"'süd' is no name of a site; take letters \(a to z, A to Z\), digits"),
        ({"labels": ("a",)}, "labels"),
        ({"labels": ("a", "a")}, "a name is there twice"),
        ({"inputs": ("x", "x")}, "a name is there twice"),
        ({"inputs": (0, 2)}, "inputs"),
        ({"mean": (1.0,)}, "one for each of 2 features or channels"),
        ({"inputs": (3, 8, 8), "scale": (1.0, 1.0)}, "one for each of 3 features or channels"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"mean": (float("nan"), 1.0)}, "mean"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "0.6 is not possible with validation_fraction = 0.4"),
        (
            {"test_fraction": 0.99},
            r"test_fraction: 0\.99 is not possible with validation_fraction = 0\.1; together",
        ),
    ],
)
def test_a_setting_out_of_bounds_is_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        announced(**settings)


def test_the_number_of_clients_cannot_be_set() -> None:
    with pytest.raises(UserError, match=r"follows from the names in scenario\.sites"):
        load_config(options={"scenario": "own-data"}, settings=["scenario.clients=3"])


def test_in_one_process_there_must_be_a_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERENNIAL_DATA", raising=False)
    with pytest.raises(UserError, match=r"own-data is for sites that join .*perennial join.*such as a\.csv"):
        announced().client_data(0, 0, None)
    write(tmp_path / "b.csv")
    found = announced().client_data(1, 3, tmp_path)
    assert torch.equal(found.train.x, divided(announced(), tmp_path / "b.csv", "b", 3).train.x)
    with pytest.raises(UserError, match="data of site 'a'"):
        announced().client_data(0, 0, tmp_path)


# ---------------------------------------------------------------------- tables that people have


def test_cells_with_line_breaks_in_a_large_file(tmp_path: Path) -> None:
    """PyArrow reads a file in pieces of 1 MB, at whose ends a cell may be."""
    rows = "".join(f'{n % 50},{n % 2},"seen\n1,2,3"\n' for n in range(60_000))
    found = read(write(tmp_path / "a.csv", f"age,label,note\n{rows}"))
    assert len(found.labels) == 60_000
    assert set(found.labels) == {"0", "1"}


def test_truth_values_are_the_same_from_every_format(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"old": [True, False, None], "label": ["a", "b", "a"]}), tmp_path / "a.parquet")
    write(tmp_path / "b.csv", "old,label\nTrue,a\nFalse,b\n,a\n")
    cells = [text_cells(read(tmp_path / name).x, "old", name) for name in ("a.parquet", "b.csv")]
    assert cells == [["True", "False", ""]] * 2
    for trained in ("True", "TRUE", "true"):  # pandas', R's and Arrow's
        assert CategoryColumn(categories=(trained,)).features(["True", "False"]).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("text", "cells", "names"),
    [("True,False", [True, False], ["True", "False"]), ("1.0,0.00", [1, 0], ["1", "0"])],
)
def test_classes_and_environments_follow_the_rule_of_categories(
    text: str, cells: list[Any], names: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "a.csv", "x,y,e\n" + "".join(f"1,{cell},{cell}\n" for cell in text.split(",")))
    for name, column in (("b", pa.array(cells)), ("c", pa.array(cells).dictionary_encode())):
        parquet.write_table(pa.table({"x": [1, 1], "y": column, "e": column}), tmp_path / f"{name}.parquet")
    for file in ("a.csv", "b.parquet", "c.parquet"):
        found = read(tmp_path / file, "y", "e")
        assert found.labels == found.environments == names


@pytest.mark.parametrize(
    ("announced_names", "cells"),
    [(("0", "1"), ("0.0", "1")), (("0.0", "1.0"), ("0", "1.0")), (("true", "FALSE"), ("True", "false"))],
)
def test_names_that_other_programs_write_are_those_announced(
    announced_names: tuple[str, str], cells: tuple[str, str], tmp_path: Path
) -> None:
    """As of categories, also where an earlier version announced them."""
    path = write(
        tmp_path / "a.csv", "age,label,ward\n" + "".join(f"{n},{cell},{cell}\n" for n, cell in enumerate(cells))
    )
    fractions = {"test_fraction": 0, "validation_fraction": 0}
    scenario = announced(
        inputs=("age",),
        labels=announced_names,
        environments=announced_names,
        environment_column="ward",
        **fractions,
    )
    train = divided(scenario, path).train
    assert train.y.tolist() == train.environment.tolist() == train.x[:, 0].tolist()


def test_columns_that_are_empty_or_whole_numbers(tmp_path: Path) -> None:
    columns = {"seen": pa.array([None] * 2, pa.date32()), "time": [2**60 + 1, 2**62], "label": ["a", "b"]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    table = read(tmp_path / "a.parquet").x
    assert np.isnan(number_cells(table, "seen", "a")).all()  # type: ignore[arg-type]
    assert number_cells(table, "time", "a").tolist() == [2.0**60, 2.0**62]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "row"),
    [([1.0, float("nan")], 2), (["nan", "a"], 1), (["a", "?"], 2), (["a", "NA"], 2), (["a", " "], 2)],
)
def test_a_label_that_says_nothing_is_no_class(labels: list[Any], row: int, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [1.0, 2.0], "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=rf"^a.parquet: row {row}, column 'label' is empty; fill it in, or take the row out$"
    ):
        read(tmp_path / "a.parquet")


def test_none_may_be_a_class(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", "x,label\n1,None\n2,mild\n")).labels == ["None", "mild"]


def test_a_long_code_has_one_name_whatever_its_type(tmp_path: Path) -> None:
    """As of pandas, where one empty cell makes floats of whole numbers."""
    codes = [12345678901, -3, 0, 2**53 - 1]
    want = [str(code) for code in codes]
    whole, floats = pa.array(codes), pa.array([*codes, 0.5, None], pa.float64())
    for column in (whole, floats, floats.dictionary_encode()):
        found = text_cells(pa.table({"drug": column}), "drug", "a.parquet")
        assert found == [*want, "0.5", ""][: len(column)]


def test_an_empty_text_is_no_class(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=np.array(["a", ""]))
    with pytest.raises(UserError, match=r"^a.npz: row 2 of y is empty; fill it in, or leave it out$"):
        read(tmp_path / "a.npz")


def test_a_row_of_cells_is_no_header_and_is_not_told(tmp_path: Path) -> None:
    for text in ("63,145.5,ill\n64,140.5,well\n", "63,ill\n64,well\n", "63,63,ill\n64,1,well\n"):
        with pytest.raises(UserError, match=r"^a.csv: the first row has numbers where names of columns must be"):
            read(write(tmp_path / "a.csv", text))
    found = read(write(tmp_path / "a.csv", "0,1,label\n5,6,a\n7,8,b\n"))  # an array's columns, by pandas
    assert found.columns == ("0", "1")
    with pytest.raises(
        UserError, match=r"^a.csv has no column 'label' for the label; its first row must have names"
    ):
        read(write(tmp_path / "a.csv", "0,ill\n1,well\n"))


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.csv", ",age,ward,label,,\n0,30,A,ill,,\n1,40,B,well,,\n"), environment="ward")
    assert (found.columns, found.environments) == (("age",), ["A", "B"])

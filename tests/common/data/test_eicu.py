import csv
import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perennial.common.data import eicu
from perennial.common.data.datasets import DATASETS, Dataset, load
from perennial.common.data.raw_data import Raw
from perennial.common.data.scenario import all_shares
from perennial.common.data.scenarios.eicu import EICU, EICUDemo, EICUSynthetic, Hospitals
from perennial.common.utils.errors import UserError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    load.__globals__["_load"].cache_clear()
    all_shares.cache_clear()


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def stay(number: int, patient: str, hospital: int, status: str, visit: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "patientunitstayid": number, "patienthealthsystemstayid": 100, "uniquepid": patient,
        "hospitalid": hospital, "hospitaldischargestatus": status, "unitvisitnumber": visit, **more,
    }  # fmt: skip


def drug(number: int, name: str, offset: int = 5, cancelled: str = "No") -> dict[str, Any]:
    return {
        "patientunitstayid": number, "drugname": name, "drugstartoffset": offset, "drugordercancelled": cancelled,
    }  # fmt: skip


STAYS = [
    stay(1, "a", 7, "Alive"),
    stay(2, "b", 7, "Expired", visit=2),
    stay(3, "b", 7, "Expired", visit=1),  # the first of b
    stay(4, "c", 7, ""),  # no outcome
    stay(5, "d", 9, "Alive"),
    stay(6, "e", 9, "Expired"),  # no drug that counts
    stay(7, "f", 3, "Alive"),
]
DRUGS = [
    drug(1, "aspirin"), drug(1, " Aspirin "), drug(1, "HEPARIN  sodium"), drug(2, "insulin"),
    drug(3, "aspirin"), drug(4, "aspirin"), drug(5, "heparin sodium", offset=2879), drug(5, "late", offset=2880),
    drug(5, "early", offset=-1), drug(6, "gone", cancelled="Yes"), drug(6, ""), drug(7, "zinc"),
]  # fmt: skip


def test_tables_by_hand(tmp_path: Path) -> None:
    stays = eicu.read_stays(write(tmp_path / "p.csv.gz", STAYS), "hospitaldischargestatus", lambda _: ())
    assert list(stays) == ["1", "3", "5", "6", "7"]
    assert stays["3"] == eicu.Stay(7, died=True)
    drugs = eicu.read_medication(write(tmp_path / "m.csv.gz", DRUGS), stays)
    assert drugs == {"1": {"ASPIRIN", "HEPARIN SODIUM"}, "3": {"ASPIRIN"}, "5": {"HEPARIN SODIUM"}, "7": {"ZINC"}}
    # Hospital 7 has two patients, 3 and 9 one each: of equals the lower number. ASPIRIN has two of these patients.
    found = eicu.patients(stays, drugs, 2, 2)
    assert found.columns.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert found.died.tolist() == [0, 1, 0]
    assert found.hospital.tolist() == [7, 7, 3]
    with pytest.raises(ValueError, match="3 hospitals and 3 columns, but 4 and 2 are needed"):
        eicu.patients(stays, drugs, 4, 2)
    with pytest.raises(ValueError, match="2 hospitals and 3 columns, but 2 and 9 are needed"):
        eicu.patients(stays, drugs, 2, 9)


def test_diagnoses_are_in_their_groups(tmp_path: Path) -> None:
    rows = [
        {"patientunitstayid": 1, "diagnosisoffset": 10, "diagnosisstring": "heart|rhythm|slow"},
        {"patientunitstayid": 1, "diagnosisoffset": 2880, "diagnosisstring": "lung"},
        {"patientunitstayid": 2, "diagnosisoffset": 10, "diagnosisstring": "kidney"},
    ]
    found = eicu.read_diagnoses(write(tmp_path / "d.csv.gz", rows), {"1"})
    assert found == {"1": {"heart", "heart|rhythm", "heart|rhythm|slow"}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of three hospitals and two drugs are enough."""
    monkeypatch.setattr("perennial.common.data.readers.EICU_HOSPITALS", 3)
    monkeypatch.setattr("perennial.common.data.readers.EICU_COLUMNS", 2)
    monkeypatch.setattr("perennial.common.data.readers.EICU_DEMO_COLUMNS", 3)


@pytest.mark.usefixtures("small")
def test_the_credentialed_tables(tmp_path: Path) -> None:
    write(tmp_path / "eicu" / "patient.csv.gz", STAYS)
    with pytest.raises(UserError, match=r"'eicu': there is no medication\.csv\.gz.*credentialed"):
        load("eicu", tmp_path)
    write(tmp_path / "eicu" / "medication.csv.gz", DRUGS)
    raw = load("eicu", tmp_path)
    assert isinstance(raw.images, torch.Tensor)
    assert raw.images.tolist() == [[1, 1], [1, 0], [0, 1], [0, 0]]
    assert raw.tags["hospital"].tolist() == [7, 7, 9, 3]


@pytest.mark.usefixtures("small")
def test_a_ready_made_table(tmp_path: Path) -> None:
    path = tmp_path / "eicu" / "prepared.csv"
    path.parent.mkdir()
    path.write_text("hospitalid,label,drug_0,drug_1\n7,1,0,1\n9,0,1,1\n")
    raw = load("eicu", tmp_path)
    assert raw.labels.tolist() == [1, 0]
    assert isinstance(raw.images, torch.Tensor)
    assert raw.images.tolist() == [[0, 1], [1, 1]]
    for text, word in (
        ("h,l,a\n7,1,0\n", "1 columns instead of 2"),
        ("h,l,a,b\n7,2,0,1\n", "columns of 0 and 1"),
        ("h,l,a,b\n7,x,0,1\n", "cannot be read"),
    ):
        load.__globals__["_load"].cache_clear()
        path.write_text(text)
        with pytest.raises(UserError, match=word):
            load("eicu", tmp_path)


def demo_stay(number: int, hospital: int, status: str) -> dict[str, Any]:
    row = stay(number, f"p{number}", hospital, "", agegroup="60-69", gender="Male", actualhospitalmortality=status)
    return {name: value for name, value in row.items() if name != "hospitaldischargestatus"}


@pytest.mark.usefixtures("small")
def test_the_open_demo(tmp_path: Path) -> None:
    write(tmp_path / "eicu_demo" / "patient.csv.gz", [demo_stay(1, 4, "ALIVE"), demo_stay(2, 5, "EXPIRED")])
    rows = [{"patientunitstayid": n, "diagnosisoffset": 1, "diagnosisstring": f"x{n}"} for n in (1, 2)]
    write(tmp_path / "eicu_demo" / "diagnosis.csv.gz", rows)
    raw = load("eicu-demo", tmp_path)
    assert isinstance(raw.images, torch.Tensor)
    assert raw.images.tolist() == [[1, 1, 1], [1, 1, 0]]  # age 60-69, gender Male, x1
    assert raw.labels.tolist() == [0, 1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "harm", [lambda data: data[: len(data) // 2], lambda _: b"no gzip", lambda _: gzip.compress(b"a,b\n1,2\n")]
)
def test_a_damaged_table_is_named(tmp_path: Path, harm: Any) -> None:
    path = write(tmp_path / "eicu" / "patient.csv.gz", STAYS)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(UserError, match=r"patient\.csv\.gz cannot be read"):
        load("eicu", tmp_path)


def test_a_row_that_is_cut_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n3\n"))
    with pytest.raises(ValueError, match="a row has only"):
        list(eicu.rows(path))


# ---------------------------------------------------------------------- the stand-in


@pytest.fixture(scope="module")
def generated() -> eicu.Patients:
    return eicu.generate(np.random.default_rng(0), patients=4000, hospitals=30, drugs=300, least=50)


def test_the_stand_in_has_the_spec_s_shape(generated: eicu.Patients) -> None:
    sizes = np.bincount(generated.hospital)
    assert generated.columns.shape == (4000, 300)
    assert sizes.sum() == 4000
    assert sizes.min() >= 50
    assert (np.diff(sizes) <= 0).all()
    assert 0.03 < generated.died.mean() < 0.09
    again = eicu.generate(np.random.default_rng(0), patients=4000, hospitals=30, drugs=300, least=50)
    assert np.array_equal(again.columns, generated.columns)
    # The first drugs are common, the last rare, and some are never given in a hospital.
    share = generated.columns.mean(axis=0)
    assert share[:10].mean() > 5 * share[200:].mean()
    first = generated.columns[generated.hospital == 0]
    assert not first[:, 100:].any(axis=0).all()


def test_spurious_drugs_tell_of_death_in_large_hospitals_and_of_life_in_small_ones(
    generated: eicu.Patients,
) -> None:
    """Which drugs are the spurious ones is not told; the correlations of all say it on the whole."""

    def bond(rows: Any) -> Any:
        x, y = generated.columns[rows].astype(float), generated.died[rows].astype(float)
        return x[y == 1].mean(axis=0) - x[y == 0].mean(axis=0)

    large, small = bond(generated.hospital < 20), bond(generated.hospital >= 20)
    top = np.argsort(-large)[:40]
    assert large[top].mean() > 0.05
    assert small[top].mean() < large[top].mean() / 3


# ---------------------------------------------------------------------- the recipe

SIZES = [40] * 3 + [30, 20] + [8] * 6
"""Patients of hospitals 10 to 20, every fourth of whom died."""


def hospitals(sizes: Sequence[int] = SIZES, died: Any = None) -> Raw:
    hospital = np.repeat(np.arange(10, 10 + len(sizes)), sizes)
    labels = np.arange(len(hospital)) % 4 == 0 if died is None else died(hospital)
    columns = torch.randint(0, 2, (len(hospital), 1399), generator=torch.Generator().manual_seed(0))
    return Raw(columns.to(torch.uint8), torch.from_numpy(labels).long(), len(hospital), {
        "hospital": torch.from_numpy(hospital)
    })  # fmt: skip


def own(monkeypatch: pytest.MonkeyPatch, raw: Raw, **fields: Any) -> tuple[Hospitals, list[Any]]:
    monkeypatch.setitem(DATASETS, "eicu", Dataset("", lambda _: raw))
    scenario = EICU(**fields)
    return scenario, [scenario.client_data(number, 0, None) for number in range(scenario.clients)]


def test_silos_are_equally_large_and_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = hospitals()
    scenario, clients = own(monkeypatch, raw, clients=5)
    shares = scenario.shares(0, raw)
    for number, (share, data) in enumerate(zip(shares, clients, strict=True)):
        distinct = np.unique(share.train)
        assert len(distinct) + len(share.validation) == 20  # the fifth largest has 20
        assert not set(distinct) & set(share.validation)
        assert {int(raw.tags["hospital"][place]) for place in (*distinct, *share.validation)} == {10 + number}
        counts = torch.bincount(data.train.y, minlength=2)
        assert counts[0] == counts[1]
        right = [round(0.3 * int((raw.labels[np.union1d(distinct, share.validation)] == c).sum())) for c in (0, 1)]
        assert torch.bincount(data.validation.y, minlength=2).tolist() == right
        assert data.train.x.dtype == torch.float32
    outside = np.concatenate([share.test for share in shares])
    assert sorted(outside) == list(range(170, 218))
    assert max(len(share.test) for share in shares) - min(len(share.test) for share in shares) <= 1


def test_without_balance_nobody_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, _ = own(monkeypatch, hospitals(), clients=5, balanced=False)
    for share in scenario.shares(0, hospitals()):
        assert len(np.unique(share.train)) == len(share.train)


def test_a_silo_without_a_death_has_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    _, clients = own(monkeypatch, hospitals(died=lambda hospital: hospital > 10), clients=5)
    assert (clients[0].train.y == 0).all()
    assert (clients[1].train.y == 1).all()


def test_several_hospitals_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = hospitals([9] * 10)
    scenario, clients = own(monkeypatch, raw, clients=3, hospitals_per_client=2)
    assert all(len(data.validation) + len(np.unique(share.train)) == 18 for data, share in zip(
        clients, scenario.shares(0, raw), strict=True
    ))  # fmt: skip
    first = scenario.shares(0, raw)[0]
    assert {int(raw.tags["hospital"][place]) for place in first.train} == {10, 13}
    with pytest.raises(UserError, match=r"clients = 5 with hospitals_per_client = 2 are 10 hospitals.*has 10"):
        own(monkeypatch, raw, clients=5, hospitals_per_client=2)


def test_the_presets() -> None:
    for scenario, batch in ((EICU(), 64), (EICUSynthetic(), 64), (EICUDemo(), 32)):
        assert (scenario.clients, scenario.rounds, scenario.ranking_batch) == (20, 301, batch)
        assert scenario.test_environments == ("ood",)
    assert EICUDemo().hospitals_per_client == 4
    assert EICU().input_shape == EICUSynthetic().input_shape == (1399,)

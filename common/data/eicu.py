"""Patients of many hospitals as rows of 0/1 columns: from eICU's tables, from its open demo's, or generated."""

import csv
import gzip
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint8]

WINDOW = range(2880)
"""Minutes after admission to the unit, the first 48 hours, in which an entry of a table counts."""


@dataclass(frozen=True)
class Patients:
    """A table of patients: columns (n, d) of 0/1, whether each died (n,), and the number of its hospital (n,)."""

    columns: Bits
    died: npt.NDArray[np.int64]
    hospital: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stay:
    """The first stay of a patient of which the outcome is known."""

    hospital: int
    died: bool
    person: tuple[str, ...] = ()
    """What is known of the patient at admission."""


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a packed CSV file. Raises `ValueError` for one that is too short."""
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if None in row.values():
                raise ValueError(f"a row has only {list(row.values())[:3]}")
            yield row


def read_stays(
    path: Path, outcome: str, person: Callable[[Mapping[str, str]], tuple[str, ...]]
) -> dict[str, Stay]:
    """First stays by their id, of the column `outcome` that is alive or expired, in the order of the file.

    Raises `KeyError` or `ValueError` for a table that is another one.
    """
    first: dict[str, tuple[tuple[int, int], str]] = {}
    stays = {}
    for row in rows(path):
        if row[outcome].lower() not in ("alive", "expired"):
            continue
        order = int(row["patienthealthsystemstayid"]), int(row["unitvisitnumber"])
        stay, patient = row["patientunitstayid"], row["uniquepid"]
        if patient not in first or order < first[patient][0]:
            first[patient] = order, stay
        stays[stay] = Stay(int(row["hospitalid"]), row[outcome].lower() == "expired", person(row))
    chosen = {stay for _, stay in first.values()}
    return {stay: known for stay, known in stays.items() if stay in chosen}


def read_medication(path: Path, stays: Collection[str]) -> dict[str, set[str]]:
    """The drugs, by stay, that were ordered in the first 48 hours and not cancelled; names in one spelling."""
    found: dict[str, set[str]] = {}
    for row in rows(path):
        name = " ".join(row["drugname"].upper().split())
        cancelled = row["drugordercancelled"].lower() == "yes"
        if row["patientunitstayid"] in stays and name and not cancelled and int(row["drugstartoffset"]) in WINDOW:
            found.setdefault(row["patientunitstayid"], set()).add(name)
    return found


def read_diagnoses(path: Path, stays: Collection[str]) -> dict[str, set[str]]:
    """The diagnoses, by stay, of the first 48 hours, and with `a|b|c` the groups `a|b` and `a` that it is in."""
    found: dict[str, set[str]] = {}
    for row in rows(path):
        if row["patientunitstayid"] in stays and int(row["diagnosisoffset"]) in WINDOW:
            parts = row["diagnosisstring"].split("|")
            names = {"|".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
            found.setdefault(row["patientunitstayid"], set()).update(names)
    return found


def patients(
    stays: Mapping[str, Stay], entries: Mapping[str, Collection[str]], hospitals: int | None, columns: int
) -> Patients:
    """The stays that have entries, in the `hospitals` with most of them, by the `columns` most frequent entries.

    Of equals the lower number and the first name. Raises `ValueError` where there are not so many.
    """
    known = {stay: set(entries[stay]) | set(stays[stay].person) for stay in stays if stay in entries}
    sizes = Counter(stays[stay].hospital for stay in known)
    largest = sorted(sizes, key=lambda hospital: (-sizes[hospital], hospital))[:hospitals]
    kept = [stay for stay in known if stays[stay].hospital in set(largest)]
    counts = Counter(name for stay in kept for name in known[stay])
    names = sorted(counts, key=lambda name: (-counts[name], name))
    if len(largest) < (hospitals or 1) or len(names) < columns:
        raise ValueError(
            f"{len(largest)} hospitals and {len(names)} columns, but {hospitals or 1} and {columns} are needed"
        )
    place = {name: number for number, name in enumerate(names[:columns])}
    table = np.zeros((len(kept), columns), np.uint8)
    for number, stay in enumerate(kept):
        table[number, [place[name] for name in known[stay] if name in place]] = 1
    died, hospital = zip(*((stays[stay].died, stays[stay].hospital) for stay in kept), strict=True)
    return Patients(table, np.array(died, np.int64), np.array(hospital, np.int64))


def read_prepared(path: Path) -> Patients:
    """A ready-made table: hospital, 1 for died, and columns of 0/1, below a line of names. Raises `ValueError`."""
    table = np.loadtxt(path, np.int64, delimiter=",", skiprows=1, ndmin=2)
    if table.shape[1] < 3 or not np.isin(table[:, 1:], (0, 1)).all():
        raise ValueError("not a table of hospital, label and columns of 0 and 1")
    return Patients(table[:, 2:].astype(np.uint8), table[:, 1], table[:, 0])


# ---------------------------------------------------------------------- generated

CAUSAL, SPURIOUS = 40, 60
"""Drugs that tell of death the same way everywhere, and those that do so in each hospital its own way."""
TRAINING = 20
"""The largest hospitals, in which spurious drugs mostly are given to those who die; elsewhere mostly not."""


def generate(
    rng: np.random.Generator, patients: int = 30_760, hospitals: int = 58, drugs: int = 1399, least: int = 100
) -> Patients:
    """A stand-in for eICU's table, of our own design: about 6 % die. Hospital 0 is the largest.

    `least` is the size of the smallest hospital; `drugs` must be 110 or more.
    """
    sizes = _sizes(rng, patients, hospitals, least)
    base = np.minimum(0.6, 0.9 * np.arange(1, drugs + 1) ** -0.8)
    causal = rng.choice(min(200, drugs), CAUSAL, replace=False)
    others = np.setdiff1d(np.arange(min(300, drugs)), causal)
    spurious = rng.choice(others, SPURIOUS, replace=False)
    effect = rng.normal(0, 0.8, CAUSAL)
    columns, died = [], []
    for hospital, size in enumerate(sizes):
        logits = np.log(base / (1 - base)) + rng.normal(0, 1, drugs)
        absent = (np.arange(drugs) >= 100) & (rng.random(drugs) < 0.3)
        given = rng.random((size, drugs)) < np.where(absent, 0.0, _sigmoid(logits))
        risk = given[:, causal] @ effect
        label = rng.random(size) < _sigmoid(risk + _intercept(risk, np.clip(rng.normal(0.06, 0.01), 0.04, 0.08)))
        bond = rng.normal(0.8, 0.4) if hospital < TRAINING else rng.normal(-0.4, 0.4)
        shifted = _sigmoid(logits[spurious] + bond * (2.0 * label[:, None] - 1))
        given[:, spurious] = rng.random((size, SPURIOUS)) < np.where(absent[spurious], 0.0, shifted)
        columns.append(given.astype(np.uint8))
        died.append(label)
    return Patients(
        np.concatenate(columns), np.concatenate(died).astype(np.int64), np.repeat(np.arange(hospitals), sizes)
    )


def _sizes(rng: np.random.Generator, total: int, parts: int, least: int) -> npt.NDArray[np.int64]:
    """Log-normal sizes of at least `least` that add up to `total`, the largest first."""
    weights = np.exp(0.6 * rng.normal(size=parts))
    sizes = -np.sort(-np.maximum(least, np.floor(total * weights / weights.sum()).astype(np.int64)))
    sizes[0] += total - sizes.sum()
    return sizes


def _intercept(risk: Floats, share: float) -> float:
    """The b at which the mean of σ(risk + b) is `share`, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(risk + middle).mean() < share else (low, middle)
    return low


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))

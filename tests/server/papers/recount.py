"""Counts the verdicts of docs/results.md once more from results/ and reproduce/, with none of Perennial's code.

    python tests/server/papers/recount.py

prints every number of the page's first and second table that is another one here; exit code 1 if there is one.
"""

import json
import re
import sys
import tomllib
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, variance
from typing import Any

ROOT = Path(__file__).parents[3]
PAPERS = {  # its line on the page, and what the names of its methods contain
    "CGPFL": "cgpfl",
    "PerInvFL": "perinvfl",
    "FedSDR": "fedsdr",
    "FedPIN": "fedpin",
    "FedIIR": "fediir",
    "FedILC": "fishr-in|geometric",
    "FL Games": "fl-games",
}
LOWER = {"loss", "variance"}
NO_FRACTIONS = {*LOWER, "entropy"}
ORDER = ["confirmed", "partly", "undecided", "partly not", "not", "not comparable", "not run"]

Claim = dict[str, Any]
File = dict[str, dict[str, Any]]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def better_by(method: list[float], other: list[float], paired: bool) -> tuple[float, float]:
    gain = mean(method) - mean(other)
    if paired:
        return gain, sqrt(variance([a - b for a, b in zip(method, other, strict=True)]) / len(method))
    return gain, sqrt(variance(method) / len(method) + variance(other) / len(other))


def read_files(name: str) -> list[tuple[str, File]]:
    """Each file of a table: how its settings were chosen, and its rows in the last round. Long runs come first."""
    found = []
    for path in sorted((ROOT / "results").glob("*.jsonl")):
        rest = path.stem.removeprefix(name)
        if not path.stem.startswith(name) or not re.fullmatch(
            r"(-held-out|-split|-leave-one-out)?(-\d+-rounds)?", rest
        ):
            continue
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        first = lines[0]
        way = first["by"] if first["trials"] > 1 else "table"
        rows = {line["row"]: line for line in lines if line["selection"] in ("final", "–")}
        rank = (first["quick"], -first["rounds"], way != "table", way != "split")
        found.append((rank, way, rows))
    return [(way, rows) for _, way, rows in sorted(found, key=lambda own: own[0])]


def verdict(claim: Claim) -> str:
    gain, error = claim["gain"]
    paper = claim["paper"]
    suffix = not (claim["size"] and claim["objective"])
    if suffix and claim["unsettled"]:
        return "not comparable"
    if gain > 2 * error:
        return "partly" if suffix else "confirmed"
    if gain + 2 * error < paper:
        return "partly not" if suffix else "not"
    return "undecided"


def judge(table: dict[str, Any], words: tuple[str, str, str], rows: File) -> Claim | None:
    """A claim by the runs of one file; None where it has not both rows with two seeds."""
    row, than, column = words
    if not {row, than} <= rows.keys():
        return None
    both = [rows[row], rows[than]]
    factor = (1 if column in NO_FRACTIONS else 100) * (-1 if column in LOWER else 1)
    numbers = {
        title: [factor * value for value in line["measures"].get(column, [])] for title, line in rows.items()
    }
    seeds = min(len(numbers[row]), len(numbers[than]))
    if seeds < 2:
        return None
    whole = all(len(numbers[title]) == len(rows[title]["runs"]) for title in (row, than))

    def above(other: str) -> bool:
        values = numbers.get(other, [])
        if len(values) < 2:
            return False
        gain, error = better_by(numbers[row], values, whole and len(values) == len(numbers[row]))
        return gain > 2 * error

    paper = {own["title"]: own for own in table["rows"]}
    sign = -1 if column in LOWER else 1
    seen = table.get("seen", {"rows": [], "settings": []})
    claim = {
        "words": words,
        "method": paper[row]["method"],
        "points": column not in NO_FRACTIONS,
        "rows": both,
        "gain": better_by(numbers[row], numbers[than], whole and len(numbers[row]) == len(numbers[than])),
        "paper": sign * (paper[row]["paper"][column] - paper[than]["paper"][column]),
        "size": both[0]["rounds"] >= table["rounds"]
        and seeds >= table["seeds"]
        and not both[0]["quick"]
        and not table.get("other_data"),
        "objective": all(paper[title].get("comparable", True) for title in (row, than)),
        "unsettled": bool(table.get("unsettled")),
        "seen": any(
            title in seen["rows"] and any(name not in rows[title]["settings"] for name in seen["settings"])
            for title in (row, than)
        ),
        "constant": above("Constant"),
        "local": above("Local"),
    }
    return claim | {"verdict": verdict(claim)}


def without_copies(table: dict[str, Any], claims: list[Claim]) -> list[Claim]:
    """A row against two rows that have the same numbers is one claim."""

    def same(one: Claim, other: Claim) -> bool:
        if "rows" not in one or "rows" not in other:
            return False
        if one["rows"][0] is not other["rows"][0] or one["words"][2] != other["words"][2]:
            return False
        pairs = [
            [line["measures"].get(column, []) for line in (one["rows"][1], other["rows"][1])]
            for column in table["columns"]
        ]
        return all(
            len(a) == len(b) and all(abs(x - y) < 0.001000001 for x, y in zip(a, b, strict=True)) for a, b in pairs
        )

    kept: list[Claim] = []
    for claim in claims:
        if not any(same(other, claim) for other in kept):
            kept.append(claim)
    return kept


def recount() -> dict[str, dict[str, list[Claim]]]:
    """Claims by paper: those that count, and by settings from held-out data and by `split`."""
    tables = {
        path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "reproduce").glob("*.toml"))
    }
    tables = {name: table for name, table in tables.items() if table.get("claims") and "rows" in table}
    counting: dict[str, list[Claim]] = {}
    searched: dict[str, list[Claim]] = {"held-out": [], "split": []}
    for name, table in tables.items():
        every = [
            words
            for claim in table["claims"]
            for words in product(*(listed(claim[part]) for part in ("row", "than", "column")))
        ]
        files = read_files(name)
        methods = {own["title"]: own["method"] for own in table["rows"]}
        by_way: dict[str, dict[tuple[str, str, str], Claim]] = {}
        for words in every:
            for way, rows in files:
                if words not in by_way.setdefault(way, {}) and (found := judge(table, words, rows)):
                    by_way[way][words] = found
        for way, claims in searched.items():
            there = by_way.get(way, {})
            judged = [
                there[words] for words in every if words in there and there[words]["verdict"] != "not comparable"
            ]
            claims += without_copies(table, judged)
        counts = [way for way in by_way if way in {"table", "split", table.get("select", "held-out")}]
        chosen = {}
        for row in {words[0] for words in every}:
            of_row = [{words: own for words, own in by_way[way].items() if words[0] == row} for way in counts]
            chosen |= max(of_row, key=len, default={})
        nothing = {"verdict": "not run", "seen": False}
        counting[name] = [
            chosen.get(words, {"words": words, "method": methods[words[0]], **nothing}) for words in every
        ]
    for name, table in tables.items():
        if owner := table.get("claims_of"):
            ours, theirs = ({own["words"]: own for own in counting.get(of, [])} for of in (name, owner))
            for words in ours.keys() & theirs.keys():
                loser = name if theirs[words]["verdict"] != "not run" else owner
                counting[loser] = [own for own in counting[loser] if own["words"] != words]
    together = [claim for name, claims in counting.items() for claim in without_copies(tables[name], claims)]
    parts = {"counted": together, **searched}
    return {
        paper: {part: [own for own in claims if re.search(names, own["method"])] for part, claims in parts.items()}
        for paper, names in PAPERS.items()
    }


def holding(claims: list[Claim]) -> list[Claim]:
    return [own for own in claims if own["verdict"] in ("confirmed", "partly")]


def share(claims: list[Claim]) -> str:
    seen = any(own["seen"] for own in holding(claims))
    return f"{len(holding(claims))} of {len(claims)}" + " ‡" * seen if claims else "–"


def first_table(of: dict[str, list[Claim]]) -> list[str]:
    judged = [own for own in of["counted"] if own["verdict"] in ORDER[:5]]
    whole = [own for own in judged if own["size"]]
    both = sum(own["constant"] and own["local"] for own in holding(whole))
    at_size = share(whole) + (f", {both} above both" if holding(whole) else "")
    return [at_size, share(of["held-out"]), share(of["split"])]


def second_table(of: dict[str, list[Claim]]) -> list[str]:
    counts = [sum(own["verdict"] == kind for own in of["counted"]) for kind in ORDER]
    return [str(number) for number in (*counts, sum(own["seen"] for own in holding(of["counted"])))]


def differences(page: str) -> list[str]:
    """What the page has otherwise."""
    papers = recount()
    wrong = []
    for paper, of in papers.items():
        lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| [{paper}](")]
        if len(lines) != 2:
            return [f"{paper}: the page has {len(lines)} lines"]
        first, second = lines
        for shown, here in ((first[4:7], first_table(of)), (second[1:9], second_table(of))):
            if shown != here:
                wrong.append(f"{paper}: the page says {shown}, the runs {here}")
    every = [own for of in papers.values() for own in of["counted"]]
    held = holding(every)
    reversed_ = sum(
        own["verdict"] in ("not", "partly not") and own["gain"][0] < -2 * own["gain"][1] for own in every
    )
    counts = []
    for kind in ORDER:
        of_kind = [own for own in every if own["verdict"] == kind]
        seen = sum(own["seen"] for own in of_kind)
        counts.append(f"{len(of_kind)} {kind}" + (f" ({seen} ‡)" if seen else ""))
    sentences = [
        f"Of {len(every)} claims: {', '.join(counts)}.",
        f"{len(held)} claims are confirmed or partly so. In {sum(own['seen'] for own in held)} of them",
        f"above the constant in {sum(own['constant'] for own in held)} of them, above Local in "
        f"{sum(own['local'] for own in held)}, and above both in "
        f"{sum(own['constant'] and own['local'] for own in held)}.",
        f"{reversed_} of those that are not so are reversed.",
    ]
    flat = " ".join(page.split())
    return wrong + [f"the page does not say: {sentence}" for sentence in sentences if sentence not in flat]


if __name__ == "__main__":
    found = differences((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    print("\n".join(found) or "The page's counts are those of the runs.")
    sys.exit(bool(found))

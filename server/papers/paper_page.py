"""A paper's page: every claim of its method, table by table, with all numbers, reasons and settings."""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, mode
from string import ascii_uppercase

from perennial.server.papers.claims import (
    NONE,
    OF_THESE,
    Paper,
    Study,
    count_cells,
    counts_text,
    lines_of,
)
from perennial.server.papers.kept import Kept
from perennial.server.papers.reproduce import Reproduction
from perennial.server.papers.verdicts import FAILS, HOLDS, SELECTION, VERDICTS, Finding, findings, leaders
from perennial.server.results.formatting import assignments, markdown_table
from perennial.server.selection.split_rule import Select
from perennial.server.selection.summary import AS_IN_PAPER, SPLIT
from perennial.server.study.compare import DECIMALS, NO_SELECTION, as_shown, budget, spread

OPEN = frozenset({*FAILS, "undecided"})
"""Verdicts that ask for a reason."""

HEAD = """# {title}: the paper's claims, and our runs

*For people who want every number behind the line of {title} on [the page of all papers](../{page}).*

**The paper**: {promise}

**Our runs**: {found} [The method's page](../methods/{stem}.md) explains it.

{counts}
What the verdicts and marks mean stands in [the rule](../{page}#the-rule). Accuracies are in percent, as mean over
seeds ± standard deviation. A difference is ours, ± its standard error. Of several runs each has a letter. In
tables of all rows the paper's number is in brackets.

"""


def paper_page(study: Study, paper: Paper, page: str) -> str:
    """The page of a paper; `page` is the file name of the page of all, which is one folder above."""
    own = study.of(paper, study.counted)
    head = HEAD.format(
        title=paper.title,
        page=page,
        promise=paper.promise,
        found=paper.found,
        stem=paper.stem,
        counts=counts_text(own),
    )
    names = [name for name in study.tables if paper in study.papers_of(name)]
    names.sort(key=lambda name: (not study.files[name], bool(study.tables[name].claims_of)))
    cells = [[f"[{name}](#{name})", *count_cells(study.of(paper, {name: study.counted[name]}))] for name in names]
    parts = [head, *lines_of(markdown_table(["table", *VERDICTS, OF_THESE], cells))]
    for name in names:
        parts += lines_of(_section(study, name, paper))
    return "".join(parts)


def _section(study: Study, name: str, paper: Paper) -> Iterator[str]:
    """One table: how it was run, its claims of this paper and why some do not hold; all rows, on one page."""
    table, files = study.tables[name], study.files[name]
    owner = study.papers_of(name)[0]
    yield from ("", f"## {name}", "", f"{table.title} ({table.source}).", "")
    if table.claims_of:
        (there,) = {study.papers_of(table.claims_of)[0].stem if owner is not paper else paper.stem}
        place = f"#{table.claims_of}" if there == paper.stem else f"{there}.md#{table.claims_of}"
        yield from (f"A variant of [{table.claims_of}]({place}), whose claims it shares.", "")
    if not files:
        why = f": {table.limit}" if table.limit else ""
        yield f"Not run yet{why}. The command is `perennial reproduce {name} --keep results`."
        yield ""
    else:
        yield from [*(f"- {_linked(remark)}" for remark in table.remarks), *_warnings(table, files), ""]
        yield from [*_runs(name, table, files), ""]
    yield from [*_claims(study, name, paper), ""]
    here = [place for place, claim in enumerate(table.claims) if study.is_of(name, claim.row, paper)]
    every = [list(findings(table, lines)) for lines in files]
    yield from _reasons(table, [[study.found[name][place][0], *(own[place] for own in every)] for place in here])
    if owner is not paper:
        yield from (f"All rows and settings stand on [{owner.title}'s page]({owner.stem}.md#{name}).", "")
        return
    for letter, lines in zip(ascii_uppercase, files, strict=False):
        yield from _rows(table, lines, f" of runs {letter}" * (len(files) > 1))
    yield from _drawn(table, files)


def _warnings(table: Reproduction, files: Sequence[Sequence[Kept]]) -> Iterator[str]:
    if table.unsettled:
        yield f"- **Cannot be settled here**, because {table.unsettled}."
    chosen = {line.row for lines in files for line in lines if line.selection == AS_IN_PAPER}
    waiting = [row.title for row in table.rows if row.implemented and row.title not in chosen]
    if table.paper_test and waiting:
        which = f" of {', '.join(waiting)}" if chosen else ""
        yield f"- The round that {_best(table)}, as in the paper (`{AS_IN_PAPER}`), is not run yet{which}."
    if table.seen:
        settings = " and ".join(f"`{name}`" for name in table.seen.settings)
        asked = {row for claim in table.claims for row in (claim.row, claim.than)}
        rows = "; ".join(row for row in table.seen.rows if row in asked)
        yield f"- **Seen on test data (‡)**: {settings} of {rows}: {table.seen.why}."


def _runs(name: str, table: Reproduction, files: Sequence[Sequence[Kept]]) -> Iterator[str]:
    """What runs there are, with the letter of each."""
    for letter, lines in zip(ascii_uppercase, files, strict=False):
        of_last = [line for line in lines if line.selection == SELECTION] or lines[:1]
        seeds = mode(line.seeds for line in of_last)
        made = next(line for line in of_last if line.seeds == seeds)
        others = ", ".join(f"{line.seeds} of {line.row}" for line in of_last if line.seeds != seeds)
        waiting = any(own.verdict == "not run" for own in findings(table, lines))
        chosen = f"{budget(made.trials, made.trial_rounds)} by {made.by}" if made.way else table.chosen
        chosen += ", **which reads test data**" * (made.way is Select.as_in_paper)
        size = _size(table, made, waiting)
        yield (
            f"- {f'**{letter}**: ' * (len(files) > 1)}{seeds} seeds{f' ({others})' * bool(others)}. "
            f"Size: {size}. Settings: {chosen}. Command: `{_command(name, table, made)}`"
        )


def _size(table: Reproduction, made: Kept, waiting: bool) -> str:
    """What runs are of the paper's size, whether claims wait, and what keeps the table from being whole here."""
    parts = []
    if made.quick:
        changed = ", ".join(f"{key}={value}" for key, value in table.quick.settings.items())
        parts.append(f"the small version ({changed})" if changed else "the small version")
    if made.rounds > table.rounds:
        parts.append(f"{made.rounds} rounds for the paper's {table.rounds}")
    elif made.rounds < table.rounds or made.quick:
        parts.append(f"{made.rounds} of {table.rounds} rounds")
    if made.seeds < table.seeds:
        parts.append(f"{made.seeds} of {table.seeds} seeds")
    if table.other_data:
        parts.append("other data than the paper's")
    whole = not (made.quick or made.rounds < table.rounds or made.seeds < table.seeds or table.other_data)
    parts = [*(["the paper's"] if whole else parts), *["not all rows yet"] * waiting]
    why = f" ({table.limit})" if table.limit and (waiting or not whole) else ""
    return ", ".join(parts) + why


def _claims(study: Study, name: str, paper: Paper) -> list[str]:
    """Each claim with the runs that judge it, and what all other runs say of it."""
    table, files = study.tables[name], study.files[name]
    in_files = [list(findings(table, lines)) for lines in files]
    found = study.found[name]
    lead = leaders(table, [own for own, _ in found])
    letters = ascii_uppercase[: len(files)] if len(files) > 1 else ""
    cells = []
    for place, (own, number) in enumerate(found):
        if not study.is_of(name, own.claim.row, paper):
            continue
        others = [_difference(every[place], with_verdict=True) for every in in_files] if letters else []
        numbers = [own.method, own.reference, own.constant, own.local]
        ours = [_mean(own, side) for side in numbers[:2]]
        places = _places(own)
        cells.append(
            [
                own.claim.words,
                " / ".join(f"{number:.{places}f}" for number in own.paper),
                " / ".join(ours) if own.made else NONE,
                *([] if letters else [_difference(own)]),
                *(_mean(own, side, deviation=False) for side in numbers[2:]),
                _verdict(own, letters[number] if letters and own.made else "")
                + (f"; counted with {found[lead[place]][0].claim.than}" if lead[place] != place else ""),
                *others,
            ]
        )
    difference = [] if letters else ["difference"]
    return markdown_table(["claim", "paper", "ours", *difference, "constant", "Local", "verdict", *letters], cells)


def _places(own: Finding) -> int:
    return DECIMALS.get(own.claim.column, 2)


def _mean(own: Finding, values: Sequence[float], deviation: bool = True) -> str:
    if len(values) < 2:
        return NONE
    return spread(values).text(_places(own)) if deviation else f"{fmean(values):.{_places(own)}f}"


def _difference(own: Finding, with_verdict: bool = False) -> str:
    if own.verdict == "not run":
        return NONE
    text = f"{own.difference:+.{_places(own)}f} ± {own.error:.{_places(own)}f}"
    return f"{text} {own.verdict}" if with_verdict else text


def _verdict(own: Finding, letter: str = "") -> str:
    shown = f"**{own.verdict}**" if own.verdict in ("confirmed", "not") else f"*{own.verdict}*"
    parts = [shown + " ‡" * own.seen + f" ({letter})" * bool(letter), *["reversed"] * own.reversed]
    if own.verdict in HOLDS:
        parts += ["not above the constant"] * (own.above_constant is False)
        parts += ["not above Local"] * (own.above_local is False)
    return ", ".join(parts)


def _reasons(table: Reproduction, found: Sequence[Sequence[Finding]]) -> list[str]:
    """Why claims are not what we find, one line for each reason; and which rows are not the paper's.

    `found` has for each claim what judges it first, then what each file says. A claim's own reason also stands
    here if it is not so in other runs alone.
    """
    several = len({claim.column for claim in table.claims}) > 1
    reasons: dict[str, list[str]] = {}
    for judging, *others in found:
        claim = judging.claim
        asked = judging.verdict in OPEN
        why = claim.why or (table.why if asked else "")
        if why and (asked or any(own.verdict in OPEN for own in others)):
            name = f"{claim.row} > {claim.than}" + f", {claim.column}" * several
            reasons.setdefault(why, []).append(name)
    lines = [f"- **Why not** {'; '.join(claims)}: {_linked(why)}" for why, claims in reasons.items()]
    ran = {row for judging, *_ in found if judging.made for row in (judging.claim.row, judging.claim.than)}
    remarks: dict[str, list[str]] = {}
    for row in table.rows:
        if row.title in ran and not row.comparable:
            remarks.setdefault(row.remark, []).append(row.title)
    lines += [f"- **Not the paper's** {'; '.join(rows)}: {_linked(remark)}" for remark, rows in remarks.items()]
    return [*lines, ""] if lines else []


def _linked(text: str) -> str:
    """A text of a table's file, whose pages of methods are links."""
    return re.sub(r"docs/methods/((\w+)\.md(#[\w-]+)?)", r"[the page of \2](../methods/\1)", text)


def _rows(table: Reproduction, lines: Sequence[Kept], which: str) -> list[str]:
    """All rows of two seeds or more, the paper's numbers in brackets; also by `split` and by the paper's rule."""
    chosen = (SELECTION, SPLIT, NO_SELECTION, table.paper_round, AS_IN_PAPER)
    lines = [line for line in lines if line.selection in chosen and line.seeds > 1]
    if not lines:
        return []
    of_paper = {row.title: row for row in table.rows}
    columns = [*table.columns, *table.beside]
    games = any(line.ended for line in lines)
    several = any(line.selection not in (SELECTION, NO_SELECTION) for line in lines)
    cells = []
    for line in lines:
        paper, ended = (row.paper, row.ended) if (row := of_paper.get(line.row)) else ({}, None)
        numbers = [_cell(line, column, paper) for column in columns]
        games_cell = [_endings(line.ended, ended)] * games
        cells.append([line.row, *[line.selection] * several, *numbers, *games_cell])
    heads = ["row", *["round"] * several, *columns, *["ended in round"] * games]
    note = []
    if any(line.selection == AS_IN_PAPER for line in lines):
        note = [f"*{AS_IN_PAPER}*: the round that {_best(table)}, as in the paper. **It reads test data.**", ""]
    return [f"**All rows**{which}:", "", *markdown_table(heads, cells), "", *note]


def _best(table: Reproduction) -> str:
    """What the round is that the paper chose on test data."""
    return "has the lowest test loss" if table.paper_test == "loss" else f"is best at {table.paper_test}"


def _drawn(table: Reproduction, files: Sequence[Sequence[Kept]]) -> Iterator[str]:
    """What a search chose for each row, to four digits, and what it left as it was; the files have all digits.

    Runs whose settings were chosen in one way have the same ones, which stand here once.
    """
    fixed = {row.title: row.fixed for row in table.rows}
    ways: dict[Select, dict[str, str]] = {}
    for line in (line for lines in files for line in lines if line.selection == SELECTION):
        if line.way:
            text = assignments(line.settings) or "the defaults, its first trial"
            left = fixed.get(line.row)
            text += f"; not searched: {assignments(left)}" if left else ""
            ways.setdefault(line.way, {}).setdefault(line.row, text)
    for way, chosen in ways.items():
        everywhere = f" Not searched for any row: {assignments(table.settings)}." if table.settings else ""
        rows: dict[str, list[str]] = {}
        for row, text in chosen.items():
            rows.setdefault(text, []).append(row)
        yield from (f"**Settings** that the search chose by {way}.{everywhere}", "")
        yield from (f"- {', '.join(same)}: {text}" for text, same in rows.items())
        yield ""


def _cell(line: Kept, column: str, paper: Mapping[str, float]) -> str:
    places, values = DECIMALS.get(column, 2), line.measures.get(column)
    ours = as_shown(column, spread(values)).text(places) if values else NONE
    return f"{ours} ({paper[column]:.{places}f})" if column in paper else ours


def _endings(ended: Sequence[int | None], paper: float | None) -> str:
    rounds = [number for number in ended if number]
    if not ended:
        return NONE
    parts = [spread(rounds).text(0)] if rounds else []
    parts += [f"{len(rounds)} of {len(ended)}"] if len(rounds) < len(ended) else []
    return ", ".join(parts) + (f" ({paper:.0f})" if paper else "")


def _command(name: str, table: Reproduction, made: Kept) -> str:
    """With what differs from the table; a search's rule belongs to a search."""
    search = {"trial_rounds": made.trial_rounds, "select": made.by} if made.way else {}
    size = {"rounds": made.rounds, "seeds": made.seeds, "trials": made.trials, **search}
    of_table = table.quick if made.quick else table
    other = {key: value for key, value in size.items() if value not in (None, getattr(of_table, key, None))}
    options = ["--quick"] * made.quick + [f"--{key.replace('_', '-')} {value}" for key, value in other.items()]
    return " ".join([f"perennial reproduce {name}", *options])

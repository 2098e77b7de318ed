"""The page of all claims, read in a minute, with its figures; `paper_page.py` makes one for each paper."""

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from statistics import median

from perennial.server.papers.claims import (
    NONE,
    OF_THESE,
    PAPERS,
    Study,
    count_cells,
    counts_of,
    counts_text,
    lines_of,
)
from perennial.server.papers.paper_page import paper_page
from perennial.server.papers.verdicts import HOLDS, JUDGED, LEVEL, VERDICTS, Finding
from perennial.server.results.formatting import markdown_table
from perennial.server.selection.split_rule import Select

LARGE = 10.0
"""Points from which on a gain is a large one."""
FILLS = {  # from what holds to what does not, then what says nothing
    "confirmed": "#00805c",
    "partly": "#8fd0b8",
    "undecided": "#c8c8c8",
    "partly not": "#f2b98c",
    "not": "#d55e00",
    "not comparable": "#ededed",
    "not run": "#ffffff",
}

HEAD = """# What the papers claim, and what we found

*For people who ask whether a method does what its paper says.*

We made the tables of seven papers again. Where a paper says "our method is better than that one here", we asked
our own runs. Our numbers are of the last round, which nobody chose.

![How many of each paper's claims have which verdict]({picture})

*Green: our runs say so, too. Orange: they exclude it. A dark part has the paper's size and objective. ‡ says that
settings of some of these claims were seen on test data.*

"""

COLUMNS = """
*Gain* is how many points of accuracy the method has more than the others, in the paper and in our runs (medians).
*Holds* means: better than the other method by more than two standard errors. The other columns say how much that
is worth:

- **at the paper's size**: with as many rounds, seeds and data as the paper. FedSDR's and FedPIN's objectives are
  not quite the thesis's here, so theirs is no more than a partial confirmation
- **above both**: of these, better than a constant answer *and* than clients that train alone
- **held-out settings**: with settings chosen by accuracy on held-out data of the training sites
- **by `split`**: with settings chosen by [`split`](selection.md), which also sees no test data, and looks for
  models that do not lean on one group of samples

A dash says that there are no such runs. Each method's name leads to a page with all its tables, numbers and
reasons.

## The counts

"""

RULE = """
## The rule

A claim is "this row of a table is better than that one in this column". Every claim has one verdict:

- **confirmed**: better by more than two standard errors of the difference
- **not**: not better by so much, and the paper's gain is excluded, too: it is more than our difference and two
  standard errors together. It is *reversed* where the other row is better by more than two standard errors
- *partly* and *partly not*: the same two, but with fewer rounds or seeds, with other data, or of a row that is not
  the paper's objective. So success and failure are treated alike
- *undecided*: our runs exclude neither the paper's gain nor that there is none
- *not comparable*: our runs are so far from the paper's that they say nothing for or against it
- *not run*: there are no runs of two seeds or more

A verdict may have marks:

- **‡**: settings of one of the two rows were chosen while somebody looked at test data, or at the paper's results
- *not above the constant*: a predictor that always says the most frequent class is as good or better. Then the
  method has learnt nothing that is of use there, whatever the verdict
- *not above Local*: a model that each client trains alone is as good or better

What is counted once:

- Copies. Where two baselines have the same numbers in all seeds and columns, to a tenth of a point, a row against
  both is one claim. FedProx with a small weight is FedAvg, for example.
- Variants. Some tables make the claims of another one with other data or settings. A claim counts in the paper's
  own table if that was run, and else in the variant.

All claims of one row in one table are judged by settings that were chosen in one way: the way that was run for
most of them. If there are runs of several lengths, the longest that has both rows counts.

Two standard errors are a weak test of three seeds: where two rows are alike, one claim in ten passes by chance. So
count the claims, and look twice at a single one.

## Gains

"""

GAINS = """
![What the method of each claim gains in the paper, and in our runs]({})

*One mark for each claim in percent, with two standard errors to either side. On the diagonal we find what the
paper has. Below the dashed line the other method is better.*

"""

TABLES = """
## All tables

"""

MADE = """
## How these pages are made

`perennial reproduce --overview docs/results.md` makes this page, its figures and the pages of the papers from
`results/` and `reproduce/`. Nobody writes them by hand. A file in `results/` has one line for each row of a
paper's table, with one number for each seed, so you can compute every verdict. `tests/server/papers/recount.py`
does so, and shares no code with the project.

The command of a table makes all its rows anew. With `--keep results` it makes those that the file lacks, with the
settings that a search has chosen before, and adds them there. So a table goes on without its runs, row by row.

Some papers chose on their test data. Their tables also have the round that they would score, `as-in-paper`, and
`--select as-in-paper` chooses settings so, too. Both are labelled, and no verdict is made of them.
"""


def overview(folder: Path, page: str) -> dict[str, str]:
    """The page, its figures and a page for each paper, by their paths from the page's folder.

    `page` is the page's file name. Raises `UserError` for a file that does not fit.
    """
    study, stem = Study.read(folder), PurePosixPath(page).stem
    verdicts, gains = f"{stem}.svg", f"{stem}/gains.svg"
    together = [finding for own in study.counted.values() for finding in own]
    pages = [
        HEAD.format(picture=verdicts),
        *lines_of(_seven(study, stem)),
        COLUMNS,
        counts_text(together),
        RULE,
        _marks(together),
        "\n",
        *lines_of(_by_method(study, stem)),
        GAINS.format(gains),
        f"{_large_and_small(together)}\n\n",
        *lines_of(_by_table(study, stem)),
        MADE,
    ]
    made = {page: "".join(pages), verdicts: _verdicts(study), gains: _gains(together)}
    return made | {f"{stem}/{paper.stem}.md": paper_page(study, paper, page) for paper in PAPERS}


# ---------------------------------------------------------------------- the first page


def _seven(study: Study, stem: str) -> list[str]:
    """The table that is read in a minute: a line for each paper."""
    heads = [
        "method",
        "the paper promises",
        "we found",
        "gain in the paper, here",
        "holds at the paper's size",
        "held-out settings",
        "by `split`",
    ]
    searched = [study.searched(way) for way in (Select.held_out, Select.by_split)]
    cells = []
    for paper in PAPERS:
        every = study.of(paper, study.counted)
        whole = [own for own in every if own.size and own.verdict in JUDGED]
        holding = [own for own in whole if own.verdict in HOLDS]
        both = sum(bool(own.above_constant and own.above_local) for own in holding)
        cells.append(
            [
                f"[{paper.title}]({stem}/{paper.stem}.md)",
                paper.promise,
                paper.found,
                ", ".join(_medians(every)),
                _share(whole) + (f", {both} above both" if holding else ""),
                *(_share(study.of(paper, found)) for found in searched),
            ]
        )
    return markdown_table(heads, cells)


def _share(found: Sequence[Finding]) -> str:
    """How many hold, and whether settings of any of these were seen."""
    holding = [own for own in found if own.verdict in HOLDS]
    return f"{len(holding)} of {len(found)}" + " ‡" * any(own.seen for own in holding) if found else NONE


def _medians(found: Sequence[Finding]) -> list[str]:
    """What is gained in points, in the paper and here."""
    gains = [(own.papers_gain, own.difference) for own in found if own.verdict in JUDGED and own.in_points]
    return [f"{median(side):+.1f}" for side in zip(*gains, strict=True)] or [NONE, NONE]


def _marks(found: Sequence[Finding]) -> str:
    """What is to be known of those that hold, and of those that do not."""
    holding = [own for own in found if own.verdict in HOLDS]
    lines = [
        f"{len(holding)} claims are confirmed or partly so. In {sum(own.seen for own in holding)} of them "
        "settings were seen on test data (‡).",
        f"The better method is above the constant in {_above(own.above_constant for own in holding)} of them, "
        f"above Local in {_above(own.above_local for own in holding)}, and above both in "
        f"{_above(own.above_constant and own.above_local for own in holding)}.",
        f"{sum(own.reversed for own in found)} of those that are not so are reversed.",
    ]
    return "\n".join(lines) + "\n"


def _above(answers: Iterable[bool | None]) -> int:
    return sum(answer is True for answer in answers)


def _by_method(study: Study, stem: str) -> list[str]:
    cells = [
        [f"[{paper.title}]({stem}/{paper.stem}.md)", *count_cells(own), *_medians(own)]
        for paper in PAPERS
        for own in [study.of(paper, study.counted)]
    ]
    return markdown_table(["method", *VERDICTS, OF_THESE, "gain in the paper", "gain here"], cells)


def _by_table(study: Study, stem: str) -> list[str]:
    """A line for each table and paper; what was run comes first. Links to a table lead to its first line."""
    order = sorted(study.tables, key=lambda name: not study.files[name])
    cells = []
    for name in order:
        for number, paper in enumerate(study.papers_of(name)):
            own = study.of(paper, {name: study.counted[name]})
            anchor = f'<a id="{name}"></a>' * (number == 0)
            table = f"{anchor}[{name}]({stem}/{paper.stem}.md#{name})"
            cells.append([table, study.tables[name].source, *count_cells(own)])
    return markdown_table(["table", "paper", *VERDICTS, OF_THESE], cells)


def _large_and_small(found: Sequence[Finding]) -> str:
    """How many of the large gains, and of the small ones, there are here, too."""
    gains = [(own.papers_gain, own.verdict in HOLDS) for own in found if own.verdict in JUDGED and own.in_points]
    large = [holds for gain, holds in gains if gain >= LARGE]
    small = [holds for gain, holds in gains if gain < LARGE]
    return (
        f"Where the paper gains {LARGE:.0f} points or more, {sum(large)} of {len(large)} claims are confirmed or "
        f"partly so.\nWhere it gains less, {sum(small)} of {len(small)} are."
    )


def _verdicts(study: Study) -> str:
    """How many claims of each paper have which verdict."""
    from perennial.server.results.figures import shares_figure  # matplotlib takes its time

    counts, texts = {}, {}
    for paper in PAPERS:
        own = study.of(paper, study.counted)
        if own:
            name = f"{paper.title}, {len(own)} claims"
            counts[name], seen = counts_of(own), counts_of(of for of in own if of.seen)
            texts[name] = [
                f"{number}" + " ‡" * bool(with_) for number, with_ in zip(counts[name], seen, strict=True)
            ]
    return shares_figure(counts, texts, FILLS)


def _gains(found: Sequence[Finding]) -> str:
    """What methods gain in points, in the papers and here, by verdict."""
    from perennial.server.results.figures import gains_figure

    gains: dict[str, list[tuple[float, float, float]]] = {verdict: [] for verdict in VERDICTS if verdict in JUDGED}
    for finding in found:
        if finding.verdict in gains and finding.in_points:
            gains[finding.verdict].append((finding.papers_gain, finding.difference, LEVEL * finding.error))
    return gains_figure(gains, "gain in the paper (points)", "gain in our runs (points)")

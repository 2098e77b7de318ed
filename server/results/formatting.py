"""What tables on a terminal and on a page say in the same way: numbers, sizes, members."""

from collections.abc import Iterable, Mapping, Sequence

from perennial.common.tasks import Measure


def members(labels: Mapping[str, int]) -> dict[int, list[str]]:
    """The clients of each cluster, in the order in which a person counts them."""
    found: dict[int, list[str]] = {}
    for client in sorted(labels, key=lambda client: (labels[client], len(client), client)):
        found.setdefault(labels[client], []).append(client)
    return found


def size(count: float) -> str:
    """A number of bytes in the unit that reads best."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def percent(value: float | None) -> str:
    """An accuracy in percent, a dash where there is none."""
    return "–" if value is None else f"{100 * value:.2f}"


def field(measure: str) -> str:
    """What a number such as `worst site` is called in summaries and in tables for programs."""
    return measure.replace(" ", "_")


def overall_text(names: Iterable[str], found: Mapping[str, float | None], measure: Measure, unit: str = "") -> str:
    """What says in all how good a model is, by name, on one line."""
    return ", ".join(f"{name} {measure.text(found.get(field(name)))}{unit}" for name in names)


def assignments(settings: Mapping[str, object]) -> str:
    """Settings as people write them, numbers to four digits."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in settings.items()
    )


def duration(seconds: float) -> str:
    """A time in the unit that reads best."""
    for unit, length in (("s", 90.0), ("min", 90.0 * 60)):
        if seconds < length:
            return f"{seconds / (length / 90):.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]

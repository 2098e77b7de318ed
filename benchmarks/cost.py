"""What a method costs: lines of its files, and those of them that are code.

    uv run python benchmarks/cost.py

Counts the hyper-parameters in `common/methods/`, the client half in `client/methods/`, and the server half in
`strategies/methods/` if it has one of its own. Code is what is neither blank nor a comment nor a docstring.
"""

import ast
from pathlib import Path
from statistics import median

from perennial.common.methods import METHODS
from perennial.common.methods.base import Method

ROOT = Path(__file__).parent.parent


def files(method: type[Method]) -> list[Path]:
    """The method's files that are there."""
    defined = ROOT / f"{method.__module__.replace('.', '/')}.py"
    halves = [ROOT / folder / f"{method.module()}.py" for folder in ("strategies/methods", "client/methods")]
    return [path for path in (defined, *halves) if path.exists()]


def code(text: str) -> int:
    """Lines that are neither blank nor a comment nor part of a string that stands alone."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    prose = {line for string in strings for line in range(string.lineno, (string.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(number not in prose and bool(line.split("#")[0].strip()) for number, line in lines)


def cost(method: type[Method]) -> tuple[int, int]:
    """All lines of a method's files, and the lines of code among them."""
    texts = [path.read_text() for path in files(method)]
    return sum(len(text.splitlines()) for text in texts), sum(map(code, texts))


def main() -> None:
    costs = {name: cost(method) for name, method in METHODS.items()}
    for name, (lines, of_code) in sorted(costs.items(), key=lambda item: item[1]):
        print(f"{name:20} {lines:4} lines, {of_code:4} of code")
    lines, of_code = (median(column) for column in zip(*costs.values(), strict=True))
    print(f"{'median':20} {lines:4} lines, {of_code:4} of code")


if __name__ == "__main__":
    main()

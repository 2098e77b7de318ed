"""The sentence for a name or value that is not possible, and names that may be one, spelt in several ways."""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches

from pydantic import ValidationError

LONGEST = 100
"""Letters of a name that are looked at and shown: finding what is like it takes the square of its length."""
LONGEST_VALUE = 200
"""Characters of a wrong value that a sentence repeats."""
UNION = re.compile(r"(tuple|list|dict)\[.*\]")
"""What pydantic puts into a place for the type that a value of several possible ones was tried as."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """`unknown method 'fedvg'; did you mean 'fedavg'? (there are: ditto, fedavg, local)`"""
    names, name = sorted(known), str(name)[:LONGEST]
    return f"unknown {kind} {name!r}{meant(name, names)} (there are: {', '.join(names) or 'none'})"


def meant(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'fedavg'?`, or nothing where no known name is close, whatever its capitals."""
    names = {other.casefold(): other for other in sorted(known, reverse=True)}
    close = get_close_matches(str(name)[:LONGEST].casefold(), sorted(names), n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


ALSO_CALLED = {
    **dict.fromkeys(("lr", "step_size", "eta"), "learning_rate"),
    **dict.fromkeys(("epochs", "local_epochs", "num_epochs", "n_epochs"), "local_steps"),
    **dict.fromkeys(("bs", "batch", "batchsize", "minibatch"), "batch_size"),
    **dict.fromkeys(("wd", "l2", "decay"), "weight_decay"),
    **dict.fromkeys(("num_rounds", "n_rounds", "num_server_rounds", "communication_rounds"), "rounds"),
    **dict.fromkeys(("fraction_fit", "fraction_train", "client_fraction", "frac"), "participation"),
    **dict.fromkeys(("clients", "num_clients", "n_clients", "num_supernodes"), "scenario.clients"),
    **dict.fromkeys(("lr_schedule", "lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("network", "arch", "architecture"), "model.name"),
    **dict.fromkeys(("clip", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("dp", "secagg"), "privacy.mechanism"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    "early_stopping": "patience",
}
"""What others call a setting, Flower, PyTorch and papers' code among them: its name here."""
LETTERS = {"alpha": "α", "beta": "β", "gamma": "γ", "eta": "η", "lambda": "λ", "lamda": "λ", "mu": "μ", "tau": "τ"}


def setting_meant(key: str, known: Iterable[str], symbols: Mapping[str, str]) -> list[str]:
    """The setting that is meant, such as `learning_rate` by `lr`, and what goes with it; nothing where none is.

    Also by its name after the dot, and by a paper's symbol: `symbols` has the method's settings by theirs.
    """
    names, plain = sorted(known), key.casefold().replace("-", "_")
    inside = [name for name in names if name.partition(".")[2] == plain]
    found = symbols.get(LETTERS.get(plain, key)) or ALSO_CALLED.get(plain) or (inside[0] if inside else "")
    if found in names:
        return [found, "local_unit=epoch"] if "epochs" in plain else [found]
    return get_close_matches(plain[:LONGEST], names, n=1)


NO_TABLE = ("dict_type", "model_type", "model_attributes_type")
"""Kinds of errors where a table is wanted."""


def sentence(error: ValidationError, known: Iterable[str] = ()) -> str:
    """One sentence for a validation error: the field, the value, what would be right.

    Of the `known` fields the closest is named where there is no such field.
    """
    first, *others = error.errors()
    parts = [str(part) for part in first["loc"]]
    where = ".".join(part for part in parts if not UNION.fullmatch(part))[:LONGEST_VALUE] or error.title
    if first["type"] == "extra_forbidden":
        text = f"{where}: there is no such setting{meant(where, known)}"
    elif first["type"] == "missing":
        text = f"{where}: a value is missing"
    elif first["type"] == "union_tag_invalid":
        key, tags = (first["ctx"][name].replace("'", "") for name in ("discriminator", "expected_tags"))
        text = f"{where}: {unknown(key, first['ctx']['tag'], tags.split(', '))}"
    elif first["type"] == "too_short":
        text = (
            f"{where}: there are {first['ctx']['actual_length']}, and {first['ctx']['min_length']} are the least"
        )
    elif first["type"] == "too_long":
        text = f"{where}: there are {first['ctx']['actual_length']}, and {first['ctx']['max_length']} are the most"
    elif not first["loc"] and first["type"] == "value_error":
        text = str(first["ctx"]["error"])  # a rule between fields, which names them
    else:
        value = repr(first["input"])
        value = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}…"
        why = first["msg"].removeprefix("Value error, ")
        if first["type"] == "tuple_type":
            why = 'write a list, such as ["a", "b"] or [1, 2]'
        elif first["loc"] and first["type"] in NO_TABLE:
            why = "it must be names with values"
        elif first["input"] != first["input"]:  # NaN fails whichever bound comes first
            why = "it must be a number"
        text = f"{where}: {value} is not possible; {why[0].lower()}{why[1:]}"
    return text + (f" (and {len(others)} more)" if others else "")


def alike(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that differ by capitals, by blanks or by how a number is written alone, together."""
    groups = dict[str | Decimal, list[str]]()
    for name in sorted(set(names)):
        groups.setdefault(_normalised(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _normalised(name: str) -> str | Decimal:
    try:
        if (number := Decimal(name)).is_finite() and "_" not in name:
            return number
    except InvalidOperation:
        pass
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())

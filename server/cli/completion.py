"""What a shell completes: names of methods, scenarios, reproductions and their rows, and what `show` can show."""

from collections.abc import Iterable

import typer


def methods(incomplete: str) -> list[str]:
    """Names of methods that begin so."""
    from perennial.common.methods import METHODS
    from perennial.common.plugins import installed

    return _begin([*METHODS, *installed("methods")], incomplete)


def method_list(incomplete: str) -> list[str]:
    """The same for the last of several names with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in methods(last)]


def scenarios(incomplete: str) -> list[str]:
    """Names of scenarios that begin so."""
    from perennial.common.data.scenarios import SCENARIOS
    from perennial.common.plugins import installed

    return _begin([*SCENARIOS, *installed("scenarios")], incomplete)


def models(incomplete: str) -> list[str]:
    """Names of models that begin so."""
    from perennial.common.models.settings import MODELS

    return _begin(MODELS, incomplete)


def tables(incomplete: str) -> list[str]:
    """Names of reproductions that begin so."""
    from perennial.server.papers.reproduce import reproductions
    from perennial.server.papers.selection_study import NAME

    return _begin([*reproductions(), NAME], incomplete)


def claims(incomplete: str) -> list[str]:
    """Methods that the demo has a claim of."""
    from perennial.server.papers.demo import load_claims

    return _begin([claim.method.name for claim in load_claims()], incomplete)


def recipe_names(incomplete: str) -> list[str]:
    """Rows of reproductions that begin so, with the capitals typed; only the tables in question are read."""
    from perennial.server.papers.recipes import recipes
    from perennial.server.papers.reproduce import DEMO, reproductions

    table, slash, _ = incomplete.casefold().partition("/")
    wanted = [
        name for name in (*reproductions(), DEMO.stem) if (name == table if slash else name.startswith(table))
    ]
    begun = [name for name in recipes(tables=wanted) if name.casefold().startswith(incomplete.casefold())]
    return [incomplete + name[len(incomplete) :] for name in begun]


def things(incomplete: str) -> list[str]:
    """What `perennial show` shows: kinds, and names that are enough alone."""
    kinds = _begin(("method", "scenario", "model", "run"), incomplete)
    return kinds + [name for names in (methods, scenarios, models) for name in names(incomplete)]


def shown(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of what `perennial show THING` shows; a run is a folder, which the shell completes itself."""
    names = {"method": methods, "scenario": scenarios, "model": models}.get(str(ctx.params.get("thing")))
    return names(incomplete) if names else []


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

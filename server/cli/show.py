"""`perennial list` and `perennial show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from perennial.common.tasks import TaskName
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import shape_in_words, vocabulary_of
from perennial.common.utils.suggestions import meant, unknown
from perennial.server.cli.completion import methods, models, scenarios, shown, things
from perennial.server.cli.console import out, print_lines
from perennial.server.cli.options import SETTINGS, Json, command
from perennial.server.results.formatting import percent

if TYPE_CHECKING:
    from pydantic import BaseModel

    from perennial.common.data.scenario import Scenario
    from perennial.common.methods.base import Method


KINDS = ("methods", "scenarios", "datasets", "models", "reproductions", "recipes")
THINGS = ("method", "scenario", "model", "run")


@command("list", plugins=True)
def list_things(
    kind: str = typer.Argument(
        ..., metavar="KIND", help=f"What to list: {', '.join(KINDS)}.", autocompletion=lambda: [*KINDS]
    ),
    task: TaskName | None = typer.Option(None, help="Of methods, those that have this task."),
    as_json: Json = False,
) -> None:
    """List what there is, one line each."""
    from perennial.common.plugins import GROUPS, about

    kind = _one_of("kind", KINDS, kind)
    if task and kind != "methods":
        raise UserError("--task goes with perennial list methods")
    plugins = next((about(group) for group in GROUPS if group == kind), {})
    lines = {**plugins, **_lines(kind, task)}
    if as_json:
        out.print_json(data=lines)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    for name, line in lines.items():
        table.add_row(name, line)
    out.print(table)


@command("show", plugins=True)
def show(
    thing: str = typer.Argument(
        ..., metavar="[THING]", help=f"What to show: {', '.join(THINGS)}.", autocompletion=things
    ),
    name: str | None = typer.Argument(
        None, metavar="NAME", help="Its name, or the run folder; enough alone.", autocompletion=shown
    ),
    oracle: bool = typer.Option(
        False, "--oracle", help="For a run: also the round that is best on test data, labelled so."
    ),
    scenario: str | None = typer.Option(
        None,
        help=r"For a model: with which samples and classes.  \[default: pacs for pictures' models]",
        autocompletion=scenarios,
    ),
    settings: list[str] = SETTINGS,
    as_json: Json = False,
) -> None:
    """Show a method's hyper-parameters, a scenario, a model and its parts, or a run."""
    if name is None:
        thing, name = _thing_called(thing), thing
    thing = _one_of("thing", THINGS, thing)
    if thing == "model":
        _show_model(name, scenario, settings, as_json)
    elif scenario or settings:
        raise UserError("--scenario and --set go with perennial show model")
    elif thing == "run":
        from perennial.server.cli.tables import print_run

        print_run(Path(name), as_json, oracle)
    elif thing == "method":
        from perennial.common.methods import method_class

        _show_method(method_class(name), as_json)
    else:
        from perennial.common.data.scenarios import scenario_preset

        _show_scenario(scenario_preset(name), as_json)


def _one_of(what: str, known: tuple[str, ...], word: str) -> str:
    """One of the words, which may be typed in the singular or the plural. Raises `UserError`."""
    for other in (word, f"{word}s", word.removesuffix("s")):
        if other in known:
            return other
    raise UserError(f"{what.upper()}: {unknown(what, word, known)}")


def _thing_called(name: str) -> str:
    """What there is of this name: a method, a scenario, a model or the folder of a run. Raises `UserError`."""
    found = {**dict.fromkeys(models(""), "model"), **dict.fromkeys(scenarios(""), "scenario")}
    found |= dict.fromkeys(methods(""), "method")
    if name in found:
        return found[name]
    if Path(name).is_dir():
        return "run"
    if ":" in name:  # torchvision:resnet50, or a module of one's own
        return "model"
    if name.removesuffix("s") in THINGS:
        raise UserError(f"NAME: which {name.removesuffix('s')}? Its name is missing, as in `perennial show ditto`")
    raise UserError(
        f"there is no method, scenario, model or run folder {name!r:.100}{meant(name, found)} "
        "(`perennial list methods`, `list scenarios` and `list models` have the names)"
    )


def _lines(kind: str, task: TaskName | None = None) -> dict[str, str]:
    """What there is of a kind, of methods those that have a task, and a line for each. Raises `UserError` for a
    damaged file of a reproduction."""
    match kind:
        case "methods":
            from perennial.common.methods import METHODS

            every = {name: method for name, method in METHODS.items() if task in (None, *method.tasks)}
            return {name: f"{method.title}: {method.summary}" for name, method in every.items()}
        case "scenarios":
            from perennial.common.data.scenarios import SCENARIOS

            return {name: _scenario_line(scenario) for name, scenario in SCENARIOS.items()}
        case "datasets":
            from perennial.common.data.datasets import DATASETS

            return {name: dataset.summary for name, dataset in DATASETS.items()}
        case "models":
            from perennial.common.models.settings import GIVEN, MODELS

            return {**{name: model.summary for name, model in MODELS.items()}, **GIVEN}
        case "reproductions":
            from perennial.server.papers import selection_study
            from perennial.server.papers.reproduce import load_reproduction, reproductions

            tables = {name: load_reproduction(name).title for name in reproductions()}
            return {**tables, selection_study.NAME: selection_study.TITLE}
        case _:
            from perennial.server.papers.recipes import recipes

            return recipes()


COUNTS = (
    "how many of its held-out samples are of which environment and class, how many of them each reference knows, "
    "and how many of those each model gets right"
)
"""What the selection `split` makes leave a site; `docs/selection.md` has the same words."""


def _show_method(method: type[Method], as_json: bool) -> None:
    from perennial.common.methods.base import PresetTraining
    from perennial.common.presets import TUNED, presets

    fields, name = fields_of(method), method.model_fields["name"].default
    code = dict(method.CODE) if issubclass(method, PresetTraining) else {}
    tuned = [preset for (own, _), preset in presets().items() if own == name]
    if as_json:
        facts: dict[str, Any] = {"title": method.title, "summary": method.summary, "source": method.source}
        facts["tasks"] = {"has": method.tasks, "because": method.tasks_because, "otherwise": method.nearest}
        facts |= {"sends of what it keeps": method.leaving(), "sends with references": COUNTS}
        facts[TUNED] = [{**preset.model_dump(mode="json"), "command": preset.command} for preset in tuned]
        facts |= {"training": _training(method), "refuses": dict(method.refuses)}
        out.print_json(
            data={**facts, "evaluates": method.evaluates, "hyper-parameters": fields, "preset=code": code}
        )
        return
    out.print(Text.assemble((method.title, "bold"), f": {method.summary}\n{method.source}"))
    why = f", since {method.tasks_because}; for others, such as {method.nearest}" if method.tasks_because else ""
    out.print(f"Tasks: {', '.join(method.tasks)}{why}")
    out.print(f"Of what a client keeps from round to round, it sends: {method.leaving()}")
    out.print(f"With references (docs/selection.md) it also sends, at each evaluation, {COUNTS}.")
    out.print("Under secure aggregation only sums of these counts over clients are seen.\n")
    out.print(_field_table(fields))
    if code:
        out.print(f"\nWith preset=code instead: {', '.join(f'{key}={value}' for key, value in code.items())}")
    if shared := _training(method):
        out.print("\nOf the run, and the same for all methods that take them (docs/training.md):\n")
        out.print(_field_table(shared))
    reasons: dict[str, list[str]] = {}
    for name, why in method.refuses.items():
        reasons.setdefault(why, []).append(name)
    print_lines([f"Not {', '.join(names)}: a method {why}" for why, names in reasons.items()])
    for preset in tuned:
        settings = ", ".join(f"{key}={value}" for key, value in preset.settings.items())
        print_lines(
            [
                f"preset=tuned on {preset.family}: {settings}",
                f"  chosen by {preset.by}: {percent(preset.score)} % (standard error {percent(preset.error)}; the "
                f"best constant has {percent(preset.constant)} %), trial {preset.trial} of {preset.trials}",
                f"  found with: {preset.command} (code {preset.code})",
            ]
        )


def _training(method: type[Method]) -> dict[str, dict[str, Any]]:
    """The shared settings of training that a method takes, by their dotted names."""
    from pydantic import BaseModel

    from perennial.common.training import Training

    found: dict[str, dict[str, Any]] = {}
    for name, facts in fields_of(Training).items():
        table = Training.model_fields[name].annotation
        if name in method.refuses:
            continue
        if isinstance(table, type) and issubclass(table, BaseModel):
            found |= {f"{name}.{key}": own for key, own in fields_of(table, but="").items()}
        else:
            found[name] = facts
    return found


PICTURES = ("torchvision:", "timm:", "resnet18")
"""Models of pictures, by how their names begin."""


def _show_scenario(scenario: Scenario, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "title": scenario.title,
        "source": scenario.source,
        "data set": scenario.dataset,
        "clients": scenario.clients,
        "input shape": list(scenario.input_shape),
        **({"vocabulary": ids} if (ids := vocabulary_of(scenario.input_shape)) else {}),
        "task": scenario.task.name,
        **({"classes": scenario.classes} if scenario.classes else {"outputs": scenario.task.outputs}),
        "training environments": list(scenario.train_environments),
        "test environments": list(scenario.test_environments),
        "rounds": scenario.rounds,
        "participation": scenario.participation,
        "model": scenario.model,
    }
    values, every = scenario.model_dump(mode="json"), fields_of(type(scenario))
    fields = {name: {**field, "default": values[name]} for name, field in every.items() if name in values}
    _print_facts(facts, fields, as_json)


def _show_model(name: str, scenario: str | None, settings: list[str], as_json: bool) -> None:
    """What a model is on a scenario: its parts, what of it is trained, and its settings."""
    from perennial.common.config import load_config
    from perennial.common.models.memory import must_fit
    from perennial.common.models.network import network
    from perennial.common.models.own_module import defaults, layout
    from perennial.common.models.settings import Module, Pretrained

    wanted = scenario or ("pacs" if name.startswith(PICTURES) else "colored-digits")
    run = load_config(options={"method": "fedavg", "scenario": wanted}, settings=[f"model.name={name}", *settings])
    model, shape, classes = run.model, run.scenario.input_shape, run.predicts.outputs
    must_fit(model, shape, classes)
    net = network(model, shape, classes)
    sizes = {key: tensor.numel() for key, tensor in net.whole(net.initial(run.seed)).items()}
    parts = (net.parameter_names, net.featurizer_names, net.classifier_names, net.frozen_names)
    trained, featurizer, classifier, frozen = (f"{sum(sizes[key] for key in names):,}" for names in parts)
    facts = {
        "model": model.name,
        "scenario": f"{wanted}: samples of {shape_in_words(shape)}, {classes} classes",
    }
    values = model.model_dump(mode="json")
    if isinstance(model, Module):
        found = layout(model, shape, classes)
        facts["classifier"] = f"{found.classifier or 'the whole module'} ({found.how})"
        facts["featurizer"] = "its attribute of this name" if found.apart else "everything before the classifier"
        values = defaults(model) | values
    facts |= {
        "features": f"{net.width}",
        "parameters trained": f"{trained}: featurizer {featurizer}, classifier {classifier}",
        "frozen": f"{frozen} numbers",
        "draws in training": "yes, keyed by seed, client, round and action" if net.draws else "no",
    }
    pretrained = model if isinstance(model, Pretrained) else None
    if net.batch_norm_names:
        stay = pretrained and (pretrained.statistics_stay or pretrained.freeze == "featurizer")
        doing = "stay as they are" if stay else "are those of the mini-batch"
        facts["BatchNorm"] = f"statistics {doing} in training"
    if pretrained and pretrained.weights:
        facts["weights"] = pretrained.weights + (f", SHA-256 {pretrained.digest}" if pretrained.digest else "")
    fields, own = fields_of(type(model)), {"description": f"argument of {model.name}"}
    fields |= {key: {**fields.get(key, own), "default": value} for key, value in values.items() if key != "name"}
    _print_facts(facts, fields, as_json)


def _print_facts(facts: dict[str, Any], fields: dict[str, dict[str, Any]], as_json: bool) -> None:
    """Facts about a thing, and below them its settings."""
    if as_json:
        out.print_json(data={**facts, "settings": fields})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, fact in facts.items():
        table.add_row(Text(name, style="bold"), str(fact))
    for part in (table, "", _field_table(fields)):
        out.print(part)


def _scenario_line(scenario: Scenario) -> str:
    from perennial.common.data.scenario import Spurious

    removed = "; the shortcut removed" if isinstance(scenario, Spurious) and scenario.oracle else ""
    size = f"{scenario.clients} clients, {len(scenario.test_environments)} test environments"
    return f"{scenario.title}{removed} ({size})"


def fields_of(settings: type[BaseModel], but: str = "name") -> dict[str, dict[str, Any]]:
    """Every field but the name, as plain data: default, bounds, text, symbol, source, search range."""
    properties = settings.model_json_schema()["properties"]
    hidden = ("title", "type", "anyOf", "items", "prefixItems")
    return {
        name: {key: value for key, value in facts.items() if key not in hidden and value not in ("", None)}
        for name, facts in properties.items()
        if name != but
    }


def _field_table(fields: dict[str, dict[str, Any]]) -> Table:
    table = Table("setting", "default", "what it is")
    for name, facts in fields.items():
        lines = [facts.get("description", ""), *(f"{key}: {value}" for key, value in limits(facts).items())]
        table.add_row(name, str(facts.get("default", "")), "\n".join(lines), end_section=True)
    return table


def limits(facts: dict[str, Any]) -> dict[str, str]:
    """Of a setting, in words: symbol, bounds, search range and source, as far as there are such."""
    from perennial.common.utils.knobs import Search

    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = " ".join(f"{sign}{facts[key]:g}" for key, sign in signs.items() if key in facts)
    found = {
        "symbol": facts.get("symbol"),
        "bounds": bounds or " | ".join(map(str, facts.get("enum", ()))),
        "search": str(Search(**facts["search"])) if "search" in facts else "",
        "source": facts.get("source"),
    }
    return {key: value for key, value in found.items() if value}

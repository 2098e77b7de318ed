"""The configuration of a run: defaults < file < command line < `--set`, complete and checked once it is built."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, SerializeAsAny, ValidationError, field_validator, model_validator

from perennial.common import plugins
from perennial.common.aggregation import Aggregation
from perennial.common.data.augmentation import Augmentation
from perennial.common.data.scenario import Scenario
from perennial.common.data.scenarios import SCENARIOS, scenario_class, scenario_preset
from perennial.common.methods import RESERVED, method_class
from perennial.common.methods.base import Method
from perennial.common.models.settings import ModelSettings, Module, Pretrained, model_settings
from perennial.common.presets import preset_settings
from perennial.common.privacy.mechanisms import NoMechanism, Privacy, mechanism_class
from perennial.common.tasks import PredictionTask
from perennial.common.tasks.own_metric import must_work, named, with_own
from perennial.common.training import ADAM_RATE, OF_THE_METHOD, Optimizer, Schedule, ServerOptimizer, Training
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.parsing import TooDeepError, from_toml
from perennial.common.utils.seeding import numpy_generator
from perennial.common.utils.suggestions import (
    LONGEST,
    LONGEST_VALUE,
    NO_TABLE,
    meant,
    sentence,
    setting_meant,
    unknown,
)

Engine = Literal["loop", "stack", "auto"]
"""How clients that share a process do their work: one after the other, or those that can as one stack."""


class Task(Training):
    """What a client has to know to take part: sent with every message, so that no site is configured by hand."""

    plugins: tuple[str, ...] = knob((), "modules that the method, the scenario or the model are from")
    method: SerializeAsAny[Method]
    scenario: SerializeAsAny[Scenario]
    model: SerializeAsAny[ModelSettings]
    seed: int = knob(0, "keys every random draw of the run, data included", ge=0, le=2**31 - 1)
    left_out: str = knob("", "training environment that nobody trains on; all its samples are held out")
    test_sites: tuple[str, ...] = knob((), "clients that train nothing; all their samples are for testing")
    adapt: int = knob(
        0, "samples of each of test_sites of which it makes a personal model; the others are for testing", ge=0
    )

    @field_validator("plugins")  # the first, since those of the others need what they bring
    @classmethod
    def _plugins(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        for module in modules:
            plugins.load(module)
        return modules

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return method_class(str(values.get("name", ""))).model_validate(values)
        return values

    @field_validator("scenario", mode="before")
    @classmethod
    def _scenario(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return scenario_class(str(values.get("name", ""))).model_validate(values)
        return values

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, values: Any) -> Any:
        return model_settings(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        names = self.scenario.train_environments if self.left_out else ()
        if self.left_out and self.left_out not in names:
            raise ValueError(f"left_out: {unknown('training environment', self.left_out, names)}")
        if len(names) == 1:
            raise ValueError(f"left_out: {self.left_out!r} is the only training environment there is")
        if self.test_sites:
            clients = self.scenario.client_ids
            if strangers := sorted({*self.test_sites} - {*clients}):
                raise ValueError(f"test_sites: {unknown('client', strangers[0], clients)}")
            if len({*self.test_sites}) == len(clients):
                raise ValueError(f"test_sites: all of {', '.join(clients)} are among them; somebody must train")
        elif self.adapt:
            raise ValueError(f"adapt: {self.adapt} is for sites that train nothing; name some in test_sites")
        return self

    @model_validator(mode="after")
    def _augmentation_fits(self) -> Self:
        self.augmentation()
        return self

    def augmentation(self) -> Augmentation | None:
        """What changes training samples; None where nothing does. Raises `ValueError` where it does not fit."""
        if not self.augment and not self.mix:
            return None
        own = self.scenario
        return Augmentation(self.augment, own.input_shape, own.standardised, self.plugins, self.mix, own.classes)

    @model_validator(mode="after")
    def _own_functions_fit(self) -> Self:
        task = self.predicts
        if self.loss and self.scenario.loss_weights:
            raise ValueError(f"loss: {self.loss!r} is not possible beside weights of classes; weigh them in it")
        for setting in ("label_smoothing", "mix"):
            if self.loss and getattr(self, setting):
                value = getattr(self, setting)
                raise ValueError(f"{setting}: {value!r} is not possible beside loss={self.loss!r}")
        must_work(task, self.metric, self.loss)
        return self

    @property
    def predicts(self) -> PredictionTask:
        """What there is to predict: the scenario's task, with a metric and a loss of one's own where there are."""
        if not self.metric and not self.loss:
            return self.scenario.task
        metric = named(self.metric, plugins.member("metric", self.metric, self.plugins)) if self.metric else None
        loss = plugins.member("loss", self.loss, self.plugins) if self.loss else None
        return with_own(self.scenario.task, metric, loss)

    @property
    def training_clients(self) -> list[str]:
        """Ids of the scenario's clients without `test_sites`."""
        return [client for client in self.scenario.client_ids if client not in self.test_sites]


@lru_cache(maxsize=64)
def parse_task(text: str) -> Task:
    """A task from the JSON that travels; the same text is parsed once per process. Raises `UserError`."""
    try:
        return Task.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"the server's task cannot be read: {sentence(error):.1000}") from None


class RunConfig(Task):
    """Everything that determines a run; `config.toml` of a run folder holds it whole."""

    rounds: int = knob(..., "communication rounds", symbol="T", ge=1, le=1_000_000)
    participation: float = knob(..., "fraction of the clients that is asked in a round", gt=0, le=1)
    evaluate_every: int = knob(10, "rounds between two evaluations; the last round is always evaluated", ge=1)
    evaluate_clients: int = knob(
        1000, "clients that are evaluated at most; of more, so many are drawn, once for the whole run", ge=1
    )
    patience: int = knob(
        0, "evaluations without a better held-out score after which the run ends; 0: it never does before", ge=0
    )
    checkpoint_every: int = knob(10, "rounds between two checkpoints; the last round always makes one", ge=1)
    quorum: float = knob(0.5, "fraction of those asked that must answer an exchange, or the run stops", ge=0, le=1)
    deadline: float = knob(600.0, "seconds after which an exchange goes on without the missing clients", gt=0)
    wait: float = knob(120.0, "seconds to wait for the scenario's clients when a run starts", gt=0)
    largest: float = knob(1e9, "largest absolute value accepted in a reply's tensors", gt=0)
    most_examples: int = knob(10_000_000, "most training samples that a client may say it has", ge=1)
    most_items: int = knob(100, "most metrics, and most settings, in a reply", ge=1)
    most_array_bytes: int = knob(2**32, "most bytes of arrays in a reply", ge=1)
    most_metric_bytes: int = knob(2**24, "most bytes of metrics in a reply, 8 for a number", ge=1)
    most_setting_bytes: int = knob(2**20, "most bytes of settings in a reply", ge=1)
    nodes: dict[str, int] = knob({}, "which node alone may be a client: Flower's node ids by client id")
    runtime: Literal["local", "simulation", "deployment"] = knob("local", "where the clients run")
    device: str = knob("auto", 'where tensors live: "auto", "cpu", "cuda" or "cuda:N"')
    cohort_engine: Engine = knob(
        "loop",
        "clients one after the other, those with work of the same shape as one stack, or auto: stacks where they "
        "are faster; equal but for rounding; without effect where each client has a process",
    )
    client_cpus: float = knob(1.0, "processor cores that a client has in Flower's simulation", gt=0)
    client_gpus: float = knob(
        0.0, "GPUs that a client has in Flower's simulation, e.g. 0.25: four at a time on each", ge=0
    )
    ray_address: str = knob(
        "", "Ray cluster for Flower's simulation, with the run folder on a disk that all share; empty: this one"
    )
    data_root: str = knob("", "folder of the raw data sets; empty: PERENNIAL_DATA")
    references: str = knob("", "file of models with which clients tell held-out samples apart, for `split`")
    scores: Literal["auto", "on", "off"] = knob(
        "auto",
        "whether evaluations also count test samples: of two classes by score, for sensitivity, AUROC, "
        "calibration; numbers by true and predicted value, and events by interval, for figures; auto: on own "
        "data, without a privacy mechanism",
    )
    privacy: SerializeAsAny[Privacy] = NoMechanism()
    aggregation: Aggregation = Aggregation()
    server_optimizer: ServerOptimizer = ServerOptimizer()
    server_schedule: Schedule = Schedule()

    @field_validator("privacy", mode="before")
    @classmethod
    def _privacy(cls, values: Any) -> Any:
        return mechanism_class(values).model_validate(values) if isinstance(values, Mapping) else values

    @property
    def scored(self) -> bool:
        """Whether evaluations have the task's `scored` of test samples."""
        if self.scores != "auto":
            return self.scores == "on"
        own = self.scenario.dataset == "own" and self.privacy.mechanism == "none"
        return own and bool(self.predicts.scored)

    @property
    def ranking_batch(self) -> int:
        """Test samples that are ranked together for the areas under curves; 0 where none are, as behind a
        mechanism: rankings are histograms of single samples. They are of two classes alone."""
        two = self.scenario.classes == 2 and self.privacy.mechanism == "none"
        return self.scenario.ranking_batch if two else 0

    @property
    def cohort(self) -> int:
        """How many clients are asked in a round."""
        return max(1, round(self.participation * len(self.scenario.client_ids)))

    @property
    def sites_with_data(self) -> Sequence[str]:
        """The clients that have data of their own, and so a place in tables; none where they share a data set."""
        return self.scenario.client_ids if self.scenario.dataset == "own" else ()

    @property
    def evaluates_some(self) -> bool:
        """Whether not all clients are evaluated."""
        return self.evaluate_clients < len(self.scenario.client_ids)

    @property
    def evaluated(self) -> Sequence[str]:
        """The clients that are evaluated, in the order of client ids: all, or so many drawn by the seed, and those
        that only test.

        The same ones in all rounds, so that rounds can be compared.
        """
        ids = self.scenario.client_ids
        if not self.evaluates_some:
            return ids
        drawn = numpy_generator(self.seed, "server", "evaluated").choice(
            len(ids), self.evaluate_clients, replace=False
        )
        chosen = {ids[number] for number in drawn} | {*self.test_sites}
        return [client for client in ids if client in chosen]

    @property
    def data_folder(self) -> Path | None:
        """`data_root` as a path; None where PERENNIAL_DATA decides."""
        return Path(self.data_root) if self.data_root else None

    def task(self) -> str:
        """The part that clients need, as JSON."""
        told = self.model_copy(update={"schedule": self.schedule.over(self.rounds)})
        return told.model_dump_json(include=set(Task.model_fields))

    def rates(self, round_: int) -> dict[str, float]:
        """The step sizes of a round, of clients and of the server, where they have a schedule."""
        found = {}
        if self.schedule != Schedule():
            rate = getattr(self.method, "learning_rate", 1.0)
            found["client"] = rate * self.schedule.over(self.rounds).at(round_)
        if self.server_schedule != Schedule():
            rate = self.server_optimizer.learning_rate
            found["server"] = rate * self.server_schedule.over(self.rounds).at(round_)
        return found

    def all_train(self) -> str:
        """What it is that cannot do with clients that have nothing to train on; empty where all can."""
        if self.privacy.mechanism != "none":
            return f"privacy.mechanism={self.privacy.mechanism}"
        if "ensemble" in self.method.evaluates:
            return f"the method {self.method.name}, whose ensemble has a part of every client"
        return ""

    def toml(self) -> str:
        """The complete configuration as TOML; `load_config` of it gives an equal configuration."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def flat(self) -> dict[str, str]:
        """Every setting as text by its dotted name, e.g. `method.learning_rate`."""
        return dict(_flat(self.model_dump(mode="json")))

    def changed(self, other: "RunConfig") -> dict[str, list[str]]:
        """By dotted name, the settings that are others there: what they are here and what they are there."""
        here, there = self.flat(), other.flat()
        return {
            name: [here.get(name, "nothing"), there.get(name, "nothing")]
            for name in dict.fromkeys((*here, *there))
            if here.get(name) != there.get(name)
        }


RESERVED.update(RunConfig.model_fields)  # names that no field of a plug-in's method may have

NAMED = ("optimizer", "schedule", "server_optimizer", "server_schedule")
"""Tables whose name alone may stand for them: `--set optimizer=adam`."""
PARTS = ("method", "scenario", "model", "privacy", "aggregation", "nodes", *NAMED)
"""What `--set PART.KEY=VALUE` reaches."""


def load_config(
    file: Path | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Iterable[str] = (),
    say: Callable[[str], object] = lambda _: None,
) -> RunConfig:
    """The configuration from a TOML file, named options, and `key=value` settings, the later the stronger.

    The option `scenario` may also be a `Scenario`. A bare key is one of the method's hyper-parameters or of the
    run; `scenario.key`, `model.key`, `privacy.key`, `aggregation.key` and `nodes.CLIENT` reach the others;
    `aggregation` alone is its rule. `preset` puts settings that were found for the method under all of these; the
    configuration has the settings and not the name. An option that names the file's own method or scenario keeps
    the file's settings of it. Another scenario comes with its own rounds, participation and model, and `say` is
    told what of the file is not used. Raises `UserError` with one sentence for the first thing that is wrong.
    """
    try:
        given = {key: value for key, value in (options or {}).items() if value is not None}
        if isinstance(scenario := given.get("scenario"), Scenario):
            given["scenario"] = scenario.model_dump()
        return _load(file, given, settings, say)
    except RecursionError:
        raise UserError(f"{f'configuration file {file}' if file else 'a setting'} is nested too deeply") from None


def _load(
    file: Path | None, options: Mapping[str, Any], settings: Iterable[str], say: Callable[[str], object]
) -> RunConfig:
    values = read(file) if file else {}
    if unused := _superseded(values, options):
        said = {part: _named(options[part], part)["name"] for part in ("method", "scenario") if part in unused}
        names = " and ".join(f"--{part} {name}" for part, name in said.items())
        say(f"of {file}, not used with {names}: {', '.join(unused.values())}")
    values = {key: value for key, value in values.items() if key not in unused}
    kept = {"method", "scenario"} & values.keys()  # the options name them, too, but without their settings
    values |= {key: value for key, value in options.items() if key not in kept}
    for module in _modules(values.get("plugins", ())):
        plugins.plugin(module)
    values["method"] = _named(values.get("method", "fedsdr"), "method")
    values["privacy"] = _table(values.get("privacy", {}), "privacy")
    rule = values.get("aggregation", {})
    values["aggregation"] = {"rule": rule} if isinstance(rule, str) else _table(rule, "aggregation")
    values["scenario"] = _scenario_table(values.get("scenario", "colored-digits"))
    method = method_class(str(values["method"]["name"]))
    scenario_type = scenario_class(str(values["scenario"]["name"]))
    assigned = [_assignment(setting, method, scenario_type) for setting in settings]
    for (part, key), value in assigned:
        if part in PARTS and part != "model":
            values[part] = {**_table(values.get(part, {}), part), key: value}
        elif not part:
            values[key] = value
    scenario = _checked(scenario_type, values["scenario"], "scenario.")
    values["method"] = _with_preset(values.pop("preset", None), values["method"], method, scenario.name)
    values["optimizer"] = _optimizer(values, method)
    values["method"] = _checked(method, values["method"], "method.")
    model = _table(values.get("model", {}), "model") | {key: v for (part, key), v in assigned if part == "model"}
    same = model.get("name", scenario.model["name"]) == scenario.model["name"]
    values["model"] = (scenario.model if same else {}) | model
    values["privacy"] = _checked(mechanism_class(values["privacy"]), values["privacy"], "privacy.")
    values["aggregation"] = _checked(Aggregation, values["aggregation"], "aggregation.")
    own: dict[str, type[BaseModel]] = {
        "schedule": Schedule,
        "server_optimizer": ServerOptimizer,
        "server_schedule": Schedule,
    }
    values |= {name: _checked(kind, _table(values.get(name, {}), name), f"{name}.") for name, kind in own.items()}
    values = {"rounds": scenario.rounds, "participation": scenario.participation, **values}
    named = [str(values[setting]).partition(":")[0] for setting in ("metric", "loss") if values.get(setting)]
    for module in named:
        plugins.plugin(module)
    values["plugins"] = tuple(dict.fromkeys([*values.get("plugins", ()), *named]))
    config = _checked(RunConfig, values)
    if isinstance(config.model, Pretrained):
        config = config.model_copy(update={"model": _with_local_facts(config.model, config.scenario)})
    brought = plugins.of(method, scenario_type, type(config.model))
    config = config.model_copy(update={"plugins": tuple(dict.fromkeys([*config.plugins, *brought]))})
    if lack := config.method.lacks(config.predicts.name):
        raise UserError(f"method.name: {config.method.name!r} {lack}")
    if misfit := config.method.misfit(config.scenario):
        raise UserError(f"method.{misfit}")
    if misfit := config.misfit(config.method):
        raise UserError(misfit)
    if config.label_smoothing and (kind := config.predicts.name) not in ("classes", "labels"):
        raise UserError(
            f"label_smoothing: {config.label_smoothing:g} is for classes and labels, and the task is {kind}"
        )
    if config.mix and (kind := config.predicts.name) != "classes":
        raise UserError(f"mix: {config.mix!r} is for classes, and the task is {kind}")
    if config.server_optimizer.name != "none" and (why := config.method.refuses.get("server_optimizer")):
        name = config.server_optimizer.name
        raise UserError(
            f"server_optimizer.name: {name!r} is not possible with method {config.method.name!r}, {why}"
        )
    if config.server_schedule != Schedule() and config.server_optimizer.name == "none":
        raise UserError(
            "server_schedule: it needs a server_optimizer, whose step size it changes, such as fedavgm"
        )
    if misfit := config.privacy.misfit(config.method, config.model, config.cohort):
        raise UserError(f"privacy.{misfit}")
    training = min(config.cohort, len(config.training_clients))
    if misfit := config.aggregation.misfit(config.method, config.privacy, training):
        raise UserError(f"aggregation.{misfit}")
    task, mechanism = config.predicts, config.privacy.mechanism
    if mechanism != "none" and any(column.by_score for column in task.columns.values()):
        raise UserError(
            f"privacy.mechanism: {mechanism!r} is not possible with the task {task.name}, whose evaluations tell "
            "how many samples have which score; take 'none'"
        )
    if config.references and not task.answers:
        raise UserError(
            f"references: {config.references!r} is not possible with the task {task.name!r}, which has no "
            "right and wrong answers; leave it out"
        )
    if config.references and (why_not := config.privacy.no_counts(len(config.evaluated))):
        raise UserError(f"references: {config.references!r} is not possible with {why_not}")
    if config.left_out and (why_not := config.all_train()):
        raise UserError(f"left_out: {config.left_out!r} is not possible with {why_not}")
    if config.test_sites and (why_not := config.all_train() or config.scenario.cannot_ask_sites()):
        raise UserError(f"test_sites: {', '.join(config.test_sites)} is not possible with {why_not}")
    if config.adapt and (why_not := config.method.cannot_adapt()):
        raise UserError(f"adapt: {config.adapt} is not possible with the method {config.method.name}, {why_not}")
    if config.scores == "on" and not task.scored:
        where = config.scenario.name
        if has := config.scenario.classes:
            raise UserError(f"scores: 'on' is for two classes, and {where} has {has}; leave it out")
        raise UserError(f"scores: 'on' adds nothing to evaluations of {where} (task {task.name}); leave it out")
    if getattr(config.model, "one_logit", False) and not config.scenario.classes:
        raise UserError(
            f"model.one_logit: true is for two classes, and not for the task {task.name}; leave it out"
        )
    for client in config.nodes:
        if client not in config.scenario.client_ids:
            raise UserError(f"nodes: {unknown('client', client, config.scenario.client_ids)}")
    return config


def _with_local_facts(model: Pretrained, scenario: Scenario) -> Pretrained:
    """With what only the person's own machine can say of the module's file and of the weights."""
    if isinstance(model, Module) and not model.library:
        plugins.trust_named(model.name.partition(":")[0])
    if not (model.starts_from_weights or model.mean):
        return model
    from perennial.common.models.weights import settled

    return settled(model, scenario)


def _with_preset(name: Any, values: Mapping[str, Any], method: type[Method], family: str) -> dict[str, Any]:
    """A method's settings, and under them those of a preset; some methods have presets of their own, too."""
    given, field = dict(values), method.model_fields.get("preset")
    own = get_args(field.annotation) if field else ()
    if name is None and given.get("preset") not in (None, *own):
        name = given.pop("preset")
    return given if name is None else preset_settings(name, str(given["name"]), family, own) | given


def _optimizer(values: Mapping[str, Any], method: type[Method]) -> Optimizer:
    """A run's optimizer. Into the table of the method goes what is said beside it and the method's own: its step
    size, which for adam is another one where none is given."""
    given, own = _table(values.get("optimizer", {}), "optimizer"), values["method"]
    for name in OF_THE_METHOD.keys() & given.keys():
        field, value = OF_THE_METHOD[name], given.pop(name)
        if field not in method.model_fields:
            raise UserError(f"optimizer.{name}: the method {own['name']} has no {field}; leave it out")
        if own.setdefault(field, value) != value:
            raise UserError(f"optimizer.{name}: {value!r} is not possible beside method.{field}={own[field]!r}")
    found = _checked(Optimizer, given, "optimizer.")
    if found.name != "sgd":
        for field in {"learning_rate", "personal_learning_rate"} & method.model_fields.keys():
            own.setdefault(field, ADAM_RATE)
    return found


def _superseded(values: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """What of a file another method or scenario replaces: by key, in words. Empty where it keeps its names."""
    both = [part for part in ("method", "scenario") if part in values and part in options]
    unused = {
        part: f"[{part}] {_named(values[part], part)['name']}"
        for part in both
        if not _same(part, options[part], values[part])
    }
    if "scenario" in unused:  # these were chosen for the other one
        plain = ("rounds", "participation")
        unused |= {key: f"{key} = {values[key]}" for key in plain if key in values and key not in options}
        if "model" in values and "model" not in options:
            unused["model"] = f"[model] {_table(values['model'], 'model').get('name', '')}".rstrip()
    return unused


def _same(part: str, wanted: Any, values: Any) -> bool:
    """Whether a file's method or scenario has this name; a scenario may have been one of a longer name."""
    if wanted == (values if isinstance(values, str) else _named(values, part)["name"]):
        return True
    if part == "method" or not isinstance(wanted, str) or isinstance(values, str) or wanted not in SCENARIOS:
        return False
    return _named(SCENARIOS[wanted].model_dump(mode="json"), part) == _named(values, part)


S = TypeVar("S", bound=BaseModel)


def _checked(settings: type[S], values: Mapping[str, Any], prefix: str = "") -> S:
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        first, hint = error.errors()[0], ""
        misplaced = prefix and first["type"] in ("extra_forbidden", *NO_TABLE)
        if misplaced and not RunConfig.model_fields.keys().isdisjoint(first["loc"]):
            hint = "; a setting of the run stands above the first [table], or has no dot in --set"
        raise UserError(prefix + sentence(error, settings.model_fields) + hint) from None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def read(file: Path) -> dict[str, Any]:
    """What a TOML file says, unchecked. Raises `UserError` where it is none, or says nothing."""
    try:
        values = from_toml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"configuration file {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:  # as PowerShell's > writes
        raise UserError(f"configuration file {file} is not UTF-8; save it as UTF-8") from None
    except ValueError as error:  # TOML's own, and of numbers with thousands of digits
        raise UserError(f"configuration file {file} is not valid TOML: {error}") from None
    if not values:
        raise UserError(f"configuration file {file} has no settings; leave out --config to run with the defaults")
    return values


def _modules(value: Any) -> list[str]:
    if isinstance(value, list | tuple) and all(isinstance(module, str) for module in value):
        return list(value)
    raise UserError(f'plugins: {value!r} is not possible; give a list of modules, such as ["my_method"]')


def _table(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return {"name": value}
    raise UserError(f"{what}: {value!r} is not possible; give a name or a table with a name")


def _named(value: Any, what: str) -> dict[str, Any]:
    table = _table(value, what)
    if "name" not in table:
        hint = next((f"; it has {key!r}{text}" for key in table if (text := meant(key, ["name"]))), "")
        raise UserError(f"{what}: the table [{what}] needs a name{hint}")
    return table


def _scenario_table(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return scenario_preset(value).model_dump()
    return _named(value, "scenario")


def _assignment(setting: str, method: type[Method], scenario: type[Scenario]) -> tuple[tuple[str, str], Any]:
    key, equals, text = setting.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise UserError(f"--set {setting!r} is not possible; write key=value")
    try:
        value = from_toml(f"value = {text}")["value"]
    except TooDeepError as error:
        raise UserError(f"--set {key}: {error}") from None
    except ValueError:
        if text.startswith(("[", "{")):  # what a shell leaves of a list of names without quotes around it
            raise UserError(
                f"--set {key}: {text[:LONGEST_VALUE]} is no list or table of TOML; names in it stand in double "
                f"""quotes, and all of it in single ones, as in --set '{key}=["a", "b"]'"""
            ) from None
        value = text
    part, dot, name = key.partition(".")
    if key == "plugins":
        raise UserError("--set plugins is not possible; name them with --plugin or in a configuration file")
    if key == "aggregation":
        return (key, "rule"), value
    if key in NAMED and key not in method.model_fields:
        return (key, "name"), value
    if part == "optimizer" and OF_THE_METHOD.get(name) in method.model_fields:
        return ("method", OF_THE_METHOD[name]), value
    if key in ("method", "scenario", "method.name", "scenario.name"):
        raise UserError(f"--set {key} is not possible; choose it with --{part} or in a configuration file")
    if dot and part in PARTS:
        return (part, name), value
    if dot:
        raise UserError(f"--set {key}: the part before the dot must be one of {', '.join(PARTS)}, not {part!r}")
    known = set(method.model_fields) - {"name"}
    if key in known:
        return ("method", key), value
    run = set(RunConfig.model_fields) - {"plugins", "method", "scenario", "model", "privacy"} | {"preset"}
    if key in run:
        return ("", key), value
    fields = set(scenario.model_fields) - {"name"}
    elsewhere = {"privacy.mechanism", "model.name", *(f"scenario.{field}" for field in fields)}
    raise UserError(_unknown_setting(key, method, known, run | elsewhere))


def _unknown_setting(key: str, method: type[Method], own: set[str], others: set[str]) -> str:
    """What may be meant comes first; of the names, those of the method alone, since the others are forty."""
    extras = {name: method.model_fields[name].json_schema_extra for name in own}
    symbols = {
        str(extra["symbol"]): name
        for name, extra in extras.items()
        if isinstance(extra, dict) and "symbol" in extra
    }
    name = method.model_fields["name"].default
    of_part = sorted(other for other in others if other.startswith(f"{key}."))
    found = setting_meant(key, own | others, symbols) or of_part[:1]
    hint = f"; did you mean {found[0]!r}{''.join(f' with {more}' for more in found[1:])}?" if found else ""
    return (
        f"unknown setting {key[:LONGEST]!r}{hint} ({name} has {', '.join(sorted(own)) or 'none'}: `perennial show "
        f"method {name}`; docs/running.md has those of every run)"
    )

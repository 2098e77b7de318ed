"""Methods, models and scenarios of other people's modules: found when asked for, and no harm if broken."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_packages import CLIENT, METHOD, MODEL, SCENARIO, SERVER, SETTINGS, install, unloaded, write
from safetensors.torch import load_file
from typer.testing import CliRunner

from perennial.client.host import Host, client_class
from perennial.common import plugins
from perennial.common.config import RunConfig, load_config, parse_task
from perennial.common.data.scenarios import SCENARIOS, scenario_class
from perennial.common.methods import METHODS, method_class, reserved
from perennial.common.models.network import network
from perennial.common.models.settings import MODELS, model_settings
from perennial.common.utils.errors import UserError
from perennial.server import runs
from perennial.server.cli.main import app
from perennial.server.cli.reference_lines import fedavg_beside
from perennial.server.local import LocalRuntime
from perennial.server.run import input_files
from perennial.server.run.folder import RunFolder
from perennial.server.run.input_files import plug_in_digests
from perennial.server.study import run_names
from perennial.server.study.run_names import run_name
from perennial.server.study.sweep import trial
from perennial.strategies.registry import strategy_class
from perennial.testing import methods
from perennial.testing import models as contract
from perennial.testing import scenarios as scenario_contract

SMALL = ["--set", "scenario.clients=2", "--rounds", "1", "--scenario", "colored-digits"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, and nothing left of what a test has loaded."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv(plugins.VARIABLE, "")
    with unloaded():
        yield tmp_path / "work"


def config(method: str = "my-prox", **options: Any) -> RunConfig:
    size = {"method": method, "scenario": "colored-digits", "rounds": 1}
    return load_config(options={**size, **options}, settings=["scenario.clients=2"])


def perennial(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


# ---------------------------------------------------------------------- the ways in


def test_a_file_beside_ones_work_runs_as_our_own_method_does(folder: Path) -> None:
    write(folder, "my_method", METHOD)
    for name, extra in (("fedprox", []), ("my-prox", ["--plugin", "my_method"])):
        done = perennial("run", "--method", name, *SMALL, *extra, "--out", name)
        assert done[0] == 0, done[1]
    one, other = (load_file(folder / name / "models" / "global.safetensors") for name in ("fedprox", "my-prox"))
    assert all(one[key].equal(other[key]) for key in one)
    assert RunFolder(Path("my-prox")).config().plugins == ("my_method",)
    assert RunFolder(Path("fedprox")).config().plugins == ()


def test_a_package_has_its_halves_in_files_of_their_own(folder: Path) -> None:
    write(folder, "my_package.__init__", SETTINGS)
    write(folder, "my_package.client", CLIENT)
    write(folder, "my_package.server", SERVER)
    found = config(plugins=["my_package"])
    assert client_class(type(found.method)).__name__ == "MyClient"
    assert strategy_class(found.method).__name__ == "MyServer"


def test_a_plug_in_may_have_one_of_our_halves(folder: Path) -> None:
    families = (
        'name: Literal["my-prox"] = "my-prox"',
        'family = "fedprox"\n    name: Literal["my-prox"] = "my-prox"',
    )
    write(folder, "my_method", SETTINGS.replace(*families))
    write(
        folder,
        "my_uniform",
        METHOD.replace("my-prox", "my-mean").replace("MyProx", "MyMean")
        + "    pass\nMyMean.server = lambda _: 'uniform'\n",
    )
    assert client_class(type(config(plugins=["my_method"]).method)).__name__ == "FedProxClient"
    assert strategy_class(config("my-mean", plugins=["my_uniform"]).method).__name__ == "UniformStrategy"


ABLATION = """
from typing import Literal

from perennial.client.methods.fedsdr import FedSDRClient
from perennial.common.methods.fedsdr import FedSDR


class MySDR(FedSDR):
    title = "my-sdr"
    name: Literal["my-sdr"] = "my-sdr"
"""


def test_a_subclass_of_our_method_has_its_halves_where_it_brings_none(folder: Path) -> None:
    write(folder, "my_settings", ABLATION)
    write(
        folder, "my_half", ABLATION.replace("my-sdr", "my-half") + "\n\nclass MyClient(FedSDRClient):\n    pass\n"
    )
    base = "class Base:\n    def server(self): return 'uniform'\n\n\nclass MySDR(Base, FedSDR)"
    write(folder, "my_uniform", ABLATION.replace("my-sdr", "my-mean").replace("class MySDR(FedSDR)", base))
    between = "class Between(FedSDR):\n    pass\n\n\nclass MySDR(Between)"
    write(folder, "my_two", ABLATION.replace("my-sdr", "my-two").replace("class MySDR(FedSDR)", between))
    assert config("my-two", plugins=["my_two"]).method.name == "my-two"
    named = [("my-sdr", "my_settings"), ("my-half", "my_half"), ("my-mean", "my_uniform")]
    methods = [config(name, plugins=[module]).method for name, module in named]
    assert [client_class(type(method)).__name__ for method in methods] == [
        "FedSDRClient",
        "MyClient",
        "FedSDRClient",
    ]
    servers = [strategy_class(method).__name__ for method in methods]
    assert servers == ["FedSDRStrategy", "FedSDRStrategy", "UniformStrategy"]


@pytest.mark.parametrize("name", ["registry", "uniform"])
def test_a_plug_in_may_have_the_name_of_a_file_of_ours(name: str, folder: Path) -> None:
    write(folder, "my_method", METHOD.replace("my-prox", name))
    assert strategy_class(config(name, plugins=["my_method"]).method).__name__ == "MethodStrategy"


def test_an_installed_plug_in_is_found_by_its_names_and_imported_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    names = {
        "methods": {"my-prox": "my_method"},
        "models": {"my-net": "my_model"},
        "scenarios": {"my-digits": "my_data"},
    }
    install(monkeypatch, site, "my-work", **names)
    for name, text in (("my_method", METHOD), ("my_model", MODEL), ("my_data", SCENARIO)):
        write(site, name, text)
    code, listed = perennial("list", "methods")
    assert code == 0
    assert "plug-in of my-work 1.2 (my_method)" in listed
    assert not {"my_method", "my_model", "my_data"} & sys.modules.keys()
    found = load_config(options={"method": "my-prox", "scenario": "my-digits", "model": {"name": "my-net"}})
    assert set(found.plugins) == {"my_method", "my_data", "my_model"}
    assert parse_task(found.task()).method == found.method
    assert perennial("show", "method", "my-prox")[1].startswith("MyProx: FedProx again")
    assert "my_method" not in os.environ[plugins.VARIABLE]


NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, classes))
"""


def test_an_installed_model_may_be_an_ordinary_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "site", "my-nets", models={"my-net": "my_nets:Net"})
    write(tmp_path / "site", "my_nets", NET)
    found = load_config(options={"method": "fedavg", "scenario": "colored-digits", "model": {"name": "my-net"}})
    assert found.model.name == "my_nets:Net"
    assert "my-net" in perennial("list", "models")[1]
    code, shown = perennial("show", "model", "my-net")
    assert code == 0, shown
    assert "my_nets:Net" in shown


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (
            "nn.Linear(8, 5))",
            "model 'my-net' gives 5 logits, and there are 2 classes; let what builds it use `classes`",
        ),
        (
            "nn.Sequential(nn.Linear(8, classes), nn.Flatten(0)))",
            "gives 4 for 2 samples, and no logit for each class",
        ),
        (
            "nn.Linear(9, classes))",
            "model 'my-net' cannot take samples of shape 2x8x8: RuntimeError: mat1 and mat2",
        ),
    ],
)
def test_a_model_must_give_a_logit_for_each_class(built: str, words: str, folder: Path) -> None:
    write(folder, "my_model", MODEL.replace("nn.Linear(8, classes))", built))
    found = config("fedavg", plugins=["my_model"], model="my-net")
    with pytest.raises(UserError, match=re.escape(words)):
        LocalRuntime(found)


def test_what_builds_a_model_must_give_a_model(folder: Path) -> None:
    write(folder, "my_model", MODEL.replace("return Model(", "return nn.Sequential("))
    found = config("fedavg", plugins=["my_model"], model="my-net")
    with pytest.raises(
        UserError, match="model 'my-net': what builds it gives a Sequential; let it give a `Model`"
    ):
        LocalRuntime(found)


def test_a_scenario_and_a_model_train(folder: Path) -> None:
    write(folder, "my_data", SCENARIO)
    write(folder, "my_model", MODEL)
    own = ["--plugin", "my_data", "--plugin", "my_model", "--scenario", "my-digits", "--set", "model.name=my-net"]
    code, output = perennial("run", "--method", "fedavg", "--rounds", "1", *own, "--out", "run")
    assert code == 0, output
    assert load_file("run/models/global.safetensors")["classifier.weight"].shape == (2, 8)
    assert scenario_class("my-digits").__name__ == "MyDigits"
    assert SCENARIOS["my-digits"].clients == 2


def test_a_loss_may_leave_out_the_risk_and_perennial_check_says_what_it_misses(
    folder: Path, tmp_path: Path
) -> None:
    silent = "    def loss(self, *given):\n        return super().loss(*given)[0], {}\n"
    write(folder, "my_method", METHOD + silent)
    code, output = perennial("run", "--plugin", "my_method", "--method", "my-prox", *SMALL, "--out", "run")
    assert code == 0, output
    with pytest.raises(AssertionError, match="the loss reports no metric 'risk', by which this test tells"):
        methods.test_trains_and_improves("my-prox", tmp_path)


def test_presets_are_scenarios_by_names_of_their_own(folder: Path) -> None:
    write(folder, "my_data", SCENARIO + '\nPRESETS = {"my-four": MyDigits(clients=4)}\n')
    found = load_config(options={"method": "fedavg", "scenario": "my-four", "plugins": ["my_data"]})
    assert (found.scenario.name, found.scenario.clients) == ("my-digits", 4)
    assert "my-digits" not in SCENARIOS


def test_a_file_of_a_run_names_its_plug_ins(folder: Path) -> None:
    write(folder, "my_method", METHOD)
    (folder / "run.toml").write_text('plugins = ["my_method"]\nmethod = "my-prox"\nscenario = "colored-digits"\n')
    code, output = perennial("run", "--config", "run.toml", *SMALL[:4], "--out", "run")
    assert code == 0, output
    code, output = perennial("show", "run", "run")
    assert code == 0, output


@pytest.mark.slow
def test_the_runs_of_a_study_find_it_in_their_processes(folder: Path) -> None:
    write(folder, "my_method", METHOD)
    study = [
        "compare",
        "--methods",
        "my-prox",
        "--trials",
        "2",
        "--jobs",
        "2",
        "--out",
        "pool",
        "--plugin",
        "my_method",
    ]
    code, output = perennial(*study, *SMALL, "--seeds", "1")
    assert code == 0, output
    assert "MyProx" in output


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_trial_whose_server_half_raises_costs_that_trial(jobs: str, folder: Path) -> None:
    raising = """
    def update(self, model, means):
        if self.hparams.proximity != 0.01:
            raise ValueError("of the\\nserver half")
        return super().update(model, means)
"""
    file = write(folder, "my_method", METHOD + SERVER + raising)
    study = ["tune", "my-prox", "--trials", "2", "--jobs", jobs, "--out", "pool", "--plugin", "my_method"]
    for _ in range(2):  # the second time it is read from the folder
        code, output = perennial(*study, *SMALL, "--select", "held-out")
        assert code == 0, output
        assert "chosen: trial 0" in output
        line = file.read_text().splitlines().index('            raise ValueError("of the\\nserver half")') + 1
        (trouble,) = [text for text in output.splitlines() if text.startswith("pool/my-prox")]
        what = "plug-in 'my_method' raised ValueError: of the server half"
        assert f" stopped: {what} ({file.name}, line {line}); pool/my-prox" in trouble
        (kept,) = Path("pool").glob("*/traceback.txt")
        assert str(kept) in trouble
        assert "in update" in kept.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("edited", ["", "my_method", "my_helper"])
def test_a_run_goes_on_with_its_plug_in(edited: str, folder: Path) -> None:
    """In a new process, as after a crash; it says so if the plug-in, or a file beside it, is another one now."""
    write(folder, "my_method", f"import my_helper\n{METHOD}")
    write(folder, "my_helper", "WEIGHT = 1\n")
    write(folder, "my_neighbour", "1 / 0\n")
    path = folder / "run"
    found = config(plugins=["my_method"], rounds=2)
    LocalRuntime(found).run(RunFolder.create(path, found), until=1)
    write(folder, "my_neighbour", "nobody imports this\n")
    if edited:
        write(folder, edited, f"{(folder / f'{edited}.py').read_text()}# more\n")
    program = "from perennial.server.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", program, "resume", "run"]
    environment = {**os.environ, plugins.VARIABLE: ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = RunFolder(path).summary()
    assert summary["rounds"] == 2
    assert [name for entry in summary.get("changed", ()) for name in entry["settings"]] == (
        ["plug-in my_method"] if edited else []
    )
    assert ("changed from round 2 on: plug-in my_method" in done.stderr) == bool(edited)


@pytest.mark.parametrize("edited", ["", "my_method", "my_data"])
def test_fedavg_beside_a_run_had_the_same_scenario_and_any_method(edited: str, folder: Path) -> None:
    write(folder, "my_method", METHOD)
    write(folder, "my_data", SCENARIO)
    names = {"scenario": "my-digits", "plugins": ["my_method", "my_data"]}
    before, found = config("fedavg", **names), config(**names)
    LocalRuntime(before).run(RunFolder.create(folder / "before", before))
    if edited:
        write(folder, edited, f"{(folder / f'{edited}.py').read_text()}# more\n")
        input_files._imported.clear()  # as a new process
    RunFolder.create(folder / "run", found)
    assert fedavg_beside(folder / "run", found) == (None if edited == "my_data" else folder / "before")
    write(folder, "my_data", "# edited after both\n")
    assert bool(fedavg_beside(folder / "run", found)) == (edited != "my_data")


@pytest.mark.parametrize("earlier", ["taken up", "run"])
def test_a_plug_in_that_changed_since_it_was_imported_runs_no_more(earlier: str, folder: Path) -> None:
    """As in a notebook: Python keeps the old code, and the run folder would note the new one."""
    write(folder, "my_method", METHOD)
    if earlier == "taken up":
        runs.plugin("my_method")
    found = config(plugins=["my_method"])
    if earlier == "run":
        RunFolder.create(folder / "one", found)
    write(folder, "my_method", f"{METHOD}# more\n")
    with pytest.raises(UserError, match="plug-in my_method has changed since this process imported it"):
        RunFolder.create(folder / "two", found)
    assert not list((folder / "two").iterdir())
    with pytest.raises(UserError, match="plug-in my_method has changed since this process imported it"):
        runs.plugin("my_method")


def test_none_is_a_default_like_any_other(folder: Path) -> None:
    text = METHOD.replace("proximity: float = knob(0.01", "proximity: float | None = knob(None")
    write(
        folder,
        "my_method",
        text.replace("between(1e-3, 1.0, log=True)", "choice(None, 1.0)").replace("between, ", "choice, "),
    )
    for number in range(4):
        found = trial(config(plugins=["my_method"]), number)
        assert RunFolder.create(folder / f"run {number}", found).config() == found


# ---------------------------------------------------------------------- what a study's digest covers


@pytest.mark.parametrize("changed", ["my_method", "my_helper"])
def test_a_change_in_a_plug_in_is_another_version_of_the_code(changed: str, folder: Path) -> None:
    write(folder, "my_method", "import my_helper\n" + METHOD)
    write(folder, "my_helper", "WEIGHT = 1\n")
    found, ours = config(plugins=["my_method"]), config("fedprox")
    names = run_name(found), run_name(ours)
    text = (folder / f"{changed}.py").read_text()
    write(folder, changed, f"{text}# more\n")
    run_names.code_version.cache_clear()
    assert run_name(found).rpartition("-")[0] == names[0].rpartition("-")[0]
    assert run_name(found) != names[0]
    assert run_name(ours) == names[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("my_package", "from .losses import WEIGHT"),
        ("my_package", "from . import losses"),
        ("my_package", "from .deeper import WEIGHT"),
        ("my_package.method", "from .losses import WEIGHT"),
        ("my_package.deeper.method", "from ..losses import WEIGHT"),
    ],
)
def test_so_is_a_change_in_what_it_imports_relatively(module: str, statement: str, folder: Path) -> None:
    write(folder, "my_package.losses", "WEIGHT = 1\n")
    write(folder, "my_package.deeper.__init__", "from ..losses import WEIGHT\n")
    write(folder, "my_package.__init__", SETTINGS if module == "my_package" else "")
    half = "my_package.client" if module == "my_package" else module
    write(folder, half, f"{statement}\n{METHOD if half == module else CLIENT}")
    found = config(plugins=[module])
    before = run_name(found), plug_in_digests([module])
    write(folder, "my_package.losses", "WEIGHT = 1000\n")
    run_names.code_version.cache_clear()
    assert run_name(found) != before[0]
    assert plug_in_digests([module]) != before[1]


# ---------------------------------------------------------------------- what can be wrong

TWO = METHOD + "\n\nclass Other(MyProx):\n    name: Literal['other'] = 'other'\n"
NO_FACTS = METHOD.replace("title, summary, ", "").replace('"MyProx", "FedProx again", ', "")
NO_DEFAULT = METHOD.replace("knob(0.01", "knob(...")
ABSTRACT = """
from typing import Literal

from perennial.common.data.scenario import Scenario


class MyDigits(Scenario):
    title, source, dataset = "x", "x", "x"

    name: Literal["my-digits"] = "my-digits"
    clients: int = 2
"""
TAKEN = "is taken by Perennial itself"
WRONG = {
    "raises": ("1 / 0\n", "plug-in 'my_method' cannot be imported: ZeroDivisionError: division by zero"),
    "ends": ("raise SystemExit(0)\n", "plug-in 'my_method' cannot be imported: SystemExit: 0"),
    "syntax": ("def\n", "my_method.py, line 1)"),
    "needs more": ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'"),
    "nothing": ("x = 1\n", "brings nothing: it defines no subclass of Method"),
    "two methods": (TWO, "has 2 methods, my-prox and other; a module has one"),
    "taken": (METHOD.replace("my-prox", "fedprox"), f"the method name 'fedprox' {TAKEN}"),
    "hidden": (METHOD.replace("my-prox", "references"), f"the method name 'references' {TAKEN}"),
    "scenario taken": (SCENARIO.replace("my-digits", "cmnist"), f"the scenario name 'cmnist' {TAKEN}"),
    "preset taken": (SCENARIO + '\nPRESETS = {"pacs": MyDigits()}', f"the scenario name 'pacs' {TAKEN}"),
    "model taken": (MODEL.replace("my-net", "mlp"), f"the model name 'mlp' {TAKEN}"),
    "no facts": (NO_FACTS, "MyProx lacks summary, title"),
    "no default": (NO_DEFAULT, "MyProx cannot be made with its defaults (proximity: a value is missing)"),
    "out of bounds": (
        METHOD.replace("knob(0.01", "knob(-1.0"),
        "MyProx cannot be made with its defaults (proximity: -1.0 is not possible; input should be greater than",
    ),
    "infinite": (
        METHOD.replace("knob(0.01", "knob(float('inf')").replace(", le=10", ""),
        "MyProx cannot be made with its defaults (proximity: inf is not possible; input should be a finite",
    ),
    "no JSON": (
        METHOD.replace("proximity: float", "widths: object = (8, 8)\n    proximity: float"),
        "MyProx cannot be made with its defaults (widths: (8, 8) is [8, 8] once it has travelled as JSON",
    ),
    "a path": (
        METHOD.replace("my-prox", "../../evil"),
        "MyProx.name: '../../evil' is not possible; write letters, digits and hyphens, such as my-method",
    ),
    **{
        f"field {name}": (
            METHOD.replace("proximity: float", f"{name}: float = knob(0.5, 'ours')\n    proximity: float"),
            f"MyProx has a field '{name}', which is a setting of the run or a part of every method; give",
        )
        for name in ("participation", "preset", "misfit", "title")
    },
    "two names": (
        METHOD.replace('= "my-prox"', '= "my-pox"'),
        "MyProx cannot be made with its defaults (name: 'my-pox' is not possible; input should be 'my-prox')",
    ),
    "no tuple": (
        METHOD + "\n\nMyProx.evaluates = 'global'\n",
        "MyProx.evaluates: 'global' is not possible; write a tuple of names, such as",
    ),
    "no such model": (
        METHOD + "\n\nMyProx.evaluates = ('globl',)\n",
        "MyProx.evaluates: unknown model 'globl'; did you mean 'global'? (there are: ensemble, global, personal)",
    ),
    "no personal model": (
        METHOD + "\n\nMyProx.evaluates = ('global', 'personal')\n",
        "MyProx.evaluates: 'personal' is not possible, since MyClient has no such model; give it a method "
        "`models` that answers one or keeps = frozenset({'personal'}), or evaluate 'global'",
    ),
    "no ensemble": (
        METHOD + "\n\nMyProx.evaluates = ('ensemble',)\n",
        "MyProx.evaluates: 'ensemble' is not possible, since MyClient has no such model; give it a method "
        "`models` that answers one, or evaluate 'global'",
    ),
    "no tasks": (
        METHOD + "\n\nMyProx.tasks = ('classes', 'number')\n",
        "MyProx.tasks: ('classes', 'number') is not possible; write a tuple of some of classes, numbers, labels,",
    ),
    "no such family": (
        SETTINGS + "\n\nMyProx.family = 'fedprx'\n",
        "MyProx: unknown family 'fedprx'; did you mean 'fedprox'?",
    ),
    "no method": (
        METHOD + "\n\nMyProx.server = property(lambda self: 'uniform')\n",
        "MyProx.server is no method; write def server(self) -> str",
    ),
    "no such server": (
        METHOD + "\n\nMyProx.server = lambda self: 'unifrm'\n",
        "MyProx.server() says 'unifrm', which is no server half of ours; did you mean 'uniform'?",
    ),
    "no server half": (
        METHOD + "\n\nMyProx.server = lambda self: 'registry'\n",
        "MyProx.server() says 'registry', which is no server half of ours",
    ),
    "a mechanism": (
        METHOD + "\n\nMyProx.server = lambda self: 'secagg'\n",
        "MyProx.server() says 'secagg', which is no server half of ours",
    ),
    "no logarithm": (
        METHOD.replace("between(1e-3", "between(0"),
        "cannot be imported: ValueError: between(0, 1.0, log=True): low must be above 0; 0 has no logarithm",
    ),
    "may be None": (
        METHOD.replace("proximity: float", "proximity: float | None"),
        "MyProx.proximity may be None, which a run's files cannot hold in place of the default 0.01; write 0 or a",
    ),
    "None among its draws": (
        METHOD.replace("between(1e-3, 1.0, log=True)", "choice(None, 1.0)").replace(
            "import between", "import choice"
        ),
        "MyProx.proximity may be None, which a run's files cannot hold in place of the default 0.01; write 0 or a",
    ),
    "presets": (SCENARIO + "\nPRESETS = {'a': 1}\n", "PRESETS must be scenarios by name"),
    "abstract": (
        ABSTRACT,
        "MyDigits cannot be made with its defaults (TypeError: Can't instantiate abstract",
    ),
    "title taken": (
        METHOD.replace('"MyProx", "FedProx again"', '"FedProx", "again"'),
        "MyProx.title: 'FedProx' is that of method 'fedprox'; give yours another one",
    ),
    "no client": (SETTINGS, "method 'my-prox' has no client half; define a subclass of LocalTrainer or Client"),
    "two clients": (METHOD + "\n\nclass Third(MyClient):\n    pass\n", "2 subclasses of Client, MyClient, Third"),
    "two servers": (METHOD + SERVER + "\n\nclass More(MyServer):\n    pass\n", "2 subclasses of MethodStrategy"),
}


def test_our_own_methods_keep_the_rules_of_a_plug_in_s_names() -> None:
    kinds = [*METHODS.values(), *MODELS.values(), *(type(scenario) for scenario in SCENARIOS.values())]
    assert [kind for kind in METHODS.values() if reserved(kind) & kind.model_fields.keys()] == []
    names = {str(kind.model_fields["name"].default) for kind in kinds}
    assert {name for name in names if not plugins.NAME.fullmatch(name)} <= {
        f"wilds:{name}" for name in ("camelyon17", "civilcomments", "amazon")
    }


@pytest.mark.filterwarnings("ignore:Field name:UserWarning")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_plug_in_ends_in_a_sentence_and_harms_nothing_else(wrong: str, folder: Path) -> None:
    text, words = WRONG[wrong]
    write(folder, "my_method", text)
    before = dict(METHODS), dict(SCENARIOS)
    code, output = perennial("run", "--plugin", "my_method", "--method", "my-prox", *SMALL, "--out", "run")
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.startswith("perennial: ")]
    assert words in line
    assert "Traceback" not in output
    assert not (folder / "run").exists()
    if "my-prox" not in METHODS:  # refused as a whole
        assert before == (METHODS, SCENARIOS)
    assert scenario_class("cmnist").__module__ == "perennial.common.data.scenarios.colored"
    assert method_class("fedprox").__module__ == "perennial.common.methods.fedprox"
    code, output = perennial("run", "--method", "fedprox", *SMALL, "--out", "ours")
    assert code == 0, output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plugin", "my_method"], "plug-in 'my_method': there is no my_method.py in "),
        (["--plugin", "my_method.py"], "plug-in 'my_method.py' is not possible; leave off .py: my_method\n"),
        (["--plugin", "./my_method"], "plug-in './my_method' is not possible; write a module's name"),
        (["--plugin", "__main__"], "plug-in '__main__' is not possible; put its code into a file"),
        (["--plugin", "keyword"], "plug-in 'keyword' (/"),
        (["--set", "plugins=[]"], "--set plugins is not possible; name them with --plugin"),
        (["--config", "words.toml"], "plugins: 'my_method' is not possible; give a list of modules"),
    ],
)
def test_a_name_that_is_no_plug_in(arguments: list[str], words: str, folder: Path) -> None:
    (folder / "words.toml").write_text('plugins = "my_method"\n')
    code, output = perennial("run", *arguments)
    assert code == 2
    assert words in output


@pytest.mark.slow
def test_a_run_of_a_file_that_is_elsewhere_says_how_it_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "my_method", METHOD)
    assert perennial("run", "--plugin", "my_method", "--method", "my-prox", *SMALL, "--out", "run")[0] == 0
    command = [sys.executable, "-P", "-c", "from perennial.server.cli.main import main; main()", "show", "run"]
    (folder / "else").mkdir()
    for named, code in (("", 2), (str(folder / "my_method.py"), 0)):
        done = subprocess.run(
            [*command, "../run"],
            cwd=folder / "else",
            env={**os.environ, plugins.VARIABLE: named},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert (f"start where its file is, or name the file in {plugins.VARIABLE}" in done.stderr) == bool(code)


def test_a_file_that_a_module_of_python_hides_is_named(folder: Path) -> None:
    write(folder, "colorsys", METHOD)
    code, output = perennial("run", "--plugin", "colorsys", "--method", "my-prox")
    assert code == 2
    assert "Python has another module of that name" in output


def test_two_packages_with_one_name_and_one_that_breaks_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    install(monkeypatch, site, "my-one", methods={"my-prox": "my_method", "my-other": "my_method"})
    install(monkeypatch, site, "my-two", methods={"my-prox": "my_method"})
    write(site, "my_method", METHOD)
    with pytest.raises(
        UserError, match=r"my-(one|two) and my-(one|two) both bring 'my-prox' to perennial.methods"
    ):
        method_class("my-prox")
    with pytest.raises(UserError, match="brings no method 'my-other', though its package says so"):
        method_class("my-other")
    code, output = perennial("list", "methods")
    assert code == 0
    assert "fedavg" in output


def test_two_plug_ins_with_one_name(folder: Path) -> None:
    write(folder, "my_method", METHOD)
    write(folder, "my_other", METHOD)
    with pytest.raises(UserError, match="the method name 'my-prox' is taken by plug-in 'my_method'"):
        config(plugins=["my_method", "my_other"])


# ---------------------------------------------------------------------- at a site


def test_a_site_imports_only_what_its_owner_installed_or_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server's task names."""
    file = write(tmp_path / "elsewhere", "my_method", METHOD)
    monkeypatch.setenv(plugins.VARIABLE, str(file))
    with unloaded():
        task = config(plugins=["my_method"]).task()
    assert not {"my_method", "antigravity"} & sys.modules.keys()
    assert parse_task(task).method.name == "my-prox"
    monkeypatch.setenv(plugins.VARIABLE, "")
    with pytest.raises(UserError, match="plug-in 'antigravity' is not installed here; install the package"):
        parse_task(task.replace("my_method", "antigravity"))
    assert "antigravity" not in sys.modules


def test_a_host_without_the_half_says_so_before_it_trains(folder: Path) -> None:
    write(folder, "my_method", SETTINGS)
    found = config(plugins=["my_method"])
    with pytest.raises(UserError, match="has no client half"):
        Host({}).site(found.task(), parse_task(found.task()), 0)


# ---------------------------------------------------------------------- what a plug-in must keep


def test_what_a_model_of_a_plug_in_draws_depends_on_its_key_alone(folder: Path) -> None:
    write(folder, "my_model", MODEL.replace("nn.ReLU()", "nn.Dropout()"))
    plugins.plugin("my_model")
    own = network(model_settings({"name": "my-net"}), (4,), 2)
    tensors, x = own.initial(0), torch.ones(8, 4)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with own.drawing(7, "client-0"):
            found.append(own.predict(tensors, x, training=True))
    assert torch.equal(*found)
    assert not torch.equal(found[0], own.predict(tensors, x, training=True))
    contract.test_functional_calls_equal_the_module("my-net", training=True)


def test_a_model_that_looks_at_the_samples_beside_it_does_not_keep_the_contract(folder: Path) -> None:
    centred = (
        "class Centre(nn.Module):\n    def forward(self, x):\n        return x - x.mean(0)\n\n\n@build.register"
    )
    model = MODEL.replace("@build.register", centred)
    write(folder, "my_model", model.replace("nn.ReLU()", "Centre()"))
    plugins.plugin("my_model")
    with pytest.raises(AssertionError, match="not close"):
        contract.test_what_it_says_of_a_sample_does_not_depend_on_those_beside_it("my-net")


def test_a_scenario_with_draws_of_its_own_or_without_test_data_does_not_keep_the_contract(folder: Path) -> None:
    loose = f"""{SCENARIO}
    def client_data(self, client, seed, data_root):
        import numpy as np
        from perennial.common.data.examples import ClientData

        own = super().client_data(client, seed, data_root)
        if not client:
            np.random.seed(seed)
        own.train.x.add_(float(np.random.rand()))
        return ClientData(own.train, own.validation, dict.fromkeys(own.test, own.train))
"""
    write(folder, "my_scenario", loose)
    plugins.plugin("my_scenario")
    with pytest.raises(AssertionError):
        scenario_contract.test_the_same_seed_gives_the_same_samples("my-digits")
    with pytest.raises(AssertionError, match="has the samples of training"):
        scenario_contract.test_nothing_is_tested_on_what_it_was_trained_on("my-digits")

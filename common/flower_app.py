"""What a plain Flower app has in place of our configuration: a module in memory, and data that clients hand over.

Both sides import this; then a task may name the scenario and the model `plain`.
"""

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from torch import Tensor, nn

from perennial.common import plugins
from perennial.common.data.examples import ClientData
from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import Method
from perennial.common.models.architectures import Model, build
from perennial.common.models.settings import UNLISTED, ModelSettings
from perennial.common.utils.discovery import names_in
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.tensors import Tensors

TEST = "test"
MANY = 1000
"""Clients that settings are checked for as long as nobody knows how many there are."""
ARRAYS, SERVER_ROUND, PROXIMAL_MU, CLIPPING_NORM = "arrays", "server-round", "proximal-mu", "clipping_norm"
"""Names in the messages of Flower's own strategies: of the record of arrays, and of settings in the other one."""


class PlainModel(ModelSettings):
    """A module that both sides have in memory."""

    summary = "a module in memory"
    source = "the app"
    whole_travels = True

    name: Literal["plain"] = "plain"
    tensors: str = knob("", "digest of the names and shapes of its tensors, by which a client knows its own")


UNLISTED["plain"] = PlainModel
_modules: dict[str, nn.Module] = {}
"""The modules of this process by that digest."""


class Plain(Scenario):
    """What the clients of a plain app have."""

    title = "the app's own data"
    source = "the app"
    dataset = "own"

    name: Literal["plain"] = "plain"
    clients: int = knob(1, "number of clients", ge=1, le=100_000)
    shape: tuple[int, ...] = knob((), "shape of a sample, for methods whose server runs the model")
    labels: int = knob(2, "number of classes", ge=1)
    environments: int = knob(1, "number of training environments", ge=1, le=1000)

    model: ClassVar[dict[str, Any]] = {"name": "plain"}
    test_environments: ClassVar[tuple[str, ...]] = (TEST,)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def classes(self) -> int:
        return self.labels

    @property
    def train_environments(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.environments)))

    def client_data(self, client: int, seed: int, data_root: Path | None) -> NoReturn:
        raise UserError("scenario 'plain' has the data of a Flower app (perennial.client_app), and only there")


def has_fedavgs_server(method: type[Method]) -> bool:
    """Whether a method's server is FedAvg's, so that its clients can as well have one of Flower's own."""
    own = names_in("perennial.strategies.methods")
    return method.model_construct().server() == "base" and method.module() not in own and not plugins.of(method)


def registered(model: nn.Module | type[nn.Module]) -> PlainModel:
    """The settings that stand for a module, or for one of a class, in this process. Raises `UserError`."""
    module = model() if isinstance(model, type) else model
    if not isinstance(module, nn.Module):
        raise UserError(f"model: {module!r:.100} is not possible; give a torch.nn.Module, or its class")
    head(module)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    _modules[digest] = module
    return PlainModel(tensors=digest)


def module_of(settings: PlainModel) -> nn.Module:
    """The module of this process that settings stand for. Raises `UserError` where there is none such."""
    if settings.tensors not in _modules:
        raise UserError("model: the ServerApp's has other tensors than this ClientApp's; give both the same")
    return _modules[settings.tensors]


def head(module: nn.Module) -> str:
    """The name of a module's classifier: `classifier`, or else its last child if that is a linear layer.

    Raises `UserError` where there is neither.
    """
    children = dict(module.named_children())
    name = "classifier" if "classifier" in children else next(reversed(children), "")
    if name != "classifier" and not isinstance(children.get(name), nn.Linear):
        raise UserError(
            f"model: {type(module).__name__} has no classifier: name the last layers classifier, "
            "or let its last attribute be a linear layer"
        )
    return name


def classes_of(module: nn.Module) -> int:
    """How many logits a module gives. Raises `UserError` if its classifier has no linear layer to tell."""
    layers = [layer for layer in module.get_submodule(head(module)).modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise UserError(f"model: the classifier of {type(module).__name__} has no linear layer")
    return layers[-1].out_features


def names(module: nn.Module) -> dict[str, str]:
    """By a tensor's name in the module's own state dict, its name in ours: that of its part comes first."""
    own = head(module)
    if set(dict(module.named_children())) == {"featurizer", "classifier"}:
        return {name: name for name in module.state_dict()}
    first = f"{own}."
    return {
        name: f"classifier.{name.removeprefix(first)}" if name.startswith(first) else f"featurizer.{name}"
        for name in module.state_dict()
    }


def renamed(tensors: Mapping[str, Tensor], to: Mapping[str, str]) -> Tensors:
    """Tensors under other names; those that have no other one keep theirs."""
    return {to.get(name, name): tensor for name, tensor in tensors.items()}


@build.register
def _plain(settings: PlainModel, input_shape: tuple[int, ...], classes: int) -> Model:
    """The module in two parts, its own weights in it."""
    module = copy.deepcopy(module_of(settings))
    own = head(module)
    classifier = module.get_submodule(own)
    if set(dict(module.named_children())) == {"featurizer", "classifier"}:
        return Model(module.get_submodule("featurizer"), classifier)
    setattr(module, own, nn.Identity())
    return Model(module, classifier)


def plain_data(given: Any, environments: int) -> ClientData:
    """A client's data from what an app's function gives: `(train, test)`, each `(x, y)` or `(x, y, environment)`,
    or a PyTorch data set of such samples, or its loader.

    Nothing is held out of the training data. Raises `UserError` for anything else.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset, default_collate

    from perennial.common.data.examples import Examples

    def examples(part: Any, what: str) -> Examples:
        loader = isinstance(part, DataLoader)
        part = part.dataset if loader else part
        if loader or isinstance(part, Dataset):
            part = default_collate([part[number] for number in range(len(part))])
            part = tuple(part.values()) if isinstance(part, Mapping) else part
        if not (isinstance(part, tuple | list) and len(part) in (2, 3)):
            raise UserError(f"data: {what} must be (x, y) or (x, y, environment)")
        x, y, *rest = (torch.as_tensor(array) for array in part)
        if x.ndim < 2 or y.shape != x.shape[:1] or (rest and rest[0].shape != y.shape):
            raise UserError(f"data: {what} has x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)}")
        environment = rest[0].long() if rest else torch.zeros(len(y), dtype=torch.int64)
        return Examples(x.float(), y.long(), environment)

    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise UserError("data: the function must give (train, test), each (x, y) or (x, y, environment)")
    train, test = examples(given[0], "train"), examples(given[1], "test")
    if not len(train):
        raise UserError("data: there are no training samples")
    if int(train.environment.max()) >= environments or int(train.environment.min()) < 0:
        raise UserError(
            f"data: an environment of {int(train.environment.max())}, and the ServerApp says environments="
            f"{environments}; they are numbered from 0"
        )
    return ClientData(train, test[torch.zeros(0, dtype=torch.int64)], {TEST: test})

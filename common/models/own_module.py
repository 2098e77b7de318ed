"""Modules that a person brings: made by their own code, and taken apart into featurizer and classifier.

A run's settings name such a module, and they travel to the sites. So that no site runs whatever a server names,
only what this machine's owner trusts is imported (`common/plugins.py`): PyTorch itself has functions that run what
they are given as code. Of it, only a class of modules is called, or a function that says that it returns one.
"""

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perennial.common import plugins
from perennial.common.models.libraries import timm_network, transformers_network
from perennial.common.models.settings import ModelSettings, Module
from perennial.common.models.weights import must_be_known
from perennial.common.utils.errors import UserError, told_with_place
from perennial.common.utils.samples import (
    PAD,
    SampleShape,
    made_up,
    padded,
    parts_of,
    shape_in_words,
    unpacked,
    vocabulary_of,
)
from perennial.common.utils.suggestions import meant

AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
"""Classifiers on the way that torchvision's own weights have, and that are left out here."""


@dataclass(frozen=True)
class Layout:
    """Where a module's classifier is."""

    classifier: str
    """Its name in the module."""
    how: str
    """How it was found, for a person."""
    apart: bool
    """Whether the module is its featurizer and then its classifier, by these names, and nothing else."""
    draws: bool
    """Whether it draws in training, as dropout does."""
    as_numbers: bool = False
    """Whether it takes ids of tokens as float32 numbers alone."""
    by_name: bool = False
    """Whether its logits are one of several outputs, by that name."""


# ---------------------------------------------------------------------- made by its own code


def constructed(settings: Module, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The module as its own code makes it, drawn from torch's global generator. Raises `UserError`."""
    name, options = settings.name, settings.options
    builders = {"torchvision": _torchvision, "transformers": _transformers, "timm": _timm}
    target = builders[settings.library](settings, input_shape, classes) if settings.library else _found(name)
    shape = dict(parts_of(input_shape)) or tuple(input_shape)
    known: dict[str, Any] = {"classes": classes, "num_classes": classes, "input_shape": shape}
    if ids := vocabulary_of(input_shape):
        known |= {"vocabulary": ids, "vocab_size": ids, "num_embeddings": ids}
    if settings.library in ("transformers", "timm"):
        options = {}
    elif settings.torchvision:
        options |= {"num_classes": classes}
        if settings.torchvision in AUXILIARY:
            options = {"aux_logits": False, "init_weights": False, **options}
            if settings.named_weights:  # they were trained so
                options = {"transform_input": True, **options}
    else:
        parameters = _parameters(target)
        takes = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        options = {key: value for key, value in known.items() if key in takes} | options
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if wrong := [key for key in options if key not in takes and not anything]:
            there = f"it has {', '.join(takes)}" if takes else "it has none"
            raise UserError(f"model.{wrong[0]}: {name} has no such argument{meant(wrong[0], takes)} ({there})")
        lacking = [
            p.name for p in parameters if p.default is p.empty and p.name in takes and p.name not in options
        ]
        if lacking:
            raise UserError(f"model.{lacking[0]}: {name} needs a value for it; set it")
    try:
        made = target(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model {name!r} cannot be made: {told_with_place(error, __file__)}") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"model {name!r} makes a {type(made).__name__}, and no torch.nn.Module")
    if any(is_lazy(tensor) for tensor in (*made.parameters(), *made.buffers())):
        _takes(settings, made, input_shape)  # from which lazy layers learn their sizes
    halves = (torch.bfloat16, torch.float16)
    for name, tensor in made.state_dict().items():
        if tensor.dtype in halves:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"model {settings.name!r}: its {name!r} is of type {kind}; let the module have float32 weights, "
                "and set precision=bf16 to compute in bfloat16"
            )
    return made


def _transformers(settings: Module, input_shape: tuple[int, ...], classes: int) -> Callable[..., Any]:
    return partial(transformers_network, settings, input_shape, classes)


def _timm(settings: Module, input_shape: tuple[int, ...], classes: int) -> Callable[..., Any]:
    return partial(timm_network, settings, input_shape, classes)


def _torchvision(settings: Module, *_: Any) -> Callable[..., Any]:
    from torchvision.models import get_model_builder

    must_be_known(settings.torchvision)
    builder: Callable[..., Any] = get_model_builder(settings.torchvision)
    return builder


def _found(name: str) -> Callable[..., Any]:
    """The class or function. Raises `UserError` where there is none that may be called."""
    module, _, attribute = name.partition(":")
    top, *inner = module.split(".")
    if top in {*sys.stdlib_module_names, "test"} or any(part.startswith("__") for part in inner):
        # Importing some of these starts a program.
        raise UserError(
            f"model.name: {module!r} is a part of Python or a program, and not imported; take another name for a "
            "file with a model"
        )
    if not plugins.may_be_imported(module):
        raise UserError(
            f"model.name: there is no module {module!r} here that may be imported; install the package that has "
            f"it as a plug-in, or name its file in {plugins.VARIABLE}"
        )
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:
        why = told_with_place(error, __file__)
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise UserError(
                f"model.name: there is no module {error.name!r} here; install the package that has it, or name "
                f"its file in {plugins.VARIABLE}"
            ) from None
        raise UserError(f"model.name: {module!r} cannot be imported: {why}") from error
    target = getattr(found, attribute, None)
    if target is None:
        raise UserError(f"model.name: {module!r} has no {attribute!r}{meant(attribute, vars(found))}")
    if isinstance(target, type) and issubclass(target, nn.Module):
        return target
    if isinstance(target, nn.Module):
        raise UserError(f"model.name: {name} is a module that is made already; name its class, or a function")
    if not inspect.isfunction(target):
        raise UserError(f"model.name: {name} is no class of torch.nn.Module, and no function that makes one")
    try:
        says = typing.get_type_hints(target).get("return")
    except Exception:  # of a name that is not there when the program runs
        says = None
    if not (isinstance(says, type) and issubclass(says, nn.Module)):
        raise UserError(
            f"model.name: {name} does not say that it makes a module; write `def {attribute}(…) -> "
            "torch.nn.Module`, without which nothing is called that a run's settings name"
        )
    return target


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # it takes what it takes
        return [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]


def defaults(settings: Module) -> dict[str, Any]:
    """What the arguments of a class or function of one's own are unless set, where a setting could say it."""
    if settings.library:
        return {}
    kinds = (bool, int, float, str, list, tuple)
    return {p.name: p.default for p in _parameters(_found(settings.name)) if isinstance(p.default, kinds)}


# ---------------------------------------------------------------------- taken apart


@lru_cache(maxsize=8)
def layout(settings: Module, input_shape: tuple[int, ...], classes: int) -> Layout:
    """Where a module's classifier is, found by running it once or twice on the CPU.

    Raises `UserError` where it does not take such samples or does not give a logit for each class, where it has no
    classifier, or where something comes after its classifier.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)
        module = constructed(settings, input_shape, classes)
        _must_take(settings, module, input_shape)
        as_numbers, by_name = _takes(settings, module.eval(), input_shape)
        adapt(module, input_shape, as_numbers, by_name)
        x = made_up(input_shape)
        layers: dict[str, Any] = {}
        """Inputs of linear layers, and of the attribute `classifier`, in the order they end in."""

        def note(_: nn.Module, inputs: Any, __: Any, name: str) -> None:
            layers.pop(name, None)
            layers[name] = inputs[0] if inputs else None

        hooks = [
            layer.register_forward_hook(partial(note, name=name))
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) or name == "classifier"
        ]
        logits = run_once(settings, module.eval(), x)
        for hook in hooks:
            hook.remove()
        must_be_logits(settings, logits, classes)
        if not torch.equal(x, made_up(input_shape)):
            raise UserError(
                f"model {settings.name!r} changes its input in place; let it make a new tensor, such as "
                "x = x - 0.5 for x.sub_(0.5)"
            )
        if (one := run_once(settings, module, x[:1], "with one sample")).shape != logits[:1].shape:
            given = "x".join(map(str, one.shape))
            raise UserError(
                f"model {settings.name!r} gives {given} for 1 sample; it must be 1x{classes}, such as with "
                "flatten(1) in place of squeeze()"
            )
        place, how = _classifier(settings, module, layers)
        before = torch.default_generator.get_state()
        must_be_logits(settings, run_once(settings, module.train(), x), classes)
        draws = not torch.equal(before, torch.default_generator.get_state())

        module = module.eval()
        logits = run_once(settings, module, x)  # again, since running it in training may have changed its buffers
        plain = not (as_numbers or by_name or parts_of(input_shape) or padded(input_shape))
        apart = plain and _is_apart(module, place, x, logits)
        found = Layout(place, how, apart, draws, as_numbers, by_name)
        features, classifier = parts(module, found, input_shape)
        _must_be_apart(settings, features, classifier, place)
        z = run_once(settings, features, x, f"without its classifier {place!r}")
        if z.dim() != 2:
            raise UserError(
                f"model {settings.name!r}: what its classifier {place!r} is given are no vectors of features, but "
                f"of shape {'x'.join(map(str, z.shape[1:]))}; name a later layer, model.classifier=…"
            )
        if not torch.allclose(run_once(settings, classifier, z), logits, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise UserError(
                f"model {settings.name!r} does something after its classifier {place!r}; let forward end with the "
                "classifier, whose outputs are the logits"
            )
        return found


def adapt(module: nn.Module, input_shape: tuple[int, ...], as_numbers: bool, by_name: bool) -> None:
    """Have a module take samples as they are announced, and give its logits alone; each where it must be so."""
    if (parts_of(input_shape) or padded(input_shape)) and not hasattr(module, ADAPTED):
        hook = partial(_by_argument, input_shape=input_shape, takes=_arguments(module))
        module.register_forward_pre_hook(hook, with_kwargs=True)
        setattr(module, ADAPTED, True)
    if as_numbers:
        module.register_forward_pre_hook(ids_as_numbers)
    if by_name:
        module.register_forward_hook(lambda _, __, outputs: _logits(outputs))


def ids_as_numbers(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook before a module that computes with ids of tokens as with any other numbers."""
    return inputs[0].float(), *inputs[1:]


ADAPTED = "perennial_takes_samples"
"""An attribute of a module that unpacks samples already."""
MASKS = ("attention_mask", "mask")
"""Arguments of `forward` that get 1 for each token and 0 behind a sequence's end, the latter as truth values."""


def _by_argument(
    module: nn.Module,
    inputs: tuple[Any, ...],
    rest: dict[str, Any],
    input_shape: tuple[int, ...],
    takes: Sequence[str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `forward` is given for samples (n, …) of a group or of padded sequences: each part by its name, or all
    of them as a dict, and masks where it names them."""
    x = inputs[0]
    parts = unpacked(x, input_shape) or {"": x}
    shapes = dict(parts_of(input_shape)) or {"": input_shape}
    masks = {name: part != PAD for name, part in parts.items() if padded(shapes[name])}
    behind = getattr(getattr(module, "config", None), "pad_token_id", None) or 0  # as Hugging Face's modules say
    given = {name: part.masked_fill(part == PAD, behind) for name, part in parts.items()}
    known: dict[str, Tensor] = {}
    for name, mask in masks.items():
        only = [f"{name}_{word}" for word in MASKS] if len(masks) > 1 else [f"{name}_{MASKS[1]}", *MASKS]
        known |= {word: mask.long() if word.endswith(MASKS[0]) else mask for word in only if word in takes}
    if "" in given:
        return (given[""],), known
    if set(given) <= set(takes):
        return (), {**given, **known}
    return (given,), known


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(p.name for p in _parameters(module.forward) if p.kind is not p.VAR_KEYWORD)


def _logits(outputs: Any) -> Any:
    """Those of a dict, or of an object such as Hugging Face's `ModelOutput`; anything else as it is."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _takes(settings: Module, module: nn.Module, input_shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether a module takes ids of tokens as numbers alone, and whether its logits have a name.

    Raises `UserError` where it cannot be run.
    """
    x = made_up(input_shape)
    if parts_of(input_shape) or padded(input_shape):
        adapt(module, input_shape, False, False)

    def named(outputs: Any) -> bool:
        return _logits(outputs) is not outputs

    with torch.no_grad():
        try:
            return False, named(run_once(settings, module, x))
        except UserError:
            if vocabulary_of(input_shape):
                with suppress(UserError):  # then what is wrong with ids is the matter
                    return True, named(run_once(settings, module, x.float()))
            raise


def parts(module: nn.Module, found: Layout, input_shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """A module's featurizer and classifier; without its classifier, a module is its featurizer.

    The featurizer takes samples as they are announced, and gives features alone.
    """
    featurizer, classifier = _parted(module, found)
    adapt(featurizer, input_shape, found.as_numbers, found.by_name)
    return featurizer, classifier


def _parted(module: nn.Module, found: Layout) -> tuple[nn.Module, nn.Module]:
    if not found.classifier:
        return nn.Identity(), module
    classifier = module.get_submodule(found.classifier)
    if found.apart:
        return module.get_submodule("featurizer"), classifier
    if type(module) is nn.Sequential and "." not in found.classifier:
        place = list(dict(module.named_children())).index(found.classifier)
        return module[:place], classifier if place == len(module) - 1 else module[place:]
    parent, _, name = found.classifier.rpartition(".")
    setattr(module.get_submodule(parent), name, nn.Identity())
    return module, classifier


def _classifier(settings: Module, module: nn.Module, layers: dict[str, Any]) -> tuple[str, str]:
    """Where the classifier is, and how that was found; `layers` are those that ran, with what they were given."""
    if settings.classifier:
        known = [name for name, _ in module.named_modules() if name]
        if settings.classifier not in known:
            raise UserError(
                f"model.classifier: {settings.name} has no {settings.classifier!r}"
                f"{meant(settings.classifier, known)}"
            )
        return settings.classifier, "as model.classifier says"
    vectors = isinstance(given := layers.get("classifier"), Tensor) and given.dim() == 2
    if settings.library != "torchvision" and vectors:
        return "classifier", "its attribute of this name"
    if linear := [name for name in layers if isinstance(module.get_submodule(name), nn.Linear)]:
        return linear[-1], "its last linear layer"
    raise UserError(
        f"model {settings.name!r} has no classifier: no attribute `classifier`, and no linear layer that runs; "
        "say where it is, model.classifier=…"
    )


def _is_apart(module: nn.Module, place: str, x: Tensor, logits: Tensor) -> bool:
    featurizer = getattr(module, "featurizer", None)
    if place != "classifier" or not isinstance(featurizer, nn.Module):
        return False
    if any(name.partition(".")[0] not in ("featurizer", "classifier") for name in module.state_dict()):
        return False
    try:
        return torch.allclose(module.get_submodule(place)(featurizer(x)), logits, rtol=1e-3, atol=1e-4)
    except Exception:  # something between the two makes the one fit the other
        return False


def _must_be_apart(settings: Module, featurizer: nn.Module, classifier: nn.Module, place: str) -> None:
    own = {id(tensor): name for name, tensor in featurizer.named_parameters()}
    for tensor in classifier.parameters():
        if id(tensor) in own:
            raise UserError(
                f"model {settings.name!r}: its classifier {place!r} has a weight that is also "
                f"{own[id(tensor)]!r} of the featurizer; the two parts need weights of their own"
            )
    if not list(classifier.parameters()):
        raise UserError(f"model.classifier: {place!r} of {settings.name} has no weights; name a layer that has")


def _must_take(settings: Module, module: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Raises `UserError` where `forward` needs more than what a sample has."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [p for p in _parameters(module.forward) if p.kind in kinds and p.default is p.empty]
    alone = [p.name for p in _parameters(module.forward) if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    names = [p.name for p in inputs] + alone
    if shapes := dict(parts_of(input_shape)):
        masks = {f"{name}_{word}" for name in shapes for word in MASKS} | {*MASKS}
        strange = [name for name in names if name not in shapes and name not in masks]
        if strange and len(names) > 1:
            raise UserError(
                f"model {settings.name!r} takes {', '.join(names)}, and a sample here has {', '.join(shapes)}; "
                "let forward take these names, or a dict of them alone"
            )
        return
    if padded(input_shape):
        names = [name for name in names if name not in MASKS]
    if len(names) > 1:
        raise UserError(
            f"model {settings.name!r} takes {len(names)} inputs ({', '.join(names)}), and a sample here is one "
            "tensor"
        )


def must_be_logits(settings: ModelSettings, logits: Any, classes: int) -> None:
    """Raises `UserError` where what a model gave for two samples is no logit for each class."""
    if not isinstance(logits, Tensor):
        raise UserError(
            f"model {settings.name!r} gives a {type(logits).__name__}, and no tensor of logits, nor anything that "
            "has one by the name logits"
        )
    if logits.dim() != 2 or len(logits) != 2:
        given = "x".join(map(str, logits.shape))
        raise UserError(f"model {settings.name!r} gives {given} for 2 samples, and no logit for each class")
    if logits.shape[1] != classes:
        remedy = "set the argument that says how many, or call it `classes`, which is set for you"
        if not isinstance(settings, Module):
            remedy = "let what builds it use `classes`"
        raise UserError(
            f"model {settings.name!r} gives {logits.shape[1]} logits, and there are {classes} classes; {remedy}"
        )


def run_once(settings: ModelSettings, module: nn.Module, x: Tensor, how: str = "") -> Any:
    """What a model gives for samples. Raises `UserError` where it cannot be run."""
    try:
        return module(x)
    except Exception as error:
        shape = tuple(x.shape[1:]) if x.is_floating_point() else SampleShape(x.shape[1:], int(x.max()) + 1)
        doing = f"cannot be run {how}" if how else f"cannot take samples of shape {shape_in_words(shape)}"
        hint = "; if these are ids of tokens, announce their vocabulary (docs/models.md)" * (
            "'indices'" in str(error)
        )
        raise UserError(f"model {settings.name!r} {doing}: {told_with_place(error, __file__)}{hint}") from error

"""The one resident network per process, which runs a model over explicit tensors, and the weights it starts from.

A model's weights live outside it: a method keeps them as `Tensors`, and `Network` runs them. Only what no training
changes is the network's own, so that it is neither sent nor kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from perennial.common import plugins
from perennial.common.models.architectures import Model, build, model_for
from perennial.common.models.libraries import transformers_weights
from perennial.common.models.lora import apart, merge
from perennial.common.models.own_module import AUXILIARY, constructed, layout, must_be_logits, parts, run_once
from perennial.common.models.settings import ModelSettings, Module, Pretrained, ResNet18, is_adapter
from perennial.common.models.weights import load_weights
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import blank
from perennial.common.utils.seeding import derive
from perennial.common.utils.tensors import Tensors, digest_of

# --- Saved weights ---------------------------------------------------------------------------------------


def with_weights(
    settings: Pretrained, input_shape: tuple[int, ...], classes: int, drawn: Tensors, head: bool = True
) -> Tensors:
    """A drawn model with the tensors of its weights in place of its own.

    The output layer stays as drawn where the weights have another number of classes, and with `head` off; of
    `resnet18`, which has a classifier of its own, all of the classifier. Raises `UserError` for weights that are
    not this model's.
    """
    if folder := isinstance(settings, Module) and settings.library == "transformers":
        found = transformers_weights(settings, input_shape, classes)  # none, where the folder has none
    else:
        found = load_weights(settings)
    where, name = settings.weights or settings.name, settings.name
    names = {own: own for own in drawn}
    if not any(own in found for own in drawn if own.startswith("featurizer.")):  # not saved by a run of ours
        names = _names_elsewhere(settings, input_shape, classes)
    layer = "classifier." if isinstance(settings, ResNet18) else f"{list(drawn)[-1].rpartition('.')[0]}."
    output = [own for own in drawn if own.startswith(layer)]
    fits = head and all(names[own] in found and found[names[own]].shape == drawn[own].shape for own in output)
    aside = {names[own] for own in output} | {"fc.weight", "fc.bias"}
    left_out = tuple(AUXILIARY.get(settings.torchvision, ())) if isinstance(settings, Module) else ()

    model = dict(drawn)
    lacking = []
    for own, tensor in drawn.items():
        key = names[own]
        if own in output and not fits:
            continue
        if key not in found:
            # A folder of transformers may lack a part, which is drawn; old files have no counters of BatchNorm's.
            lacking += [key] if tensor.is_floating_point() and not folder else []
        elif found[key].shape != tensor.shape:
            raise UserError(
                f"model.weights: {where} has {key!r} of shape {_size(found[key])}, and model {name!r} has it of "
                f"shape {_size(tensor)}"
            )
        else:
            model[own] = found[key].to(tensor.dtype).clone()
    if lacking:
        raise UserError(f"model.weights: {where} lacks {_some(lacking)}, which model {name!r} has")
    known = {names[own] for own in drawn} | aside
    if beyond := [key for key in found if key not in known and not key.startswith(left_out or ("\0",))]:
        raise UserError(f"model.weights: {where} has {_some(beyond)}, which model {name!r} has not")
    return model


def _names_elsewhere(settings: Pretrained, input_shape: tuple[int, ...], classes: int) -> dict[str, str]:
    """By a tensor's name here, its name in the state dict of the module as its own code makes it."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if not isinstance(settings, Module):  # as in torchvision
            here = build(settings, input_shape, classes).state_dict()
            return {name: name.replace("featurizer.", "", 1).replace("classifier.", "fc.", 1) for name in here}
        module = constructed(settings, input_shape, classes)
        theirs = {id(tensor): name for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
        model = Model(*parts(module, layout(settings, input_shape, classes), input_shape))
    return {name: theirs[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


# --- Running them --------------------------------------------------------------------------------------


Slot = tuple[dict[str, Any], str, str]
"""Where a module holds a tensor, under which name, and its full state-dict name."""


class Network:
    """One model's structure, to be run over any tensors; it holds no weights but frozen ones.

    Calls take tensors by full state-dict name, need only those of the part that they run (`KeyError` names
    a missing one), and ignore others. They change none of them, with one exception: `training=True` lets
    BatchNorm update its running statistics in place in the very buffers that are given. So hand over a copy
    of the buffers of a model that must stay as it is. `training=False`, the default, is also FedIIR's frozen
    BatchNorm: gradients still flow.

    A model without buffers may be differentiated twice and mapped with `torch.func`. Calls from several
    threads at once are not safe, since they share one module.
    """

    parameter_names: tuple[str, ...]
    """State-dict names of all parameters that are trained, the featurizer's first."""
    buffer_names: tuple[str, ...]
    """State-dict names of all other tensors that travel with them: BatchNorm's statistics and counters."""
    frozen_names: tuple[str, ...]
    """State-dict names of all tensors that no training changes: a frozen featurizer's, or frozen by the module.
    They are in no model that is given or kept; the network has them itself."""
    featurizer_names: tuple[str, ...]
    """State-dict names of the featurizer's trained parameters."""
    classifier_names: tuple[str, ...]
    """State-dict names of the classifier's trained parameters."""
    batch_norm_names: tuple[str, ...]
    """State-dict names of all parameters and buffers of BatchNorm layers that are not frozen."""
    adapter_names: tuple[str, ...]
    """State-dict names of LoRA's matrices, which are among the featurizer's trained parameters."""

    def __init__(
        self,
        settings: ModelSettings,
        input_shape: tuple[int, ...],
        outputs: int,
        device: torch.device | str,
        bf16: bool = False,
    ) -> None:
        """With `bf16` the model runs in bfloat16, by autocast; what it is given and gives is in float32."""
        self.settings, self.bf16 = settings, bf16
        self.input_shape = input_shape
        self.outputs = outputs
        self.device = torch.device(device)
        model = self._build(0)
        if plugins.of(type(settings)):
            self._must_fit(model)
        frozen = isinstance(settings, Pretrained) and settings.freeze == "featurizer"
        adapted = isinstance(settings, Pretrained) and settings.lora is not None
        # Tied weights are one tensor with several names, of which the first is the one that counts.
        first: dict[int, str] = {}
        tensors = model.state_dict(keep_vars=True)
        names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        self._own = tuple(first.values())

        def trained(name: str) -> bool:
            return tensors[name].requires_grad and not (frozen and name.startswith("featurizer."))

        parameters = {names[name] for name, _ in model.named_parameters()}
        self.parameter_names = tuple(name for name in self._own if name in parameters and trained(name))
        others = [name for name in self._own if name not in self.parameter_names]
        self.frozen_names = tuple(
            name
            for name in (() if settings.whole_travels else others)
            if name in parameters or ((frozen or adapted) and name.startswith("featurizer."))
        )
        self.buffer_names = tuple(name for name in others if name not in self.frozen_names)
        self.adapter_names = tuple(name for name in self.parameter_names if is_adapter(name))
        self.featurizer_names, self.classifier_names = (
            tuple(name for name in self.parameter_names if name.startswith(f"{part}."))
            for part in ("featurizer", "classifier")
        )
        norms = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        of_norms = (f"{layer}.{name}" for layer, module in norms for name in module.state_dict())
        self.batch_norm_names = tuple(name for name in of_norms if name not in self.frozen_names)
        stay = isinstance(settings, Pretrained) and (settings.statistics_stay or adapted)
        self._still = ([model.featurizer] if frozen else []) + ([layer for _, layer in norms] if stay else [])
        """Layers that run in training as in evaluation."""
        self.draws = (
            layout(settings, input_shape, outputs).draws
            if isinstance(settings, Module)
            else bool(plugins.of(type(settings)))
        )
        """Whether the model draws in training, as dropout does, or may, and is to be run within `drawing`."""
        self._whole = list(names.items())
        # On "meta" a module takes no memory and can't be run on weights of its own by mistake. It isn't built
        # there, since drawing normal numbers on "meta" makes PyTorch import sympy and more, for 4 s.
        constants = {name: buffer.to(self.device) for name, buffer in model.named_buffers() if name not in tensors}
        self._model = model.to("meta")
        for name, buffer in constants.items():  # what a state dict does not hold
            layer, _, own = name.rpartition(".")
            self._model.get_submodule(layer).register_buffer(own, buffer, persistent=False)
        for still in self._still:  # the rest is in training, as any new module
            still.eval()
        self._slots = [_slot(self._model, name, full) for name, full in self._whole]
        self._featurizer, self._classifier = (
            [slot for (name, _), slot in zip(self._whole, self._slots, strict=True) if name.startswith(f"{part}.")]
            for part in ("featurizer", "classifier")
        )

    def initial(self, seed: int, *key: str | int) -> Tensors:
        """Initial parameters and buffers, without frozen ones: a draw that depends on `seed` and `key` alone.

        The same on every call and device, and no global generator is disturbed. The tensors are new, on
        `device`, without `requires_grad`. With weights these stand in their places; of their output layer only in
        the draw without a `key`, the common initial model. Raises `UserError` for weights that are not there or do
        not fit.
        """
        drawn = self._begun(derive(seed, "init", *key), head=not key)
        return {name: tensor.to(self.device) for name, tensor in drawn.items() if name not in self.frozen_names}

    @cached_property
    def frozen(self) -> Tensors:
        """What no training changes, on `device`: of the weights, or a draw that is the same in all runs."""
        return self._frozen()

    @cached_property
    def travelling_bytes(self) -> int:
        """Of all tensors of a model that are not frozen."""
        tensors = self._model.state_dict()
        return sum(tensors[name].nbytes for name in (*self.parameter_names, *self.buffer_names))

    @cached_property
    def frozen_digest(self) -> str:
        """SHA-256 of `frozen`, which must be the same at all sites; empty where there is nothing.

        A server runs no model, so it does not hold what it is of.
        """
        return digest_of(vars(self).get("frozen") or self._frozen()) if self.frozen_names else ""

    @cached_property
    def width(self) -> int:
        """How many features the featurizer gives of a sample. Without a shape of samples, as in somebody's own
        ServerApp, it is what the classifier's first linear layer takes."""
        if not self.input_shape:
            return next(x.in_features for x in self._model.classifier.modules() if isinstance(x, nn.Linear))
        sample = blank(self.input_shape, device=self.device)
        drawn = {name: tensor.to(self.device) for name, tensor in self._drawn(0).items()}
        return self._call(self._model.featurizer, self._featurizer, drawn, sample, False).shape[1]

    def predict(self, tensors: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        """Outputs (samples, `outputs`) of samples x (samples, *input_shape)."""
        return self._call(self._model, self._slots, self.whole(tensors), x, training)

    def features(self, tensors: Mapping[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        """Features z = Φ(x) (samples, width) of samples x (samples, *input_shape)."""
        return self._call(self._model.featurizer, self._featurizer, self.whole(tensors), x, training)

    def classify(self, tensors: Mapping[str, Tensor], z: Tensor, training: bool = False) -> Tensor:
        """Outputs w(z) (samples, `outputs`) of features z (samples, width)."""
        return self._call(self._model.classifier, self._classifier, self.whole(tensors), z, training)

    @contextmanager
    def drawing(self, seed: int, *key: str | int) -> Iterator[None]:
        """What the model draws in training depends on `seed` and `key` alone; the global generators are left as
        they were."""
        if not self.draws:
            yield
            return
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.default_generator.manual_seed(derive(seed, "draws", *key))
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(derive(seed, "draws", *key))
            yield

    def module(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The model as a module of its own with these weights, copied, on `device` and in evaluation mode.

        What is frozen is in it, and LoRA's matrices are merged into the layers' weights.
        """
        module = self._build(0)
        tensors = self.whole(tensors)
        module.load_state_dict({name: tensors[full] for name, full in self._whole})
        merge(module)
        return module.to(self.device).eval()

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A model with what is frozen, unless it brings that itself, as models of older versions do."""
        return {**self.frozen, **tensors} if self.frozen_names else tensors

    def _frozen(self) -> Tensors:
        if not self.frozen_names:
            return {}
        begun = self._begun(derive(0, "init"))
        return {name: begun[name].to(self.device) for name in self.frozen_names}

    def _begun(self, seed: int, head: bool = True) -> Tensors:
        """A drawn model, with the tensors of its weights in place of its own."""
        drawn = self._drawn(seed)
        if not (isinstance(self.settings, Pretrained) and self.settings.starts_from_weights):
            return drawn
        plain, adapters = apart(drawn)
        return with_weights(self.settings, self.input_shape, self.outputs, plain, head) | adapters

    def _drawn(self, seed: int) -> Tensors:
        """Parameters and buffers of a new model, on the CPU; tied ones once."""
        tensors = self._build(seed).state_dict()
        return {name: tensors[name] for name in self._own}

    def _build(self, seed: int) -> Model:
        """A model on the CPU, whose global generator is left as it was."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            # Not torch.manual_seed, which would seed the generators of the accelerators, too.
            torch.default_generator.manual_seed(seed)
            return model_for(self.settings, self.input_shape, self.outputs)

    def _must_fit(self, model: nn.Module) -> None:
        """Raises `UserError` where what a plug-in has built is no model of such samples and classes."""
        if not isinstance(model, Model):
            kind = type(model).__name__
            raise UserError(f"model {self.settings.name!r}: what builds it gives a {kind}; let it give a `Model`")
        if self.input_shape:  # which a plain Flower app need not say
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                logits = run_once(self.settings, model.eval(), blank(self.input_shape, 2))
            must_be_logits(self.settings, logits, self.outputs)
            model.train()

    def _call(
        self,
        part: nn.Module,
        slots: Iterable[Slot],
        tensors: Mapping[str, Tensor],
        x: Tensor,
        training: bool,
    ) -> Tensor:
        if self._model.training != training:  # train() walks all layers, so only when it changes something
            self._model.train(training)
            for layer in self._still:
                layer.eval()
        if not self.bf16:
            return _run(part, slots, tensors, x)
        with torch.autocast(self.device.type, torch.bfloat16):
            output = _run(part, slots, tensors, x)
        return output.float()


def _slot(model: nn.Module, name: str, full: str) -> Slot:
    layer, _, own = name.rpartition(".")
    module = model.get_submodule(layer)
    held: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    return held, own, full


def _run(part: nn.Module, slots: Iterable[Slot], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A module's output with these tensors in its slots; as `torch.func.functional_call`, which looks each of them
    up by its name in every call. That takes a tenth of a small model's step."""
    before = [(held, own, held[own]) for held, own, _ in slots]
    try:
        for held, own, full in slots:
            held[own] = tensors[full]
        output: Tensor = part(x)
        return output
    finally:
        for held, own, empty in before:
            held[own] = empty


def network(
    settings: ModelSettings,
    input_shape: tuple[int, ...],
    outputs: int,
    device: torch.device | str = "cpu",
    bf16: bool = False,
) -> Network:
    """The resident `Network` of this process for these settings; build it once, share it between clients."""
    return _resident(settings, input_shape, outputs, torch.device(device), bf16)


_resident = lru_cache(maxsize=8)(Network)

"""Weights that a model starts from: a file, or torchvision's own download."""

import pickle
import re
import warnings
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from perennial.common.data.scenario import Scenario
from perennial.common.models.libraries import transformers_facts
from perennial.common.models.settings import Module, Pretrained
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown

P = TypeVar("P", bound=Pretrained)

ENDINGS = (".pt", ".pth", ".bin", ".safetensors")


def settled(settings: P, scenario: Scenario) -> P:
    """The settings of a run that is being made: with the digest of the file of weights, its path from the root,
    and how the scenario's pictures are brought to the units that the weights want.

    Settings that have a digest, as those of a run that is there, need no file. Raises `UserError`.
    """
    found: dict[str, Any] = {}
    if isinstance(settings, Module) and settings.library == "transformers":
        if settings.weights:
            raise UserError("model.weights: a model of transformers has its weights in its folder; leave it out")
        return settings if settings.digest else settings.model_copy(update=transformers_facts(settings))
    if settings.weights and not settings.named_weights and not settings.digest:
        path = Path(settings.weights).expanduser().absolute()
        found |= {"weights": str(path), "digest": sha256(_bytes(path)).hexdigest()}
    mean, std = settings.mean, settings.std
    if settings.named_weights and not mean:
        own = _named(settings).transforms()
        mean, std = tuple(own.mean), tuple(own.std)
    if mean:
        found |= {"mean": mean, "std": std, **_affine(mean, std, scenario)}
    return settings.model_copy(update=found) if found else settings


def _affine(mean: tuple[float, ...], std: tuple[float, ...], scenario: Scenario) -> dict[str, tuple[float, ...]]:
    """`(x s + m − m') / s'` as a factor and an offset for each channel; nothing where the two are the same."""
    channels = scenario.input_shape[0]
    if len(scenario.input_shape) != 3 or len(mean) != channels:
        shape = "x".join(map(str, scenario.input_shape))
        raise UserError(
            f"model.mean: {len(mean)} channels are not possible with scenario {scenario.name!r}, whose samples "
            f"are of {shape}"
        )
    old_mean, old_std = (channels * each if len(each) == 1 else each for each in scenario.standardised)
    factor = tuple(own / new for own, new in zip(old_std, std, strict=True))
    offset = tuple((own - new) / s for own, new, s in zip(old_mean, mean, std, strict=True))
    if all(abs(f - 1) < 1e-9 for f in factor) and all(abs(o) < 1e-9 for o in offset):
        return {}
    return {"factor": factor, "offset": offset}


def load_weights(settings: Pretrained) -> dict[str, Tensor]:
    """The tensors by their names in the file, on the CPU; to be read only.

    Raises `UserError` for a file that is not there, is another one than its digest says, or holds anything but
    tensors.
    """
    if settings.named_weights:
        return _downloaded(settings)
    found = _read(settings.weights, settings.digest)
    if isinstance(settings, Module) and settings.torchvision.startswith("densenet"):
        # torchvision's files have the names of its first release.
        return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", name): t for name, t in found.items()}
    return found


@lru_cache(maxsize=1)
def _read(weights: str, digest: str) -> dict[str, Tensor]:
    path = Path(weights)
    data = _bytes(path)
    if (found := sha256(data).hexdigest()) != digest:
        # A site reads no file by a server's word alone: one without a digest is refused here, too.
        raise UserError(
            f"model.weights: {path} is another file than that of the run (SHA-256 {found[:12]}…, and the run has "
            f"{digest[:12] or 'none'}…); put that one there",
            _not_here(path),
        )
    try:
        loaded = _tensors(path, data)
    except pickle.UnpicklingError:
        raise UserError(
            f"model.weights: {path} is no file of tensors alone; Python objects in it could run code and are "
            "never loaded, so save module.state_dict()"
        ) from None
    except Exception as error:  # torch's reader of pickles raises whatever its stack machine comes to
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"model.weights: {path} cannot be read as {path.suffix} ({why})") from None
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(f"model.weights: {path} holds no tensors by name; save module.state_dict()")
    for name, value in loaded.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"model.weights: {path} has {name!r}, a {type(value).__name__} and no tensor; save "
                "module.state_dict() alone"
            )
        if not bool(value.isfinite().all()):
            raise UserError(f"model.weights: {path} has values in {name!r} that are not finite")
    return {str(name): value.detach() for name, value in loaded.items()}


def _tensors(path: Path, data: bytes) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        return load(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old formats; what cannot be read raises
        return torch.load(BytesIO(data), map_location="cpu", weights_only=True)


def _bytes(path: Path) -> bytes:
    if path.suffix not in ENDINGS:
        raise UserError(
            f"model.weights: {path.name!r} is no file that ends in {', '.join(ENDINGS)}, and no name of "
            "torchvision's weights, such as IMAGENET1K_V2"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"model.weights: {path} cannot be read here ({why})", _not_here(path)) from None


def _not_here(path: Path) -> str:
    """The same of a file that is another one and of none: what a site has is not its server's to know."""
    return f"model.weights: {path} of the run is not at this site; put it there"


def _named(settings: Pretrained) -> Any:
    """torchvision's entry of these weights. Raises `UserError` where it has none of that name."""
    from torchvision.models import get_model_weights

    name = settings.torchvision if isinstance(settings, Module) else settings.name
    if not name:
        raise UserError(
            f"model.weights: {settings.weights!r} is torchvision's, and model {settings.name!r} is not; give a "
            f"file ({', '.join(ENDINGS)})"
        )
    must_be_known(name)
    entries = get_model_weights(name)
    if settings.weights not in entries.__members__:
        raise UserError(f"model.weights: {unknown('weights', settings.weights, entries.__members__)}")
    return entries[settings.weights]


def must_be_known(name: str) -> None:
    """Raises `UserError` for a name that is no classifier of torchvision's."""
    import torchvision
    from torchvision.models import list_models

    known = list_models(module=torchvision.models)
    if name not in known:
        raise UserError(f"model.name: {unknown('classifier of torchvision', name, known)}")


@lru_cache(maxsize=1)
def _downloaded(settings: Pretrained) -> dict[str, Tensor]:
    """What torchvision itself makes of its weights, under the names that its modules have today."""
    from torchvision.models import get_model

    entry = _named(settings)
    name = settings.torchvision if isinstance(settings, Module) else settings.name
    options = settings.options if isinstance(settings, Module) else {}
    try:
        tensors: dict[str, Tensor] = get_model(name, weights=entry, progress=False, **options).state_dict()
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.weights: {settings.weights} of torchvision's {name} cannot be downloaded ({why}); bring "
            f"{entry.url} here yourself and give its path"
        ) from None
    if lacking := [key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise UserError(
            f"model.weights: {settings.weights} of torchvision's {name} has no {lacking[0]!r}, which it would "
            "start from"
        )
    return tensors

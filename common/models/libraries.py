"""Networks of Hugging Face's transformers and of timm: local files alone, no code of theirs, and no pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perennial.common.models.settings import Module
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import shape_in_words, vocabulary_of
from perennial.common.utils.suggestions import meant, unknown

PICKLED = (".bin", ".ckpt", ".h5", ".msgpack", ".pkl", ".pt", ".pth")
EAGER = {"attn_implementation": "eager"}
"""The attention that can be differentiated twice, as some methods do."""


# ---------------------------------------------------------------------- transformers


def transformers_facts(settings: Module) -> dict[str, str]:
    """What a run notes of a folder of transformers' files: where it is, and the digest of what is in it.

    Raises `UserError` where it is not here, or has pickled weights.
    """
    folder = _folder(settings)
    name = settings.network
    if Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser().resolve())
    return {"name": f"transformers:{name}", "digest": _digest(folder)}


def transformers_network(settings: Module, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A classifier of texts or of pictures, as the folder's `config.json` says, drawn from torch's own generator.

    Raises `UserError`.
    """
    import transformers

    config = _config(settings, classes)
    found: nn.Module = _auto(transformers, settings, input_shape).from_config(config, **EAGER)
    if hasattr(found, "score") and config.pad_token_id is None:  # which its forward would say in words of its own
        raise UserError(
            f"model.pad_token_id: {settings.network!r} looks at the last token of a text, and does not say which "
            "token stands behind it; say one, such as model.pad_token_id=0"
        )
    return found.float()


def transformers_weights(settings: Module, input_shape: tuple[int, ...], classes: int) -> dict[str, Tensor]:
    """The tensors of the folder, by the names of the classifier's; of what is not there, none.

    Raises `UserError`.
    """
    import transformers

    folder, config = _checked(settings), _config(settings, classes)
    if not any(folder.glob("*.safetensors")):
        return {}
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        try:
            model, told = _auto(transformers, settings, input_shape).from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **EAGER,
            )
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"model.name: the weights of {settings.network!r} cannot be read ({why})") from None
    drawn = {
        key[0] if isinstance(key, tuple) else key for key in (*told["missing_keys"], *told["mismatched_keys"])
    }
    return {name: tensor for name, tensor in model.float().state_dict().items() if name not in drawn}


def _auto(transformers: Any, settings: Module, input_shape: tuple[int, ...]) -> Any:
    if vocabulary_of(input_shape):
        return transformers.AutoModelForSequenceClassification
    if len(input_shape) == 3:
        return transformers.AutoModelForImageClassification
    raise UserError(
        f"model {settings.name!r} takes ids of tokens, or pictures, and samples are of shape "
        f"{shape_in_words(input_shape)}"
    )


def _config(settings: Module, classes: int) -> Any:
    """The folder's configuration with the settings of `model`. Raises `UserError` for one that it has not."""
    import transformers

    folder = _checked(settings)
    try:
        with _quiet(transformers):
            config, unused = transformers.AutoConfig.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                return_unused_kwargs=True,
                num_labels=classes,
                **settings.options,
            )
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"model.name: {settings.network!r} is no model of transformers ({why})") from None
    if unused:
        key = min(unused)
        raise UserError(f"model.{key}: {settings.network!r} has no such setting{meant(key, config.to_dict())}")
    return config


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """In which transformers says nothing of weights that are drawn anew, and draws no bars."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _checked(settings: Module) -> Path:
    """The folder, whose files are those of the run. Raises `UserError`."""
    name = settings.network
    not_here = f"model.name: {name!r} of the run is not at this site; put it there"  # whatever else is
    try:
        folder = _folder(settings)
    except UserError as error:
        raise UserError(str(error), not_here) from None
    if (found := _digest(folder)) != settings.digest:
        raise UserError(
            f"model.name: {name!r} has other files than those of the run (SHA-256 {found[:12]}…, and the run has "
            f"{settings.digest[:12] or 'none'}…); put those there",
            not_here,
        )
    return folder


def _folder(settings: Module) -> Path:
    name = settings.network
    needs("transformers", "transformers")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        import huggingface_hub

        try:
            folder = Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except Exception as error:  # of a name that is none, too
            raise UserError(
                f"model.name: there is no folder {name!r} here, and Hugging Face's cache on this machine has no "
                "model of this name; a run downloads nothing, so bring it here first"
            ) from error
    if not (folder / "config.json").is_file():
        raise UserError(f"model.name: {folder} has no config.json, and so no model of transformers")
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model.name: {folder} has its weights in {pickled[0]}, which may run code as it is read, and not in "
            "safetensors; model.save_pretrained(FOLDER) writes these"
        )
    return folder


def _digest(folder: Path) -> str:
    """Of the files that make the model: its configuration, and the weights by their names."""
    weights = (*sorted(folder.glob("*.safetensors")), *folder.glob("*.safetensors.index.json"))
    files = (folder / "config.json", *weights)
    return _digest_of(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=4)
def _digest_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    found = sha256()
    for file, size, _ in files:
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            while piece := content.read(2**24):
                found.update(piece)
    return found.hexdigest()


# ---------------------------------------------------------------------- timm


def timm_network(settings: Module, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of timm's, drawn from torch's global generator. Raises `UserError`."""
    needs("timm", "timm")
    import timm

    if len(input_shape) != 3:
        raise UserError(
            f"model {settings.name!r} takes pictures, and samples are of shape {shape_in_words(input_shape)}"
        )
    if settings.network not in (known := timm.list_models()):
        raise UserError(f"model.name: {unknown('network of timm', settings.network, known)}")
    options = {"num_classes": classes, "in_chans": input_shape[0], **settings.options}
    found: nn.Module = timm.create_model(settings.network, pretrained=False, **options)
    return found


def needs(package: str, extra: str) -> None:
    """Raises `UserError` where a package is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise UserError(
            f"model.name: this model needs the extra perennial[{extra}], which is not installed; in the project's "
            f"folder: uv sync --inexact --extra {extra}"
        )

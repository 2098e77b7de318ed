"""How much memory a model takes, before it is built."""

import ctypes
import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from perennial.common.models.architectures import build, model_for
from perennial.common.models.network import network
from perennial.common.models.own_module import constructed
from perennial.common.models.settings import ModelSettings, Module, Pretrained
from perennial.common.utils.errors import UserError
from perennial.common.utils.free_memory import available, in_gb
from perennial.common.utils.samples import blank

COPIES = 4
"""Of a model that is trained: as it came, as it is trained, its gradient, and as it is sent."""
SAMPLE_COPIES = 3
"""Of generated samples: as they are drawn, as they are put together, and as they are kept."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, FREED_BYTES = -1, -3, 2**29
"""Of glibc's `malloc.h`, and how much."""
DRAWS = ("uniform_", "normal_", "trunc_normal_")
SMALL = 2**20
"""Bytes of tensors that are made in any case: some modules compute their own sizes with them."""


class _Measured(TorchFunctionMode):
    """Draws no parameters: on the "meta" device there is nothing to draw.

    With `most`, tensors of so many bytes in all are made and drawn; of others there is the size alone, on "meta".
    """

    def __init__(self, most: float = 0.0) -> None:
        super().__init__()
        self.most = self.left = most
        self.beyond = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.most and func in _device_constructors():
            plain = {key: value for key, value in kwargs.items() if key != "generator"}
            size = func(*args, **{**plain, "device": "meta"})
            if size.nbytes > self.left:
                self.beyond = True
                return size
            self.left -= size.nbytes
            return func(*args, **kwargs)
        first = kwargs.get("tensor", args[0] if args else None)
        made = isinstance(first, Tensor) and not first.is_meta and first.nbytes <= self.most
        draws = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", "") in DRAWS
        return first if draws and not made else func(*args, **kwargs)


@lru_cache(maxsize=8)
def model_bytes(settings: ModelSettings, input_shape: tuple[int, ...], classes: int) -> int:
    """Bytes of a model's parameters and buffers, of which none is built. Raises `UserError` as building does."""
    if isinstance(settings, Module):
        return _module_bytes(settings, input_shape, classes)
    try:
        with torch.device("meta"), _Measured():
            tensors: list[Tensor] = list(build(settings, input_shape, classes).state_dict().values())
    except (RuntimeError, OverflowError) as error:  # more elements than a 64-bit number counts
        raise UserError(f"model: {settings.name!r} of this size has too many parameters ({error})") from None
    return sum(tensor.nbytes for tensor in tensors)


def _module_bytes(settings: Module, input_shape: tuple[int, ...], classes: int) -> int:
    there = available() / 2
    for sized in (_Measured(SMALL), _Measured(there)):  # the second for those that look at what they have drawn
        try:
            with torch.random.fork_rng(devices=[]), sized:
                module = constructed(settings, input_shape, classes)
            return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        except UserError as error:
            failed = error
    if sized.beyond:
        raise UserError(
            f"model: {settings.name!r} looks at what it has drawn, so it must be made to be measured, and takes "
            f"more than the {in_gb(there)} that there are for this; take a smaller one"
        )
    raise failed


@lru_cache(maxsize=8)
def activation_bytes(settings: ModelSettings, input_shape: tuple[int, ...], classes: int) -> tuple[int, bool]:
    """Bytes of one sample and of all layers' outputs for it; and whether there are convolutions among them."""
    found = [blank(input_shape).nbytes]

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append(output.nbytes)

    with torch.device("meta"), _Measured():
        model = model_for(settings, input_shape, classes).eval()
        layers = [layer for layer in model.modules() if not list(layer.children())]
        for layer in layers:
            layer.register_forward_hook(note)
        model(blank(input_shape, device="meta"))
    return sum(found), any(isinstance(layer, nn.Conv2d) for layer in layers)


def must_fit(settings: ModelSettings, input_shape: tuple[int, ...], classes: int, copies: int = COPIES) -> None:
    """Raises `UserError` if so many copies of what is trained of a model are more than this process can have."""
    each, there = model_bytes(settings, input_shape, classes), available()
    needed, what = copies * each, f"{copies} copies of {in_gb(each)}"
    if isinstance(settings, Pretrained) and (settings.lora or settings.freeze != "none") and 2 * each <= there:
        # What is frozen is here once, and once more while it is made.
        trained = network(settings, input_shape, classes).travelling_bytes
        needed = 2 * each + copies * trained
        what = f"2 copies of {in_gb(each)}, and {copies} of {in_gb(trained)}"
    if needed > there:
        raise UserError(
            f"model: {settings.name!r} of this size takes about {in_gb(needed)} of memory here ({what}), and "
            f"{in_gb(there)} are available; take a smaller one"
        )


def samples_must_fit(samples: int, input_shape: tuple[int, ...]) -> None:
    """Raises `UserError` if so many generated samples are more than this process can have."""
    needed, there = SAMPLE_COPIES * 4 * samples * prod(input_shape), available()
    if needed > there:
        raise UserError(
            f"scenario: {samples:,} samples of a client take about {in_gb(needed)} of memory here while they are "
            f"drawn, and {in_gb(there)} are available; take fewer"
        )


def keep_freed() -> None:
    """Let this process keep up to half a gigabyte of memory that it has freed, where the C library is glibc.

    The gradients of a stack of clients take some megabytes. Else these went back to the system after every step,
    and came again page by page, which takes a sixth of the time.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(option, FREED_BYTES)


@contextmanager
def set_aside() -> Iterator[None]:
    """Python's collector of garbage leaves alone what is there now: some 400,000 objects, most of them PyTorch's,
    which it else looks through for 0.2 s every few rounds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

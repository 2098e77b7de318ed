"""PyTorch as a run needs it, whatever the caller has set."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock

import torch

CPU = torch.device("cpu")
_turn = RLock()
"""One thread at a time: much of PyTorch's state is the whole process's, as are the networks that runs share and
the global generator, which is seeded and put back where a network is made. A turn may lie within the same thread's
turn, as when a watcher predicts."""


@contextmanager
def plain_torch(threads: int | None = None) -> Iterator[None]:
    """PyTorch with its own defaults and so many threads, once no other thread is here; afterwards as it was.

    Else a caller's autocast would change a run's numbers, and what is kept of them. What is at its default is not
    touched.
    """
    with _turn, ExitStack() as back:
        if threads is not None:
            back.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads)
        back.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        back.enter_context(_whole_products())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                back.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != CPU:  # a device context costs time in every call
            back.enter_context(CPU)
        back.enter_context(torch.inference_mode(False))
        back.enter_context(torch.enable_grad())
        yield


@contextmanager
def _whole_products() -> Iterator[None]:
    """Products of matrices in all of float32's digits. PyTorch has an old and a new way to say so, kept apart."""
    kinds = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    if {*before} <= {"none", "ieee"}:
        yield
        return
    said = "highest"
    with suppress(RuntimeError):  # who used the new way cannot ask in the old one
        said = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(said)
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


@contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Products of matrices and convolutions on a GPU in TF32, or in all of float32's digits; both alike, which by
    PyTorch's defaults they are not."""
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, wanted = [kind.fp32_precision for kind in kinds], "tf32" if tf32 else "ieee"
    for kind in kinds:
        kind.fp32_precision = wanted
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision

"""A device that is none: its tensors compute on the CPU, say that they are elsewhere, and notice two things.

They raise where they meet a tensor of another place, as a GPU's do, and they count how often somebody waits for a
value of theirs, which on a GPU stops the queue of what is to be done.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
aten = torch.ops.aten
BETWEEN = {aten.copy_.default, aten._to_copy.default}
"""What takes tensors of two places."""
WAITS = {
    aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select,
    aten.bincount, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.allclose,
}  # fmt: skip
"""What cannot begin before its values are known, or gives them to the host."""


class ElsewhereTensor(Tensor):
    """A tensor of the device; `raw` is where its values are."""

    raw: Tensor
    waits: ClassVar = Counter[str]()
    """How often a value was waited for, by the operation."""

    @staticmethod
    def __new__(cls, raw: Tensor) -> "ElsewhereTensor":
        made: ElsewhereTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.raw = raw
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"{NAME}({self.raw})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        """As numbers. PyTorch's own refuses every class but its own."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        met = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        strangers = [tensor for tensor in met if not isinstance(tensor, cls) and tensor.dim()]
        if strangers and func not in BETWEEN:
            raise RuntimeError(f"{func} meets tensors of {NAME} and of {strangers[0].device}")
        leaves = func is aten._to_copy.default and kwargs.get("device", torch.device(NAME)).type != NAME
        leaves |= func is aten.copy_.default and not isinstance(args[0], cls)
        chosen = func.overloadpacket is aten.index and any(
            tensor is not None and tensor.dtype == torch.bool for tensor in args[1]
        )
        if leaves or chosen or func.overloadpacket in WAITS:
            cls.waits[str(func)] += 1
        if "device" in kwargs and not leaves:
            kwargs["device"] = torch.device("cpu")

        def inside(value: Any) -> Any:
            return value.raw if isinstance(value, cls) else value

        found = func(*tree_map(inside, args), **tree_map(inside, kwargs))
        if leaves:
            return args[0] if func is aten.copy_.default else found
        wrapped = tree_map(lambda value: cls(value) if isinstance(value, Tensor) else value, found)
        return return_and_correct_aliasing(func, tuple(args), kwargs, wrapped)


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return ElsewhereTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> Tensor:
    return ElsewhereTensor(torch.empty_strided(size, stride, dtype=dtype))


if not torch.cuda.is_available():  # beside it a GPU's gradients fail: PyTorch has one kind of accelerator
    _setup_privateuseone_for_python_backend(NAME)
    LIBRARY = torch.library.Library("aten", "IMPL")
    LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
    LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")

"""A pretended CUDA device: memory of the CPU that says it is on ``cuda:0`` and mixes with nothing that is not.

It finds what a machine without a GPU otherwise can't: a tensor left on the CPU, a comparison across devices, an index
made in the wrong place. It computes on the CPU, knows no streams and no graphs, and autograd does not take it.
"""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from q4core import ops

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEVICE", "pretended_cuda"]

DEVICE = "cuda:0"
_MIXING = {"aten::copy_", "aten::index", "aten::index_put_"}
"""Operations that torch allows across devices."""
_OPS: dict[str, Any] = {
    "q4core::linear": ops._linear,
    "q4core::linear_out": ops._linear_out,
    "q4core::linear_input_grad": ops._linear_input_grad,
    "q4core::linear_exact": ops._linear_exact,
}


def _inner(value: Any) -> Any:
    return value.memory if isinstance(value, _Pretended) else value


class _Pretended(torch.Tensor):
    """CPU memory that says it is on a CUDA device; methods that torch guards in C++ are overridden one by one."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(cls: type[_Pretended], inner: torch.Tensor) -> _Pretended:  # noqa: PYI034  # Self needs Python 3.11
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Pretended = make(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE),
        )
        made.memory = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # keyword names are torch's
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def item(self) -> Any:
        return self.memory.item()

    def tolist(self) -> Any:
        return self.memory.tolist()

    def __int__(self) -> int:
        return int(self.memory)

    def __float__(self) -> float:
        return float(self.memory)

    def __index__(self) -> int:
        return int(self.memory)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([_Pretended(part) for part in self.memory])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _Pretended(self.memory[tree_map(_inner, index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            _require_one_device("setitem", [self, value])
        self.memory[tree_map(_inner, index)] = _inner(value)

    def view(self, *shape: Any) -> torch.Tensor:
        return _Pretended(self.memory.view(*shape))

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _Pretended(self.memory.contiguous(*args, **kwargs))

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # torch's signature
        self.memory.copy_(_inner(src))
        return self


def _require_one_device(name: str, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors of the device beside others, but for single numbers, as CUDA does."""
    apart = [tensor for tensor in tensors if not isinstance(tensor, _Pretended) and tensor.dim()]
    if apart and any(isinstance(tensor, _Pretended) for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in apart)
        raise RuntimeError(f"expected all tensors to be on the same device: {name} of {DEVICE} and cpu {shapes}")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name in _OPS:
        with _Mode():
            return _OPS[name](*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name not in _MIXING:
        _require_one_device(name, tensors)
    own = {id(tensor.memory): tensor for tensor in tensors if isinstance(tensor, _Pretended)}
    is_there = bool(own)
    if kwargs.get("device") is not None:
        is_there = torch.device(kwargs["device"]).type == "cuda"
        kwargs = kwargs | {"device": torch.device("cpu")} if is_there else kwargs

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, _Pretended):
            return value
        if id(value) in own:
            return own[id(value)]
        return _Pretended(value) if is_there else value

    return tree_map(placed, func(*tree_map(_inner, args), **tree_map(_inner, kwargs)))


class _Mode(TorchDispatchMode):
    """Makes new tensors of the device pretended ones, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Let torch see one CUDA device inside the ``with`` block."""
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = make(data, **kwargs)
        return made if device is None else made.to(device)

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: types.SimpleNamespace(device=device),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(_Mode())
        yield

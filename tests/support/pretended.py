"""A pretended CUDA device: memory of the CPU that says it is on ``cuda:0`` and mixes with nothing that is not.

It finds what a machine without a GPU otherwise can't: a tensor left on the CPU, a comparison across devices, an index
made in the wrong place, a host that waits for the device. It computes on the CPU, knows no streams and no graphs, and
autograd does not take it. q4core takes its tensors for plain ones.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from q4core.codec import decode
from q4core.layers import fast_path
from q4core.machine.torch_state import dispatch_modes
from q4core.ops import registration

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEVICE", "Pretence", "on_another_device", "pretended_cuda"]

DEVICE = "cuda:0"
_MIXING = {"aten::copy_", "aten::index", "aten::index_put_"}
"""Operations that torch allows across devices."""
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
}
"""Operations whose result, or its size, the host must know."""
_COPYING = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::index_put_"}
_INDEXING = {"aten::index", "aten::index_put_"}
_OPS = {f"q4core::{name}": kernel for name, kernel in registration.KERNELS.items()}


@attrs.define
class Pretence:
    """What the device is configured to do and what it saw.

    Args:
        current: Index of the current device.
        ops: Names of q4core's registered ops that were called.
        waits: What made the host wait for the device.
    """

    current: int = 0
    ops: list[str] = attrs.field(factory=list)
    waits: list[str] = attrs.field(factory=list)

    def exchange(self, index: int) -> int:
        """Make another device the current one, and return the one before it."""
        before, self.current = self.current, index
        return before


_seen = Pretence()


def _inner(value: Any) -> Any:
    return value.memory if isinstance(value, _Pretended) else value


class _Pretended(torch.Tensor):
    """CPU memory that says it is on a CUDA device; methods that torch guards in C++ are overridden one by one."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(cls: type[_Pretended], inner: torch.Tensor, device: str = DEVICE) -> _Pretended:  # noqa: PYI034  # Self needs Python 3.11
        make: Any = torch.Tensor._make_wrapper_subclass
        made: _Pretended = make(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(device),
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
        _seen.waits.append("item")
        return self.memory.item()

    def tolist(self) -> Any:
        _seen.waits.append("tolist")
        return self.memory.tolist()

    def __int__(self) -> int:
        _seen.waits.append("__int__")
        return int(self.memory)

    def __float__(self) -> float:
        _seen.waits.append("__float__")
        return float(self.memory)

    def __index__(self) -> int:
        _seen.waits.append("__index__")
        return int(self.memory)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([_Pretended(part) for part in self.memory])

    def __bool__(self) -> bool:
        _seen.waits.append("__bool__")
        return bool(self.memory)

    def nonzero(self, **kwargs: Any) -> Any:
        _seen.waits.append("nonzero")
        return tree_map(_Pretended, self.memory.nonzero(**kwargs))

    def __getitem__(self, index: Any) -> torch.Tensor:
        _note_index("getitem", index)
        return _Pretended(self.memory[tree_map(_inner, index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        _note_index("setitem", index)
        if isinstance(value, torch.Tensor):
            _require_one_device("setitem", [self, value])
        self.memory[tree_map(_inner, index)] = _inner(value)

    def view(self, *shape: Any) -> torch.Tensor:
        return _Pretended(self.memory.view(*shape))

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _Pretended(self.memory.contiguous(*args, **kwargs))

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # torch's signature
        if not isinstance(src, _Pretended):
            _seen.waits.append("copy_")
        self.memory.copy_(_inner(src))
        return self


def _require_one_device(name: str, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors of the device together with others, but for single numbers, as CUDA does."""
    apart = [tensor for tensor in tensors if not isinstance(tensor, _Pretended) and tensor.dim()]
    if apart and any(isinstance(tensor, _Pretended) for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in apart)
        raise RuntimeError(f"expected all tensors to be on the same device: {name} of {DEVICE} and cpu {shapes}")


def _note_index(name: str, index: Any) -> None:
    """Note an index that must be read, or copied to the device, before anything can be indexed."""
    if any(
        isinstance(leaf, torch.Tensor) and (leaf.dtype == torch.bool or not isinstance(leaf, _Pretended))
        for leaf in tree_leaves(index)
    ):
        _seen.waits.append(name)


def _note(name: str, args: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Note what makes the host wait: a number that it reads, or a copy from or to memory that is not pinned."""
    is_there = any(isinstance(tensor, _Pretended) for tensor in tensors)
    apart = not all(isinstance(tensor, _Pretended) for tensor in tensors)
    leaves = kwargs.get("device") is not None and (torch.device(kwargs["device"]).type == "cuda") != is_there
    is_copied = name in _COPYING and (leaves or (is_there and apart))
    if is_copied or (is_there and name in _WAITING):
        _seen.waits.append(name)
    elif is_there and name in _INDEXING:
        _note_index(name, args[1])


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name in _OPS:
        _seen.ops.append(name)
        with _Mode():
            return _OPS[name](*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    _note(name, args, tensors, kwargs)
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


def on_another_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that says it is on a second CUDA device."""
    return _Pretended(_inner(tensor), "cuda:1")


@contextlib.contextmanager
def pretended_cuda() -> Iterator[Pretence]:
    """Let torch see a CUDA device inside the ``with`` block, and q4core no sign that it is pretended."""
    make, outside, seen = torch.tensor, dispatch_modes(), Pretence()

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = make(data, **kwargs)
        return made if device is None else made.to(device)

    def modes_beside_ours() -> int:
        return abs(dispatch_modes() - outside - 1)

    run = threading.Thread.run

    def run_there(self: threading.Thread) -> None:
        with _Mode():  # that of the thread that started this one does not reach it
            run(self)

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: seen.current,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "_lazy_init": lambda: None,
        "_exchange_device": seen.exchange,
        "_maybe_exchange_device": seen.exchange,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_there))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(mock.patch.object(sys.modules[__name__], "_seen", seen))
        stack.enter_context(mock.patch.object(fast_path, "PLAIN", _Pretended))
        stack.enter_context(mock.patch.object(fast_path, "dispatch_modes", modes_beside_ours))
        stack.enter_context(mock.patch.object(decode, "dispatch_modes", modes_beside_ours))
        stack.enter_context(mock.patch.dict(decode._TABLES))
        stack.enter_context(_Mode())
        yield seen

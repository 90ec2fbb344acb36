"""``SharedWeight``: a prepared 4-bit weight that actors use in place, without copies."""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

import q4core as q4
from q4_actors.tensors.arguments import MutableMode
from q4_actors.tensors.form import Form
from q4_actors.tensors.segment import Segment
from q4core.plugin_api import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["HasForm", "Held", "InSegment", "SharedForm", "SharedWeight"]
__all__ += ["forms_of", "from_flat", "share", "share_by", "to_flat"]

_ALIGNMENT = 64  # what adopting a prepared layer asks for


class SharedWeight:
    """A prepared weight, to be given to actors as an argument or in a message.

    What its layers compute with is one memory for all: no actor may write to it. Keep the maker's until the others have
    their layers; the system's are closed with it.

    Attributes:
        name: The layer's, for messages.
        nbytes: Bytes that are shared.
    """

    def __init__(  # made here alone
        self,
        header: dict[str, Any],
        spec: str | None,
        has_bias: bool,  # noqa: FBT001  # as all of them
        where: Any,
        nbytes: int,
    ) -> None:
        self._header, self._spec, self._has_bias, self._where = header, spec, has_bias, where
        self.name, self.nbytes = header["name"], nbytes

    def layer(self, session: q4.Session | None = None, *, name: str | None = None) -> q4.Q4Linear:
        """Return a layer over the shared memory, in this process.

        Where another backend, version or instruction set is used here, the weight is prepared again from its canonical
        form, into memory of this process: the event ``q4.actor.prepared`` reports this and the reason.

        Args:
            session: Whose layer it becomes. Defaults to the default session.
            name: For messages and reports. Defaults to the shared one's.

        Raises:
            LifecycleError: The memory is gone; or the prepared layer cannot be reused here, and was shared without its
                canonical form.
        """
        found = self._where.tensors()
        count = len(self._header["tensors"])
        prepared, bias, rest = found[:count], None, found[count:]
        if self._has_bias:
            bias, *rest = rest
        try:
            return q4.adopt_prepared(self._header, prepared, session, bias=bias, name=name)
        except q4.LifecycleError as error:
            if self._spec is None:
                raise
            emit("q4.actor.prepared", level=logging.WARNING, layer=name or self.name, why=error.what)
        spec = q4.WeightSpec.from_json(self._spec, formats=q4.default_registry().formats().values())
        owner = q4.default_session() if session is None else session
        return owner.linear(spec.build(rest, name=name or self.name), bias, name=name)

    def close(self) -> None:
        """Release the memory; layers that were made keep it. Closing twice is allowed."""
        self._where.close()


class SharedForm(SharedWeight):
    """What lies in tensors alone, such as sparse synapses: no session prepares it."""

    def __init__(self, name: str, make: Callable[..., Any], where: Any, nbytes: int) -> None:  # made here alone
        self.name, self.nbytes, self._make, self._where = name, nbytes, make, where

    def layer(self, session: q4.Session | None = None, *, name: str | None = None) -> Any:
        """Return what was shared, over the shared memory, in this process; see ``SharedWeight.layer``."""
        del session, name
        return self._make(*self._where.tensors())


class Held:
    """Tensors of this process, for its threads: on the CPU or on a GPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)

    def tensors(self) -> list[torch.Tensor]:
        """Return them."""
        if not self._tensors:
            raise q4.LifecycleError("the shared weight is closed")
        return self._tensors

    def close(self) -> None:
        """Drop them."""
        self._tensors = []

    def __reduce__(self) -> NoReturn:
        """Reject pickling, which would copy them."""
        hint = "Share it by the system whose actors use it: system.share(layer)."
        raise q4.LifecycleError("the weight is shared between threads, and can't be sent to a process", hint=hint)


class InSegment:
    """Tensors in shared memory, for the processes of a Linux machine."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._forms, total = forms_of(tensors)
        form = Form(MutableMode.IN_PLACE, torch.uint8, (total,), 1)
        zeros = torch.zeros((), dtype=torch.uint8, device="cpu").expand(total)
        self._segment: Segment | None = Segment.create("shared weight", form, zeros)
        self.name = self._segment.name
        to_flat(tensors, self._segment.slots[0])

    def tensors(self) -> list[torch.Tensor]:
        """Return them, over this process's mapping."""
        if self._segment is None:
            self._segment = _attached(self.name)
        if not self._segment.slots:
            raise q4.LifecycleError("the shared weight is closed")
        return from_flat(self._segment.slots[0], self._forms)

    def close(self) -> None:
        """Remove the name, if this process made it."""
        if self._segment is not None and self._segment.is_maker:
            self._segment.close()
            self._segment.release()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle by name."""
        return {"_forms": self._forms, "_segment": None, "name": self.name}


_ATTACHED: weakref.WeakValueDictionary[tuple[str, int], Segment] = weakref.WeakValueDictionary()
"""By name and process, since a forked child has its own: one mapping for a weight's handles while one of them lives."""


def _attached(name: str) -> Segment:
    key = name, os.getpid()
    return _ATTACHED.get(key) or _ATTACHED.setdefault(key, Segment.attach("shared weight", name))


def forms_of(tensors: Iterable[torch.Tensor]) -> tuple[list[tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """Return where each tensor lies in one piece of memory, and how large that is."""
    forms, end = [], 0
    for tensor in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        forms.append((start, tensor.dtype, tuple(tensor.shape)))
        end = start + tensor.nbytes
    return forms, end


def to_flat(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy tensors into one of bytes."""
    for tensor, (start, _, _) in zip(tensors, forms_of(tensors)[0], strict=True):
        flat[start : start + tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))


def from_flat(flat: torch.Tensor, forms: Iterable[tuple[int, torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Return views of one tensor of bytes."""
    return [
        flat[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
        for start, dtype, shape in forms
    ]


class HasForm(Protocol):
    """The protocol of what lies in tensors alone, and computes over any that hold the same numbers."""

    def shared_form(self) -> tuple[Callable[..., Any], Sequence[torch.Tensor]]:
        """Return what makes it over its tensors, which can be pickled, and the tensors."""
        ...


def share_by(
    make: Callable[[list[torch.Tensor]], Any],
    what: q4.Q4Linear | q4.PackedWeight | HasForm,
    *,
    canonical: bool,
    devices: frozenset[str] = frozenset({"cpu"}),
) -> SharedWeight:
    """Return a weight whose tensors, on one of some types of devices, ``make`` puts somewhere; see ``share``."""
    if isinstance(what, q4.PackedWeight):
        with q4.Session() as session:
            return share_by(make, session.linear(what), canonical=canonical, devices=devices)
    if not isinstance(what, q4.Q4Linear):
        name, form = type(what).__name__, getattr(what, "shared_form", None)
        if form is None:
            rule = "a Q4Linear, a PackedWeight, or of tensors alone (HasForm)"
            raise q4.InputError("share", name="what", rule=rule, value=name)
        make_again, own = form()
        _check_device(f"share {name}", own, devices)
        return SharedForm(name, make_again, make([*own]), sum(tensor.nbytes for tensor in own))
    header, prepared = q4.export_prepared(what)
    bias = [] if what.bias is None else [what.bias.detach()]
    weight = what.packed_weight() if canonical else None
    source = [] if weight is None else [tensor for _, tensor in weight.tensors()]
    tensors = [*prepared, *bias, *source]
    _check_device(f"share {what.name!r}", tensors, devices)
    spec = None if weight is None else q4.WeightSpec.of(weight).to_json()
    return SharedWeight(header, spec, bool(bias), make(tensors), sum(tensor.nbytes for tensor in tensors))


def _check_device(what: str, tensors: Iterable[torch.Tensor], devices: frozenset[str]) -> None:
    for tensor in tensors:
        if tensor.device.type not in devices:
            hint = "A GPU's memory belongs to one process: use actors on threads."
            raise q4.InputError(what, name="device", rule="the CPU", value=str(tensor.device), hint=hint)


def share(what: q4.Q4Linear | q4.PackedWeight | HasForm, *, canonical: bool = True) -> SharedWeight:
    """Return a weight in shared memory, for processes of this machine (Linux). ``ActorSystem.share`` knows the runtime.

    Args:
        what: A prepared layer, with its bias; a weight, which is prepared first, in a session of its own; or what lies
            in tensors alone, by its ``shared_form``.
        canonical: Whether the canonical form is shared as well, for processes in which another backend serves.

    Raises:
        InputError: It is no layer and no weight, or not on the CPU; or there is too little shared memory.
        LifecycleError: Its backend can't export what it prepared.
    """
    return share_by(InSegment, what, canonical=canonical)

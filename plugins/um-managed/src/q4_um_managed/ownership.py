"""``Ownership``: the memory that a tensor lies in, of all that one provider gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_um_managed.lease import Lease
from q4_um_managed.storage import has_storage
from q4core import InputError

if TYPE_CHECKING:
    import torch

    from q4_um_managed.mapping import MappedMemory

__all__ = ["Ownership"]

_NOTE = "_q4_um_managed_owner"


class Ownership:
    """Notes of one provider on torch's storages, which torch keeps as one Python object as long as the memory lives."""

    def note(self, tensor: torch.Tensor, owner: Lease | MappedMemory) -> None:
        """Note the memory of a new storage, which views and detached aliases share."""
        setattr(tensor.untyped_storage(), _NOTE, (self, owner))

    def of(self, tensor: torch.Tensor) -> Lease | MappedMemory | None:
        """Return the memory that a tensor lies in, given back or not; None for any other."""
        provider, owner = (
            getattr(tensor.untyped_storage(), _NOTE, (None, None)) if has_storage(tensor) else (None, None)
        )
        return owner if provider is self else None

    def in_use(self, tensor: torch.Tensor, what: str) -> Lease | MappedMemory | None:
        """Return the memory that a tensor lies in, for ``what`` uses it; None for any other.

        Raises:
            LifecycleError: It was given back.
        """
        owner = self.of(tensor)
        if isinstance(owner, Lease):
            owner.require_block(what)
        return owner

    def lease_of(self, tensor: torch.Tensor, what: str) -> Lease:
        """Return the memory that a tensor lies in, for ``what`` uses it.

        Raises:
            InputError: It is not a leased tensor.
            LifecycleError: It was given back.
        """
        owner = self.in_use(tensor, what)
        if not isinstance(owner, Lease):
            raise InputError(what, name="tensor", rule="in memory of this provider", value="other memory")
        return owner

"""``Ownership``: which memory a tensor lies in, of all that one provider gave."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from q4_um_managed.lease import Lease
from q4_um_managed.storage import address_of, has_storage, storage_of
from q4core import InputError

if TYPE_CHECKING:
    import torch

    from q4_um_managed.mapping import MappedMemory

__all__ = ["Ownership"]


class Ownership:
    """What torch's storages keep alive, by storage."""

    def __init__(self) -> None:
        # By torch's storage object: an address may have passed on to another tensor while an old one still lives.
        self._found: weakref.WeakValueDictionary[int, Lease | MappedMemory] = weakref.WeakValueDictionary()

    def note(self, tensor: torch.Tensor, owner: Lease | MappedMemory) -> None:
        """Take note of whose memory a new storage is."""
        self._found[storage_of(tensor)] = owner

    def of(self, tensor: torch.Tensor) -> Lease | MappedMemory | None:
        """Return the memory that a tensor lies in, given back or not; None for any other."""
        owner = self._found.get(storage_of(tensor)) if has_storage(tensor) else None
        return owner if owner is not None and owner.holds(address_of(tensor)) else None

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
            InputError: It is none that was leased.
            LifecycleError: It was given back.
        """
        owner = self.in_use(tensor, what)
        if not isinstance(owner, Lease):
            raise InputError(what, name="tensor", rule="in memory of this provider", value="other memory")
        return owner

"""``RayRings``: the contract of ``Rings`` over a Ray cluster.

Rows that are published together are one object in Ray's store. Their writer owns it, and the hub has its reference;
readers fetch it from where it was made, once, into a copy of their own. A process that ends takes its objects with it:
its successor publishes the same rows again, and readers wait for these. A few kilobytes go through the hub itself,
which takes half the time of an object and its owner's answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
import torch

from q4_actors.runtimes.errors import ActorError
from q4_actors.tensors.rings import Rings
from q4core import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_actors.tensors.rings import RingForm

__all__ = ["RayRings"]

_SMALL_BYTES = 8192
"""Most bytes of rows that go through the hub."""
_LOOK_S = 0.01
"""Interval at which rows of a process that ended are looked for again."""


class RayRings(Rings):
    """Rings of a cluster; ``stamp`` is that of this process's copy.

    Args:
        hub: Where references and stamps are.
        key: The rings' in the hub.
        forms: Name → form.
    """

    def __init__(self, hub: Any, key: str, forms: Mapping[str, RingForm]) -> None:
        super().__init__(forms)
        self._hub, self._key = hub, key

    @classmethod
    def create(cls, hub: Any, key: str, forms: Mapping[str, RingForm]) -> RayRings:
        """Make rings, which the hub lists."""
        made = cls(hub, key, forms)
        made._get(hub.add_rings.remote(key, {name: form.slots for name, form in forms.items()}))
        return made

    def publish(self, name: str, stamp: int, *, since: int = 0) -> None:
        """Publish the rows after ``since`` up to a number; see ``Rings.publish``."""
        form, box = self.forms[name], None
        if form.words:
            first = max(since, stamp - form.slots)
            places = [row % form.slots for row in range(first, stamp)]
            box = [self._put(name, self._rows[name][places])] if places else None
            since = first
        self._hub.publish_rows.remote(self._key, name, since, stamp, box)  # in order, and nobody waits for it
        super().publish(name, stamp)

    def wait(self, needs: Mapping[str, int], timeout: float, *, stop: str | None = None, rows: bool = True) -> bool:
        """Wait until rings have rows up to a number; see ``Rings.wait``."""
        deadline = time.monotonic() + timeout
        known = {name: self.stamp(name) for name in needs}
        while missing := {name: least for name, least in needs.items() if known[name] < least}:
            wanted = {
                name: (least, self.stamp(name), rows and bool(self.forms[name].words))
                for name, least in missing.items()
            }
            left = max(0.0, deadline - time.monotonic())
            found, halted = self._get(self._hub.await_rows.remote(self._key, wanted, stop, left))
            if stop is not None and halted:
                super().publish(stop, halted)
            is_whole = True
            for name, (stamp, pieces) in found.items():
                if wanted[name][2]:
                    is_whole = self._copy(name, pieces) and is_whole
                    known[name] = self.stamp(name)
                else:
                    known[name] = stamp
                    if not self.forms[name].words:
                        super().publish(name, stamp)
            if all(known[name] >= least for name, least in needs.items()):
                break
            if (stop is not None and halted) or time.monotonic() >= deadline:
                return False
            if not is_whole:
                time.sleep(_LOOK_S)
        return True

    def turns(self, own: Iterable[str], needs: Mapping[str, int], timeout: float, *, stop: str) -> None:
        """Return None: rows come by Python here."""

    def rewind(self, stamp: int) -> None:
        """Set back every ring that has more rows."""
        self._get(self._hub.rewind_rows.remote(self._key, stamp))
        super().rewind(stamp)

    def forget(self, unused: int = 0) -> None:
        """Drop what this process has copied; rows after ``unused`` are fetched again where they are needed."""
        for name, form in self.forms.items():
            super().publish(name, unused if form.words else 0)

    def close(self) -> None:
        """Release nothing: the hub ends with its system."""

    def __reduce__(self) -> Any:
        """Send as a handle of the same rings."""
        return type(self), (self._hub, self._key, self.forms)

    def _copy(self, name: str, pieces: list[tuple[int, int, list[Any]]]) -> bool:
        """Copy published rows; return whether all of them are there."""
        slots = self.forms[name].slots
        for since, last, (box,) in pieces:
            try:
                array = ray.get(box) if isinstance(box, ray.ObjectRef) else box
            except ray.exceptions.ObjectLostError:  # its owner has ended, or its node
                return False
            first = max(since, self.stamp(name), last - slots)
            places = [row % slots for row in range(first, last)]
            self._rows[name][places] = torch.tensor(array[first - since :])
            super().publish(name, last)
        return True

    @staticmethod
    def _put(name: str, rows: torch.Tensor) -> Any:
        """Return what the hub is sent: a reference, or the few rows themselves."""
        if rows.nbytes <= _SMALL_BYTES:
            return rows.numpy()
        try:
            return ray.put(rows.numpy())
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            text = f"the object store has no room for rows of ring {name!r}"
            raise ActorError(text, hint="Give Ray more memory, or run shorter chunks.") from error

    def _get(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except ray.exceptions.RayActorError as error:
            text = "the rings are lost: their system was stopped, or its node failed"
            raise LifecycleError(text, hint="Resume from a checkpoint.") from error

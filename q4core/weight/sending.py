"""``Temporary``: a value that is pickled for another process and then dropped by this one.

torch sends a tensor to another process as a handle of its memory, which must live until it arrives. A tensor that is
made while something is pickled is gone by then: its closed handle is the ``bad value(s) in fds_to_keep`` of a spawned
process. So it goes as bytes.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable


@attrs.frozen(eq=False)
class Temporary:
    """Wraps a tensor or a weight that is made while it is pickled, and is unpickled as that."""

    value: Any

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Pickle the value in any ordinary way, into a file, say."""
        return unwrapped, (self.value,)


def unwrapped(value: Any) -> Any:
    """Return the value, without a ``Temporary`` round it; copies that are not pickled leave one there."""
    return value.value if isinstance(value, Temporary) else value


def _as_bytes(temporary: Temporary) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    return pickle.loads, (pickle.dumps(temporary.value, protocol=pickle.HIGHEST_PROTOCOL),)


ForkingPickler.register(Temporary, _as_bytes)  # the pickler of processes and of their queues

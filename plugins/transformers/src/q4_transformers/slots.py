"""Caches of transformers whose keys and values lie in a key-value cache of ours, until somebody asks for them.

A program reads and writes our cache alone. A layer of transformers' cache whose content is there is of a subclass
that gives it back: whoever reads or sets its keys, updates, crops, copies or pickles it has transformers' own layer
again, with tensors of its own. So modules never see our memory, and both ways go on from the same content.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils

from q4_nn.blocks.cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_lm.models.config import TransformerConfig
    from q4_lm.models.transformer import TransformerDecoder
    from q4_nn.blocks.batch_cache import BatchCache

__all__ = ["PaddedCache", "Slot", "content_problem", "find_slot", "give_back", "layers_of_cache", "room_for"]

_CACHES = (cache_utils.DynamicCache, cache_utils.StaticCache)
_SLOT = "_q4_slot"
_ROOM = 256
"""Positions by which a cache is larger than it must be; then twice as many."""


class PaddedCache:
    """The keys and values of a batch that ends at one position, with padding before each sequence.

    It has what a slot asks of a ``KVCache``. Padding has no memory, and is 0 where it is read.

    Args:
        rows: The sequences without their padding.
        windows: For each layer how many positions it retains, or None.
    """

    def __init__(self, rows: BatchCache, windows: Sequence[int | None]) -> None:
        self.rows, self._windows = rows, windows
        self.padding = [0] * rows.batch
        self.capacity, self.nbytes = rows.capacity, rows.nbytes
        self._length = 0

    @property
    def length(self) -> int:
        """Positions, padding included."""
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        self._length = value
        self.rows.lengths[:] = [max(0, value - count) for count in self.padding]

    def clear(self) -> None:
        """Drop all positions."""
        self.length = 0

    def seen(self, layer: int) -> torch.Tensor:
        """Return what ``KVCache.seen`` does: [2, B, heads, S, head_dim]."""
        window = self._windows[layer]
        count = self.length if window is None else min(self.length, window - 1)
        held = [self.rows.of(row, layer) for row in range(self.rows.batch)]
        found = held[0].new_zeros(2, len(held), held[0].shape[1], count, held[0].shape[3])
        for row, own in enumerate(held):
            own = own[:, :, max(0, own.shape[2] - count) :]  # noqa: PLW2901  # its end
            found[:, row, :, count - own.shape[2] :] = own
        return found

    def restore(self, layer: int, seen: torch.Tensor, length: int) -> None:
        """Take what ``seen`` gave at another ``length``, as ``KVCache.restore`` does."""
        before, self.length = self.length, length
        for row in range(self.rows.batch):
            own = self.rows.of(row, layer)
            count = min(seen.shape[3], own.shape[2])
            own[:, :, own.shape[2] - count :] = seen[:, row, :, seen.shape[3] - count :]
        self.length = before


class Slot:
    """Our cache, its programs, and transformers' layers whose content lies in it.

    Args:
        decoder: The one whose programs run here.
        windows: For each layer how many positions it retains, or None.
        capacity: Positions.
        padding: Of each sequence, how many of its first positions hold nothing.
    """

    def __init__(
        self, decoder: TransformerDecoder, windows: Sequence[int | None], capacity: int, padding: Sequence[int] = (0,)
    ) -> None:
        self.decoder, self.config, self.windows = decoder, decoder.config, tuple(windows)
        self.batch = len(padding)
        self.cache: KVCache | PaddedCache
        if self.batch == 1 and not any(padding):
            sizes = self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim, capacity
            self.cache = KVCache(*sizes, windows=windows, device=decoder.device)
        else:
            self.cache = PaddedCache(decoder.make_batch_cache(capacity, self.batch), windows)
            self.cache.padding[:] = padding
        self.programs: dict[int, Any] = {}
        """Most tokens of a run → the program."""
        self._holders: list[weakref.ref[Any]] = []
        self._windowed = [index for index, window in enumerate(self.windows) if window is not None]
        self.is_whole = False
        """Whether the content of all layers that it was lent is here still."""

    @property
    def padding(self) -> list[int]:
        """Of each sequence, how many of its first positions hold nothing."""
        return self.cache.padding if isinstance(self.cache, PaddedCache) else [0]

    @property
    def is_free(self) -> bool:
        """Whether no layer's content is here."""
        return not any(slot_of(layer) is self for ref in self._holders if (layer := ref()) is not None)

    def holds(self, layers: list[Any]) -> bool:
        """Return whether the content of just these layers is here. Each token asks, so few objects are looked at."""
        is_whole = self.is_whole and [ref() for ref in self._holders] == layers
        return is_whole and not (self._windowed and any(vars(layers[at]).get("record_past") for at in self._windowed))

    def fits(self, windows: Sequence[int | None], capacity: int, padding: Sequence[int]) -> bool:
        """Return whether such a cache may be lent here."""
        is_alike = self.is_free and self.windows == tuple(windows) and self.cache.capacity >= capacity
        is_plain = isinstance(self.cache, KVCache)
        return is_alike and self.batch == len(padding) and is_plain is (len(padding) == 1 and not any(padding))

    def lend(self, layers: Sequence[Any], length: int, padding: Sequence[int]) -> None:
        """Take what layers of transformers hold: ``length`` positions.

        Args:
            layers: Of ``layers_of_cache``; their content was checked.
            length: Positions.
            padding: As for a slot.
        """
        if isinstance(self.cache, PaddedCache):
            self.cache.padding[:] = padding
        self.cache.clear()
        for index, layer in enumerate(layers):
            if not layer.is_initialized:
                empty = torch.empty(self.batch, self.config.num_key_value_heads, 0, self.config.head_dim)
                layer.lazy_initialization(empty, empty)
            elif length:
                seen = torch.stack((layer.keys, layer.values))
                if isinstance(layer, cache_utils.StaticLayer):
                    seen = seen[..., : min(length, seen.shape[3]), :]
                self.cache.restore(index, seen, length)
        self.cache.length = length
        self._take(layers)

    def grown(self, layers: Sequence[Any], capacity: int) -> Slot:
        """Return a slot of more positions with the same content, to which the layers belong from now on."""
        larger = Slot(self.decoder, self.windows, capacity, self.padding)
        for index in range(len(self.windows)):
            larger.cache.restore(index, self.cache.seen(index), self.cache.length)
        larger.cache.length = self.cache.length
        larger._take(layers)
        return larger

    def _take(self, layers: Sequence[Any]) -> None:
        self._holders, self.is_whole = [weakref.ref(layer) for layer in layers], True
        for index, layer in enumerate(layers):
            state = vars(layer)
            state[_SLOT] = self, index
            if not isinstance(layer, cache_utils.StaticLayer):
                state["keys"] = state["values"] = None
            layer.__class__ = _LENT.get(type(layer), type(layer))


def slot_of(layer: Any) -> Slot | None:
    """Return the slot where a layer's content is, or None."""
    found = vars(layer).get(_SLOT)
    return None if found is None else found[0]


def find_slot(cache: Any) -> Slot | None:
    """Return the slot where the content of a cache is, each layer's in its place; None where some of it is elsewhere.

    ``layers_of_cache`` has found its layers fit.
    """
    layers = cache.layers if type(cache) in _CACHES else []
    slot: Slot | None = vars(layers[0]).get(_SLOT, (None,))[0] if layers else None
    return slot if slot is not None and slot.holds(layers) else None


def layers_of_cache(cache: Any, config: TransformerConfig) -> list[Any] | str:
    """Return the layers of a cache of transformers that a slot can take, or why it can't.

    Args:
        cache: Any cache.
        config: The decoder's.
    """
    if type(cache) not in _CACHES or getattr(cache, "offloading", False):
        return f"a cache of the kind {type(cache).__name__}"
    count = config.num_hidden_layers
    if not cache.layers and cache.layer_class_to_replicate is cache_utils.DynamicLayer:
        cache.layers.extend(cache_utils.DynamicLayer() for _ in range(count))  # as its own update does
    if len(cache.layers) != count:
        return "a cache of other layers"
    for layer, window in zip(cache.layers, config.windows, strict=True):
        kind = _PLAIN.get(type(layer))
        if kind is None or getattr(layer, "record_past", False):
            return f"a cache with {type(layer).__name__}"
        is_static = issubclass(kind, cache_utils.StaticLayer)
        if layer.is_sliding:
            seen = layer.max_cache_len if is_static else layer.sliding_window
            if window is None or seen > window or (seen < window and not is_static):
                return "a cache with other windows"
        if is_static and not isinstance(vars(layer).get("cumulative_length"), torch.Tensor):
            return "a static cache of this release of transformers"
    return list(cache.layers)


def room_for(count: int) -> int:
    """Return how many positions a cache for so many has."""
    return -(-(count + _ROOM) // _ROOM) * _ROOM


def content_problem(layer: Any, config: TransformerConfig, window: int | None, length: int, batch: int) -> str | None:
    """Return why a slot can't take what a layer of transformers holds, or None."""
    if not layer.is_initialized:
        return "layers of different lengths" if length else None
    if isinstance(layer, cache_utils.StaticLayer):
        count = layer.max_cache_len
    else:
        count = min(length, window - 1) if layer.is_sliding and window is not None else length
    shape = (batch, config.num_key_value_heads, count, config.head_dim)
    for held in (layer.keys, layer.values):
        facts = tuple(held.shape), held.dtype, held.device.type
        if (held.numel() or length) and facts != (shape, torch.float32, "cpu"):
            return f"keys of {facts[1]} {list(facts[0])} on {facts[2]}"
    return None


def give_back(layer: Any) -> Any:
    """Make a layer transformers' own again, with the content that it has, unless it is; return it."""
    slot, index = vars(layer).pop(_SLOT, (None, 0))
    if slot is None:
        return layer
    layer.__class__, slot.is_whole = _PLAIN[type(layer)], False
    length, seen = slot.cache.length, slot.cache.seen(index)
    if not isinstance(layer, cache_utils.StaticLayer):
        layer.keys, layer.values = seen.clone().unbind(0)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
        return layer
    count = min(length, layer.max_cache_len)
    last = seen[..., max(0, seen.shape[3] - count) :, :]
    # A full window is rolled on by one before it is read: its first position counts no more.
    start = count - last.shape[3]
    for own, held in zip((layer.keys, layer.values), last, strict=True):
        own[:, :, start:count] = held
        own[:, :, :start] = 0
    layer.cumulative_length.fill_(count if layer.is_sliding else length)
    if layer.is_sliding:
        layer.cumulative_length_int = length
    return layer


def _taken(name: str) -> property:
    """Return an attribute that is transformers' own as soon as it is read or set."""

    def read(layer: Any) -> Any:
        return getattr(give_back(layer), name)

    def write(layer: Any, value: Any) -> None:
        setattr(give_back(layer), name, value)

    return property(read, write)


def _length(name: str) -> property:
    """Return an attribute that is the number of positions."""

    def read(layer: Any) -> Any:
        length = vars(layer)[_SLOT][0].cache.length
        return (
            torch.tensor(length)
            if name == "cumulative_length" and isinstance(layer, cache_utils.StaticLayer)
            else length
        )

    def write(layer: Any, value: Any) -> None:
        setattr(give_back(layer), name, value)

    return property(read, write)


class _Lent:
    """What a layer does while its content is in a slot."""

    _layer_type = None  # by which transformers would register the class
    keys, values = _taken("keys"), _taken("values")
    cumulative_length, cumulative_length_int = _length("cumulative_length"), _length("cumulative_length_int")

    def get_seq_length(self) -> Any:
        """Return the number of positions."""
        return self.cumulative_length_int if "cumulative_length_int" in vars(self) else self.cumulative_length

    def update(self, *given: Any, **named: Any) -> Any:
        """Update transformers' own layer."""
        return give_back(self).update(*given, **named)

    def reset(self) -> None:
        """Reset transformers' own layer."""
        give_back(self).reset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle transformers' own layer."""
        return give_back(self).__reduce_ex__(protocol)


_KINDS = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
)
_MEMBERS = {name: item for name, item in vars(_Lent).items() if name not in {"__dict__", "__weakref__"}}
# Of one base, as an object's class can only become one of the same layout.
_LENT: dict[type, type] = {kind: type(kind.__name__, (kind,), dict(_MEMBERS)) for kind in _KINDS}
_PLAIN: dict[type, Any] = {kind: kind for kind in _KINDS} | {lent: kind for kind, lent in _LENT.items()}

"""The forward pass of a decoder of transformers by programs, where they compute the same; by its modules elsewhere."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

from q4_nn.blocks.batch_cache import BatchPlaces
from q4_nn.blocks.cache import CachePlaces
from q4_programs import ProgramBuilder, Watch, refuse
from q4_transformers.names import CACHE
from q4_transformers.padding import find_padding
from q4_transformers.slots import PaddedCache, Slot, content_problem, find_slot, give_back, layers_of_cache, room_for
from q4_transformers.twin import check_twin, make_twin
from q4core import LifecycleError, Q4Error, Q4Linear
from q4core.plugin_api import counted, is_plain_call, outside_inference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_lm.models.transformer import TransformerDecoder
    from q4_nn.blocks.cache import KVCache

__all__ = ["ProgramForward", "install_programs"]

_CHUNK = 128
"""Tokens of a chunk of a prompt."""
_MOST_SEQUENCES = 32
"""Sequences of a batch at most."""
_CAPTURING = "transformers.utils.output_capturing"
"""The module whose hooks do nothing but where hidden states or attentions are asked for."""
_FLAGS = ("output_hidden_states", "output_attentions")
_SPARE_BYTES = 1 << 28
"""The largest cache that is retained for the next sequence, with its programs."""
_INERT = (("return_dict", True), ("is_causal", True), ("output_router_logits", False))
"""Arguments that change nothing by these values."""
_NAME = "decode in transformers"
_FORWARD = operator.attrgetter("forward")


class _Program:
    """The features of tokens of one sequence, after those of a cache."""

    def __init__(self, twin: TransformerDecoder, cache: KVCache, most: int) -> None:
        device = cache.keys.device
        self._numbers = torch.zeros((1 + cache.place_count, most), dtype=torch.int64, device=device)
        self._count = torch.ones(1, dtype=torch.int64, device=device)
        builder = ProgramBuilder(twin, device, _NAME if most == 1 else _NAME.replace("decode", "prompt"))
        if most > 1:
            builder.of_tokens(builder.bound(self._count, "number of tokens"), most)
        places = CachePlaces(builder, cache, builder.bound(self._numbers, "tokens and positions"))
        x = builder.emit(twin, places.tokens, cache=places, part="body")
        x = x if twin.norm is None else builder.emit(twin.norm, x)
        self._features = builder.tensor(builder.keep(x))
        self._tokens, *self._places = self._numbers.unbind()
        self._steps = torch.arange(most, device=device)
        self.most, self.bound = most, builder.bind()

    def __call__(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return features [1, T, hidden] of tokens [1, T], in memory of their own."""
        found = []
        with self.bound.lock:
            for part in tokens[0].split(self.most):
                count = len(part)
                self._tokens[:count] = part
                for row, place in zip(self._places, cache.next_places(count), strict=True):
                    torch.add(self._steps, place, out=row)
                self._count.fill_(count)
                self.bound()
                cache.advance(count)
                found.append(self._features[:count].clone())
        return (found[0] if len(found) == 1 else torch.cat(found))[None]


class _BatchProgram:
    """The features of tokens of several sequences, after those of a cache."""

    def __init__(self, twin: TransformerDecoder, cache: PaddedCache) -> None:
        self.most = _CHUNK
        self._count = torch.ones(1, dtype=torch.int64)
        builder = ProgramBuilder(twin, cache.rows.device, _NAME.replace("decode", "batch"))
        builder.of_tokens(builder.bound(self._count, "number of tokens"), self.most)
        self._places = BatchPlaces(builder, cache.rows, self.most)
        x = builder.emit(twin, self._places.tokens, cache=self._places, part="body")
        x = x if twin.norm is None else builder.emit(twin.norm, x)
        self._features = builder.tensor(builder.keep(x))
        self.bound = builder.bind()

    def __call__(self, tokens: torch.Tensor, cache: PaddedCache) -> torch.Tensor:
        """Return features [B, T, hidden] of tokens [B, T], 0 where these are padding, in memory of their own."""
        length, (batch, count) = cache.length, tokens.shape
        found = torch.zeros(batch, count, self._features.shape[1])
        # Where each sequence begins in the tokens.
        starts = [min(count, max(0, padding - length)) for padding in cache.padding]
        with self.bound.lock:
            try:
                if count == 1 and not any(starts):
                    self._run([(row, own) for row, own in enumerate(tokens.tolist())], list(found))
                else:
                    self._run_chunks(tokens.tolist(), starts, found)
            except BaseException:
                cache.length = length  # as if nothing had been written
                raise
        cache.length = length + count
        return found

    def _run_chunks(self, tokens: list[list[int]], starts: list[int], found: torch.Tensor) -> None:
        parts, outs, left = list[tuple[int, list[int]]](), list[torch.Tensor](), self.most
        for row, at in enumerate(starts):
            while at < len(tokens[row]):
                end = min(len(tokens[row]), at + left)
                parts.append((row, tokens[row][at:end]))
                outs.append(found[row, at:end])
                left -= end - at
                at = end  # noqa: PLW2901  # the next part begins there
                if not left:
                    self._run(parts, outs)
                    parts, outs, left = [], [], self.most
        if parts:
            self._run(parts, outs)

    def _run(self, parts: list[tuple[int, list[int]]], outs: list[torch.Tensor]) -> None:
        self._count.fill_(count := self._places.take(parts))
        self.bound()
        self._places.advance(parts)
        for out, features in zip(outs, self._features[:count].split([len(own) for _, own in parts]), strict=True):
            out.copy_(features)


class ProgramForward:
    """The forward pass of a decoder: a call of sequences after a cache is a run of a program.

    Sequences of a batch may be filled up on the left. Everything else goes to the modules: gradients, training, hooks,
    outputs of hidden states or attentions, a mask or positions of one's own, a module that was replaced. A cache goes
    on from the same content.

    Args:
        decoder: Has ``embed_tokens``, ``layers`` and ``norm``.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder: Any = decoder
        self.calls: Counter[str] = Counter()
        """Way → number of calls: ``"programs"``, or why modules ran."""
        self.problem: str | None = None
        """The reason why there is no program, once it is known."""
        self._twin: TransformerDecoder | None = None
        self._windows: tuple[int | None, ...] = ()
        """The twin's: how many tokens each block sees, or None."""
        self._watch: Watch | None = None
        self._steady: int | None = None
        """The thread in whose loop modules stay what they are."""
        self._is_looked_at = False
        """Whether the last look at them found those of the twin."""
        self._classes: tuple[list[Any], list[Any]] = [], []
        """Those of the decoder's modules, and their ``forward``."""
        self._attention: Any = None
        self._spare: Slot | None = None
        self._lock = threading.RLock()
        functools.update_wrapper(self, type(decoder).forward.__get__(decoder))  # whose signature others ask for

    def __reduce__(self) -> Any:
        """Copy and pickle the decoder alone: programs are made again."""
        return ProgramForward, (self.decoder,)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return what the decoder's own ``forward`` does; arguments are its own."""
        if torch.compiler.is_compiling():  # apart, as a trace can't follow the rest
            return type(self.decoder).forward(self.decoder, *given, **named)
        try:
            found = self._run(*given, **named)
        except _Modules as reason:
            found, why = None, str(reason)
        if found is None:
            self.calls[why] += 1
            return type(self.decoder).forward(self.decoder, *given, **named)
        self.calls["programs"] += 1
        return found

    def report_lines(self, name: str) -> list[str]:
        """Return how many calls ran in which way, as lines of a report on the decoder of a name."""
        what, calls = f"programs of {name or 'the model'}", dict(self.calls)
        ran = f"ran {counted(calls.pop('programs', 0), 'call')}"
        lines = [f"{what}: none, {self.problem}" if self.problem else f"{what}: {ran}"]
        calls.pop(str(self.problem), None)
        return lines + [f"{what}: modules ran {counted(count, 'call')}, {why}" for why, count in calls.items()]

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Let this thread's calls inside the block look at the modules once, and again after a hook was registered."""
        self._steady = threading.get_ident()
        try:
            yield
        finally:
            self._steady, self._is_looked_at = None, False

    # -- which calls

    def _run(  # noqa: PLR0913  # the arguments of a decoder of transformers
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Return the result of programs.

        Raises:
            _Modules: The modules are to run.
        """
        if not is_plain_call():
            raise _Modules("inside a trace, a transform, a mode or autocast")
        if torch.is_grad_enabled():
            raise _Modules("gradients are recorded")
        config = self.decoder.config
        wanted = [
            name for name in _FLAGS if named.get(name) or (named.get(name) is None and getattr(config, name, False))
        ]
        if wanted or _is_capturing():
            raise _Modules(f"{' and '.join(wanted) or 'outputs of modules'} asked for")
        places = named.pop("cache_position", None)  # of older releases
        newer = named.pop("cache", None)
        past_key_values = past_key_values if newer is None else newer
        named = {name: value for name, value in named.items() if name not in _FLAGS}
        odd = [name for name, value in named.items() if value is not None and (name, value) not in _INERT]
        if others or odd or inputs_embeds is not None or not config.return_dict:
            raise _Modules(f"called with {', '.join(odd) or 'other arguments'}")
        _check_tokens(input_ids)
        if past_key_values is None and not (getattr(config, "use_cache", False) if use_cache is None else use_cache):
            raise _Modules("called without a cache")
        cache = cache_utils.DynamicCache(config=config) if past_key_values is None else past_key_values
        for is_last in (False, True):
            with self._lock, outside_inference(), torch.no_grad():
                twin = self._ready()
                slot, length = self._slot(twin, cache, input_ids, attention_mask, (position_ids, places))
                program = self._program(twin, slot, 1 if input_ids.shape[1] == 1 else _CHUNK)
            try:
                features = program(input_ids, slot.cache)
                break
            except LifecycleError as error:  # a layer or a parameter was moved or loaded since
                if slot.cache.length != length:  # meanwhile, by another thread
                    raise
                slot.programs.clear()
                if is_last:
                    raise _Modules(error.summary) from None
        return BaseModelOutputWithPast(last_hidden_state=features, **{CACHE: cache})

    def _ready(self) -> TransformerDecoder:
        """Return the twin, made and proven at the first call, and again after the model has changed."""
        is_steady = self._steady == threading.get_ident() and self._is_looked_at
        if is_steady and self._watch is not None and not self._watch.has_new_hooks and self._twin is not None:
            return self._twin
        self._is_looked_at = False
        if self._watch is None or self._is_changed(self._watch):
            modules = [*self.decoder.modules()]
            watch = Watch(modules, inert=(_CAPTURING,))
            if change := watch.change():  # in training mode, or a hook: what is proven stays
                raise _Modules(change)
            self._watch, self._twin, self._spare = watch, None, None
            kinds: list[Any] = [*{*map(type, modules)}]
            self._classes = kinds, [*map(_FORWARD, kinds)]
            self._attention = self.decoder.config._attn_implementation  # noqa: SLF001  # transformers has no other name
            self.problem = None
            try:
                twin = make_twin(self.decoder)
                check_twin(self.decoder, twin)
                self._twin, self._windows = twin, twin.config.windows
            except Exception as error:  # noqa: BLE001  # any structure may fail in any way, and the modules run
                self.problem = error.summary if isinstance(error, Q4Error) else f"{type(error).__name__}: {error}"
                refuse(_NAME, [item for item in modules if isinstance(item, Q4Linear)], self.problem)
        if self._twin is None:
            raise _Modules(str(self.problem))
        self._is_looked_at = True
        return self._twin

    def _is_changed(self, watch: Watch) -> bool:
        """Return whether the model is another one than that of the twin."""
        is_same = self.decoder.config._attn_implementation == self._attention  # noqa: SLF001  # as above
        return not is_same or watch.change() is not None or [*map(_FORWARD, self._classes[0])] != self._classes[1]

    # -- caches

    def _slot(
        self, twin: TransformerDecoder, cache: Any, tokens: torch.Tensor, mask: Any, positions: Any
    ) -> tuple[Slot, int]:
        """Return the slot that has a cache's content and room for the tokens, and its length."""
        batch, count = tokens.shape
        slot = find_slot(cache)
        slot = None if slot is not None and slot.decoder is not twin else slot  # another model's, or one that changed
        layers = layers_of_cache(cache, twin.config) if slot is None else cache.layers
        if isinstance(layers, str):
            raise _Modules(layers)
        length = int(layers[0].get_seq_length())
        low, high = (int(item) for item in torch.aminmax(tokens)) if tokens.numel() > 1 else [int(tokens)] * 2
        if low < 0 or high >= twin.config.vocab_size:
            raise _Modules("a token that is not in the vocabulary")
        padding = find_padding(mask, positions, length, (batch, count), self._windows)
        if isinstance(padding, str):
            raise _Modules(padding)
        if slot is not None and slot.padding != padding:
            raise _Modules("a mask or a batch of its own")
        most = twin.config.max_position_embeddings
        if isinstance(layers[0], cache_utils.StaticLayer):
            full = [layer.max_cache_len for layer in layers if not layer.is_sliding]
            most = min([most, *full])
        if length + count > most:
            raise _Modules("positions beyond the context")
        if slot is None:
            slot = self._lent(twin, layers, length, count, padding)
        elif length + count > slot.cache.capacity:
            slot = slot.grown(layers, min(most, 2 * room_for(length + count)))
        if slot is not self._spare and slot.cache.nbytes <= _SPARE_BYTES:
            self._spare = slot
        return slot, length

    def _lent(self, twin: TransformerDecoder, layers: list[Any], length: int, count: int, padding: list[int]) -> Slot:
        """Return a slot with the content of layers: the last one, where it is free, or a new one."""
        for layer in layers:
            give_back(layer)
        windows = [window if layer.is_sliding else None for layer, window in zip(layers, self._windows, strict=True)]
        for layer, window in zip(layers, windows, strict=True):
            if int(layer.get_seq_length()) != length:
                raise _Modules("a cache whose layers have different lengths")
            if problem := content_problem(layer, twin.config, window, length, len(padding)):
                raise _Modules(f"a cache with {problem}")
        slot, need = self._spare, length + count
        if slot is None or not slot.fits(windows, need, padding):
            capacity = min(room_for(need), twin.config.max_position_embeddings)
            slot = Slot(twin, windows, capacity, padding)
        slot.lend(layers, length, padding)
        return slot

    def _program(self, twin: TransformerDecoder, slot: Slot, most: int) -> Any:
        if isinstance(slot.cache, PaddedCache):
            most = _CHUNK
        elif most > 1 and slot.cache.most_places is not None:
            most = min(most, slot.cache.most_places)
        found: _Program | _BatchProgram | None = slot.programs.get(most)
        if found is None:
            try:
                if isinstance(slot.cache, PaddedCache):
                    found = _BatchProgram(twin, slot.cache)
                else:
                    found = _Program(twin, slot.cache, most)
                slot.programs[most] = found
            except Q4Error as error:
                self._twin, self.problem = None, error.summary
                refuse(_NAME, [item for item in twin.modules() if isinstance(item, Q4Linear)], error.summary)
                raise _Modules(error.summary) from None
        if found.bound.record.backend == "reference":
            self._twin, self.problem = None, "; ".join(found.bound.record.reasons) or "no backend runs programs"
            raise _Modules(self.problem)
        return found


class _Modules(Exception):  # noqa: N818  # no error: the reason why modules run
    """The modules are to run."""


def _is_capturing() -> bool:
    """Return whether a model above collects outputs of modules."""
    found = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return found is not None and found.get() is not None


def _check_tokens(tokens: Any) -> None:
    """Refuse what is no batch of tokens that a program takes."""
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:  # noqa: PLR2004  # [B, T]
        raise _Modules("no tokens of sequences")
    if tokens.dtype != torch.int64 or tokens.device.type != "cpu" or not tokens.numel():
        raise _Modules("tokens of another dtype or device")
    if len(tokens) > _MOST_SEQUENCES:
        raise _Modules(f"a batch of more than {_MOST_SEQUENCES} sequences")


def install_programs(model: nn.Module) -> None:
    """Let every decoder in a model run by programs where it can."""
    for module in model.modules():
        is_decoder = {"embed_tokens", "layers", "norm"} <= dict(module.named_children()).keys()
        if is_decoder and hasattr(module, "config") and "forward" not in vars(module):
            vars(module)["forward"] = ProgramForward(module)

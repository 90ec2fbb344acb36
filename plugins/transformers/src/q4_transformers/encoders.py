"""Packed encoders: a batch through ``forward`` is one call of a program where it can be, and modules where it can't.

sentence-transformers and whoever else calls a model of transformers need nothing for it. The program is that of q4-lm's
encoder, made over the same layers. Its features are compared with those of the modules before it serves.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_lm import config_from_hf
from q4_lm.generation.encoding import EncodingPrograms
from q4_lm.models.hf_names import fused_parts, to_hf_name
from q4_lm.models.transformer import empty_transformer
from q4_nn.blocks.joined import JoinedLinear
from q4_programs import Watch, layers_of, refuse
from q4core import Q4Error, Q4Linear
from q4core.plugin_api import is_plain_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_lm import TransformerEncoder
    from q4_lm.generation.encoding import EncodingProgram

__all__ = ["run_encoders_as_programs"]

_SQUARED_ERROR = 2.8e-5
"""Of a product with activations in int8, as a share of its square (decision 0026): what rounding may change."""
_PROBED_ROWS, _PROBED_TOKENS = 3, 48
_GIVEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict"})


def run_encoders_as_programs(model: nn.Module) -> None:
    """Run the encoder of a model, where it is of a kind that q4-lm reads, by programs.

    Args:
        model: One whose packed layers have their weights.
    """
    encoder = getattr(model, str(getattr(model, "base_model_prefix", None) or "\0"), model)
    config = getattr(encoder, "config", None)
    if config is None or "forward" in vars(encoder):
        return
    if _twin(encoder) is not None:
        encoder.forward = _Forward(encoder)


def _twin(encoder: Any) -> TransformerEncoder | None:
    """Return q4-lm's encoder over the modules of transformers' one; None for another kind, or one with other parts."""
    with contextlib.suppress(Q4Error, LookupError):
        return _made_of(encoder, {name: value for name, value in encoder.config.to_dict().items() if value is not None})
    return None


def _made_of(encoder: nn.Module, values: dict[str, Any]) -> TransformerEncoder | None:
    """Return that encoder.

    Raises:
        Q4Error: The config asks for what is not computed.
        LookupError: The encoder lacks a module.
    """
    config = config_from_hf(values)
    if config.causal:
        return None
    theirs = dict(encoder.named_modules())
    twin: Any = empty_transformer(config)
    for name, owner in [(name, module) for name, module in twin.named_modules() if hasattr(module, "joins")]:
        for joined, parts in owner.joins.items():
            stored = to_hf_name(f"{name}.{joined}.weight", config).removesuffix(".weight")
            if stored in theirs:
                sizes = tuple(fused_parts(f"{name}.{joined}", config).values())
                setattr(owner, joined, JoinedLinear([theirs[stored]], [sizes]))
                for part in parts:
                    setattr(owner, part, None)
    own = {id(module) for module in theirs.values()}
    for name, module in list(twin.named_modules()):
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)) and id(module) not in own:
            twin.set_submodule(name, theirs[to_hf_name(f"{name}.weight", config).removesuffix(".weight")])
    return twin.eval() if any(isinstance(module, Q4Linear) for module in twin.modules()) else None


class _Forward:
    """``forward`` of an encoder of transformers.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._encoder = encoder
        self._limit = 0
        """Tokens of a row at most."""
        self._watch: Watch | None = None
        self._programs: EncodingPrograms | None = None
        self._packed: list[Q4Linear] = []
        self._kind: Any = None
        """Class of what it returns; None before the features were compared, False where they differ."""
        functools.update_wrapper(self, type(encoder).forward)

    def __reduce__(self) -> Any:
        """Copy what it is made of: programs are bound to memory."""
        return type(self), (self._encoder,)

    def __call__(self, input_ids: Any = None, *inputs: Any, **options: Any) -> Any:
        """Return what the encoder's class does; padding has features of 0 where a program ran."""
        modules = functools.partial(type(self._encoder).forward, self._encoder)
        if torch.compiler.is_compiling() or inputs or not self._is_whole() or self._programs is None:
            return modules(input_ids, *inputs, **options)
        options["input_ids"] = input_ids
        held = self._held(options)
        if held is None:
            return modules(**options)
        lengths: list[int] = held.sum(1).tolist()
        types = options.get("token_type_ids")
        program = self._programs.find(max(lengths))
        if program is not None and self._kind is None:
            self._kind = self._prove(program, modules, options, lengths)
        if program is None or not self._kind:
            return modules(**options)
        features = program.run(lengths, input_ids[held], None if types is None else types[held])
        whole = features.new_zeros((*input_ids.shape, features.shape[-1]))
        whole[held] = features
        pooler = getattr(self._encoder, "pooler", None)
        return self._kind(last_hidden_state=whole, **({} if pooler is None else {"pooler_output": pooler(whole)}))

    def _held(self, options: dict[str, Any]) -> torch.Tensor | None:
        """Return which places hold tokens, bool [B, T]; None where the modules must run."""
        tokens, mask, types = (options.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
        config: Any = self._encoder.config
        others = [value for name, value in options.items() if name not in _GIVEN]
        others += [config.output_attentions, config.output_hidden_states, options.get("return_dict") is False]
        if any(value is not None and value is not False for value in others):
            return None
        given = [item for item in (tokens, mask, types) if item is not None]
        if not all(isinstance(item, torch.Tensor) and item.dim() == 2 and item.is_cpu for item in given):  # noqa: PLR2004  # [B, T]
            return None
        if tokens is None or any(item.shape != tokens.shape for item in given) or tokens.dtype != torch.int64:
            return None
        is_recorded = torch.is_grad_enabled() and any(item.requires_grad for item in self._encoder.parameters())
        if not tokens.numel() or tokens.shape[1] > self._limit or is_recorded:
            return None
        held = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
        counts = held.sum(1, keepdim=True)
        is_behind = bool((counts > 0).all()) and bool((held == (torch.arange(tokens.shape[1]) < counts)).all())
        return held if is_behind and is_plain_call() and not self._encoder.training else None

    def _is_whole(self) -> bool:
        """Return whether no module has a hook or trains; after a change all is made and compared anew."""
        if self._watch is None or self._watch.change() is not None:
            watch = Watch([*self._encoder.modules()][1:])  # its own hooks are run by who calls it
            self._watch = watch if watch.change() is None else None
            twin = None if self._watch is None else _twin(self._encoder)
            self._kind, self._programs = None, None
            if twin is not None:
                self._limit = twin.config.max_position_embeddings
                self._programs = EncodingPrograms(twin, self._limit)
                self._packed = layers_of(twin)
        return self._watch is not None

    def _prove(
        self, program: EncodingProgram, modules: Callable[..., Any], options: dict[str, Any], lengths: Sequence[int]
    ) -> Any:
        """Return the class of what the modules give, if the program gives the same for the beginning of some rows."""
        error = norm = 0.0
        kind: Any = False
        for row, length in enumerate(lengths[:_PROBED_ROWS]):
            count = min(length, _PROBED_TOKENS)
            names = [name for name in ("input_ids", "token_type_ids") if options.get(name) is not None]
            part = {name: options[name][row, :count] for name in names}
            with torch.no_grad():
                answer = modules(**{name: item[None] for name, item in part.items()})
            wanted, kind = answer.last_hidden_state[0].double(), type(answer)
            found = program.run([count], part["input_ids"], part.get("token_type_ids")).double()
            error, norm = error + float((found - wanted).square().sum()), norm + float(wanted.square().sum())
        if error <= 2 * len(self._packed) * _SQUARED_ERROR * norm:
            return kind
        what = f"features differ from the modules' by {error / max(norm, 1e-30):.1e} of their square"
        refuse(f"encode {type(self._encoder).__name__}", self._packed, what)
        return False

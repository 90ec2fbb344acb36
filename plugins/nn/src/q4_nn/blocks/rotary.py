"""Rotary position embedding, with every scaling of its frequencies that models in use were trained with.

Half-split files (Hugging Face) turn feature i with feature i + d/2. Llama-family GGUF files hold q and k rows that are
permuted so that the two members of a pair are neighbours. Both give the same attention scores, so the rows of either
file are used unchanged.

Reference:
    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding. Peng et al., YaRN: Efficient Context
    Window Extension of Large Language Models. Ding et al., LongRoPE.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_programs import Op
from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_nn.blocks.cache import CachePlaces
    from q4_nn.blocks.rows import RowPlaces
    from q4_programs import ProgramBuilder, Value

__all__ = ["RopeScaling", "RotaryEmbedding"]

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@attrs.frozen(kw_only=True)
class RopeScaling:
    """The change of frequencies for a context longer than that of the first training.

    Args:
        kind: ``default``, ``linear``, ``dynamic``, ``llama3``, ``yarn`` or ``longrope``.
        factor: Longer by this.
        original_context: Positions of the first training.
        low_freq_factor: Llama 3's: wavelengths over ``original_context / low_freq_factor`` are stretched.
        high_freq_factor: Llama 3's: wavelengths under ``original_context / high_freq_factor`` stay.
        beta_fast: YaRN's: dimensions of more turns than this stay.
        beta_slow: YaRN's: dimensions of fewer turns than this are stretched.
        attention_factor: What cosine and sine are multiplied by; defaults to YaRN's and LongRoPE's own rule.
        mscale: YaRN's, in DeepSeek's form.
        mscale_all_dim: As ``mscale``.
        truncate: Whether YaRN's range of dimensions is rounded outwards.
        short_factor: LongRoPE's divisors of the frequencies [d/2] up to ``original_context`` positions.
        long_factor: And above.

    Raises:
        ConfigError: The kind is not known, or lacks what it needs.
    """

    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = attrs.field(default=(), converter=tuple[float, ...])
    long_factor: tuple[float, ...] = attrs.field(default=(), converter=tuple[float, ...])

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], context: int) -> RopeScaling:
        """Return the scaling of a ``rope_scaling`` or ``rope_parameters`` entry of a ``config.json``.

        Args:
            values: The entry.
            context: ``max_position_embeddings``.
        """
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in _NEEDS:
            close = closest_name(str(kind), _NEEDS)
            hint = f"Did you mean {close!r}?" if close else None
            rule = f"one of {', '.join(_NEEDS)}"
            raise ConfigError("rotary embedding", name="rope_type", rule=rule, value=kind, hint=hint)
        for name in _NEEDS[kind]:
            if values.get(name) is None:
                raise ConfigError("rotary embedding", name=name, rule=f"given for rope_type {kind!r}", value=None)
        names = {field.name for field in attrs.fields(cls)}
        known = {name: item for name, item in values.items() if name in names and item is not None}
        if kind not in {"yarn", "longrope"}:
            known.pop("attention_factor", None)  # which the others do not read
        original = (kind != "dynamic" and values.get("original_max_position_embeddings")) or context
        if kind == "longrope":
            known.setdefault("factor", context / original)
        return cls(kind=kind, original_context=original, **known)

    def to_hf(self) -> dict[str, Any]:
        """Return the entry that ``from_hf`` reads."""
        values, plain = attrs.asdict(self), attrs.asdict(RopeScaling())
        changed = {name for name, item in values.items() if item != plain[name]} - {"kind", "original_context"}
        found = {"rope_type": self.kind, **{name: values[name] for name in sorted({*changed, *_NEEDS[self.kind]})}}
        if self.original_context:
            found["original_max_position_embeddings"] = self.original_context
        return {name: list(item) if isinstance(item, tuple) else item for name, item in found.items()}

    def amplitude(self) -> float:
        """Return what cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            if self.mscale and self.mscale_all_dim:
                return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
            return self._mscale(1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        return 1.0

    def _mscale(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def depends_on_length(self) -> bool:
        """Return whether the frequencies of a long sequence differ from those of a short one."""
        return self.kind in {"dynamic", "longrope"}

    def frequencies(self, dim: int, base: float, length: int) -> torch.Tensor:
        """Return the angle per position of each pair: float32 [dim/2].

        Args:
            dim: Features that are turned.
            base: Base of the frequencies.
            length: Positions of the whole sequence.
        """
        if self.kind == "dynamic" and length > self.original_context:
            stretched = self.factor * length / self.original_context - (self.factor - 1)
            base = base * stretched ** (dim / (dim - 2))
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
        powers = base**exponent
        if self.kind == "longrope":
            chosen = self.long_factor if length > self.original_context else self.short_factor
            return 1.0 / (torch.tensor(chosen, dtype=torch.float32, device="cpu") * powers)
        frequency = 1.0 / powers
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "llama3":
            return self._llama3(frequency)
        return self._yarn(frequency, powers, dim, base) if self.kind == "yarn" else frequency

    def _llama3(self, frequency: torch.Tensor) -> torch.Tensor:
        """Stretch long wavelengths, keep short ones, and blend between."""
        wavelength = 2 * math.pi / frequency
        low, high = self.low_freq_factor, self.high_freq_factor
        share = ((self.original_context / wavelength - low) / (high - low)).clamp(0, 1)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, frequency: torch.Tensor, powers: torch.Tensor, dim: int, base: float) -> torch.Tensor:
        """Stretch the dimensions that turn less than ``beta_slow`` times, keep those above ``beta_fast``."""

        def dimension(turns: float) -> float:
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low
        share = 1 - (ramp / (high - low or 0.001)).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - share) + frequency * share


class RotaryEmbedding(nn.Module):
    """Turns pair i of a head at position p by the angle ``p · frequency_i``.

    Args:
        dim: How many of a head's features are turned, counted from the first; even.
        base: Base of the frequencies, ``base^(-2i/dim)``.
        scaling: How frequencies are changed.
        interleaved: Whether the members of a pair are neighbours; else half of ``dim`` apart.
        factors: [dim/2] float that divides the frequencies, or None (``rope_freqs`` of a GGUF file).
    """

    def __init__(
        self,
        dim: int,
        base: float = 10_000.0,
        *,
        scaling: RopeScaling | None = None,
        interleaved: bool = False,
        factors: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:  # noqa: PLR2004  # pairs
            raise ConfigError("rotary embedding", name="dim", rule="a positive even number", value=dim)
        self.dim = dim
        self.base = base
        self.scaling = RopeScaling() if scaling is None else scaling
        self.interleaved = interleaved
        self.factors = factors
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def extra_repr(self) -> str:
        """Return what torch prints."""
        return f"dim={self.dim}, base={self.base:g}, scaling={self.scaling.kind}, interleaved={self.interleaved}"

    def frequencies(self, length: int) -> torch.Tensor:
        """Return the angle per position of each pair, for a sequence of ``length``: float32 [dim/2], on the CPU."""
        found = self.scaling.frequencies(self.dim, self.base, length)
        return found if self.factors is None else found / self.factors.to("cpu", torch.float32)

    def table(self, length: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return cosine + i sine of at least ``length`` positions: complex [≥ length, dim/2], cached for the next call.

        Args:
            length: Positions of the whole sequence.
            device: Where.
            dtype: Of the real parts: float32 or float64.
        """
        known = self._tables.get((device, dtype))
        if known is not None and len(known) >= length and not self._is_long(len(known), length):
            return known
        # Angles are rounded as models were trained with them: in float32.
        angle = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), self.frequencies(length))
        table = torch.complex(angle.cos(), angle.sin()) * self.scaling.amplitude()
        table = table.to(device, torch.complex128 if dtype is torch.float64 else torch.complex64)
        self._tables[device, dtype] = table
        return table

    def _is_long(self, known: int, length: int) -> bool:
        """Return whether a table made for ``known`` positions has other frequencies than one for ``length``."""
        if not self.scaling.depends_on_length() or known == length:
            return False
        return max(known, length) > self.scaling.original_context

    def emit_program(self, builder: ProgramBuilder, x: Value, *, cache: CachePlaces | RowPlaces) -> Value:
        """Emit the turn of tokens' heads [tokens · heads, head_dim]."""
        if self.scaling.depends_on_length() and cache.capacity > self.scaling.original_context:
            builder.refuse("its frequencies depend on the length of the sequence")

        def make() -> torch.Tensor:
            table = self.table(cache.capacity, builder.device)[: cache.capacity]
            return torch.cat((table.real, table.imag), -1)

        table = builder.constant((id(self), "turn"), make)
        return builder.step(Op.ROTARY, x, table, cache.position, numbers=(self.interleaved,))

    def forward(self, x: torch.Tensor, start: int | torch.Tensor = 0) -> torch.Tensor:
        """Return x turned, of x's dtype; computed in float32 (float64 for such an x).

        Args:
            x: [B, T, heads, head_dim].
            start: Position of the first token; for each sequence of the batch its own where it is int64 [B].
        """
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        count = x.shape[1]
        if isinstance(start, torch.Tensor):
            place = (start[:, None] + torch.arange(count, device=start.device)).clamp(min=0)
            angles = self.table(int(place.max()) + 1, x.device, dtype)[place][:, :, None, :]
        else:
            angles = self.table(start + count, x.device, dtype)[start : start + count, None, :]
        turned, rest = x[..., : self.dim].to(dtype), x[..., self.dim :]
        if self.interleaved:
            # A pair is one complex number, and turning it is one multiplication.
            turned = torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (-1, 2))) * angles).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            cos, sin = angles.real.contiguous(), angles.imag.contiguous()  # next to each other, which is faster to read
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        turned = turned.to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

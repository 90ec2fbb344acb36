"""Spike-timing-dependent plasticity of 4-bit synapses: local rules for weights that stay on their grid.

A change is smaller than a step between two levels. So each changed weight moves to one of the two levels round its new
value, by chance, so that its mean is that value: there is no master in float, and small changes are not lost.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from q4core import BlockOrder, ConfigError, FormatError, InputError, PackedWeight, ScaleKind, pack_codes

__all__ = ["STDP"]


class STDP:
    """Pair-based STDP with exponential traces.

    In each step, a neuron that fires strengthens the synapses whose sources fired before, or in the same step, where
    they may have made it fire; and a source that fires weakens those whose targets fired in a step before.

    Args:
        weight: [N, K] of a format with a code book and plain block scales, such as NF4 or FP4; of any K that the
            format takes. It is not changed.
        a_plus: By how much a source's spike just before a target's strengthens, 0 or more.
        a_minus: By how much a source's spike just after a target's weakens, 0 or more.
        tau_plus: Seconds in which a source's spike is forgotten.
        tau_minus: Seconds in which a target's spike is forgotten.
        dt: Seconds of a step.
        seed: Of the rounding.

    Raises:
        ConfigError: A number is not legal.
        FormatError: The weight's format has no such grid.

    Reference:
        Morrison, Diesmann and Gerstner, Phenomenological models of synaptic plasticity based on spike timing, 2008.
    """

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        weight: PackedWeight,
        *,
        a_plus: float = 0.01,
        a_minus: float = 0.01,
        tau_plus: float = 20e-3,
        tau_minus: float = 20e-3,
        dt: float = 1e-3,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("a_plus", a_plus, 0.0),
            ("a_minus", a_minus, 0.0),
            ("dt", dt, 1e-12),
            ("tau_plus", tau_plus, dt),
            ("tau_minus", tau_minus, dt),
        ):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= least):
                raise ConfigError("STDP", name=name, rule=f"a finite number, {least:g} or more", value=value)
        levels = weight.format.codebook if weight.codebook is None else weight.codebook.tolist()
        if not levels or weight.scale_kind is not ScaleKind.PLAIN or weight.offset is not None:
            rule = "of a format with a code book, with plain scales and without offsets, such as nf4"
            found = f"{weight.format.name}, {weight.scale_kind.value}{', with offsets' * (weight.offset is not None)}"
            raise FormatError("STDP", name="weight", rule=rule, value=found)
        self._weight = weight
        self._codes = weight.codes().clone().view(weight.shape)
        self._levels, self._order = torch.tensor(levels, dtype=torch.float32).sort()
        self._rank = self._order.argsort()
        scale = weight.scale.float().repeat_interleave(weight.block_size, -1)
        is_flat = weight.blocks is BlockOrder.FLAT  # its blocks run across rows
        self._scale = scale[: self._codes.numel()].view(weight.shape) if is_flat else scale[:, : weight.in_features]
        self._amounts, self._decays = (a_plus, a_minus), (math.exp(-dt / tau_plus), math.exp(-dt / tau_minus))
        self._generator = torch.Generator(weight.device).manual_seed(seed)
        self._traces: tuple[torch.Tensor, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the generator by bytes, as a tensor of its state would be gone in a new process."""
        return {**vars(self), "_generator": bytes(self._generator.get_state().tolist())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, and continue with the same random numbers."""
        vars(self).update(state)
        self._generator = torch.Generator(self._weight.device)
        self._generator.set_state(torch.tensor([*state["_generator"]], dtype=torch.uint8))

    @property
    def weight(self) -> PackedWeight:
        """The weight as it is now: packed codes of its own, the scales of the first."""
        codes = self._codes.view(-1) if self._weight.blocks is BlockOrder.FLAT else self._codes
        return attrs.evolve(self._weight, qdata=pack_codes(codes, self._weight.packing))

    @torch.no_grad()
    def step(self, sources: torch.Tensor, targets: torch.Tensor) -> int:
        """Learn from what fired in one step; to be called by one thread at a time.

        Args:
            sources: [B, K] of zeros and ones, of any dtype; changes of a batch add up.
            targets: [B, N], likewise.

        Returns:
            How many synapses have another code now.

        Raises:
            InputError: Sizes don't fit the weight, or the batch is not that of the steps before, or what is given is
                other than 0 and 1. Nothing is learnt.
        """
        rows, columns = self._weight.shape
        for name, spikes, size in (("sources", sources, columns), ("targets", targets, rows)):
            if spikes.dim() != 2 or spikes.shape[1] != size or len(spikes) != len(sources):  # noqa: PLR2004  # [B, n]
                raise InputError("STDP", name=name, rule=f"of shape [B, {size}]", value=list(spikes.shape))
            if bool((wrong := (spikes != 0) & (spikes != 1)).any()):
                raise InputError("STDP", name=name, rule="0 and 1 alone", value=spikes[wrong][0].item())
        if self._traces is not None and len(self._traces[0]) != len(sources):
            rule = f"a batch of {len(self._traces[0])}, as in the steps before"
            raise InputError("STDP", name="sources", rule=rule, value=list(sources.shape))
        sources, targets = sources.to(self._scale), targets.to(self._scale)
        before, after = self._traces or (torch.zeros_like(sources), torch.zeros_like(targets))
        before, after = self._decays[0] * before, self._decays[1] * after
        before = before + sources
        change = self._amounts[0] * targets.T @ before - self._amounts[1] * after.T @ sources
        self._traces = before, after + targets
        return self._move(change)

    def _move(self, change: torch.Tensor) -> int:
        """Round changed weights to one of the two levels round them, so that the mean is right, within its ends."""
        at = change.nonzero(as_tuple=True)
        scale = self._scale[at]
        old = self._codes[at]
        wanted = self._levels[self._rank[old.long()]] + change[at] / torch.where(scale != 0, scale, torch.inf)
        wanted = wanted.clamp(self._levels[0], self._levels[-1])
        high = torch.searchsorted(self._levels, wanted).clamp(1, len(self._levels) - 1)
        below, above = self._levels[high - 1], self._levels[high]
        share = (wanted - below) / (above - below)
        chance = torch.rand(share.shape, generator=self._generator, device=share.device)
        new = self._order[high - 1 + (chance < share).long()].to(old.dtype)
        self._codes[at] = new
        return int((new != old).sum())

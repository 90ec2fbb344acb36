"""The part of a layer that one rank computes: covers of stored weights, joined where one product can run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4_vllm.prepared import RankLayers

__all__ = ["Cut", "Piece", "RankLayer", "prepare"]


@attrs.frozen
class Cut:
    """Rows and in-features of a stored weight.

    Args:
        stored: The layer's name in the checkpoint.
        rows: Its out-features that are needed, within N.
        columns: Its in-features.
    """

    stored: str
    rows: range
    columns: range


@attrs.frozen(eq=False)
class Piece:
    """A prepared layer, and how it is called.

    Args:
        layer: Over whole blocks.
        pad: Zeros that x needs on both sides.
        cut: The out-features that are needed.
    """

    layer: q4.Q4Linear
    pad: tuple[int, int]
    cut: slice

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the range that the piece holds."""
        y: torch.Tensor = self.layer(torch.nn.functional.pad(x, self.pad) if any(self.pad) else x)
        return y if self.cut == slice(0, y.shape[-1]) else y[..., self.cut]


class RankLayer:
    """What one rank computes of a layer: x [..., K of the rank] → y [..., N of the rank].

    Args:
        pieces: In the order of y.
        rows: N of the rank; beyond what the pieces have, y is 0, as for a vocabulary that is padded.
    """

    def __init__(self, pieces: Sequence[Piece], rows: int) -> None:
        self.pieces, self.rows = tuple(pieces), rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return y, in the dtype of x."""
        parts = [piece(x) for piece in self.pieces]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else x[..., :0]
        missing = self.rows - y.shape[-1]
        return torch.nn.functional.pad(y, (0, missing)) if missing else y


def prepare(
    cuts: Sequence[Cut], rows: int, checkpoint: Mapping[str, q4.PackedWeight], layers: RankLayers, name: str
) -> RankLayer:
    """Return a rank's layer, prepared; weights are joined where they are of one form, and else run one by one.

    Args:
        cuts: What of which weights, in the order of y.
        rows: N of the rank.
        checkpoint: Where the weights are.
        layers: Those of the rank, to which this one is added.
        name: For messages and reports.

    Raises:
        WeightError: A range is outside of its weight, or in-features are asked of blocks that run across rows.
        CheckpointError, BackendUnavailableError: As a checkpoint and a session raise them.
    """
    covers = [checkpoint[cut.stored].cover(rows=cut.rows, columns=cut.columns) for cut in cuts]
    whole = all(cover.cut == slice(0, cover.weight.out_features) for cover in covers)
    if len(covers) > 1 and whole and len({cover.pad for cover in covers}) == 1:
        joined = layers.find(key := f"{name}: {[*cuts]}")
        if joined is None:
            try:
                weight = q4.cat([cover.weight for cover in covers], name=name)
            except q4.WeightError:  # Q4_K and Q6_K in one fusion, say
                pass
            else:
                joined = layers.make(key, weight, name)
        if joined is not None:
            return RankLayer([Piece(joined, covers[0].pad, slice(0, joined.out_features))], rows)
    names = [name] if len(covers) == 1 else [f"{name}[{cut.stored.rpartition('.')[2]}]" for cut in cuts]
    pieces = []
    for cover, cut, label in zip(covers, cuts, names, strict=True):
        found = layers.find(key := f"{label}: {cut}")
        pieces.append(Piece(layers.make(key, cover.weight, label) if found is None else found, cover.pad, cover.cut))
    return RankLayer(pieces, rows)

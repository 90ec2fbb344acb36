"""A backend for q4core in one file: NF4 weights on the CPU, computed by numpy, a slice of out-features at a time."""

from __future__ import annotations

import numpy as np
import torch

import q4core as q4

__all__ = ["ExampleBackend", "q4_backends"]

_SLICE_ELEMENTS = 1 << 14
"""Most weights that are decoded at a time; they stay in the cache. What says KERNEL never holds the dense weight."""


class ExampleBackend:
    """Serves NF4 with one float scale per block; what is not declared here, the core refuses."""

    name = "example-backend"
    api_version = (2, 0)
    capabilities = q4.Capabilities(
        formats={"nf4"},
        scale_kinds={q4.ScaleKind.PLAIN},
        devices={"cpu"},
        dtypes={torch.float32, torch.bfloat16},
        precisions={q4.Precision.W4A32, q4.Precision.W4A16},
        features={q4.Feature.GRADIENTS},
    )

    def check(self, request: q4.Request) -> q4.Support:
        """Offer one path, for every number of rows."""
        precision = q4.Precision.W4A32 if request.dtype == torch.float32 else q4.Precision.W4A16
        path = q4.KernelPath("sliced", (1, None), q4.PathKind.KERNEL, precision, q4.Tier.GENERIC)
        return q4.Support.yes([path], native_state="numpy")

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Copy codes and scales, the first code of each pair in the high nibble, whatever the checkpoint's order."""
        del request
        codes = weight.repack(q4.Packing.HIGH_FIRST).qdata
        codebook = torch.tensor(weight.format.codebook, dtype=torch.float32)
        tensors = [context.keep(codes), context.keep(weight.scale, dtype=torch.float32), context.keep(codebook)]
        return q4.Prepared(tensors, (q4.WeightSpec.of(weight), weight.scale.dtype))

    def linear(
        self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None, path: str
    ) -> None:
        """Decode a slice of out-features, multiply in float32, add the bias, round once."""
        del path
        codes, scale, codebook = (tensor.numpy() for tensor in prepared.tensors)
        exact = x.to(torch.float32).numpy()
        y = np.empty(out.shape, np.float32)
        step = max(1, _SLICE_ELEMENTS // exact.shape[1])
        for start in range(0, len(codes), step):
            part = slice(start, start + step)
            pairs = np.stack((codes[part] >> 4, codes[part] & 15), axis=-1)
            values = codebook[pairs].reshape(*scale[part].shape, -1) * scale[part, :, None]
            with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity in x are the caller's
                y[:, part] = exact @ values.reshape(len(values), -1).T
        if bias is not None:
            y += bias.to(torch.float32).numpy()
        out.copy_(torch.from_numpy(y))

    def export(self, prepared: q4.Prepared, rows: torch.Tensor | None = None) -> q4.PackedWeight:
        """Undo ``prepare``, bit for bit, in the checkpoint's own order; gradients and saving go through it."""
        codes, scale, _ = prepared.tensors
        spec, scale_dtype = prepared.meta
        if rows is not None:
            codes, scale = codes[rows], scale[rows]
        return q4.PackedWeight(
            format=spec.format,
            qdata=codes,
            scale=scale.to(scale_dtype),
            out_features=codes.shape[0],
            in_features=spec.in_features,
            block_size=spec.block_size,
            packing=q4.Packing.HIGH_FIRST,
            dtype=spec.dtype,
        ).repack(spec.packing)


@q4.hookimpl
def q4_backends() -> list[ExampleBackend]:
    """Return the backends of this package; called when a session first looks for backends."""
    return [ExampleBackend()]

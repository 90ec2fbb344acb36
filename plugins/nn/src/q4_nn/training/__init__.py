"""Straight-through-estimator training: full-precision masters, four-bit forward passes.

Forward equals the quantised weight exactly; the gradient of the master weight is the identity's, the input's is exact.
``docs/training.md`` states what a training loop owns and which tensors stay alive.

Reference:
    Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (straight-through estimator).
"""

from q4_nn.quantising import dequantize_packed, quantize_packed
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent, to_ste_
from q4_nn.training.packing import pack_
from q4_nn.training.straight_through import clear_eval_cache, eval_cache_bytes, linear_ste, ste_weight

__all__ = [
    "STEConv2d",
    "STELinear",
    "STERecurrent",
    "clear_eval_cache",
    "dequantize_packed",
    "eval_cache_bytes",
    "linear_ste",
    "pack_",
    "quantize_packed",
    "ste_weight",
    "to_ste_",
]

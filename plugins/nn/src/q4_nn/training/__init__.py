"""Straight-through-estimator training: full-precision masters, four-bit forward passes.

Forward equals the quantised weight exactly; the gradient of the master weight is the identity's, the input's is exact.
``docs/training.md`` states what a training loop owns and what is kept alive.

Reference:
    Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (straight-through estimator).
"""

from q4_nn.training.quantising import dequantize_packed, quantize_packed
from q4_nn.training.straight_through import clear_eval_cache, eval_cache_bytes, linear_ste, ste_weight

__all__ = ["clear_eval_cache", "dequantize_packed", "eval_cache_bytes", "linear_ste", "quantize_packed", "ste_weight"]

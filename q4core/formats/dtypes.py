"""The dtypes in which layers compute."""

import torch

__all__ = ["FLOATS"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes of dense weights, of x and of y: those whose results the self-probe can judge."""

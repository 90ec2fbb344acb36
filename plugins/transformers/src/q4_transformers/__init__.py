"""4-bit models in transformers: loading by ``from_pretrained`` from any dialect, packed layers, and saving."""

from __future__ import annotations

from q4_transformers.config import Q4Config
from q4_transformers.linear import HfLinear
from q4_transformers.loading import config_for, load
from q4_transformers.peft import MergedLayer, MergeReport, merge, prepare_for_training
from q4_transformers.registration import give_back, register, take_over
from q4_transformers.report import Explanation, explain
from q4core import PackedWeightError

__all__ = [
    "Explanation",
    "HfLinear",
    "MergeReport",
    "MergedLayer",
    "PackedWeightError",
    "Q4Config",
    "config_for",
    "explain",
    "give_back",
    "load",
    "merge",
    "prepare_for_training",
    "take_over",
]

register()

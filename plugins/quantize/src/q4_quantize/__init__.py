"""The reference quantiser, for q4core: dense weights in 4 bits, bit-equal to the library that each format comes from.

``q4.quantize`` is how to use it. The other names serve those who write a backend with a quantiser of its own.
"""

from q4_quantize.encode import quantize_reference
from q4_quantize.probe import probe_quantizer
from q4_quantize.quantizer import ReferenceQuantizer, find_quantizer, quantize_request
from q4core import hookimpl

__all__ = ["ReferenceQuantizer", "find_quantizer", "probe_quantizer", "quantize_reference", "quantize_request"]


@hookimpl
def q4_quantizers() -> list[ReferenceQuantizer]:
    """Bring the rules of the built-in formats."""
    return [ReferenceQuantizer()]

"""vLLM's plugin: ``--quantization q4`` serves a 4-bit checkpoint of any dialect that q4core reads, on CPUs.

vLLM calls ``register`` in each of its processes. Importing this package imports neither vLLM nor torch.
"""

__all__ = ["register"]


def register() -> None:
    """Make ``q4`` known to vLLM as a method of quantisation; more than one call changes nothing."""
    from vllm.model_executor.layers.quantization import (  # noqa: PLC0415  # in vLLM's processes alone
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if "q4" not in QUANTIZATION_METHODS:
        from q4_vllm.config import Q4Config  # noqa: PLC0415  # it builds on vLLM's classes

        register_quantization_config("q4")(Q4Config)

"""Models split over processes: an error when transformers loads one, before a tensor is loaded.

transformers hooks layers that are split by rows, so that the results of all processes are summed. It splits parameters,
and a packed weight is none: each process would add the whole product.
"""

from __future__ import annotations

import inspect

from q4core import ConfigError

__all__ = ["check_parallelism"]

_ARGUMENTS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")


def check_parallelism() -> None:
    """Raise a ``ConfigError`` if the current call of ``from_pretrained`` asks for several processes.

    No release of transformers passes these arguments on to a quantizer, so they are looked up in its frame.

    Raises:
        ConfigError: One of its arguments asks for tensor, pipeline, expert or fully sharded parallelism.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "from_pretrained":
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    name = next((name for name in _ARGUMENTS if given.get(name) is not None), None)
    if name is not None:
        rule = "None, as packed layers are not split over processes"
        hint = "Leave it away: each process loads the whole model. Or split a dense one, without a quantization_config."
        raise ConfigError("from_pretrained", name=name, rule=rule, value=given[name], hint=hint)

"""The neurons as layer types, for ``q4_nn.make("lif", …)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core import hookimpl

if TYPE_CHECKING:
    from q4_nn import LayerType

__all__ = ["q4_layers"]


@hookimpl
def q4_layers() -> list[LayerType]:
    """Return the neurons: each takes currents [B, n], and returns spikes (or membranes) and its state."""
    from q4_nn import LayerExample, LayerType  # noqa: PLC0415  # not before it is needed
    from q4_snn.neurons import ALIF, IF, LI, LIF, CubaLIF  # noqa: PLC0415  # as above
    from q4_snn.nonlinear import AdEx, Izhikevich  # noqa: PLC0415  # as above

    tau = {"tau_mem": 1e-3}
    adaptive = {**tau, "tau_adapt": 1e-2, "adaptation": 0.5}
    return [
        LayerType(
            "lif",
            LIF,
            summary="LIF neurons",
            examples=(
                LayerExample((5,), tau, surrogate=True),
                LayerExample((5,), {**tau, "t_refractory": 2e-4}, surrogate=True),
            ),
        ),
        LayerType(
            "cuba_lif",
            CubaLIF,
            summary="current-based LIF neurons",
            examples=(LayerExample((5,), {**tau, "tau_syn": 5e-4}, surrogate=True),),
        ),
        LayerType("li", LI, summary="leaky integrators", examples=(LayerExample((5,), tau),)),
        LayerType("if", IF, summary="integrate-and-fire neurons", examples=(LayerExample((5,), surrogate=True),)),
        LayerType(
            "alif", ALIF, summary="adaptive LIF neurons", examples=(LayerExample((5,), adaptive, surrogate=True),)
        ),
        LayerType(
            "adex",
            AdEx,
            summary="adaptive exponential neurons",
            examples=(LayerExample((5,), {"t_refractory": 2e-4}, surrogate=True),),
        ),
        LayerType(
            "izhikevich",
            Izhikevich,
            summary="Izhikevich's neurons",
            examples=(LayerExample((5,), {"a": 0.1, "d": 2.0}, surrogate=True),),
        ),
    ]

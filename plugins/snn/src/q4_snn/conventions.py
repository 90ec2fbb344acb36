"""What other programs mean by their graphs of NIR, beyond what these state: steps, resets and units."""

from __future__ import annotations

from typing import Any

import attrs
import torch

__all__ = ["CONVENTIONS", "Convention"]


@attrs.frozen
class Convention:
    """What a program means by a graph.

    Args:
        dt: Seconds of its step, where nobody says another; None for a program that nobody named.
        options: Of neurons, where the graph states none.
        lost: What its graphs don't state and this package can't know, as a warning says it; None for nothing.
    """

    dt: float | None
    options: dict[str, Any]
    lost: str | None = None

    def adapted(self, kind: str, values: dict[str, Any], dt: float) -> dict[str, Any]:
        """Return the parameters of neurons by the equations of NIR."""
        del kind, dt
        return values


class _Norse(Convention):
    """Norse writes time constants multiplied by its dt, no gain of an input current, and r per step of an IF."""

    def adapted(self, kind: str, values: dict[str, Any], dt: float) -> dict[str, Any]:
        found = {name: value / dt if name.startswith("tau_") else value for name, value in values.items()}
        if kind == "CubaLIF":
            found["w_in"] = found["tau_syn"] / dt
        return found | ({"r": values["r"] / dt} if kind == "IF" else {})


class _Sinabs(Convention):
    """sinabs writes time constants in steps, decays by exp(-1 / tau), and r per step of an IF."""

    def adapted(self, kind: str, values: dict[str, Any], dt: float) -> dict[str, Any]:
        found = dict(values)
        for name in ("tau_mem", "tau_syn"):
            if name in found:
                steps = torch.as_tensor(found[name], dtype=torch.float64)
                tau = dt / -torch.expm1(-1 / steps)
                found[name] = tau if tau.dim() else float(tau)
        return found | ({"r": values["r"] / dt} if kind == "IF" else {})


_SEVERAL = "a neuron that fires several times in one step, which sinabs's do by default, fires once here"
CONVENTIONS: dict[str | None, Convention] = {
    None: Convention(None, {}),
    "snntorch": Convention(1e-4, {"reset": "subtract", "reset_delay": True}),
    "spikingjelly": Convention(1e-4, {"reset": "value", "threshold_inclusive": True}),
    "norse": _Norse(1e-3, {"reset": "value"}),
    "sinabs": _Sinabs(1e-3, {"reset": "subtract", "threshold_inclusive": True}, _SEVERAL),
}
"""Name of a program → what it means; None for NIR's own meaning."""

"""Calls of a pickled layer in a new process, which runs ``serve``."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

from q4_conformance.outcome import FailureError, NotTestableError
from q4_conformance.subjects.temporary_plugin import is_installed, lent, make, maker_of

if TYPE_CHECKING:
    import torch

    from q4core import Backend, PackedWeight, Q4Linear

_SECONDS = 120
_START = (
    "import gc; gc.disable(); from q4_conformance.subjects.remote_call import serve; gc.freeze(); gc.enable(); serve()"
)
"""Torch's own objects outlive every garbage collection, so that none looks through them."""


def call_elsewhere(backend: Backend, layer: Q4Linear, x: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
    """Return a layer's weight and its result for x, on the CPU, from a new process that the layer was pickled to.

    Raises:
        NotTestableError: The backend is neither installed, nor made by ``module:function``, nor can it be pickled.
        FailureError: The other process fails.
    """
    buffer = io.BytesIO()
    try:
        pickle.dump(None if is_installed(backend) else maker_of(backend) or backend, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        message = f"{backend.name!r} is not installed and can't be pickled: {error}"
        raise NotTestableError(message) from error
    pickle.dump((layer, x.cpu()), buffer)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(  # noqa: S603  # an interpreter like this one, with this module
            [sys.executable, "-c", _START],
            input=buffer.getvalue(),
            env=environment,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FailureError(f"the other process gave no answer in {_SECONDS} s") from error
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()[-800:]
        raise FailureError(f"the other process ended with {done.returncode}: {output}")
    weight, y = pickle.loads(done.stdout)  # noqa: S301  # from this very file
    return weight, y


def serve() -> None:
    """Call the layer that comes in on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a backend may print what it likes
    backend = pickle.load(sys.stdin.buffer)  # noqa: S301  # from this very file
    made = make(backend) if isinstance(backend, str) else backend
    with contextlib.nullcontext() if made is None else lent(made), answers:
        layer, x = pickle.load(sys.stdin.buffer)  # noqa: S301  # as above
        y = layer(x.to(layer.device))
        pickle.dump((layer.packed_weight().to("cpu"), y.cpu()), answers)

"""The loop of ``generate``, between two calls of which torch has one thread and modules stay what they are."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from q4_lm.generation.threads import set_threads
from q4_transformers.programs import ProgramForward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["install_loop"]

_NAME = "_optimize_model_for_decode"
"""The method of a model whose context transformers enters around its loop over new tokens, since 5.0."""

_open = threading.local()  # its ``threads`` are those of a call of the model in the loop that this thread is in


class _Loop:
    """What is in the place of that method, which it calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Give the model all threads for each call, and one to what follows where it is about one sequence.

        Some operations on the logits are large enough for torch to share, and then wait for a core that is busy.
        Programs look at the modules once, and again after a hook was registered.
        """
        before, thread = torch.get_num_threads(), threading.get_ident()
        outer = getattr(_open, "threads", None)
        count: int = outer or before  # of a loop in which this one is, as before is 1 there
        forwards = [vars(module).get("forward") for module in self.model.modules()]

        def begin(*_: Any) -> None:
            if threading.get_ident() == thread:
                set_threads(count)

        def end(_: Any, __: Any, result: Any) -> None:
            logits = getattr(result, "logits", None)
            if threading.get_ident() == thread and logits is not None and len(logits) == 1:
                set_threads(1)

        with getattr(type(self.model), _NAME)(self.model), contextlib.ExitStack() as stack:
            stack.callback(set_threads, before)
            stack.callback(setattr, _open, "threads", outer)
            _open.threads = count
            for own in forwards:
                if isinstance(own, ProgramForward):
                    stack.enter_context(own.steady())
            if vars(self.model).get("_compiled_call_impl") is None:  # which a new hook would have compiled again
                for hook in (self.model.register_forward_pre_hook(begin), self.model.register_forward_hook(end)):
                    stack.callback(hook.remove)
            yield


def install_loop(model: nn.Module) -> None:
    """Let a model generate so, where transformers has such a loop."""
    if hasattr(type(model), _NAME):
        vars(model)[_NAME] = _Loop(model)

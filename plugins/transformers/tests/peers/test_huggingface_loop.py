"""The loop of ``generate``: between two calls of the model torch has one thread, and modules are looked at once."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_decoders import calls, pair, prompt, ran
from transformers import LogitsProcessor

from q4_programs import Watch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers", "natively")]


class _Threads(LogitsProcessor):
    """Notes torch's number of threads between two calls of the model."""

    def __init__(self, fails: bool = False) -> None:
        self.seen: list[int] = []
        self.fails = fails

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        if self.fails:
            raise RuntimeError("no such token")
        return scores


@pytest.mark.parametrize("sequences", [1, 2])
def test_between_calls_of_one_sequence_torch_has_one_thread(sequences: int, llamas: tuple[Any, Any]) -> None:
    """The model has all of them at each call, of another thread too; so has what is about a batch, and what follows."""
    ours, _ = llamas
    inside, own, before = list[int](), threading.get_ident(), torch.get_num_threads()

    def look(*_: Any) -> None:
        inside.append(torch.get_num_threads())
        if len(inside) == 2:  # a call of another thread, whose number stays
            other = threading.Thread(target=lambda: [ours(prompt(4)), inside.append(torch.get_num_threads())])
            other.start()
            other.join()

    torch.set_num_threads(3)
    try:
        with ours.lm_head.register_forward_pre_hook(lambda *_: look() if threading.get_ident() == own else None):
            found = _Threads()
            ours.generate(prompt(20).repeat(sequences, 1), max_new_tokens=5, logits_processor=[found])
        assert found.seen == [3] + [1 if sequences == 1 else 3] * 4
        assert inside == [3] * 6
        with pytest.raises(RuntimeError, match="no such token"):
            ours.generate(prompt(20), max_new_tokens=5, logits_processor=[_Threads(fails=True)])
        assert torch.get_num_threads() == 3
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
        twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))  # noqa: S301  # its own bytes
        assert torch.equal(*(model.generate(prompt(20), max_new_tokens=5) for model in (ours, twin)))
        assert vars(twin)["_optimize_model_for_decode"].model is twin
    finally:
        torch.set_num_threads(before)


def test_generate_inside_generate_has_all_threads(llamas: tuple[Any, Any]) -> None:
    """A processor may let a model answer, or ask it for a loss: each call has all threads, and leaves one."""
    ours, theirs = llamas
    expected = theirs.generate(prompt(20), max_new_tokens=4, do_sample=False)
    inside, between, before = list[int](), list[int](), torch.get_num_threads()

    class Asking(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            between.append(torch.get_num_threads())
            if ids.shape[1] == 22:
                ours.generate(prompt(9), max_new_tokens=3, do_sample=False)
                between.append(torch.get_num_threads())
                ours(ids, labels=ids)
            return scores

    torch.set_num_threads(3)
    try:
        with ours.lm_head.register_forward_pre_hook(lambda *_: inside.append(torch.get_num_threads())):
            found = ours.generate(prompt(20), max_new_tokens=4, do_sample=False, logits_processor=[Asking()])
        assert torch.equal(found, expected)
        assert {*inside} == {3}
        assert between[:4] == [3, 1, 1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_model_of_experts_generates_with_its_routers_logits(tmp_path: Path) -> None:
    """Their loss, which comes before the logits, is not taken for them."""
    ours, theirs = pair(tmp_path, "Mixtral", {"num_local_experts": 4, "output_router_logits": True})
    assert torch.equal(*(model.generate(prompt(9), max_new_tokens=4, do_sample=False) for model in (ours, theirs)))


def test_generate_looks_at_the_modules_once(llamas: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so as it begins, and again after a hook was registered, which counts from the next token on."""
    ours, theirs = llamas
    looks, hooks, real = list[str | None](), list[Any](), Watch.change
    monkeypatch.setattr(Watch, "change", lambda watch: looks.append(real(watch)) or looks[-1])

    class Hooking(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if ids.shape[1] == 25:
                hooks.append(ours.model.layers[0].register_forward_hook(lambda *_: None))
            return scores

    first = ours.generate(prompt(20), max_new_tokens=12, do_sample=False)
    assert looks == [None] * 2  # of the prompt and the first token
    assert ran(ours) == 12
    found = ours.generate(prompt(20), max_new_tokens=12, do_sample=False, logits_processor=[Hooking()])
    assert torch.equal(found, theirs.generate(prompt(20), max_new_tokens=12, do_sample=False))
    assert torch.equal(found, first)
    assert sorted(calls(ours).values()) == [6, 6]
    hooks[0].remove()
    ours.model.forward.calls.clear()
    ours.generate(prompt(20), max_new_tokens=12, do_sample=False)
    assert ran(ours) == 12

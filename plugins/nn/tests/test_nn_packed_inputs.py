"""Packed layers, and those that train in four bits, take what torch's own take, and refuse what these refuse."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import q4core as q4
from q4_nn import PackedEmbedding, pack_, to_ste_
from q4_nn.training.layers import ste_matrix
from q4_programs import make_program

if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = "q4_0"  # blocks of 32: 64 features are whole blocks, 40 are filled up
CONFIG = q4.SessionConfig(device="cpu", activation_precision="exact")

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 8),
    "linear, filled": lambda: nn.Linear(40, 8),
    "linear, filled, no bias": lambda: nn.Linear(40, 8, bias=False),
    "conv": lambda: nn.Conv2d(8, 6, 2),
    "conv, filled": lambda: nn.Conv2d(3, 6, 3, stride=2, padding=(1, 2), dilation=2),
    "rnn": lambda: nn.RNN(64, 32),
    "rnn, filled": lambda: nn.RNN(40, 20, nonlinearity="relu", bias=False),
    "lstm": lambda: nn.LSTM(64, 32),
    "lstm, filled": lambda: nn.LSTM(40, 20),
    "lstm, filled, batch first": lambda: nn.LSTM(40, 20, 2, batch_first=True, bidirectional=True),
    "gru, filled": lambda: nn.GRU(40, 20, 2, bidirectional=True),
    "gru, filled, batch first": lambda: nn.GRU(40, 20, batch_first=True),
}


def _features(layer: nn.Linear) -> dict[str, tuple[Any, ...]]:
    size = layer.in_features
    filled = -(-size // 32) * 32
    return {
        "one row": (torch.randn(size),),
        "rows": (torch.randn(3, size),),
        "rows of rows": (torch.randn(2, 3, size),),
        "no rows": (torch.randn(0, size),),
        "strided": (torch.randn(3, 2 * size)[:, ::2],),
        "one more": (torch.randn(3, size + 1),),
        "one less": (torch.randn(3, size - 1),),
        "next whole blocks": (torch.randn(3, filled + 32 * (filled == size)),),
        "a single feature": (torch.randn(3, 1),),
        "no features": (torch.randn(3, 0),),
        "a number": (torch.randn(()),),
        **_kinds(torch.randn(3, size)),
    }


def _images(layer: nn.Conv2d) -> dict[str, tuple[Any, ...]]:
    size = layer.in_channels
    return {
        "batch": (torch.randn(2, size, 9, 11),),
        "one image": (torch.randn(size, 9, 11),),
        "batch of none": (torch.randn(0, size, 9, 11),),
        "channels last": (torch.randn(2, size, 9, 11).to(memory_format=torch.channels_last),),
        "one channel more": (torch.randn(2, size + 1, 9, 11),),
        "one channel less": (torch.randn(2, size - 1, 9, 11),),
        "one image of another channel": (torch.randn(size + 1, 9, 11),),
        "one channel": (torch.randn(2, 1, 9, 11),),
        "no channels": (torch.randn(2, 0, 9, 11),),
        "a matrix": (torch.randn(9, 11),),
        "a volume": (torch.randn(2, size, 9, 11, 2),),
        "smaller than the kernel": (torch.randn(2, size, 1, 1),),
        "one side smaller": (torch.randn(2, size, 9, 0),),
        "no height": (torch.randn(2, size, 0, 9),),
        **_kinds(torch.randn(2, size, 9, 11)),
    }


def _sequences(layer: Any) -> dict[str, tuple[Any, ...]]:
    size, hidden, first = layer.input_size, layer.hidden_size, layer.batch_first
    cells = layer.num_layers * (1 + layer.bidirectional)
    is_pair = layer.mode == "LSTM"

    def states(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        one = torch.randn(*shape, dtype=dtype)
        return (one, -one) if is_pair else one

    def sequences(count: int, batch: int, features: int = size) -> torch.Tensor:
        return torch.randn(batch, count, features) if first else torch.randn(count, batch, features)

    padded, one, state = sequences(5, 3), torch.randn(5, size), states(cells, 3, hidden)
    sort = pack_padded_sequence(padded, torch.tensor([2, 5, 3]), batch_first=first, enforce_sorted=False)
    return {
        "batch": (padded,),
        "batch, state": (padded, state),
        "batch, no state": (padded, None),
        "one sequence": (one,),
        "one sequence, state": (one, states(cells, hidden)),
        "one position": (sequences(1, 3),),
        "batch of none": (sequences(5, 0),),
        "batch of none, state": (sequences(5, 0), states(cells, 0, hidden)),
        "packed": (pack_padded_sequence(padded, torch.tensor([5, 3, 2]), batch_first=first),),
        "packed, state": (pack_padded_sequence(padded, torch.tensor([5, 5, 1]), batch_first=first), state),
        "packed, not sorted": (sort,),
        "packed, not sorted, state": (sort, state),
        "packed of one": (pack_sequence([one]),),
        "packed, three sizes": (PackedSequence(torch.randn(5, 2, size), torch.tensor([3, 2])),),
        "packed, state of another batch": (sort, states(cells, 2, hidden)),
        "packed, state of one sequence": (sort, states(cells, hidden)),
        "no positions": (sequences(0, 3),),
        "no positions of one": (torch.randn(0, size),),
        "one more": (sequences(5, 3, size + 1),),
        "one less": (sequences(5, 3, size - 1),),
        "next whole blocks": (sequences(5, 3, 96),),
        "one sequence, one less": (torch.randn(5, size - 1),),
        "a single feature": (sequences(5, 3, 1),),
        "a row": (torch.randn(size),),
        "four sizes": (torch.randn(2, 5, 3, size),),
        "state of one": (padded, states(cells, 1, hidden)),
        "state of another batch": (padded, states(cells, 2, hidden)),
        "state of other cells": (padded, states(cells + 1, 3, hidden)),
        "state of one cell": (padded, states(1, 3, hidden) if cells > 1 else states(2, 3, hidden)),
        "state of other features": (padded, states(cells, 3, hidden + 1)),
        "state of one feature": (padded, states(cells, 3, 1)),
        "state of whole blocks": (padded, states(cells, 3, 64)),
        "state of one sequence": (padded, states(cells, hidden)),
        "one sequence, state of a batch": (one, states(cells, 1, hidden)),
        "state of no batch": (padded, states(cells, 0, hidden)),
        "state, transposed": (padded, states(3, cells, hidden) if cells != 3 else states(2, 3, hidden)),
        "state of float64": (padded, states(cells, 3, hidden, dtype=torch.float64)),
        "state of the other kind": (padded, torch.randn(cells, 3, hidden) if is_pair else (state, state)),
        "state alone in a tuple": (padded, (torch.randn(cells, 3, hidden),)),
        "states stacked": (padded, torch.randn(2, cells, 3, hidden)),
        "three states": (padded, (torch.randn(cells, 3, hidden),) * 3),
        "a list of states": (padded, [torch.randn(cells, 3, hidden)] * 2),
        "a number as state": (padded, 0),
        **_kinds(padded),
    }


def _kinds(x: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    """Return what has the right sizes, and another dtype or type."""
    return {
        "float64": (x.double(),),
        "bfloat16": (x.bfloat16(),),
        "integers": (x.long(),),
        "truths": (x > 0,),
        "complex": (x + 0j,),
        "a list": (x.tolist(),),
        "nothing": (None,),
    }


def _forms(layer: nn.Module) -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(3)
    if isinstance(layer, nn.Linear):
        return _features(layer)
    return _images(layer) if isinstance(layer, nn.Conv2d) else _sequences(layer)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, PackedSequence):
        return [item for item in value if item is not None]
    return [part for item in value for part in _flat(item)] if isinstance(value, tuple) else [value]


def _result(layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
    try:
        return layer(*inputs)
    except Exception as error:  # noqa: BLE001  # whatever torch raises
        return error


@pytest.fixture(scope="module", params=LAYERS)
def three(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return torch's layer over quantised weights, one that trains in four bits to these, and the packed one."""
    torch.manual_seed(0)
    dense = LAYERS[request.param]()
    ste = nn.Sequential(copy.deepcopy(dense))
    to_ste_(ste, FORMAT)
    packed = copy.deepcopy(ste)
    pack_(packed, q4.Session(CONFIG))
    with torch.no_grad():
        for parameter in dense.parameters():
            if parameter.dim() > 1:
                parameter.copy_(ste_matrix(parameter.flatten(1), FORMAT).view_as(parameter))
    return dense, ste[0], packed[0]


@torch.no_grad()
def test_each_form_of_input_is_taken_or_refused_as_torch_does(three: tuple[nn.Module, nn.Module, nn.Module]) -> None:
    """For each form of input the results are those of torch's layer, or all refuse, the packed one by a typed error."""
    dense, ste, packed = three
    wrong = []
    for name, inputs in _forms(dense).items():
        expected = _result(dense, inputs)
        for kind, layer in (("trains", ste), ("packed", packed)):
            found = _result(layer, inputs)
            if isinstance(expected, Exception):
                is_right = isinstance(found, q4.InputError if layer is packed else Exception)
            else:
                is_right = type(found) is type(expected)
                is_right = is_right and len(_flat(found)) == len(_flat(expected))
                is_right = is_right and all(
                    mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
                    for mine, theirs in zip(_flat(found), _flat(expected), strict=True)
                )
            if not is_right:
                wrong.append(f"{kind}, {name}: {_text_of(found)} instead of {_text_of(expected)}")
    assert not wrong, "\n".join(wrong)


@torch.no_grad()
def test_the_state_has_torchs_name() -> None:
    """Code that gives torch's layer ``hx`` by name gives it to the layers in its place."""
    model = nn.Sequential(nn.GRU(40, 20))
    x, hx = torch.randn(5, 3, 40), torch.randn(1, 3, 20)
    to_ste_(model, FORMAT)
    expected = model[0](x, hx=hx)[0]
    pack_(model, q4.Session(CONFIG))
    torch.testing.assert_close(model[0](x, hx=hx)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("size", [41, 39, 64])
def test_a_packed_sequence_of_another_width_is_refused(size: int) -> None:
    """torch's own layer takes some of these and reads what is not there, so it is no measure here."""
    model = nn.Sequential(nn.GRU(40, 20))
    to_ste_(model, FORMAT)
    pack_(model, q4.Session(CONFIG))
    with pytest.raises(q4.InputError, match=r"layer '0': x must be of shape \[rows, 40\] in a PackedSequence"):
        model(pack_sequence([torch.randn(5, size)]))


def _text_of(value: Any) -> str:
    return repr(value)[:90] if isinstance(value, Exception) else str([list(item.shape) for item in _flat(value)])


@torch.no_grad()
@pytest.mark.parametrize("tokens", [torch.zeros(2, 0, dtype=torch.int64), torch.tensor(3), torch.tensor([[1, 2]])])
def test_a_packed_embedding_takes_any_shape(tokens: torch.Tensor) -> None:
    """Token numbers of any shape are looked up, none of them too; others than numbers are a typed error."""
    dense = torch.randn(8, 32)
    with q4.Session(CONFIG) as session:
        layer = PackedEmbedding(session.linear(q4.quantize(dense, FORMAT)), torch.float32)
        expected = nn.functional.embedding(tokens, q4.dequantize(q4.quantize(dense, FORMAT)))
        assert torch.equal(layer(tokens), expected)
        for other in (tokens.float(), torch.tensor([8]), torch.tensor(-1), [1, 2]):
            with pytest.raises(q4.InputError):
                layer(other)


@torch.no_grad()
@pytest.mark.parametrize("layer", [nn.Linear(40, 8), nn.LSTM(40, 20)])
@pytest.mark.parametrize("size", [64, 41, 1])
def test_a_program_refuses_another_width(layer: nn.Module, size: int) -> None:
    """A program of a packed layer for an example that does not fit refuses it as the layer does."""
    model = nn.Sequential(copy.deepcopy(layer)).eval()
    with q4.Session(CONFIG) as session:
        to_ste_(model, FORMAT)
        pack_(model, session)
        x = torch.randn(5, 3, size)
        program = make_program(model, x)
        with pytest.raises(q4.InputError, match="x must be of shape"):
            program(x)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 1, 20), (3, 1, 20), (2, 3, 20), (1, 3, 32), (1, 3, 1)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_program_refuses_another_state(shape: tuple[int, ...], *, is_packed: bool) -> None:
    """A program of a recurrent layer, torch's or packed, for a state that does not fit refuses it as the layer does."""
    model = nn.ModuleDict({"cell": nn.GRU(40, 20)}).eval()
    with q4.Session(CONFIG) as session:
        if is_packed:
            to_ste_(model, FORMAT)
            pack_(model, session)
        inputs = torch.randn(5, 3, 40), torch.randn(shape)
        program = make_program(model["cell"], *inputs)
        with pytest.raises(q4.InputError if is_packed else RuntimeError, match=r"hx must be|hidden size"):
            program(*inputs)

"""Batches of sequences by one program: the features of the modules, and of each sequence the bits that it has alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_lm import build_transformer
from q4_lm.generation.encoding import EncodingProgram, EncodingPrograms
from q4_lm.generation.sentence_modules import modules_of_file
from q4_nn import convert_linears_
from q4core.extension import record_of

CONFIG = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 128, "max_position_embeddings": 40, "causal": False}
BERT = {"norm": "layer", "norm_position": "post", "hidden_act": "gelu", "gated": False, "positions": "learned"}
BERT |= {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "type_vocab_size": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "nomic": {**BERT, "positions": "rotary", "gated": True, "hidden_act": "silu", "mlp_bias": False},
    "modern bert": {
        "norm": "layer",
        "hidden_act": "gelu",
        "sliding_window": 5,
        "sliding_layers": (1,),
        "local_rope_theta": 100.0,
    },
    "qwen 3": {"causal": True, "num_key_value_heads": 2, "qk_norm": True},
    "one head": {"causal": True, "num_key_value_heads": 1, "head_dim": 24, "sliding_window": 3, "sliding_layers": (0,)},
}
LENGTHS = (1, 2, 17, 30, 5, 13, 40, 8)
# Sums of float32 in another order, over two blocks of small numbers: a row that sees one token more is off by 1e-2.
LIMIT = 1e-5


def build(name: str, *, packed: bool = True) -> Any:
    """Return an encoder, or a decoder, of random weights."""
    torch.manual_seed(0)
    made = build_transformer(**{**SIZES, **OPTIONS[name]}).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if packed:
        convert_linears_(made, format="q4_0", session=q4.Session(CONFIG))
    return made


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return random tokens of sequences."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 128, (length,), generator=draw).tolist() for length in lengths]


def alone(encoder: Any, row: list[int]) -> torch.Tensor:
    """Return what the modules give for one sequence: [T, hidden]."""
    tokens = torch.tensor([row])
    with torch.inference_mode():
        if not encoder.config.causal:
            found: torch.Tensor = encoder(tokens)[0]
            return found
        x = encoder.embed_tokens(tokens)
        for block in encoder.layers:
            x = block(x)
        return encoder.norm(x)[0]  # type: ignore[no-any-return]


def program(encoder: Any, **options: Any) -> EncodingProgram:
    """Return the program of an encoder on the native backend."""
    made = EncodingProgram(encoder, 48, 40, **options)
    assert made.bound.record.backend == "cpu-native", made.bound.record
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_features_are_those_of_the_modules(name: str) -> None:
    """Each sequence of a batch, laid after others, has the features that the modules give it alone, to rounding."""
    encoder, rows = build(name), rows_of()
    for row, found in zip(rows, program(encoder)(rows), strict=True):
        wanted = alone(encoder, row)
        assert float((found - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())


@pytest.mark.parametrize("name", ["bert", "modern bert", "qwen 3"])
def test_a_batch_has_the_bits_of_each_sequence_alone(name: str) -> None:
    """What lies before and behind a sequence, and the number of threads, change no bit of it."""
    made, rows = program(build(name)), rows_of()
    batch = made(rows)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(made([row])[0], found) for row, found in zip(rows, batch, strict=True))
            assert all(torch.equal(*pair) for pair in zip(made(rows[::-1]), batch[::-1], strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("pooling", [("mean",), ("cls",), ("lasttoken",), ("cls", "mean")])
@pytest.mark.parametrize("normalised", [False, True])
def test_pooled_vectors(pooling: tuple[str, ...], normalised: bool) -> None:  # a parameter
    """The program's vectors are the pooled features, joined where there are several, of length one where asked for."""
    encoder, rows = build("bert"), rows_of()
    features = program(encoder)(rows)
    found = torch.stack(program(encoder, pooling=pooling, normalised=normalised)(rows))
    modes = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "lasttoken": lambda x: x[-1]}
    wanted = torch.stack([torch.cat([modes[mode](item.double()) for mode in pooling]) for item in features])
    wanted = torch.nn.functional.normalize(wanted, dim=-1) if normalised else wanted
    assert float((found - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())


def test_segments() -> None:
    """Segments are looked up for each token; one that is not there is an error, after which the next run is right."""
    encoder, rows = build("bert"), rows_of((5, 9))
    types = [[0, 0, 1, 1, 1], [1] * 9]
    made = program(encoder)
    for found, row, kinds in zip(made(rows, types), rows, types, strict=True):
        wanted = encoder(torch.tensor([row]), types=torch.tensor([kinds]))[0].detach()
        assert float((found - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())
    before = made(rows, types)
    with pytest.raises(q4.InputError, match="embed_types"):
        made(rows, [[0, 0, 1, 1, 2], [1] * 9])
    with pytest.raises(q4.InputError, match="embed_tokens"):
        made([[128], [1]])
    assert all(torch.equal(*pair) for pair in zip(made(rows, types), before, strict=True))


def test_nan_stays_in_its_sequence() -> None:
    """A token whose embedding is NaN makes its own sequence NaN, and changes no other."""
    encoder, rows = build("bert"), rows_of((5, 9, 3, 20))
    rows = [[token % 60 for token in row] for row in rows]
    made = program(encoder, pooling=("mean",), normalised=True)
    before = made(rows)
    with torch.no_grad():
        encoder.embed_tokens.weight[99].fill_(float("nan"))
    rows[1][4] = 99
    after = made(rows)
    assert after[1].isnan().all()
    assert all(torch.equal(after[row], before[row]) for row in (0, 2, 3))


def test_programs_are_made_once_and_anew_after_a_change() -> None:
    """Short sequences share a program, longer ones another; a replaced module makes a new one with its numbers."""
    encoder = build("bert")
    programs = EncodingPrograms(encoder, 40, ("mean",))
    first = programs.find(8)
    assert first is not None
    assert programs.find(40) is first
    encoder.layers[0].mlp.up_proj = copy.deepcopy(encoder.layers[1].mlp.up_proj)
    second = programs.find(8)
    assert second is not None
    assert second is not first
    wanted = alone(encoder, [3, 4, 5]).mean(0)
    assert float((second([[3, 4, 5]])[0] - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())


def test_modules_run_where_a_program_does_not() -> None:
    """Dense layers, hooks and training leave the modules to run, and the report of the layers says why."""
    assert EncodingPrograms(build("bert", packed=False), 40).find(8) is None
    encoder = build("bert")
    encoder.layers[1].mlp.up_proj = torch.nn.Linear(64, 96).eval()
    programs = EncodingPrograms(encoder, 40)
    assert programs.find(8) is None
    assert programs.find(8) is None
    record = record_of(encoder.layers[0].mlp.up_proj, "programs", name="encode TransformerEncoder")
    assert "up_proj is dense" in str(record)
    encoder = build("bert")
    hook = encoder.layers[1].mlp.register_forward_hook(lambda *_: None)
    programs = EncodingPrograms(encoder, 40)
    assert programs.find(8) is None
    hook.remove()
    assert programs.find(8) is not None
    encoder.train()
    assert programs.find(8) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_parts_after_pooling(is_first: bool) -> None:  # a parameter
    """What the program gave and the parts that follow make the vectors that all parts make of the features."""
    encoder, rows = build("bert"), rows_of()
    scaling = modules_of_file(Path("any"), "mean").head[0]
    dense = torch.nn.Linear(64, 16).requires_grad_(requires_grad=False)
    head = torch.nn.Sequential(*([scaling, dense] if is_first else [dense, torch.nn.Tanh(), scaling]))
    modules = attrs.evolve(modules_of_file(Path("any"), "mean"), head=head)
    assert modules.is_normalised is is_first
    found = modules.finish(torch.stack(program(encoder, pooling=("mean",), normalised=is_first)(rows)))
    wanted = torch.cat([modules.pool(x[None], torch.ones(1, len(x))) for x in program(encoder)(rows)])
    assert float((found - wanted).abs().max()) <= LIMIT * float(wanted.abs().max())

"""Packed encoders inside transformers: a batch by one program, with the features of the modules, or the modules."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import q4core as q4
from q4_transformers import Q4Config
from q4_transformers.encoders import run_encoders_as_programs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the backend that runs programs."""
    monkeypatch.setenv("Q4_PLUGINS", "cpu-native,dialects,lm,nn,safetensors")
    q4.reset_registry()
    yield
    q4.reset_registry()


SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 60,
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (transformers.BertModel, {}),
    "xlm-roberta": (transformers.XLMRobertaModel, {"type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": (
        transformers.ModernBertModel,
        {"local_attention": 8, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1, "cls_token_id": 1}
        | {"sep_token_id": 2, "num_hidden_layers": 3},
    ),
    "classifier": (transformers.BertForSequenceClassification, {"num_labels": 1}),
}
LENGTHS = (1, 7, 30, 12)
# float32 sums in another order, over two or three blocks; a span that is off by one token changes 1e-2.
LIMIT = 1e-4


def load(name: str, folder: Any, **options: Any) -> Any:
    """Return a small random model of a kind, loaded in four bits."""
    kind, facts = KINDS[name]
    torch.manual_seed(3)
    kind(kind.config_class(**{**SIZES, **facts}, initializer_range=0.3)).eval().save_pretrained(folder)
    config = Q4Config(format="q4_0", activation_precision="exact", cache="off", **options)
    return kind.from_pretrained(folder, quantization_config=config)


def batch(**options: Any) -> dict[str, Any]:
    """Return a batch with padding behind its rows."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (len(LENGTHS), max(LENGTHS)), generator=draw)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.where(mask > 0, ids, 1), "attention_mask": mask, **options}


def forward_of(model: Any) -> Any:
    """Return what runs the programs of a model's encoder; None where nothing does."""
    return vars(getattr(model, model.base_model_prefix, model)).get("forward")


@pytest.mark.parametrize("name", KINDS)
def test_features_are_those_of_the_modules(name: str, tmp_path: Any) -> None:
    """What the model gives for a padded batch is what its modules give, and padding is 0; the program ran."""
    model, given = load(name, tmp_path), batch()
    encoder, mask = getattr(model, model.base_model_prefix, model), given["attention_mask"].bool()
    with torch.inference_mode():
        found = model(**given)
        made = forward_of(model)
        program = made._programs.find(30)
        assert program is not None, made._programs._why
        assert program.bound.record.calls == 1 + 3  # rows of the batch were compared first
        del encoder.forward
        wanted = model(**given)
    if name == "classifier":
        assert float((found.logits - wanted.logits).abs().max()) < LIMIT * float(wanted.logits.abs().max())
        return
    assert type(found) is type(wanted)
    right = wanted.last_hidden_state
    assert float((found.last_hidden_state - right)[mask].abs().max()) < LIMIT * float(right[mask].abs().max())
    assert not found.last_hidden_state[~mask].any()
    if getattr(encoder, "pooler", None) is not None:
        assert float((found.pooler_output - wanted.pooler_output).abs().max()) < LIMIT


def test_segments(tmp_path: Any) -> None:
    """Segments of pairs are looked up; those of the modules and of the program are the same."""
    model = load("bert", tmp_path)
    given = batch(token_type_ids=torch.arange(30).expand(4, -1) % 2)
    with torch.inference_mode():
        found = model(**given).last_hidden_state
        del model.forward
        wanted = model(**given).last_hidden_state
    mask = given["attention_mask"].bool()
    assert float((found - wanted)[mask].abs().max()) < LIMIT * float(wanted.abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": True},
        {"return_dict": False},
        {"position_ids": torch.arange(30)[None]},
        {"attention_mask": torch.ones(4, 30).tril(20).flip(1).long()},
        {"attention_mask": torch.ones(4, 30, 30)},
        {"inputs_embeds": torch.randn(4, 30, 64), "input_ids": None},
    ],
    ids=["hidden states", "tuple", "positions", "left padding", "mask of pairs", "embeddings"],
)
def test_calls_that_run_the_modules(options: dict[str, Any], tmp_path: Any) -> None:
    """What a program does not give is what the modules give, to the bit."""
    model, given = load("bert", tmp_path), batch(**options)
    with torch.inference_mode():
        model(**batch())
        calls = forward_of(model)._programs.find(30).bound.record.calls
        found = model(**given)
        assert forward_of(model)._programs.find(30).bound.record.calls == calls
        del model.forward
        wanted = model(**given)
    answers = [item if isinstance(item, tuple) else item.to_tuple() for item in (found, wanted)]
    for one, other in zip(*answers, strict=True):
        both = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(left, right) for left, right in both)


def test_gradients_hooks_and_changes(tmp_path: Any) -> None:
    """Gradients and hooks run the modules; a changed parameter is seen by the next program run."""
    model, given = load("bert", tmp_path), batch()
    with torch.inference_mode():
        first = model(**given).last_hidden_state
    assert model(**given).last_hidden_state.requires_grad
    seen: list[Any] = []
    hook = model.encoder.layer[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.inference_mode():
        model(**given)
        assert seen
        hook.remove()
        assert torch.equal(model(**given).last_hidden_state, first)
        model.embeddings.LayerNorm.weight.mul_(2)
        assert not torch.equal(model(**given).last_hidden_state, first)


def test_replaced_modules_are_seen(tmp_path: Any) -> None:
    """After layers were made dense, and one of them changed, the modules' numbers are given; so they are compiled."""
    model, given = load("bert", tmp_path), batch()
    with torch.inference_mode():
        first = model(**given).last_hidden_state
    model.dequantize()
    model.encoder.layer[0].output.dense.weight.data.zero_()
    with torch.inference_mode():
        assert float((model(**given).last_hidden_state - first).abs().max()) > LIMIT
    packed = load("bert", tmp_path / "again")
    with torch.no_grad():
        whole = torch.compile(packed, backend="eager", fullgraph=True)(**given).last_hidden_state
        mask = given["attention_mask"].bool()
        assert float((whole - packed(**given).last_hidden_state)[mask].abs().max()) < LIMIT


def test_programs_are_asked_for(tmp_path: Any) -> None:
    """``programs=False`` leaves the class's forward; another kind of model keeps its own; a copy has its own layers."""
    assert forward_of(load("bert", tmp_path, programs=False)) is None
    assert Q4Config(format="q4_0", programs=False).to_dict()["programs"] is False
    assert "programs" not in Q4Config(format="q4_0").to_dict()
    model = load("bert", tmp_path)
    other = copy.deepcopy(model)
    assert forward_of(other)._encoder is other
    with torch.inference_mode():
        assert torch.equal(model(**batch()).last_hidden_state, other(**batch()).last_hidden_state)
    plain = transformers.BertModel(transformers.BertConfig(**SIZES))
    run_encoders_as_programs(plain)
    assert forward_of(plain) is None


def test_features_that_differ_run_the_modules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder whose own code computes something else than its config says keeps its modules."""
    original = transformers.models.bert.modeling_bert.BertOutput.forward

    def other(self: Any, states: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return original(self, states, x) * 1.1

    monkeypatch.setattr(transformers.models.bert.modeling_bert.BertOutput, "forward", other)
    model, given = load("bert", tmp_path), batch()
    with torch.inference_mode():
        found = model(**given).last_hidden_state
        assert forward_of(model)._kind is False
        del model.forward
        assert torch.equal(found, model(**given).last_hidden_state)

"""Each key that a GGUF header may have, for each architecture: it changes the config, or the file is refused by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest
import test_lm_families as families
import torch

import q4core as q4
from q4_lm.models.gguf import ARCHITECTURES
from q4_lm.models.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from q4_lm import TransformerConfig

KINDS = {architecture.name: architecture for architecture in ARCHITECTURES}
OF_EXPERTS = {"expert_count": 9, "expert_used_count": 5}
OWN: dict[str, dict[str, Any]] = {
    "qwen3moe": OF_EXPERTS,
    "gpt-oss": {**OF_EXPERTS, "attention.sliding_window": 5},
    "gemma2": {"attention.sliding_window": 5},
    "olmo2": {"attention.sliding_window": 5},
}
"""What the header of a kind has besides."""
COMPUTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen3moe", "gpt-oss"), ("expert_count",)),
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
}
"""Of the options that others refuse, those that a kind computes."""
VALUES = (1, 7, 0.375, True, False, "other", [1, 0, 1])
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
OF_YARN = {f"rope.scaling.{name}" for name in ("yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier")}
UNSCALED = OF_YARN | {"rope.scaling.original_context_length"}
UNUSED = UNSCALED | {f"rope.{name}" for name in ("scaling.factor", "scale_linear", "scaling.yarn_ext_factor")}
BASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, UNSCALED),
    "none": ({"rope.scaling.type": "none"}, UNUSED),
    "linear": (LINEAR, UNSCALED | {"rope.scale_linear"}),
    "yarn": (YARN, {"rope.scale_linear"}),
}
"""Header, and the keys that have no effect there: of YaRN alone, of any scaling, or of which the newer counts."""
OF_WINDOWS = {"attention.sliding_window_pattern", "rope.freq_base_swa"}
"""Keys without effect where no block slides."""
IDLE = {
    "attention.layer_norm_epsilon": "these architectures have no such norm",
    **dict.fromkeys(
        (
            *("expert_chunk_feed_forward_length", "expert_feed_forward_length", "expert_gating_func"),
            *("expert_group_count", "expert_group_scale", "expert_group_used_count", "expert_shared_count"),
            *("expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm", "expert_weights_scale"),
            *("experts_per_group", "interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers"),
            *("moe_latent_size", "router_logit_softcapping"),
        ),
        "there are no experts",
    ),
    "pooling_type": "of the embeddings of a text, not of logits",
    "rope.scaling.finetuned": "how the weights came about",
    "tensor_data_layout": "how the file came about",
}
OF_BLOCKS_OF_EXPERTS = (
    *("interleave_moe_layer_step", "leading_dense_block_count", "moe_every_n_layers", "moe_latent_size"),
    "router_logit_softcapping",
)
PLAIN = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "embedding_scale": 1,
    "expert_gating_func": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 1,
    "logit_scale": 1,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_beta_slow": 1,
    "rope.scaling.factor": 1,
    "rope.scale_linear": 1,
    "rope.scaling.finetuned": True,
}
"""What a key says that changes nothing."""


def keys() -> list[str]:
    """Return every key of an architecture that the package ``gguf`` knows, and older ones."""
    found = {"rope.scale_linear"}
    groups: list[type] = [gguf.Keys]
    while groups:
        for value in vars(groups.pop()).values():
            if isinstance(value, type):
                groups.append(value)
            elif isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}.").replace("{dense}", "dense_2"))
    return sorted(found)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TransformerConfig]:
    """Return what reads the config of a kind's small file, with other metadata."""
    files: dict[str, Path] = {}

    def config(kind: str, **facts: Any) -> TransformerConfig:
        if kind not in files:
            files[kind] = tmp_path_factory.mktemp(kind) / "model.gguf"
            families.write(files[kind], kind)
        with q4.open(files[kind]) as checkpoint:
            own = {**OWN.get(kind, {}), **facts}
            values = {**checkpoint.metadata, **{f"{kind}.{name}": value for name, value in own.items()}}
            return KINDS[kind].config(checkpoint, Metadata(values, str(files[kind])))

    return config


def _often(turn: int, base: str) -> bool:
    """Say whether each run takes a kind's base: the plain one, and of the others, which all read alike, one in turn."""
    return base == "plain" or base == ("none", "linear", "yarn")[turn % 3]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        pytest.param(kind, base, marks=() if _often(turn, base) else pytest.mark.soak)
        for turn, kind in enumerate(KINDS)
        for base in BASES
    ],
)
def test_each_key(kind: str, base: str, read: Callable[..., TransformerConfig]) -> None:
    """A key is read, so that the config differs, or refused by name; none is passed over but those without effect."""
    facts, unused = BASES[base]
    plain = read(kind, **facts)
    unused = unused if plain.sliding_layers else unused | OF_WINDOWS
    idle = {key for key in IDLE if not (key.startswith("expert_") and plain.num_experts)}
    idle -= {"experts_per_group", *OF_BLOCKS_OF_EXPERTS} if plain.num_experts else set()
    idle -= {"rope.scaling.finetuned"} if kind == "granite" else set()
    served, passed_over = set(), []
    nameless: list[Any] = []
    for key in keys():
        for value in VALUES:
            try:
                found = read(kind, **{**facts, key: value})
            except q4.CheckpointError as error:
                nameless += [] if str(error.name).startswith("metadata ") else [(key, value)]
                continue
            served.add(key)
            if key not in {*unused, *idle} and found == plain and value != PLAIN.get(key, facts.get(key)):
                passed_over.append((key, value))
    assert (passed_over, nameless) == ([], [])
    assert served >= {"attention.layer_norm_rms_epsilon", "block_count", "rope.freq_base", *unused, *idle}


ZERO = (
    *("expert_count", "attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv"),
    *("attention.max_alibi_bias", "nextn_predict_layers", "attention.shared_kv_layers"),
    *("embedding_length_per_layer_input", "n_deepstack_layers", "rope.scaling.yarn_ext_factor"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_change_nothing(kind: str, read: Callable[..., TransformerConfig]) -> None:
    """What none of these architectures has loads where its number says that there is none, and is refused otherwise."""
    plain = read(kind)
    for key in [key for key in ZERO if key not in COMPUTED.get(kind, ())]:
        assert read(kind, **{key: 0}) == read(kind, **{key: 0.0}) == plain
        with pytest.raises(q4.CheckpointError) as caught:
            read(kind, **{key: 2})
        assert caught.value.name == f"metadata '{kind}.{key}'"


def test_experts_that_are_not_computed(read: Callable[..., TransformerConfig]) -> None:
    """Shared and grouped experts, other routers and wrong counts are refused by the key."""
    assert read("llama", **OF_EXPERTS).num_experts == 9
    for kind in ("llama", "qwen3moe", "gpt-oss"):
        bad = {"expert_shared_count": 1, "expert_group_count": 2, "expert_gating_func": 2, "expert_used_count": 10}
        for key, value in {**bad, "expert_weights_norm": False, "expert_weights_scale": 2.5}.items():
            with pytest.raises(q4.CheckpointError) as caught:
                read(kind, **{**OF_EXPERTS, key: value})
            assert caught.value.name == f"metadata '{kind}.{key}'"
    with pytest.raises(q4.CheckpointError, match="a positive whole number") as caught:
        read("qwen3moe", expert_count=0)
    assert caught.value.name == "metadata 'qwen3moe.expert_count'"


def test_caps_of_gemma2(read: Callable[..., TransformerConfig]) -> None:
    """Gemma 2 has caps of 50 and 30 where its header says none, and none where it says 0."""
    assert (read("gemma2").attn_logit_softcapping, read("gemma2").final_logit_softcapping) == (50, 30)
    none = read("gemma2", attn_logit_softcapping=0, final_logit_softcapping=0.0)
    assert (none.attn_logit_softcapping, none.final_logit_softcapping) == (None, None)


def test_keys_of_windows(read: Callable[..., TransformerConfig]) -> None:
    """Keys of sliding blocks are refused where blocks slide and the architecture does not compute what they say."""
    for key, value in (("attention.sliding_window_pattern", 2), ("rope.freq_base_swa", 500.0)):
        assert read("llama", **{"attention.sliding_window": 0, key: value}) == read("llama")
        with pytest.raises(q4.CheckpointError) as caught:
            read("llama", **{"attention.sliding_window": 5, key: value})
        assert caught.value.name == f"metadata 'llama.{key}'"


def test_a_window_of_the_whole_context(read: Callable[..., TransformerConfig]) -> None:
    """Gemma 3's sliding blocks keep their own rotary base where the window hides nothing."""
    small = read("gemma3")
    whole = read("gemma3", **{"attention.sliding_window": small.max_position_embeddings})
    assert whole.sliding_layers == small.sliding_layers != ()
    assert whole.local_rope_theta == small.local_rope_theta


def test_a_key_that_nobody_knows(read: Callable[..., TransformerConfig]) -> None:
    """A key of a later format is refused by its name, with its value; those of other architectures are passed over."""
    with pytest.raises(q4.CheckpointError, match=r"not computed here") as caught:
        read("llama", **{"attention.novelty": 3.5})
    assert (caught.value.name, caught.value.value) == ("metadata 'llama.attention.novelty'", 3.5)
    assert read("qwen3") == read("qwen3")


def test_scaling_without_its_type(read: Callable[..., TransformerConfig]) -> None:
    """A factor alone is linear scaling, as llama.cpp has it."""
    assert read("gemma3", **{"rope.scaling.factor": 8.0}).rope_scaling.kind == "linear"
    assert read("gemma3", **{"rope.scaling.factor": 8.0}).rope_scaling.factor == 8


class Tensors(dict[str, Any]):
    """An opened file of dense tensors alone."""

    def __init__(self, **dense: torch.Tensor) -> None:
        super().__init__()
        self.dense = dense
        self.schema = q4.Schema(layers={}, dense=tuple(dense))


SIZES = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "vocab_size": 8}
HEADS = {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
LONG = {"rope_factors_long.weight": torch.full((4,), 2.0), "rope_factors_short.weight": torch.ones(4)}


def phi3(tensors: dict[str, torch.Tensor], **facts: Any) -> TransformerConfig:
    """Return the config of a Phi-3 of these tensors."""
    values = {f"phi3.{name}": value for name, value in {**SIZES, **HEADS, **facts}.items()}
    file: Any = Tensors(**tensors)
    return KINDS["phi3"].config(file, Metadata(values, "phi3.gguf"))


def test_long_rope() -> None:
    """Both factors make LongRoPE, with or without its type; its amplitude is 1 where none is said."""
    for facts in ({}, {"rope.scaling.type": "longrope"}):
        scaling = phi3(LONG, **facts, **{"rope.scaling.original_context_length": 16}).rope_scaling
        assert (scaling.kind, scaling.factor, scaling.amplitude()) == ("longrope", 4.0, 1.0)
        assert (scaling.short_factor, scaling.long_factor) == ((1.0,) * 4, (2.0,) * 4)


def test_long_rope_of_no_type() -> None:
    """Where the type is none, a factor of linear scaling and YaRN's options change nothing of LongRoPE's factors."""
    facts = {"rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 16.0}
    assert phi3(LONG, **{"rope.scaling.type": "none"}, **facts) == phi3(LONG)
    assert phi3(LONG, **{"rope.scaling.factor": 1.0}) == phi3(LONG)


BROKEN: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "one factor alone": (("rope_factors_short.weight",), {}, "tensor 'rope_factors_long.weight'"),
    "no factors": ((), {"rope.scaling.type": "longrope"}, "tensor 'rope_factors_long.weight'"),
    "another type": ((*LONG,), {"rope.scaling.type": "yarn"}, "metadata 'phi3.rope.scaling.type'"),
    "a factor besides": ((*LONG,), {"rope.scaling.factor": 4.0}, "metadata 'phi3.rope.scaling.factor'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_long_rope(case: str) -> None:
    """Half of LongRoPE, or LongRoPE with another scaling, is refused by what is wrong."""
    names, facts, name = BROKEN[case]
    with pytest.raises(q4.CheckpointError) as caught:
        phi3({key: LONG[key] for key in names}, **facts)
    assert caught.value.name == name

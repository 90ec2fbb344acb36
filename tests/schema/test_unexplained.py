"""Packed integers next to scales that no dialect explains: an error of its own kind, never dense tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import q4core as q4
from tests.support.unread import HALF, I8, I16, I32, U8, U32, UNREAD, Tensors, add_tensors, ints, layers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.usefixtures("has_dialects")
def test_packed_integers_are_never_dense(name: str, tmp_path: Path) -> None:
    """Whatever wrote them, with q4-dialects or without: an error that counts the layers and names one."""
    path = tmp_path / "model.safetensors"
    save_file(layers(UNREAD[name], "a", "b.c"), path)
    with pytest.raises(q4.SchemaError, match="2 layers") as caught:
        q4.open(path)
    assert "b.c" in str(caught.value)
    schema = caught.value.schema
    assert {problem.key for problem in schema.unsupported} == {"a", "b.c"}
    assert set(schema.dense) == {"a.bias", "norm.weight"}


@pytest.mark.parametrize(("name", "keys"), [("of nobody", "codes_hi, row_scales"), ("bitnet", "weight, weight_scale")])
def test_keys_of_nobody_are_an_error_of_their_own(name: str, keys: str, tmp_path: Path) -> None:
    """The error has a kind of its own, lists the keys, and says what to do."""
    path = tmp_path / "model.safetensors"
    save_file(layers(UNREAD[name], "a"), path)
    with pytest.raises(q4.UnknownDialectError, match=keys) as caught:
        q4.open(path)
    assert caught.value.code == "unknown_dialect"
    assert caught.value.hint
    assert [(problem.code, problem.key) for problem in caught.value.schema.unsupported] == [("unexplained", "a")]


@pytest.mark.parametrize(
    ("name", "owner"),
    [(name, name.removesuffix("-int8")) for name in UNREAD if name not in {"of nobody", "bitnet"}],
)
def test_known_packings_are_named(name: str, owner: str) -> None:
    """With q4-dialects each is named as what it is; SVDQuant is neither GPTQ nor AWQ."""
    schema = q4.detect(layers(UNREAD[name], "a"))
    assert schema is not None
    assert [(problem.code, problem.value) for problem in schema.unsupported] == [("unsupported", owner)]


def test_next_to_layers_that_are_read(tmp_path: Path) -> None:
    """Others are read; the unexplained layer is listed, is not in the checkpoint, and asking for it is an error."""
    path = add_tensors(tmp_path / "model.safetensors", layers(UNREAD["of nobody"], "a"))
    with q4.open(path) as checkpoint:
        assert list(checkpoint) == ["proj"]
        assert set(checkpoint.dense) == {"a.bias", "norm.weight"}
        with pytest.raises(q4.CheckpointError, match="codes_hi, row_scales"):
            checkpoint["a"]


PACKED: dict[str, Tensors] = {
    "gpt-oss": {"w_blocks": ints(U8, 2, 16, 2, 16), "w_scales": ints(U8, 2, 16, 2), "w_bias": HALF},
    "mlx-mxfp4": {"weight": ints(U32, 16, 8), "scales": ints(U8, 16, 2)},
    "modelopt-mxfp4": {"weight": ints(U8, 16, 32), "weight_scale": ints(U8, 16, 2)},
    "quip#": {"Qidxs": ints(I16, 16, 12), "SU": torch.ones(96), "SV": torch.ones(16), "Wscale": torch.ones(())},
    "hqq": {"W_q": ints(U8, 36, 64), "scale": torch.ones(72, 1), "zero": torch.ones(72, 1), "nbits": ints(I32)},
    "hqq-3": {"W_q": ints(I32, 26, 64), "scale": torch.ones(256, 1), "zero": torch.ones(256, 1)},
    "exl3": {"trellis": ints(I16, 6, 4, 48), "suh": torch.ones(96), "svh": torch.ones(64)},
    "per tensor": {"weight": ints(I8, 16, 64), "weight_scale": torch.ones(()), "input_scale": torch.ones(())},
    "two tensors": {"codes_hi": ints(U8, 16, 32), "codes_lo": ints(U8, 16, 32), "row_scale": torch.ones(16)},
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.usefixtures("has_dialects")
def test_extents_of_real_packings(name: str) -> None:
    """Scales of whole tensors, of 8 bits, or with one extent for several codes are scales of packed layers, too."""
    beside = {"other.weight": ints(U8, 8, 16), "other.weight_scale": torch.ones(8)}
    for tensors in (layers(PACKED[name], "a"), {**beside, **layers(PACKED[name], "a")}):
        schema = q4.detect(tensors)
        assert schema is not None
        found = [*schema.layers, *(problem.key for problem in schema.unsupported)]
        assert any(key.startswith("a") for key in found)
        assert all(tensors[key].is_floating_point() for key in schema.dense)


DENSE: dict[str, Tensors] = {
    "Swin 2": {
        "attn.logit_scale": torch.ones(4, 1, 1),
        "attn.relative_position_index": ints(I32, 64, 64),
        "attn.relative_coords_table": torch.ones(1, 15, 15, 2),
        "attn.attn_mask": ints(U8, 64, 64),
    },
    "T5-like buckets": {"attn.logit_scale": torch.ones(8, 1, 1), "attn.rel_pos_bucket": ints(I32, 64, 64)},
    "CLIP": {
        "logit_scale": torch.ones(()),
        "text.embeddings.position_ids": ints(I32, 1, 77),
        "text.embeddings.scale": torch.ones(77),
    },
    "LeViT": {"attn.scale": torch.ones(4), "attn.attention_bias_idxs": ints(I32, 16, 16)},
    "GPT-2": {"attn.bias": ints(U8, 1, 1, 8, 8), "attn.scale": torch.ones(1), "attn.c_attn.weight": torch.ones(4, 4)},
    "a causal mask": {"attn.causal_mask": ints(U8, 8, 8), "attn.scale": torch.ones(8)},
    "a table of another module": {"a.scale": torch.ones(4), "a.b.table": ints(U8, 4, 4)},
    "BatchNorm": {
        "norm.weight": torch.ones(4),
        "norm.running_mean": torch.ones(4),
        "norm.scale": torch.ones(4),
        "norm.num_batches_tracked": ints(I32, 1, 1),
    },
    "fake quantisation": {
        "fc.weight": torch.ones(4, 8),
        "fc.weight_scale": torch.ones(4, 1),
        "fc.weight_zero_point": ints(I8, 4, 1),
        "fc.weight_fake_quant.scale": torch.ones(4),
        "fc.weight_fake_quant.zero_point": ints(I32, 4),
        "fc.weight_fake_quant.fake_quant_enabled": ints(U8, 1),
        "fc.weight_fake_quant.observer_enabled": ints(U8, 1),
        "fc.act.scale": torch.ones(1, 4),
        "fc.act.zero_point": ints(I32, 1, 4),
    },
    "VQ-VAE": {
        "vq.codebook": torch.ones(16, 4),
        "vq.codes": ints(torch.int64, 8, 8),
        "vq.code_count": ints(I32, 16, 1),
        "vq.ema.codebook": torch.ones(16, 4),
        "vq.ema.cluster_size": ints(I32, 16, 1),
    },
    "EnCodec": {
        "q.codebook": torch.ones(16, 4),
        "q.embed_avg": torch.ones(16, 4),
        "q.inited": ints(U8, 1, 1),
        "q.cluster_size": torch.ones(16),
    },
    "averaged weights": {
        "m.weight": torch.ones(16, 4),
        "m.ema_scale": torch.ones(16),
        "m.ema_hits": ints(I32, 16, 4),
    },
    "an image": {"m.scale": torch.ones(()), "m.image": ints(U8, 3, 8, 8)},
    "an image by channels": {"m.scale": torch.ones(3, 1, 1), "m.images": ints(U8, 2, 3, 8, 8)},
    "a mesh": {"body.scale": torch.ones(3), "body.faces": ints(I32, 12, 3)},
    "unrelated sizes": {"m.scale": torch.ones(5), "m.history": ints(I16, 7, 11)},
    "positions": {"embed.position_ids": ints(I32, 1, 8), "embed.zeros": torch.ones(4)},
    "q4_nn's folders": {"proj.weight:qdata": ints(U8, 16, 32), "proj.weight:scale": HALF},
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.usefixtures("has_dialects")
def test_integers_that_are_no_codes_stay_dense(name: str) -> None:
    """Masks, positions, counts, images and tables are dense, whatever scale their module has."""
    assert q4.detect(DENSE[name]) is None


@pytest.mark.parametrize("side", ["scales", "s", "delta"])
@pytest.mark.parametrize("codes", ["weight", "packed", "indices"])
@pytest.mark.parametrize("stem", ["", "proj."])
def test_names_of_any_sort_are_found(stem: str, codes: str, side: str) -> None:
    """Also without a module, as indices into a code book, and next to scales of one letter."""
    stored = {f"{stem}{codes}": torch.ones(64, 32, dtype=torch.uint8), f"{stem}{side}": torch.ones(64, 2)}
    schema = q4.detect({**stored, "norm.weight": torch.ones(8)}, dialects=())
    assert schema is not None
    assert [problem.code for problem in schema.unsupported] == ["unexplained"]
    assert schema.dense == ("norm.weight",)


def test_integers_of_data_are_left_alone() -> None:
    """Images, labels and numbers of rows are what they are, whatever is next to them."""
    stored = {
        "images": torch.ones(64, 32, 32, dtype=torch.uint8),
        "scales": torch.ones(64, 2),
        "ids": torch.ones(64, 2),
    }
    assert q4.detect({**stored, "x.index": torch.ones(64, 2, dtype=torch.int32), "x.scale": torch.ones(3)}) is None

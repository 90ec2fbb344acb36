"""Tensor parallelism of transformers on packed layers: every rank's part, or an error before a tensor is loaded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_models import IDS, dense_model, error, load, logits, packed, save_by_q4
from torch import distributed
from transformers.distributed.configuration_utils import DistributedConfig

import q4_transformers
import q4core as q4
from q4_transformers.parallelism import Ranks, check_heads, is_offered

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.peer,
    pytest.mark.usefixtures("quiet_transformers", "process_group"),
    pytest.mark.filterwarnings("ignore:(Passing `tp_plan`|`enable_expert_parallel`):FutureWarning"),
]
IS_OFFERED = is_offered()
"""Whether this release has hooks that packed layers follow."""
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Make this process the only one of a group, as ``torchrun`` does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        distributed.init_process_group("gloo", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    # 128 / 3 = 43, 43 and 42: cuts within blocks of 64, and biases that the ranks share or add once
    "uneven": (
        3,
        "Llama",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    # 96 in-features: blocks of 64 that run across rows
    "experts": (
        2,
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16},
    ),
}


@pytest.mark.skipif(
    not IS_OFFERED, reason="this release has no hooks that packed layers follow; test_refused has its error"
)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_make_the_whole(name: str, tmp_path: Path) -> None:
    """Logits and greedy tokens of all ranks are the dequantised model's; the saved checkpoint is the whole one."""
    size, kind, options = MODELS[name]
    dense = save_by_q4(tmp_path / "model", "bitsandbytes", "nf4", kind, **options)
    command = ["-m", "torch.distributed.run", "--nproc_per_node", str(size), "--standalone"]
    variables = {
        key: value
        for key, value in os.environ.items()
        if key not in {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"}
    }
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    program = [str(HERE / "parallel_rank.py"), str(tmp_path / "model"), str(tmp_path)]
    subprocess.run([sys.executable, *command, *program], env=variables, check=True)
    ranks = json.loads((tmp_path / "ranks.json").read_text(encoding="utf-8"))
    expected = logits(dense)[0].double()
    tokens = dense.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    for rank in ranks:
        found = torch.tensor(rank["logits"], dtype=torch.float64)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
        assert rank["tokens"] == tokens
        assert rank["explained"] == len(rank["shapes"]) > 0
    shapes, whole = ranks[0]["shapes"], dict(dense.named_modules())
    plain = [path for path in shapes if path in whole]  # experts are merged there
    local = sum(shapes[path][0] * shapes[path][1] for path in plain)
    assert local < 0.75 * sum(whole[path].weight.numel() for path in plain)
    again = load(tmp_path / "saved")
    assert error(again, dense) < 1e-5
    assert packed(again)


def _mesh() -> Any:
    return distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


REFUSED: dict[str, Any] = {
    "own plan": lambda: {"tp_plan": {"model.layers.*.mlp.down_proj": "rowwise"}},
    "device_mesh": lambda: {"device_mesh": _mesh()},
}
OLD: dict[str, Any] = {
    "tp_plan": lambda: {"tp_plan": "auto"},
    "tp_plan and tp_size": lambda: {"tp_plan": "auto", "tp_size": 1},
    "distributed_config": lambda: {"distributed_config": DistributedConfig(enable_expert_parallel=True)},
}
"""What releases without such hooks refuse, too, and the others load whole in one process."""


@pytest.mark.parametrize("way", [*REFUSED, *OLD])
@pytest.mark.parametrize("is_dense", [False, True])
def test_refused(way: str, is_dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed checkpoint, and a dense one that would be packed, are refused, and no layer is read."""
    if is_dense:
        dense_model().save_pretrained(tmp_path)
    else:
        save_by_q4(tmp_path, "bitsandbytes", "nf4")
    options, config = (REFUSED | OLD)[way](), {"format": "nf4"} if is_dense else {}
    if IS_OFFERED and way in OLD:
        assert packed(load(tmp_path, config=config, **options))
        return
    monkeypatch.setattr(q4, "open", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(q4.ConfigError) as caught:
        load(tmp_path, config=config, **options)
    assert caught.value.hint


def test_load_is_refused_by_name(tmp_path: Path) -> None:
    """``load`` and ``config_for`` say which argument it is."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    with pytest.raises(q4.ConfigError, match="tp_plan must be"):
        q4_transformers.load(tmp_path, tp_plan={"lm_head": "colwise"})
    with pytest.raises(q4.ConfigError, match="device_mesh must be None"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, config=q4_transformers.config_for(tmp_path), device_mesh=_mesh()
        )


def test_heads_that_are_not_divided() -> None:
    """A number of processes that divides no heads is refused with both numbers."""
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=2)
    check_heads(config, Ranks(0, 2))
    with pytest.raises(q4.ConfigError, match="num_key_value_heads=2, got 4"):
        check_heads(config, Ranks(0, 4))


@pytest.mark.parametrize(
    ("version", "offered"), [("5.23.0", True), ("5.22.2", False), ("5.24.0", False), ("6.0", False)]
)
def test_releases(version: str, offered: bool) -> None:
    """Only releases that were tried split packed layers."""
    assert is_offered(version) is offered


def test_parts() -> None:
    """Parts are torch's chunks, and no process is left without one."""
    parts = [Ranks(rank, 3).part(128) for rank in range(3)]
    assert [len(part) for part in parts] == [len(chunk) for chunk in torch.arange(128).chunk(3)]
    assert [place for part in parts for place in part] == list(range(128))
    with pytest.raises(q4.ConfigError, match="tp_size"):
        Ranks(0, 4).part(6)


def test_whole_models_load_in_each_process(tmp_path: Path) -> None:
    """Without such an argument, a model loads whole in a process of a group."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    assert packed(load(tmp_path))
    assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"])

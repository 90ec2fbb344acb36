"""Tensor parallelism of transformers on packed layers: refused before a tensor is loaded, however it is asked for."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_models import dense_model, load, packed, save_by_q4
from torch import distributed
from transformers.distributed.configuration_utils import DistributedConfig

import q4_transformers
import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.peer,
    pytest.mark.usefixtures("quiet_transformers", "process_group"),
    pytest.mark.filterwarnings("ignore:(Passing `tp_plan`|`enable_expert_parallel`):FutureWarning"),
]


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


def _mesh() -> Any:
    return distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def _config() -> Any:
    sizes = {"tp_size", "fsdp_size", "pp_size"} & {field.name for field in dataclasses.fields(DistributedConfig)}
    return DistributedConfig(enable_expert_parallel=True, **dict.fromkeys(sizes, 1))


WAYS: dict[str, Any] = {
    "tp_plan": lambda: {"tp_plan": "auto"},
    "own plan": lambda: {"tp_plan": {"model.layers.*.mlp.down_proj": "rowwise"}},
    "tp_plan and tp_size": lambda: {"tp_plan": "auto", "tp_size": 1},
    "device_mesh": lambda: {"device_mesh": _mesh()},
    "device_mesh and tp_plan": lambda: {"tp_plan": "auto", "device_mesh": _mesh()},
    "distributed_config": lambda: {"distributed_config": _config()},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_dense", [False, True])
def test_refused(way: str, is_dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed checkpoint, and a dense one that would be packed, are refused, and no layer is read."""
    if is_dense:
        dense_model().save_pretrained(tmp_path)
    else:
        save_by_q4(tmp_path, "bitsandbytes", "nf4")
    options, config = WAYS[way](), {"format": "nf4"} if is_dense else {}
    monkeypatch.setattr(q4, "open", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(q4.ConfigError, match="must be None, as packed layers are not split over processes"):
        load(tmp_path, config=config, **options)


def test_load_is_refused_by_name(tmp_path: Path) -> None:
    """``load`` and ``config_for`` say which argument it is."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    with pytest.raises(q4.ConfigError, match="tp_plan must be None"):
        q4_transformers.load(tmp_path, tp_plan="auto")
    with pytest.raises(q4.ConfigError, match="device_mesh must be None"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, config=q4_transformers.config_for(tmp_path), device_mesh=_mesh()
        )


def test_whole_models_load_in_each_process(tmp_path: Path) -> None:
    """Without such an argument, a model loads whole in a process of a group."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    assert packed(load(tmp_path))
    assert torch.distributed.get_world_size() == int(os.environ["WORLD_SIZE"])

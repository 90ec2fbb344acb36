"""Models split over processes: which of transformers' ways packed layers follow, found before a tensor is loaded.

transformers splits parameters by a plan, and a packed weight is none. So packed layers split themselves
(``split.py``), where a release's hooks call a linear layer on this process's part of x; elsewhere it is an error.
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import transformers

from q4core import ConfigError

__all__ = ["TRIED", "Ranks", "check_heads", "find_ranks", "is_offered"]

TRIED = ("5.23",)
"""Releases of transformers whose hooks packed layers follow; others hook in other ways, which gave wrong tokens."""

_ARGUMENTS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")
_ONE = ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
_WHAT = "from_pretrained"


@attrs.frozen
class Ranks:
    """The processes of a tensor-parallel model.

    Args:
        rank: This one's number.
        size: How many there are.
    """

    rank: int
    size: int

    def part(self, total: int) -> range:
        """Return this process's part of some features: as torch splits a tensor, the last ones may have fewer.

        Raises:
            ConfigError: Some process would have none.
        """
        step = -(-total // self.size)
        if step * (self.size - 1) >= total:
            rule = f"at most {total}, of which each process has one"
            raise ConfigError(_WHAT, name="tp_size", rule=rule, value=self.size)
        return range(self.rank * step, min((self.rank + 1) * step, total))


def find_ranks() -> Ranks | None:
    """Return the processes over which the current call of ``from_pretrained`` splits its model; None without.

    No release of transformers passes its arguments on to a quantizer, so they are looked up in its frame.

    Raises:
        ConfigError: It asks for another way than the model's own tensor-parallel plan on CPUs, or this release has no
            hooks that packed layers can follow.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != _WHAT:
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    name = next((name for name in _ARGUMENTS if given.get(name) is not None), None)
    if name is None:
        return None
    if not is_offered():
        rule = f"None: packed layers follow the hooks of transformers {', '.join(TRIED)}"
        hint = f"pip install 'transformers=={TRIED[-1]}.*', or leave it away: each process then loads the whole model."
        raise ConfigError(_WHAT, name=name, rule=rule, value=given[name], hint=hint)
    asked = given.get("distributed_config")
    if asked is None:
        hint = "Use tp_plan='auto' under torchrun, which makes the mesh."
        raise ConfigError(_WHAT, name=name, rule="None, or with a tp_plan", value=given[name], hint=hint)
    if isinstance(asked.tp_plan, dict) and (asked.tp_plan or asked.tp_size > 1):
        hint = "Use tp_plan='auto': packed layers follow the model's own plan."
        raise ConfigError(_WHAT, name="tp_plan", rule="'auto'", value=asked.tp_plan, hint=hint)
    for item in _ONE:
        if (value := getattr(asked, item, None) or 1) > 1:
            hint = "Packed layers are split by tensor parallelism alone: tp_plan='auto'."
            raise ConfigError(_WHAT, name=item, rule="1", value=value, hint=hint)
    return None if asked.tp_size == 1 else _ranks(given.get("mesh_manager"))


def is_offered(version: str = transformers.__version__) -> bool:
    """Return whether packed layers can be split with a release of transformers."""
    return ".".join(version.split(".")[:2]) in TRIED


def _ranks(meshes: Any) -> Ranks:
    mesh = meshes.get_mesh("tp")
    if mesh.device_type != "cpu":
        hint = "Leave tp_plan away on GPUs: each process then loads the whole model on its own."
        raise ConfigError(_WHAT, name="device of the mesh", rule="cpu", value=mesh.device_type, hint=hint)
    return Ranks(mesh.get_local_rank(), mesh.size())


def check_heads(config: Any, ranks: Ranks) -> None:
    """Raise a ``ConfigError`` if heads of attention are not divided among the processes.

    transformers gives each process whole heads, and none of them twice.

    Raises:
        ConfigError: A number of heads is no multiple of the number of processes.
    """
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, name, None)
        if isinstance(count, int) and count % ranks.size:
            hint = f"Start a number of processes that divides {count}; vLLM (q4-vllm) has heads on several ranks."
            raise ConfigError(_WHAT, name="tp_size", rule=f"a divisor of {name}={count}", value=ranks.size, hint=hint)

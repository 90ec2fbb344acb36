"""Inventories of other projects' documentation: the names that our reference links to, for builds without a network."""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["NAMES", "PROJECTS", "write"]

BUILT = Path(__file__).parents[2] / "build" / "inventories"
PROJECTS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "transformers": "https://huggingface.co/docs/transformers/",
}
"""Project → where its documentation lies. That of transformers has no inventory of its own."""
_PYTHON_CLASSES = {
    "pathlib.Path": "library/pathlib.html",
    "enum.Enum": "library/enum.html",
    "enum.IntEnum": "library/enum.html",
    "enum.Flag": "library/enum.html",
    "os.PathLike": "library/os.html",
    "types.ModuleType": "library/types.html",
    "collections.abc.Callable": "library/collections.abc.html",
    "collections.abc.Iterable": "library/collections.abc.html",
    "collections.abc.Iterator": "library/collections.abc.html",
    "collections.abc.Mapping": "library/collections.abc.html",
    "collections.abc.Sequence": "library/collections.abc.html",
    **dict.fromkeys(("bytes", "dict", "frozenset", "list", "set", "str", "tuple"), "library/stdtypes.html"),
    **dict.fromkeys(("bool", "float", "int", "object"), "library/functions.html"),
}
_PYTHON_ERRORS = (
    "AttributeError",
    "BufferError",
    "Exception",
    "FileNotFoundError",
    "ImportError",
    "KeyError",
    "LookupError",
    "MemoryError",
    "NotImplementedError",
    "OSError",
    "RuntimeError",
    "RuntimeWarning",
    "TimeoutError",
    "TypeError",
    "UserWarning",
    "ValueError",
    "Warning",
)
_TORCH_GENERATED = (
    "torch.nn.Embedding",
    "torch.nn.Linear",
    "torch.nn.Module",
    "torch.nn.Sequential",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.Generator",
    "torch.cuda.CUDAGraph",
    "torch.cuda.Event",
    "torch.cuda.Stream",
    "torch.export.ExportedProgram",
)
_TORCH_CLASSES = {
    "torch.Tensor": "tensors.html",
    "torch.Size": "size.html",
    "torch.device": "tensor_attributes.html",
    "torch.dtype": "tensor_attributes.html",
    "torch.layout": "tensor_attributes.html",
    "torch.utils.data.DataLoader": "data.html",
    "torch.utils.data.Dataset": "data.html",
    "torch.utils.data.IterableDataset": "data.html",
    "torch.utils.data.TensorDataset": "data.html",
    "torch._C.Generator": "generated/torch.Generator.html#torch.Generator",
    "torch.nn.utils.rnn.PackedSequence": "generated/torch.nn.utils.rnn.PackedSequence.html",
    "torch.nn.parameter.Parameter": "generated/torch.nn.parameter.Parameter.html",
    "torch.nn.modules.module.Module": "generated/torch.nn.Module.html#torch.nn.Module",
    **{name: f"generated/{name}.html" for name in _TORCH_GENERATED},
}
_TRANSFORMERS_CLASSES = {
    "transformers.AutoModelForCausalLM": "model_doc/auto",
    "transformers.PretrainedConfig": "main_classes/configuration",
    "transformers.PreTrainedConfig": "main_classes/configuration",
    "transformers.PreTrainedModel": "main_classes/model",
    "transformers.PreTrainedTokenizerBase": "main_classes/tokenizer",
    "transformers.quantizers.HfQuantizer": "main_classes/quantization",
}


def _entries(role: str, places: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (role, place if "#" in place else f"{place}#{name}") for name, place in places.items()}


NAMES: dict[str, dict[str, tuple[str, str]]] = {
    "python": {
        **_entries("class", _PYTHON_CLASSES),
        **_entries("exception", dict.fromkeys(_PYTHON_ERRORS, "library/exceptions.html")),
    },
    "torch": _entries("class", _TORCH_CLASSES),
    "transformers": _entries("class", _TRANSFORMERS_CLASSES),
}
"""Project → name → its kind and its place under the project's address."""


def write(project: str, folder: Path = BUILT) -> Path:
    """Write the inventory of a project in Sphinx's form, and return where it is."""
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The remainder is compressed by zlib.\n"
    lines = (f"{name} py:{role} 1 {place} -\n" for name, (role, place) in sorted(NAMES[project].items()))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project}.inv"
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return path

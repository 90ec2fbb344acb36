"""q4_lm's decoder over the weights of a decoder of transformers, found by its parts, and the proof that both agree."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from q4_lm import config_from_hf
from q4_lm.models.hf_names import fused_parts, to_hf_name
from q4_lm.models.transformer import TransformerDecoder, empty_transformer
from q4_nn.blocks.cache import KVCache
from q4_nn.blocks.joined import JoinedLinear
from q4_programs import EmissionError
from q4_transformers.linear import HfLinear
from q4_transformers.names import CACHE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_nn.blocks.rotary import RotaryEmbedding

__all__ = ["check_twin", "make_twin"]

_PROBE = 12
"""Tokens of the proof, after which one more is taken."""
_FAR = 8
"""Positions, up to the end of the context, at which the turns are compared."""
_SHARE = 2.0**-9
"""How far two results of a block may lie apart: logits of 2⁹, summed in another order, by 2⁻¹⁴; 32 times as far."""


def make_twin(decoder: Any) -> TransformerDecoder:
    """Return q4_lm's decoder of a decoder of transformers: over the same layers and parameters, without a head.

    Args:
        decoder: Has ``config``, ``embed_tokens``, ``layers`` and ``norm``.

    Raises:
        Q4Error: q4_lm has no such decoder, a part is missing or of another size, or one is left over.
    """
    twin = empty_transformer(config_from_hf(decoder.config.to_dict()))
    if not isinstance(twin, TransformerDecoder):
        _refuse("it is an encoder")
    for name, module in decoder.named_modules():
        if name and "forward" in vars(module):
            _refuse(f"the forward pass of {name} was replaced")
    for name, parameter in decoder.named_parameters():
        if (parameter.dtype, parameter.device.type) != (torch.float32, "cpu"):
            _refuse(f"{name} is {parameter.dtype} on {parameter.device}, not float32 on the CPU")
    twin.lm_head = nn.Identity()
    theirs = dict(decoder.named_modules())
    _join(twin, theirs)
    for name, module in list(twin.named_modules()):
        is_joined = isinstance(module, (HfLinear, JoinedLinear)) or "_proj.layers." in name
        if name and not is_joined and (isinstance(module, nn.Linear) or [*module.parameters(recurse=False)]):
            if (found := theirs.get(_name(name, twin))) is None:
                _refuse(f"it has no {_name(name, twin)}")
            _fill(twin, name, module, found)
    used = {id(item) for item in (*twin.parameters(), *twin.modules())}
    parts = [*decoder.named_parameters(), *((name, item) for name, item in theirs.items() if type(item) is HfLinear)]
    if left := [name for name, item in parts if id(item) not in used]:
        _refuse(f"q4_lm's decoder has no {left[0]}")
    twin.eval()
    return twin


def _join(twin: TransformerDecoder, theirs: Mapping[str, nn.Module]) -> None:
    """Put the layers that transformers has joined in the place of their parts."""
    for name, module in list(twin.named_modules()):
        for joined, names in getattr(module, "joins", {}).items():
            if (found := theirs.get(_name(f"{name}.{joined}", twin))) is not None:
                rows = tuple(fused_parts(f"{name}.{joined}", twin.config).values())
                _check_linear(found, (sum(rows), getattr(module, names[0]).in_features), name)
                for part in names:
                    setattr(module, part, None)
                setattr(module, joined, JoinedLinear([found], [rows]))


def _name(name: str, twin: TransformerDecoder) -> str:
    return to_hf_name(f"{name}.", twin.config).removesuffix(".").removeprefix("model.")


def _fill(twin: TransformerDecoder, name: str, module: Any, found: Any) -> None:
    """Put what a module of transformers has in the place of one of the twin's."""
    if isinstance(module, nn.Linear):
        _check_linear(found, (module.out_features, module.in_features), name)
        if (found.bias is None) is not (module.bias is None):
            _refuse(f"{name} has a bias in one of both")
        twin.set_submodule(name, found)
        return
    own = dict(module.named_parameters(recurse=False))
    given = dict(found.named_parameters(recurse=False))
    if {key: item.shape for key, item in own.items()} != {key: item.shape for key, item in given.items()}:
        _refuse(f"{name} is {type(found).__name__} with other parameters")
    for key, item in given.items():
        setattr(module, key, item)


def _check_linear(found: Any, shape: tuple[int, int], name: str) -> None:
    if type(found) not in {HfLinear, nn.Linear} or (found.out_features, found.in_features) != shape:
        _refuse(f"{name} is {type(found).__name__}, not a linear layer of {shape[0]}×{shape[1]}")


class _StandIn(nn.Module):
    """In the place of a packed layer: [..., N] from [..., K], drawn in-features times factors, other ones in each."""

    def __init__(self, layer: HfLinear, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self._order = torch.randint(layer.in_features, (layer.out_features,), generator=random)
        # Logits and activations reach beyond where their functions are straight.
        self._factors = 2 * torch.randn(layer.out_features, generator=random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features, in a thousandth of a product's time."""
        return x[..., self._order] * self._factors


def _sketch(module: nn.Module, made: dict[nn.Module, nn.Module]) -> Any:
    """Return a copy of a module over its parameters, in which stand-ins are in the places of packed layers."""
    if module not in made:
        made[module] = found = _StandIn(module, len(made)) if type(module) is HfLinear else copy.copy(module)
        # Hooks, and buffers that a pass adds, are the copy's own.
        vars(found).update({name: item.copy() for name, item in vars(found).items() if isinstance(item, dict)})
        children = vars(found)["_modules"]
        children.update({name: _sketch(child, made) for name, child in children.items() if child is not None})
    return made[module]


@torch.no_grad()
def check_twin(decoder: Any, twin: TransformerDecoder) -> None:
    """Compare each block of a twin with the block of transformers, on the same inputs; the turns up to the context.

    Both are copies in which the same stand-ins are in the places of the same packed layers: what is shown is what
    happens between the products, which are those of the same layers.

    Raises:
        EmissionError: They differ.
    """
    made: dict[nn.Module, nn.Module] = {}
    decoder, twin = _sketch(decoder, made), _sketch(twin, made)
    seen: list[Any] = []  # the input of each block, its result and its turn; the same of the last norm

    def note(_: Any, given: Any, named: Any, result: Any) -> None:
        x = given[0] if given else named["hidden_states"]
        seen.append((x, result[0] if isinstance(result, tuple) else result, named.get("position_embeddings")))

    for part in (*decoder.layers, decoder.norm):
        part.register_forward_hook(note, with_kwargs=True)
    config, device = twin.config, decoder.norm.weight.device
    random = torch.Generator().manual_seed(0)
    count = min(_PROBE, config.max_position_embeddings - 1)
    tokens = torch.randint(config.vocab_size, (1, count + 1), generator=random).to(device)
    size = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim, count + 1)
    cache = KVCache(*size, windows=config.windows, device=device)
    past, blocks = None, list[Any](twin.layers)
    for part in (tokens[:, :count], tokens[:, count:]):
        past = _run(decoder, seen, part, use_cache=True, **{CACHE: past})
        x = twin.embed_tokens(part) * config.embedding_scale
        _compare("the embedding", seen[0][0], x, 0 * x, 2.0**-18)
        for layer, (block, (x, y, _)) in enumerate(zip(blocks, seen, strict=False)):
            _compare(f"block {layer}", y, block(x, cache=cache), x, _SHARE)
        cache.advance(part.shape[1])
        x, y, _ = seen[-1]
        _compare("the last norm", y, x if twin.norm is None else twin.norm(x), 0 * x, 2.0**-18)
    far = torch.linspace(0, _context(twin) - 1, _FAR, device=device).long().unique()
    _run(decoder, seen, tokens[:, :1].expand(-1, len(far)), position_ids=far[None], use_cache=False)
    for layer, (block, (_, _, turn)) in enumerate(zip(blocks, seen, strict=False)):
        if (rotary := block.self_attn.rotary) is not None:
            _compare_turns(layer, rotary, turn, far)


def _compare(what: str, theirs: torch.Tensor, ours: torch.Tensor, x: torch.Tensor, share: float) -> None:
    """Refuse a result that differs by more than a share of what was added to x, in a token."""
    bound = share * (theirs - x).norm(dim=-1) + 2.0**-18 * theirs.norm(dim=-1)
    apart = (theirs - ours).norm(dim=-1)
    if not bool((apart <= bound).all()):
        _refuse(f"{what} differs from transformers' by {float((apart / bound).max()):.2g} times its bound")


def _context(twin: TransformerDecoder) -> int:
    """Return the positions for which the turns don't depend on the length."""
    scaling = twin.config.rope_scaling
    context = twin.config.max_position_embeddings
    return min(context, scaling.original_context) if scaling.depends_on_length() else context


def _compare_turns(layer: int, rotary: RotaryEmbedding, turn: Any, positions: torch.Tensor) -> None:
    if not isinstance(turn, tuple) or len(turn) != 2:  # noqa: PLR2004  # cosine, sine
        _refuse("its blocks take no cosine and sine")
    table = rotary.table(int(positions.max()) + 1, positions.device)[positions]
    for given, own in zip(turn, (table.real, table.imag), strict=True):
        if given.shape[-1] != 2 * own.shape[-1] or not torch.allclose(given[0, :, : own.shape[-1]], own, atol=2.0**-12):
            _refuse(f"block {layer} turns by other angles")


def _run(decoder: Any, seen: list[Any], tokens: torch.Tensor, **options: Any) -> Any:
    """Run the blocks and the last norm, which note what they see, and return the cache."""
    seen.clear()
    found = type(decoder).forward(decoder, input_ids=tokens, **options)
    if len(seen) != len(decoder.layers) + 1:
        _refuse("its blocks don't run one after another")
    return getattr(found, CACHE)


def _refuse(why: str) -> NoReturn:
    raise EmissionError(f"transformers' model is not q4_lm's: {why}")

"""Chat templates: rendering of messages as the text that a model was trained on, in a sandbox.

The environment is the one that model authors write for: trimmed blocks, loop controls, a ``generation`` block, the
functions ``raise_exception`` and ``strftime_now``, and the filter ``tojson``. A template comes with a file from
anywhere, so it can't reach Python's internals, change what it is given, or fill the memory with one multiplication.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["render_chat"]

_MAX_PRODUCT = 1_000_000


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant wrote; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own way

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the block's content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox in which ``*`` and ``**`` can't be made to fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse products of texts and lists that are too long, and every power of large numbers."""
        sizes = [len(item) if hasattr(item, "__len__") else abs(item) for item in (left, right)]
        repeated = hasattr(left, "__len__") or hasattr(right, "__len__")
        too_much = sizes[0] * sizes[1] > _MAX_PRODUCT if operator == "*" else max(sizes) > 64  # noqa: PLR2004
        if too_much and (repeated or operator == "**"):
            raise jinja2.exceptions.SecurityError(f"the template asks for {left!r:.40} {operator} {right!r:.40}")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005  # the user's own clock is what a template wants


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates pass it by this name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    where: str,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Return the text of a conversation.

    Args:
        template: The chat template (jinja2).
        messages: Each with ``role`` and ``content``.
        where: The file that the template comes from, for messages.
        add_generation_prompt: Whether the text ends where the assistant's answer begins.
        **variables: Further names for the template (``bos_token``, ``eos_token``, ``tools``, …).

    Raises:
        CheckpointError: The template is malformed, refuses the messages, or does what the sandbox forbids.
    """
    try:
        found = _environment().from_string(template)
        return found.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        rule, value = "a template that renders these messages", f"{type(error).__name__}: {error}"
        hint = "Use the raw mode, which needs no template."
        what = "chat template"
        raise CheckpointError(what, name="chat_template", rule=rule, value=value, where=where, hint=hint) from error

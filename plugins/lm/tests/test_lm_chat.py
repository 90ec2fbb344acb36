"""Chat templates in their sandbox."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from q4_lm.tokenizers.chat import render_chat
from q4core import CheckpointError

HELLO = [{"role": "user", "content": "hello"}]


def render(template: str, messages: Any = HELLO, **variables: Any) -> str:
    """Render with a fixed file name."""
    return render_chat(template, messages, where="model.gguf", **variables)


def test_messages_and_generation_prompt() -> None:
    """Messages are written one by one, and the prompt for the answer only if asked for."""
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert render(template) == "[user:hello]>"
    assert render(template, add_generation_prompt=False) == "[user:hello]"


def test_blocks_are_trimmed() -> None:
    """A line that holds only a block leaves nothing behind."""
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_loop_controls_and_generation_block() -> None:
    """``break`` works, and a ``generation`` block is just its content."""
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"


def test_functions() -> None:
    """``tojson`` keeps letters as they are, ``strftime_now`` knows the year, variables are passed through."""
    assert render("{{ tools | tojson }}", tools={"ü": [1]}) == '{"ü": [1]}'
    assert render("{{ strftime_now('%Y') }}") == dt.datetime.now().strftime("%Y")  # noqa: DTZ005  # as the user's clock
    assert render("{{ eos }}", eos="</s>") == "</s>"


def test_nothing_is_escaped() -> None:
    """Text is not HTML: it comes out as it went in."""
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<a> & 'b'"}]) == "<a> & 'b'"


BAD = {
    "syntax": "{% for %}",
    "raised": "{{ raise_exception('roles must alternate') }}",
    "undefined": "{{ nothing.there }}",
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changes its input": "{{ messages.append(1) }}",
    "absurd text": "{{ 'a' * 10000000000 }}",
    "absurd list": "{{ [0] * 10000000000 }}",
    "absurd power": "{{ 10 ** 10 ** 10 }}",
    "absurd range": "{{ range(10000000000) | list }}",
    "type": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_template(case: str) -> None:
    """A template that is malformed, refuses, or tries what is forbidden is a typed error with the file's name."""
    with pytest.raises(CheckpointError, match="chat_template") as caught:
        render(BAD[case])
    assert caught.value.where == "model.gguf"


def test_raised_message_is_shown() -> None:
    """What a template says against the messages reaches the user."""
    with pytest.raises(CheckpointError, match="roles must alternate"):
        render(BAD["raised"])

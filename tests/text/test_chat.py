"""A conversation is written as the folder's template says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rota.core.errors import RequestError
from rota.text.tokenizer import Tokenizer
from tests.text.conftest import CHAT_TEMPLATE, Write

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(byte_level: tokenizers.Tokenizer, write: Write) -> Path:
    config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE}
    return write(byte_level, tokenizer_config=config)


def rendered(folder: Path, **options: Any) -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(tokenizer.apply_chat_template(HELLO, **options))


def test_the_answer_is_asked_for_unless_told_otherwise(folder: Path):
    assert rendered(folder) == "user: hello\nassistant:"
    assert rendered(folder, add_generation_prompt=False) == "user: hello\n"


def test_the_template_alone_writes_special_tokens(folder: Path):
    assert Tokenizer(folder).apply_chat_template(HELLO).count(0) == 1


def test_a_template_file_goes_before_the_one_in_the_config(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}, {{ mood }}")
    assert rendered(folder, variables={"mood": "gladly"}) == "hello, gladly"


def test_tools_choose_the_template_made_for_them(byte_level: tokenizers.Tokenizer, write: Write):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    folder = write(byte_level, tokenizer_config={"chat_template": templates})
    assert rendered(folder) == "plain"
    assert rendered(folder, tools=[{"name": "hammer"}]) == "hammer"


def test_a_model_without_a_template_says_so_to_who_asked(byte_level: tokenizers.Tokenizer, write: Write):
    with pytest.raises(RequestError, match=r"has no chat template; send a prompt .*chat_template\.jinja"):
        rendered(write(byte_level))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate.", id="by intention"),
        pytest.param("{{ messages[7]['content'] }}", "has no", id="by accident"),
    ],
)
def test_what_the_template_refuses_is_passed_on(template: str, reason: str, folder: Path):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match=f"does not accept these messages: .*{reason}") as caught:
        rendered(folder)
    assert caught.value.fault.param == "messages"


def test_warming_up_asks_nothing_of_a_template_that_is_not_there_or_takes_no_hello(
    byte_level: tokenizers.Tokenizer, write: Write
):
    for config in ({}, {"chat_template": "{{ raise_exception('no') }}"}):
        Tokenizer(write(byte_level, tokenizer_config=config)).warm_up()


def test_a_prompt_that_is_continued_ends_with_the_last_text_as_it_is(folder: Path):
    tokenizer = Tokenizer(folder)
    messages = [*HELLO, {"role": "assistant", "content": "the "}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False, is_continued=True)
    assert tokenizer.decode(tokens) == "user: hello\nassistant: the "


def test_a_continued_text_that_spells_a_control_token_stays_a_text(folder: Path):
    tokenizer = Tokenizer(folder)
    messages = [*HELLO, {"role": "assistant", "content": "</s>"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=False, is_continued=True)
    assert tokenizer.decode(tokens).endswith("assistant: </s>")


def test_a_template_that_drops_the_last_text_cannot_continue_it(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(RequestError, match="so it cannot be continued"):
        Tokenizer(folder).apply_chat_template([*HELLO, *HELLO], is_continued=True)

"""Laws of token-exact rendering."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.toys import CHATML, toy_tokenizer
from thundersyncrl.errors import ConfigError
from thundersyncrl.rollout.renderer import Renderer

TOKENIZER = toy_tokenizer()
RENDERER = Renderer(TOKENIZER)
CONTROLS = tuple(TOKENIZER.added_tokens_decoder)
CONTROL_STRINGS = [token.content for token in TOKENIZER.added_tokens_decoder.values()]

plain_text = st.text(st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=30)
hostile_text = st.lists(
    st.sampled_from([*CONTROL_STRINGS, "<|im_", "end|>", "<", "hello", "\n", " ", "\ufffd", "assistant"]), max_size=8
).map("".join)

DROPS_THINKING = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_THINKING = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
STRIPS = CHATML.replace("message['content']", "message['content'] | trim")
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)


def chat_ids(tokenizer: PreTrainedTokenizerFast, *contents: str, system: bool = True) -> list[int]:
    """Return what transformers itself makes of a chat: system, user, assistant, user, ..."""
    roles = (["system"] if system else []) + ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False))


def num_controls(ids: tuple[int, ...]) -> int:
    return sum(i in CONTROLS for i in ids)


@given(system=plain_text, user=plain_text)
def test_a_prompt_is_what_the_template_makes_of_it(system: str, user: str) -> None:
    expected = chat_ids(TOKENIZER, system, user) if system else chat_ids(TOKENIZER, user, system=False)
    assert list(RENDERER.prompt(system, user)) == expected


@pytest.mark.parametrize("template", [CHATML, STRIPS, DROPS_THINKING, DEFAULT_SYSTEM])
@given(action=plain_text.map(str.strip), observation=plain_text)
@settings(max_examples=30)
def test_a_second_turn_is_what_the_template_makes_of_it(template: str, action: str, observation: str) -> None:
    tokenizer = toy_tokenizer(chat_template=template)
    renderer = Renderer(tokenizer)
    sampled = renderer.action(action)
    ids = (*renderer.prompt("s", "u"), *sampled, *renderer.suffix(observation, last_id=sampled[-1]))
    assert list(ids) == chat_ids(tokenizer, "s", "u", action, observation)


def test_the_end_of_turn_is_added_exactly_when_it_was_not_sampled() -> None:
    end, (a,) = RENDERER.end_of_turn_id, TOKENIZER.encode("a")
    assert RENDERER.suffix("ok", last_id=a) == (end, *RENDERER.suffix("ok", last_id=end))
    assert TOKENIZER.decode(RENDERER.suffix("ok", last_id=end)) == (
        "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    )


@given(hostile_text)
def test_control_tokens_in_an_observation_stay_text(observation: str) -> None:
    ids = RENDERER.suffix(observation, last_id=RENDERER.end_of_turn_id)
    assert num_controls(ids) == 3  # user header, its end, assistant header
    assert TOKENIZER.decode(ids) == f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"


@given(system=hostile_text.filter(bool), user=hostile_text)
def test_control_tokens_in_a_prompt_stay_text(system: str, user: str) -> None:
    ids = RENDERER.prompt(system, user)
    assert num_controls(ids) == 5
    assert TOKENIZER.decode(ids) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )


@given(hostile_text)
def test_an_oracle_action_is_plain_text_and_one_end_of_turn(text: str) -> None:
    ids = RENDERER.action(text)
    assert ids[-1] == RENDERER.end_of_turn_id
    assert num_controls(ids[:-1]) == 0
    assert TOKENIZER.decode(ids[:-1]) == RENDERER.text(ids) == text


def test_added_tokens_in_brackets_are_control_tokens_and_added_words_are_not() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("xylophone")])
    tool_call, word = tokenizer.convert_tokens_to_ids(["<tool_call>", "xylophone"])
    ids = Renderer(tokenizer).suffix("<tool_call> xylophone", last_id=0)
    assert tool_call not in ids
    assert word in ids


def test_undecodable_bytes_of_a_tool_become_tokens() -> None:
    """Case H-30."""
    observation = b"a\xf0b".decode(errors="replace")
    assert observation in TOKENIZER.decode(RENDERER.suffix(observation, last_id=0))


def test_text_keeps_spaces_and_leaves_special_tokens_out() -> None:
    ids = [*TOKENIZER.encode("ls . 'x' n't !"), RENDERER.end_of_turn_id]
    assert RENDERER.text(ids) == "ls . 'x' n't !"


def test_stop_ids_are_end_of_turn_and_eos() -> None:
    assert RENDERER.stop_ids == {TOKENIZER.convert_tokens_to_ids("<|im_end|>")}
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    expected = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert Renderer(tokenizer).stop_ids == set(expected)


def test_a_missing_pad_token_changes_nothing() -> None:
    """Case H-14."""
    renderer = Renderer(toy_tokenizer(pad=False))
    assert renderer.prompt("s", "hello") == RENDERER.prompt("s", "hello")
    assert renderer.suffix("ok", last_id=0) == RENDERER.suffix("ok", last_id=0)


def test_a_bos_token_is_not_added_on_top_of_the_template() -> None:
    assert Renderer(toy_tokenizer(bos=True)).prompt("s", "hello") == RENDERER.prompt("s", "hello")


def test_a_default_system_message_comes_only_without_one() -> None:
    tokenizer = toy_tokenizer(chat_template=DEFAULT_SYSTEM)
    assert "Be kind." in tokenizer.decode(Renderer(tokenizer).prompt("", "u"))
    assert "Be kind." not in tokenizer.decode(Renderer(tokenizer).prompt("s", "u"))


def test_an_opened_think_block_is_part_of_every_assistant_header() -> None:
    """Case H-02: append-only, thinking kept."""
    tokenizer = toy_tokenizer(chat_template=OPENS_THINKING)
    renderer = Renderer(tokenizer)
    for ids in (renderer.prompt("s", "u"), renderer.suffix("ok", last_id=0)):
        assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages | length }}" + CHATML, "stays the same when turns are added"),
        ("{% if messages | length < 3 %}A{% endif %}" + CHATML, "stays the same when turns are added"),
        ("{% if messages | length > 4 %}A{% endif %}" + CHATML, "stays the same when turns are added"),
        (CHATML.replace("message['content']", "(message['content'] if loop.last else '')"), "shows each message once"),
        (CHATML.replace("message['content']", "message['content'] * 2"), "shows each message once"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        (CHATML.replace("<|im_end|>", ""), "ends an assistant turn with a control token"),
        (
            "{{ '<|im_start|>' }}{% for message in messages[1:] %}"
            "{% if loop.last %}{{ messages[0]['content'] }}{% endif %}{{ message['content'] + '<|im_end|>' }}"
            "{% endfor %}",
            "shows each message once",
        ),
        (
            CHATML.replace("'\n' + message['content']", "('' if loop.last else '\n') + message['content']"),
            "stays the same when turns are added",
        ),
    ],
)
def test_a_template_that_rewrites_the_past_is_refused(template: str, says: str) -> None:
    """Case H-02."""
    with pytest.raises(ConfigError, match=says):
        Renderer(toy_tokenizer(chat_template=template))


def test_a_tokenizer_without_chat_template_or_eos_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"chat template, got none; .*instruct model"):
        Renderer(toy_tokenizer(chat_template=False))
    with pytest.raises(ConfigError, match=r"eos token, got none; name .*`eos_token`"):
        Renderer(toy_tokenizer(eos=False))

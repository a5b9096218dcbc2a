"""Tokens are kept: what the conversation appends is what the template puts after an assistant message."""

from __future__ import annotations

import pytest

from makespan.rollout.conversation import Conversation
from makespan.rollout.environment import Message
from makespan.rollout.errors import ConfigError

from .fakes import END, CharacterTokenizer


def test_the_stop_token_is_the_templates_end_of_turn():
    assert Conversation(CharacterTokenizer()).stop_token_ids == (END,)


def test_text_leaves_the_end_of_turn_out():
    assert Conversation(CharacterTokenizer()).text([ord("h"), ord("i"), END]) == "hi"


def test_scripted_text_ends_as_a_generated_one_would():
    assert Conversation(CharacterTokenizer()).scripted("hi") == [ord("h"), ord("i"), END]


def test_a_template_that_rewrites_history_is_refused():
    class Rewriting(CharacterTokenizer):
        def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
            # As some reasoning models' templates do: only the last assistant message is kept whole.
            text = ""
            for index, message in enumerate(conversation):
                last = index == len(conversation) - 1
                content = message["content"] if last or message["role"] != "assistant" else "(cut)"
                text += f"<^>{message['role']}:{content}<|>\n"
            return text + ("<^>assistant:" if add_generation_prompt else "")

    with pytest.raises(ConfigError, match="use a template that only appends"):
        Conversation(Rewriting())


def test_a_template_that_marks_ends_only_between_messages_doubles_no_end():
    class Between(CharacterTokenizer):
        def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
            text = "<|>".join(f"{m['role']}:{m['content']}" for m in conversation)
            return text + ("<|>assistant:" if add_generation_prompt else "")

    ids = Conversation(Between()).extension([ord("x"), END], [Message("user", "y")])
    assert ids == CharacterTokenizer().encode("user:y<|>assistant:", add_special_tokens=False)


def test_a_role_that_the_template_does_not_know_is_named():
    class Strict(CharacterTokenizer):
        def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
            if any(message["role"] == "tool" for message in conversation):
                raise ValueError("unexpected role")
            return super().apply_chat_template(
                conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    with pytest.raises(ConfigError, match="roles assistant, tool, user: unexpected role"):
        Conversation(Strict()).extension([END], [Message("tool", "result")])


@pytest.mark.parametrize("name", ["embedded", "smollm2"])
def test_real_tokenizers_round_a_conversation_as_their_template_renders_it(name):
    transformers = pytest.importorskip("transformers")
    from makespan.integrations.models import resolve

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(name))
    conversation = Conversation(tokenizer)
    first = [Message("system", "Be brief."), Message("user", "List the files.")]
    then = [Message("tool", '{"files": ["a.txt"]}'), Message("user", "Thanks. And the date?")]
    reply = conversation.scripted("[ls(a=True)]")
    ids = conversation.first_prompt(first) + reply + conversation.extension(reply, then)
    whole = [*first, Message("assistant", "[ls(a=True)]"), *then]
    rendered = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in whole], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert tokenizer.decode(list(conversation.stop_token_ids[-1:])) == "<|im_end|>"

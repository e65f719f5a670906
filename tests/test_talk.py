"""Talking: turns cost their own tokens, whole old ones are forgotten, the system message stays."""

import numpy as np
import pytest
from exchange_models import sharp, talking_words, trained_words

from model import generate
from stack.data import chat
from stack.talk import Talk


@pytest.fixture
def talk():
    words = talking_words()
    return Talk(sharp(words), words, [{"role": "system", "content": "Be brief, please."}])


def ask(talk, text, n=12, **how):
    talk.messages.append({"role": "user", "content": text})
    return talk.answer(max_new_tokens=n, **how)


def fresh(talk, ids, n=12):
    """The greedy answer to ids, read from the beginning."""
    return generate(talk.model, [ids], max_new_tokens=n, stop_ids=chat.ends(talk.tokenizer))[0]


def count_tokens(talk, monkeypatch) -> list[int]:
    """A list that gets the number of tokens of each forward pass."""
    counts, hidden = [], talk.model.hidden
    monkeypatch.setattr(talk.model, "hidden", lambda ids, **how: counts.append(ids.shape[1]) or hidden(ids, **how))
    return counts


def test_a_turn_costs_its_own_tokens(talk, monkeypatch):
    """Each prompt holds the answers word by word as they were made, and only what is new in it is read."""
    counts, known = count_tokens(talk, monkeypatch), []
    for text in ("Who are you?", "And\nthen? 你好", "Why?"):
        talk.messages.append({"role": "user", "content": text})
        ids = talk.prompt(12)
        assert ids[:len(known)] == known
        held = talk.cache.length if known else 0
        assert held >= len(known) - 1  # the last one that was chosen may not have been read
        del counts[:]
        new = talk.answer(max_new_tokens=12)
        assert counts == [len(ids) - held] + [1] * (len(counts) - 1)
        assert new == fresh(talk, ids)
        known = ids + new


def test_the_oldest_turns_go_and_the_system_message_stays(talk):
    """Of 160 tokens of context; what is left is whole turns, and answers are those of a model that reads just these."""
    system = chat.encode(talk.tokenizer, talk.messages).tolist()
    for i in range(12):
        talk.messages.append({"role": "user", "content": f"Question {i}, with some words in it?"})
        ids = talk.prompt(12)
        asked = [i for i, message in enumerate(talk.messages) if message["role"] == "user"]
        left = talk.messages[1 + talk.forgotten:]
        assert left[0]["role"] == "user" and len(ids) + 12 <= 160 and ids[:len(system)] == system
        assert ids == chat.encode(talk.tokenizer, talk.messages[:1] + left, answer=True).tolist()
        assert talk.answer(max_new_tokens=12) == fresh(talk, ids)
    assert len(asked) == 12 and 0 < talk.forgotten and talk.forgotten + 1 in asked
    with pytest.raises(ValueError, match="of the context of 160 it can have 148"):
        ask(talk, "long " * 200)


def test_an_answer_that_is_stopped_is_said_so_far(talk, monkeypatch):
    """Ctrl-C at any token: what was printed is the answer, and the next one is as if the model had ended there."""
    def stop(token, left=[3]):  # noqa: B006
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ask(talk, "Tell me all.", on_token=stop)
    assert talk.messages[-1]["role"] == "assistant" and len(talk.messages[-1]["ids"]) == 3
    talk.messages.append({"role": "user", "content": "Go on."})
    counts, ids = count_tokens(talk, monkeypatch), talk.prompt(12)
    assert talk.answer(max_new_tokens=12) == fresh(talk, ids)
    assert counts[0] < 15


def test_calls_of_the_model_are_read_as_such():
    words = talking_words()
    said = [{"role": "assistant", "content": "Let me see.", "tool_calls": [
        {"function": {"name": "find", "arguments": {"of": "é"}}}]}]
    ids = chat.encode(words, said)[2:-1].tolist()
    message = chat.written(words, ids)
    assert message == said[0] | {"ids": ids}
    assert np.array_equal(chat.encode(words, [message]), chat.encode(words, said))
    broken = chat.written(words, ids[:-4])
    assert "tool_calls" not in broken and broken["content"] == words.decode(ids[:-4])


def test_an_imported_template_is_used_and_guarded():
    """Its own marks, rendered as transformers does it; what is typed makes no special token there either."""
    words = trained_words().with_specials(["<|im_start|>", "<|im_end|>"])
    words.chat_template = ("{% for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\\n' }}{% generation %}"
                           "{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% endfor %}"
                           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
    words.chat_ends = ("<|im_end|>",)
    talk = Talk(sharp(words), words, [{"role": "user", "content": "Hi"}])
    text = "<|im_start|>user\nHi<|im_end|><|im_start|>assistant\n"
    assert talk.prompt(12) == words.encode(text, special=True)
    assert chat.ends(words) == [words.special_ids["<|im_end|>"], words.boundary_id]
    assert talk.answer(max_new_tokens=5) == fresh(talk, talk.read[:len(words.encode(text, special=True))], 5)
    talk.messages.append({"role": "user", "content": "a <|im_end|> b"})
    with pytest.raises(ValueError, match="im_end"):
        talk.answer(max_new_tokens=5)

"""Answers to held-out questions: whether they end, and what they say.

A conversation is asked its first question; the answer is greedy.  One that does not stop by itself within MOST tokens
counts as one without an end, whatever it says: whoever talks to such a model waits for the limit.
"""

import torch

from model import GPT, generate
from stack.data.chat import END, OPENINGS

MOST = 128  # tokens of an answer
ROWS = 32  # answers made side by side


def questions(data) -> list[list[int]]:
    """The beginnings of a split's conversations up to where the first answer follows, in file order, as ids.

    data: TokenData with loss_on "assistant"."""
    ids, found = data.meta["chat"]["ids"], []
    begins, answer = {ids[name] for name in OPENINGS.values()}, ids[OPENINGS["assistant"]]
    for i in range(data.n_windows):
        x, _, docs = data.window(i)
        for doc in range(int(docs[0]), int(docs[-1]) + 1):
            part = x[docs == doc].tolist()
            if begins & {*part[1:2]} and answer in part:
                found.append(part[:part.index(answer) + 1])
    return found


def ask(model: GPT, prompts: list[list[int]], end: int, most: int = MOST) -> list[tuple[list[int], bool]]:
    """(ids of the greedy answer to each prompt, whether it ended with `end` within `most` tokens)."""
    answers = []
    for at in range(0, len(prompts), ROWS):
        group = prompts[at:at + ROWS]
        for new in generate(model, group, max_new_tokens=most, stop_ids=[end]):
            answers.append((new, len(new) < most))
    return answers


def report(model: GPT, tokenizer, data, limit: int | None = None, show: int = 3) -> dict:
    """{"questions", "ended": the share of them whose answer ends within "most" tokens, "examples": [{"question",
    "answer"}]}.  Of a context shorter than 2 * MOST an answer has half."""
    ids, most = data.meta["chat"]["ids"], min(MOST, model.cfg.max_seq_len // 2)
    room = model.cfg.max_seq_len - most
    prompts = [prompt for prompt in questions(data) if len(prompt) <= room][:limit]
    if not prompts:
        raise ValueError(f"{data.dir} has no question of at most {room} tokens in {data.split}.\n  Hold out more "
                         "conversations: prepare.py --val_fraction.")
    with torch.inference_mode():
        answers = ask(model, prompts, ids[END], most)
    asked = [prompt[2:-2] for prompt in prompts]
    return {"questions": len(prompts), "most": most, "ended": sum(ended for _, ended in answers) / len(prompts),
            "examples": [{"question": tokenizer.decode(question), "answer": tokenizer.decode(answer)}
                         for question, (answer, _) in list(zip(asked, answers, strict=True))[:show]]}

"""Small models, runs and messages for the tests of convert.py."""

import functools
import random

import pytest
import torch
from conftest import tiny_config
from texts import texts as made

import convert
from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.data import chat
from stack.data.tokenizer import Tokenizer, train_tokenizer
from stack.train_config import TrainConfig

TYPED = ["Hi", "naïve café", "你好,世界", "\N{WOMAN}\u200d\N{GIRL}", "  two before", "after  ", "\n\nlines\n", "\t",
         "a\u00a0b", "1234567", "e\u0301", "def f(x):\n    return x", "<b>&amp;'\"", "{{ message }} {% if %}", "don't",
         "{}", "\u2028", "\x01", "x" * 40]
LEARNED = dict(pos="learned", norm="layernorm", mlp="gelu", qk_norm=False, n_kv_heads=4, bias=True)  # GPT-2's switches


def texts(n=40) -> list[str]:
    return made(*[12_000] * n)


@functools.cache
def trained_words() -> Tokenizer:
    return train_tokenizer(texts(), 777)  # no multiple of anything


def talking_words() -> Tokenizer:
    """The same, of a model that was trained to talk."""
    words = trained_words().with_specials(["<|late|>"])
    words.chat_template = chat.OWN
    return words


def conversations(n: int, seed: int = 0) -> list[list[dict]]:
    """The same n conversations each time: scripts, white space, system messages with and without text, tools."""
    rng, out = random.Random(seed), []

    def text():
        return "".join(rng.choice(TYPED) for _ in range(rng.randint(1, 5))) + "."
    for _ in range(n):
        messages = [{"role": "system", "content": rng.choice(["", text()])}] * rng.randint(0, 1)
        for _ in range(rng.randint(1, 4)):
            messages.append({"role": "user", "content": text()})
            if rng.random() < 0.3:
                calls = [{"type": "function", "function": {"name": "find", "arguments": rng.choice(
                    ['{"of": 1}', {"text": text(), "n": 2.5, "all": [True, None]}])}} for _ in range(rng.randint(1, 2))]
                messages += [{"role": "assistant", "content": rng.choice(["", text()]), "tool_calls": calls},
                             {"role": "tool", "content": text()}]
            messages.append({"role": "assistant", "content": text()})
        out.append(messages)
    return out


def sharp(words, **changes) -> GPT:
    """A model whose logits are far apart, so that greedy decoding has no near ties; no norm or bias is trivial."""
    torch.manual_seed(0)
    model = GPT(tiny_config(vocab_size=words.vocab_size, max_seq_len=160, **changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if name.startswith("blocks") else 0.1))
    return model.eval()


def save(path, model, words, *, train=None, step=0, data=None, tokens=0):
    progress = {"step": step, "seqs_seen": 10 * step, "tokens": tokens, "best_val": 9.0, "wandb_id": None}
    checkpoint.save(path, "ckpt_last", model=model, tokenizer=words, model_cfg=model.cfg,
                    train_cfg=train or TrainConfig(), state=dict(progress=progress, data=data))
    return path


def run(*argv):
    convert.main([str(a) for a in argv])


def refused(capsys, *argv) -> str:
    """The message of a command that must refuse: one on stderr, no traceback, exit code 2."""
    with pytest.raises(SystemExit) as leave:
        run(*argv)
    assert leave.value.code == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and err.startswith("convert.py: ")
    return err

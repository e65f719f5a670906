"""Small models, runs and messages for the tests of convert.py."""

import functools

import pytest
import torch
from conftest import tiny_config
from texts import texts as made

import convert
from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.data.tokenizer import Tokenizer, train_tokenizer
from stack.train_config import TrainConfig

LEARNED = dict(pos="learned", norm="layernorm", mlp="gelu", qk_norm=False, n_kv_heads=4, bias=True)  # GPT-2's switches


def texts(n=40) -> list[str]:
    return made(*[12_000] * n)


@functools.cache
def trained_words() -> Tokenizer:
    return train_tokenizer(texts(), 777)  # no multiple of anything


def sharp(words, **changes) -> GPT:
    """A model whose logits are far apart, so that greedy decoding has no near ties; no norm or bias is trivial."""
    torch.manual_seed(0)
    model = GPT(tiny_config(vocab_size=words.vocab_size, max_seq_len=160, **changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.3 if name.startswith("blocks") else 0.1))
    return model.eval()


def save(path, model, words, *, train=None, step=0, data=None):
    progress = {"step": step, "seqs_seen": 10 * step, "best_val": 9.0, "wandb_id": None}
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

"""What tests of checkpoints share: a tokenizer of bytes, a save in one line, weights and steps that are known."""

import torch

from stack.checkpoint import tensors
from stack.checkpoint.tensors import save
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.train_config import TrainConfig

FILES = ["model.safetensors", "optim.pt", "state.json", "tokenizer.json"]


def make_tokenizer(specials=SPECIALS) -> Tokenizer:
    return Tokenizer(PATTERN, {bytes([i]): i for i in range(256)}, {name: 256 + i for i, name in enumerate(specials)})


def write(run_dir, model, step=1, name="ckpt_last", **more):
    options = dict(tokenizer=make_tokenizer(), train_cfg=TrainConfig(), state={"progress": {"step": step}})
    save(run_dir, name, model=model, model_cfg=tensors.unwrap(model).cfg, **{**options, **more})


def fill(model, value: float):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def train(model, optimizers, seeds):
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        for opt in optimizers:
            opt.step()

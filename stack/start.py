"""How a run begins: what its settings must be together, and what must be the same on all of its ranks."""

import hashlib
import importlib.util
from dataclasses import replace

import torch

from model import ModelConfig
from stack.config import ROOT, to_dict
from stack.counts import build
from stack.parallel.ranks import read_ranks
from stack.train_config import PASSES, TrainConfig


def check(model_cfg: ModelConfig, cfg: TrainConfig) -> list[str]:
    """Problems that span both dataclasses and the number of ranks."""
    found, dp_size = [], read_ranks(cfg.tp).dp_size
    if cfg.tensorboard and importlib.util.find_spec("tensorboard") is None:
        found.append("tensorboard is asked for, but the package is not installed. Install it (pip install tensorboard) "
                     "or leave out --tensorboard.")
    if (cfg.init_from == "scratch" or cfg.checkpoint) and cfg.seq_len > model_cfg.max_seq_len:  # else the source's
        found.append(f"seq_len ({cfg.seq_len}) is more than max_seq_len ({model_cfg.max_seq_len}). "
                     "Lower the first or raise the second.")
    return found + batch_problems(cfg, dp_size)


def batch_problems(cfg: TrainConfig, dp_size: int) -> list[str]:
    """Why a step's tokens cannot be divided over micro batches and `dp_size` whole models; empty when they can."""
    parts = 2 if cfg.ramp_steps else 1  # steps within the ramp have half of it
    row = cfg.seq_len * dp_size * parts
    unit = row * cfg.micro_batch_size
    if cfg.batch_tokens % unit == 0:
        return []
    below, above = cfg.batch_tokens // unit * unit, -(-cfg.batch_tokens // unit) * unit
    micro = next((n for n in range(min(cfg.micro_batch_size, cfg.batch_tokens // row), 0, -1)
                  if cfg.batch_tokens % (row * n) == 0), None)
    return [f"batch_tokens ({cfg.batch_tokens}) must be a multiple of seq_len * micro_batch_size * ranks "
            f"({cfg.seq_len} * {cfg.micro_batch_size} * {dp_size}{' * 2 for ramp_steps' if cfg.ramp_steps else ''} = "
            f"{unit}). Set it to {' or '.join(str(n) for n in (below, above) if n)}"
            f"{f', or micro_batch_size to {micro}' if micro else ''}"
            f"{', or ramp_steps to 0' if cfg.batch_tokens % (unit // parts) == 0 else ''}."]


def shortened(cfg: TrainConfig, say) -> TrainConfig:
    """The settings of a run that may be shorter than its warm-up was meant for: then that is a tenth of it.  The decay
    is a share of the run anyway."""
    if cfg.warmup_steps <= cfg.max_steps:
        return cfg
    fits = max(cfg.max_steps // 10, 1)
    decay = round(cfg.max_steps * cfg.decay_fraction)
    say(f"warm-up takes {fits} of the {cfg.max_steps} steps, and not {cfg.warmup_steps}, which are more than the run "
        f"has{f'; decay the last {decay}' if cfg.schedule != 'cosine' else ''}. Set --warmup_steps to choose.")
    return replace(cfg, warmup_steps=fits)


def repeated(cfg: TrainConfig, n_windows: int) -> list[str]:
    """A word where a run sees its training text, so many windows, more often than PASSES, and by and by has it by
    heart.  What stays empty in windows, where conversations are laid whole, counts in them as in cfg.tokens."""
    n_tokens = n_windows * cfg.seq_len
    if cfg.tokens <= PASSES * n_tokens:
        return []
    best = ", whose lowest is ckpt_best's" if cfg.eval_interval else ""
    return [f"the run sees its text {cfg.tokens / n_tokens:,.0f} times, and after some four a text teaches little: "
            f"watch the held-out loss{best}. Four times are --max_steps={cfg.steps(PASSES * n_tokens)}."]


def what_trains(*configs) -> dict:
    """Settings, code and version of torch, by name: what all ranks must have the same before they can talk."""
    files = [ROOT / "model.py", ROOT / "train.py", *sorted((ROOT / "stack").rglob("*.py")),
             *sorted((ROOT / "stack").rglob("*.cpp"))]
    return to_dict(configs) | {"torch": torch.__version__} | {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def what_it_starts_from(model_cfg: ModelConfig, data, dtype, saved: dict | None) -> dict:
    """Data, checkpoint and the model's shapes, by name: what all ranks must have found the same.  saved: the state of a
    checkpoint, or what stands for it."""
    saved = saved or {}
    return {"data": data.data_fingerprint[:12], "dtype": str(dtype).removeprefix("torch."),
            "step": saved.get("progress", {}).get("step", 0), "checkpoint": (saved.get("checksum") or "")[:12],
            **{name: f"shape {tuple(p.shape)}" for name, p in build(model_cfg).named_parameters()}}

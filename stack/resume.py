"""Stopping and going on: what ends a run cleanly, what a resumed one must keep, and the command line that goes on."""

import os
import shlex
import signal
from dataclasses import asdict, replace

from model import ModelConfig
from stack.config import ConfigError
from stack.optim import rates, schedule
from stack.train_config import TrainConfig


class StopSignal:
    """SIGINT, SIGTERM, SIGHUP or SIGUSR1: the loop leaves after its step.  A second one ends the process at once.

    launched: by torchrun, which passes signals on, so that one may come twice, and kills what stays for 30 seconds.
    """

    def __init__(self, launched: bool = False):
        self.asked, self.launched, self.before = False, launched, {}

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        for name in ("SIGHUP", "SIGUSR1"):  # a lost terminal; SLURM's warning, where --signal says so
            if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # as nohup wants it
                numbers.append(getattr(signal, name))
        self.before = {number: signal.signal(number, self.receive) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def receive(self, number, frame):
        self.asked = True
        if not self.launched:
            for n in self.before:
                signal.signal(n, signal.SIG_DFL)  # needs no Python to run, so that it also ends a step that hangs

    def cut_short(self, windows):
        """At least one of the windows, and no more once asked to stop."""
        for window in windows:
            yield window
            if self.asked:
                return


def resume_command(typed: list[str]) -> str:
    """The command line that goes on with the run that `typed`, sys.argv, started.  Of equal flags the last counts."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # set by torchrun, whose own flags nobody passes on
    words = [word for word in typed if word != "--init_from=resume"] + ["--init_from=resume"]
    return shlex.join(["torchrun", f"--nproc_per_node={ranks}", *words] if ranks else ["python", *words])


def settle(model_cfg: ModelConfig, cfg: TrainConfig, source, saved: dict | None, tokenizer, say):
    """The model to build: as asked for, with the tokenizer's vocabulary and, of a run that goes on, its initial values;
    to finetune, that of `source`, of which `saved` holds "model" and "tokenizer", with another context if one was asked
    for.  And the settings, with the learning rates that were left open."""
    if saved is not None and saved["tokenizer"] != tokenizer.fingerprint:
        raise ConfigError(f"{source} was trained with another tokenizer than {cfg.data_dir} was made with "
                          f"({saved['tokenizer'][:12]} and {tokenizer.fingerprint[:12]}): its rows would mean other "
                          f"tokens. Prepare the data with --tokenizer {source}.")
    if saved is not None:
        theirs, asked = ModelConfig(**saved["model"]), model_cfg
        # initial values: those that the source had, whatever a config file says by now
        model_cfg = replace(model_cfg, embed_constant=theirs.embed_constant)
    if saved is not None and not cfg.checkpoint:
        settled = replace(lengthened(theirs, asked, source), dropout=model_cfg.dropout)
        if cfg.seq_len > settled.max_seq_len:
            raise ConfigError(f"seq_len ({cfg.seq_len}) is more than the {settled.max_seq_len} tokens of {source}. "
                              "Lower it" + (", or raise --max_seq_len." if settled.pos == "rope" else "."))
        if changed := differences(saved["model"], {key: getattr(settled, key) for key in LENGTHS}):
            say(f"as asked for, other than in {source}: {changed}")
        if other := differences(model_cfg, settled):
            say(f"the architecture is that of {source}, not the one asked for: {other}")
        return settled, rated(settled, cfg, source, saved, say)
    if tokenizer.vocab_size > model_cfg.vocab_size:
        raise ConfigError(f"vocab_size ({model_cfg.vocab_size}) is less than the {tokenizer.vocab_size} ids of "
                          f"{cfg.data_dir}. Set --vocab_size={tokenizer.vocab_size}.")
    if tokenizer.vocab_size < model_cfg.vocab_size:
        say(f"vocab_size {tokenizer.vocab_size}, the size of {cfg.data_dir}'s tokenizer, instead of "
            f"{model_cfg.vocab_size}")
    model_cfg = replace(model_cfg, vocab_size=tokenizer.vocab_size)
    return model_cfg, rated(model_cfg, cfg, source, saved, say)


def rated(model_cfg: ModelConfig, cfg: TrainConfig, source, saved: dict | None, say) -> TrainConfig:
    """The settings with numbers for the learning rates that are None: what goes on keeps those of `source`, another run
    has optim.rates, and a fifth of them where it begins from weights that have learned before."""
    used = ("muon_lr", "adamw_lr") if cfg.optimizer == "muon" else ("adamw_lr",)
    if not (left_open := [name for name in used if getattr(cfg, name) is None]):
        return cfg
    tokens, batch, before = cfg.tokens, cfg.step_tokens(cfg.max_steps - 1), (saved or {}).get("train") or {}
    values = dict(zip(("muon_lr", "adamw_lr"), rates(model_cfg, tokens, batch, cfg.optimizer), strict=True))
    how = f"for {tokens:,} tokens, {batch:,} a step"
    goes_on = (cfg.checkpoint or cfg.keep_moments) and before.get("optimizer") == cfg.optimizer
    if goes_on and all(before.get(name) for name in left_open):
        values, how = before, f"as {source} was trained"
    elif saved is not None and not cfg.checkpoint:
        values, how = {name: values[name] / 5 for name in left_open}, f"a fifth of those of a first run {how}"
    chosen = {name: float(f"{values[name]:.4g}") for name in left_open}  # what is said is what is used
    say(f"{', '.join(f'{name} {value}' for name, value in chosen.items())}: {how}")
    return replace(cfg, **chosen)


LENGTHS = "max_seq_len", "rope_theta"  # what a finetuned model may have otherwise than its source: no weight's shape


def lengthened(theirs: ModelConfig, asked: ModelConfig, source) -> ModelConfig:
    """The source's model with the context and theta that config file or flags name.  A shorter context than the
    source's is left as it is: nothing would be gained by it."""
    given = {key: getattr(asked, key) for key in LENGTHS if key in getattr(asked, "given", ())}
    longer = given.get("max_seq_len", 0) > theirs.max_seq_len
    if theirs.pos == "learned":
        if longer:
            raise ConfigError(f"max_seq_len ({asked.max_seq_len}) is more than the {theirs.max_seq_len} positions that "
                              f"{source} has learned, each a row of a table: there is none for a later one. Set "
                              f"--max_seq_len={theirs.max_seq_len}, or begin with a model whose pos is rope.")
        return theirs
    return replace(theirs, **{key: value for key, value in given.items() if key != "max_seq_len" or longer})


# What resuming with another value gives up.  The architecture is refused likewise; other settings may change freely.
GIVES_UP = {
    "data": "the position is one in the new data, and what was seen of it is unknown",
    "seq_len": "windows begin elsewhere, so that this epoch repeats some tokens and leaves out others",
    "packing": "windows hold other tokens, so that this epoch repeats some and leaves out others",
    "seed": "the order changes, so that this epoch repeats some tokens and leaves out others",
    "optimizer": "parameters that change hands lose their moments",
}


def differences(before, now) -> str:
    """'name old -> new' for each field of two dataclasses or keys of two dicts that differ."""
    before, now = (x if isinstance(x, dict) else asdict(x) for x in (before, now))
    return ", ".join(f"{key} {before[key]!r} -> {now[key]!r}" for key in now
                     if key in before and before[key] != now[key])


def compare(saved: dict, model_cfg: ModelConfig, cfg: TrainConfig, data) -> list[str]:
    """What a resumed run does differently from the saved one, for people to read; refuses what would not be the same
    run, unless that is allowed."""
    if not saved["train"]:
        raise ConfigError(f"{cfg.out_dir} holds no training run to resume. Start from its weights: "
                          f"--init_from={cfg.out_dir} and another --out_dir.")
    old_cfg = replace(TrainConfig(), **{k: v for k, v in saved["train"].items() if k in asdict(cfg)})  # newer: default
    old_model = replace(ModelConfig(**saved["model"]), dropout=model_cfg.dropout)
    before, now = asdict(old_cfg) | {"data": saved["data"][:12]}, asdict(cfg) | {"data": data.data_fingerprint[:12]}
    lost = [f"{key} {before[key]!r} -> {now[key]!r}: {why}" for key, why in GIVES_UP.items() if before[key] != now[key]]
    if architecture := differences(old_model, model_cfg):
        lost.append(f"{architecture}: the weights were trained otherwise, and other shapes do not fit at all")
    if lost and not cfg.allow_changes:
        raise ConfigError(f"{cfg.out_dir} cannot be resumed as it was saved:\n  " + "\n  ".join(lost) + "\n  Set them "
                          f"back (python train.py {cfg.out_dir}/config.json --init_from=resume), accept this with "
                          f"--allow_changes, or start from its weights with --init_from={cfg.out_dir} and another "
                          "--out_dir.")
    lines = [f"resumed with {line}" for line in lost]
    ignored = {"init_from", "out_dir", "data_dir", "allow_changes", "keep_moments", *GIVES_UP}
    if free := differences({k: v for k, v in before.items() if k not in ignored}, now):
        lines.append(f"changed since the checkpoint: {free}")
    shape = ("max_steps", "schedule", "warmup_steps", "decay_fraction", "min_lr_fraction")
    if any(before[key] != now[key] for key in shape):
        step = saved["progress"]["step"]
        lines.append(f"from step {step} on the learning rate follows the new schedule, {cfg.schedule} over "
                     f"{cfg.max_steps} steps: {schedule(cfg, step):.3g} of its peak here, where the old one had "
                     f"{schedule(old_cfg, step):.3g}")
    return lines

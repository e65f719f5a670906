"""The settings of a training run, each once: type, default, meaning.  ModelConfig, in model.py, has the model's."""

import dataclasses
import os
import re
import typing

from stack.config import NO_UTF8, expand, no_utf8

RESIDUAL_NEEDS_BFLOAT16 = ("residual_dtype is bfloat16, but what blocks add to the stream is {}: nothing would be "
                           "saved. Set --dtype=bfloat16, or leave out --residual_dtype.")
PATHS = "data_dir", "out_dir", "init_from"
PASSES = 4  # times through a text after which it teaches little that is new (arXiv 2305.16264)


@dataclasses.dataclass
class TrainConfig:
    # data and run folder
    data_dir: str = "data/stack100m"  # what prepare.py made
    out_dir: str = "out/stack100m"  # run folder: checkpoints, config.json, log.jsonl, loss.png, report.html
    init_from: str = "scratch"  # scratch; resume, resume:ckpt_step_N: go on in out_dir; to finetune: a run folder, a
                               # checkpoint in one, or hf:FOLDER
    keep_moments: bool = False  # with init_from=RUN: the optimizer's moments too, not only weights; step 0, data anew
    allow_changes: bool = False  # resume although data, seq_len, packing, seed, optimizer or architecture changed
    seed: int = 1337  # of initial weights, batch order, dropout and samples
    # batch
    seq_len: int = 2048  # tokens per sequence
    micro_batch_size: int = 32  # sequences per device per forward pass
    batch_tokens: int = 524288  # tokens per optimizer step over all devices; accumulation follows from it
    max_steps: int = 38147  # optimizer steps
    ramp_steps: int = 0  # so many first steps have half of batch_tokens (docs/lab-notes.md has what it gives)
    packing: typing.Literal["stream", "best_fit"] = "stream"  # best_fit: documents whole where they fit; with doc_mask
    doc_mask: bool = True  # attention stays inside a document
    loss_on: typing.Literal["auto", "all", "assistant"] = "auto"  # what is learned: every token, or the assistant's;
        # auto: the assistant's where the data set has conversations
    # optimizer
    optimizer: typing.Literal["muon", "adamw"] = "muon"  # muon: for the blocks' matrices; the rest is AdamW's
    muon_lr: float | None = None  # Muon's peak learning rate; None: by shape and length of the run (rates in optim.py)
    adamw_lr: float | None = None  # AdamW's, for the table, gains and biases (all with optimizer=adamw); None: likewise
    weight_decay: float = 0.1  # decoupled; matrices and the table only
    beta1: float = 0.9  # AdamW's memory of gradients
    beta2: float = 0.95  # AdamW's memory of their squares
    grad_clip: float = 1.0  # a longer gradient, over all parameters, is shortened to this; 0 = off
    z_loss: float = 1e-4  # weight of logsumexp squared, keeps logits from drifting; in the logged loss; 0 = off
    schedule: typing.Literal["wsd", "linear", "cosine"] = "wsd"  # wsd, linear: warm up, stay, decay; cosine: only fall
    warmup_steps: int = 500  # the learning rate rises from 0
    decay_fraction: float = 0.1  # last part of max_steps, in which it falls (wsd, linear)
    min_lr_fraction: float = 0.0  # where it ends, as a share of the peak
    # every so many steps, and at the end; 0 = never
    log_interval: int = 10  # a line of numbers; its loss is the mean since the last one
    eval_interval: int = 500  # loss on held-out text
    save_interval: int = 1000  # ckpt_last; 0 = only at the end
    sample_interval: int = 2000  # a few lines of text
    eval_first: bool = False  # also before the first step
    eval_tokens: int = 2**20  # held-out tokens per evaluation, in windows spread evenly over the split, one at least
    keep: int = 0  # numbered checkpoints kept besides last and best
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    dtype: typing.Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls; weights stay float32
    residual_dtype: typing.Literal["float32", "bfloat16"] = "float32"  # of the sum that blocks add to; bfloat16 rounds
        # it after each, for less to move and to keep, and needs it for dtype too.  eval.py sums in float32 anyway
    tp: int = 1  # processes that hold one model together (tensor_parallel.py); the number of all is a multiple of it
    dp: typing.Literal["ddp", "fsdp"] = "ddp"  # several processes: a whole model in each, or a part of it
    remat: typing.Literal["none", "block", "selective"] = "none"  # keep less of a block, compute it again in backward
    compile: bool = True  # torch.compile the block, once for all layers
    deterministic: bool = False  # on a GPU too, runs repeat to the bit (a CPU's do anyway); `bench step` has the cost
    peak_tflops: float | None = None  # of one device, where its name is not known: for mfu, the share of it reached
    max_bad_steps: int = 20  # non-finite gradients in a row before giving up; each is skipped
    skip_spikes: float = 0.0  # skip a step whose gradient norm is so many standard deviations above its recent mean, of
                              # logarithms; 0 = none; those beyond 6 are counted anyway (spikes.py)
    wandb_project: str | None = None  # send the log to this project of Weights & Biases too
    wandb_name: str | None = None  # the run's name there; None: the last part of out_dir
    wandb_group: str | None = None  # runs that are shown together there
    tensorboard: bool = False  # write the log to out_dir/tensorboard too, for `tensorboard --logdir out`

    def __post_init__(self):
        for name in PATHS:
            setattr(self, name, expand(getattr(self, name)))

    def step_tokens(self, step: int) -> int:
        """Tokens of the step that comes after `step` others."""
        return self.batch_tokens // 2 if step < self.ramp_steps else self.batch_tokens

    def between(self, start: int, end: int) -> int:
        """Tokens of the steps that come after `start` others, up to and with the one numbered `end`."""
        halves = min(max(self.ramp_steps - start, 0), end - start)
        return (end - start) * self.batch_tokens - halves * (self.batch_tokens // 2)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.between(0, self.max_steps)

    def steps(self, tokens: int) -> int:
        """Steps that a run of so many tokens takes."""
        ramp = self.between(0, self.ramp_steps)
        if tokens < ramp:
            return -(-tokens // (self.batch_tokens // 2))
        return self.ramp_steps + -(-(tokens - ramp) // self.batch_tokens)

    @property
    def checkpoint(self) -> str | None:
        """The name of the checkpoint in out_dir that the run goes on from; None if it is a run of its own."""
        return {"resume": "ckpt_last"}.get(self.init_from) or (
            self.init_from.removeprefix("resume:") if self.init_from.startswith("resume:") else None)

    def problems(self) -> list[str]:
        """Every impossible setting, as sentences a user can act on."""
        bounds = {
            "be positive": (lambda x: x > 0, "seq_len micro_batch_size batch_tokens max_steps max_bad_steps "
                                             "eval_tokens tp"),
            "be 0 or more": (lambda x: x >= 0, "log_interval eval_interval save_interval sample_interval warmup_steps "
                                               "ramp_steps grad_clip weight_decay z_loss keep seed skip_spikes"),
            "be less than 2**63": (lambda x: x < 2**63, "seed"),
            "lie in [0, 1]": (lambda x: 0 <= x <= 1, "decay_fraction min_lr_fraction"),
            "lie in [0, 1)": (lambda x: 0 <= x < 1, "beta1 beta2"),
            "be positive, or None": (lambda x: x is None or x > 0, "peak_tflops muon_lr adamw_lr")}
        found = [f"{name} ({getattr(self, name)}) must {says}."
                 for says, (holds, names) in bounds.items() for name in names.split() if not holds(getattr(self, name))]
        found += [f"{name} ({getattr(self, name)!a}) {NO_UTF8}" for name in PATHS if no_utf8(getattr(self, name))]
        found += [f"{name} names no folder. Set --{name}." for name in PATHS if getattr(self, name) in ("", "hf:")]
        if self.out_dir and self.data_dir and os.path.realpath(self.out_dir) == os.path.realpath(self.data_dir):
            found.append(f"out_dir and data_dir are one folder, {self.out_dir}: a run needs its own. Set --out_dir.")
        if self.checkpoint is not None and not re.fullmatch(r"ckpt_\w+", self.checkpoint):
            found.append(f"init_from ({self.init_from}): the name of a checkpoint in out_dir is needed behind resume:. "
                         "Write resume:ckpt_step_N.")
        if self.residual_dtype == "bfloat16" and self.dtype not in ("auto", "bfloat16"):
            found.append(RESIDUAL_NEEDS_BFLOAT16.format(self.dtype))
        if self.keep_moments and self.init_from.startswith(("scratch", "hf:")):
            found.append(f"keep_moments needs a run to take moments from, and init_from is {self.init_from}. Set "
                         "--init_from=RUN, or leave out --keep_moments.")
        return found

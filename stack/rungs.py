"""The rungs of a ladder: small models of a config's shape, the lengths they are trained for, and what that costs.

One trunk a rung, at a constant learning rate; from it decays branch, each of which ends where a run made for that
length would have ended (Haegele et al., arXiv 2405.18392).  FLOPs are account.py's.
"""

import math
from dataclasses import replace
from pathlib import Path

from model import GPT, ModelConfig
from stack.counts import build, flops_per_token, lookup_params, num_params
from stack.device import PEAK_TFLOPS
from stack.law import REACH
from stack.optim import rates
from stack.train_config import PASSES, TrainConfig

POINTS = (5, 10, 20, 40)  # tokens per parameter at which a decay ends
WIDTHS = (1 / 3, 1 / 2, 2 / 3, 1)  # of the rungs, as parts of the widest
BATCH_POWER = 0.571  # tokens of a step go with the run's tokens to this power (Step Law, arXiv 2503.04715)


def family(cfg: ModelConfig, width: int) -> ModelConfig:
    """A model of the same shape: depth, heads and d_ff go with the width; heads stay as wide, the table as long.  Of
    models of one block none says what a second one is worth: three are the least, where the config has them, as two
    key heads are, without which runs end a tenth apart, by how soon they learn to repeat (docs/lab-notes.md)."""
    part, least = width / cfg.d_model, min(cfg.n_kv_heads, 2)
    kv_heads = max(round(cfg.n_kv_heads * part), least)
    queries = min(max(round(cfg.n_heads * part / kv_heads), 1), cfg.n_heads // cfg.n_kv_heads)  # of a key head
    return replace(cfg, d_model=width, n_layers=max(round(cfg.n_layers * part), min(cfg.n_layers, 3)),
                   n_heads=kv_heads * queries, n_kv_heads=kv_heads, d_ff=max(round(cfg.d_ff * part / 16), 1) * 16)


def parameters(cfg: ModelConfig | GPT) -> int:
    """Those that multiply, each once; a table that is only looked up is none of them."""
    return num_params(cfg)["total"] - lookup_params(cfg)


class Rung:
    """One width of the ladder: its trunk's settings, the steps at which decays begin and end."""

    def __init__(self, cfg: ModelConfig, train: TrainConfig, width: int, folder: Path, held_out: bool = False):
        self.model, self.held_out = family(cfg, width), held_out
        built = build(self.model)
        self.n = parameters(built)
        self.flops_per_token = flops_per_token(built, train.seq_len)["causal"]  # as account.py's for a run
        middle = self.n * math.sqrt(POINTS[0] * POINTS[-1])  # tokens: one batch and one rate serve all decays
        tokens, most = train.tokens, train.batch_tokens // train.seq_len
        rows = min(max(round(most * (middle / tokens) ** BATCH_POWER), 1), most)
        micro = min(train.micro_batch_size, rows)
        batch = rows // micro * micro * train.seq_len
        self.decay = decay = (
            min(train.decay_fraction, 0.9) if train.schedule != "cosine" and train.decay_fraction else 0.2)
        first = max(round((1 - decay) * POINTS[0] * self.n / batch), 1)
        self.starts = [first * point // POINTS[0] for point in POINTS]
        self.ends = [max(round(start / (1 - decay)), start + 1) for start in self.starts]
        new, known = rates(self.model, middle, batch, train.optimizer), rates(cfg, tokens, train.batch_tokens,
                                                                               train.optimizer)
        given = (train.muon_lr, train.adamw_lr)
        muon, adamw = (law if number is None or law is None else number * law / there
                       for law, there, number in zip(new, known, given, strict=True))
        self.name = f"width-{width}"
        self.trunk = replace(
            train, out_dir=str(folder / self.name), init_from="scratch", keep_moments=False, micro_batch_size=micro,
            batch_tokens=batch, ramp_steps=0, max_steps=self.starts[-1], decay_fraction=0.0,
            schedule="wsd" if train.schedule == "cosine" else train.schedule,
            warmup_steps=max(first // 10, 1), muon_lr=muon, adamw_lr=adamw, save_interval=first, eval_interval=0,
            keep=10_000, eval_first=False, sample_interval=0, wandb_project=None, tensorboard=False)

    @property
    def tokens(self) -> list[int]:
        """Training tokens of each decay's end, from the first step on."""
        return [end * self.trunk.batch_tokens for end in self.ends]

    def jobs(self) -> list[tuple[TrainConfig, int, int]]:
        """(settings, step it begins at, step it ends at): the trunk, then each decay."""
        decays = [(replace(self.trunk, out_dir=f"{self.trunk.out_dir}-x{point}", max_steps=end, keep=0,
                           decay_fraction=1 - start / end, save_interval=0, eval_interval=end), start, end)
                  for point, start, end in zip(POINTS, self.starts, self.ends, strict=True)]
        return [(self.trunk, 0, self.starts[-1]), *decays]

    def cost(self) -> float:
        """Training FLOPs of all jobs."""
        return float(sum(end - begin for _, begin, end in self.jobs()) * self.trunk.batch_tokens * self.flops_per_token)


def ladder(cfg: ModelConfig, train: TrainConfig, top: int, folder: Path) -> list[Rung]:
    widths = [round(top * part / 8) * 8 for part in WIDTHS]
    return [Rung(cfg, train, width, folder, held_out=width == top) for width in widths]


def tops(cfg: ModelConfig) -> range:
    """Widths that the widest rung may have: below the config's."""
    return range(48, cfg.d_model, 24)


def reach(rungs: list[Rung]) -> float:
    """FLOPs of the largest run that a law of these rungs is claimed to know."""
    return REACH * max(rung.tokens[-1] * rung.flops_per_token for rung in rungs if not rung.held_out)


def own_flops(cfg: ModelConfig, train: TrainConfig) -> float:
    """Training FLOPs of the config's own run, account.py's."""
    return float(train.tokens * flops_per_token(cfg, train.seq_len)["causal"])


def seconds(rungs: list[Rung], speed: list[list[float]]) -> float:
    """What all jobs take, by probes of the narrowest width and a wide one: [FLOPs per token, seconds per token, seconds
    to start once compiled, and before]; a rung's first job compiles."""
    (_, _, start, *cold), _ = speed
    return sum(rung.cost() / rung.flops_per_token * per_token(rung.flops_per_token, speed)
               + start * (len(rung.jobs()) - 1) + max(start, *cold) for rung in rungs)


def per_token(flops: float, speed: list[list[float]]) -> float:
    """Seconds that a token of so many FLOPs takes, by the same probes: a narrow model may be no faster a token."""
    (f0, s0, *_), (f1, s1, *_) = speed
    return s0 + max(s1 - s0, 0) / (f1 - f0) * (flops - f0)


def cheapest(ladders: dict[int, list[Rung]], cost: dict[int, float], whole: float, speed: list) -> str:
    """What the smallest of ladders by width takes, in minutes where speed was timed, how to ask for it, and that the
    config's own run takes `whole` FLOPs."""
    top = min(cost, key=cost.get)
    flops = sum(rung.cost() for rung in ladders[top])
    takes = f"{math.ceil(cost[top] / 60)} minutes here, as busy as it is, " * bool(speed) + f"{flops:.3g} FLOPs"
    least = ladders[top][0]
    table = least.model.padded_vocab_size * least.model.d_model
    fewer = (f"Of the narrowest rung's {least.n:,} parameters {table:,} are the table's: a smaller --vocab_size in "
             "prepare.py makes rungs cheaper, as do") if table > least.n / 2 else "Rungs are cheaper with"
    better = ", less than that, and tells more" if whole < flops else ""
    return (f"not enough: the smallest ladder below this model takes {takes}. Give it --budget {flops * 1.01:.3g}, "
            "which is the same however busy a machine is.\n"
            f"  A run of the config itself takes {whole:.3g} FLOPs{better}.\n  {fewer} narrower heads (--head_dim), "
            "fewer of them (--n_kv_heads, --n_heads), fewer --n_layers; the answer is then of that config.")


def beyond(cfg: ModelConfig, train: TrainConfig, folder: Path, rungs: list[Rung]) -> str:
    """What to say of a config that the rungs are too small for: which ladder it takes; "" where they are not."""
    whole, furthest = own_flops(cfg, train), reach(rungs)
    if whole <= furthest:
        return ""
    enough = next((other for top in tops(cfg) if reach(other := ladder(cfg, train, top, folder)) >= whole), None)
    said = (f"The run itself takes {whole:.3g} FLOPs, {whole / furthest * REACH:,.0f} times the largest fitted run: "
            f"beyond the {REACH} times that are claimed, so there will be no number for it.\n")
    if enough is None:
        return said + "No ladder below this model reaches that far: its run is too long."
    cost = sum(rung.cost() for rung in enough)
    hours = cost / (PEAK_TFLOPS["H100"] * 1e12 * 0.2) / 3600
    return said + (f"One that reaches takes {cost:.3g} FLOPs, on an H100 at 20 % of its peak {hours:.1f} hours:\n  "
                   f"python ladder.py CONFIG --device=cuda --budget {cost * 1.01:.3g}")


def describe(cfg: ModelConfig, train: TrainConfig, folder: Path, rungs: list[Rung], speed: list,
             n_tokens: int | None) -> str:
    """What will be trained and what it costs, and what to say of a config beyond it.  n_tokens: of the training text,
    None where it is not there yet."""
    lines = [f"{'rung':<14}{'shape':>10}{'parameters':>13}{'tokens, of the longest':>24}{'a step':>9}{'steps':>8}"
             f"{'muon_lr':>10}{'adamw_lr':>10}{'FLOPs':>10}"]
    for rung in rungs:
        muon, adamw = (f"{lr:.2g}" if lr else "" for lr in (rung.trunk.muon_lr, rung.trunk.adamw_lr))
        lines.append(f"{rung.name:<14}{f'{rung.model.d_model} x {rung.model.n_layers}':>10}{rung.n:>13,}"
                     f"{rung.tokens[-1]:>24,}{rung.trunk.batch_tokens:>9,}{rung.ends[-1]:>8,}{muon:>10}{adamw:>10}"
                     f"{rung.cost():>10.2g}{'  not fitted' * rung.held_out}")
    disk = sum(12 * rung.n * (len(POINTS) * 2 + POINTS[-1] // POINTS[0]) for rung in rungs) / 1e9
    jobs, most = sum(len(rung.jobs()) for rung in rungs), max(rung.tokens[-1] for rung in rungs)
    cost, own, took, alone = sum(rung.cost() for rung in rungs), own_flops(cfg, train), "", ""
    if speed:
        took, alone = (f", some {time / 60:.0f} minutes here" for time in (
            seconds(rungs, speed), train.tokens * per_token(own / train.tokens, speed)))
    lines.append(f"{jobs} runs, {cost:.3g} FLOPs{took}, up to {max(disk, 0.1):,.1f} GB of disk; the config's own run "
                 f"takes {own:.3g} FLOPs{alone}; what they tell is claimed up to {reach(rungs):.3g}")
    if train.schedule == "cosine" or rungs[0].decay != train.decay_fraction:
        lines.append(f"The rungs end with a decay over {rungs[0].decay:.0%} of their steps, which the config does not: "
                     "it is predicted as if it did.")
    if cost > own / 4:  # FLOPs of narrow models take several times as long
        lines.append("Narrow models use a machine badly: the config's own run may take no longer, and tells more.")
    if speed:
        lines.append(f"A busy machine is timed otherwise the next time; --budget {cost * 1.01:.3g} is always this one.")
    if n_tokens is None:
        lines.append(f"{train.data_dir} is not there: planned with the config's vocabulary of {cfg.vocab_size:,} ids.")
    elif most > PASSES * n_tokens:
        lines.append(f"{train.data_dir} has {n_tokens:,} tokens, which the longest run sees {most / n_tokens:.0f} "
                     "times: beyond four times a text teaches less, and the law knows of no repetition.")
    return "\n".join([*lines, beyond(cfg, train, folder, rungs)])

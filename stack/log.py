"""The log of a run: out/<run>/log.jsonl, its curves, Weights & Biases, TensorBoard.

It is a convenience: a full disk, a service that is down or a font that is missing costs log lines and one warning,
never the run (wandb has stopped runs elsewhere by raising from `log`).
"""

import contextlib
import json
import math
import sys
import time
import unicodedata
import warnings
from pathlib import Path

from stack.config import written_aside

SIGNS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"  # seen, though Cf
JOINERS = "\u200c\u200d"  # zero-width non-joiner and joiner


class RunLog:
    """out/<run>/log.jsonl, one object per line; loss.png; wandb and TensorBoard when asked.  None of it stops a run.

    On resume the lines after the resumed step are dropped, and what was evaluated at it, which the resumed run does
    again: steps stay monotone and no line is there twice.  `seconds`, in every line, is the time the run has taken so
    far, evaluations and all, without the time it lay still or what it did in vain.  Only rank 0 writes.
    """

    def __init__(self, out_dir, *, resume_step: int | None = None, enabled: bool = True, tensorboard: bool = False,
                 wandb_project: str | None = None, wandb_name: str | None = None, wandb_group: str | None = None,
                 config: dict | None = None, run_id: str | None = None):
        self.out_dir, self.enabled, self.run_id = Path(out_dir), enabled, run_id
        self.sinks, self.failed, self.began = {}, set(), time.monotonic()
        if not enabled:
            return
        kept = []
        path = self.out_dir / "log.jsonl"
        with self.forgive("log.jsonl"):
            kept = [line for line in (read_log(path) if resume_step is not None else []) if (
                line["step"] < resume_step or line["step"] == resume_step and not {"val_loss", "sample"} & {*line})]
            with written_aside(path) as aside, open(aside, "w", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in kept)
            self.sinks["log.jsonl"] = open(path, "a", encoding="utf-8", buffering=1)  # each line reaches the disk
        self.began -= max((line.get("seconds", 0) for line in kept), default=0)
        if tensorboard:
            with self.forgive("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
                writer = SummaryWriter(self.out_dir / "tensorboard", purge_step=resume_step or 0)
                self.sinks["tensorboard"] = writer
                for line in kept:
                    if line["step"] == resume_step:  # the purge hides this one too
                        show(writer, line)
        if wandb_project:
            with self.forgive("wandb"):
                import wandb
                run = wandb.init(project=wandb_project, name=wandb_name or self.out_dir.name, group=wandb_group,
                                 dir=str(self.out_dir), config=config, id=run_id, resume="allow")
                self.sinks["wandb"], self.run_id = run, run.id

    @contextlib.contextmanager
    def forgive(self, what: str):
        """Turn an error in the body into a warning, the first time, and go on behind it."""
        try:
            yield
        except Exception as error:
            if what not in self.failed:
                self.failed.add(what)
                warnings.warn(f"{what} failed and training goes on without it: {type(error).__name__}: {error}",
                              stacklevel=3)

    def write(self, **values):
        """Append one object; NaN and inf become null, which JSON can hold."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        values["seconds"] = round(time.monotonic() - self.began, 3)
        for what, sink in self.sinks.items():
            with self.forgive(what):
                if what == "log.jsonl":
                    sink.write(json.dumps(values) + "\n")
                elif what == "wandb":
                    sink.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])
                else:
                    show(sink, values)

    def plot(self):
        """Draw out/<run>/loss.png from the whole log."""
        if self.enabled:
            with self.forgive("loss.png"), written_aside(self.out_dir / "loss.png") as aside:
                draw([self.out_dir]).savefig(aside, format="png", dpi=120)

    def close(self, curves: bool = True):
        if curves:
            self.plot()
        for what, sink in self.sinks.items():
            with self.forgive(what):
                sink.finish() if what == "wandb" else sink.close()


def show(writer, values: dict):
    """One line of the log in TensorBoard, on disk at once."""
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_text(key, value, values["step"])
        elif key != "step" and value is not None:
            writer.add_scalar(key, value, values["step"])
    writer.flush()


def read_log(path) -> list[dict]:
    """The objects of a log.jsonl; a line cut short by a kill or a full disk, or no object, is left out."""
    lines = []
    if Path(path).exists():
        for text in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]


def visible(text: str, before: str = "") -> str:
    """Text as it is, but as Python spells them the characters that a terminal or a page would obey instead of showing:
    controls, separators of lines, what turns the direction of writing or cannot be seen (Unicode's Cc, Zl, Zp, Cf).

    Not those of Cf that are signs themselves (Arabic numbers' and others), nor the two that join letters and emoji,
    where they stand behind one that may need them: of a script from Arabic on.  before: the end of what was shown
    before this text."""
    shown = []
    for c in text:
        hidden = c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in SIGNS
        if c in JOINERS and before[-1:] >= "\u0600" and unicodedata.category(before[-1])[0] in "LMS":
            hidden = False
        shown.append(repr(c)[1:-1] if hidden else c)
        before = c
    return "".join(shown)


def on_terminal(text: str, before: str = "") -> str:
    """For standard output: made visible where a terminal would obey it, untouched for a file or another program."""
    return visible(text, before) if sys.stdout.isatty() else text


AXES = {"step": "step", "tokens": "tokens", "seconds": "seconds", "flops": "FLOPs"}  # key of the log -> what it counts


def draw(runs, xs=("step",)):
    """A figure of one or several run folders, a colour each: loss in training and held out above bits per byte, against
    each of the keys `xs` of their logs, a column each."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state
    from matplotlib.ticker import EngFormatter
    figure = Figure(figsize=(2 + 5 * len(xs), 6.5), layout="tight")
    axes = figure.subplots(2, len(xs), sharex="col", sharey="row", squeeze=False)
    late = []
    for i, run in enumerate(runs):
        log, name = read_log(Path(run) / "log.jsonl"), Path(run).name if len(runs) == 1 else str(run)
        name = visible(name).replace("$", r"\$")  # a name, no formula
        for x, (loss_axes, bpb_axes) in zip(xs, axes.T, strict=True):
            train, held, bpb = ([(line[x], line[key]) for line in log if None not in (line.get(x), line.get(key))]
                                for key in ("loss", "val_loss", "val_bpb"))
            for ax, points, look in ((loss_axes, train, dict(alpha=0.5, linewidth=1, label=f"{name} training")),
                                     (loss_axes, held, dict(marker="o", markersize=3, label=f"{name} held out")),
                                     (bpb_axes, bpb, dict(marker="o", markersize=3, label=f"{name} held out"))):
                if points:
                    ax.plot(*zip(*points, strict=True), color=f"C{i}", **look)
            late += [y for _, y in train[len(train) // 20:] + held]
    axes[0, 0].set_ylabel("loss, nats per token")
    axes[1, 0].set_ylabel("bits per byte")
    if late:
        axes[0, 0].set_ylim(top=max(late) * 1.05)  # the fall of the first steps would flatten all that follows
        axes[0, 0].legend(handles=axes[0, 0].lines)  # named, or it leaves out what begins with _
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    for x, ax in zip(xs, axes[1], strict=True):
        ax.set_xlabel(AXES[x])
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20G tokens
    return figure

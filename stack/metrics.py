"""Losses and logs: evaluation over fixed windows, the log file, the curves.

Loss in nats per token is what training minimises; bits per byte is what can be compared, between vocabularies and with
other repositories:  bpb = sum of nats / (ln 2 * bytes of the predicted tokens); special tokens count, as zero bytes.

A held-out loss is a property of the weights and the text, not of the machine: windows come in a fixed order, sums are
taken per token in float64, and neither the batch size nor the number of ranks enters.

The log is a convenience: a full disk, a service that is down or a font that is missing costs log lines and one warning,
never the run (wandb has stopped runs elsewhere by raising from `log`).
"""

import contextlib
import json
import math
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from stack.config import written_aside
from stack.device import autocast


@torch.no_grad()
def evaluate(model, windows, token_bytes, *, device, dtype=torch.float32, doc_mask: bool = False, ranks=None,
             rows: int = 0):
    """Loss, perplexity and bits per byte over batches of windows, each token weighing the same.

    windows yields (x, y, docs) as data.iterate_windows does, (b, T) int64 with y = -100 where nothing is to be
    predicted; token_bytes (vocab_size,) is the length of each id's text.  ranks: who shares the windows.  Batches
    smaller than `rows`, or than the ones before, are filled up with ignored rows: one shape for a compiled model.
    doc_mask: attention stays inside a document, as trained.  Returns {"loss", "ppl", "bpb", "tokens", "bytes"}.
    """
    token_bytes = torch.as_tensor(token_bytes, device=device, dtype=torch.int64)
    exact = "cpu" if device.type == "mps" else device  # MPS has no float64
    totals = torch.zeros(3, dtype=torch.float64, device=exact)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    try:
        for window in windows:
            rows = max(rows, len(window[0]))
            x, y, docs = (F.pad(part.to(device), (0, 0, 0, rows - len(part)), value=filling)
                          for part, filling in zip(window, (0, -100, 0), strict=True))
            with autocast(device, dtype):
                nats = model(x, y, docs=docs if doc_mask else None, reduction="none")  # (b*T,), 0 where ignored
            valid = y != -100
            totals += torch.stack([t.to(exact).double().sum() for t in (
                nats, valid, token_bytes[y.clamp(min=0)] * valid)])
    finally:
        model.train(was_training)
    nats, tokens, n_bytes = (ranks.sum(totals) if ranks is not None else totals).tolist()
    if tokens == 0:
        raise ValueError("there is no token to evaluate on. Prepare the data with a larger --val_fraction.")
    loss = nats / tokens
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "tokens": int(tokens), "bytes": int(n_bytes),
            "bpb": nats / (math.log(2) * n_bytes) if n_bytes else None}


class RunLog:
    """out/<run>/log.jsonl, one object per line; loss.png; wandb and TensorBoard when asked.  None of it stops a run.

    On resume the lines after the resumed step are dropped, and what was evaluated at it, which the resumed run does
    again: steps stay monotone and no line is there twice.  `seconds`, in every line, is the time the run has taken so
    far, evaluations and all, without the time it lay still or what it did in vain.  Only rank 0 writes.
    """

    def __init__(self, out_dir, *, resume_step: int | None = None, enabled: bool = True, tensorboard: bool = False,
                 wandb_project: str | None = None, config: dict | None = None, run_id: str | None = None):
        self.out_dir, self.enabled, self.run_id = Path(out_dir), enabled, run_id
        self.sinks, self.failed, self.began = {}, set(), time.monotonic()
        if not enabled:
            return
        kept = []
        path = self.out_dir / "log.jsonl"
        with self.forgive("log.jsonl"):
            kept = [line for line in (read_log(path) if resume_step is not None else []) if (
                line["step"] < resume_step or line["step"] == resume_step and "loss" in line)]
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
                run = wandb.init(project=wandb_project, name=self.out_dir.name, dir=str(self.out_dir), config=config,
                                 id=run_id, resume="allow")
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

    def close(self):
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


def printable(text: str) -> str:
    """A model's text with U+FFFD for what a console would obey and a page cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


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
        name = printable(name).replace("$", r"\$")  # a name, no formula
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

"""Losses and logs: evaluation over fixed windows, the log file, the curve.

Loss in nats per token is what training minimises; bits per byte is what can be compared, between vocabularies and
with other repositories:  bpb = sum of nats / (ln 2 * bytes of the predicted tokens).  Special tokens count as
predictions and as zero bytes.

A held-out loss is a property of the weights and the text, not of the machine: windows come in a fixed order, sums are
taken per token in float64, and neither the batch size nor the number of ranks enters.

The log is a convenience.  A full disk, a service that is down or a font that is missing costs log lines and one
warning, never the run (wandb has stopped runs elsewhere by raising from `log`).
"""

import contextlib
import json
import math
import os
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from data import document_ids
from device import autocast


@torch.no_grad()
def evaluate(model, windows, token_bytes, *, device, dtype=torch.float32, boundary_id: int | None = None, ranks=None,
             rows: int = 0):
    """Loss, perplexity and bits per byte over (x, y) batches, each token weighing the same.

    windows yields (x, y) of (b, T) int64 with y = -100 where nothing is to be predicted; token_bytes (vocab_size,) is
    the length of each id's text.  boundary_id: mask attention at documents, as trained.  ranks: who shares the windows.
    Batches smaller than `rows`, or than the ones before, are filled up with ignored rows, so that a compiled model
    meets one shape.  Returns {"loss", "ppl", "bpb", "tokens", "bytes"}.
    """
    token_bytes = torch.as_tensor(token_bytes, device=device, dtype=torch.int64)
    exact = "cpu" if device.type == "mps" else device  # MPS has no float64
    totals = torch.zeros(3, dtype=torch.float64, device=exact)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    try:
        for x, y in windows:
            x, y = x.to(device), y.to(device)
            rows = max(rows, len(x))
            if len(x) < rows:
                x = F.pad(x, (0, 0, 0, rows - len(x)), value=0 if boundary_id is None else boundary_id)
                y = F.pad(y, (0, 0, 0, rows - len(y)), value=-100)
            docs = None if boundary_id is None else document_ids(x, boundary_id)
            with autocast(device, dtype):
                nats = model(x, y, docs=docs, reduction="none")  # (b*T,), 0 where ignored
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
    """out/<run>/log.jsonl, one object per line; loss.png; wandb when asked.  Nothing here ever stops a run.

    On resume the lines after the resumed step are dropped, and what was evaluated at it, which the resumed run does
    again: steps stay monotone and no line is there twice.  Only rank 0 writes.
    """

    def __init__(self, out_dir, *, resume_step: int | None = None, enabled: bool = True,
                 wandb_project: str | None = None, config: dict | None = None, run_id: str | None = None):
        self.out_dir, self.enabled, self.wandb, self.file, self.run_id = Path(out_dir), enabled, None, None, run_id
        self.failed = set()
        if not enabled:
            return
        path = self.out_dir / "log.jsonl"
        with self.forgive("log.jsonl"):
            kept = [line for line in (read_log(path) if resume_step is not None else []) if (
                line["step"] < resume_step or line["step"] == resume_step and "loss" in line)]
            aside = path.with_suffix(".tmp")
            with open(aside, "w", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in kept)
            os.replace(aside, path)
            self.file = open(path, "a", encoding="utf-8", buffering=1)  # a line at a time reaches the disk
        if wandb_project:
            with self.forgive("wandb"):
                import wandb
                self.run_id = run_id or wandb.util.generate_id()
                self.wandb = wandb.init(project=wandb_project, name=self.out_dir.name, dir=str(self.out_dir),
                                        config=config, id=self.run_id, resume="allow")

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
        if not self.enabled:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        if self.file is not None:
            with self.forgive("log.jsonl"):
                self.file.write(json.dumps(values) + "\n")
        if self.wandb is not None:
            with self.forgive("wandb"):
                self.wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def plot(self):
        """Draw out/<run>/loss.png from the whole log."""
        if self.enabled:
            with self.forgive("loss.png"):
                plot_losses([self.out_dir], self.out_dir / "loss.png")

    def close(self):
        self.plot()
        if self.file is not None:
            with self.forgive("log.jsonl"):
                self.file.close()
        if self.wandb is not None:
            with self.forgive("wandb"):
                self.wandb.finish()


def read_log(path) -> list[dict]:
    """The objects of a log.jsonl; a line cut short by a kill or a full disk is left out."""
    lines = []
    if Path(path).exists():
        for text in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(text))
    return lines


def plot_losses(runs, png_path):
    """Training and held-out loss against the step, a colour per run folder."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state
    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.add_subplot()
    for i, run in enumerate(runs):
        log, name = read_log(Path(run) / "log.jsonl"), Path(run).name
        train = [(line["step"], line["loss"]) for line in log if line.get("loss") is not None]
        held = [(line["step"], line["val_loss"]) for line in log if line.get("val_loss") is not None]
        if train:
            axes.plot(*zip(*train, strict=True), color=f"C{i}", alpha=0.4, linewidth=1, label=f"{name} train")
        if held:
            axes.plot(*zip(*held, strict=True), color=f"C{i}", marker="o", markersize=3, label=f"{name} held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    aside = Path(png_path).with_suffix(".tmp.png")
    figure.savefig(aside, dpi=120)
    os.replace(aside, png_path)

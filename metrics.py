"""Losses and logs: evaluation over fixed windows, the log line and file, the curve.

Loss in nats per token is what training minimises; bits per byte is what can be compared, between vocabularies and
with other repositories:  bpb = sum of nats / (ln 2 * bytes of the predicted tokens).  Special tokens count as
predictions and as zero bytes.
"""

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
def evaluate(model, windows, token_bytes, *, device, dtype=torch.float32, boundary_id: int | None = None, ranks=None):
    """Loss, perplexity and bits per byte over (x, y) batches, each token weighing the same.

    windows yields (x, y) of (b, T) int64 with y = -100 where nothing is to be predicted; token_bytes (vocab_size,) is
    the length of each id's text.  boundary_id: mask attention at documents, as trained.  The result depends neither on
    the batch size (a smaller last batch is filled with ignored rows, so that a compiled model meets one shape) nor, when
    `ranks` share the windows, on their number.  Returns {"loss", "ppl", "bpb", "tokens", "bytes"}.
    """
    token_bytes = torch.as_tensor(token_bytes, device=device, dtype=torch.int64)
    exact = "cpu" if device.type == "mps" else device  # MPS has no float64
    totals = torch.zeros(3, dtype=torch.float64, device=exact)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    rows = 0
    for x, y in windows:
        x, y = x.to(device), y.to(device)
        rows = max(rows, len(x))
        if len(x) < rows:
            x = F.pad(x, (0, 0, 0, rows - len(x)), value=0 if boundary_id is None else boundary_id)
            y = F.pad(y, (0, 0, 0, rows - len(y)), value=-100)
        docs = None if boundary_id is None else document_ids(x, boundary_id)
        with autocast(device, dtype):
            nats = model(x, y, docs=docs, reduction="sum")
        valid = y != -100
        totals += torch.stack([t.to(exact).double() for t in (
            nats, valid.sum(), (token_bytes[y.clamp(min=0)] * valid).sum())])
    model.train(was_training)
    nats, tokens, n_bytes = (ranks.sum(totals) if ranks is not None else totals).tolist()
    if tokens == 0:
        raise ValueError("there is no token to evaluate on. Prepare the data with a larger --val_fraction.")
    loss = nats / tokens
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "tokens": int(tokens), "bytes": int(n_bytes),
            "bpb": nats / (math.log(2) * n_bytes) if n_bytes else None}


class RunLog:
    """out/<run>/log.jsonl, one object per line; loss.png; wandb when asked.  Nothing here ever stops a run.

    On resume, lines from the resumed step on are dropped, so that steps stay monotone.  Only rank 0 writes.
    """

    def __init__(self, out_dir, *, resume_step: int | None = None, enabled: bool = True,
                 wandb_project: str | None = None, config: dict | None = None, run_id: str | None = None):
        self.out_dir, self.enabled, self.wandb, self.file, self.run_id = Path(out_dir), enabled, None, None, run_id
        if not enabled:
            return
        path = self.out_dir / "log.jsonl"
        with _Forgiving("log.jsonl"):
            kept = read_log(path) if resume_step is not None else []
            aside = path.with_suffix(".tmp")
            with open(aside, "w", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in kept if line.get("step", 0) <= resume_step)
            os.replace(aside, path)
            self.file = open(path, "a", encoding="utf-8", buffering=1)  # a line at a time reaches the disk
        if wandb_project:
            with _Forgiving("wandb"):
                import wandb
                self.run_id = run_id or wandb.util.generate_id()
                self.wandb = wandb.init(project=wandb_project, name=self.out_dir.name, dir=str(self.out_dir),
                                        config=config, id=self.run_id, resume="allow")

    def write(self, **values):
        """Append one object; NaN and inf become null, which JSON can hold."""
        if not self.enabled:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        if self.file is not None:
            with _Forgiving("log.jsonl"):
                self.file.write(json.dumps(values) + "\n")
        if self.wandb is not None:
            with _Forgiving("wandb"):
                self.wandb.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def plot(self):
        """Draw out/<run>/loss.png from the whole log."""
        if self.enabled:
            with _Forgiving("loss.png"):
                plot_losses([self.out_dir], self.out_dir / "loss.png")

    def close(self):
        self.plot()
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            with _Forgiving("wandb"):
                self.wandb.finish()


class _Forgiving:
    """Turns an error in the body into one warning: a full disk or a lost service costs a log line, not the run."""

    warned: set = set()

    def __init__(self, what: str):
        self.what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and isinstance(error, Exception):
            if self.what not in self.warned:
                self.warned.add(self.what)
                warnings.warn(f"{self.what} failed and is left out from here on: {type(error).__name__}: {error}",
                              stacklevel=2)
            return True
        return False


def read_log(path) -> list[dict]:
    """The objects of a log.jsonl; a last line cut short by a kill is left out."""
    lines = []
    if Path(path).exists():
        for text in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                break
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

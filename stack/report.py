"""One page about a run, out/<run>/report.html: what it was, how it went, what it writes, on what machine, how to go on.

The page holds all it shows: no script, no font, no picture from elsewhere, so that it can be sent to somebody and still
opens years later.  Colours are the browser's own (CSS system colours), which makes it light or dark as the reader has
it.  Everything that comes from the run is escaped; a model's samples may be any text, HTML among it.

Drawn by log.draw, the curves here are those of loss.png.  What a part of the page needs and the machine lacks (git,
a commit, a name) is left out.
"""

import dataclasses
import datetime
import html
import io
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from stack.config import written_aside
from stack.counts import components, flops_per_token, kv_cache_bytes_per_token, num_params
from stack.device import machine
from stack.log import draw, read_log, visible

STYLE = """
:root { color-scheme: light dark; --curve: #1f77b4 }
@media (prefers-color-scheme: dark) { :root { --curve: #6db3e8 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 0 3rem; align-items: start }
table { border-collapse: collapse; width: 100% } caption { text-align: left; font-weight: 600; padding: .6rem 0 .2rem }
th { font-weight: 400; text-align: left; opacity: .75; padding-right: 1rem; white-space: nowrap; vertical-align: top }
td { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
tr { border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .7rem 1rem; border-radius: 6px; margin: .5rem 0;
      background: color-mix(in srgb, currentColor 7%, transparent); font: 13px/1.45 ui-monospace, monospace }
svg { max-width: 100%; height: auto } svg text { fill: currentColor }
summary { cursor: pointer }
"""


def write_report(out_dir, model_cfg, cfg, *, step: int, device: torch.device, dtype: torch.dtype, n_ranks: int,
                 resume: str, curves: bool = True):
    """Write out_dir/report.html from the log and what the caller knows: the step reached, the machine, and the command
    `resume` that goes on.  curves: draw them, for which matplotlib needs seconds, at its first time on a machine many.
    """
    log, name = read_log(Path(out_dir) / "log.jsonl"), _text(Path(out_dir).name)
    state = "finished" if step >= cfg.max_steps else "stopped"
    parts = ["<!doctype html>", "<html lang=en><meta charset=utf-8>",
             "<meta name=viewport content='width=device-width'>", f"<title>{name}</title>", f"<style>{STYLE}</style>",
             f"<h1>{name}</h1>",
             f"<p>{state} at step {step:,} of {cfg.max_steps:,}, {datetime.datetime.now():%Y-%m-%d %H:%M}</p>",
             "<div class=columns>", _table("Result", _result(log)), _table("Speed", _speed(log, device)), "</div>",
             "<h2>Curves</h2>", _svg(draw([out_dir], ("tokens", "seconds"))) if curves else
             f"<p>Ended by a signal. To draw them:</p><pre>python plot.py {_text(shlex.quote(str(out_dir)))}</pre>",
             "<h2>Samples</h2>", *_samples(log),
             "<h2>Account</h2>", "<div class=columns>", *_account(model_cfg, cfg), "</div>",
             "<h2>Machine</h2>", "<div class=columns>", _table("Environment", [
                 ("device", machine(device)), ("processes", f"{n_ranks}"),
                 ("matmuls in", str(dtype).removeprefix("torch.")), ("torch", torch.__version__),
                 ("Python", platform.python_version()), ("system", platform.platform())]),
             _table("Code", _commit()), "</div>",
             "<h2>Go on</h2>", f"<pre>{_text(resume)}\npython sample.py {_text(shlex.quote(str(out_dir)))}</pre>",
             "<h2>Settings</h2>", "<p>Bold: not the default, which follows in brackets.</p>", "<div class=columns>",
             *[_table(type(c).__name__, _settings(c), raw=True) for c in (model_cfg, cfg)], "</div>", "</html>\n"]
    with written_aside(Path(out_dir) / "report.html") as aside:
        aside.write_text("\n".join(parts), encoding="utf-8")


def _text(value) -> str:
    return html.escape(visible(str(value)))


def _table(title: str, rows, raw: bool = False) -> str:
    """rows: (name, value) pairs; raw: the values are HTML already."""
    body = "\n".join(f"<tr><th>{_text(name)}<td>{value if raw else _text(value)}" for name, value in rows)
    return f"<table><caption>{_text(title)}</caption>\n{body}\n</table>"


def _result(log) -> list[tuple]:
    train, held = ([line for line in log if line.get(key) is not None] for key in ("loss", "val_loss"))
    rows = []
    if held:
        last, best = held[-1], min(held, key=lambda line: line["val_loss"])
        rows.append(("held-out loss, nats per token", f"{last['val_loss']:.4f}, step {last['step']:,}"))
        if last.get("val_bpb") is not None:
            rows.append(("held-out bits per byte", f"{last['val_bpb']:.4f}"))
        rows.append(("lowest held-out loss", f"{best['val_loss']:.4f}, step {best['step']:,}"))
    if train:
        rows += [("training loss", f"{train[-1]['loss']:.4f}"), ("tokens learned", f"{train[-1]['tokens']:,}"),
                 ("FLOPs", f"{train[-1]['flops']:.3g}"),
                 *([("spikes of the gradient", f"{n:,}")] if (n := train[-1].get("spikes")) else [])]
    return rows + [("time taken", datetime.timedelta(seconds=round(log[-1]["seconds"])))] if log else rows


def _speed(log, device) -> list[tuple]:
    rows = []
    for key, name, form in (("tok_per_s", "tokens a second", "{:,.0f}"), ("step_ms", "milliseconds a step", "{:,.1f}"),
                            ("mfu", "share of peak FLOPs", "{:.1%}"), ("data_wait", "waiting for data", "{:.2%}")):
        if values := [line[key] for line in log if line.get(key) is not None]:
            rows.append((f"{name}, median", form.format(statistics.median(values))))
    if device.type == "cuda":
        rows.append(("peak GPU memory", f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB"))
    elif sys.platform == "linux":
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append(("peak memory of the process", f"{peak / 2**10:,.0f} MiB"))
    return rows


def _samples(log) -> list[str]:
    """Each text the run wrote on its way, the last one open."""
    samples = [(line["step"], line["sample"] or "(the end, at once)") for line in log if "sample" in line]
    return [f"<details{' open' if step == samples[-1][0] else ''}><summary>step {step:,}</summary>"
            f"<pre>{_text(text)}</pre></details>" for step, text in samples] or ["<p>none</p>"]


def _account(model_cfg, cfg) -> list[str]:
    counts, flops = num_params(model_cfg), flops_per_token(model_cfg, cfg.seq_len)
    total, tokens = counts["total"], cfg.tokens
    cache = kv_cache_bytes_per_token(model_cfg) * model_cfg.max_seq_len
    parts = [(name, f"{n:,} ({n / total:.1%})") for name, n in components(counts).items()]
    return [_table("Parameters", [*parts, ("all", f"{total:,}")]), _table("Costs", [
        ("weights in float32", f"{4 * total / 2**20:,.1f} MiB"),
        (f"bfloat16 KV cache, {model_cfg.max_seq_len:,} tokens", f"{cache / 2**20:,.2f} MiB"),
        ("training FLOPs per token", f"{flops['causal']:,}"), ("tokens of the whole run", f"{tokens:,}"),
        ("FLOPs of the whole run", f"{tokens * flops['causal']:.3g}")])]


def _settings(instance):
    defaults = dataclasses.asdict(type(instance)())
    for key, value in dataclasses.asdict(instance).items():
        changed = value != defaults[key]
        yield key, f"<b>{_text(value)}</b> ({_text(defaults[key])})" if changed else _text(value)


def _commit() -> list[tuple]:
    """The code's commit and whether files differ from it; not known without git or outside of a checkout."""
    def git(*words):
        return subprocess.run(["git", "-C", Path(__file__).parent, *words], capture_output=True, text=True, timeout=10,
                              check=True, errors="replace").stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        return [("commit", git("log", "-1", "--format=%h %cs, %s")),
                ("changed since", ", ".join(line[2:].strip() for line in changed) or "nothing")]
    except (OSError, subprocess.SubprocessError):
        return [("commit", "not known")]


def _svg(figure) -> str:
    """The figure as an <svg> element that takes the page's colours."""
    import matplotlib
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    drawn = drawn.getvalue()
    drawn = drawn[drawn.index("<svg"):]
    for theirs, ours in (("#000000", "currentColor"), ("#ffffff", "Canvas"), ("#1f77b4", "var(--curve)")):
        drawn = drawn.replace(theirs, ours)
    return drawn

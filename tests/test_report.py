"""report.html: true, whole by itself, and never the reason why a run ends."""

import re
import signal
import types
from html.parser import HTMLParser

import pytest
import runs
import torch

import train
from stack import report
from stack.log import RunLog

HOSTILE = "</pre><script>alert('x')</script> & \x00\x1b[31m \u202e &lt;"


@pytest.fixture(scope="module")
def page(data, tmp_path_factory):
    """The report of an ordinary run."""
    out = runs.run(data, tmp_path_factory.mktemp("runs") / "a<b>&c", max_steps=4, eval_interval=2, sample_interval=2)
    return out, (out / "report.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags that are open, every attribute, the cells of the tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.rows, self.texts = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in ("meta", "tr", "th", "td"):  # void, or closed by what follows
            self.open.append(tag)
        if tag in ("th", "td"):
            self.texts.append("")

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.rows |= dict(zip(self.texts[::2], self.texts[1::2], strict=True))
            self.texts = []

    def handle_data(self, text):
        if self.texts:
            self.texts[-1] += text.strip("\n")


def test_the_numbers_are_the_runs(page):
    """Loss, bits per byte, tokens, parameters and settings are those of log and config; what was changed is bold."""
    out, text = page
    rows = Page(text).rows
    train, held = runs.log(out, key="loss")[-1], runs.log(out, key="val_loss")[-1]
    assert rows["training loss"] == f"{train['loss']:.4f}" and rows["tokens learned"] == "1,024"
    assert rows["held-out loss, nats per token"] == f"{held['val_loss']:.4f}, step {held['step']:,}"
    assert rows["held-out bits per byte"] == f"{held['val_bpb']:.4f}"
    assert rows["all"] == f"{train_params(out):,}" and rows["torch"] == torch.__version__
    assert rows["d_model"] == "32 (512)" and "<b>32</b> (512)" in text and rows["tie_embeddings"] == "True"
    assert "finished at step 4 of 4" in text and text.count("<svg") == 1 and "bits per byte</text>" in text
    assert text.count("<details") == 2 and "config.json' --init_from=resume" in text.replace("&#x27;", "'")


def train_params(out):
    from stack.checkpoint.tensors import load_model
    return sum(p.numel() for p in load_model(out)[0].parameters())


def test_whole_by_itself(page):
    """Well-formed; no script, nothing to fetch: every address is within the page."""
    parsed = Page(page[1])
    assert parsed.open == [] and "<script" not in page[1] and "@import" not in page[1]
    addresses = [value for _, name, value in parsed.attributes if name in ("src", "href", "xlink:href", "action")]
    assert addresses and all(value.startswith("#") for value in addresses)
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)", page[1]))


def write(out, log=(), **changes):
    log_file = RunLog(out)
    for line in log:
        log_file.write(**line)
    log_file.close()
    report.write_report(out, *runs.settings("data", out, **changes), step=2, device=torch.device("cpu"),
                        dtype=torch.float32, n_ranks=1, resume=HOSTILE)
    return (out / "report.html").read_text(encoding="utf-8")


def test_nothing_is_taken_for_html(tmp_path):
    """Samples, paths and commands are text, whatever they hold; what no page may hold is spelled out."""
    out = tmp_path / "<script>x"
    out.mkdir()
    text = write(out, [dict(step=1, sample=HOSTILE)])
    parsed = Page(text)
    assert parsed.open == [] and "<script" not in text and not set("\x00\x1b\u202e") & set(text)
    assert text.count("&lt;/pre&gt;&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; \\x00\\x1b[31m") == 2


def test_without_log_or_git(tmp_path, monkeypatch):
    """A run that logs nothing, on a machine without git: the page lacks that, and is whole."""
    monkeypatch.setenv("PATH", "")
    text = write(tmp_path)
    assert Page(text).open == [] and "stopped at step 2 of 6" in text and Page(text).rows["commit"] == "not known"


@pytest.mark.parametrize("end", ["stop", "failure", "error"])
def test_however_the_run_ends(data, tmp_path, monkeypatch, end):
    """Stopped, given up or failed: the page is there and says how far it came; after a signal, on which somebody may
    wait, nothing is drawn."""
    hooks = {"stop": lambda step: step == 1 and signal.raise_signal(signal.SIGTERM),
             "failure": lambda step: True, "error": lambda step: step == 2 and 1 / 0}
    runs.at(monkeypatch, hooks[end])
    try:
        runs.run(data, tmp_path / "run", max_bad_steps=2)
    except (train.RunFailed, ZeroDivisionError):
        assert end != "stop"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped at step 2 of 6" in page and Page(page).open == []
    for drawn in ("<svg" in page, (tmp_path / "run" / "loss.png").exists(), "python plot.py" not in page):
        assert drawn == (end != "stop")


def test_a_failing_report_costs_the_report(data, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", types.SimpleNamespace)  # not callable with a run
    with pytest.warns(UserWarning, match="report.html failed and training goes on"):
        out = runs.run(data, tmp_path / "run", max_steps=1)
    assert runs.progress(out)["step"] == 1 and not list(out.glob("report.html*"))

"""plot.py: each run's own numbers, over each other, against what was asked for."""

import io
import json
import re
import sys

import pytest
from matplotlib.figure import Figure

import plot
from stack import log as log_module


@pytest.fixture
def folders(tmp_path):
    """Two runs of which one did half as much work a step and has nulls, and one that has not begun."""
    for name, unit in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        lines = [dict(step=s, loss=None if (name, s) == ("a", 3) else 10 / s, tokens=s * unit * 100, seconds=s * unit,
                      flops=s * unit * 1e9) for s in range(1, 41)]
        lines += [dict(step=s, val_loss=9 / s, val_bpb=3 / s, tokens=s * unit * 100, seconds=s * unit + 0.6,
                       flops=s * unit * 1e9) for s in (20, 40)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").touch()
    return tmp_path


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, argv)])
    plot.main()


@pytest.mark.parametrize("xs", [("step",), ("tokens", "seconds", "flops")])
def test_curves_are_the_logs(folders, xs):
    """A line per run and kind, through the log's points and no others, in the run's colour; loss above, bits below."""
    figure = log_module.draw([folders / "a", folders / "b", folders / "empty"], xs)
    assert isinstance(figure, Figure) and len(figure.axes) == 2 * len(xs)
    for x, loss, bpb in zip(xs, figure.axes, figure.axes[len(xs):], strict=False):
        lines = {line.get_label(): line for line in loss.lines}
        assert [name.rpartition("/")[2] for name in lines] == ["a training", "a held out", "b training", "b held out"]
        unit = 1 if x == "step" else 2
        b = lines[f"{folders / 'b'} training"].get_xydata()
        scale = {"step": 1, "tokens": 100, "seconds": 1, "flops": 1e9}[x]
        assert b.tolist() == [[s * unit * scale, 10 / s] for s in range(1, 41)]
        assert len(lines[f"{folders / 'a'} training"].get_xydata()) == 39  # without the null
        assert [line.get_ydata().tolist() for line in bpb.lines] == [[3 / 20, 3 / 40]] * 2
        assert len({line.get_color() for line in loss.lines}) == 2
    assert figure.axes[0].get_ylim()[1] < 6  # the first steps do not flatten the rest


@pytest.mark.parametrize("name, magic", [("new/both.png", b"\x89PNG"), ("both.svg", b"<?xml"), ("both", b"\x89PNG")])
def test_the_picture(folders, monkeypatch, capsys, name, magic):
    """Written whole under its name, in the format of its ending; where each run ended is printed."""
    run(monkeypatch, folders / "a", folders / "b", "--out", folders / name)
    assert (folders / name).read_bytes().startswith(magic) and not list(folders.rglob("*.tmp"))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4 and said[1].split()[1:] == ["40", "4,000", "41", "4e+10", "0.2500", "0.2250", "0.0750"]
    assert "pyplot" not in " ".join(sys.modules)


def test_names_are_names(folders, monkeypatch):
    """Of a run named like a formula, or like what matplotlib hides, the name is what the legend shows."""
    for name in (r"$x_{$", "_a"):
        (folders / name).mkdir()
        (folders / name / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.chdir(folders)
    run(monkeypatch, r"$x_{$", "_a", "--x", "step", "--out", "out.svg")
    figure = log_module.draw([r"$x_{$", "_a"])
    figure.savefig(svg := io.StringIO(), format="svg")
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == [r"\$x_{\$ training", "_a training"]
    assert "<!-- $x_{$ training -->" in svg.getvalue() and "<!-- _a training -->" in svg.getvalue()


def test_refusals(folders, monkeypatch, capsys):
    """Exit code 2 and one message: no run folder, nothing to draw yet, an axis that the log does not have."""
    (folders / "old").mkdir()
    (folders / "old" / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n5\nnull\n')
    for argv, message in (([folders], "is no run folder"), ([folders / "empty"], "no losses yet"),
                          ([folders / "old"], "tokens and seconds and flops.*\n.*--x step"),
                          ([folders / "a", "--out", folders / "x.what"], "what"),
                          ([folders / "a", "--out", folders], f"is a folder.\n.*--out {folders}/plot.png")):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, *argv)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and re.search(message, error) and "Traceback" not in error
    run(monkeypatch, folders / "old", "--x", "step", "--out", folders / "old.png")

"""The bench measures what it says: memory, rows that compute the same loss, one JSON object a row, a README table."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import bench

SMALL = ["--n_tokens=96", "--d_model=16", "--vocab=512", "--dtype=float32", "--device=cpu", "--repeats=2"]


def run(*args):
    return subprocess.run([sys.executable, ROOT / "bench.py", *args], capture_output=True, text=True, timeout=120)


def test_peak_memory():
    """The peak is what a call touches above what was held, freed again or not; what was freed before is not held."""
    def touch(mib):
        torch.empty(mib << 18).fill_(1.0)
    cpu = torch.device("cpu")
    touch(300)
    for mib in (200, 50):
        assert abs(bench.peak_mib(lambda mib=mib: touch(mib), cpu) - mib) < 5


def test_seconds():
    """One call more than repeats is made, and only the repeats are timed."""
    calls = []
    assert len(bench.seconds(lambda: calls.append(1), torch.device("cpu"), 4)) == 4 and len(calls) == 5


@pytest.mark.parametrize("name", ["naive", "checkpointed 4096", "F.linear_cross_entropy accurate",
                                  "F.linear_cross_entropy auto", "ours"])
def test_rows_compute_the_same(name):
    """Every row is the same loss with the same gradients (PyTorch's chunked one in fp32, where it is right)."""
    rows = bench.head_rows(torch.device("cpu"))
    if name not in rows:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    args = argparse.Namespace(n_tokens=96, d_model=16, vocab=512, dtype="float32")
    hidden, weight, targets = bench.head_inputs(args, torch.device("cpu"))
    loss = rows[name](hidden, weight, targets)
    loss.backward()
    for got, want in zip((loss, hidden.grad, weight.grad), bench.head_truth(hidden, weight, targets, chunk=40),
                         strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-7)


def test_checkpointed_chunks():
    """The checkpointed row really works in chunks, ignored targets included."""
    args = argparse.Namespace(n_tokens=96, d_model=16, vocab=512, dtype="float32")
    hidden, weight, targets = bench.head_inputs(args, torch.device("cpu"))
    targets[:30] = -100
    chunked, whole = bench.checkpointed(hidden, weight, targets, chunk=25), bench.naive(hidden, weight, targets)
    torch.testing.assert_close(chunked, whole)


def test_head_json():
    """`bench.py head --json` prints one object a row with the contract's keys."""
    done = run("head", "--json", "--rows=naive,ours", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["row"] for row in rows] == ["naive", "ours"]
    for row in rows:
        assert row["bench"] == "head" and row["seconds"] > 0 and row["floor_seconds"] > 0 and row["peak_mib"] >= 0
        assert row["loss_error"] < 1e-5 and row["grad_error"] < 1e-5


def test_head_table_of_chunks():
    """`bench.py head --chunks` prints a markdown table of chunk sizes under machine, date and command."""
    done = run("head", "--chunks", *SMALL)
    assert done.returncode == 0, done.stderr
    title, _, header, rule, *body = done.stdout.splitlines()
    assert all(part in title for part in ("`python bench.py head --chunks", torch.__version__, "96 is the default"))
    assert header.split("|")[2].strip() == "seconds" and set(rule) == {"|", "-"}
    assert len({len(line) for line in (header, rule, *body)}) == 1
    assert [line.split("|")[1].strip() for line in body] == ["ours chunk 96", "floor: the matmuls"]


def test_a_row_that_fails(monkeypatch, capsys):
    """A row that breaks is reported on stderr, the others are still measured, and the exit code says so."""
    monkeypatch.setattr(sys, "argv", ["bench.py", "head", "--json", "--rows=naive", *SMALL])
    monkeypatch.setattr(bench, "in_fresh_processes", lambda command, rows: iter(()))
    monkeypatch.setattr(bench, "matmul_rate", lambda *args: 1.0)
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == 1
    monkeypatch.undo()
    assert not list(bench.in_fresh_processes(["head", *SMALL], ["no such row"]))
    assert "row 'no such row' failed: KeyError" in capsys.readouterr().err


@pytest.mark.parametrize("args, message", [
    (["head", "--rows=nonsense"], "no row 'nonsense'"), (["head", "--device=cuda:99"], "cuda:99"),
    (["head", "--repeats=0"], "--repeats is 0"), (["head", "--device=nonsense"], "nonsense")])
def test_user_errors(args, message, monkeypatch, capsys):
    """A wrong argument is one line on stderr and exit code 2."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    with pytest.raises(SystemExit) as error:
        bench.main()
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and len(err.splitlines()) == 1

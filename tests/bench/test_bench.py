"""The bench measures what it says: memory, rows that compute the same loss, one JSON object a row, a README table."""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
import torch
from conftest import ROOT, table, tiny_config
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import model
from bench import __main__ as bench
from bench import head, measure, peers, prepare, sample, step
from model import GPT
from stack.counts import num_params
from stack.exchange import gguf as ours_gguf
from stack.exchange import hf

SMALL = ["--n_tokens=96", "--d_model=16", "--vocab=512", "--dtype=float32", "--device=cpu", "--repeats=2"]


TINY = ["--device=cpu", "--repeats=1", "--vocab_size=320", "--d_model=32", "--n_layers=1", "--n_heads=2",
        "--n_kv_heads=1", "--head_dim=16", "--d_ff=48", "--max_seq_len=32", "--seq_len=32", "--compile=false",
        "--dtype=float32"]


def run(*args):
    return subprocess.run([sys.executable, "-m", "bench", *args], cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_peak_memory():
    """The peak is what a call touches above what was held, freed again or not; what was freed before is not held."""
    def touch(mib):
        torch.empty(mib << 18).fill_(1.0)
    cpu = torch.device("cpu")
    touch(300)
    for mib in (200, 50):
        peak = measure.reset_peak(cpu)
        touch(mib)
        assert abs(peak() - mib) < 5


def watched() -> dict:
    p = torch.nn.Parameter(torch.zeros(8 << 18))  # 8 MiB
    optimizer, watch = torch.optim.AdamW([p], fused=True), step.Watch(torch.device("cpu"), 4)

    def one_step():
        torch.empty(100 << 18).fill_(1.0)
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.grad = None
    with register_optimizer_step_pre_hook(watch.before), register_optimizer_step_post_hook(watch.after):
        for _ in range(4):
            one_step()
        torch._dynamo.utils.counters["stats"]["unique_graphs"] += 2
        with pytest.raises(step.Measured):
            one_step()
    return watch.seen()


def test_watch(tmp_path):
    """Seen from an optimizer: memory of a step above weights and moments, their size, graphs compiled late, the end; in
    a process of its own, where no other test's memory is used again."""
    [seen] = runs.call_ranks(1, tmp_path, watched)
    assert (seen["state_mib"], seen["recompiled"]) == (32, 2) and seen["optimizer_seconds"] > 0
    # moments, like weights, have 16 MiB; libraries' pages that a step reads for the first time, up to 9 here
    assert abs(seen["step_mib"] - 108) < 12 and 15 < seen["peak_mib"] - seen["step_mib"] < 40


def test_seconds():
    """One call more than repeats is made, and only the repeats are timed."""
    calls = []
    assert len(measure.seconds(lambda: calls.append(1), torch.device("cpu"), 4)) == 4 and len(calls) == 5


@pytest.mark.parametrize("name", ["naive", "checkpointed 4096", "F.linear_cross_entropy accurate",
                                  "F.linear_cross_entropy auto", "ours"])
def test_rows_compute_the_same(name):
    """Every row is the same loss with the same gradients (PyTorch's chunked one in fp32, where it is right)."""
    calls = head.head_rows(torch.device("cpu"))
    if name not in calls:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    args = argparse.Namespace(n_tokens=96, d_model=16, vocab=512, dtype="float32")
    hidden, weight, targets = head.head_inputs(args, torch.device("cpu"))
    loss = calls[name](hidden, weight, targets)
    loss.backward()
    for got, want in zip((loss, hidden.grad, weight.grad), head.head_truth(hidden, weight, targets, chunk=40),
                         strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-7)


def test_checkpointed_chunks():
    """The checkpointed row really works in chunks, ignored targets included."""
    args = argparse.Namespace(n_tokens=96, d_model=16, vocab=512, dtype="float32")
    hidden, weight, targets = head.head_inputs(args, torch.device("cpu"))
    targets[:30] = -100
    chunked, whole = head.checkpointed(hidden, weight, targets, chunk=25), head.naive(hidden, weight, targets)
    torch.testing.assert_close(chunked, whole)


def test_head_table_of_chunks():
    """`python -m bench head --chunks` prints a markdown table of chunk sizes under machine, date and command."""
    done = run("head", "--chunks", *SMALL)
    assert done.returncode == 0, done.stderr
    title, _, header, rule, *body = done.stdout.splitlines()
    assert all(part in title for part in ("`python -m bench head --chunks", torch.__version__, "96 is the default"))
    assert header.split("|")[2].strip() == "seconds" and set(rule) == {"|", "-"}
    assert len({len(line) for line in (header, rule, *body)}) == 1
    assert [line.split("|")[1].strip() for line in body] == ["ours chunk 96", "floor: the matmuls"]


def test_a_row_that_fails(monkeypatch, capsys):
    """A row that breaks is reported on stderr, the others are still measured, and the exit code says so."""
    monkeypatch.setattr(sys, "argv", ["bench", "head", "--json", "--rows=naive", *SMALL])
    monkeypatch.setattr(measure, "run_row", lambda command, row, **_: dict(row=row, failed="it broke"))
    monkeypatch.setattr(head, "matmul_rate", lambda *args: 1.0)
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == 1 and "row 'naive' failed: it broke" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["bench", "head", *SMALL])
    assert measure.run_rows(argparse.Namespace(folder=""), torch.device("cpu"), ["no such row"], table=None)
    assert "row 'no such row' failed: KeyError" in capsys.readouterr().err


def test_head_json(here):
    """`python -m bench head --json` prints one object a row with the contract's keys."""
    code, out, err = here("head", "--json", "--rows=naive,ours", *SMALL)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["row"] for row in rows] == ["naive", "ours"]
    for row in rows:
        assert row["bench"] == "head" and row["seconds"] > 0 and row["floor_seconds"] > 0 and row["peak_mib"] >= 0
        assert row["loss_error"] < 1e-5 and row["grad_error"] < 1e-5


@pytest.mark.parametrize("shape", ["ours", "GPT-2", "document masks"])
def test_plain_model_is_ours(shape):
    """With the same weights the plain model has our loss and our gradients: it is the same work."""
    cfg = tiny_config(vocab_size=320)
    cfg = peers.gpt2_shape(cfg) if shape == "GPT-2" else cfg
    ours, (plain, loss_of) = GPT(cfg), peers.trained("plain", cfg, "cpu")
    plain.load_state_dict({k.replace(".attn.", ".").replace(".mlp.", "."): v for k, v in ours.state_dict().items()})
    ids = torch.randint(0, 320, (2, 33))
    docs = (ids[:, :-1] < 60).cumsum(1) if shape == "document masks" else None
    losses = ours(ids[:, :-1], ids[:, 1:], docs=docs), loss_of(ids[:, :-1], ids[:, 1:], docs)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(ours.embed.weight.grad, plain.embed.weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("peer", ["transformers", "litgpt"])
def test_packages_train_our_model(peer):
    """As many parameters as ours; transformers, which takes our weights, has our loss."""
    pytest.importorskip(peer)
    cfg = tiny_config(vocab_size=320)
    ours, (theirs, loss_of) = GPT(cfg), peers.trained(peer, cfg, "cpu")
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    ids = torch.randint(0, 320, (2, 32))
    if peer == "transformers":
        theirs.load_state_dict(hf.to_theirs(ours), strict=False)
        assert loss_of(ids, ids, None).item() == pytest.approx(ours(ids[:, :-1], ids[:, 1:]).item(), rel=1e-4)
    assert loss_of(ids, ids, None).item() < 8


def test_step_is_what_train_does(tmp_path, monkeypatch, here):
    """The row's first loss is that of train.py's first step with the same settings on the same data."""
    data = runs.make_data(tmp_path / "data")
    model_cfg, cfg = runs.settings(data, tmp_path / "run", batch_tokens=64, max_steps=1, warmup_steps=1, doc_mask=False,
                                   z_loss=0.0, n_layers=1)
    monkeypatch.setattr(runs.train, "keep_freed_memory", lambda: None)
    runs.train.run(model_cfg, cfg)
    monkeypatch.setattr(step, "write_data", lambda folder, *_: shutil.copytree(data, folder, dirs_exist_ok=True))
    row = measure.run_row(["step", *TINY, "--z_loss=0"], "ours")
    assert row["loss"] == pytest.approx(runs.log(tmp_path / "run")[0]["loss"], rel=1e-6)
    assert row["state_mib"] == pytest.approx(16 * num_params(model_cfg)["total"] / 2**20, abs=0.05)


@pytest.mark.parametrize("flags", [[], ["--doc_mask", "--optimizer=muon"]])
def test_step(here, flags):
    """Ours and the plain peers side by side, all about as surprised as a new model is, and the floor below them."""
    code, out, err = here("step", "--json", "--rows=ours,plain eager,plain compiled", *TINY, *flags)
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err, [row["row"] for row in rows]) == (0, "", ["ours", "plain eager", "plain compiled"])
    for row in rows:
        assert row["loss"] == pytest.approx(5.8, abs=0.2) and row["tok_per_s"] == pytest.approx(64 / row["seconds"])
        assert 0 < row["of_floor"] < 1 and 0 <= row["data_wait"] < 1 and row["peak_mib"] >= 0
        assert 0 < row["optimizer_of_16"] < row["optimizer_seconds"] / row["seconds"]
    code, out, _ = here("step", "--rows=ours,plain compiled", "--deterministic", *TINY, *flags)
    assert table(out)["plain compiled"]["x best compiled peer"] == "1" and "floor: the matmuls" in table(out)


def test_sample(here):
    """Every row gives the tokens asked for; limits and ratios stand beside them."""
    sizes = ["--prompt_tokens=4", "--new_tokens=5", "--prefill_tokens=8", "--batch=3"]
    code, out, err = here("sample", "--json", *sizes, *TINY)
    assert code == 0, err
    rows = {row["row"]: row for line in out.splitlines() for row in [json.loads(line)]}
    assert list(rows) == sample.sample_rows()
    half, quarter = (rows[f"ours {how}"]["weight_bytes"] for how in ("bf16", "int8"))
    assert rows["ours fp32"]["weight_bytes"] == 2 * half and half > quarter > 320 * 32 * 2  # the table stays bf16
    for row in rows.values():
        assert row["of_bandwidth"] == pytest.approx(row["tok_per_s"] * row["weight_bytes"] / row["bytes_per_s"])
        assert row["of_gemm"] > 0 and row["prefill_tok_per_s"] > 0
    _, out, _ = here("sample", "--rows=ours fp32,transformers fp32", *sizes, *TINY)
    assert table(out)["transformers fp32"]["x transformers"] == "1"


def test_a_model_for_llama_cpp(tmp_path):
    """The random model reaches a GGUF file with all its tensors and as many words."""
    gguf = pytest.importorskip("gguf")
    cfg = tiny_config(vocab_size=1000)
    reader = gguf.GGUFReader(peers.write_gguf(cfg, tmp_path, "q8_0"))
    wanted = ours_gguf.theirs(hf.settings_to_hf(cfg), hf.to_theirs(GPT(cfg)))
    assert {t.name for t in reader.tensors} == wanted.keys() and len(
        reader.fields["tokenizer.ggml.tokens"].contents()) == 1000


def test_prepare(here):
    """Ours beside the bare libraries over the same text."""
    code, out, err = here("prepare", "--repeats=1", "--vocab=400", "--spaceless=1", "--text", ROOT / "prepare.py",
                          ROOT / "train.py")
    assert code == 0, err
    assert list(table(out)) == list(prepare.ROWS)
    assert 0 < float(table(out)[prepare.SPACELESS]["peak MiB"]) < 300
    assert [table(out)[row]["x the bare one"] for row in (prepare.POOL, prepare.RUST)] == ["1", "1"]


def test_growth(here, monkeypatch):
    """A table per axis; state grows with the depth, the head's peak not with the batch; beside each row what it costs
    more than the one above."""
    monkeypatch.setitem(model.CHUNK_BYTES, "cpu", 1 << 20)
    tiny = [*TINY, "--vocab_size=4096", "--axis=micro_batch_size=8,64", "--axis=n_layers=1,2"]
    code, out, err = here("growth", *tiny, "--json")
    assert code == 0 and "micro_batch_size=64 done" in err, err
    few, many, shallow, deep = rows = list(map(json.loads, out.splitlines()))
    assert (few["tokens"], many["tokens"]) == (256, 2048) and few["state_mib"] == many["state_mib"]
    assert deep["state_mib"] > shallow["state_mib"] and deep["row"] == "n_layers=2"
    assert many["head_mib"] < few["head_mib"] + 8  # all of the logits would be 28 MiB more, and as much again
    monkeypatch.setattr(measure, "run_row", lambda *args, **_: rows.pop(0))
    monkeypatch.setitem(many, "seconds", few["seconds"] + 1)
    monkeypatch.setitem(deep, "step_mib", shallow["step_mib"] + 3)
    _, batch, layers = here("growth", *tiny)[1].split("Our training step")
    assert table(batch)["64"]["us for each further token"] == f"{1e6 / 1792:.0f}"
    assert table(layers)["2"]["KiB for each further layer"] == "3,072" and table(layers)["1"]["x the first"] == "1"


def test_a_killed_row_leaves_nothing_running(monkeypatch, tmp_path):
    """What a row had started ends with it, however it ended."""
    row = tmp_path / "row"
    row.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path / 'started'}\nkill -9 $$\n")
    row.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(row))
    assert "exit code -9" in measure.run_row(["gpu"], "learning", timeout=60)["failed"]
    stat = Path(f"/proc/{(tmp_path / 'started').read_text().strip()}/stat")
    for _ in range(100):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return
    raise AssertionError("it still runs")


def test_a_row_that_hangs():
    """A row is given up when its time is over."""
    assert measure.run_row(["head", *SMALL], "ours", timeout=0.1)["failed"] == "not ready after 0 s"


@pytest.mark.parametrize("args, message", [
    (["head", "--rows=nonsense"], "no row 'nonsense'"), (["head", "--device=cuda:99"], "cuda:99"),
    (["head", "--repeats=0"], "--repeats is 0"), (["head", "--device=nonsense"], "nonsense"),
    (["head", "--n_layers=3"], "--n_layers=3 is nothing"), (["step", "--n_layer=3"], "n_layer is n_layers"),
    (["head", "--d_modle=3"], "--d_modle=3 is nothing that head knows. Did you mean --d_model?"),
    (["step", "--rows=theirs"], "no row 'theirs'"), (["growth", "--axis=width"], "no axis 'width'"),
    (["gpu", "--rows=ours"], "no setting 'rows'"), (["gpu"], "there is no GPU here"),
    *((["gpu", f"--minutes={n}"], f"--minutes is {n}; it must be") for n in ("nan", "inf", "0", "-3", "1e+30"))])
def test_user_errors(args, message, monkeypatch, capsys):
    """A wrong argument is one line on stderr and exit code 2."""
    monkeypatch.setattr(sys, "argv", ["bench", *args])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        bench.main()
    err = capsys.readouterr().err
    assert error.value.code == 2 and message in err and len(err.splitlines()) == 1

"""The bench measures what it says: memory, rows that compute the same loss, one JSON object a row, a README table."""

import argparse
import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from conftest import ROOT, tiny_config
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import model
from account import AccountConfig
from bench import __main__ as bench
from bench import checks, gpu, head, measure, peers, prepare, sample, step
from model import GPT
from stack import device, twins
from stack.counts import num_params
from stack.data.batches import Batches
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


@pytest.fixture
def here(monkeypatch, capsys, tmp_path, request):
    """here(*args) -> (exit code, stdout, stderr) of bench in this process, its rows too, with nothing compiled."""
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))  # a row's own process ends with it

    def main(*argv):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, argv)])
        bench.main()

    def run_row(command, row, timeout=None, cache=None):
        argv, out = sys.argv, io.TextIOWrapper(io.BytesIO(), write_through=True)
        with contextlib.redirect_stdout(out):
            try:
                main(*command, "--row", row)
            except Exception as error:
                return dict(row=row, failed=f"{type(error).__name__}: {error}")
            finally:
                sys.argv = argv  # a row that is train.py has its own
        *before, last = measure.objects(out.buffer.getvalue().decode())
        return last | (dict(before=before) if before else {})

    def call(*argv):
        code = 0
        try:
            main(*argv)
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as a row's process has its own
    monkeypatch.setattr(measure, "run_row", run_row)
    monkeypatch.setattr(gpu, "run_row", run_row)
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)  # is for good, and other tests measure memory
    monkeypatch.setitem(measure.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(measure.MATMUL_SIZE, "cpu", 256)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(measure.gc, "collect", lambda: 0)  # half a second in a process full of other tests' modules
    yield call
    torch.compiler.set_stance("default")


def table(out):
    """Rows of the last markdown table, by their first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


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


MISSING = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
missing = {"rustbpe", "datasets", "pyarrow", "matplotlib", "wandb", "tensorboard", "gguf", "transformers", "jinja2",
           "zstandard", "hypothesis", "pytest", "pandas", "litgpt", "llama_cpp"}
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.split(".")[0] in missing else find(name, *rest))
"""


@pytest.mark.skipif("BENCH_GPU" not in os.environ, reason="more than a minute: make faults runs it")
def test_gpu_on_a_cpu_without_packages(tmp_path):
    """The script for a card runs whole on a CPU where only what a CUDA image has is installed: a line for each check,
    measurement and evaluation, every one as it should be."""
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    results = tmp_path / "there" / "gpu.jsonl"
    done = subprocess.run([sys.executable, "-m", "bench", "gpu", "--tiny", "--minutes=15", "--device=cpu",
                           f"--results={results}"], cwd=ROOT, capture_output=True, text=True, timeout=900,
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = list(map(json.loads, results.read_text().splitlines()))
    rows = {line["row"]: line for line in lines}
    assert lines[0]["row"] == "machine" and "transformers" not in lines[0]["packages"]
    assert {*checks.CHECKS, *gpu.MEASURED, "ours", "plain eager", "ours bf16", "naive", "log", "learning"} == (
        {*rows} - {"machine"})
    assert all(rows[name]["ok"] for name in (*checks.CHECKS, "learning"))
    assert rows["learning"]["bits_per_byte"] < rows["learning"]["bits_per_byte_first"] < 10
    recipe = next(line for line in lines if line.get("what", "").endswith("the recipe"))
    assert recipe["whole_step_seconds"] > recipe["micro_step_seconds"] and recipe["of_gemm"] > 0
    assert set(table(done.stdout)) >= {*checks.CHECKS, "ceilings", recipe["what"]}


@pytest.fixture
def script(here, monkeypatch, tmp_path):
    """script(*flags) -> (exit code, the new lines), of functions and rows that do nothing; broken: names that raise."""
    broken = set()

    def function(name):
        def call(args, device):
            if name in broken:
                raise RuntimeError(f"{name} broke\nat length")
            return dict(ok=True)
        return call
    for functions in (gpu.CHECKS, gpu.MEASURED):
        for name in functions:
            monkeypatch.setitem(functions, name, function(name))
    monkeypatch.setattr(gpu, "learning", function("learning"))
    in_process = measure.run_row

    def run_row(command, row, **options):
        return in_process(command, row, **options) if command[0] == "gpu" else dict(
            row=row, failed=f"{row} broke") if row in broken else dict(row=row)
    monkeypatch.setattr(gpu, "run_row", run_row)
    results = tmp_path / "gpu.jsonl"

    def call(*flags):
        before = len(gpu.read_log(results))
        code, call.out, call.err = here("gpu", "--tiny", "--device=cpu", f"--results={results}", *flags)
        assert "Traceback" not in call.err
        return code, gpu.read_log(results)[before:]
    return call, broken


ALL = [*checks.CHECKS, *gpu.MEASURED, "ours", "plain eager", "ours bf16", "naive", "learning"]


def test_gpu_goes_on_where_a_part_fails(script):
    """Each part made to fail by itself, and all together: its failure is in the file, and so are the others."""
    run, broken = script
    code, whole = run()
    assert code == 0 and {line["row"] for line in whole} >= set(ALL)
    for names in [[name] for name in ALL] + [ALL]:
        broken |= set(names)
        code, lines = run("--json")
        assert code == 1 and [line["row"] for line in lines] == [line["row"] for line in whole]
        assert {line["row"] for line in lines if "failed" in line} == broken
        assert all(line["failed"].endswith(f"{line['row']} broke") for line in lines if line["row"] in broken)
        broken.clear()
    code, lines = run("--minutes=0.05")
    assert code == 0 and {line.get("left_out") for line in lines[1:]} == {"no time left"} and len(lines) == len(whole)


@pytest.mark.parametrize("ended, failed", [
    (dict(failed="exit code -9"), True), (dict(failed="not ready after 150 s", late=True), False)])
def test_gpu_where_a_process_dies(script, monkeypatch, ended, failed):
    """One that hangs or is killed takes nothing with it: what it had done is there, what it was doing failed, the rest
    is done in another one.  What others left too little time for has a process, and the time, for itself."""
    run, _ = script
    in_process, first = gpu.run_row, next(iter(gpu.CHECKS))

    def dies(command, row, **options):
        names = row.split(";")
        if "document masks" not in names[1:]:
            return in_process(command, row, **options)
        for name in names[:names.index("document masks")]:
            in_process(command, name, **options)
        return dict(row=row, **ended)
    monkeypatch.setattr(gpu, "run_row", dies)
    code, lines = run()
    rows = {line["row"]: line for line in lines}
    assert code == failed and rows[first]["ok"] and rows["loss head"]["ok"]
    assert failed or rows["document masks"]["ok"]
    assert [line["row"] for line in lines if "failed" in line] == ["document masks"] * failed


def wrong_decoding(model, times=1.02):
    model.decoder = lambda model, cache, docs: lambda ids: twins.plain_step(model, cache, docs)(ids) * times


def wrong_start(self, *args, start_seq=0, begin=Batches.__init__, **options):
    begin(self, *args, **options)


def wrong_run(model_cfg, cfg, trained=checks._trained, **changes):
    return trained(model_cfg, replace(cfg, grad_clip=0.01 if changes["out_dir"].endswith("there") else 1.0), **changes)


def wrong_part(*args, dp, cut=checks.parallelize, **options):
    replica = cut(*args, dp=dp, **options)
    with torch.no_grad():
        next(replica.parameters()).mul_(1 + 0.1 * (dp == "fsdp"))
    return replica


WRONG = {  # check -> what makes it wrong
    "flagship step": (model.MLP, "forward", lambda self, x: self.w_down(self.w_gate(x) * self.w_up(x))),
    "document masks": (model.GPT, "mask", lambda self, where, size, docs: (
        torch.arange(size) <= where[:, None])[None, None]),
    "attention": (checks.kernels, "attention", lambda q, k, v, mask, right=checks.kernels.attention: right(
        q, k, v, None)),
    "loss head": (checks.head, "head_rows", lambda device: {
        "ours": lambda hidden, weight, targets, chunk: 1.001 * head.naive(hidden, weight, targets)}),
    "decoding": (twins.decode.Step, "__call__", lambda self, ids, right=twins.decode.Step.__call__: (  # is put aside
        right(self, ids) * 1.02)),
    "id out of range": (checks, "fused_linear_cross_entropy", lambda *args: torch.zeros((), requires_grad=True)),
    "resume to the bit": (Batches, "__init__", wrong_start),
    "losses of the CPU": (checks, "_trained", wrong_run),
    "one rank": (checks, "parallelize", wrong_part),
}


@pytest.mark.parametrize("name", checks.CHECKS)
def test_gpu_checks_see_what_is_wrong(name, monkeypatch, tmp_path, request):
    """Each check is false where what it looks at is."""
    request.addfinalizer(lambda: torch.compiler.set_stance("default"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(*WRONG[name])
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # decoding's, to which it goes over: a minute
    args = argparse.Namespace(settings=[*gpu.TINY, f"--compile={str(name == 'decoding').lower()}"])
    assert checks.CHECKS[name](args, torch.device("cpu"))["ok"] is False


@pytest.mark.parametrize("name", ["flagship step", "document masks"])
def test_gpu_checks_of_what_is_compiled(name, monkeypatch):
    """That all twins are equal, which is said too, is as it should be; one that is put aside is not."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    args = argparse.Namespace(settings=[*gpu.TINY, "--compile=true"])
    seen = checks.CHECKS[name](args, torch.device("cpu"))
    assert seen["ok"] and seen["said"] == []
    monkeypatch.setattr(twins, "BOUND", -1)
    seen = checks.CHECKS[name](args, torch.device("cpu"))
    assert not seen["ok"] and "does not compute" in seen["said"][0]


def test_gpu_says_that_nothing_is_compiled(here, monkeypatch, tmp_path, request):
    """In the line of each row that tried, which for a check is wrong; a row that compiles nothing says nothing."""
    request.addfinalizer(lambda: torch.compiler.set_stance("default"))
    broken = type("InductorError", (Exception,), {"__module__": "torch._inductor.exc"})

    def compile(function, **_):
        def call(*args, **options):
            raise broken("no compiler")
        return call
    monkeypatch.setattr(torch, "compile", compile)
    flags = [*gpu.TINY, "--compile=true", "--device=cpu", "--repeats=1"]
    names = ["flagship step", "step by parts", "losses of the CPU", "attention"]
    measure.run_row(["gpu", *flags, "--tiny", "--results", str(tmp_path / "gpu.jsonl")], ";".join(names))
    lines = {line["row"]: line for line in gpu.read_log(tmp_path / "gpu.jsonl")}
    assert [lines[name].get("compiled") for name in names] == [False] * 3 + [None]
    assert [lines[name].get("ok") for name in names] == [False, None, False, True]
    assert gpu.note(lines["flagship step"]).startswith("WRONG: NOT COMPILED: ")
    assert measure.run_row(["step", *flags], "ours")["compiled"] is False


def test_gpu_sees_nan(monkeypatch):
    """Beside numbers that are right, max would pass it over."""
    nan, cpu, args = float("nan"), torch.device("cpu"), argparse.Namespace(settings=[*gpu.TINY])
    assert checks.worst([1.0, nan, 2.0]) != checks.worst([1.0, nan, 2.0]) and checks.worst([1.0, 3.0, 2.0]) == 3
    monkeypatch.setattr(twins, "fast_decoding", functools.partial(wrong_decoding, times=nan))
    seen = checks.decoding(argparse.Namespace(settings=[*gpu.TINY, "--compile=true"]), cpu)
    assert seen["ok"] is False and "logit_error nan" in gpu.note(dict(row="decoding", **seen))
    runs_of = {"there": [1.0, nan, 1.0], "here": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(checks, "_trained", lambda model_cfg, cfg, out_dir, **_: [
        dict(loss=loss, grad_norm=1.0) for loss in runs_of[out_dir.rpartition("/")[2]]])
    assert checks.losses(args, cpu)["ok"] is False
    right = checks.kernels.attention
    monkeypatch.setattr(checks.kernels, "attention", lambda *args: right(*args) * nan)
    assert checks.attention(args, cpu)["ok"] is False


def test_gpu_target_outside_with_gradients(monkeypatch):
    """Named, but gradients are damaged: wrong."""
    def refuse(hidden, weight, targets, then=0.0):
        hidden.grad = torch.full_like(hidden, then)
        raise ValueError("target 64 is outside")
    args = argparse.Namespace(settings=gpu.TINY)
    for then, ok in ((0.0, True), (float("nan"), False)):
        monkeypatch.setattr(checks, "fused_linear_cross_entropy", functools.partial(refuse, then=then))
        assert checks.outside(args, torch.device("cpu"))["ok"] is ok


def test_gpu_of_a_changed_model(monkeypatch):
    """A second gate: plain PyTorch cannot stand beside it, model.py itself can, and the line names what was changed."""
    def __init__(self, cfg, begin=model.MLP.__init__):
        begin(self, cfg)
        self.w_gate2 = torch.nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
    monkeypatch.setattr(model.MLP, "__init__", __init__)
    monkeypatch.setattr(model.MLP, "forward", lambda self, x: self.w_down(
        self.w_gate(x).sigmoid() * self.w_gate2(x) * self.w_up(x)))
    seen = checks.flagship(argparse.Namespace(settings=gpu.TINY), torch.device("cpu"))
    assert seen["ok"] and "blocks.0.w_gate2.weight" in seen["beside"]
    assert "w_gate2" in gpu.note(dict(row="flagship step", **seen))


def test_gpu_reasons_are_shown():
    """Why a check is wrong stands before its numbers; an error's first line has the next behind it where it names
    nothing."""
    line = dict(row="losses", differ=["embed.weight"], said="torn", error=float("nan"), device="x", ok=False)
    assert gpu.note(line) == "WRONG: differ embed.weight, said torn, error nan"
    assert measure.beginning("E: loading GPT:\n\tUnexpected key w2.\n\tMore.") == "E: loading GPT: Unexpected key w2."
    assert gpu.note(line | dict(ok=True)) == "as it should: error nan"
    assert measure.beginning("E: broke\nat length") == "E: broke"


def test_gpu_on_a_full_disk(script, monkeypatch):
    """What cannot be written is printed, the table at the end as ever; said once."""
    run, _ = script
    code, whole = run()

    def full(path, text):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(gpu, "write", full)
    code, lines = run()
    assert (code, lines) == (0, []) and run.err.count("cannot be written") == 1
    assert [line["row"] for line in measure.objects(run.out)] == [line["row"] for line in whole]
    assert {*checks.CHECKS, "ceilings", "learning"} <= {*table(run.out)}


def test_gpu_writes_whole_lines(tmp_path):
    """A line for which there is no room leaves nothing behind."""
    limited = ("import resource, sys; from bench.gpu import write; "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
               "write(sys.argv[1], 'x' * 70 + '\\n'); write(sys.argv[1], 'y' * 70 + '\\n')")
    done = subprocess.run([sys.executable, "-c", limited, tmp_path / "lines"], cwd=ROOT, capture_output=True, text=True)
    assert "OSError" in done.stderr and (tmp_path / "lines").read_text() == "x" * 70 + "\n"


def test_gpu_says_where_and_how_it_ended(script, monkeypatch):
    """The device, the minutes and the file first; at the end how many rows are as they should be, and which are not."""
    run, broken = script
    broken |= {"ceilings"}
    monkeypatch.setitem(gpu.CHECKS, "attention", lambda args, device: dict(ok=False))
    monkeypatch.setitem(gpu.MEASURED, "step by parts", lambda args, device: dict(left_out="no bf16"))
    assert run()[0] == 1
    first, *_, last = run.err.splitlines()
    assert "1 core" in first and " 8 minutes" in first and "gpu.jsonl" in first
    assert "1 (attention) WRONG, 1 (ceilings) failed, 1 (step by parts) left out" in last
    monkeypatch.setattr(gpu, "run_row", lambda *args, **_: exec("raise KeyboardInterrupt"))
    assert run()[0] == 130 and "gpu.jsonl; the same command begins anew and appends" in run.err


def test_gpu_rows_cut_short(script, monkeypatch):
    """A row that the end of the minutes cuts short has not failed; one that hangs has."""
    run, _ = script
    monkeypatch.setattr(gpu, "run_row", lambda command, row, **_: dict(row=row, late=True,
                                                                       failed="not ready after 7 s"))
    code, lines = run("--minutes=0.15")
    assert code == 1 and [line["row"] for line in lines if "failed" in line] == ["learning"]
    assert all(line["left_out"] == "no time left" for line in lines[1:-1])
    assert all("failed" in line for line in run()[1][1:])


def test_gpu_plan_for_older_cards(monkeypatch):
    """Without bf16 in the matmuls, rows of the bf16 stream say so; documents are as long as account.py's."""
    args = argparse.Namespace(settings=[], tiny=False, repeats=2, results="x")
    assert gpu.MEAN_DOC_LEN == AccountConfig.mean_doc_len
    monkeypatch.setattr(gpu, "sequences", lambda device: 8)
    monkeypatch.setattr(gpu, "pick_dtype", lambda name, device: torch.float16)
    planned = gpu.plan(args, torch.device("cuda"))
    assert [(row, command["left_out"][:23]) for *_, command, row in planned if isinstance(command, dict)] == [
        ("ours bf16", "matmuls are in float16 "), ("ours", "matmuls are in float16 ")]
    assert "bfloat16" in gpu.rounded_stream(args, torch.device("cuda"))["left_out"]
    steps = [command for *_, command, _ in planned if "step" in command]
    assert steps and all("--mean_doc_len=1000" in command for command in steps)
    assert all("--dtype=auto" in command for *_, command, _ in planned if not isinstance(
        command, dict) and command[0] in ("step", "gpu"))


def test_gpu_learning_out_of_time(monkeypatch, tmp_path):
    """Stopped before there are two evaluations it has learned nothing wrong; its log's seconds are the run's."""
    args = argparse.Namespace(settings=gpu.TINY, tiny=True, minutes=0.001, folder=str(tmp_path), results=tmp_path / "x",
                              row="learning")

    def late(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)
    with monkeypatch.context() as preparing:
        preparing.setattr(gpu.subprocess, "run", late)
        assert gpu.learning(args, torch.device("cpu")) == dict(left_out="no time left")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.jsonl").write_text('{"step": 0, "val_bpb": 9.0, "seconds": 3}\n')
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **_: argparse.Namespace(returncode=0, stdout=""))
    started = []

    def sleeps(command, begin=subprocess.Popen, **options):
        started.append(command)
        return begin([sys.executable, "-c", "import time; time.sleep(60)"], **options)
    monkeypatch.setattr(gpu.subprocess, "Popen", sleeps)
    seen = gpu.learning(args, torch.device("cpu"))
    assert seen["left_out"] == "no time left" and seen["bits_per_byte"] == 9 and "ok" not in seen
    assert started[0].index("--dtype=auto") == started[0].index("configs/stack100m.py") + 1
    assert gpu.read_log(args.results)[0]["run_seconds"] == 3


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

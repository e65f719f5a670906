"""bench gpu: every part ends in a line, a check is wrong where what it looks at is, nothing takes the rest with it."""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, table

import model
from account import AccountConfig
from bench import checks, gpu, head, measure
from stack import device, twins
from stack.data.batches import Batches

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

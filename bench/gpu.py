"""What a card computes, how fast, and what it learns, within minutes: `python -m bench gpu`.

For a card that nobody can log into twice.  Needed are torch (2.11 or newer), numpy, safetensors, tiktoken, tqdm and, to
learn, the tokenizers that transformers brings; transformers, litgpt, Liger-Kernel and cut-cross-entropy are rows where
they are installed; there is no download.  Each result is a line of JSON in --results from the moment it is known, in
the order of its worth, the machine first:

    right      checks.py, each against something that cannot be wrong in the same way
    fast       the ceilings, a step by its parts, settings against each other (linears merged or not, stream, attention,
               head chunks: docs/gpu.md says which default follows), whole steps beside the peers', heads, decoding
    learning   what is left of the time, a quarter at least: configs/stack100m.py's shape on the Python code that is
               installed here

What runs does so in processes of its own, under a time limit, with one cache of compiled code: what fails, hangs or
takes the card's context with it is a line too, and the rest goes on.  Exit code 1: something failed or is not as it
should be; what was left out, for want of time or because the card cannot do it, is said and is no failure.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest import mock

import torch

from bench.checks import CHECKS, attention_ways, random_batch
from bench.head import head_inputs, head_rows
from bench.measure import (
    beginning,
    copy_rate,
    listening,
    matmul_rate,
    print_table,
    read_rate,
    run_row,
    seconds,
    uncompiled,
)
from bench.step import settings, step_rows
from model import GPT
from stack import compiled, twins
from stack.config import ROOT
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.device import autocast, machine, peak_flops, pick_dtype, round_residual
from stack.exchange.hf_tokenizers import LETTERS
from stack.log import read_log
from stack.optim import make_optimizers

FLAGS = {
    "--minutes": dict(type=float, default=8, help="what does not fit in is left out, said, and leaves the exit "
                                                  "code 0 (8)"),
    "--results": dict(default="out/gpu.jsonl", help="file to which results are appended (out/gpu.jsonl)"),
    "--tiny": dict(action="store_true", help="all of it at a size for a CPU, two to four minutes: whether the script "
                                             "works"),
}
TINY = ["--vocab_size=512", "--d_model=64", "--n_layers=2", "--n_heads=4", "--n_kv_heads=2", "--head_dim=16",
        "--d_ff=128", "--seq_len=64", "--max_seq_len=64", "--compile=false"]
LEARNING = 0.25  # of the time, at least
MEAN_DOC_LEN = 1000  # tokens of a document, as account.py's, whose milliseconds stand beside these
NO_TIME = dict(left_out="no time left")
LONGEST = 150  # seconds for a process, but for learning's
DAY = 24 * 60  # minutes, at most
KINDS = {  # a kernel's or operator's part by its name, the first that fits
    "attention": r"flash|fmha|attention|attn|flex|triton_tem",
    "matmuls": r"gemm|nvjet|cutlass|xmma|cublas|aten::\w*mm\b", "the rest": ""}


def sequences(device) -> int:
    """Of a micro batch: as configs/ have them for 80 GB and for 24."""
    if device.type == "cpu":
        return 4
    return 32 if torch.cuda.get_device_properties(device).total_memory > 60e9 else 8


def recipe(args, device):
    """Settings of configs/stack100m.py's step, at this device's micro batch."""
    return settings(args, "--seq_len=2048", "--doc_mask=true", "--optimizer=muon", "--dtype=auto",
                    f"--micro_batch_size={sequences(device)}")


def no_bfloat16(args, device) -> dict:
    """What a row that is for bf16 says on a card that computes in another format."""
    dtype = pick_dtype(recipe(args, device)[1].dtype, device)
    return {} if device.type != "cuda" or dtype == torch.bfloat16 else dict(
        left_out=f"matmuls are in {str(dtype).removeprefix('torch.')} here, and this row is for bfloat16")


# ---------------------------------------------------------------------------------------------------------------------
# Fast


def ceilings(args, device) -> dict:
    """What matmuls, copies and reads reach here."""
    dtype = pick_dtype(recipe(args, device)[1].dtype, device)
    return dict(gemm_flops=matmul_rate(device, dtype), copy_bytes_per_s=copy_rate(device),
                read_bytes_per_s=read_rate(device), peak_flops=peak_flops(device, dtype))


def by_kind(call, device) -> dict:
    """Milliseconds of one call's kernels (on a CPU operators), by KINDS."""
    cuda = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as seen:
        call()
        if cuda:
            torch.cuda.synchronize(device)
    ms = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages():
        if not cuda or event.device_type == torch.autograd.DeviceType.CUDA:
            name = next(name for name, words in KINDS.items() if re.search(words, event.key))
            ms[name] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3
    return ms


def median_ms(call, args, device) -> float:
    return statistics.median(seconds(call, device, args.repeats)) * 1e3


def compiled_model(args, device):
    """The recipe's model on this device, its settings, and its blocks' forward and backward pass, to be called."""
    model_cfg, cfg = recipe(args, device)
    model, dtype = GPT(model_cfg).to(device), pick_dtype(cfg.dtype, device)
    if cfg.compile:
        torch._dynamo.reset()  # else it finds the program of another row
        twins.compile_blocks(model, device)
    x, y, docs = random_batch(model_cfg, cfg.micro_batch_size, cfg.seq_len, device, MEAN_DOC_LEN)

    def blocks():
        with autocast(device, dtype):
            hidden = model.hidden(x, docs=docs)
        hidden.backward(torch.ones_like(hidden))
    return model, cfg, y, blocks


def step_by_parts(args, device) -> dict:
    """A micro step's blocks and head, and the optimizers: wall clock of each, and its kernels by kind."""
    model, cfg, y, blocks = compiled_model(args, device)
    optimizers, dtype = make_optimizers(model, optimizer=cfg.optimizer), pick_dtype(cfg.dtype, device)
    states = torch.randn(y.numel(), model.cfg.d_model, device=device, requires_grad=True)

    def head():
        with autocast(device, dtype):
            loss = model.cross_entropy(states, model.head_weight, y.flatten(), z_loss=cfg.z_loss)
        loss.backward()

    def optimizer():
        for one in optimizers:
            one.step()
    seen = {}
    for part in (blocks, head, optimizer):  # in this order: the last one needs the gradients of the others
        seen[f"{part.__name__}_ms"] = median_ms(part, args, device)
        seen |= {f"{part.__name__}_{name.replace(' ', '_')}_ms": ms for name, ms in by_kind(part, device).items() if ms}
    return seen


def separate_linears(args, device) -> dict:
    """The blocks of "step by parts" without merge_linears."""
    with mock.patch.object(compiled, "merge_linears", lambda graph: graph):
        return dict(blocks_ms=median_ms(compiled_model(args, device)[-1], args, device))


def rounded_stream(args, device) -> dict:
    """The blocks of "step by parts" with --residual_dtype=bfloat16."""
    if without := no_bfloat16(args, device):
        return without
    model, *_, blocks = compiled_model(args, device)
    round_residual(model, torch.bfloat16)
    return dict(blocks_ms=median_ms(blocks, args, device))


def attention(way: str, args, device) -> dict:
    """Forward and backward of one layer's attention, laid out as in a block."""
    model_cfg, cfg = recipe(args, device)
    B, T, H, K, D = cfg.micro_batch_size, cfg.seq_len, model_cfg.n_heads, model_cfg.n_kv_heads, model_cfg.head_dim
    docs, dtype = random_batch(model_cfg, B, T, device, MEAN_DOC_LEN)[2], pick_dtype(cfg.dtype, device)
    q, k, v = (torch.randn(B, T, n, D, device=device, dtype=dtype, requires_grad=True).transpose(1, 2)
               for n in (H, K, K))
    call = attention_ways(docs, H != K)[way]

    def both():
        out = call(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return {f"{way}_ms": median_ms(both, args, device)}


def head_chunk(chunk: int, args, device) -> dict:
    """The loss head with so many tokens a chunk."""
    model_cfg, cfg = recipe(args, device)
    tokens = cfg.micro_batch_size * cfg.seq_len
    dtype = str(pick_dtype(cfg.dtype, device)).removeprefix("torch.")
    args.n_tokens, args.d_model, args.vocab, args.dtype = tokens, model_cfg.d_model, model_cfg.padded_vocab_size, dtype
    (hidden, weight, targets), ours = head_inputs(args, device), head_rows(device)["ours"]
    return dict(head_ms=median_ms(lambda: ours(hidden, weight, targets, chunk=chunk).backward(), args, device))


# ---------------------------------------------------------------------------------------------------------------------
# Learning


def learned_tokenizer(texts, vocab_size: int) -> Tokenizer:
    """By Hugging Face's tokenizers, which transformers brings, where prepare.py would have rustbpe."""
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Theirs
    bpe = Theirs(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS), initial_alphabet=list(LETTERS), show_progress=False))
    byte = {letter: value for value, letter in enumerate(LETTERS)}
    words = sorted(bpe.get_vocab(), key=bpe.token_to_id)
    return Tokenizer(PATTERN, {bytes(map(byte.get, word)): rank for rank, word in enumerate(words)},
                     {name: len(words) + i for i, name in enumerate(SPECIALS)})


def learning(args, device) -> dict:
    """Prepare, train until the time is over, append the lines of the run's log as they come."""
    end, (model_cfg, cfg), folder = time.monotonic() + 60 * args.minutes, recipe(args, device), Path(args.folder)
    library = Path(sysconfig.get_path("stdlib"))
    sources = [library / "json"] if args.tiny else ["stdlib", *{sysconfig.get_path(x) for x in ("purelib", "platlib")}]
    texts = (path.read_text(errors="ignore") for path in itertools.islice(
        (library / "json" if args.tiny else library).rglob("*.py"), 1000))
    learned_tokenizer(texts, model_cfg.vocab_size).save(folder)
    try:
        prepared = subprocess.run(
            [sys.executable, "prepare.py", *map(str, sources), "--tokenizer", str(folder), "--out",
             str(folder / "data"), "--val_fraction", "0.1" if args.tiny else "0.01", "--max_bytes", "200e6",
             "--skip_bad"], cwd=ROOT, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return NO_TIME
    if prepared.returncode:
        raise RuntimeError(prepared.stderr.strip().splitlines()[-1])
    steps = ["--max_steps=30", "--eval_interval=10", "--warmup_steps=5"] if args.tiny else [
        "--max_steps=1000000", "--eval_interval=100", "--warmup_steps=50",
        "--muon_lr=2e-3", "--adamw_lr=6e-3"]  # of a short run: no rule knows how far the minutes reach
    command = [sys.executable, "train.py", "configs/stack100m.py", "--dtype=auto", *args.settings, *steps,
               "--doc_mask=true", f"--data_dir={folder / 'data'}", f"--out_dir={folder / 'run'}", f"--device={device}",
               f"--micro_batch_size={cfg.micro_batch_size}", "--schedule=wsd", "--decay_fraction=0",
               f"--batch_tokens={2 * cfg.micro_batch_size * cfg.seq_len}", "--log_interval=10", "--save_interval=0",
               "--sample_interval=0", "--eval_first", f"--eval_tokens={64 * cfg.seq_len}"]
    told, stopping = [], False
    with open(folder / "said", "w+") as said:
        run = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            while True:
                code = run.poll()
                for line in read_log(folder / "run/log.jsonl")[len(told):]:
                    append(args, device, "learning", "log", run_seconds=line.pop("seconds", None), **line)
                    told.append(line)
                if code is not None:
                    break
                if not stopping and time.monotonic() > end:  # it finishes its step, saves and ends
                    run.send_signal(signal.SIGINT)
                    stopping = True
                time.sleep(0.3)
        finally:
            run.kill()
        said.seek(0)
        words = said.read().strip().splitlines()
    held_out = [line["val_bpb"] for line in told if "val_bpb" in line]
    speeds = [line["tok_per_s"] for line in told if "tok_per_s" in line]
    seen = dict(bits_per_byte_first=held_out[0] if held_out else None, bits_per_byte=held_out[-1] if held_out else None,
                tok_per_s=speeds[-1] if speeds else None, tokens=told[-1].get("tokens") if told else 0,
                **uncompiled([line.removeprefix("train.py: ") for line in words]))
    if stopping and len(held_out) < 2:  # nothing to compare with, whatever it was stopped in
        return seen | NO_TIME
    if code:
        seen["failed"] = f"train.py ended with {code}: {''.join(words[-1:])}"
    return seen | dict(ok=not code and len(held_out) > 1 and held_out[-1] < held_out[0])


# ---------------------------------------------------------------------------------------------------------------------
# The script

MEASURED = {"ceilings": ceilings, "step by parts": step_by_parts, "blocks, separate linears": separate_linears,
            "blocks, bf16 stream": rounded_stream, "attention, causal": functools.partial(attention, "causal"),
            **{f"head, chunks of {2**k}": functools.partial(head_chunk, 2**k) for k in range(8, 15)}}
ON_A_CARD = {f"attention, {way}": functools.partial(attention, way) for way in ("flex", "varlen")}


def plan(args, device) -> list[tuple[str, str, list[str] | dict, str]]:
    """(part, what, command, row), the most telling first; the rows of command gpu with semicolons between them
    share a process.  In place of a command: why there is none."""
    model_cfg, cfg = recipe(args, device)
    rows, T, how = sequences(device), cfg.seq_len, "eager" if args.tiny else "compiled"
    common = [f"--repeats={args.repeats}", f"--device={device}"]
    without = no_bfloat16(args, device)
    auto = ["--dtype=auto"] * (device.type == "cuda")  # older cards would emulate the default, bf16
    gpu = ["gpu", *common, "--results", args.results, *["--tiny"] * args.tiny, *auto, *args.settings]
    right, first = list(CHECKS), ["ceilings", "step by parts", "blocks, separate linears", "blocks, bf16 stream"]
    later = [row for row in (*MEASURED, *(ON_A_CARD if device.type == "cuda" else ())) if row not in first]
    alone = right.index("resume to the bit")  # first in its process: cuBLAS reads once whether to be deterministic

    def step(what, *changes, row="ours", rows=rows):
        command = ["step", *common, f"--mean_doc_len={MEAN_DOC_LEN}", "--seq_len=2048", *auto, *args.settings,
                   f"--micro_batch_size={rows}", *changes]
        return "fast", f"step, {rows} x {T}, {what}{f', {row}' * (row != 'ours')}", command, row
    recipe_is = ["--doc_mask=true", "--optimizer=muon"]
    head = ["head", *common, f"--n_tokens={rows * T}", f"--d_model={model_cfg.d_model}",
            f"--vocab={model_cfg.padded_vocab_size}",
            f"--dtype={str(pick_dtype(cfg.dtype, device)).removeprefix('torch.')}"]
    peers = [row for row in reversed(step_rows(settings(args)[1])) if row.endswith(how) and not row.startswith("GPT-2")]
    theirs = [row for row in head_rows(device) if row in ("Liger-Kernel", "cut-cross-entropy")]
    sample = ["sample", *common, "--batch=64", *args.settings]
    if args.tiny:
        sample += ["--prompt_tokens=4", "--new_tokens=5", "--prefill_tokens=8"]
    first_right, compiling = right[:alone], 0  # with --tiny two checks compile, where there is a compiler
    if args.tiny and not any(x.startswith("--compile") for x in args.settings[len(TINY):]):
        compiling = 2 * bool(shutil.which(os.environ.get("CXX", "c++")))
    rounded = step("documents, Muon, bf16 stream", *recipe_is, "--residual_dtype=bfloat16", "--dtype=bfloat16")
    return [
        *[("right", "", [*gpu, "--compile=true"], ";".join(first_right[:compiling]))] * bool(compiling),
        ("right", "", gpu, ";".join(first_right[compiling:])),
        ("fast", "", gpu, ";".join(first)),
        step("documents, Muon: the recipe", *recipe_is),
        ("right", "", gpu, ";".join(right[alone:])),
        ("fast", "", gpu, ";".join(later)),
        step("AdamW"), step("AdamW", rows=rows // 2),
        *(step("AdamW", row=row, rows=rows // 2) for row in peers[:2]),
        ("fast", "sample, batch 1 and 64", without or sample, "ours bf16"),
        *(("fast", f"head, {rows * T} tokens, {row}", head, row) for row in ("ours", *theirs, "naive" if args.tiny else
                                                                      "compiled naive")),
        rounded[:2] + (without, rounded[3]) if without else rounded,
        step("documents, Muon, remat selective", *recipe_is, "--remat=selective"),
        *(step("AdamW", row=row, rows=rows // 2) for row in peers[2:]),
        ("learning", "", gpu, "learning")]


def append(args, device, part: str, row: str, **seen):
    """One more line in the file; where it cannot be written, in args.unwritten of the process that prints the table."""
    line = dict(bench="gpu", part=part, row=row, **seen, device=machine(device), torch=torch.__version__,
                time=time.strftime("%Y-%m-%d %H:%M:%S"))
    try:
        write(args.results, json.dumps(line) + "\n")
    except OSError as error:
        line["unwritten"] = f"{type(error).__name__}: {error}"
        if args.row:
            print(json.dumps(line), flush=True)  # read by the one that started this process
        else:
            args.unwritten.append(line)


def write(path, text: str):
    """Append all of the text or nothing: half a line would spoil the next one."""
    with open(path, "ab", buffering=0) as file:
        before = file.tell()
        if file.write(text.encode()) < len(text.encode()):
            file.truncate(before)
            raise OSError("no room for a whole line")


def row(args, device) -> dict:
    """The functions named in args.row, a line each.  One that fails ends the process: after a fault of CUDA's nothing
    in it works any more."""
    fast = MEASURED | ON_A_CARD
    for name in args.row.split(";"):
        part = "right" if name in CHECKS else "fast" if name in fast else "learning"
        torch.compiler.set_stance("default")  # each tries for itself whether something compiles
        try:
            with listening() as heard:
                seen = {**CHECKS, **fast, "learning": learning}[name](args, device)
            seen |= uncompiled(heard)  # a check of what is compiled has then checked nothing
            append(args, device, part, name, **seen | (dict(ok=False) if part == "right" and uncompiled(heard) else {}))
        except Exception as error:
            append(args, device, part, name, failed=beginning(f"{type(error).__name__}: {error}"))
            break
    return dict(row=args.row)


def machine_facts(device) -> dict:
    """What the numbers are of."""
    seen = dict(python=platform.python_version(), cuda=torch.version.cuda, packages={})
    for name in ("numpy", "triton", "transformers", "litgpt", "liger-kernel", "cut-cross-entropy"):
        if importlib.util.find_spec(name.replace("-", "_")):
            with contextlib.suppress(PackageNotFoundError):  # an image's own build
                seen["packages"][name] = version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        seen["commit"] = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, check=True,
                                        capture_output=True).stdout.strip()
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        seen |= dict(memory_gb=about.total_memory / 1e9, capability=f"{about.major}.{about.minor}",
                     processors=about.multi_processor_count)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            seen["card"] = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm",
                                           "--format=csv,noheader"], text=True, check=True, capture_output=True,
                                          timeout=20).stdout.strip().splitlines()
    return seen


def note(x) -> str:
    """What a line has to say besides its columns."""
    for key in ("failed", "left_out"):
        if key in x:
            return x[key]
    eager = "NOT COMPILED: " * (x.get("compiled") is False)
    if "optimizer_seconds" in x:
        return f"{eager}first step {x['first_seconds']:.0f} s, optimizer {x['optimizer_seconds'] * 1e3:.1f} ms"
    if x.get("batch_tok_per_s"):
        return (f"{eager}batch {x['batch']}: {x['batch_tok_per_s']:,.0f} tokens/s, prefill "
                f"{x['prefill_tok_per_s']:,.0f}")
    columns = {"tok_per_s", "seconds", "seconds_min", "seconds_max", "peak_mib", "of_gemm", "of_bandwidth", "mfu"}
    told = {key: f"{value:.3g}" for key, value in x.items() if key not in columns and type(value) in (int, float)}
    if x["row"] == "log":
        told = {key: f"{x[key]:.3g}" for key in ("step", "loss", "tok_per_s", "val_bpb") if x.get(key) is not None}
    facts = {"bench", "part", "row", "what", "device", "torch", "time", "unwritten"}
    reasons = {} if "ok" not in x else {
        key: value if isinstance(value, str) else ", ".join(map(str, value)) for key, value in x.items()
        if isinstance(value, (str, list)) and value and key not in facts and (not x["ok"] or key == "beside")}
    return {True: "as it should: ", False: "WRONG: "}.get(x.get("ok"), "") + eager + ", ".join(
        f"{key} {value}" for key, value in (reasons | told).items())


def derived(x, told, batch_tokens: int) -> dict:
    """A row's figures against the ceilings, where those are known; a step's in a whole batch of micro steps."""
    known = next((line for line in told if line["row"] == "ceilings" and "failed" not in line), {})
    gemm, reading, peak = (known.get(key) for key in ("gemm_flops", "read_bytes_per_s", "peak_flops"))
    flops = x["tok_per_s"] * x["flops_per_token"] if "flops_per_token" in x else None
    limit = reading / x["weight_bytes"] if reading and "weight_bytes" in x else None
    seen = dict(of_gemm=flops and gemm and flops / gemm, mfu=flops and peak and flops / peak,
                of_bandwidth=limit and x["tok_per_s"] / limit)
    if "optimizer_seconds" in x:
        micro = x["seconds"] - x["optimizer_seconds"]
        whole = batch_tokens / (x["tok_per_s"] * x["seconds"]) * micro + x["optimizer_seconds"]
        seen |= dict(micro_step_seconds=micro, whole_step_seconds=whole, whole_step_tok_per_s=batch_tokens / whole)
    return x | seen


def together(args, device, part: str, command: list[str], names: list[str], seconds_left, cache: str):
    """The functions of these names in one process, in another one again from where it ended too early."""
    while names and (left := seconds_left()) > 5:
        before = len(read_log(args.results))
        try:
            folder = tempfile.mkdtemp(dir=args.folder)
        except OSError:
            folder = args.folder
        limits = [f"--minutes={max(left - 30, 5) / 60}", f"--folder={folder}"]  # 30: to save, and to end
        ended = run_row([*command, *limits], ";".join(names), cache=cache,
                        timeout=left if part == "learning" else min(left, LONGEST))
        unwritten = ended.get("before", [])
        args.unwritten += unwritten
        done = {line["row"] for line in read_log(args.results)[before:] + unwritten}
        without = [name for name in names if name not in done]
        # the time is the process': one that others left too little of gets another one
        if "failed" in ended and without and (without[0] == names[0] or "late" not in ended):
            append(args, device, part, without[0], **(
                NO_TIME if part != "learning" and cut_short(ended, left) else dict(failed=ended["failed"])))
            done.add(without[0])
        names = [name for name in names if name not in done]
    for name in names:
        append(args, device, part, name, **NO_TIME)


def cut_short(ended: dict, left: float) -> bool:
    """Whether a row was given up because the minutes were over, not because it hung."""
    return left < LONGEST and "late" in ended


def is_wrong(x) -> bool:
    return x.get("ok") is False and not {"failed", "left_out"} & {*x}


def ending(told, results: str) -> str:
    """In a line: where they are, how many rows are as they should be, which are not."""
    rows = [line for line in told if line["part"] != "machine" and line["row"] != "log"]

    def named(chosen):
        return f"{len(chosen)}{f' ({names})' if (names := ', '.join(x.get('what', x['row']) for x in chosen)) else ''}"
    wrong, failed, left = ([x for x in rows if holds(x)] for holds in (
        is_wrong, lambda x: "failed" in x, lambda x: "left_out" in x))
    return (f"{results}: {len(rows) - len(wrong) - len(failed) - len(left)} rows as they should be, {named(wrong)} "
            f"WRONG, {named(failed)} failed, {named(left)} left out")


def run(args, device) -> bool:
    args.settings = [*TINY * args.tiny, *args.settings]
    args.repeats = min(args.repeats, 2) if args.tiny else args.repeats
    args.results = str(Path(args.results).absolute())
    batch_tokens, cache = settings(args)[1].batch_tokens, str(Path(args.folder) / "compiled")
    if not 0 < args.minutes <= DAY:
        raise ValueError(f"--minutes is {args.minutes:g}; it must be more than 0 and at most {DAY}.")
    if device.type != "cuda" and args.device != "cpu" and not args.tiny:
        raise ValueError("there is no GPU here that PyTorch can use with CUDA, and at full size a CPU takes a minute "
                         "and more for a step. --tiny tries the script on a CPU; --device=cpu insists.")
    device = torch.device("cpu") if device.type == "mps" else device  # of --tiny
    Path(args.results).parent.mkdir(parents=True, exist_ok=True)
    read, args.unwritten, told, start = len(read_log(args.results)), [], [], time.monotonic()

    def say(*words, file=sys.stderr):  # into a file, perhaps, on a disk that is full
        with contextlib.suppress(OSError):
            print(*words, file=file, flush=True)
    say(f"bench: {machine(device)}, {args.minutes:g} minutes{', --tiny' * args.tiny}, results are appended to "
        f"{args.results}")

    def seconds_left(part):
        return args.minutes * 60 * (1 if part == "learning" else 1 - LEARNING) - (time.monotonic() - start)

    def tell():
        nonlocal read
        written = read_log(args.results)[read:]
        read += len(written)
        for line in written + args.unwritten:
            if "unwritten" in line and not any("unwritten" in other for other in told):
                say(f"bench: {args.results} cannot be written ({line['unwritten']}): its lines go to stdout instead")
            told.append(line)
            if args.json or "unwritten" in line:
                say(json.dumps(line), file=sys.stdout)
            say(f"bench: {time.monotonic() - start:4.0f} s  {line['part']}: {line.get('what', line['row'])}: "
                f"{note(line)[:300] or 'done'}")
        args.unwritten.clear()
    try:
        append(args, device, "machine", "machine", **machine_facts(device))
        tell()
        for part, what, command, name in plan(args, device):
            left = functools.partial(seconds_left, part)
            if isinstance(command, dict):
                append(args, device, part, what=what, row=name, **command)
            elif command[0] == "gpu":
                together(args, device, part, command, name.split(";"), left, cache)
            elif left() <= 5:
                append(args, device, part, what=what, row=name, **NO_TIME)
            else:
                x = run_row(command, name, timeout=min(at := left(), LONGEST), cache=cache)
                x = dict(row=name, **NO_TIME) if cut_short(x, at) else derived(x, told, batch_tokens)
                append(args, device, part, what=what, **x)
            tell()
    except KeyboardInterrupt:
        say(f"\nbench: stopped. The lines so far are in {args.results}; the same command begins anew and appends to "
            "it.")
        sys.exit(130)
    if not args.json:
        print_table(device, f"One card, {args.repeats} repeats", {
            "": lambda x: x.get("what", x["row"]), "tokens/s": "tok_per_s",
            f"tokens/s, steps of {batch_tokens:,}": "whole_step_tok_per_s",
            "ms": lambda x: x["seconds"] * 1e3 if "what" in x and "seconds" in x else None, "MFU": "mfu%",
            "of the matmul rate": "of_gemm%", "of the bandwidth": "of_bandwidth%", "peak MiB": "peak_mib",
            "note": note}, [line for line in told if line["part"] != "machine" and line["row"] != "log"])
    say(f"bench: {ending(told, args.results)}")
    return any("failed" in line or is_wrong(line) for line in told)

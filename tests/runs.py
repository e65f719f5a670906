"""Small real training runs for the tests: a data set, settings, what a run left on disk, and processes to run it in.

Nothing is faked but the text: the tokenizer is trained, the shards are written by shards.py.
Runs go through train.run in this process where a process of their own is not the point, since a start of Python and
torch takes seconds; where it is, `start` forks one from a server that has imported both.
"""

import dataclasses
import hashlib
import json
import math
import multiprocessing.forkserver
import os
import sys
import unittest.mock
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from texts import texts

import train
from model import ModelConfig
from stack.config import save_json
from stack.data.shards import write_meta, write_shard
from stack.data.tokenizer import train_tokenizer
from stack.log import read_log
from stack.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
TIMINGS = {"seconds", "tok_per_s", "step_ms", "data_wait", "mfu"}


def make_data(folder, *, vocab_size: int = 320, train_tokens: int | None = None, val_tokens: int | None = None) -> Path:
    """A data set of about 77,000 training and 19,000 held-out tokens, or the first of them, as prepare.py makes it."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    documents = texts(100_000, 13_000, 20_000, 33_000)
    tokenizer = train_tokenizer(documents, vocab_size)
    tokenizer.save(folder)
    splits = {}
    for split, parts, n_tokens in (("train", documents[:3], train_tokens), ("val", documents[3:], val_tokens)):
        ids = np.concatenate([np.r_[tokenizer.boundary_id, tokenizer.encode_to_numpy(text)] for text in parts])
        entry = write_shard(folder / f"{split}_000000.bin", ids[:n_tokens],
                            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size)
        splits[split] = [{**entry, "documents": len(parts), "bytes": sum(len(text.encode()) for text in parts)}]
    write_meta(folder, sources=["made"], fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
               boundary_id=tokenizer.boundary_id, splits=splits)
    return folder


def settings(data, out, **changes) -> tuple[ModelConfig, TrainConfig]:
    """26,000 parameters, 8 sequences of 32 tokens a step in 4 micro batches, about 10 ms a step."""
    values = dict(vocab_size=320, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48, max_seq_len=32,
                  data_dir=str(data), out_dir=str(out), seq_len=32, micro_batch_size=2, batch_tokens=256, max_steps=6,
                  warmup_steps=2, log_interval=1, eval_interval=0, eval_tokens=1024, save_interval=0, sample_interval=0,
                  compile=False, device="cpu", muon_lr=6e-3, adamw_lr=3e-3) | changes
    return tuple(cls(**{f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values})
                 for cls in (ModelConfig, TrainConfig))


def run(data, out, **changes) -> Path:
    """Train in this process; returns the run folder."""
    train.run(*settings(data, out, **changes))
    return Path(out)


def log(out, *, key: str = "step", timings: bool = False) -> list[dict]:
    """The lines of log.jsonl that have `key`, without what differs from run to run."""
    return [{k: v for k, v in line.items() if timings or k not in TIMINGS}
            for line in read_log(Path(out) / "log.jsonl") if key in line]


def progress(out, name: str = "ckpt_last") -> dict:
    return json.loads((Path(out) / name / "state.json").read_text())["progress"]


def assert_same_checkpoint(a, b, name: str = "ckpt_last"):
    """Weights, moments, scaler and progress are equal to the bit."""
    a, b = Path(a) / name, Path(b) / name
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert one.keys() == two.keys()
    assert [k for k in one if not torch.equal(one[k], two[k])] == []
    one, two = (torch.load(folder / "optim.pt", weights_only=True) for folder in (a, b))
    assert one["scaler"] == two["scaler"] and one["optimizers"].keys() == two["optimizers"].keys()
    for key, entry in one["optimizers"].items():
        other = two["optimizers"][key]
        assert entry["kind"] == other["kind"] and entry["state"].keys() == other["state"].keys()
        for k, v in entry["state"].items():
            assert torch.equal(torch.as_tensor(v), torch.as_tensor(other["state"][k])), (key, k)
    assert progress(a.parent, name) == progress(b.parent, name)


def spy_batches(monkeypatch, change=None) -> list[str]:
    """A list that gets a hash of every micro batch training takes; change(x, y) -> (x, y) may alter them."""
    seen = []

    class Spied(train.Batches):
        def __next__(self):
            x, y, docs = super().__next__()
            seen.append(hashlib.sha256(x.numpy().tobytes()).hexdigest())
            return (*(change(x, y) if change else (x, y)), docs)
    monkeypatch.setattr(train, "Batches", Spied)
    return seen


def at(monkeypatch, hook):
    """Call hook(step) before each step, and spoil the gradient of the step where it returns True; where it returns a
    number, multiply it by that."""
    schedule, get_total_norm, spoil = train.schedule, torch.nn.utils.get_total_norm, [False]

    def hooked(cfg, step):
        spoil[0] = hook(step)
        return schedule(cfg, step)

    def norm(grads, *args):
        if spoil[0] is True:
            grads[0][0, 0] = math.inf
        elif spoil[0]:
            torch._foreach_mul_(grads, spoil[0])
        return get_total_norm(grads, *args)
    monkeypatch.setattr(train, "schedule", hooked)
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", norm)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


def start(configs, output, *flags: str, env: dict | None = None, prepare=None):
    """`python train.py CONFIG FLAGS` in a process of its own; .pid and .exitcode as multiprocessing gives them.

    output: file that gets stdout and stderr.  prepare: function of a module, called before train.main.
    """
    context = _server()
    out = Path(configs[1].out_dir)
    file = out.with_name(out.name + ".config.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    save_json(file, configs)
    process = context.Process(target=_main, args=([str(file), *flags], str(output), env or {}, prepare))
    process.start()
    return process


def _server():
    """Where processes are forked from, with what takes seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runs", "torch._dynamo", "matplotlib.figure", "tiktoken",
                                    "torch.distributed.tensor.parallel"])
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        multiprocessing.forkserver.ensure_running()
    return context


def finish(*processes, timeout: float = 600) -> list[int]:
    """Exit codes, once all have ended; timeout is for what hangs, on the slowest machine."""
    for process in processes:
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"a run was still there after {timeout} s")
    return [process.exitcode for process in processes]


def start_ranks(n: int, configs, output, *flags: str, prepare=None, of_rank=()) -> list:
    """The same on n ranks, as torchrun would start them; the output of rank r goes to `output`.r, and it alone gets the
    flags of_rank[r]."""
    import socket
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [start(configs, f"{output}.{rank}", *flags, *(of_rank[rank] if of_rank else ()), prepare=prepare, env={
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port)}) for rank in range(n)]


def call_ranks(n: int, folder, function, *args) -> list:
    """function(*args) on n ranks of a gloo group, in processes forked from the same server; what each returned."""
    context = _server()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_call, args=(folder, rank, n, function, args)) for rank in range(n)]
    for process in processes:
        process.start()
    codes = finish(*processes)
    assert codes == [0] * n, "\n".join((folder / f"output.{rank}").read_text() for rank in range(n))
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(n)]


def _call(folder, rank, n, function, args):
    _redirect(folder / f"output.{rank}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    torch.save(function(*args), folder / f"result.{rank}")
    torch.distributed.destroy_process_group()


def _redirect(output):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)


def _main(argv, output, env, prepare):
    _redirect(output)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = ["train.py", *argv]
    if prepare is not None:
        prepare()
    train.main()

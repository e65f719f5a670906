"""One training step, (x, y) to updated weights, in the settings of train.py: `python -m bench step`.

Ours is train.py itself: the row's process runs it, as `python train.py` does, on random tokens, and reads its log.  The
others have the plain loop below.  What neither says is seen by Watch.  Tokens/s are held against counts.flops_per_token
(causal, or what document masks leave) at the rate of one large matmul.
"""

import contextlib
import importlib
import math
import os
import runpy
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bench import peers
from bench.measure import choose, matmul_rate, reset_peak, run_rows, spread, synchronize
from model import ModelConfig
from stack.config import ROOT, load, save_json
from stack.counts import flops_per_token
from stack.data.batches import Batches, TokenData
from stack.data.shards import write_meta, write_shard
from stack.device import autocast, peak_flops, pick_dtype
from stack.log import read_log
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

DEFAULTS = ["--seq_len=1024", "--micro_batch_size=2", "--optimizer=adamw", "--doc_mask=false", "--dtype=bfloat16"]
DOCUMENT = 500  # tokens of one, on average
FLAGS = {"--mean_doc_len": dict(type=int, default=DOCUMENT, help=f"tokens of a document, on average ({DOCUMENT})")}


def settings(args, *defaults: str) -> tuple[ModelConfig, TrainConfig]:
    """Both dataclasses from this bench's defaults and what the command line changes."""
    model_cfg, cfg = load((ModelConfig, TrainConfig), [*DEFAULTS, *defaults, *args.settings])
    return replace(model_cfg, max_seq_len=max(model_cfg.max_seq_len, cfg.seq_len)), cfg


def step_rows(cfg: TrainConfig) -> list[str]:
    """Ours and the peers, each as written and compiled whole.  Only the plain model also knows document masks."""
    those = ["plain"] if cfg.doc_mask else ["plain", "GPT-2", *peers.installed("transformers", "litgpt")]
    return ["ours"] + [f"{peer} {how}" for peer in those for how in ("eager", "compiled")]


class Measured(Exception):
    """Leaves train.py's loop when all steps are measured: what is left of the run is writing a checkpoint."""


class Watch:
    """Called by PyTorch around each optimizer's steps, whoever's loop makes them; raises Measured after so many."""

    def __init__(self, device, steps: int):
        self.device, self.steps, self.above_imports = device, steps, reset_peak(device)
        self.seconds, self.looking = {}, 0.0  # optimizer -> seconds of each of its steps; seconds of our own

    def before(self, optimizer, *_):
        if len(self.seconds.setdefault(optimizer, [])) == self.steps:
            raise Measured
        synchronize(self.device)
        self.started = time.perf_counter()

    def after(self, optimizer, *_):
        synchronize(self.device)
        ended, times = time.perf_counter(), self.seconds[optimizer]
        times.append(ended - self.started)
        if len(times) == 1:
            self.above_held = reset_peak(self.device)  # weights, gradients, moments and the compiler's leftovers
            self.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            self.looking += time.perf_counter() - ended
        elif len(times) == self.steps:
            self.peak, self.above = self.above_imports(), self.above_held()  # after the run is too late

    def seen(self) -> dict:
        weights = sum(p.nbytes for o in self.seconds for group in o.param_groups for p in group["params"])
        moments = sum(t.nbytes for o in self.seconds for state in o.state.values() for t in state.values()
                      if torch.is_tensor(t))
        return dict(recompiled=torch._dynamo.utils.counters["stats"]["unique_graphs"] - self.graphs,
                    optimizer_seconds=sum(statistics.median(times[2:]) for times in self.seconds.values()),
                    peak_mib=self.peak, state_mib=round((2 * weights + moments) / 2**20, 1),
                    # the gradients were among what was held
                    step_mib=None if self.above is None else round(self.above + weights / 2**20, 1))


def write_data(folder, model_cfg: ModelConfig, cfg: TrainConfig, mean: int = DOCUMENT, different: int | None = None):
    """A data set of random tokens, in documents of `mean` on average; of `different` ones it can be learned."""
    words, rng = peers.made_tokenizer(model_cfg.vocab_size), np.random.default_rng(0)
    n, end = 64 * cfg.micro_batch_size * cfg.seq_len + 1, words.boundary_id  # special tokens have the last ids
    ids = np.where(rng.random(n) < 1 / mean, end, rng.integers(0, different or end, n))
    facts = dict(fingerprint=words.fingerprint, vocab_size=words.vocab_size)
    entry = write_shard(Path(folder) / "train_000000.bin", ids, **facts)
    write_meta(folder, sources=[], boundary_id=end, splits={"train": [{**entry, "documents": 0, "bytes": 0}]}, **facts)
    words.save(folder)


def needed_flops(model_cfg: ModelConfig, cfg: TrainConfig, mean: int) -> int:
    """Of a token, forward and backward; under document masks without what they hide."""
    flops = flops_per_token(model_cfg, cfg.seq_len, mean if cfg.doc_mask else None)
    return flops.get("doc_masked", flops["causal"])


def our_steps(args, model_cfg: ModelConfig, cfg: TrainConfig) -> list[dict]:
    """The lines of train.py's log, one a step, the first loss and the first compilation included."""
    cfg = replace(cfg, out_dir=f"{cfg.data_dir}/run", init_from="scratch", device=args.device, tp=1,
                  batch_tokens=cfg.micro_batch_size * cfg.seq_len, ramp_steps=0, max_steps=args.repeats + 100,
                  schedule="wsd", warmup_steps=0, decay_fraction=0.0, log_interval=1, eval_interval=0, save_interval=0,
                  sample_interval=0, wandb_project=None, tensorboard=False)
    save_json(f"{cfg.data_dir}/config.json", (model_cfg, cfg))
    sys.argv = [str(ROOT / "train.py"), f"{cfg.data_dir}/config.json"]
    with contextlib.suppress(Measured):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return read_log(f"{cfg.out_dir}/log.jsonl")


def peer_steps(args, model_cfg: ModelConfig, cfg: TrainConfig, device) -> list[dict]:
    """The same keys from a plain loop."""
    dtype, clock = pick_dtype(cfg.dtype, device), time.perf_counter
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --deterministic, as in train.py
    torch.use_deterministic_algorithms(cfg.deterministic)
    torch.manual_seed(cfg.seed)
    peer, how = args.row.rsplit(" ", 1)
    model, loss_of = peers.trained(peer, model_cfg, device)
    loss_of = torch.compile(loss_of) if how == "compiled" else loss_of
    optimizer, = make_optimizers(model.train(), optimizer="adamw", betas=(cfg.beta1, cfg.beta2),
                                 weight_decay=cfg.weight_decay)
    batches = Batches(TokenData(cfg.data_dir, "train", seq_len=cfg.seq_len), seed=cfg.seed, device=device,
                      micro_batch_size=cfg.micro_batch_size)

    def step() -> dict:
        start = clock()
        x, y, docs = next(batches)
        fetched = clock()
        with autocast(device, dtype):
            loss = loss_of(x, y, docs if cfg.doc_mask else None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        took = clock() - start
        return dict(loss=loss.item(), step_ms=took * 1e3, data_wait=(fetched - start) / took)
    with contextlib.closing(batches):
        return [step() for _ in range(2 + args.repeats)]


def row(args, device) -> dict:
    (model_cfg, cfg), peer = settings(args), args.row.split(" ")[0]
    mean = getattr(args, "mean_doc_len", DOCUMENT)  # growth has no such flag
    import torch._inductor.compile_fx  # noqa: F401 (the compiler's own memory is no row's)
    if peer in ("transformers", "litgpt"):
        importlib.import_module(peer)
    cfg = replace(cfg, data_dir=tempfile.mkdtemp())
    write_data(cfg.data_dir, model_cfg, cfg, mean)
    watch = Watch(device, 2 + args.repeats)
    with register_optimizer_step_pre_hook(watch.before), register_optimizer_step_post_hook(watch.after):
        lines = our_steps(args, model_cfg, cfg) if peer == "ours" else peer_steps(args, model_cfg, cfg, device)
    times = [line["step_ms"] / 1e3 for line in lines[-args.repeats:]]
    return dict(
        row=args.row, tok_per_s=cfg.micro_batch_size * cfg.seq_len / statistics.median(times), **spread(times),
        first_seconds=lines[0]["step_ms"] / 1e3 - watch.looking, loss=lines[0]["loss"], **watch.seen(),
        data_wait=statistics.median(line["data_wait"] for line in lines[-args.repeats:]),
        flops_per_token=needed_flops(peers.gpt2_shape(model_cfg) if peer == "GPT-2" else model_cfg, cfg, mean))


def run(args, device) -> bool:
    model_cfg, cfg = settings(args)
    rows, dtype = choose(args, step_rows(cfg)), pick_dtype(cfg.dtype, device)
    rate, peak = matmul_rate(device, dtype), peak_flops(device, dtype)
    dtype = str(dtype).removeprefix("torch.")
    floor = dict(row="floor: the matmuls", tok_per_s=rate / needed_flops(model_cfg, cfg, args.mean_doc_len))
    masks = f"on, {args.mean_doc_len} tokens on average" if cfg.doc_mask else "off"
    what = (f"Training step, {cfg.micro_batch_size} x {cfg.seq_len} tokens, {cfg.optimizer} (peers: adamw), {dtype}, "
            f"document masks {masks}, matmuls {rate / 1e9:,.0f} GFLOP/s, median of "
            f"{args.repeats}")

    def derive(x):
        if x["recompiled"]:
            print(f"bench: row {x['row']!r} compiled {x['recompiled']} graphs after its first step", file=sys.stderr)
        flops, optimizer = x["tok_per_s"] * x["flops_per_token"], x["optimizer_seconds"]
        x |= dict(of_floor=flops / rate, mfu=flops / peak if peak else None, optimizer_share=optimizer / x["seconds"],
                  optimizer_of_16=optimizer / (optimizer + 16 / cfg.micro_batch_size * (x["seconds"] - optimizer)))

    def table(results):
        best = max((x["tok_per_s"] for x in results if x["row"].endswith("compiled")), default=None)
        return what, {
            "": "row", "tokens/s": "tok_per_s", "x best compiled peer": lambda x: best and x["tok_per_s"] / best,
            "of the floor": "of_floor%", "MFU": "mfu%", "peak MiB": "peak_mib",
            "of it weights, gradients, moments": "state_mib", "first step s": "first_seconds",
            "optimizer share": "optimizer_share%", "with 16 sequences": "optimizer_of_16%", "data wait": "data_wait%",
        }, [*results, floor]
    return run_rows(args, device, rows, table, derive, gemm_flops=rate, seq_len=cfg.seq_len, dtype=dtype,
                    micro_batch_size=cfg.micro_batch_size, optimizer=cfg.optimizer, doc_mask=cfg.doc_mask)

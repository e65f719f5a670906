"""A run from data to checkpoint: what it leaves behind, that its numbers are right, that settings do what they say."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import runs
import torch
import torch.nn.functional as F
from conftest import document_ids
from test_log import FakeWandb
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

import account
import train
from model import GPT, ModelConfig
from stack import optim
from stack.checkpoint import tensors as checkpoint
from stack.config import load, save_json
from stack.counts import flops_per_token
from stack.data.batches import Batches, TokenData
from stack.data.shards import open_shard, read_meta, write_meta, write_shard
from stack.data.tokenizer import Tokenizer
from stack.evaluation.held_out import evaluate
from stack.resume import resume_command
from stack.start import batch_problems, repeated
from stack.train_config import TrainConfig

# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


def test_log(plain):
    """A line per logged step and per evaluation, with the keys other programs rely on."""
    lines = runs.log(plain, timings=True)
    steps, evaluations = ([line for line in lines if key in line] for key in ("loss", "val_loss"))
    assert [line["step"] for line in steps] == list(range(1, 13))
    for line in steps:
        assert {"step", "loss", "lr", "grad_norm", "tok_per_s", "step_ms", "mfu"} <= line.keys()
        assert line["mfu"] is None and line["tok_per_s"] > 0 and line["step_ms"] > 0  # a CPU's peak is not known
        assert line["tokens"] == line["step"] * 256
    assert [line["step"] for line in evaluations] == [5, 10, 12]  # and at the end
    assert all(line["val_bpb"] > 0 for line in evaluations)
    assert [line["step"] for line in lines if "sample" in line] == [6, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3 and steps[0]["loss"] == pytest.approx(math.log(320), abs=0.2)


def test_files(plain):
    """config.json repeats the run, the curve is a picture, and nothing temporary is left."""
    assert sorted(p.name for p in plain.iterdir()) == [
        "ckpt_best", "ckpt_last", "ckpt_step_0000008", "ckpt_step_0000012", "config.json", "log.jsonl", "loss.png",
        "report.html"]
    assert (plain / "loss.png").read_bytes().startswith(b"\x89PNG")
    model_cfg, cfg = load((ModelConfig, TrainConfig), [str(plain / "config.json")])
    assert (model_cfg.d_model, cfg.batch_tokens, cfg.out_dir) == (32, 256, str(plain))


def test_the_checkpoint_has_the_logged_loss(plain, data):
    """Loading ckpt_last and evaluating in other batches gives the last line's loss and bits per byte."""
    model, tokenizer, state = checkpoint.load_model(plain)
    assert state["progress"]["step"] == 12 and tokenizer.fingerprint == Tokenizer.load(data).fingerprint
    windows = train.iterate_windows(TokenData(data, "val", seq_len=32), 5, max_windows=1024 // 32)
    got = evaluate(model, windows, tokenizer.token_bytes(), device=torch.device("cpu"),
                   doc_mask=True)
    last = runs.log(plain, key="val_loss")[-1]
    assert (got["loss"], got["bpb"]) == (pytest.approx(last["val_loss"], rel=1e-6),
                                         pytest.approx(last["val_bpb"], rel=1e-6))
    assert got["tokens"] == last["val_tokens"] == 1024
    trained = runs.log(plain, key="loss")[-1]
    assert last["tokens"] == trained["tokens"] == 12 * 256  # seen in training, where the curves' points lie
    assert last["flops"] == trained["flops"] == 12 * 256 * flops_per_token(
        model.cfg, 32, TokenData(data, "train", seq_len=32).mean_doc_len)["doc_masked"]


def test_same_seed_same_run(plain, data, tmp_path):
    """Losses repeat to the bit, dropout included; another seed gives another run."""
    again = dict(max_steps=5, warmup_steps=2, dropout=0.1, schedule="wsd", decay_fraction=0)
    first, second, other = (runs.log(runs.run(data, tmp_path / str(i), seed=seed, **again))
                            for i, seed in enumerate((1337, 1337, 1338)))
    assert first == second != other
    assert [a["loss"] == b["loss"] for a, b in zip(first, other, strict=True)] == [False] * 5
    assert first == runs.log(plain, key="loss")[:5]  # evaluations, samples and saves between do not disturb


def test_deterministic(plain, data, tmp_path, monkeypatch):
    """--deterministic switches PyTorch for the run, gives back what was, and on a CPU changes no loss."""
    seen, switched = [], torch.are_deterministic_algorithms_enabled
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    runs.at(monkeypatch, lambda step: seen.append((switched(), os.environ["CUBLAS_WORKSPACE_CONFIG"])))
    first, second = (runs.log(runs.run(data, tmp_path / name, deterministic=True, max_steps=4, dropout=0.1,
                                       decay_fraction=0), key="loss") for name in "ab")
    assert first == second and first == runs.log(plain, key="loss")[:4]
    assert seen[0] == (True, ":4096:8") and not switched()


def test_process_is_left_as_it_was(data, tmp_path, monkeypatch):
    """Signals, compiler stance and threads are given back, at the end and after an error; the model trains on."""
    def state():
        return (torch._dynamo.eval_frame._stance.stance, torch.get_float32_matmul_precision(),
                [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
                [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")])
    before = state()
    assert before[0] == "default" and before[3] == []
    runs.run(data, tmp_path / "a", max_steps=2)
    assert state() == before
    monkeypatch.setattr(train, "evaluate", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.run(data, tmp_path / "b", max_steps=2, eval_interval=1)
    assert state() == before


# ---------------------------------------------------------------------------------------------------------------------
# The step


def step_by_hand(data, model_cfg, cfg, batch, mask=lambda y: y):
    """Loss and gradient norm of one batch of sequences in one pass: mean over the valid tokens, with PyTorch's loss."""
    torch.manual_seed(cfg.seed)
    model, boundary = GPT(model_cfg), Tokenizer.load(data).boundary_id
    x, y = batch[:, :-1], mask(batch[:, 1:])
    h = model.hidden(x, docs=document_ids(x, boundary) if cfg.doc_mask else None)
    logits = model.logits(h).flatten(0, 1)
    valid = y.flatten() != -100
    loss = F.cross_entropy(logits, y.flatten()) + cfg.z_loss * logits[valid].logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("masked", [False, True])
def test_accumulation_does_not_matter(data, tmp_path, monkeypatch, masked):
    """8, 4, 2 or 1 micro batches give one gradient, that of the mean over all valid tokens, however uneven; with Muon
    in fp32, since its bf16 would make a sum's last bit 2e-4 of a later norm."""
    monkeypatch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)

    def mask(y):  # whole rows and single targets, so that micro batches hold from 0 to all of their tokens
        y = torch.where(y % 3 == 0, -100, y)
        return torch.where(y[:, :1] % 2 == 0, -100, y)
    if masked:
        runs.spy_batches(monkeypatch, lambda x, y: (x, mask(y)))
    got = [runs.log(runs.run(data, tmp_path / str(b), micro_batch_size=b, max_steps=3, grad_clip=0.1))
           for b in (1, 2, 4, 8)]
    for lines in got[1:]:
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in lines] == pytest.approx([line[key] for line in got[0]], rel=1e-4)
    configs = runs.settings(data, tmp_path, grad_clip=0.1)
    train_data = TokenData(data, "train", seq_len=32)
    batch = torch.tensor([[*x, y[-1]] for x, y, _ in map(train_data.window, train_data.order(0, 1337)[:8])])
    loss, norm = step_by_hand(data, *configs, batch, mask if masked else lambda y: y)
    assert got[0][0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert got[0][0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_batch_ramp(data, tmp_path, monkeypatch):
    """The first ramp_steps take half of batch_tokens: what a run of half the batch does that goes on with the whole,
    to the bit, in one order of the text, whether it is stopped amid the ramp or not; tokens are counted as they are."""
    constant = dict(decay_fraction=0.0, warmup_steps=1)
    seen = runs.spy_batches(monkeypatch)
    whole = runs.run(data, tmp_path / "whole", ramp_steps=3, max_steps=5, **constant)
    taken = list(seen)
    for stop in (2, 4):  # within the ramp, behind it
        seen.clear()
        cut = tmp_path / f"cut{stop}"
        runs.run(data, cut, ramp_steps=3, max_steps=stop, **constant)
        runs.run(data, cut, ramp_steps=3, max_steps=5, init_from="resume", **constant)
        runs.assert_same_checkpoint(whole, cut)
        assert seen == taken
    seen.clear()
    runs.run(data, tmp_path / "by_hand", batch_tokens=128, max_steps=3, **constant)
    runs.run(data, tmp_path / "by_hand", max_steps=5, init_from="resume", **constant)
    runs.assert_same_checkpoint(whole, tmp_path / "by_hand")
    assert seen == taken and len(taken) == 3 * 2 + 2 * 4
    tokens = [line["tokens"] for line in runs.log(whole, key="loss")]
    assert tokens == [128, 256, 384, 640, 896]
    model_cfg, cfg = runs.settings(data, tmp_path, ramp_steps=3, max_steps=5)
    assert account.account(model_cfg, cfg)["tokens"] == tokens[-1]
    for steps, n in enumerate((0, *tokens)):
        assert replace(cfg, max_steps=steps).tokens == n and cfg.steps(n) == steps and cfg.steps(n + 1) == steps + 1


def test_time_left_with_a_ramp(data, tmp_path, monkeypatch, capsys):
    """Where every token takes equally long, what has passed and what is said to be left are one sum, from the first
    line on: a step behind the ramp takes twice as long as one within."""
    now = [0.0]

    def a_minute(x, y):
        now[0] += 60
        return x, y
    runs.spy_batches(monkeypatch, a_minute)
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    runs.run(data, tmp_path / "run", ramp_steps=3, max_steps=7, log_interval=2)
    minutes = [4, 10, 18]  # 2 micro batches a step, then 4, at the end of steps 2, 4 and 6
    assert re.findall(r"tok/s \| (\S+) left", capsys.readouterr().out) == [
        tqdm.format_interval(60 * (22 - passed)) for passed in minutes] + ["00:00"]


@pytest.mark.parametrize("settings", [dict(ramp_steps=5), dict(ramp_steps=5, micro_batch_size=3), {}])
def test_advice_on_a_batch_can_be_followed(settings):
    """Each way out that a refused batch_tokens is offered is one."""
    for tokens in range(32, 1500, 32):
        cfg = TrainConfig(**dict(seq_len=32, batch_tokens=tokens, micro_batch_size=2) | settings)
        said = " ".join(batch_problems(cfg, 2))
        assert bool(said) is (tokens % (2 * 32 * cfg.micro_batch_size * (1 + bool(cfg.ramp_steps))) > 0)
        ways = [("batch_tokens", n) for n in re.findall(r"\d+", "".join(re.findall(r"Set it to ([\d or]+)", said)))]
        ways += re.findall(r"or (\w+) to (\d+)", said)
        assert bool(said) is any(name == "batch_tokens" for name, _ in ways)
        assert all(not batch_problems(replace(cfg, **{name: int(n)}), 2) for name, n in ways), said
        assert ("ramp_steps to 0" in said) is bool(said and not batch_problems(replace(cfg, ramp_steps=0), 2))
    assert "or micro_batch_size to" in batch_problems(replace(cfg, batch_tokens=1280, micro_batch_size=10**18), 2)[0]


def test_documents_laid_into_windows(data, tmp_path, monkeypatch, capsys):
    """--packing best_fit: the loss is the mean over the tokens that are there, which are what is counted as seen; how
    many are cut off from their document's beginning is said, and fewer than in the stream."""
    folder, meta = tmp_path / "data", read_meta(data)
    shutil.copytree(data, folder)
    ids = np.array(open_shard(data / "train_000000.bin"))
    starts = np.random.default_rng(0).integers(17, 32, len(ids)).cumsum()  # one fits into a window, two do not
    ids[starts[starts < len(ids)]] = meta["boundary_id"]
    entry = write_shard(folder / "train_000000.bin", ids, fingerprint=meta["tokenizer"], vocab_size=meta["vocab_size"])
    splits = {"train": [{**entry, "documents": 1, "bytes": 1}], "val": meta["splits"]["val"]["shards"]}
    write_meta(folder, sources=[], fingerprint=meta["tokenizer"], vocab_size=meta["vocab_size"],
               boundary_id=meta["boundary_id"], splits=splits)
    valid = []
    runs.spy_batches(monkeypatch, lambda x, y: valid.append(int((y != -100).sum())) or (x, y))
    changes = dict(packing="best_fit", batch_tokens=1024, micro_batch_size=8)
    lines = runs.log(runs.run(folder, tmp_path / "run", **changes), timings=True)
    n_valid = np.array(valid).reshape(-1, 4).sum(axis=1)
    assert [line["tokens"] for line in lines] == n_valid.cumsum().tolist() and max(n_valid) < 850
    rates = [line["tok_per_s"] * line["step_ms"] / 1000 for line in lines]
    assert rates[1:] == pytest.approx(n_valid[1:].tolist(), rel=0.01)
    model_cfg, cfg = runs.settings(folder, tmp_path, **changes)
    torch.manual_seed(cfg.seed)
    packed = TokenData(folder, "train", seq_len=32, packing="best_fit")
    x, y, docs = next(Batches(packed, seed=cfg.seed, micro_batch_size=32))
    logits = GPT(model_cfg)(x, docs=docs).flatten(0, 1)
    loss = F.cross_entropy(logits, y.flatten()) + cfg.z_loss * logits[y.flatten() != -100].logsumexp(-1).square().mean()
    assert lines[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    cut = TokenData(folder, "train", seq_len=32).cut_share()
    assert f"best_fit: {packed.cut_share():.1%} of tokens are cut off" in capsys.readouterr().out
    assert packed.cut_share() < cut - 0.1


def test_text_seen_too_often(data, tmp_path, capsys, monkeypatch):
    """More than PASSES times through the text is said, and how many steps would be as many; up to that nothing is."""
    once = TokenData(data, "train", seq_len=32).n_windows
    n = once * 32
    at_most, above = (TrainConfig(seq_len=32, max_steps=steps, batch_tokens=n) for steps in (4, 5))
    assert repeated(at_most, once) == [] and "sees its text 5 times" in repeated(above, once)[0]
    assert "ckpt_best" in repeated(above, once)[0]
    assert "ckpt_best" not in repeated(replace(above, eval_interval=0), once)[0]
    for passes, said in ((2 * 256 / n, []), (256 / n, ["1"])):  # two steps are as many, or twice as many
        monkeypatch.setattr("stack.start.PASSES", passes)
        runs.run(data, tmp_path / str(passes), max_steps=2, batch_tokens=256)
        assert re.findall(r"the run sees its text .*--max_steps=(\d+)", capsys.readouterr().out) == said


def test_clipping_and_learning_rates(data, tmp_path):
    """The norm logged is the one before clipping; the rate logged is the schedule's; AdamW alone works too."""
    a = runs.log(runs.run(data, tmp_path / "a", optimizer="adamw", grad_clip=0.01, max_steps=10, adamw_lr=1e-3))
    b = runs.log(runs.run(data, tmp_path / "b", optimizer="adamw", grad_clip=0, max_steps=10, adamw_lr=1e-3))
    assert a[0]["grad_norm"] == b[0]["grad_norm"] > 0.1
    assert a[5]["loss"] != b[5]["loss"]
    assert [line["lr"] for line in a] == pytest.approx([5e-4] + [1e-3] * 8 + [1e-3 * (1 - math.sqrt(0))])
    assert a[-1]["lr_scale"] == 1.0  # the last of 10 steps is where the decay of the last 10 % begins


def test_gradients_go_with_their_step(data, tmp_path, monkeypatch):
    """The next step begins without the last one's gradients: as much memory as the weights."""
    seen = []

    def collect(optimizer, *_):
        seen.extend(weakref.ref(p.grad) for group in optimizer.param_groups for p in group["params"])
    left = []
    runs.at(monkeypatch, lambda step: left.append(sum(ref() is not None for ref in seen)))
    with register_optimizer_step_post_hook(collect):
        runs.run(data, tmp_path / "run", max_steps=3)
    assert left == [0, 0, 0] and len(seen) > 3


def test_fp16_scaler(data, tmp_path, monkeypatch, capsys):
    """float16 trains with a loss scale: an overflow skips the step, halves the scale and trains on."""
    seen = []
    real = torch.amp.GradScaler

    class Scaler(real):
        def __init__(self, device, enabled):
            super().__init__(device, init_scale=2.0**24, enabled=enabled)  # of a loss of 6, far above 65504

        def update(self):
            super().update()
            seen.append(self.get_scale())
    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    out = runs.run(data, tmp_path / "run", dtype="float16", max_steps=14)
    lines = runs.log(out)
    skipped = [line["step"] for line in lines if line["grad_norm"] is None]
    assert 1 in skipped and len(skipped) < 14
    assert seen == [2.0**(24 - sum(late <= step for late in skipped)) for step in range(1, 15)]
    assert lines[-1]["loss"] < lines[0]["loss"] and [line["step"] for line in lines] == list(range(1, 15))
    assert capsys.readouterr().out.count("the step is skipped") == len(skipped)
    saved = torch.load(out / "ckpt_last" / "optim.pt", weights_only=True)["scaler"]
    assert saved["scale"] == seen[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize("doc_mask", [True, False])
def test_mfu(data, tmp_path, doc_mask):
    """Where the peak is known or given: FLOPs of a token, attention included as far as documents let it see, times
    tokens a second, over the peak."""
    out = runs.run(data, tmp_path / "run", max_steps=2, peak_tflops=0.5, doc_mask=doc_mask)
    meta = json.loads((data / "meta.json").read_text())["splits"]["train"]
    flops = flops_per_token(runs.settings(data, out)[0], 32, meta["tokens"] / meta["documents"])
    assert flops["doc_masked"] < flops["causal"]
    for line in runs.log(out, timings=True):
        per_token = flops["doc_masked" if doc_mask else "causal"]
        assert line["mfu"] == pytest.approx(per_token * line["tok_per_s"] / 0.5e12, rel=1e-3)
        assert line["tok_per_s"] == pytest.approx(256e3 / line["step_ms"], rel=1e-3)


def test_wandb(data, tmp_path, monkeypatch):
    """A run tells wandb what it logs, and goes on in the same wandb run when resumed; a service that fails is left."""
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandb())
    for init_from, max_steps in (("scratch", 2), ("resume", 3)):
        out = runs.run(data, tmp_path / "run", max_steps=max_steps, init_from=init_from, wandb_project="p",
                       wandb_name="first try" if max_steps == 2 else None, wandb_group="tries")
        wandb.id = "another"
    assert [(kwargs["name"], kwargs["group"]) for name, _, kwargs in wandb.calls if name == "init"] == [
        ("first try", "tries"), ("run", "tries")]
    assert [kwargs["id"] for name, _, kwargs in wandb.calls if name == "init"] == [None, "abc123"]
    assert [kwargs["step"] for name, _, kwargs in wandb.calls if name == "log"] == [1, 2, 3]
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("log", "finish"))
    with pytest.warns(UserWarning, match="wandb failed"):
        runs.run(data, out, max_steps=4, init_from="resume", wandb_project="p")
    assert [line["step"] for line in runs.log(out)] == [1, 2, 3, 4]


def test_nobody_reads(data, tmp_path):
    """`python train.py ... | head -1` trains to its end, with exit code 0 and without a word about the pipe."""
    configs = runs.settings(data, tmp_path / "run", max_steps=2, eval_interval=1, sample_interval=1)
    save_json(tmp_path / "config.json", configs)
    process = subprocess.Popen([sys.executable, runs.ROOT / "train.py", tmp_path / "config.json"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert process.stdout.readline().startswith("ModelConfig:")
    process.stdout.close()
    assert (process.wait(600), process.stderr.read()) == (0, "")
    assert runs.progress(tmp_path / "run")["step"] == 2


def test_closed_streams(data, tmp_path, monkeypatch):
    """`python train.py ... >&- 2>&-` trains too."""
    save_json(tmp_path / "config.json", runs.settings(data, tmp_path / "run", max_steps=2, eval_interval=1))
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "config.json")])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    train.main()
    assert runs.progress(tmp_path / "run")["step"] == 2


def test_what_to_type_next(data, tmp_path, capsys, monkeypatch):
    """The last line of a run says how to sample from it, or goes on with it as it was started, flags included."""
    configs = runs.settings(data, out := tmp_path / "a run", max_steps=4)
    save_json(tmp_path / "config.json", configs)
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "config.json"), "--seed=3", "--init_from", "scratch"])
    runs.at(monkeypatch, lambda step: step == 1 and signal.raise_signal(signal.SIGTERM))
    train.main()
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("stopped at step 2 of 4; go on with: python train.py ")
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", shlex.split(said.split("python ")[1]))
    train.main()
    assert capsys.readouterr().out.splitlines()[-1] == f"saved in {out}: python sample.py '{out}'"
    assert runs.progress(out)["step"] == 4 and [line["step"] for line in runs.log(out)] == [1, 2, 3, 4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resume_command(["train.py", "--init_from=resume", "--seed=1"]) == (
        "torchrun --nproc_per_node=2 train.py --seed=1 --init_from=resume")


def test_any_console(data, tmp_path):
    """Samples of an untrained model are any bytes; what a console cannot show, or would obey, is replaced."""
    process = runs.start(runs.settings(data, tmp_path / "run", sample_interval=1), tmp_path / "output",
                         prepare=ascii_console)
    assert runs.finish(process) == [0]
    output = (tmp_path / "output").read_text(encoding="ascii")
    assert output.count("--- sample") == 6 and "a sample failed" not in output
    assert all(c.isprintable() or c in "\n\t" for c in output)


def ascii_console():
    sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="ascii")


@pytest.mark.parametrize("off", ["log_interval", "eval_interval", "sample_interval", "save_interval", "grad_clip",
                                 "warmup_steps", "weight_decay", "z_loss", "decay_fraction", "seed", "keep"])
def test_zero_is_off(data, tmp_path, off):
    """0 switches off, and divides nothing.  Only the last checkpoint is written whatever save_interval says."""
    on = dict(log_interval=1, eval_interval=1, sample_interval=1, save_interval=1, max_steps=2, eval_tokens=64)
    out = runs.run(data, tmp_path / "run", **{**on, off: 0})
    kinds = {"log_interval": "loss", "eval_interval": "val_loss", "sample_interval": "sample"}
    assert {name for name, key in kinds.items() if not runs.log(out, key=key)} == {off} & kinds.keys()
    assert runs.progress(out)["step"] == 2
    assert (out / "ckpt_best").exists() == (off != "eval_interval")


def test_no_held_out_text_needed_when_never_evaluated(tmp_path):
    """eval_interval=0 trains on a data set whose held-out split is too short for one window; else it is refused."""
    short = runs.make_data(tmp_path / "data", val_tokens=10)
    runs.run(short, tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match="'val'.*has 10 tokens"):
        runs.run(short, tmp_path / "run", max_steps=1, eval_interval=1)


def test_user_errors(data, tmp_path, capsys, monkeypatch):
    """Exit code 2, one message on stderr, no traceback: a wrong flag, missing data, an impossible batch."""
    small = [f"--{k}={v}" for c in runs.settings(data, tmp_path / "run") for k, v in vars(c).items()]
    for flags, message in ((["--max_step=3"], "max_steps"), ([*small, "--data_dir=nowhere"], "nowhere"),
                           ([*small, "--batch_tokens=100"], "64 or 128"),
                           ([*small, "--batch_tokens=192", "--ramp_steps=5"], "for ramp_steps = 128)"),
                           ([*small, "--seq_len=64", "--batch_tokens=512"], "max_seq_len (32)"),
                           ([*small, "--init_from=nowhere"], "nowhere"), ([*small, "--init_from=resume"], "ckpt_last"),
                           ([*small, "--device=cuda:9"], "cuda:9"), ([*small, "--vocab_size=300"], "--vocab_size=320"),
                           ([*small, f"--out_dir={__file__}/run"], "Not a directory")):
        monkeypatch.setattr("sys.argv", ["train.py", *flags])
        with pytest.raises(SystemExit) as exit_code:
            train.main()
        error = capsys.readouterr().err
        assert exit_code.value.code == 2 and message in error and "Traceback" not in error, error


def test_vocabulary_follows_the_tokenizer(data, tmp_path, capsys):
    """A larger vocab_size than the tokenizer has is lowered to it, and said."""
    out = runs.run(data, tmp_path / "run", max_steps=1, vocab_size=32768)
    assert "vocab_size 320" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 320


def test_finetune(plain, data, tmp_path, capsys):
    """init_from=RUN starts a run of its own from another's weights, architecture included, and leaves that alone."""
    before = {p: p.stat().st_mtime_ns for p in plain.rglob("*")}
    out = runs.run(data, tmp_path / "run", init_from=str(plain), n_layers=5, dropout=0.0, max_steps=2, eval_interval=1,
                   embed_constant=3.0)
    said = capsys.readouterr().out
    assert "n_layers 5 -> 2" in said and "embed_constant 3.0 -> " not in said  # initial values: nothing has them here
    assert [line["step"] for line in runs.log(out, key="loss")] == [1, 2]
    assert runs.log(out, key="val_loss")[0]["val_loss"] < runs.log(plain, key="val_loss")[0]["val_loss"]
    assert {p: p.stat().st_mtime_ns for p in plain.rglob("*")} == before
    best = runs.run(data, tmp_path / "best", init_from=str(plain / "ckpt_best"), max_steps=1)  # any checkpoint will do
    assert runs.progress(best)["step"] == 1


def test_finetune_needs_the_tokenizer(plain, tmp_path):
    """Rows of another tokenizer would mean other tokens: refused, naming both and what to do."""
    other = runs.make_data(tmp_path / "data", vocab_size=310)
    for init_from, out in ((str(plain), tmp_path / "run"), ("resume", plain)):
        with pytest.raises(ValueError, match="another tokenizer.*--tokenizer"):
            runs.run(other, out, init_from=init_from, max_steps=20, vocab_size=320, allow_changes=True)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


def test_compiled(data, tmp_path, monkeypatch):
    """Compiled and plain training agree; all layers share one graph for training and one for evaluation, and nothing
    is compiled again by evaluations, samples, a last partial batch or later steps."""
    torch._dynamo.reset()  # what other tests compiled of the same code counts towards its limit
    stats, compiled_at = torch._dynamo.utils.counters["stats"], {}
    runs.at(monkeypatch, lambda step: compiled_at.__setitem__(step, stats["unique_graphs"]))
    start = stats["unique_graphs"]
    same = dict(max_steps=8, eval_interval=2, sample_interval=2, n_layers=3, eval_tokens=7 * 32, save_interval=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "nothing is compiled")
        fast = runs.log(runs.run(data, tmp_path / "fast", compile=True, **same))
    seen = [compiled_at[1] - start, compiled_at[3] - start, stats["unique_graphs"] - start]
    plain = runs.log(runs.run(data, tmp_path / "plain", **same))
    for key in ("loss", "grad_norm", "val_loss"):
        one, two = ([line[key] for line in lines if key in line] for lines in (fast, plain))
        assert one[:2] == pytest.approx(two[:2], rel=1e-4) and one == pytest.approx(two, rel=1e-2)
    assert seen == [1, 2, 2]


def without_compiler():
    """In a process of its own: a machine without a C++ compiler, and with nothing compiled earlier."""
    import os
    os.environ["PATH"], os.environ["CXX"] = "", "no-such-compiler"


def test_without_a_compiler(data, tmp_path):
    """No C++ compiler: one warning, and the run trains plainly to its end, evaluation and samples included."""
    configs = runs.settings(data, tmp_path / "run", compile=True, n_layers=3, eval_interval=3, sample_interval=3)
    process = runs.start(configs, tmp_path / "output", prepare=without_compiler,
                         env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert runs.finish(process) == [0]
    output = (tmp_path / "output").read_text()
    assert output.count("nothing is compiled") == 1 and "Traceback" not in output
    plain = runs.log(runs.run(data, tmp_path / "plain", n_layers=3, eval_interval=3, sample_interval=3))
    assert runs.log(tmp_path / "run") == plain

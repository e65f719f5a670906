"""Whether a card computes what it should, each check against something that cannot be wrong in the same way.

A check is a function of (args, device) to what it saw, "ok" among it; `python -m bench gpu` runs them.  On a CPU they
run too: that proves the script, and of the card nothing.
"""

import argparse
import copy
import functools
import inspect
import itertools
import math
import re
import runpy
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file

from bench import head, peers
from bench.measure import beginning, listening
from bench.step import settings, write_data
from model import GPT, fused_linear_cross_entropy, generate
from stack import compiled, twins
from stack.config import ROOT
from stack.cpu import kernels
from stack.device import autocast, pick_dtype
from stack.log import read_log
from stack.parallel.ranks import Ranks
from stack.parallel.sharding import local, parallelize

SMALL = ["--d_model=64", "--n_layers=2", "--n_heads=4", "--n_kv_heads=2", "--head_dim=16", "--d_ff=128",
         "--vocab_size=512", "--seq_len=128", "--max_seq_len=128", "--micro_batch_size=4", "--doc_mask=true"]


def _distance(got, want) -> float:
    """Of two lists of tensors, as a share of the second one's norm."""
    squares = [((a.double() - b.double()).square().sum().item(), b.double().square().sum().item())
               for a, b in zip(got, want, strict=True)]
    return math.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares))


def _loss_and_gradients(call, model, device, dtype) -> tuple[float, list]:
    with autocast(device, dtype):
        loss = call()
    loss.backward()
    grads = [local(p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def worst(errors) -> float:
    """The largest, and NaN where there is one, which max would pass over."""
    return max(errors, key=lambda error: (error != error, error))


def random_batch(model_cfg, rows: int, length: int, device, mean_doc_len: int):
    """ids, targets and documents (B, T), of so many tokens on average."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model_cfg.vocab_size, (rows, length + 1), generator=draws).to(device)
    docs = (torch.rand(rows, length, generator=draws) < 1 / mean_doc_len).cumsum(1).to(device)
    return ids[:, :-1], ids[:, 1:], docs


def _plain(ours, model_cfg, device) -> tuple:
    """(model, loss_of(x, y, docs), what to say) that ours is held against: plain PyTorch with the same weights or, of a
    model.py that has others, model.py itself, eager."""
    plain, loss_of = peers.trained("plain", model_cfg, device)
    weights = {_name(name): tensor for name, tensor in ours.state_dict().items()}
    theirs = plain.state_dict()
    changed = [name for name in {**weights, **theirs} if name not in weights or name not in theirs
               or weights[name].shape != theirs[name].shape]
    if not changed:
        plain.load_state_dict(weights)
        return plain, loss_of, {}
    own = copy.deepcopy(ours)
    return own, lambda x, y, docs: own(x, y, docs=docs), dict(
        beside="eager model.py in fp32: it was changed, or set to what plain PyTorch does not know, which lacks or has "
               f"otherwise {', '.join(changed[:3])}{', ...' * (len(changed) > 3)}")


def _name(name: str) -> str:
    return name.replace(".attn.", ".").replace(".mlp.", ".")


def _flex_ran(model, length: int, docs) -> bool:
    """Whether what stands for attention under document masks, after a step, still is FlexAttention."""
    mask = model.mask(torch.arange(length, device=docs.device), length, docs)
    return not torch.is_tensor(mask) and any(
        getattr(getattr(block, "attn", None), "fast", None) is compiled.flex for block in model.blocks)


def _beside_plain(args, device, documents: bool) -> dict:
    model_cfg, cfg = settings(args, "--seq_len=2048")
    torch.manual_seed(0)
    ours = GPT(model_cfg).to(device)
    plain, loss_of, seen = _plain(ours, model_cfg, device)
    x, y, docs = random_batch(model_cfg, 1, cfg.seq_len, device, cfg.seq_len // 8)
    docs = docs if documents else None
    dtype = pick_dtype(cfg.dtype, device)
    loss, want = _loss_and_gradients(lambda: loss_of(x, y, docs), plain, device, torch.float32)
    plain_loss, plain_grads = _loss_and_gradients(lambda: loss_of(x, y, docs), plain, device, dtype)
    if cfg.compile:
        twins.compile_blocks(ours, device)
    our_loss, grads = _loss_and_gradients(lambda: ours(x, y, docs=docs), ours, device, dtype)
    ours_of = {_name(name): grad for (name, _), grad in zip(ours.named_parameters(), grads, strict=True)}
    seen |= dict(loss=loss, loss_error=abs(our_loss - loss) / loss, loss_error_plain=abs(plain_loss - loss) / loss,
                 grad_error=_distance([ours_of[_name(name)] for name, _ in plain.named_parameters()], want),
                 grad_error_plain=_distance(plain_grads, want))
    if cfg.compile:  # one line says what is equal, if all is
        said = twins.check(ours, x, y, docs, dtype=dtype)
        seen["said"] = [line for line in said if not re.search("compared with model.py .*, equal", line)]
        if documents and device.type == "cuda":
            seen["flex"] = _flex_ran(ours, cfg.seq_len, docs)
    return seen | dict(ok=seen["loss_error"] < 2 * seen["loss_error_plain"] + 1e-3 and not seen.get("said")
                       and seen["grad_error"] < 1.5 * seen["grad_error_plain"] + 1e-3 and seen.get("flex", True))


def flagship(args, device) -> dict:
    """A step's loss and gradients in the matmuls' format: as far from fp32 as plain PyTorch is, no further."""
    return _beside_plain(args, device, documents=False)


def documents(args, device) -> dict:
    """The same under document masks, which plain PyTorch states as a boolean matrix."""
    return _beside_plain(args, device, documents=True)


def attention_ways(docs, grouped: bool) -> dict:
    """name -> function of q (B, H, T, D), k and v (B, K, T, D): causal attention and, but for "causal", attention
    within the documents docs (B, T), in the ways that there are on this device."""
    (B, T), device = docs.shape, docs.device

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def seen():
        return (docs[:, :, None] == docs[:, None]).tril()[:, None]

    def boolean(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(), enable_gqa=grouped)
    ways = {"causal": causal, "boolean": boolean}
    if device.type == "cpu":
        return ways | {"kernels.cpp": lambda q, k, v: kernels.attention(q, k, v, seen())}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (docs[b, q] == docs[b, k]), B, None, T, T, str(device))
    flex = torch.compile(flex_attention, dynamic=False)
    begins = torch.cat((torch.ones(B, 1, dtype=torch.bool, device=device), docs[:, 1:] != docs[:, :-1]), 1)
    starts = torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([B * T], device=device))).int()
    longest = int(starts.diff().max())

    def varlen(q, k, v):
        from torch.nn.attention.varlen import varlen_attn
        more = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # of a block's layout views
        out = varlen_attn(*flat, starts, starts, longest, longest, window_size=(-1, 0), **more)
        return out.unflatten(0, (B, T)).transpose(1, 2)
    return ways | {"flex": lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=grouped), "varlen": varlen}


def attention(args, device) -> dict:
    """Attention within documents, and its gradients, in the ways there are, against PyTorch's under a boolean matrix in
    fp32, of the inputs as rounded.  varlen_attn is nobody's default: where it is not to be had, that is said."""
    model_cfg, cfg = settings(args, "--seq_len=2048")
    H, K, dtype, seen = model_cfg.n_heads, model_cfg.n_kv_heads, pick_dtype(cfg.dtype, device), {}
    begins = torch.rand(2, cfg.seq_len, generator=torch.Generator().manual_seed(0)) < 8 / cfg.seq_len
    docs = begins.cumsum(1).to(device)
    given = [torch.randn(2, cfg.seq_len, n, model_cfg.head_dim, device=device, dtype=dtype) for n in (H, K, K, H)]
    ways = attention_ways(docs, H != K)

    def result(way, dtype):
        *tensors, towards = (x.to(dtype).transpose(1, 2).requires_grad_() for x in given)
        out = way(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, towards)]
    want = result(ways["boolean"], torch.float32)
    for name in [name for name in ways if name not in ("causal", "boolean")]:
        try:
            seen[f"{name}_error"] = _distance(result(ways[name], dtype), want)
        except Exception as error:
            seen[f"{name}_failed"] = beginning(f"{type(error).__name__}: {error}")
    errors = [error for name, error in seen.items() if name.endswith("_error")]
    return seen | dict(ok=bool(errors) and worst(errors) < 0.02 and not {"flex_failed", "kernels.cpp_failed"} & {*seen})


def loss_head(args, device) -> dict:
    """Loss and both gradients against full logits in float64, of the inputs as rounded."""
    model_cfg, cfg = settings(args, "--seq_len=2048")
    dtype = str(pick_dtype(cfg.dtype, device)).removeprefix("torch.")
    hidden, weight, targets = head.head_inputs(argparse.Namespace(
        n_tokens=2 * cfg.seq_len, d_model=model_cfg.d_model, vocab=model_cfg.padded_vocab_size, dtype=dtype), device)
    want, *grads = head.head_truth(hidden, weight, targets)
    loss = head.head_rows(device)["ours"](hidden, weight, targets, chunk=cfg.seq_len)
    loss.backward()
    seen = dict(loss_error=(abs(loss - want) / want).item(), grad_error=_distance((hidden.grad, weight.grad), grads))
    return seen | dict(ok=seen["loss_error"] < 1e-4 and seen["grad_error"] < 0.01)


def decoding(args, device) -> dict:
    """Greedy logits of the recorded graph against model.py's own, in fp32; again for the same sizes, which records
    nothing; and for rows of unequal length.  A twin that was put aside, as twins.py warns, would prove nothing."""
    model_cfg, cfg = settings(args, "--seq_len=2048")
    torch.manual_seed(0)
    plain = GPT(replace(model_cfg, n_layers=min(model_cfg.n_layers, 4))).to(device).eval()
    fast = copy.deepcopy(plain)
    if cfg.compile:
        twins.fast_decoding(fast)
    draws = torch.Generator().manual_seed(1)
    errors, said, graphs = [], [], []
    for lengths in ([9], [12], [3, 17, 8]):
        prompts = [torch.randint(0, model_cfg.vocab_size, (n,), generator=draws).tolist() for n in lengths]
        want, got = [], []
        ids = generate(plain, prompts, max_new_tokens=12, on_logits=lambda logits, kept=want: kept.append(
            logits.clone()) or logits)

        def forced(logits, kept=got, ids=ids):  # the same ids whatever rounding says
            chosen = torch.tensor([row[len(kept)] for row in ids], device=device)
            kept.append(logits.clone())
            return torch.nn.functional.one_hot(chosen, logits.shape[-1]).float()
        with listening() as heard:
            generate(fast, prompts, max_new_tokens=12, on_logits=forced)
        said += [text for text in heard if "decoding goes on" in text]
        graphs.append([*vars(fast).get("recorded", {}).values()])  # kept, so that no two have one id
        errors += [_distance([a], [b]) for a, b in zip(got, want, strict=True)]
    seen = dict(logit_error=worst(errors), said=said)
    if cfg.compile and device.type == "cuda":  # one graph for a batch and size
        seen["graphs"] = [len(set(map(id, those))) for those in itertools.accumulate(graphs)]
    return seen | dict(ok=seen["logit_error"] < 5e-3 and not said and seen.get("graphs", [1, 1, 2]) == [1, 1, 2])


def outside(args, device) -> dict:
    """A target outside the vocabulary: named on a CPU, NaN on a card, where the step is then skipped, and what
    gradients there are is finite.  A prompt's id: named everywhere."""
    model_cfg, _ = settings(args, *SMALL)
    model = GPT(model_cfg).to(device)
    hidden, weight = (torch.ones(n, 8, device=device, requires_grad=True) for n in (4, 64))

    def head_loss():
        loss = fused_linear_cross_entropy(hidden, weight, torch.full((4,), 64, device=device))
        loss.backward()
        return loss.item()
    said = []
    for call in (lambda: generate(model, [[model_cfg.vocab_size]], max_new_tokens=1), head_loss):
        try:
            said.append(call())
        except ValueError as error:
            said.append(str(error))
    named, loss = said
    ok = "outside the vocabulary" in str(named) and ("outside" in str(loss) if device.type == "cpu" else loss != loss)
    finite = all(x.grad is None or bool(x.grad.isfinite().all()) for x in (hidden, weight))
    return dict(said=str(named), loss=str(loss), gradients_finite=finite, ok=ok and finite)


@functools.cache
def _train():
    return runpy.run_path(str(ROOT / "train.py"), run_name="train")["run"]


def _trained(model_cfg, cfg, **changes) -> list[dict]:
    """The lines of the log of train.py's run, at given rates: those by rule go with its length."""
    cfg = replace(cfg, batch_tokens=2 * cfg.micro_batch_size * cfg.seq_len, ramp_steps=0, schedule="wsd",
                  warmup_steps=0, decay_fraction=0.0, muon_lr=5e-3, adamw_lr=4e-3, log_interval=1, eval_interval=0,
                  save_interval=0, sample_interval=0, **changes)
    _train()(model_cfg, cfg)
    return [{key: math.nan if value is None and key in ("loss", "grad_norm") else value for key, value in line.items()}
            for line in read_log(f"{cfg.out_dir}/log.jsonl") if "loss" in line]  # null: what was not finite


def _small(args, device, *more):
    """A small model's settings and a folder with its data."""
    model_cfg, cfg = settings(argparse.Namespace(settings=[*args.settings, *SMALL, *more]))
    folder = tempfile.mkdtemp()
    cfg = replace(cfg, data_dir=folder, device=str(device))
    write_data(folder, model_cfg, cfg, different=16)
    return folder, model_cfg, cfg


def resume(args, device) -> dict:
    """Six steps, and three that are gone on with: equal to the bit with --deterministic."""
    folder, model_cfg, cfg = _small(args, device, "--optimizer=muon", "--dtype=auto", "--deterministic")
    whole = _trained(model_cfg, cfg, out_dir=f"{folder}/whole", max_steps=6)
    _trained(model_cfg, cfg, out_dir=f"{folder}/parts", max_steps=3)
    parts = _trained(model_cfg, cfg, out_dir=f"{folder}/parts", max_steps=6, init_from="resume")
    weights = [load_file(path) for name in ("whole", "parts")
               for path in sorted(Path(folder, name, "ckpt_last").glob("*.safetensors"))]
    differ = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    losses = [[line["loss"] for line in lines] for lines in (whole, parts)]
    return dict(differ=differ[:3], losses_equal=losses[0] == losses[1], ok=not differ and losses[0] == losses[1])


def losses(args, device) -> dict:
    """Twenty steps in fp32 are the CPU's, uncompiled: losses and gradient norms, up to what TF32's rounding becomes."""
    folder, model_cfg, cfg = _small(args, device, "--optimizer=muon", "--dtype=float32")
    there = _trained(model_cfg, cfg, out_dir=f"{folder}/there", max_steps=20)
    here = _trained(model_cfg, replace(cfg, device="cpu", compile=False), out_dir=f"{folder}/here", max_steps=20)
    errors = {f"{key}_error": worst(abs(a[key] - b[key]) / b[key] for a, b in zip(there, here, strict=True))
              for key in ("loss", "grad_norm")}
    return dict(loss_first=here[0]["loss"], loss_last=here[-1]["loss"], **errors,
                ok=errors["loss_error"] < 3e-3 and errors["grad_norm_error"] < 0.03)


def one_rank(args, device) -> dict:
    """ddp and fsdp over nccl (on a CPU gloo) with a single rank: the loss and gradients of the bare model."""
    model_cfg, cfg = settings(argparse.Namespace(settings=[*args.settings, *SMALL]))
    x, y, docs = random_batch(model_cfg, 4, cfg.seq_len, device, cfg.seq_len // 4)
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store",
                                rank=0, world_size=1)
        try:
            mesh = dist.device_mesh.init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
            for dp in ("none", "ddp", "fsdp"):
                torch.manual_seed(0)
                model = GPT(model_cfg)
                at = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
                replica = parallelize(model, Ranks() if dp == "none" else Ranks(world_size=2, mesh=mesh), at, dp=dp,
                                      compile=cfg.compile)
                seen[dp] = _loss_and_gradients(lambda r=replica: r(x, y, docs=docs), replica, device, torch.float32)
        finally:
            dist.destroy_process_group()
    (loss, grads), errors = seen.pop("none"), {}
    for dp, (other, others) in seen.items():
        errors |= {f"{dp}_loss_error": abs(other - loss) / loss, f"{dp}_grad_error": _distance(others, grads)}
    return errors | dict(ok=worst(errors.values()) < 5e-3)


CHECKS = {"flagship step": flagship, "document masks": documents, "attention": attention, "loss head": loss_head,
          "decoding": decoding, "id out of range": outside, "resume to the bit": resume, "losses of the CPU": losses,
          "one rank": one_rank}

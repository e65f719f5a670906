"""Every figure account.py prints is what the real thing has, keeps, reads or computes."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, document_ids, tiny_config
from test_memory import GPT2, LiveStorage
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

import account
import model as model_py
from model import GPT, Block, KVCache, ModelConfig
from stack import memory, roofline
from stack.config import load
from stack.counts import build, mean_keys
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*.py")
                 if not path.name.startswith("data_"))  # recipes of prepare.py
GPUS = "|".join(roofline.GPUS)
SHAPES = {"stack": {}, "gpt2": GPT2, "untied": dict(tie_embeddings=False), "wide heads": dict(head_dim=32)}


def settings(path, *flags):
    return load((ModelConfig, TrainConfig), [str(ROOT / path), *flags])


def priced(cfg, **train):
    return account.account(cfg, TrainConfig(**{**dict(seq_len=cfg.max_seq_len, micro_batch_size=4), **train}))


# parameters ----------------------------------------------------------------------------------------------------------

def test_the_command_prints_the_integers_of_stack100m():
    measured = ("import resource, subprocess, sys; code = subprocess.call([sys.executable, *sys.argv[1:]]); "
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)")  # no other's children
    done = subprocess.run([sys.executable, "-c", measured, "account.py", "configs/stack100m.py", "--json"], cwd=ROOT,
                          text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == ""
    said, peak = done.stdout.strip().rsplit("\n", 1)
    a = json.loads(said)
    expected = dict(
        embedding=16777216, attention_per_block=655360, mlp_per_block=2162688, norm_per_block=1152, per_block=2819200,
        blocks=84576000, final_norm=512, total=101353728, total_untied=118130944, body=84576512, muon_params=84541440,
        adamw_params=16812288, norm=35072, bytes_float32=405414912, bytes_bfloat16=202707456,
        train_state_bytes=1283493888, train_state_bytes_adamw=1621659648, kv_cache_bytes_per_token=15360,
        kv_cache_bytes_per_token_mha=61440, flops_6n=608122368, flops_attention=188743680, flops_causal=796866048,
        flops_palm=985609728, flops_attention_at_4x=754974720, batch_tokens=524288, max_steps=38147,
        tokens=20000014336, int8_row_scales=171008, int4_groups=1583104)
    assert {key: a[key] for key in expected} == expected
    assert a["kv_cache_bytes"] == {"2048": 31457280, "8192": 125829120}
    assert a["vocabularies"]["50257"]["total"] == 110308096
    assert a["budget"] == {"tokens": 20 * 10**9, "steps": 38147, "windows": 9765625}
    assert a["bytes_int4"] / 1e6 == pytest.approx(63.3, abs=0.05)
    assert a["table_share"] == pytest.approx(0.1655, abs=1e-4)
    assert a["vocabularies"]["50257"]["table_share"] == pytest.approx(0.233, abs=1e-3)
    assert a["flops_newton_schulz_per_step"] == pytest.approx(1.038e12, rel=1e-3)
    assert a["flops_newton_schulz_share"] == pytest.approx(0.0033, abs=1e-4)
    assert a["flops_head_share_of_forward"] == pytest.approx(0.126, abs=1e-3)
    assert a["expected_initial_loss"] == pytest.approx(10.50, abs=5e-3)
    assert int(peak) < 1_000_000  # kB: nothing of the model's size was allocated on top of importing torch


@pytest.mark.parametrize("path", CONFIGS)
def test_parameters_are_those_of_the_built_model(path):
    cfg, train = settings(path)
    a = account.account(cfg, train)
    with torch.device("meta"):
        model = GPT(cfg)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert a["total"] == sum(sizes.values())
    assert a["embedding"] == sizes["embed.weight"]
    assert a["per_block"] == sum(n for name, n in sizes.items() if name.startswith("blocks.0."))
    assert a["attention_per_block"] == sum(n for name, n in sizes.items() if ".0.attn.w" in name)
    assert a["mlp_per_block"] == sum(n for name, n in sizes.items() if ".0.mlp." in name)
    assert a["final_norm"] == sum(n for name, n in sizes.items() if name.startswith("norm."))
    assert a["body"] == sum(n for name, n in sizes.items() if name.startswith(("blocks.", "norm.")))
    other = "total_untied" if cfg.tie_embeddings else "total_tied"
    cfg.tie_embeddings = not cfg.tie_embeddings
    with torch.device("meta"):
        assert a[other] == sum(p.numel() for p in GPT(cfg).parameters())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_state_is_what_lies_in_memory_after_a_step(tiny, shape, optimizer):
    model = tiny(**SHAPES[shape])
    a = priced(model.cfg, optimizer=optimizer)
    optimizers = make_optimizers(model, optimizer=optimizer)
    owned = {type(o).__name__: sum(p.numel() for g in o.param_groups for p in g["params"]) for o in optimizers}
    assert (owned.get("Muon", 0), owned["AdamW"]) == (a["muon_params"], a["adamw_params"])
    ids = torch.randint(0, 300, (2, 8))
    model(ids, ids).backward()
    for o in optimizers:
        o.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad)]
    tensors += [t for o in optimizers for state in o.state.values() for t in state.values() if t.ndim]
    assert sum(t.nbytes for t in tensors) == a["train_state_bytes"]


class Lion(torch.optim.Optimizer):
    """One moment, where AdamW has two (arXiv 2302.06675)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "peak_lr": lr})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            state.setdefault("step", torch.zeros(()))
            p.add_(state.setdefault("moment", torch.zeros_like(p)).lerp(p.grad, 0.1).sign_(), alpha=-0.1)


def test_an_optimizer_of_ones_own_is_measured(monkeypatch):
    """Its state is what a step leaves; one that asks for values is refused by name."""
    def make(model, optimizer):
        return [Lion(model.named_parameters(), 1e-3)]
    monkeypatch.setattr(memory, "make_optimizers", make)
    a = priced(tiny_config())
    assert a["train_state_bytes"] == 12 * a["total"] and a["muon_params"] == a["adamw_params"] == 0
    assert any(line.startswith("Lion: 14 matrices") for line in a["groups"])
    monkeypatch.setattr(Lion, "step", lambda self: self.param_groups[0]["params"][0].sum().item())
    with pytest.raises(ValueError, match="Lion's memory cannot be measured"):
        priced(tiny_config())


@pytest.mark.parametrize("cls, moments", memory.MOMENTS.items())
def test_known_optimizers_leave_what_is_said_of_them(cls, moments):
    """What one step without values leaves, too."""
    model = build(tiny_config())
    opts = [opt for opt in make_optimizers(model) if type(opt) is cls]
    n = sum(p.numel() for p in memory.owned(opts, cls))
    counted = memory.train_state_bytes(model, opts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MOMENTS", {})
        assert memory.train_state_bytes(model, opts) == counted
    assert counted == 8 * sum(p.numel() for p in model.parameters()) + 4 * moments * n
    model.pos_frozen = torch.nn.Parameter(torch.empty(100, device="meta"), requires_grad=False)
    assert memory.train_state_bytes(model, opts) == counted + 400  # no gradient


def test_the_page_says_who_moves_what_and_what_a_changed_model_has(monkeypatch):
    """Blocks that differ, a table within them: in the text as in the figures."""
    class Uneven(Block):
        def __init__(self, cfg):
            super().__init__(cfg)
            Uneven.made = 1 - Uneven.made
            if Uneven.made:
                self.attn.ve = torch.nn.Embedding(cfg.padded_vocab_size, 32)
    Uneven.made = 0
    monkeypatch.setattr(model_py, "Block", Uneven)
    cfg, train = tiny_config(), TrainConfig(seq_len=32)
    a = account.account(cfg, train)
    text = account.tables(a, cfg, train)
    assert "  attn.ve                             10,240   " in text
    assert "  AdamW: 2 tables, 30,720 parameters: embed, attn.ve" in text
    assert "30,880 or 41,120 per block x 2" in text and a["blocks"] == 30_880 + 41_120
    assert a["decode_bytes"]["empty"] == 2 * (a["total"] - 10_240)  # rows are looked up


def test_quantized_sizes_count_rows_and_groups_of_the_real_matrices(tiny):
    model = tiny()
    a = priced(model.cfg)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert a["int8_row_scales"] == sum(p.shape[0] for p in matrices)
    assert a["int4_groups"] == sum(p.numel() for p in matrices) // 64


# memory --------------------------------------------------------------------------------------------------------------

def test_the_peak_of_a_training_step_is_state_activations_and_head():
    cfg = tiny_config(vocab_size=64, n_layers=6, d_model=128, d_ff=352, max_seq_len=128)
    model = GPT(cfg)
    ids = torch.randint(0, cfg.vocab_size, (8, 128))
    optimizers = make_optimizers(model)
    model(ids, ids).backward()
    for o in optimizers:
        o.step()
    kept = sum(t.nbytes for p in model.parameters() for t in (p, p.grad)) + sum(
        t.nbytes for o in optimizers for state in o.state.values() for t in state.values())
    known = [t for p in model.parameters() for t in (p, p.grad)]
    with LiveStorage([*known, ids]) as live:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
    counted = priced(cfg, seq_len=128, micro_batch_size=8)["train_peak_bytes"]["eager"]
    assert kept + live.peak == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kv_cache_is_the_cache_that_is_allocated(kv_heads):
    cfg = tiny_config(n_kv_heads=kv_heads)
    cache = KVCache(cfg, 1, cfg.max_seq_len, "cpu", torch.bfloat16)
    assert priced(cfg)["kv_cache_bytes"][cfg.max_seq_len] == cache.k.nbytes + cache.v.nbytes


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_reads_every_matrix_that_multiplies_and_the_cache(tiny, shape):
    model = tiny(**SHAPES[shape]).to(torch.bfloat16)
    lookups = {"pos_embed.weight"} | (set() if model.cfg.tie_embeddings else {"embed.weight"})
    read = sum(p.nbytes for name, p in model.named_parameters() if name not in lookups)
    a = priced(model.cfg)
    assert a["decode_bytes"]["empty"] == read
    assert a["decode_bytes"]["full"] - read == a["kv_cache_bytes"][model.cfg.max_seq_len]
    h100 = a["gpus"]["H100"]
    assert h100["decode_ms"]["empty"] == pytest.approx(read / 3350e9 * 1e3)


# FLOPs ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_the_counter_sees(tiny, shape):
    """The counter sees all T*T scores, and no norm, bias or lookup; 6N counts the first two of those."""
    model = tiny(**SHAPES[shape])
    B, T = 2, 32
    ids = torch.randint(0, 300, (B, T))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, ids).backward()
    counted = counter.get_total_flops() / (B * T)
    a = priced(model.cfg)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert counted == a["flops_palm"] - 6 * vectors
    assert a["flops_causal"] - a["flops_6n"] == (a["flops_palm"] - a["flops_6n"]) / 2


def test_head_share_is_the_heads_part_of_forward(tiny):
    cfg = tiny_config(tie_embeddings=False)
    with FlopCounterMode(display=False, depth=3) as counter:
        GPT(cfg).head(torch.randn(1, cfg.d_model))
    a = priced(cfg)
    assert 3 * counter.get_total_flops() / a["flops_causal"] == pytest.approx(a["flops_head_share_of_forward"])


@pytest.mark.parametrize("mean_len, T", [(1, 64), (10, 64), (100, 64), (300, 512)])
def test_document_masks_leave_the_keys_that_a_real_mask_leaves(mean_len, T):
    draws = np.random.default_rng(0)
    stream = (draws.random(300 * T) < 1 / mean_len).astype(np.int64)  # 1 = boundary
    docs = document_ids(torch.from_numpy(stream).view(-1, T), 1)
    keys = 0
    for part in docs.split(25):  # (b, T)
        same = part[:, :, None] == part[:, None, :]
        keys += int(same.tril().sum())
    assert keys / docs.numel() - 0.5 == pytest.approx(mean_keys(T, mean_len), rel=0.04)


def test_document_masks_cost_between_nothing_and_causal():
    cfg = tiny_config()
    train = TrainConfig(seq_len=32, micro_batch_size=4)
    costs = [account.account(cfg, train, mean_doc_len=m)["flops_doc_masked"] for m in (1, 10, 100, 10**6)]
    a = account.account(cfg, train)
    assert a["flops_6n"] < costs[0] and costs == sorted(costs)
    assert costs[-1] == pytest.approx(a["flops_causal"], rel=1e-4)
    assert mean_keys(2048) == 1024


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_flops_are_those_of_the_optimizer(tiny, shape):
    model = tiny(**SHAPES[shape])
    muon, _ = make_optimizers(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert counter.get_total_flops() == priced(model.cfg)["flops_newton_schulz_per_step"]
    assert priced(model.cfg, optimizer="adamw")["flops_newton_schulz_per_step"] == 0


# time and the rest ---------------------------------------------------------------------------------------------------

def test_hours_of_20b_tokens():
    flops = 796_866_048 * 20e9
    hours = {("A100", 0.58): 24.5, ("A100", 0.5): 28.4, ("A100", 0.4): 35.5, ("H100", 0.4): 11.2, ("H200", 0.3): 14.9}
    for (name, mfu), expected in hours.items():
        assert account.run_hours(flops, account.PEAK_TFLOPS[name], mfu) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("path", CONFIGS)
def test_the_roofline_is_its_parts(path):
    """Tokens a second and hours are those of the parts' sum; MFU is what train.py would log."""
    cfg, train = settings(path, "--dtype=auto")  # not what this CPU has
    a, fp32 = account.account(cfg, train), account.account(cfg, replace(train, dtype="float32"))
    for name, gpu in a["gpus"].items():
        line = gpu["roofline"]
        seconds = sum(line["micro_step_ms"].values()) / 1e3
        assert line["tok_per_s"] == pytest.approx(train.micro_batch_size * train.seq_len / seconds)
        assert line["hours"] == pytest.approx(a["tokens"] / line["tok_per_s"] / 3600)
        flops = a["flops_doc_masked" if train.doc_mask else "flops_causal"]
        assert line["mfu"] * account.PEAK_TFLOPS[name] * 1e12 == pytest.approx(line["tok_per_s"] * flops)
        assert fp32["gpus"][name]["roofline"]["mfu"] is None  # train.py knows no peak for it
        assert 0 < line["mfu"] < 1 and all(ms > 0 for ms in line["micro_step_ms"].values())
        for share, hours in gpu["hours"].items():  # of no estimate, but at a given share: what --help says of them
            assert hours * 3600 * float(share[:-1]) / 100 * gpu["peak_tflops"] * 1e12 == pytest.approx(
                a["tokens"] * a["flops_causal"])
    assert '{"roofline": {"hours"}}' in account.__doc__ and '{"40%": ...}' in account.__doc__ and "40%" in gpu["hours"]


def test_hours_of_a_ramp_are_those_of_its_two_parts():
    """Steps of half the tokens as often as whole ones cost their optimizer's time: hours are those of two runs."""
    cfg, train = settings("configs/demo.py")

    def hours(**changes):
        return account.account(cfg, replace(train, **changes))["gpus"]["H100"]["roofline"]["hours"]
    first = hours(ramp_steps=0, batch_tokens=train.batch_tokens // 2, max_steps=1900)
    assert hours(ramp_steps=1900, max_steps=2850) == pytest.approx(first + hours(ramp_steps=0, max_steps=950))


def test_a_gpu_with_endless_bandwidth_multiplies_only(monkeypatch):
    """Then a micro step is the 6N of matrices and head and, at its own rate, attention; three and a half times forward.
    Recomputation does the forward part again."""
    monkeypatch.setitem(roofline.GPUS, "H100", (80, 1e12, 1.0, 989, 989))
    monkeypatch.setattr(roofline, "IDLE", 0.0)
    monkeypatch.setattr(roofline, "TILE", 0)
    model = build(ModelConfig())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)

    def parts(dtype=torch.bfloat16, **changes):
        train = TrainConfig(doc_mask=False, optimizer="adamw", **changes)
        return roofline.micro_step(model, make_optimizers(model, optimizer="adamw"), train, "H100", dtype=dtype,
                                   mean_doc_len=1000)
    whole, again, twice = parts(), parts(remat="block"), parts(torch.float32)
    matmuls, N = whole["block matmuls"] + whole["head matmuls"], 32 * 2048
    assert matmuls * 989e12 == pytest.approx(6 * matrices * N)
    forward = 4 * 512 * 30 * mean_keys(2048) * N / 989e12
    assert whole["attention"] == pytest.approx(3.5 * forward)
    assert again["attention"] == pytest.approx(4.5 * forward)
    assert again["block matmuls"] == pytest.approx(4 / 3 * whole["block matmuls"])
    assert sum(twice.values()) == pytest.approx(2 * sum(whole.values()), rel=1e-3)
    kept = parts(remat="selective")
    assert (kept["block matmuls"], kept["attention"]) == (whole["block matmuls"], whole["attention"])


@pytest.fixture
def moved(monkeypatch):
    """moved(cfg, dtype, settings ...): bytes of each part on a GPU that multiplies in no time, of 4 x 32 tokens; with
    one micro batch a step, but for what is said."""
    monkeypatch.setitem(roofline.GPUS, "H100", (80, 1, 1e9, 1e9, 1e9))
    monkeypatch.setattr(roofline, "IDLE", 0.0)
    monkeypatch.setattr(roofline, "MOVED", 1.0)

    def bytes_of(cfg, dtype=torch.bfloat16, optimizer="muon", **changes):
        train = TrainConfig(**dict(seq_len=32, micro_batch_size=4, batch_tokens=128) | changes)
        model = build(cfg)
        parts = roofline.micro_step(model, make_optimizers(model, optimizer=optimizer), train, "H100", dtype=dtype,
                                    mean_doc_len=1000)
        return {name: seconds * 1e9 for name, seconds in parts.items()}
    return bytes_of


def matmul_bytes(groups, low=2):
    """What linears move, forward and two times backward, of 128 tokens; each group's are one."""
    return 3 * low * sum(128 * (sum(m.out_features for m in group) + group[0].in_features)
                         + sum(m.weight.numel() for m in group) for group in groups)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_reads_and_writes_what_its_optimizer_keeps(moved, optimizer):
    """Per parameter, in fp32: the gradient for its norm, in and out to be clipped, in once more; weight and moments in
    and out.  Divided over a step's micro batches."""
    cfg = tiny_config()
    one, two = (moved(cfg, optimizer=optimizer, batch_tokens=n)["rest"] for n in (128, 256))
    a = priced(cfg, optimizer=optimizer)
    gradient, weight, moments = 4 * 4 * a["total"], 2 * 4 * a["total"], a["train_state_bytes"] - 8 * a["total"]
    assert 2 * (one - two) == pytest.approx(gradient + weight + 2 * moments)


@pytest.mark.parametrize("settings", [dict(dtype=torch.float32), dict(dp="fsdp"), dict(tp=2)], ids=str)
def test_linears_are_merged_where_the_compiler_merges_them(moved, settings):
    """compiled.merge_linears: those of one input, in 16 bits, where weights are whole; else each is a matmul by itself,
    and leaves a gradient of its input."""
    cfg = tiny_config()
    blocks = [(block.attn, block.mlp) for block in build(cfg).blocks]
    low = settings.get("dtype", torch.bfloat16).itemsize
    merged = [group for attn, mlp in blocks for group in
              ((attn.wq, attn.wk, attn.wv), (attn.wo,), (mlp.w_gate, mlp.w_up), (mlp.w_down,))]
    alone = [(linear,) for group in merged for linear in group]
    together, apart = moved(cfg), moved(cfg, **settings)
    assert together["block matmuls"] == pytest.approx(matmul_bytes(merged))
    assert apart["block matmuls"] == pytest.approx(matmul_bytes(alone, low))
    if low == 2:
        saved = 3 * cfg.d_model - 2 * cfg.n_kv_heads * cfg.head_dim  # three gradients less, that of v copied
        assert apart["pointwise and norms"] - together["pointwise and norms"] == pytest.approx(
            128 * cfg.n_layers * low * saved)


def test_a_second_gate_is_merged_too(moved, monkeypatch):
    """All of an MLP but w_down read the norm, whatever a fork calls them."""
    class Gated(Block):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.mlp.w_gate2 = torch.nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
    plain = moved(tiny_config())
    monkeypatch.setattr(model_py, "Block", Gated)
    gates = [block.mlp.w_gate2 for block in build(tiny_config()).blocks]
    more = matmul_bytes([(gate,) for gate in gates]) - 3 * 2 * 128 * sum(gate.in_features for gate in gates)
    assert moved(tiny_config())["block matmuls"] - plain["block matmuls"] == pytest.approx(more)


@pytest.mark.parametrize("remat", ["selective", "block"])
def test_recomputation_moves_the_forward_part_again(moved, remat):
    cfg = tiny_config()
    forward, backward = roofline.moved_bytes(cfg, 2, 4, merged=True)
    once, again = (moved(cfg, remat=kind)["pointwise and norms"] for kind in ("none", remat))
    assert once == pytest.approx(128 * cfg.n_layers * (forward + backward))
    assert again - once == pytest.approx(128 * cfg.n_layers * forward)


def test_biases_and_rotation_move_what_they_are():
    """A bias' gradient is one more look at what its linear's output gets; layers without rotation rotate nothing."""
    cfg = tiny_config(n_layers=4)
    linears = [m for m in build(cfg).blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    plain, biased = (roofline.moved_bytes(replace(cfg, bias=bias), 2, 4, merged=True) for bias in (False, True))
    assert biased == (plain[0], plain[1] + 2 * sum(m.out_features for m in linears))
    for qk_norm in (False, True):
        all_, half, none = (sum(roofline.moved_bytes(replace(cfg, nope_every=n, qk_norm=qk_norm), 2, 4, merged=True))
                            for n in (0, 2, 1))
        qk = (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim
        assert all_ - none == 2 * (all_ - half) == 2 * 2 * qk * (1 if qk_norm else 2)


@pytest.mark.parametrize("mean_len", [500, 1000])
def test_attention_under_a_block_mask_sees_whole_tiles(mean_len):
    """Keys a query meets, those among them that are masked after all, are half a tile more at the diagonal and where a
    document begins: as FlexAttention's own mask has it."""
    B, T = 64, 2048
    docs = (torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 1 / mean_len).cumsum(1)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (docs[b, q] == docs[b, k]), B, None, T, T, "cpu")
    tiles = (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item()
    assert tiles * roofline.TILE**2 / (B * T) == pytest.approx(mean_keys(T, mean_len) + roofline.TILE, rel=0.05)


@pytest.mark.parametrize("vocab, rows", [
    (50257, (50304, 50432, 50688, 51200)), (32768, (32768,) * 4), (128256, (128256, 128256, 128512, 129024)),
    (32000, (32000, 32000, 32256, 32768))])
def test_padded_vocabulary_splits_evenly(vocab, rows):
    assert tuple(priced(tiny_config(vocab_size=vocab))["padded_vocab_size_by_tp"].values()) == rows


@pytest.mark.parametrize("path", CONFIGS)
def test_every_config_states_its_cost_in_four_lines(path):
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("# ") for line in lines[:4]) and not lines[4].startswith("#")
    assert f"train.py {path}" in lines[3]


@pytest.mark.parametrize("path, ranks", [("configs/stack100m.py", 1), ("configs/stack100m_24gb.py", 1),
                                         ("configs/stack100m_chat.py", 1), ("configs/gpt2.py", 8)])
def test_hours_in_a_configs_head_are_the_rooflines(path, ranks):
    said = re.findall(rf"({GPUS}) ([\d.]+)(?=,| h)", (ROOT / path).read_text(encoding="utf-8").split("\n\n")[0])
    gpus = account.account(*settings(path))["gpus"]
    assert said and all(hours == f"{gpus[name]['roofline']['hours'] / ranks:.1f}" for name, hours in said)


def test_hours_of_the_whole_story_are_the_rooflines():
    """runs/speedrun.sh: its three trainings on an H100, and on an RTX 4090 at the micro batch that it says."""
    text = " ".join((ROOT / "runs/speedrun.sh").read_text(encoding="utf-8").replace("\n# ", " ").split())
    h100, rtx = ([account.account(*settings(f"configs/{name}.py", *flags))["gpus"][gpu]["roofline"]["hours"]
                  for name in ("stack100m", "stack100m_anneal", "stack100m_chat")]
                 for gpu, flags in (("H100", []), ("RTX 4090", ["--micro_batch_size=8"])))
    base, anneal, chat = (f"{hours:.1f}" for hours in h100)
    total = float(base) + float(anneal) + float(chat)  # of what is printed
    assert f"H100 {total:.1f} hours at the least: {base} for the run, {anneal} to anneal it, {chat} for" in text
    base, anneal, chat = (f"{hours:.1f}" for hours in rtx)
    assert "--micro_batch_size=8" in text
    assert f"RTX 4090 {sum(rtx):.0f} hours at the least: {base}, {anneal} and {chat}." in text


def test_the_pages_have_the_tables_of_the_roofline():
    """docs/gpu.md: a row a GPU, each at a micro batch that fits it; README.md: the hours of the run."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/gpu.md", "README.md"))
    for name, path in dict.fromkeys(roofline.GPUS, "configs/stack100m.py").items() | {
            ("RTX 4090", "configs/stack100m_24gb.py")}:
        cfg, train = settings(path)
        a = account.account(cfg, train)
        row = re.search(rf"^  {name} +(.*\d)$", account.tables(a, cfg, train), re.MULTILINE)[1].split()
        fits = a["train_peak_bytes"]["compiled"] < 0.9e9 * a["gpus"][name]["memory_gb"]
        assert (f"| {name} | {' | '.join((f'{train.micro_batch_size}', *row))} |" in page) == fits
        assert name == "H200" or not fits or f"{name} {row[-1]} h" in " ".join(readme.split())


def test_what_the_assumptions_are_worth(monkeypatch):
    """docs/gpu.md: hours of an H100 where each assumption is a fifth lower."""
    page, cfg, plain = (ROOT / "docs/gpu.md").read_text(encoding="utf-8"), *settings("configs/stack100m.py")
    memory, bandwidth, share, ahead, back = roofline.GPUS["H100"]
    for what, gpu, moved in (("share of the peak", (memory, bandwidth, 0.8 * share, ahead, back), 0.85),
                             ("attention", (memory, bandwidth, share, 0.8 * ahead, 0.8 * back), 0.85),
                             ("bandwidth", (memory, bandwidth, share, ahead, back), 0.8 * 0.85),
                             ("all", (memory, bandwidth, 0.8 * share, 0.8 * ahead, 0.8 * back), 0.8 * 0.85)):
        monkeypatch.setitem(roofline.GPUS, "H100", gpu)
        monkeypatch.setattr(roofline, "MOVED", moved)
        hours = account.account(cfg, plain)["gpus"]["H100"]["roofline"]["hours"]
        assert re.search(rf"^\| {what}.*\| {hours:.1f} h \|$", page, re.MULTILINE), (what, hours)


@pytest.mark.parametrize("path", CONFIGS)
def test_the_tables_hold_the_figures_and_fit_a_terminal(path):
    cfg, train = settings(path)
    a = account.account(cfg, train)
    text = account.tables(a, cfg, train)
    assert max(map(len, text.splitlines())) <= 120
    for key in ("total", "flops_6n", "flops_causal", "flops_palm", "flops_doc_masked", "tokens",
                "kv_cache_bytes_per_token"):
        assert f"{a[key]:,}" in text


def test_wrong_flags_end_with_one_message(capsys, monkeypatch):
    for flags in (["configs/nothing.py"], ["--n_layer=3"], ["--n_kv_heads=3"], ["--seq_len=4096"],
                  ["--mean_doc_len=0"], ["--micro_batch_size=7"], ["--tp=3"]):
        monkeypatch.setattr(sys, "argv", ["account.py", *flags])
        with pytest.raises(SystemExit) as stopped:
            account.main()
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("account.py: ")

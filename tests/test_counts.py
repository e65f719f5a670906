"""Counts are those of the built model, also of a changed one; impossible settings are named before one is built."""

import itertools

import pytest
import torch
from conftest import ROOT, tiny_config
from torch import nn

import model as model_py
from model import GPT, Attention, Block, KVCache, ModelConfig
from stack import counts
from stack.config import load
from stack.counts import components, describe_groups, flops_per_token, kv_cache_bytes_per_token, mean_keys, num_params
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

GPT2 = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False)
SWITCHES = [dict(zip(("pos", "norm", "mlp", "bias", "qk_norm", "tie_embeddings"), values, strict=True)) for values in
            itertools.product(("rope", "learned"), ("rmsnorm", "layernorm"), ("swiglu", "gelu"), *[(False, True)] * 3)]


PRESETS = [load((ModelConfig, TrainConfig), [str(path)])[0] for path in sorted((ROOT / "configs").glob("*.py"))
           if not path.name.startswith("data_")]


def by_formula(cfg: ModelConfig) -> dict[str, int]:
    """num_params, by hand.

    attention = L * (2*C*H*D + 2*C*K*D), mlp = L * (3 or 2)*C*F, both plus biases; norm = per block 2 gains of C and,
    with QK-norm, 2 of D, then the final one.
    """
    C, L, q, kv = cfg.d_model, cfg.n_layers, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    bias = int(cfg.bias)
    attention = C * q + 2 * C * kv + q * C + bias * (q + 2 * kv + C)
    mlp = (3 if cfg.mlp == "swiglu" else 2) * C * cfg.d_ff + bias * ((2 if cfg.mlp == "swiglu" else 1) * cfg.d_ff + C)
    one_norm = C * (2 if cfg.norm == "layernorm" and cfg.bias else 1)
    block_norms = 2 * one_norm + (2 * cfg.head_dim if cfg.qk_norm else 0)
    parts = {
        "embedding": cfg.padded_vocab_size * C,
        "position": cfg.max_seq_len * C if cfg.pos == "learned" else 0,
        "attention": L * attention,
        "mlp": L * mlp,
        "norm": L * block_norms + one_norm,
        "head": 0 if cfg.tie_embeddings else cfg.padded_vocab_size * C,
    }
    return {**parts, "total": sum(parts.values()), "per_block": attention + mlp + block_norms}


@pytest.mark.parametrize("cfg", [ModelConfig(), *PRESETS, *(tiny_config(**switches) for switches in SWITCHES)])
def test_what_is_counted_is_what_the_formulas_say(cfg):
    """Parameters, FLOPs and cache, for every preset and every combination of switches."""
    expected = by_formula(cfg)
    assert num_params(cfg) == expected and list(num_params(cfg)) == list(expected)
    multiplied = expected["total"] - expected["position"] - (0 if cfg.tie_embeddings else expected["embedding"])
    for T in (1, 32, cfg.max_seq_len):
        attention = 6 * cfg.n_layers * T * cfg.n_heads * cfg.head_dim
        assert flops_per_token(cfg, T) == {"6n": 6 * multiplied, "causal": 6 * multiplied + attention,
                                           "palm": 6 * multiplied + 2 * attention}
    assert kv_cache_bytes_per_token(cfg, 4) == 2 * cfg.n_kv_heads * cfg.head_dim * cfg.n_layers * 4


def test_building_costs_nothing():
    """No value is drawn, no memory taken; a model that is there already is counted itself."""
    drawn = torch.random.get_rng_state()
    built = counts.build(ModelConfig(d_model=2 ** 14, n_layers=2, d_ff=2 ** 20))  # 400 GB
    assert all(p.is_meta for p in built.parameters()) and torch.equal(drawn, torch.random.get_rng_state())
    assert counts.build(built) is built and num_params(built)["mlp"] == 2 * 3 * 2 ** 34
    assert torch.empty(1).device.type == "cpu" and nn.init.constant_(torch.zeros(1), 1) == 1  # all as before


class Changed(Block):
    """What forks begin with: a learned scalar per branch; in every second block a table of values and a window."""

    made = 0

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gain = nn.Parameter(torch.ones(()))
        Changed.made += 1
        if Changed.made % 2 == 0:
            self.attn.ve = nn.Embedding(cfg.padded_vocab_size, 32)
            self.attn.window = 8


@pytest.fixture
def changed(monkeypatch):
    monkeypatch.setattr(model_py, "Block", Changed)
    monkeypatch.setattr(Changed, "made", 0)
    return tiny_config()


def test_a_changed_model_is_counted_as_changed(changed):
    """Scalars and tables are counted under their names, tables do not multiply, a window limits the keys."""
    plain, n = by_formula(changed), num_params(changed)
    assert n["gain"] == 2 and n["attn.ve"] == 320 * 32 and n["total"] == plain["total"] + 2 + 320 * 32
    assert {part: n[part] for part in plain if part not in ("total", "per_block")} == {
        part: plain[part] for part in plain if part not in ("total", "per_block")}
    assert components(n) == {part: v for part, v in n.items() if part not in ("position", "head", "total", "per_block")}
    assert n["per_block"] == plain["per_block"] + 1 + 320 * 32 // 2
    flops = flops_per_token(changed, 32, 10)
    assert flops["6n"] == 6 * (plain["total"] + 2)
    causal = [min(t + 1, w) for w in (32, 8) for t in range(32)]  # keys a query sees, its own among them
    assert flops["causal"] - flops["6n"] == 12 * 64 * (sum(causal) / 32 - 1)  # twice half the diagonal
    assert flops["palm"] - flops["6n"] == 12 * 64 * (32 + 8)
    assert flops["6n"] < flops["doc_masked"] < flops["causal"]


@pytest.mark.parametrize("window", [1, 5, 32, 100])
def test_mean_keys_with_a_window(window):
    """Causal by counting; documents by their ages' distribution, which without an end are causal again."""
    T, q = 32, 0.9
    assert mean_keys(T, None, window) == pytest.approx(sum(min(t + 1, window) for t in range(T)) / T - 0.5)
    ages = sum(sum(q ** k for k in range(min(t + 1, window))) for t in range(T)) / T - 0.5  # P(age > k) = q^k
    assert mean_keys(T, 10, window) == pytest.approx(ages)
    assert mean_keys(T, 1e5, window) == pytest.approx(mean_keys(T, None, window), rel=1e-3)


def test_another_attention_and_cache_are_counted_as_they_are(monkeypatch):
    """A layer with fewer heads, and a cache that holds more."""
    class Narrow(Attention):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.wo = nn.Linear(16, cfg.d_model, bias=False)

    class Wide(KVCache):
        def __init__(self, cfg, *args):
            super().__init__(cfg, *args)
            self.v = torch.cat((self.v, self.v))
    cfg = tiny_config()
    before = kv_cache_bytes_per_token(cfg)
    monkeypatch.setattr(model_py, "Attention", Narrow)
    monkeypatch.setattr(counts, "KVCache", Wide)
    flops = flops_per_token(cfg, 32)
    assert flops["palm"] - flops["6n"] == 12 * 2 * 16 * 32 and kv_cache_bytes_per_token(cfg) == before * 3 // 2


def test_who_moves_what_is_said(changed):
    """A line for each optimizer and kind: a table inside a block, a new scalar, what nobody moves."""
    built = counts.build(changed)
    built.norm.weight.requires_grad = False
    assert describe_groups(make_optimizers(built), built) == [
        "Muon: 14 matrices, 61,440 parameters: attn.wq, attn.wk, attn.wv, attn.wo, mlp.w_gate, mlp.w_up, mlp.w_down",
        "AdamW: 2 tables, 30,720 parameters: embed, attn.ve",
        "AdamW: 10 vectors, 322 parameters, no decay: gain, norm1, attn.q_norm, attn.k_norm, norm2",
        "no optimizer: 1 vector, 64 parameters: norm"]


def test_num_params_is_numel_for_every_switch():
    """num_params equals the sum of numel for all 64 combinations, per component, built without memory on meta."""
    parts = {"embedding": "embed.", "position": "pos_embed.", "attention": ".attn.w", "mlp": ".mlp.", "head": "head."}
    for switches in SWITCHES:
        cfg = tiny_config(**switches)
        with torch.device("meta"):
            model = GPT(cfg)
        counts = num_params(cfg)
        assert all(p.is_meta for p in model.parameters())
        assert counts["total"] == sum(p.numel() for p in model.parameters()), switches
        assert counts["per_block"] == sum(p.numel() for p in model.blocks[0].parameters()), switches
        for part, prefix in parts.items():
            numel = sum(p.numel() for n, p in model.named_parameters() if n.startswith(prefix) or (
                prefix[0] == "." and prefix in n))
            assert counts[part] == numel, (part, switches)
        assert counts["total"] == sum(v for k, v in counts.items() if k not in ("total", "per_block"))


def test_the_published_sizes():
    """Stack-100M and GPT-2 have exactly the parameters they should."""
    counts = num_params(ModelConfig())
    assert (counts["total"], counts["embedding"], counts["per_block"]) == (101_353_728, 16_777_216, 2_819_200)
    assert num_params(ModelConfig(tie_embeddings=False))["total"] == 118_130_944
    gpt2 = ModelConfig(vocab_size=50257, vocab_multiple=1, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12,
                       d_ff=3072, max_seq_len=1024, **GPT2)
    assert num_params(gpt2)["total"] == 124_439_808
    assert flops_per_token(ModelConfig(), 2048) == {"6n": 608_122_368, "causal": 796_866_048, "palm": 985_609_728}
    assert kv_cache_bytes_per_token(ModelConfig()) == 15_360


def test_every_problem_is_listed_at_once():
    """problems() names each impossible setting; GPT refuses with all of them in one ValueError."""
    cfg = tiny_config(n_heads=6, n_kv_heads=4, head_dim=15, dropout=1.0, d_model=0, logit_softcap=-1.0)
    problems = cfg.problems()
    for name in ("n_heads (6)", "head_dim (15)", "dropout (1.0)", "d_model (0)", "logit_softcap (-1.0)"):
        assert any(name in p for p in problems), name
    with pytest.raises(ValueError) as error:
        GPT(cfg)
    assert all(p in str(error.value) for p in problems)
    for name in ("pos", "norm", "mlp"):  # anything but the one name would quietly mean the other
        assert [p for p in tiny_config(**{name: "rms"}).problems() if name in p and "'rms'" in p]
    assert tiny_config(pos="learned", nope_every=2).problems() and not ModelConfig().problems()

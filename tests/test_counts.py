"""Parameters counted are those a real model holds, and impossible settings are named before one is built."""

import itertools

import pytest
import torch
from conftest import tiny_config

from model import GPT, ModelConfig
from stack.counts import flops_per_token, kv_cache_bytes_per_token, num_params

GPT2 = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False)
SWITCHES = [dict(zip(("pos", "norm", "mlp", "bias", "qk_norm", "tie_embeddings"), values, strict=True)) for values in
            itertools.product(("rope", "learned"), ("rmsnorm", "layernorm"), ("swiglu", "gelu"), *[(False, True)] * 3)]


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

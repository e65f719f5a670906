"""Where the two source texts are wrong, the right value: each line of docs/source.md is a test.

Claims about gradients and special rows are in test_embedding.py, about resizing in exchange/test_resize.py, about the
loss head in test_head.py and `python -m bench head`.
"""

import math

import pytest
import torch

import account
from model import ModelConfig
from stack import memory
from stack.counts import build, num_params

LLAMA_1B = dict(vocab_size=128256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192,
                qk_norm=False)
LLAMA_8B = dict(vocab_size=128256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=14336,
                qk_norm=False, tie_embeddings=False)



def test_one_hot_batch_fits_one_card():
    """A one-hot batch [32, 2048, 256000] in fp32 is 62.5 GiB: wasteful, but one 80 GB card holds it."""
    n_bytes = torch.empty(32, 2048, 256_000, dtype=torch.float32, device="meta").nbytes
    assert n_bytes == 67_108_864_000 < account.GPUS["A100"][0] * 1e9


def test_share_of_the_table_at_1b():
    """At one billion parameters and 128k ids the tied table is a fifth of the model, not a third."""
    counts = num_params(ModelConfig(**LLAMA_1B))
    assert counts["total"] == 1_235_814_400
    assert counts["embedding"] / counts["total"] == pytest.approx(0.2125, abs=1e-4)


def test_share_of_the_table_when_untied():
    """Untied, the table is paid for twice: Llama-3-8B spends 13.1 % on both, and GPT-2's tie saves 23.7 % of what it
    would be untied (31 % of what it is)."""
    counts = num_params(ModelConfig(**LLAMA_8B))
    assert (counts["embedding"] + counts["head"]) / counts["total"] == pytest.approx(0.1308, abs=1e-4)
    gpt2, table = 124_439_808, 50_257 * 768
    assert table / gpt2 == pytest.approx(0.310, abs=1e-3) and table / (gpt2 + table) == pytest.approx(0.237, abs=1e-3)


def test_logits_against_the_training_state():
    """The three logit tensors (10.7 GB at 32,768 tokens) are 10.6 times bf16 weights and fp32 AdamW moments;
    8.4 times is the state of fp32 weights and gradients with Muon and AdamW.  Nor do all three live at once."""
    logits = (2 + 4 + 4) * 32_768 * 32_768
    total = num_params(ModelConfig())["total"]
    assert logits == 10_737_418_240
    assert logits / ((2 + 8) * total) == pytest.approx(10.6, abs=0.05)
    model = build(ModelConfig())
    assert logits / memory.train_state_bytes(model, memory.optimizers_of(model, "muon")) == pytest.approx(8.4, abs=0.05)
    naive = memory.head_bytes(ModelConfig(), 32_768, torch.bfloat16)["naive"]
    assert naive["backward_peak"] == 12 * 32_768 * 32_768


def test_where_vocabulary_sizes_come_from():
    """128,256 is 128,000 merges and 256 special ids, and does not even divide by 128 * 4 ranks; 50,304 is padding."""
    assert 128_256 == 128_000 + 256 and 128_256 % (128 * 4)
    assert [account.padded_rows(128_256, tp) for tp in (1, 2, 4, 8)] == [128_256, 128_256, 128_512, 129_024]
    assert account.padded_rows(50_257, 1) == 50_304


def test_vocabulary_parallel_loss_needs_three_reductions():
    """Max, then sum of exponentials, then the target's logit; a packed pair makes two.  Backward reduces dH as well."""
    torch.manual_seed(0)
    N, C, V, ranks = 16, 8, 32, 4
    h = torch.randn(N, C, requires_grad=True)
    weight, targets = torch.randn(V, C), torch.randint(V, (N,))
    whole = torch.nn.functional.cross_entropy(h @ weight.T, targets, reduction="sum")
    (grad,) = torch.autograd.grad(whole, h)
    shards = [(h.detach() @ w.T, i * V // ranks) for i, w in enumerate(weight.chunk(ranks))]
    top = torch.stack([logits.amax(1) for logits, _ in shards]).amax(0)  # 1: max
    sums = sum((logits - top[:, None]).exp().sum(1) for logits, _ in shards)  # 2: sum
    own = [(targets >= first) & (targets < first + V // ranks) for _, first in shards]
    picked = sum(torch.where(mine, logits.gather(1, (targets - first).clamp(0, V // ranks - 1)[:, None])[:, 0], 0)
                 for (logits, first), mine in zip(shards, own, strict=True))  # 3: sum, or packed with 2
    torch.testing.assert_close((top + sums.log() - picked).sum(), whole)
    probs = [(logits - (top + sums.log())[:, None]).exp() for logits, _ in shards]
    parts = []
    for p, (_, first), mine, w in zip(probs, shards, own, weight.chunk(ranks), strict=True):
        p[mine, targets[mine] - first] -= 1
        parts.append(p @ w)
    torch.testing.assert_close(sum(parts), grad)  # backward: one [N, C] reduction
    assert not torch.allclose(parts[0], grad)


def test_width_grows_with_the_cube_root():
    """With depth proportional to width, parameters grow with its cube: d ~ N^(1/3), not the square root."""
    def body(d):
        cfg = ModelConfig(d_model=d, n_layers=d // 16, n_heads=d // 64, n_kv_heads=d // 64, d_ff=4 * d, mlp="gelu")
        counts = num_params(cfg)
        return counts["total"] - counts["embedding"]
    exponent = math.log(4096 / 512) / math.log(body(4096) / body(512))
    assert exponent == pytest.approx(1 / 3, abs=0.01)


def test_price_of_the_unembedding():
    """A multiply-add is two FLOPs: Llama-3-8B's head costs 1.05 GFLOP a token, 2.15 TFLOP for 2,048 of them."""
    macs = 128_000 * 4096
    assert 2 * macs == pytest.approx(1.049e9, rel=1e-3)
    assert 2 * macs * 2048 == pytest.approx(2.147e12, rel=1e-3)


def test_bandwidth_of_an_a100():
    """900 GB/s is a V100's; an A100 with 80 GB reads 2,039 GB/s: that table takes 0.51 ms a token, not 1.1."""
    assert account.GPUS["A100"][1] == 2039
    assert 128_000 * 4096 * 2 / (account.GPUS["A100"][1] * 1e9) == pytest.approx(0.514e-3, rel=1e-2)

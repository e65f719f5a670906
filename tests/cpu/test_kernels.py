"""The fast paths of attention and decoding on a CPU, and 8-bit weights, against their plain twins."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from model import GPT, MLP, KVCache, ModelConfig, chunk_arithmetic, generate
from stack import twins
from stack.compiled import StillCache
from stack.cpu import kernels
from stack.cpu.kernels import Attend
from stack.parallel.ranks import Ranks
from stack.parallel.sharding import parallelize
from stack.quantize import Int8Linear, quantize_int8

SHAPES = [(2, 8, 2, 300, 16), (1, 4, 4, 129, 8), (3, 6, 3, 64, 16), (2, 4, 1, 100, 24)]  # B H K T D


def documents(B, T):
    docs = (torch.rand(B, T) < 0.05).cumsum(1)
    return torch.ones(T, T, dtype=torch.bool).tril() & (docs[:, None, :, None] == docs[:, None, None])  # (B, 1, T, T)


def tensors(B, H, K, T, D, dtype=torch.float32):
    """q, k, v and a gradient as the blocks make them, (B, T, H, D) transposed."""
    q, k, v, grad = (torch.randn(B, T, n, D).to(dtype).transpose(1, 2) for n in (H, K, K, H))
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), grad


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_sdpa(shape, masked):
    """Values and gradients are those of F.scaled_dot_product_attention: grouped heads, ragged last block, masks."""
    (q, k, v), grad = tensors(*shape)
    mask = documents(shape[0], shape[3]) if masked else None
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    got = Attend.apply(q, k, v, mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 30])
def test_multiplies_no_subnormal_number(size, monkeypatch):
    """What is masked, or too small to count, is 0 where it is multiplied: CPUs take fifty times as long over numbers
    below 2^-126."""
    bmm, seen = torch.bmm, []
    monkeypatch.setattr(torch, "bmm", lambda a, b, **to: (seen.extend((a.clone(), b.clone())), bmm(a, b, **to))[1])
    (q, k, v), grad = tensors(*SHAPES[0])
    got = Attend.apply(q * size, k * size, v, documents(SHAPES[0][0], SHAPES[0][3]))
    torch.autograd.grad(got, (q, k, v), grad)
    assert len(seen) >= 14
    for matrix in seen:
        assert not ((matrix != 0) & (matrix.abs() < torch.finfo(torch.float32).tiny)).any()


def test_bf16_error():
    """In bf16 its error against float64 is at most 2.5 times SDPA's, in values and every gradient."""
    (q, k, v), grad = tensors(2, 4, 2, 256, 32, torch.bfloat16)

    def all_of(attend, *inputs):
        y = attend(*inputs)
        return y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))
    sdpa = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    exact = all_of(sdpa, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    plain, ours = all_of(sdpa, q, k, v), all_of(lambda q, k, v: Attend.apply(q, k, v, None), q, k, v)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o.double() - e).norm() <= 2.5 * (p.double() - e).norm()


def test_keeps_no_scores():
    """What is held for the backward pass grows with T, not with T * T."""
    held = []
    (q, k, v), _ = tensors(1, 4, 2, 512, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        Attend.apply(q, k, v, None)
    assert 0 < max(held) <= q.numel()


def test_compiled_blocks():
    """Compiled models go this way, give the eager model's gradients, and attention is not done again for the backward
    pass, as cheap operations are."""
    cfg = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64,
                      max_seq_len=96)
    torch.manual_seed(0)
    model, ids = GPT(cfg), torch.randint(0, 64, (2, 96))
    model(ids, ids).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = parallelize(model, Ranks(), torch.device("cpu"), compile=True)
    compiled(ids, ids).backward()  # compiles
    model.zero_grad()
    with torch.profiler.profile() as profile:
        compiled(ids, ids).backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["stack100m::attend"] == calls["stack100m::attend_backward"] == cfg.n_layers
    for p, g in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, g, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("grad", [True, False])
def test_loss_arithmetic(dtype, z_loss, softcap, grad):
    """Losses and the gradients that overwrite the logits are model.py's: z-loss, soft-cap, ignored targets, padding."""
    logits, targets = (3 * torch.randn(9, 131)).to(dtype), torch.randint(0, 127, (9, 2))[:, 0]
    targets[4], logits[5] = -100, logits[5] * 20  # one ignored, one sure of itself
    args = targets, torch.rand(9) + 0.5, 127, -100, z_loss, softcap, grad
    want, got = logits.clone(), logits.clone()
    torch.testing.assert_close(kernels.chunk_arithmetic(got, *args), chunk_arithmetic(want, *args), atol=1e-5,
                               rtol=1e-5)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 2**-7)


def test_only_with_qk_norm(tiny):
    """Scores are kept as bf16, exact enough while they are small: without QK-norm attention stays PyTorch's."""
    q, k, v = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    for qk_norm in (True, False):
        assert all(kernels.serves(block.attn, q, k, v, None) == qk_norm for block in tiny(qk_norm=qk_norm).blocks)


def test_unwritable_cache(tmp_path):
    """A folder for compiled code that cannot be made is named, with what to do, and is not taken for no compiler."""
    (tmp_path / "file").write_text("")
    program = ("from model import *; from stack import twins; "
               "twins.compile_blocks(GPT(ModelConfig(n_layers=1, vocab_size=64)), torch.device('cpu'))")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "x")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment,
                          cwd=ROOT)
    assert done.returncode and "TORCHINDUCTOR_CACHE_DIR" in done.stderr.splitlines()[-1], done.stderr


def test_damage_is_seen():
    """NaN and infinity come out as NaN: a broken step must be noticed."""
    for bad in (torch.nan, torch.inf):
        (q, k, v), _ = tensors(1, 2, 2, 64, 8)
        with torch.no_grad():
            k[0, 0, 3, 2] = bad
        assert Attend.apply(q, k, v, None).isnan().any()
        logits = torch.randn(3, 64)
        logits[1, 5] = bad
        loss = kernels.chunk_arithmetic(logits, torch.zeros(3, dtype=torch.long), torch.ones(3), 64, -100, 0.0, 0.0,
                                        True)
        assert loss.isnan().tolist() == [False, True, False] and logits[1].isnan().all()


@pytest.mark.parametrize("options", [{}, dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False),
                                     dict(nope_every=2, tie_embeddings=False, logit_softcap=5.0)])
def test_still_cache(tiny, options):
    """Token by token with a cache that stands still, beside a row padded on the left: the logits without a cache."""
    model = tiny(**options).eval()
    ids = torch.randint(0, model.cfg.vocab_size, (2, 20))
    docs = torch.ones(2, 32, dtype=torch.int)
    docs[1, :3] = 0  # padding
    with torch.no_grad():
        cache = KVCache(model.cfg, 2, 32, "cpu", torch.float32)
        model.hidden(ids[:, :8], docs=docs[:, :8], cache=cache)
        cache = StillCache(cache)
        for t in range(8, 20):
            got = model.logits(model.hidden(ids[:, t:t + 1], docs=docs, cache=cache))[:, 0]
            want = model(ids[:, :t + 1], docs=docs[:, :t + 1])[:, -1]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_compiled_decoding(tiny):
    """One compiled program for all tokens gives the same ids: rows of different length, past the end of the context,
    and sampled."""
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    other = tiny(d_model=32, n_heads=2, n_kv_heads=1)  # a second model in the process
    want = generate(other, prompts, max_new_tokens=4)
    other.decoder = twins.compiled_step
    assert generate(other, prompts, max_new_tokens=4) == want
    for options in (dict(temperature=0.0), dict(temperature=1.0, seed=3)):
        plain = generate(tiny(), prompts, max_new_tokens=40, **options)  # the context is 32
        model = tiny()
        model.decoder = twins.compiled_step
        assert generate(model, prompts, max_new_tokens=40, **options) == plain
        for n in (9, 27, 60):  # 5 + 27 fill the context to its last place
            assert generate(model, prompts[:1], max_new_tokens=n) == generate(tiny(), prompts[:1], max_new_tokens=n)
        assert generate(other, prompts, max_new_tokens=4) == want


@pytest.mark.parametrize("shape", [(64, 192), (128, 64), (33, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 40])
def test_int8_linear(shape, dtype, rows):
    """A row's weights are at most half a step of its scale away, and so is the product, with bias, whatever kernel."""
    linear = torch.nn.Linear(*shape).to(dtype)
    int8, x = Int8Linear(linear), torch.randn(rows, 1, shape[0]).to(dtype)
    back = int8.whole.float() * int8.scale.float()[:, None]
    step = linear.weight.float().abs().amax(1, keepdim=True) / 127
    assert ((back - linear.weight.float()).abs() <= 0.5 * step + 2**-8 * linear.weight.float().abs()).all()
    want = F.linear(x.float(), back, linear.bias.float())
    torch.testing.assert_close(int8(x).float(), want, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_int8_model(tiny):
    """The quantized model predicts nearly the same, its table untouched, and decodes the same compiled or not."""
    model = tiny(d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128).eval()
    ids = torch.randint(0, model.cfg.vocab_size, (2, 16))
    with torch.no_grad():
        want = model(ids).log_softmax(-1)
        got = quantize_int8(model)(ids).log_softmax(-1)
    assert 0 < (got - want).abs().max() < 0.1
    assert model.embed.weight.dtype == torch.float32
    assert not any(isinstance(m, torch.nn.Linear) for block in model.blocks for m in block.modules())
    plain = generate(model, [[1, 2]], max_new_tokens=9)
    model.decoder = twins.compiled_step
    assert generate(model, [[1, 2]], max_new_tokens=9) == plain


class Louder(torch.nn.Linear):
    def forward(self, x):
        return 1.01 * super().forward(x)


class Asks(torch.nn.Linear):
    def forward(self, x, more):
        return super().forward(x) + more


class Answers(MLP):
    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_other_linears_keep_their_weights(tiny, dtype, bias):
    """What multiplies otherwise, by 1 %, or is called otherwise stays what it is, with its weights; a subclass that
    does the same does not."""
    model = tiny(bias=bias).to(dtype)
    mlp, attn = model.blocks[1].mlp, model.blocks[1].attn
    kinds = {(mlp, "w_up"): Louder, (mlp, "w_down"): Asks, (attn, "wo"): type("Same", (torch.nn.Linear,), {})}
    for (part, name), kind in kinds.items():
        getattr(part, name).__class__ = kind
    mlp.__class__ = Answers
    kept = [(linear, linear.weight.detach().clone()) for linear in (mlp.w_up, mlp.w_down)]
    quantize_int8(model)
    assert [linear for linear, _ in kept] == [mlp.w_up, mlp.w_down] and isinstance(attn.wo, Int8Linear)
    assert all(torch.equal(linear.weight, weight) and linear.weight.dtype == dtype for linear, weight in kept)
    assert sum(isinstance(part, Int8Linear) for part in model.modules()) == 2 * 7 - 2

"""decode.cpp computes what model.py computes, for every switch, and a model that it does not know goes another way."""

import warnings
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import resident, tiny_config

from model import GPT, Attention, KVCache, RMSNorm, generate
from stack import compiled, twins
from stack.cpu import decode
from stack.quantize import quantize_int8
from stack.twins import fast_decoding, plain_step

GPT2 = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False)
SWITCHES = {
    "defaults": {}, "gpt2": GPT2, "no-bias": {**GPT2, "bias": False}, "nope": dict(nope_every=2, qk_norm=False),
    "untied": dict(tie_embeddings=False, embed_scale=True, logit_softcap=2.0), "bias": dict(bias=True),
    "odd": dict(d_model=37, d_ff=53, n_heads=6, n_kv_heads=2, head_dim=10, vocab_size=299),
    "one-key-head": dict(n_heads=5, n_kv_heads=1, head_dim=72, n_layers=3), "mha": dict(n_kv_heads=4, rope_theta=50.0),
    "odd-head": {**GPT2, "head_dim": 9},
    "tiles": dict(d_model=128, head_dim=64, d_ff=352)}


def lively(**changes):
    """A model with weights large enough that everything in it matters."""
    model = GPT(tiny_config(**changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def both(model, rows, pads=None, length=9, dtype=None, steps=4, threads=1):
    """Logits of some steps by decode.cpp, with so many threads, and by model.py, [(B, V)] each, each from its own cache
    filled by a prompt, which PyTorch reads."""
    docs = None if pads is None else (torch.arange(32) >= torch.tensor(pads)[:, None]).int()
    ids = torch.randint(0, model.cfg.vocab_size, (rows, length + steps))
    caches = [KVCache(model.cfg, rows, 32, "cpu", dtype or model.embed.weight.dtype) for _ in range(2)]
    got, want = [], []
    with torch.inference_mode():
        for cache in caches:
            model.hidden(ids[:, :length], docs=docs if docs is None else docs[:, :length], cache=cache)
        torch.set_num_threads(threads)
        step = decode.Step(model, caches[0], docs)
        torch.set_num_threads(1)
        for t in range(length, length + steps):
            got.append(step(ids[:, t:t + 1]).clone())
            seen = docs if docs is None else docs[:, :t + 1]
            want.append(model.logits(model.hidden(ids[:, t:t + 1], docs=seen, cache=caches[1])[:, -1]))
    for a, b in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        torch.testing.assert_close(a.float(), b.float(), atol=1e-4 if a.dtype == torch.float32 else 0.3, rtol=1e-2)
    return torch.stack(got), torch.stack(want)


@pytest.mark.parametrize("rows, pads", [(1, None), (3, None), (3, [0, 7, 3]), (18, None)])
@pytest.mark.parametrize("name", SWITCHES)
def test_equals_model(name, rows, pads):
    """In fp32 logits and cache are model.py's: every switch, widths that fill no vector, one text or some, padded."""
    got, want = both(lively(**SWITCHES[name]), rows, pads)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["defaults", "gpt2", "odd", "tiles"])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("int8", [False, True])
def test_low_precision(name, rows, int8):
    """With weights of 16 and 8 bits it is as near to the same weights in fp32 as model.py is."""
    model = lively(**SWITCHES[name]).bfloat16()
    if int8:
        quantize_int8(model)
    torch.manual_seed(1)
    got, plain = both(model, rows)
    torch.manual_seed(1)
    _, exact = both(model.float(), rows)  # the same 8 bits: their scales are fp32 then
    assert (got - exact).norm() <= 1.1 * (plain - exact).norm()


def test_autocast():
    """fp32 weights with a bf16 cache, as under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        got, want = both(lively(), 2, dtype=torch.bfloat16)
    assert (got - want).norm() < 0.02 * want.norm()


def test_fills_the_cache():
    """Up to its last place; a step more is refused."""
    got, want = both(lively(), 2, length=3, steps=29)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    model = lively()
    cache = KVCache(model.cfg, 1, 8, "cpu", torch.float32)
    cache.length = 8
    with pytest.raises(ValueError, match="holds 8 tokens"):
        decode.Step(model, cache, None)(torch.tensor([[1]]))


@pytest.mark.parametrize("rows", [1, 5])
def test_threads(rows):
    """Any number of threads gives the same bits: a row belongs to one."""
    results = []
    for n in (1, 2, 3):
        torch.manual_seed(1)
        results.append(both(lively(**SWITCHES["odd"]), rows, threads=n)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_no_growth():
    """A step allocates nothing that stays."""
    model = lively()
    with torch.inference_mode():
        cache = KVCache(model.cfg, 16, 32, "cpu", torch.float32)
        step, ids = decode.Step(model, cache, None), torch.zeros(16, 1, dtype=torch.long)
        step(ids)
        before = resident()
        for _ in range(2000):
            cache.length = 5
            step(ids)
    assert resident() - before < 1 << 18  # logits kept of every step: 38 MB


def generate_plainly(model, *args, **settings):
    """By model.py alone."""
    fast, model.decoder = model.decoder, None
    ids = generate(model, *args, **settings)
    model.decoder = fast
    return ids


def test_generate(monkeypatch):
    """generate() takes it, with the ids of plain decoding: unequal prompts, past the context, weights that change."""
    monkeypatch.setattr(twins, "compiled_step", None)  # no other way
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    model = fast_decoding(lively())
    for settings in ({}, dict(temperature=1.0, seed=3)):
        plain = generate_plainly(model, prompts, max_new_tokens=40, **settings)
        assert generate(model, prompts, max_new_tokens=40, **settings) == plain
    quantize_int8(model)
    assert generate(model, prompts, max_new_tokens=20) == generate_plainly(
        model, prompts, max_new_tokens=20)


def other_norm(self, x):
    return x.float() * 2


def test_changed_model(monkeypatch):
    """A model changed in model.py alone is noticed once, in words, and generates what it should."""
    monkeypatch.setattr(RMSNorm, "forward", other_norm)
    monkeypatch.setattr(twins, "compiled_step", plain_step)
    model = fast_decoding(lively())
    plain = generate_plainly(model, [[1, 2, 3]], max_new_tokens=9)
    with pytest.warns(UserWarning, match="does not compute what model.py computes") as caught:
        assert generate(model, [[1, 2, 3]], max_new_tokens=9) == plain
    assert caught[0].filename == __file__  # points at the call of generate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(model, [[1, 2, 3]], max_new_tokens=9) == plain


def test_late_change(monkeypatch):
    """A change that shows only in a longer context, here a window of 8 tokens, is noticed before the first token."""
    monkeypatch.setattr(twins, "compiled_step", plain_step)
    model, attend = fast_decoding(lively()), F.scaled_dot_product_attention

    def windowed(q, k, v, attn_mask, is_causal, **options):
        ago = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
        return attend(q, k, v, attn_mask=(ago >= 0) & (ago < 8), **options)
    monkeypatch.setattr(F, "scaled_dot_product_attention", windowed)
    with pytest.warns(UserWarning, match="seen at token 31"):
        generate(model, [[1, 2, 3]], max_new_tokens=4)
    plain = generate_plainly(model, [[1, 2, 3]], max_new_tokens=20)
    assert generate(model, [[1, 2, 3]], max_new_tokens=20) == plain


def test_infinite_logits(monkeypatch):
    """A model that forbids ids is one that decode.cpp does not know; NaN is damage, and called so."""
    monkeypatch.setattr(twins, "compiled_step", plain_step)
    model = fast_decoding(lively())
    plain = generate_plainly(model, [[1, 2, 3]], max_new_tokens=9)[0]
    model.logits = lambda h: GPT.logits(model, h).index_fill(-1, torch.tensor(plain), -torch.inf)
    with pytest.warns(UserWarning, match="does not compute what model.py computes"):
        assert not set(generate(model, [[1, 2, 3]], max_new_tokens=9)[0]) & set(plain)
    model = fast_decoding(lively())

    def damage(row, token):
        model.norm.weight.fill_(torch.nan)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="weights are damaged"):
        warnings.simplefilter("error")
        generate(model, [[1, 2, 3]], max_new_tokens=9, on_token=damage)


class OtherLinear(torch.nn.Linear):
    pass


@pytest.mark.parametrize("change", ["class", "shape", "dtype"])
def test_unknown_parts(monkeypatch, change):
    """Parts that cannot be read are left to model.py, unread, which is said once."""
    monkeypatch.setattr(twins, "compiled_step", Mock(side_effect=plain_step))
    model = lively()
    if change == "class":
        model.blocks[1].attn.wo = OtherLinear(64, 64)
    elif change == "shape":
        model.blocks[1].mlp.w_up, model.blocks[1].mlp.w_gate = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
        model.blocks[1].mlp.w_down = torch.nn.Linear(32, 64)
    else:
        model = model.half()
    plain = generate(model, [[1, 2, 3]], max_new_tokens=9)
    fast_decoding(model)
    with pytest.warns(UserWarning) as said:
        assert generate(model, [[1, 2, 3]], max_new_tokens=9) == generate(model, [[1, 2, 3]], max_new_tokens=9) == plain
    assert [str(w.message).split(":")[0] for w in said] == ["decode.cpp does not know the parts of this model"]
    assert twins.compiled_step.called


def test_no_compiler(monkeypatch):
    """What cannot be compiled is refused, with what to do."""
    from torch._inductor import cpp_builder
    monkeypatch.setattr(decode, "library", decode.library.__wrapped__)
    monkeypatch.setattr(decode, "compile_cpp", decode.compile_cpp.__wrapped__)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"another": "cpu"})  # nothing of it is cached

    def missing():
        raise RuntimeError("no g++")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(OSError, match=r"(?s)no g\+\+.*Install a C\+\+ compiler"):
        generate(fast_decoding(lively()), [[1, 2]], max_new_tokens=3)


def one_per_cent(part, monkeypatch):
    """Change what model.py computes in one kind of place by 1 %."""
    if part == "norm":
        norm = RMSNorm.forward
        monkeypatch.setattr(RMSNorm, "forward", lambda self, x: (norm(self, x.float()) * 1.01).to(x.dtype))
    elif part == "attend":
        attend = Attention.attend
        monkeypatch.setattr(Attention, "attend", lambda self, *args: 1.01 * attend(self, *args))
    else:
        logits = GPT.logits
        monkeypatch.setattr(GPT, "logits", lambda self, h: logits(self, h) * 1.01)


SHAPES = {"demo": dict(n_layers=3, d_model=128), "flagship": dict(n_layers=30)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", ["norm", "attend", "logits"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "autocast"])
def test_one_per_cent(monkeypatch, shape, part, precision):
    """1 % of a part is noticed, in 16 and 8 bits too, where rounding alone makes more."""
    monkeypatch.setattr(twins, "compiled_step", plain_step)
    model = lively(**SHAPES[shape])
    if precision in ("bf16", "int8"):
        model = quantize_int8(model.bfloat16()) if precision == "int8" else model.bfloat16()
    one_per_cent(part, monkeypatch)
    with pytest.warns(UserWarning, match="decode.cpp does not compute what model.py computes"), torch.autocast(
            "cpu", torch.bfloat16, enabled=precision == "autocast"):
        generate(fast_decoding(model), [[1, 2, 3]], max_new_tokens=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("std", [0.0, 0.1])
def test_rounding_is_no_change(shape, rows, std):
    """In a deep model of 16 bits rounding makes several per cent, and decode.cpp serves; the weights stay where they
    are, and as they are, and can be trained."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = GPT(tiny_config(**SHAPES[shape]))
        for p in model.parameters():
            p.data += torch.randn_like(p) * std
        model = fast_decoding(model.bfloat16())
        parameters = list(model.parameters())
        before = [(p.data_ptr(), p.detach().clone()) for p in parameters]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, [[5] * (seed * 9 + 1)] * rows, max_new_tokens=2)
        for (at, old), p in zip(before, parameters, strict=True):
            assert at == p.data_ptr() and torch.equal(old, p)
        model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_change_under_documents(monkeypatch):
    """A model that was compared without padding is compared again with it, here where it may see the padding."""
    monkeypatch.setattr(twins, "compiled_step", plain_step)
    monkeypatch.setattr(GPT, "mask", lambda self, where, size, docs: torch.arange(size) <= where[:, None])
    model = fast_decoding(lively())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, [[1, 2, 3]], max_new_tokens=2)
    with pytest.warns(UserWarning, match="decode.cpp does not compute"):
        assert generate(model, [[1, 2, 3], [4]], max_new_tokens=9) == generate_plainly(
            model, [[1, 2, 3], [4]], max_new_tokens=9)


def window(self, q, k, v, mask):
    ago = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = (ago >= 0) & (ago < 20)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen if mask is None else seen & mask, enable_gqa=True)


def sharper_by_default(self, q, k, v, mask, scale=0.9):
    return F.scaled_dot_product_attention(scale * q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1,
                                          enable_gqa=True)


@pytest.mark.parametrize("change", ["attend", "window", "argument"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4]]])
def test_changed_attention_of_one_query(monkeypatch, change, dtype, prompts):
    """The compiler's own twin of it too is compared, in fp32, and never piles up on a model."""
    monkeypatch.setattr(decode, "Step", Mock(side_effect=TypeError))
    monkeypatch.setattr(compiled, "decoder", plain_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "decode.cpp does not know")
        model = fast_decoding(lively().to(dtype))
        for _ in range(3):
            generate(model, prompts, max_new_tokens=3)
    assert len(type(model.blocks[0].attn).__mro__) == len(Attention.__mro__) + 1
    if change == "attend":
        one_per_cent("attend", monkeypatch)
    elif change == "window":
        monkeypatch.setattr(Attention, "attend", window)
    else:
        monkeypatch.setattr(Attention, "attend", sharper_by_default)
    with pytest.warns(UserWarning, match="compiled decoding does not compute"):
        generate(fast_decoding(model), prompts, max_new_tokens=3)

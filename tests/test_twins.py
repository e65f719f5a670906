"""What stands in for model.py is held against it: the equal serves, the other steps aside, and nothing else changes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

import model as model_module
from model import GPT, Attention, chunk_arithmetic, fused_linear_cross_entropy
from stack import compiled, twins
from stack.cpu import kernels

T = 256  # longer than what is compared with gradients
GPT2 = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, n_kv_heads=4)
SWITCHES = {"defaults": {}, "gpt2": GPT2, "untied": dict(tie_embeddings=False, embed_scale=True, logit_softcap=2.0),
            "nope": dict(nope_every=2, dropout=0.1), "bias": dict(bias=True, n_kv_heads=1)}


def batch(with_docs: bool):
    """x, y, docs (2, T)."""
    ids = torch.randint(0, 300, (2, T + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:], (ids[:, :-1] < 4).cumsum(1) if with_docs else None


def attach(model, how: str = "kernels"):
    """As compile_blocks does, but for the compiler."""
    if how == "kernels":
        twins.replace_attend(model, kernels.attention, kernels.serves)
        twins.compile_head(model, kernels.chunk_arithmetic)
    else:
        twins.replace_function(model, "mask", functools.partial(compiled.document_mask, model, model.mask))
        twins.replace_attend(model, compiled.flex, twins._under_block_mask)
    return model


def check(model, with_docs=True, dtype=torch.float32, z_loss=0.0) -> list[str]:
    return twins.check(model, *batch(with_docs), dtype=dtype, z_loss=z_loss)


def step(model, with_docs=True) -> list:
    """Loss and gradients of a training step."""
    x, y, docs = batch(with_docs)
    torch.manual_seed(3)  # for dropout
    with torch.compiler.set_stance("force_eager"):
        loss = model(x, y, docs=docs, z_loss=0.01)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def same(a, b) -> bool:
    return all(p is q or torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.fixture
def build(tiny, monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # else no gradients on a CPU
    monkeypatch.setattr(compiled, "failed", False)  # as another test may have left it
    return functools.partial(tiny, max_seq_len=T)


def standing(model):
    """What check could leave behind."""
    parts, known = [model, *(block.attn for block in model.blocks)], model.is_causal  # which any forward pass asks
    return [(type(part), {k: v for k, v in vars(part).items() if k[0] != "_"}) for part in parts], known, [
        module.training for module in model.modules()], torch.get_rng_state().tolist(), [
        p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("how, with_docs", [("kernels", False), ("kernels", True), ("flex", True)])
@pytest.mark.parametrize("dtype, z_loss", [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_equal(build, name, how, with_docs, dtype, z_loss):
    """All switches: every twin is said to be equal, is left where it was with all else, and the next step is as if
    nothing had been compared."""
    model, other = (attach(build(**SWITCHES[name]), how) for _ in range(2))
    before = standing(model)
    line, = check(model, with_docs, dtype, z_loss)
    assert standing(model) == before
    compared = {"flex": "attention", "kernels": "loss head" if name == "gpt2" else "attention and loss head"}[how]
    assert line.startswith(f"fast {compared}: compared with model.py on the first batch, equal")
    if how == "kernels":  # FlexAttention would be compiled
        assert same(step(model, with_docs), step(other, with_docs))


def test_nothing_attached(build):
    """A plain model, and FlexAttention without documents, say nothing."""
    assert check(build()) == [] and check(attach(build(), "flex"), with_docs=False) == []


sdpa = Attention.attend


def scaled(self, q, k, v, mask):
    return 1.01 * sdpa(self, q, k, v, mask)


def sharper(self, q, k, v, mask):
    return sdpa(self, 1.01 * q, k, v, mask)


def every_second_windowed(self, q, k, v, mask):
    if not hasattr(self, "window"):
        return sdpa(self, q, k, v, mask)
    ago = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return sdpa(self, q, k, v, (ago >= 0) & (ago < self.window) & (mask is None or mask))


def learned_temperature(self, q, k, v, mask):
    return sdpa(self, q * self.temperature, k, v, mask)


def half_precision_alone(self, q, k, v, mask):
    if q.dtype == torch.float32:
        raise RuntimeError("fp16 and bf16 only")
    return sdpa(self, q, k, v, mask)


def with_sink(self, q, k, v, mask):
    """A softmax that may leave some weight to nothing."""
    zero = torch.zeros_like(k[:, :, :1])
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
    return sdpa(self, q, torch.cat((zero, k), 2), torch.cat((zero, v), 2), F.pad(seen, (1, 0), value=True))


def give_parts(model):
    model.blocks[1].attn.window = 200
    for block in model.blocks:
        block.attn.temperature = torch.nn.Parameter(torch.ones(()))
    return model


@pytest.mark.parametrize("how, with_docs", [("kernels", False), ("kernels", True), ("flex", True)])
@pytest.mark.parametrize("attend", [scaled, sharper, every_second_windowed, learned_temperature, with_sink])
def test_changed_attention(build, monkeypatch, attend, how, with_docs):
    """1 %, in one layer, far away or for now only in a gradient: the twin steps aside, the others stay, and a step is
    model.py's."""
    monkeypatch.setattr(Attention, "attend", attend)
    model = attach(give_parts(build()), how)
    lines = check(model, with_docs)
    assert len(lines) == 1 and lines[0].startswith("the fast attention does not compute what model.py computes")
    assert "Attention.attend or GPT.mask" in lines[0]
    assert twins._twins(model) == ([], {"cross_entropy": model.cross_entropy} if how == "kernels" else {})
    plain = twins.compile_head(give_parts(build()), kernels.chunk_arithmetic if how == "kernels" else chunk_arithmetic)
    assert same(step(model, with_docs), step(plain, with_docs))


@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("how, with_docs", [("kernels", False), ("kernels", True), ("flex", True)])
def test_window_in_one_layer(build, monkeypatch, layer, how, with_docs):
    """Longer than what is compared with gradients, and in a layer that may be one of those asked for one head only."""
    monkeypatch.setattr(Attention, "attend", every_second_windowed)
    monkeypatch.setattr(twins, "SCORES", 0)
    model = build(n_layers=5)
    model.blocks[layer].attn.window = 200
    assert check(attach(model, how), with_docs)[0].startswith("the fast attention does not")
    del model
    assert check(attach(build(n_layers=5), how), with_docs)[0].startswith("fast attention")


def capped(self, q, k, v, mask):
    """Gemma 2's cap of 50 on scores, which are far below that when training begins."""
    scores = 50 * torch.tanh(q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5 / 50)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if mask is None else mask
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize("how, with_docs", [("kernels", False), ("kernels", True), ("flex", True)])
def test_what_bites_later(build, monkeypatch, how, with_docs):
    """A cap that only large scores feel; a window but a few tokens shorter than the text, under documents too."""
    monkeypatch.setattr(Attention, "attend", capped)
    assert check(attach(build(), how), with_docs)[0].startswith("the fast attention does not")
    monkeypatch.setattr(Attention, "attend", every_second_windowed)
    model = build()
    model.blocks[1].attn.window = T - 16
    assert check(attach(model, how), with_docs)[0].startswith("the fast attention does not")


def test_capped_logits(build, monkeypatch):
    """A cap in the loss head that the first logits do not feel."""
    def arithmetic(logits, targets, scale, n_vocab, ignore_index, z_loss, softcap, grad):
        return chunk_arithmetic(logits, targets, scale, n_vocab, ignore_index, z_loss, 30.0, grad)
    model = attach(build())
    assert "equal" in check(model)[0]
    monkeypatch.setattr(model_module, "chunk_arithmetic", arithmetic)
    assert check(model)[0].startswith("the fast loss head does not")


class Counting(Attention):
    """How often it was called in training, which its scores follow."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *args):
        if self.training:
            self.calls += 1
        return super().forward(x, *args)

    def attend(self, q, k, v, mask):
        return sdpa(self, q * (1 + 0.1 * (self.calls > 3)), k, v, mask)


def test_what_changes_as_it_trains(build, monkeypatch):
    """Comparing is no training: statistics stay.  What differs only later is found when asked again."""
    monkeypatch.setattr(model_module, "Attention", Counting)
    model = attach(build())
    assert "equal" in check(model)[0] and not model.blocks[0].attn.calls
    assert twins.check(model, *batch(True), dtype=torch.float32, again=True) == []
    for _ in range(4):
        step(model)
    line, = twins.check(model, *batch(True), dtype=torch.float32, again=True)
    assert line.startswith("the fast attention does not")


def one_group_at_least(self, q, k, v, mask):
    if q.shape[1] == 1:
        raise RuntimeError("all heads or none")
    return sdpa(self, q, k, v, mask)


def test_heads_that_go_together(build, monkeypatch):
    """An attention that cannot be asked for one head is asked for all."""
    monkeypatch.setattr(Attention, "attend", one_group_at_least)
    monkeypatch.setattr(twins, "SCORES", 0)
    assert check(attach(build(n_layers=3)))[0].startswith("fast attention and loss head: compared")


@pytest.mark.parametrize("how", ["kernels", "flex"])
def test_changed_mask(build, monkeypatch, how):
    """A prefix that all may see."""
    def mask(self, where, size, docs):
        return causal(self, where, size, docs) | (torch.arange(size) < 9)
    causal = GPT.mask
    monkeypatch.setattr(GPT, "mask", mask)
    model = attach(build(), how)
    assert "the fast attention does not compute" in check(model)[0]
    assert same(step(model), step(twins.compile_head(build(), model.cross_entropy.keywords.get("arithmetic"))
                                  if how == "kernels" else build()))


def test_not_in_fp32(build, monkeypatch):
    """What cannot be compared is left to model.py."""
    monkeypatch.setattr(Attention, "attend", half_precision_alone)
    assert "the fast attention does not" in check(attach(build()), dtype=torch.bfloat16)[0]


def smoothed(logits, targets, scale, n_vocab, ignore_index, z_loss, softcap, grad):
    share = 0.01 * torch.where(targets == ignore_index, 0, scale)[:, None] / n_vocab
    x = logits[:, :n_vocab].float().clone()
    loss = chunk_arithmetic(logits, targets, scale, n_vocab, ignore_index, z_loss, softcap, grad)
    if grad:
        logits[:, :n_vocab] -= share
        logits.scatter_add_(1, targets.clamp(min=0)[:, None], share * n_vocab)
    target = x.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == ignore_index, 0, loss + 0.01 * (target - x.mean(1)))


def louder(logits, targets, scale, *more):
    return 1.01 * chunk_arithmetic(logits, targets, 1.01 * scale, *more)


def steeper(logits, targets, scale, *more):
    return chunk_arithmetic(logits, targets, 1.01 * scale, *more)


def counts_ignored(logits, targets, scale, n_vocab, ignore_index, *more):
    return chunk_arithmetic(logits, targets.clamp(min=0), scale, n_vocab, ignore_index, *more)


def fails(*args):
    raise TypeError("called otherwise")


@pytest.mark.parametrize("arithmetic", [smoothed, louder, steeper, counts_ignored])
def test_changed_loss(build, monkeypatch, arithmetic):
    """1 % of label smoothing, of the loss, or of its gradient alone."""
    monkeypatch.setattr(model_module, "chunk_arithmetic", arithmetic)
    model = attach(build())
    *odd, line = check(model)
    assert line.startswith("the fast loss head does not compute what model.py computes")
    assert ["gradient is not the slope" in said for said in odd] == [True] * (arithmetic is steeper)
    assert check(build()) == odd  # which concerns plain training too
    assert all(hasattr(block.attn, "fast") for block in model.blocks)
    plain = build()
    twins.replace_attend(plain, kernels.attention, kernels.serves)
    assert same(step(model), step(plain))
    again = check(model)[-1]
    assert again.startswith("fast attention: compared")  # the other twin still is


def test_broken_twins(build, monkeypatch):
    """NaN and errors are differences where model.py has neither."""
    for twin in (fails, lambda q, k, v, mask: q * torch.nan, lambda q, k, v, mask: q[:, :1]):
        model = build()
        twins.replace_attend(model, twin, kernels.serves)
        assert "the fast attention does not" in check(model)[0]
    for twin in (fails, lambda logits, targets, *more: kernels.chunk_arithmetic(logits, targets, *more) * torch.nan):
        model = twins.compile_head(build(), twin)
        assert "the fast loss head does not" in check(model)[0]


def test_damaged_weights(build):
    """NaN in the model is no difference: the loop says what it is."""
    for name in ("embed.weight", "blocks.0.attn.wq.weight", "blocks.1.mlp.w_up.weight", "norm.weight"):
        model = attach(build(tie_embeddings=False))
        with torch.no_grad():
            model.get_parameter(name).view(-1)[3::7] = torch.nan
        assert check(model)[0].startswith("fast attention and loss head: compared")
        assert step(model)[0].isnan()


# ---------------------------------------------------------------------------------------------------------------------
# Forks


class OtherAttention(torch.nn.Module):
    """An attention of another make, under the same name or another."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Linear(64, 64)

    def forward(self, x, rope, mask, cache=None):
        return self.w(x).cumsum(1) / 9


def another_argument(self, x, rope, mask, cache=None):
    B, n, _ = x.shape
    q, k, v = (w(x).view(B, n, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    return self.wo(self.attend(q, k, v, mask, scale=0.5).transpose(1, 2).reshape(B, n, -1))


@pytest.mark.parametrize("how", ["kernels", "flex"])
def test_another_argument(build, monkeypatch, how):
    """A call that the twin does not know never reaches it: as one more argument, and where that has a default."""
    for attend in (lambda self, q, k, v, mask, scale: sdpa(self, scale * q, k, v, mask),
                   lambda self, q, k, v, mask, scale=1.0: sdpa(self, scale * q, k, v, mask)):
        monkeypatch.setattr(Attention, "attend", attend)
        monkeypatch.setattr(Attention, "forward", another_argument)
        model = attach(build(), how)
        lines = check(model)
        assert ["loss head: compared" in line for line in lines] == [True] if how == "kernels" else (
            "the fast attention does not" in lines[0])  # whose mask nobody else can read
        plain = twins.compile_head(build(), model.cross_entropy.keywords["arithmetic"]) if how == "kernels" else build()
        assert same(step(model), step(plain))


@pytest.mark.parametrize("how", ["kernels", "flex"])
def test_other_attention(build, how):
    """Blocks without attn, or whose attn has no attend, or one set on the layer itself, are left alone."""
    def own(q, k, v, mask):
        return v.repeat_interleave(2, 1)
    models = [build() for _ in range(2)]
    for model in models:
        model.blocks[0].attn = OtherAttention()
        model.blocks[1].attn.attend = own
        model.blocks.append(torch.nn.Identity())
        model.blocks[2].forward = lambda x, *more: x
    model, plain = models
    model.load_state_dict(plain.state_dict())
    attach(model, how)
    if how == "kernels":
        assert check(model)[0].startswith("fast loss head: compared")
        twins.compile_head(plain, kernels.chunk_arithmetic)
        assert model.blocks[1].attn.attend is own and same(step(model), step(plain))
    else:
        assert check(model) == []
    twins.fast_decoding(model)  # names no parts that are not there
    assert twins._twins(model)[0] == []


def own_loss(hidden, weight, targets, **options):
    return F.cross_entropy(hidden @ weight.T, targets) * 2


@pytest.mark.parametrize("where", ["class", "model", "partial"])
def test_own_loss(build, monkeypatch, where):
    """A fork's own loss is used, never replaced, neither when twins are attached nor when they are compared."""
    own = functools.partial(fused_linear_cross_entropy, z_loss=0.5) if where == "partial" else own_loss
    if where == "class":
        monkeypatch.setattr(GPT, "cross_entropy", staticmethod(own))
    model = build()
    if where != "class":
        model.cross_entropy = own
    attach(model)
    if where == "partial":
        x, y, _ = batch(False)
        model.forward = lambda ids, targets, docs, **_: model.cross_entropy(
            model.hidden(ids, docs=docs).flatten(0, 1), model.head_weight, targets.flatten())
    assert check(model)[0].startswith("fast attention: compared") and model.cross_entropy is own


def test_another_mask(build, monkeypatch):
    """GPT.mask with one more argument."""
    def mask(self, where, size, docs, n=0):
        return plain(self, where, size, docs) | (torch.arange(size) < n)
    plain = GPT.mask
    monkeypatch.setattr(GPT, "mask", lambda self, where, size, docs: mask(self, where, size, docs, 9))
    wanted = step(build())
    monkeypatch.setattr(GPT, "mask", mask)
    for how in ("kernels", "flex"):
        model = build()
        model.mask = functools.partial(mask, model, n=9)
        attach(model, how)
        assert "the fast attention does not" in check(model)[0]
        if how == "flex":
            assert same(step(model), wanted)


def test_compiled_once(build, monkeypatch):
    """One program for all layers, with twins and when they have stepped aside."""
    monkeypatch.setattr(compiled, "compile_or_not", lambda f, *_: torch.compile(f, backend="eager", dynamic=False))
    for attend in (sdpa, scaled):
        monkeypatch.setattr(Attention, "attend", attend)
        torch._dynamo.reset()
        counters.clear()
        model = build(n_layers=4)
        twins.compile_blocks(model, torch.device("cpu"))
        assert len(check(model)) == 1 and not counters["stats"]
        x, y, docs = batch(True)
        model(x, y, docs=docs).backward()
        assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_like(build, monkeypatch):
    """What a checked model has put aside is not attached to another one that is evaluated in its place."""
    monkeypatch.setattr(compiled, "compile_or_not", lambda f, *_: f)

    def attached(like=None):
        model = build()
        twins.compile_blocks(model, torch.device("cpu"), like=like)
        return model, (bool(twins._twins(model)[0]), model.cross_entropy.keywords["arithmetic"])
    model, kind = attached()
    check(model)
    assert kind == attached(model)[1] == (True, kernels.chunk_arithmetic)
    monkeypatch.setattr(Attention, "attend", scaled)
    check(model)
    assert attached(model)[1] == (False, kernels.chunk_arithmetic)
    monkeypatch.setattr(model_module, "chunk_arithmetic", steeper)
    model = attached()[0]
    assert len(check(model)) == 3  # its gradient is no slope either
    assert attached(model)[1] == (False, compiled.chunk_arithmetic)  # model.py's, as it stands there

"""The decoder computes what it claims: references of transformers, causality, independence of rows, masks, counts."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config

from model import GPT, Attention, KVCache, rope_tables
from stack import twins
from stack.cpu import kernels

GPT2 = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, n_kv_heads=4)
SHAPES = {"default": {}, "gpt2": GPT2, "nope": dict(nope_every=2),
          "untied": dict(tie_embeddings=False, logit_softcap=5.0)}


def ids(*shape, vocab=300):
    return torch.randint(0, vocab, shape)


def shake(model):
    """Nothing at its initial value: gains and biases differ from 1 and 0, weights are large enough to matter."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


HF_NAMES = {"embed": "model.embed_tokens", "blocks": "model.layers", "norm1": "input_layernorm", "attn": "self_attn",
            "norm2": "post_attention_layernorm", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
            "w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj", "norm": "model.norm", "head": "lm_head"}


def llama_like(model, kind):
    import transformers
    c = model.cfg
    extra = dict(head_dim=c.head_dim) if kind != "SmolLM3" else dict(
        no_rope_layer_interval=c.nope_every, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    config = getattr(transformers, kind + "Config")(
        vocab_size=c.padded_vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_seq_len, tie_word_embeddings=c.tie_embeddings,
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta), **extra)
    reference = getattr(transformers, kind + "ForCausalLM")(config).eval()
    state = {".".join(HF_NAMES.get(part, part) for part in name.split(".")): p
             for name, p in model.state_dict().items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return reference


def gpt2_like(model):
    import transformers
    c = model.cfg
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.padded_vocab_size, n_positions=c.max_seq_len, n_embd=c.d_model, n_layer=c.n_layers,
        n_head=c.n_heads, n_inner=c.d_ff, layer_norm_epsilon=c.norm_eps)).eval()
    names = {"norm1": "ln_1", "norm2": "ln_2", "wo": "c_proj", "w_up": "c_fc", "w_down": "c_proj", "blocks": "h",
             "embed": "wte", "pos_embed": "wpe", "norm": "ln_f"}
    ours, state = model.state_dict(), {}
    for name, p in ours.items():
        if "attn.w" in name and ".wo." not in name:
            q, k, v = (ours[name.replace(name.split(".")[3], w)] for w in ("wq", "wk", "wv"))
            parts = name.split(".")
            name, p = f"h.{parts[1]}.attn.c_attn.{parts[4]}", torch.cat((q, k, v))
        if p.ndim == 2 and "embed" not in name:
            p = p.T
        state["transformer." + ".".join(names.get(part, part) for part in name.split("."))] = p
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return reference


@pytest.mark.parametrize("kind, switches", [
    ("Qwen3", {}), ("Qwen3", dict(tie_embeddings=False, rope_theta=1e6, n_kv_heads=1, norm_eps=1e-6)),
    ("Llama", dict(qk_norm=False)), ("SmolLM3", dict(qk_norm=False, nope_every=3, n_layers=6)), ("GPT2", GPT2)])
def test_equals_transformers(tiny, kind, switches):
    """With the same weights the logits are those of transformers' model of the same architecture."""
    model = shake(tiny(**switches))
    reference = gpt2_like(model) if kind == "GPT2" else llama_like(model, kind)
    x = ids(2, 32)
    with torch.no_grad():
        want = reference(x).logits[..., :300]
        assert want.std() > 0.5
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)


def test_grouped_queries_with_a_group_of_one_are_multi_head(tiny):
    """Key heads copied to one per query head give the same outputs: sharing is all that GQA does."""
    grouped = shake(tiny(n_kv_heads=2))
    full = GPT(tiny_config(n_kv_heads=4)).eval()
    state = {k: v.view(2, 16, 64).repeat_interleave(2, 0).flatten(0, 1) if ".wk." in k or ".wv." in k else v
             for k, v in grouped.state_dict().items()}
    full.load_state_dict(state)
    x = ids(2, 20)
    torch.testing.assert_close(full(x), grouped(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_and_rows_independent(tiny, shape):
    """Changing a token changes no logit before it, none of another row, and some from it on."""
    model = shake(tiny(**SHAPES[shape]))
    x = ids(3, 16)
    y = x.clone()
    y[1, 9] = (y[1, 9] + 1) % 300
    before, after = model(x), model(y)
    torch.testing.assert_close(after[1, :9], before[1, :9], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=1e-6)
    assert ((after[1, 9:] - before[1, 9:]).abs().amax(-1) > 1e-4).all()
    torch.testing.assert_close(model(x[1:2]), before[1:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_document_mask_equals_separate_forwards(tiny, shape):
    """With docs, each document's logits are those it has alone, also with learned positions; numbers in any order."""
    model = shake(tiny(**SHAPES[shape]))
    x = ids(2, 24)
    cuts = [(0, 5, 6, 24), (0, 11, 20, 24)]
    docs = torch.tensor([[7] * 5 + [8] + [9] * 18, [2] * 11 + [1] * 9 + [0] * 4])
    together = model(x, docs=docs)
    for row, edges in enumerate(cuts):
        for start, end in itertools.pairwise(edges):
            alone = model(x[row:row + 1, start:end])[0]
            torch.testing.assert_close(together[row, start:end], alone, rtol=1e-5, atol=1e-5)
    assert (together - model(x)).abs().max() > 1e-3


def test_loss_is_the_cross_entropy_of_the_logits(tiny):
    """forward(ids, targets) equals cross-entropy over forward(ids), soft-cap and cut vocabulary included."""
    for switches in SHAPES.values():
        model = shake(tiny(**switches))
        x, y = ids(2, 16), ids(2, 16)
        y[0, :7] = -100
        want = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        torch.testing.assert_close(model(x, y), want)
        per_token = model(x, y, reduction="none")
        torch.testing.assert_close(per_token.sum() / (y != -100).sum(), want)


def test_logits_have_real_ids_only(tiny):
    """Logits are fp32 with vocab_size columns, whatever the padding and the model's dtype."""
    model = tiny(vocab_size=301, vocab_multiple=128).bfloat16()
    logits = model(ids(1, 4))
    assert model.embed.weight.shape[0] == 384 and logits.shape == (1, 4, 301) and logits.dtype == torch.float32


def test_rotary_positions_survive_low_precision(tiny, monkeypatch):
    """Angles past position 256 stay exact in a bf16 model, depend on distance only, and nothing of them is saved."""
    model = tiny(max_seq_len=4096).bfloat16()
    assert not [name for name, _ in model.named_buffers()] and not [k for k in model.state_dict() if "rope" in k]
    cos, sin = rope_tables(torch.tensor([0, 257, 4095]), 64, 10000.0)
    angle = torch.tensor([0, 257, 4095]).double()[:, None] * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=5e-4)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=5e-4)
    x = ids(1, 40)
    near = model.hidden(x)
    monkeypatch.setattr("model.rope_tables", lambda positions, *rest: rope_tables(positions + 3001, *rest))
    far = model.hidden(x)
    plain = model.float().hidden(x)
    assert (near - far).float().abs().max() < 0.06 and (plain - far).abs().max() < 0.06  # bf16 steps, no more


@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_is_off_in_eval(tiny, shape):
    """In eval the dropout rate changes nothing, attention's own included; in training it makes forwards differ."""
    with_dropout, without = tiny(dropout=0.5, **SHAPES[shape]), tiny(**SHAPES[shape])
    with_dropout.load_state_dict(without.state_dict())
    x = ids(2, 16)
    docs = (torch.arange(16) > 6).long().expand(2, -1)
    for kwargs in ({}, dict(docs=docs)):
        assert torch.equal(with_dropout.eval()(x, **kwargs), without(x, **kwargs))
        assert not torch.equal(with_dropout.train()(x, **kwargs), with_dropout(x, **kwargs))
    attention = with_dropout.blocks[0].attn
    h = torch.randn(1, 16, 64)
    assert not torch.equal(attention(h, None, None), attention(h, None, None))


def test_one_batch_can_be_overfitted(tiny):
    """Fifty AdamW steps on one batch drive the loss from ln V to nearly nothing."""
    for switches in ({}, GPT2):
        model, x = tiny(**switches), ids(2, 17)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(x[:, :-1], x[:, 1:])
            loss.backward()
            optimizer.step()
        assert loss < 0.05


def test_too_long_input_is_refused(tiny):
    """More tokens than the context, with or without a cache, and ids outside the vocabulary raise, naming them."""
    model = tiny()
    with pytest.raises(ValueError, match=r"33 tokens .* max_seq_len \(32\)"):
        model(ids(1, 33))
    cache = KVCache(model.cfg, 1, 32, "cpu", torch.float32)
    model(ids(1, 30), cache=cache)
    with pytest.raises(ValueError, match="33 tokens"):
        model(ids(1, 3), cache=cache)
    for bad in (300, 319, -1):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 300"):
            model(torch.tensor([[1, bad]]))


@pytest.mark.parametrize("switches", [{}, GPT2, dict(n_kv_heads=1)])
def test_compiled_cpu_attention_equals_sdpa(tiny, switches):
    """The plain matmuls that a compiled block runs at short contexts on a CPU give SDPA's values and gradients."""
    model, x = shake(tiny(max_seq_len=96, **switches)), ids(2, 67)
    docs = (torch.arange(67) > torch.tensor([[20], [64]])).long()
    for kwargs in ({}, dict(docs=docs)):
        results = []
        for block in (None, *model.blocks):
            if block is not None:
                block.compile(backend="eager")
                block.attn.__class__ = twins._with_twin(Attention, kernels.attention, kernels.serves)
            loss = model(x, x, **kwargs)
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        for tensors in zip(*results, strict=True):
            torch.testing.assert_close(tensors[-1], tensors[0], rtol=1e-4, atol=1e-5)
        for block in model.blocks:
            block._compiled_call_impl = None
    torch._dynamo.reset()  # what is compiled counts towards a limit that later tests would reach

"""The embedding table: how it starts, what its gradient is, and that a tied one stays one tensor whatever is done."""

import copy
import math

import pytest
import runs
import torch
import torch.nn.functional as F
from conftest import tiny_config

from account import account
from model import GPT, INIT_STD, ModelConfig, check_ids
from stack.config import load
from stack.train_config import TrainConfig

WIDE = INIT_STD * math.sqrt(128 / 64)  # the tiny model is 64 wide
INIT = {"embed": INIT_STD, "pos_embed": INIT_STD, "head": WIDE, "wq": WIDE, "wk": WIDE, "wv": WIDE, "w_gate": WIDE,
        "w_up": WIDE, "wo": WIDE / math.sqrt(8), "w_down": WIDE / math.sqrt(8)}


@pytest.mark.parametrize("switches", [{}, dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False,
                                               tie_embeddings=False)])
def test_init_table(tiny, switches):
    """Every tensor starts as the table says: tables N(0, 0.02²), matrices sqrt(128/d_model) of it, wo and w_down
    1/sqrt(2L) of that, gains 1, biases 0."""
    for name, p in tiny(n_layers=4, **switches).named_parameters():
        owner, kind = name.split(".")[-2:]
        if owner in INIT:
            std = 0.0 if kind == "bias" else INIT[owner]
            assert abs(p.std(correction=0) - std) <= 5 * std / math.sqrt(2 * p.numel()), name
            assert abs(p.mean()) <= 5 * std / math.sqrt(p.numel()), name
        else:
            assert "norm" in owner and (p == (0 if kind == "bias" else 1)).all(), name


def test_initial_loss():
    """At init the loss is ln V + d*sigma²/2: unit-rms hidden times N(0, sigma²) rows; PyTorch's N(0, 1) ruins it."""
    torch.manual_seed(0)
    model = GPT(tiny_config(vocab_size=4096, d_model=256, n_heads=4, head_dim=64, d_ff=512, max_seq_len=128))
    x, y = torch.randint(0, 4096, (2, 4, 128))
    with torch.no_grad():
        assert abs(model(x, y) - (math.log(4096) + 256 * INIT_STD**2 / 2)) < 0.05
        torch.nn.init.normal_(model.embed.weight)
        assert model(x, y) > 10 * math.log(4096)  # the copy logit is about d: 256 nats
        want = 256 - 256**0.5  # of the input id, whose row is nearly parallel to the hidden state, in another's target
        assert abs(model(x, y) - want) < 20


def started(**changes):
    torch.manual_seed(0)
    return GPT(tiny_config(vocab_size=4096, d_model=128, n_heads=2, n_kv_heads=2, head_dim=64, d_ff=384,
                           max_seq_len=128, **changes))


@pytest.mark.parametrize("tied", [True, False])
def test_embed_constant_start(tied):
    """A sixteenth of the table's channels begin as one constant, as large in a row as so many times the rest of it; all
    else begins as without it, but for the final gains, by which logits see none of it."""
    plain, model = (started(tie_embeddings=tied, embed_constant=c) for c in (0.0, 3.0))
    shared, rest = model.embed.weight.split([8, 120], dim=1)
    assert (shared == shared[0, 0]).all() and torch.equal(rest, plain.embed.weight[:, 8:])
    assert (shared[0].norm() / rest.norm(dim=1).mean()).item() == pytest.approx(3, rel=0.05)
    others = {name: p for name, p in model.named_parameters() if name not in ("embed.weight", "norm.weight")}
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in others.items())
    assert not model.norm.weight[:8].any() and (model.norm.weight[8:] == 1).all()
    x, y = torch.randint(0, 4096, (2, 4, 128))
    with torch.no_grad():
        before = model(x, y)
        want = account(model.cfg, TrainConfig(seq_len=128, micro_batch_size=8, batch_tokens=1024))
        assert abs(before - want["expected_initial_loss"]) < 0.01
        if tied:
            model.norm.weight[:8] = 1.0  # an offset of all logits, which softmax does not see either
            assert abs(model(x, y) - before) < 1e-4


def test_embed_constant_of_a_run_that_goes_on(data, tmp_path):
    """A config file whose constant is another by now neither stops a run nor rewrites what it began with."""
    whole, resumed = (runs.run(data, tmp_path / name, embed_constant=3.0, max_steps=4, save_interval=2, keep=2)
                      for name in ("whole", "resumed"))
    runs.run(data, resumed, embed_constant=0.0, max_steps=4, init_from="resume:ckpt_step_0000002", save_interval=2,
             keep=2)
    runs.assert_same_checkpoint(whole, resumed)
    assert load((ModelConfig, TrainConfig), [str(resumed / "config.json")])[0].embed_constant == 3.0


def test_embed_constant_tells_places_apart():
    """What a query of the first block sees, averaged over tokens, depends on the distance to it from the start; without
    the constant it does not."""
    def spread(model):
        scores, attend = [], model.blocks[0].attn.attend
        model.blocks[0].attn.attend = lambda q, k, v, mask: scores.append(q @ k.mT / 8) or attend(q, k, v, mask)
        with torch.no_grad():
            model.hidden(torch.randint(0, 4096, (16, 64)))
        return torch.stack([scores[0].diagonal(-n, 2, 3).mean((0, 2)) for n in range(32)]).std(dim=0)  # (H,)
    assert (spread(started(embed_constant=3.0)) > 5 * spread(started())).all()


def test_lookup_is_a_one_hot_product(tiny):
    """embed(ids) equals one_hot(ids) @ table to the bit, in value, and in gradient."""
    table, x = tiny().embed.weight, torch.randint(0, 300, (2, 9))
    looked_up, multiplied = F.embedding(x, table), F.one_hot(x, 320).float() @ table
    assert torch.equal(looked_up, multiplied)
    w = torch.randn_like(looked_up)
    torch.testing.assert_close(*(torch.autograd.grad((e * w).sum(), table)[0] for e in (looked_up, multiplied)))


def test_embed_scale(tiny):
    """embed_scale multiplies what enters the first block by sqrt(d_model), and nothing else."""
    plain, scaled = tiny(n_layers=1), tiny(n_layers=1, embed_scale=True)
    entered = []
    for model in (plain, scaled):
        model.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
        model(torch.tensor([[1, 2, 3]]))
    torch.testing.assert_close(entered[1], entered[0] * 8)


def test_rows_that_get_gradient():
    """From the lookup, only rows present get gradient, once per occurrence (A33)."""
    table = torch.nn.Embedding(500, 8)
    table(torch.tensor([[464, 464, 377]])).sum().backward()
    touched = table.weight.grad.abs().sum(1).nonzero().flatten()
    assert touched.tolist() == [377, 464]
    assert (table.weight.grad[464] == 2).all() and (table.weight.grad[377] == 1).all()


def test_tied_gradient_is_the_sum_of_both_ends(tiny):
    """Tied: gradient = head part + lookup part; the head part is dense, so rows absent from the batch learn (A34)."""
    tied, untied = tiny(), tiny(tie_embeddings=False)
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embed.weight})
    x, y = torch.randint(0, 100, (2, 2, 16))
    for model in (tied, untied):
        model(x, y).backward()
    head, lookup = untied.head.weight.grad, untied.embed.weight.grad
    torch.testing.assert_close(tied.embed.weight.grad, head + lookup)
    rows = tied.embed.weight.grad.norm(dim=1)
    absent = torch.ones(320).bool().index_fill(0, torch.cat((x, y)).flatten(), False)
    assert (rows[:300] > 0).all() and (rows[300:] == 0).all()  # pad rows are in no softmax
    assert (lookup[absent] == 0).all() and (head[absent][:100].norm(dim=1) > 0).all()
    assert (lookup[x.flatten()].norm(dim=1) > 0).all()
    assert head[y.flatten()].norm(dim=1).min() > 10 * head[absent][:100].norm(dim=1).max()  # push-down is small


def test_zipf_rows_touched():
    """Rows touched by n draws from a Zipf law are as many as the sum of 1 - (1 - p)^n says (A36)."""
    p = 1 / torch.arange(1, 32769).double()
    p /= p.sum()
    for n, expected in ((2048, 1043), (32768, 8549), (524288, 30230)):
        assert round((1 - (1 - p) ** n).sum().item()) == expected
    draws = torch.multinomial(p.float(), 32768, replacement=True)
    assert abs(len(draws.unique()) - 8549) < 200


def test_padding_idx_does_not_freeze_a_tied_row(tiny):
    """padding_idx stops the lookup's gradient only: a tied head moves the row, an untied one does not (A37)."""
    for tie in (True, False):
        model = tiny(tie_embeddings=tie)
        model.embed.padding_idx = 7
        with torch.no_grad():
            model.embed.weight[7] = 0
        x = torch.full((1, 16), 7)
        x[0, ::2] = 5
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(x, torch.randint(0, 300, (1, 16))).backward()
        optimizer.step()
        assert (model.embed.weight[7].norm() > 1e-3) == tie


def test_ignored_pad_targets_train_no_pad_row(tiny):
    """The right way: pads as targets are -100; then an untied pad row gets no input gradient from what follows it."""
    model, pad = tiny(tie_embeddings=False), 299
    x = torch.randint(0, 200, (2, 16))
    x[:, 10:] = pad
    y = torch.cat((x[:, 1:], x[:, -1:]), 1)
    y[y == pad] = -100
    model(x, y).backward()
    assert (model.embed.weight.grad[pad] == 0).all()


@pytest.mark.parametrize("bad", [300, 319, 10**6, -1])
def test_id_without_a_row(bad):
    """check_ids names the offending id and the vocabulary; pad rows are nobody's ids."""
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 300"):
        check_ids(torch.tensor([3, bad, 5]), 300)
    check_ids(torch.tensor([0, 299]), 300)
    check_ids(torch.zeros(0, dtype=torch.long), 300)


def loaded(model):
    other = GPT(model.cfg)
    other.load_state_dict(model.state_dict())
    return other


def compiled(model):
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randint(0, 300, (2, 16))
    model(x, x).backward()
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))
    return model


LIVES = {"init": lambda m: m, "load": loaded, "step": stepped, "compile": compiled,
         "assign": lambda m: (m.load_state_dict(m.state_dict(), assign=True), m)[1],
         "deepcopy": copy.deepcopy, "dtype": lambda m: m.bfloat16().float(), "to": lambda m: m.to(torch.bfloat16),
         "meta": lambda m: m.to("meta").to_empty(device="cpu")}


@pytest.mark.parametrize("life", LIVES)
def test_tied_is_one_tensor(tiny, life):
    """Whatever is done to a tied model: one parameter, one storage, one name on disk, and the head reads the table."""
    model = LIVES[life](tiny())
    assert model.head_weight is model.embed.weight
    big = [n for n, p in model.named_parameters(remove_duplicate=False) if p.shape == (320, 64)]
    assert big == ["embed.weight"] and [n for n, v in model.state_dict().items() if v.shape == (320, 64)] == big
    if life == "meta":
        model.load_state_dict(tiny().state_dict())
    x = torch.tensor([[1, 2]])
    before = model(x)
    with torch.no_grad():
        model.embed.weight[250] += 1  # an id that is not in x: only the head can see it
    changed = (model(x) != before).any(dim=1).any(dim=0).nonzero().flatten()
    assert changed.tolist() == [250]


def test_untied_is_two(tiny):
    """Untied: two tensors, and the head's rows leave the lookup alone."""
    model = tiny(tie_embeddings=False)
    assert model.head_weight is model.head.weight
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()
    assert model.head.bias is None and not torch.equal(model.head.weight, model.embed.weight)

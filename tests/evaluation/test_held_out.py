"""A held-out loss is that of the weights and the text: by hand, whatever the batches, the ranks and the padding."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import document_ids

import model as model_module
from stack.evaluation.held_out import evaluate

CPU = torch.device("cpu")
BOUNDARY = 299


def windows(n=7, T=16, batch=3, seed=1):
    """n windows in batches, the last one smaller; about one boundary in twenty tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (n, T + 1), generator=g)
    ids[torch.rand(n, T + 1, generator=g) < 0.05] = BOUNDARY
    return [batch_of(ids[i:i + batch, :-1], ids[i:i + batch, 1:]) for i in range(0, n, batch)]


def batch_of(x, y):
    return x, y, document_ids(x, BOUNDARY)


@pytest.fixture
def token_bytes():
    sizes = torch.randint(1, 6, (300,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    sizes[BOUNDARY] = 0  # a special token predicts, and has no text
    return sizes.numpy()


def test_numbers_by_hand(tiny, token_bytes):
    """loss = mean nats, ppl = exp(loss), bpb = nats / (ln 2 * bytes of the predicted text)."""
    model = tiny().eval()
    (x, y, docs), = windows(batch=7)
    with torch.no_grad():
        nats = F.cross_entropy(model(x).double().flatten(0, 1), y.flatten(), reduction="none")
    n_bytes = sum(int(token_bytes[i]) for i in y.flatten())
    got = evaluate(model, [(x, y, docs)], token_bytes, device=CPU)
    assert got["tokens"] == 7 * 16 and got["bytes"] == n_bytes
    assert got["loss"] == pytest.approx(nats.mean().item(), rel=1e-6)
    assert got["ppl"] == pytest.approx(math.exp(nats.mean().item()), rel=1e-5)
    assert got["bpb"] == pytest.approx(nats.sum().item() / math.log(2) / n_bytes, rel=1e-6)


@pytest.mark.parametrize("doc_mask", [False, True])
def test_batch_size_does_not_matter(tiny, token_bytes, doc_mask):
    """The same windows in batches of 1, 3 or 7, filled up to 4 rows or not, give the same loss and the same counts."""
    model = tiny()
    got = [evaluate(model, windows(batch=b), token_bytes, device=CPU, doc_mask=doc_mask, rows=rows)
           for b, rows in ((7, 0), (1, 0), (3, 0), (3, 4))]
    assert len({(g["tokens"], g["bytes"]) for g in got}) == 1
    assert [g["loss"] for g in got] == pytest.approx([got[0]["loss"]] * 4, rel=1e-7)


def test_one_shape_for_a_compiled_model(tiny, token_bytes):
    """Smaller batches are filled up to `rows`, or to the rows of the first, so that nothing is compiled again."""
    model, shapes = tiny(), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    evaluate(model, windows(batch=3), token_bytes, device=CPU, doc_mask=True, rows=4)
    evaluate(model, windows(batch=3), token_bytes, device=CPU)
    first = [(1, 16, 64)] * 2  # asked for loss and logits, never by compiled code
    assert shapes == [(4, 16, 64)] + first + [(4, 16, 64)] * 2 + [(3, 16, 64)] + first + [(3, 16, 64)] * 2


def test_ignored_targets_count_for_nothing(tiny, token_bytes):
    model = tiny()
    (x, y, docs), = windows(batch=7)
    masked = y.clone()
    masked[:, 8:] = -100
    got = evaluate(model, [(x, masked, docs)], token_bytes, device=CPU)
    short = evaluate(model, [(x[:, :8], y[:, :8], docs[:, :8])], token_bytes, device=CPU)
    assert got["tokens"] == 7 * 8 and got["bytes"] == short["bytes"]
    assert got["loss"] == pytest.approx(short["loss"], rel=1e-6)


def test_training_is_left_as_it_was(tiny, token_bytes):
    """Dropout is off, no random number is drawn, no gradient is kept, and the model trains on, also after an error."""
    model = tiny(dropout=0.5).train()
    before = torch.get_rng_state()
    one, two = (evaluate(model, windows(), token_bytes, device=CPU) for _ in range(2))
    assert one == two and model.training and torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    bad = [batch_of(torch.full((1, 16), 5), torch.full((1, 16), 5000))]
    with pytest.raises(ValueError, match="5000"):
        evaluate(model, bad, token_bytes, device=CPU)
    assert model.training
    model.eval()
    evaluate(model, windows(), token_bytes, device=CPU)
    assert not model.training


def test_rounding_is_no_other_loss(tiny, token_bytes, recwarn):
    """Compiled code in bf16 rounds otherwise than the same step by step: no matter for what the loss is."""
    model = tiny()
    with torch.no_grad():
        model.embed.weight *= 3
    model.norm.register_forward_hook(lambda module, args, out: out * (1.02 if len(out) > 1 else 1))  # whole batches
    evaluate(model, windows(), token_bytes, device=CPU, dtype=torch.bfloat16)
    assert not recwarn.list


@pytest.mark.parametrize("changed", [False, True])
def test_another_loss_is_said(tiny, token_bytes, monkeypatch, changed, recwarn):
    """A loss head that adds 1 % of smoothing, also where no gradient is formed."""
    def smoothed(logits, targets, *more):
        x = logits[:, :300].float().clone()
        loss = model_module.chunk_arithmetic(logits, targets, *more)
        return loss + 0.01 * (x.gather(1, targets.clamp(min=0)[:, None])[:, 0] - x.mean(1))
    model = tiny()
    with torch.no_grad():
        model.embed.weight *= 3  # a tied model that has learned nothing expects what it has just read
    if changed:
        model.cross_entropy = functools.partial(model_module.fused_linear_cross_entropy, arithmetic=smoothed)
    evaluate(model, [batch_of(x, x) for x, _, _ in windows()], token_bytes, device=CPU, doc_mask=True)
    assert [str(w.message).split(" returns")[0] for w in recwarn] == ["the loss head"] * changed


def test_nothing_to_measure(tiny, token_bytes):
    """No token is an error, not a loss of 0; tokens without text have a loss and no bits per byte."""
    with pytest.raises(ValueError, match="no token to evaluate"):
        evaluate(tiny(), [], token_bytes, device=CPU)
    x = torch.full((1, 4), BOUNDARY)
    got = evaluate(tiny(), [batch_of(x, x)], token_bytes, device=CPU)
    assert got["bytes"] == 0 and got["bpb"] is None and got["loss"] > 0

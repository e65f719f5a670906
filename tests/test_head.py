"""The loss head gives the value and the gradients of full logits, for every option, chunk size and kind of backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import fused_linear_cross_entropy

N, C, V = 23, 16, 40
EVERYTHING = dict(z_loss=0.1, softcap=2.0, n_valid_vocab=33)
OPTIONS = [{}, dict(z_loss=0.1), dict(softcap=2.0), dict(n_valid_vocab=33), EVERYTHING]


def full(hidden, weight, targets, *, ignore_index=-100, z_loss=0.0, softcap=0.0, n_valid_vocab=None, reduction="mean"):
    """The same by its definition: all logits at once, differentiated by autograd."""
    x = F.linear(hidden, weight)[:, :n_valid_vocab]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x = softcap * torch.tanh(x / softcap) if softcap else x
    valid = (targets != ignore_index).to(x.dtype)
    loss = F.cross_entropy(x, targets, ignore_index=ignore_index, reduction="none")
    loss = loss + z_loss * torch.logsumexp(x, -1).square() * valid
    return loss if reduction == "none" else loss.sum() / (valid.sum().clamp(min=1) if reduction == "mean" else 1)


def inputs(dtype=torch.float32, n=N, c=C, v=V, top=33, scale=1.0):
    hidden = torch.randn(n, c).mul(scale).to(dtype).requires_grad_()
    weight = torch.randn(v, c).to(dtype).requires_grad_()
    targets = torch.randint(0, top, (n,))
    targets[::5] = -100
    return hidden, weight, targets


def grads(loss, *tensors):
    return [g.double() for g in torch.autograd.grad(loss, tensors)]


def truth(hidden, weight, targets, scale=1.0, **options):
    """loss, dh, dw in float64."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = full(h, w, targets, **options)
    return loss.detach(), *grads((loss * scale).sum(), h, w)


def error(x, exact):
    return ((x - exact).norm() / exact.norm()).item()


class Watch(TorchDispatchMode):
    """Counts matmuls and remembers the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.matmuls, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.matmuls += "mm" in str(func)
        self.largest = max([self.largest] + [x.numel() for x in torch.utils._pytree.tree_leaves(out)
                                             if isinstance(x, torch.Tensor)])
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("chunk", [1, 7, N - 1, N, N + 1, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_full_logits_whatever_the_chunk(options, chunk, reduction):
    """Loss and both gradients equal the full-logit ones in float64, with ignored targets, for every chunk size."""
    hidden, weight, targets = inputs()
    incoming = torch.randn(N) * (torch.rand(N) < 0.5) if reduction == "none" else torch.tensor(-1.7)
    loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=chunk, reduction=reduction, **options)
    exact = truth(hidden, weight, targets, reduction=reduction, **options)[0]
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = grads((full(h, w, targets, reduction=reduction, **options) * incoming).sum(), h, w)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    for got, want in zip(grads((loss * incoming).sum(), hidden, weight), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    """Numerical differentiation in float64 agrees, all options on, in several chunks."""
    hidden, weight, targets = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: fused_linear_cross_entropy(
        h, w, targets, chunk=7, reduction=reduction, **EVERYTHING), (hidden, weight), nondet_tol=1e-12)


def test_any_use_of_the_loss():
    """Scaled, accumulated over micro-batches, or shared with a second loss: gradients follow the chain rule."""
    hidden, weight, targets = inputs()
    other, more = torch.randn(N, C, requires_grad=True), torch.randint(0, V, (N,))
    loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=7)
    second = fused_linear_cross_entropy(other, weight, more, chunk=5)
    (3 * loss + second / 8).backward()
    (fused_linear_cross_entropy(hidden, weight, targets) / 4).backward()
    _, dh, dw = truth(hidden, weight, targets)
    _, do, dw2 = truth(other, weight, more)
    for got, want in ((hidden.grad, 3.25 * dh), (weight.grad, 3.25 * dw + dw2 / 8), (other.grad, do / 8)):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_backward_twice():
    """retain_graph gives the same gradients again; second derivatives are refused rather than taken for zero."""
    hidden, weight, targets = inputs()
    loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=7, **EVERYTHING)
    first = torch.autograd.grad(loss, (hidden, weight), torch.tensor(2.0), retain_graph=True)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), first, strict=True):
        torch.testing.assert_close(2 * got, want)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        loss = fused_linear_cross_entropy(hidden, weight, targets)
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("frozen, matmuls", [("nothing", 3), ("hidden", 2), ("weight", 2), ("both", 1), ("no_grad", 1),
                                             ("inference", 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_gradient_work_that_nobody_asked_for(frozen, matmuls, reduction):
    """Per chunk one matmul for the loss and one per wanted gradient; never a tensor of N * V, in either pass."""
    hidden, weight, targets = inputs(n=512, c=4, v=512, top=512)
    hidden.requires_grad_(frozen not in ("hidden", "both"))
    weight.requires_grad_(frozen not in ("weight", "both"))
    expected = truth(hidden, weight, targets, reduction=reduction)[0] if frozen == "both" else None
    with Watch() as watch, torch.inference_mode(frozen == "inference"), torch.set_grad_enabled(
            frozen not in ("no_grad", "inference")):
        loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=8, reduction=reduction)
        if loss.requires_grad:
            loss.sum().backward()
    backward = 64 if reduction == "none" and loss.requires_grad else 0  # a gradient per token: the chunk is recomputed
    assert watch.matmuls == 64 * matmuls + backward
    assert watch.largest == 512 * 8  # a chunk of logits; the weight has half of that
    if expected is not None:
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("valid", [[], [0], [22], [7, 8]], ids=["none", "first", "last", "middle"])
def test_ignored_chunks(valid, dtype):
    """Chunks without a valid target change nothing; with none at all the mean is 0 and the gradients are zeros."""
    hidden, weight, targets = inputs(dtype)
    targets = torch.full((N,), -100)
    targets[valid] = 3
    loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=4, z_loss=0.1)
    exact, dh, dw = truth(hidden, weight, targets, z_loss=0.1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(loss.double(), exact, rtol=tolerance, atol=0)
    for got, want in zip(grads(loss, hidden, weight), (dh, dw), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    if not valid:
        assert loss == 0 and F.cross_entropy(torch.randn(N, V), targets).isnan()


def test_no_tokens():
    """N = 0 is a loss of 0, connected, with zero gradients."""
    weight, hidden = torch.randn(V, C, requires_grad=True), torch.randn(0, C, requires_grad=True)
    for reduction in ("mean", "sum"):
        loss = fused_linear_cross_entropy(hidden, weight, torch.randint(0, V, (0,)), reduction=reduction)
        dh, dw = grads(loss, hidden, weight)
        assert loss == 0 and dh.shape == (0, C) and (dw == 0).all()


def test_z_loss_off_is_no_z_loss():
    """z_loss=0 is plain cross-entropy; otherwise the term is averaged over the valid tokens."""
    hidden, weight, targets = inputs(torch.float64)
    plain, with_z = (fused_linear_cross_entropy(hidden, weight, targets, z_loss=z) for z in (0.0, 0.5))
    torch.testing.assert_close(plain, F.cross_entropy(F.linear(hidden, weight), targets), rtol=1e-13, atol=0)
    lse = torch.logsumexp(F.linear(hidden, weight), -1)[targets != -100]
    torch.testing.assert_close(with_z - plain, 0.5 * lse.square().mean())


def test_pad_rows_take_no_part():
    """Rows from n_valid_vocab on may hold anything: no loss, no z-term and no gradient comes from them."""
    hidden, weight, targets = inputs()
    with torch.no_grad():
        weight[33:] = 1e4
    loss = fused_linear_cross_entropy(hidden, weight, targets, n_valid_vocab=33, z_loss=0.1)
    cut = weight.detach()[:33].clone().requires_grad_()
    short = fused_linear_cross_entropy(hidden, cut, targets, z_loss=0.1)
    (dw,), (want,) = torch.autograd.grad(loss, weight), torch.autograd.grad(short, cut)
    assert loss == short and (dw[33:] == 0).all()
    torch.testing.assert_close(dw[:33], want)


@pytest.mark.parametrize("bad", [V, 33, -1, -99])
def test_target_outside_the_vocabulary(bad):
    """A target no column belongs to raises and is named; the last id and the ignored one are fine."""
    hidden, weight, targets = inputs()
    targets[targets < 0] = bad
    targets[3:5] = torch.tensor([32, bad])
    with pytest.raises(ValueError, match=f"target {bad} .* vocabulary of 33"):
        fused_linear_cross_entropy(hidden, weight, targets, n_valid_vocab=33)
    fused_linear_cross_entropy(hidden, weight, targets, n_valid_vocab=33, ignore_index=bad)


@pytest.mark.parametrize("changes", [
    dict(reduction="avg"), dict(chunk=0), dict(n_valid_vocab=0), dict(n_valid_vocab=V + 1),
    dict(targets=torch.zeros(N - 1).long()), dict(hidden=torch.randn(1, N, C))])
def test_senseless_calls_are_refused(changes):
    """Wrong shapes and settings are ValueErrors that show them."""
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="reduction|chunk|n_valid_vocab|hidden"):
        fused_linear_cross_entropy(**{**dict(hidden=hidden, weight=weight, targets=targets), **changes})


def test_common_offset():
    """10,000 added to all logits leaves loss >= 0 and the gradients as exact as PyTorch's own, also for a sure row."""
    hidden, weight, targets = torch.zeros(N, C), torch.zeros(V, C), torch.randint(0, V, (N,))
    weight[:, 0], hidden[:, 0] = 1e4, 1.0
    weight[torch.arange(15), torch.arange(1, 16)] = 8.0
    hidden[torch.arange(1, 16), torch.arange(1, 16)] = 1.0
    targets[1:16] = torch.arange(15)  # p of about 0.987
    hidden.requires_grad_()
    loss = fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    want = F.cross_entropy(F.linear(hidden, weight).double(), targets, reduction="none")
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    assert (loss >= 0).all()
    logits = F.linear(hidden, weight).detach().double()
    exact = (logits.softmax(-1) - F.one_hot(targets, V)) @ weight[:, 1:].double()
    got, = grads(loss.sum(), hidden)
    torch.testing.assert_close(got[:, 1:], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["random", "confident", "64 chunks"])
@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1.0), (torch.float16, 65536.0)])
def test_low_precision_is_no_worse_than_full_logits(case, dtype, scale):
    """bf16 and loss-scaled fp16: loss and gradients lie as near to float64 as those of full fp32-upcast logits; the
    weight's, if it is bf16 itself, a little less: its parts are rounded by the matmul before their sum is."""
    hidden, weight, targets = inputs(dtype, n=512, c=64, v=1000, top=1000, scale=0.3)
    if case == "confident":
        with torch.no_grad():
            hidden.copy_(weight[targets.clamp(min=0)] * 0.25)  # p of about 0.9995
    ours = fused_linear_cross_entropy(hidden, weight, targets, chunk=8 if case == "64 chunks" else 96)
    theirs = full(hidden, weight, targets)
    exact, *wanted = truth(hidden, weight, targets, scale=scale)
    assert abs(ours.detach() - exact) <= 1.1 * abs(theirs.detach() - exact) + 1e-6
    for got, other, want in zip(grads(ours * scale, hidden, weight), grads(theirs * scale, hidden, weight), wanted,
                                strict=True):
        slack = 1.02 if got.shape == hidden.shape else 1.25
        assert got.isfinite().all() and error(got, want) <= slack * error(other, want)


def test_fp16_sums_over_many_tokens_stay_finite():
    """fp16 gradients of the sum over a chunk stay below 65504 where the mean's are ordinary numbers."""
    hidden = torch.full((40_000, 8), 4.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(16, 8, dtype=torch.float16, requires_grad=True)
    fused_linear_cross_entropy(hidden, weight, torch.zeros(40_000).long()).backward()
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -3.75, dtype=torch.float16))

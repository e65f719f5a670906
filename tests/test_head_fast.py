"""The loss head's fast paths: compiled arithmetic, autocast and automatic chunks give what the plain ones give."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import model
from model import default_chunk, fused_linear_cross_entropy
from stack import compiled

EVERYTHING = dict(z_loss=0.1, softcap=20.0, n_valid_vocab=990)


def inputs(n=96, c=32, v=1000, dtype=torch.bfloat16):
    hidden = torch.randn(n, c).to(dtype).requires_grad_()
    weight = torch.randn(v, c).to(dtype).requires_grad_()
    targets = torch.randint(0, 990, (n,))
    targets[::7] = -100
    return hidden, weight, targets


@pytest.fixture
def forget():
    """What was compiled, and that nothing compiles, is remembered for the process; forget it before and after."""
    def clear():
        torch.compiler.set_stance("default")
        compiled.compiled.cache_clear()
    clear()
    yield
    clear()


def test_compiled_arithmetic_equals_its_plain_twin(monkeypatch, forget):
    """With a C++ compiler the compiled chunks run, once compiled for all chunk sizes, and give the twin's numbers."""
    plain = inputs()
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    results = {}
    for chunk in (40, 33):  # chunks of 40, 40, 16 and 33, 33, 30
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = fused_linear_cross_entropy(*plain, chunk=chunk, arithmetic=compiled.chunk_arithmetic, **EVERYTHING)
            results[chunk] = loss, *torch.autograd.grad(loss, plain[:2])
        if any("nothing is compiled" in str(w.message) for w in caught):
            pytest.skip("no C++ compiler here")
    assert counters["unique_graphs"] == 1
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1 << 40)
    for chunk in results:
        loss = fused_linear_cross_entropy(*plain, chunk=chunk, arithmetic=compiled.chunk_arithmetic, **EVERYTHING)
        torch.testing.assert_close(results[chunk][0], loss, rtol=1e-6, atol=0)
        for got, want in zip(results[chunk][1:], torch.autograd.grad(loss, plain[:2]), strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=1e-5)


def test_without_a_compiler(monkeypatch, forget):
    """A compiler that fails costs one attempt and one warning, for head and blocks together; the numbers are the same;
    other errors are the function's own and come through."""
    attempts, compiler = [], torch.compile

    def no_compiler(graph, inputs):
        attempts.append(1)
        raise OSError("no g++\nin PATH")
    hidden, weight, targets = inputs(dtype=torch.float32)
    want = fused_linear_cross_entropy(hidden, weight, targets)
    monkeypatch.setattr(compiled, "COMPILE_FROM", 1)
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compiler(f, dynamic=dynamic, backend=no_compiler))
    block = compiled.compile_or_not(lambda x: x + 1)
    said = r"(?s)nothing is compiled.*BackendCompilerFailed.*no g\+\+.*--compile=false"
    with pytest.warns(UserWarning, match=said) as caught:
        loss = fused_linear_cross_entropy(hidden, weight, targets, chunk=24, arithmetic=compiled.chunk_arithmetic)
        assert block(torch.ones(())) == 2
    assert len(attempts) == len(caught) == 1
    torch.testing.assert_close(loss, want)
    with pytest.raises(ZeroDivisionError):
        compiled.compile_or_not(lambda a: a / 0)(1)


@pytest.mark.parametrize("chunk", [8, 150, 512])
def test_autocast_with_fp32_masters(chunk):
    """Under autocast, as training runs, matmuls are bf16 and gradients fp32, no further from float64 than those of
    full logits, over 64 chunks too: the weight's are summed in fp32 and never rounded again."""
    hidden, weight, targets = inputs(n=512, dtype=torch.float32)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), targets)
    wanted = torch.autograd.grad(exact, (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        ours = fused_linear_cross_entropy(hidden, weight, targets, chunk=chunk)
        theirs = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    assert ours.dtype == torch.float32 and 0 < abs(ours - exact) <= abs(theirs - exact) + 1e-6
    others = torch.autograd.grad(theirs, (hidden, weight))
    for tensor, want, other in zip((hidden, weight), wanted, others, strict=True):
        got, = torch.autograd.grad(ours, tensor, retain_graph=True)
        assert got.dtype == torch.float32
        assert 0.1 < (got - want).norm() / (other - want).norm() <= 1.01  # bf16 matmuls in both


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 7, 1000, 32768, 1 << 20])
@pytest.mark.parametrize("v", [257, 32768, 262144])
def test_default_chunk(n, v, dtype):
    """The chosen chunk keeps one chunk of logits within the budget, at least 16 tokens of it, in equal parts."""
    for device, budget in model.CHUNK_BYTES.items():
        chunk = default_chunk(n, v, dtype, device)
        count = -(-n // chunk)
        assert 1 <= chunk <= n and count * chunk - n < count
        assert chunk * v * dtype.itemsize <= max(budget, 16 * v * dtype.itemsize)
        assert chunk == n or 3 * chunk * v * dtype.itemsize > budget or dtype == torch.float16


def test_strided_inputs():
    """A transposed weight and a sliced hidden are read as they lie."""
    hidden = torch.randn(64, 48)[:, ::3].requires_grad_()
    weight = torch.randn(16, 100).t().requires_grad_()
    targets = torch.randint(0, 100, (64,))
    ours = fused_linear_cross_entropy(hidden, weight, targets, chunk=10)
    theirs = F.cross_entropy(F.linear(hidden, weight), targets)
    for got, want in zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)),
                         strict=True):
        torch.testing.assert_close(got, want)

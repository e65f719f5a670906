"""One generate loop: the cache changes nothing, rows do not see each other, and every odd setting has a meaning."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
from conftest import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, KVCache, generate, sample_next
from stack import compiled, twins
from stack.evaluation import choices

LEARNED = dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False)
SHAPES = {"rope": {}, "learned": LEARNED, "nope": dict(nope_every=2, qk_norm=False), "mha-softcap": dict(
    n_kv_heads=4, logit_softcap=2.0, tie_embeddings=False, embed_scale=True)}
SAMPLED = dict(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, seed=7)


@pytest.fixture
def lively(tiny):
    """A tiny model with weights large enough that its greedy output is not one id repeated."""
    def build(**changes):
        model = tiny(**changes)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        return model
    return build


def prompt(n, start=1):
    return [(start + 7 * i * i) % 300 for i in range(n)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_cache_changes_nothing(lively, shape, settings):
    """With and without the cache the ids are the same, for short prompts and across the context limit of 32."""
    model = lively(**SHAPES[shape])
    for prompts in ([prompt(5)], [prompt(31)], [prompt(2), prompt(9, 4), prompt(30, 5)]):
        outputs = [generate(model, prompts, max_new_tokens=40, use_cache=use, **settings) for use in (True, False)]
        assert outputs[0] == outputs[1]
        assert all(len(set(row)) > 5 for row in outputs[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_see_each_other(lively, shape):
    """A batch of unequal prompts gives each the greedy ids it has alone, also after one of them is cropped."""
    model = lively(**SHAPES[shape])
    prompts = [prompt(3), prompt(30, 2), prompt(1, 9), prompt(17, 5)]
    alone = [generate(model, [p], max_new_tokens=25)[0] for p in prompts]
    assert generate(model, prompts, max_new_tokens=25) == alone


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [31, 32, 33, 96])
def test_prompts_at_the_limit(lively, shape, length):
    """A prompt beyond the context loses its beginning, with one warning; at the limit none is given."""
    model = lively(**SHAPES[shape])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids, = generate(model, [prompt(length)], max_new_tokens=6)
    assert len(ids) == 6 and len(caught) == (length > 32)
    assert ids == generate(model, [prompt(length)[-32:]], max_new_tokens=6)[0]
    first = model.eval()(torch.tensor([prompt(length)[-32:]]))[0, -1].argmax()
    assert ids[0] == first


@pytest.mark.parametrize("shape", SHAPES)
def test_chunked_prefill(lively, shape):
    """A prompt read through the cache in pieces, of any sizes, has the logits of one forward."""
    model = lively(**SHAPES[shape]).eval()
    x = torch.tensor([prompt(32), prompt(32, 3)])
    want = model(x)
    for cuts in ([32], [5, 27], [1, 1, 30], [20, 12]):
        cache = KVCache(model.cfg, 2, 32, "cpu", torch.float32)
        got = torch.cat([model(piece, cache=cache) for piece in x.split(cuts, 1)], 1)
        assert cache.length == 32
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="cache holds 8 tokens and 9 are needed"):
        model(x[:, :9], cache=KVCache(model.cfg, 2, 8, "cpu", torch.float32))


def test_stop_ids(lively):
    """A row ends before its stop id, the others go on as they would have; with every row done the loop ends."""
    model = lively()
    free = generate(model, [prompt(4), prompt(6, 2)], max_new_tokens=20)
    stop = free[0][5]
    end = [row.index(stop) if stop in row else 20 for row in free]
    assert generate(model, [prompt(4), prompt(6, 2)], max_new_tokens=20, stop_ids=(stop,)) == [
        row[:n] for row, n in zip(free, end, strict=True)]
    calls = []
    handle = model.norm.register_forward_hook(lambda *_: calls.append(1))
    assert generate(model, [prompt(4)], max_new_tokens=20, stop_ids={stop}) == [free[0][:end[0]]]
    assert len(calls) == end[0] + 1
    handle.remove()


def test_streaming(lively):
    """on_token is called with every new id, in order, as it is made; never for a stop id or a finished row."""
    model, seen = lively(), [[], []]
    free = generate(model, [prompt(4), prompt(6, 2)], max_new_tokens=12)
    ids = generate(model, [prompt(4), prompt(6, 2)], max_new_tokens=12, stop_ids=(free[0][3],),
                   on_token=lambda row, token: seen[row].append(token))
    assert seen == ids and len(ids[0]) == free[0].index(free[0][3])


def test_nothing_to_do_and_senseless_input(lively):
    """0 new tokens give empty lists and no prompts no rows; an empty prompt and ids without a row are refused."""
    model = lively()
    assert generate(model, [[1], [2, 3]], max_new_tokens=0) == [[], []] and generate(model, [], max_new_tokens=3) == []
    for prompts, message in (([[1], []], "prompt 1 is empty"), ([[300]], "token id 300"), ([[-1]], "token id -1")):
        with pytest.raises(ValueError, match=message):
            generate(model, prompts, max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        generate(model, [[1]], max_new_tokens=-1)


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_and_dropout(lively, training):
    """Generation runs without dropout and leaves the model in the mode it was in, also when it fails."""
    model = lively(dropout=0.5).train(training)
    ids = generate(model, [prompt(5)], max_new_tokens=10)
    assert model.training == training and ids == generate(model, [prompt(5)], max_new_tokens=10)
    model.zero_grad()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity"):
        generate(model, [prompt(5)], max_new_tokens=10)
    assert model.training == training


def test_low_precision_model(lively):
    """A bf16 model, and an fp32 one under autocast, generate with a cache of that dtype."""
    model = lively()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = generate(model, [prompt(5), prompt(3)], max_new_tokens=8)
    assert len(mixed[0]) == 8 and len(generate(model.bfloat16(), [prompt(5), prompt(3)], max_new_tokens=8)[1]) == 8


def test_compiled_blocks_stay_out(lively):
    """Generating from a model with compiled blocks compiles nothing: every length would be another graph."""
    model, graphs = lively(), []
    want = generate(model, [prompt(3), prompt(5)], max_new_tokens=30)
    for block in model.blocks:
        block.compile(backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    assert generate(model, [prompt(3), prompt(5)], max_new_tokens=30) == want and not graphs
    model(torch.tensor([[1, 2, 3]]))
    assert graphs
    torch._dynamo.reset()


def test_one_token_is_not_worth_compiling(lively):
    """A single new token, as in measuring how fast a prompt is read, comes from the prompt alone."""
    model = lively()
    one = dict(prompts=[prompt(5)], max_new_tokens=1)
    plain = generate(model, **one)
    model.decoder = lambda *args: 1 / 0
    assert generate(model, **one) == plain


class Tape(TorchDispatchMode):
    """A CUDA graph for CPUs: what runs while it is recorded is run again, into the same tensors."""

    recorded = 0

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, old in self.calls:
            new = func(*args, **kwargs)
            for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (old, new)), strict=True):
                if isinstance(a, torch.Tensor) and a.data_ptr() != b.data_ptr():
                    a.copy_(b)


@contextlib.contextmanager
def taped(tape):
    Tape.recorded += 1
    with tape:
        yield


def test_a_graph_serves_every_generation_of_its_size(lively, monkeypatch):
    """Recorded once per batch and size, again where the weights moved; a cache that lost its place to another, in the
    middle of it too, goes on with what it held."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Tape)
    monkeypatch.setattr(torch.cuda, "graph", taped)
    monkeypatch.setattr(compiled, "compiled", lambda function: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    monkeypatch.setattr(Tape, "recorded", 0)
    plain, model = lively(), lively()
    model.decoder = functools.partial(compiled.decoder, record=True)

    def same(*lengths, **more):
        prompts = [prompt(n) for n in lengths]
        got, want = (generate(one, prompts, max_new_tokens=6, **more) for one in (model, plain))
        assert got == want
    same(5)
    same(9)
    assert Tape.recorded == 1
    same(3, 7)  # documents
    same(6, 2)
    same(4, 4)
    assert Tape.recorded == 3
    inside = []
    same(8, on_token=lambda row, id: inside.append(generate(model, [prompt(4)], max_new_tokens=3)) and False)
    assert Tape.recorded == 3 and all(ids == generate(plain, [prompt(4)], max_new_tokens=3)[0] for [ids] in inside)
    model = copy.deepcopy(model)
    same(5)
    assert Tape.recorded == 4 and len(model.recorded) == 1


def test_no_plan_for_each_length(lively, monkeypatch):
    """cuDNN's attention, which plans each new length for as long as a hundred tokens take, is left out of sampling and
    of multiple choice, and of nothing else."""
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **options: seen.append(
        torch.backends.cuda.cudnn_sdp_enabled()) or attend(*args, **options))
    model, cpu = lively(), torch.device("cpu")
    generate(model, [prompt(5)], max_new_tokens=3)
    choices.log_likelihoods(model, [([1], [2, 3])], device=cpu, dtype=torch.float32, rows=1)
    model.decoder = twins.plain_step
    generate(model, [prompt(5)], max_new_tokens=3)
    assert seen and not any(seen)
    model(torch.tensor([prompt(5)]))
    assert seen[-1]


def test_compiling_without_a_compiler(lively, monkeypatch):
    """What is asked for and cannot be is refused, with what to do."""
    def no_compiler(graph, inputs):
        raise OSError("no g++")
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiler(f, backend=no_compiler))
    monkeypatch.setattr(compiled, "compiled", compiled.compile_or_not)  # nothing of it is kept for other tests
    model = lively()
    model.decoder = twins.compiled_step
    with pytest.raises(OSError, match=r"(?s)no g\+\+.*Install a C\+\+ compiler"):
        generate(model, [prompt(5)], max_new_tokens=3)


def test_seeds(lively):
    """The same seed repeats, another one differs, and rows of equal prompts differ from each other."""
    model = lively()
    a, b, c = (generate(model, [prompt(4)] * 3, max_new_tokens=12, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert a == b != c and a[0] != a[1] != a[2]
    state = torch.get_rng_state()
    generate(model, [prompt(4)], max_new_tokens=3, temperature=1.0, seed=1)
    assert torch.equal(state, torch.get_rng_state())  # a seeded sample leaves the training's randomness alone


def test_pad_ids_are_never_sampled():
    """50,000 draws at temperature 5 from an untrained model with 84 pad rows hold real ids only, and most of them."""
    model = GPT(tiny_config(vocab_size=300, vocab_multiple=128, max_seq_len=64))
    rows = generate(model, [[1]] * 1000, max_new_tokens=50, temperature=5.0, seed=0)
    drawn = torch.tensor(rows)
    assert drawn.numel() == 50_000 and drawn.max() < 300 and len(drawn.unique()) > 295


# what sample_next does with logits of which the answer is known

LOGITS = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()


def support(n=2000, logits=LOGITS, **settings):
    drawn = sample_next(logits.expand(n, -1), generator=torch.Generator().manual_seed(0), **settings)
    assert drawn.shape == (n, 1)
    return sorted(drawn.unique().tolist())


@pytest.mark.parametrize("settings, want", [
    ({}, [0, 1, 2, 3, 4]), (dict(temperature=0), [0]), (dict(temperature=1e-8), [0]), (dict(temperature=1e-40), [0]),
    (dict(top_k=0), [0, 1, 2, 3, 4]), (dict(top_k=None), [0, 1, 2, 3, 4]), (dict(top_k=1), [0]),
    (dict(top_k=3), [0, 1, 2]), (dict(top_k=5), [0, 1, 2, 3, 4]), (dict(top_k=105), [0, 1, 2, 3, 4]),
    (dict(top_p=0.0), [0]), (dict(top_p=0.49), [0]), (dict(top_p=0.51), [0, 1]), (dict(top_p=0.8), [0, 1, 2]),
    (dict(top_p=1.0), [0, 1, 2, 3, 4]), (dict(min_p=0.0), [0, 1, 2, 3, 4]), (dict(min_p=0.25), [0, 1, 2]),
    (dict(min_p=1.0), [0]), (dict(top_k=4, top_p=0.73), [0, 1]), (dict(top_k=3, min_p=0.35), [0, 1])])
def test_support(settings, want):
    """Exactly the ids that temperature, top_k, top_p and min_p leave are drawn."""
    assert support(**settings) == want


def test_ties_and_extremes():
    """top_k keeps exactly k of equal logits, argmax takes the lowest id, and huge or -inf logits make no NaN."""
    equal = torch.zeros(1, 7)
    assert len(support(logits=equal, top_k=3)) == 3 and len(support(logits=equal, top_k=1)) == 1
    assert support(logits=equal, temperature=0) == [0] and len(support(logits=equal, top_p=0.0)) == 1
    huge = torch.tensor([[-torch.inf, 3e38, -3e38, 3e38]])
    for settings in ({}, dict(temperature=1e-8), dict(temperature=1e-300), dict(top_k=3), dict(top_p=0.9),
                     dict(min_p=0.5)):
        assert support(logits=huge, **settings) == [1, 3]


def test_frequencies():
    """Draws follow softmax(logits / temperature)."""
    drawn = sample_next(LOGITS.expand(40_000, -1), temperature=2.0, generator=torch.Generator().manual_seed(0))
    want = (LOGITS / 2).softmax(-1)[0]
    torch.testing.assert_close(drawn.flatten().bincount() / 40_000, want, rtol=0, atol=0.01)


@pytest.mark.parametrize("settings", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=1.1),
                                      dict(top_p=-0.1), dict(min_p=2.0)])
def test_senseless_settings(settings):
    """Settings without a meaning are refused."""
    with pytest.raises(ValueError, match="temperature"):
        sample_next(LOGITS, **settings)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_damaged_logits(broken):
    """NaN and +inf logits raise, greedy too, instead of giving some id."""
    for settings in (dict(temperature=0), dict(temperature=1.0), dict(top_k=1), dict(top_p=0.5)):
        with pytest.raises(ValueError, match="NaN or infinity"):
            sample_next(torch.tensor([[1.0, broken]]), **settings)

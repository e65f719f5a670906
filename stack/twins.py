"""What computes the same as model.py, faster: attached to a built model, compared with it, put aside where it differs.

    compile_blocks(model, device)    before training: compiled blocks and loss head; on a CPU kernels.cpp, on a GPU
                                     FlexAttention under document masks
    check(model, x, y, docs, ...)    on the first real batch: every such twin against what model.py says
    compile_head(model)              the loss head alone, to evaluate
    check_cache(model)               for generate: whether its cache changes what model.py computes
    fast_decoding(model)             for generate: decode.cpp on a CPU, else one compiled program for all tokens

model.py is the truth.  Whoever changes `Attention.attend`, `GPT.mask`, `chunk_arithmetic` or a block there has said a
thing once that these say a second time, so each is held against model.py's own with numbers, in fp32, where a change of
1 % is far above rounding: values and gradients of the same inputs; attention also at the full length, where a window
would bite; decoding at the next place and at the last one of the cache, which is filled at random for it.

A twin has `plain`, what it stands in for: a function as its attribute, an attention layer by its class.
"""

import contextlib
import copy
import functools
import math
import time
import warnings

import torch
import torch.distributed as dist
from torch.nn.attention import sdpa_kernel

from model import ANY_LENGTH, GPT, KVCache, fused_linear_cross_entropy
from stack import compiled
from stack.cpu import decode, kernels
from stack.device import autocast

BOUND = 5e-3  # of a difference, as its share of the norm: what 1 % changes is seen; TF32 makes 0.001
NEAR, FAR = 128, 8192  # tokens of the first batch for which all is compared; at most for which attention's values are
SCORES = 1 << 27  # of all heads of some layers that model.py computes for that; of the other layers' it is one head's
LARGE = 32  # times the size at the start, of scores and logits: where a cap would bite
EXACT = 1e-3  # of a decoding step's difference, in fp32
CHANGED = {  # by what is compared, what to look at where it differs
    "attention": "Attention.attend or GPT.mask", "loss head": "chunk_arithmetic or the function around it"}
WIDENED = 1 << 30  # weights at most that are copied to fp32 to compare: 4 GB


# ---------------------------------------------------------------------------------------------------------------------
# Attaching


def replace_attend(model, fast, serves):
    """Let fast(q, k, v, mask) stand in for Attention.attend where serves(attn, q, k, v, mask): by another class for the
    layers that are there, one for all, since by an object for each each block would be compiled by itself."""
    for attn in (getattr(block, "attn", None) for block in model.blocks):
        is_own = "attend" in getattr(attn, "__dict__", {})  # a fork's, set on the layer itself
        if hasattr(type(attn), "attend") and not is_own and getattr(attn, "fast", None) is not fast:
            attn.__class__ = _with_twin(type(attn), fast, serves)


@functools.cache
def _with_twin(plain, fast, serves):
    def takes(self, *args, **options):
        return len(args) == 4 and not options and serves(self, *args)

    def attend(self, *args, **options):
        return fast(*args) if takes(self, *args, **options) else plain.attend(self, *args, **options)
    return type(plain.__name__, (plain,), dict(attend=attend, takes=takes, plain=plain, fast=staticmethod(fast)))


def replace_function(model, name: str, twin):
    """Let twin stand in for model's function `name`."""
    twin.plain = getattr(model, name)
    setattr(model, name, twin)


def _twins(model) -> tuple[list, dict]:
    """The attention layers that have a twin; by name the functions that are one."""
    attns = [block.attn for block in model.blocks if hasattr(getattr(block, "attn", None), "fast")]
    return attns, {name: vars(model)[name] for name in ("mask", "cross_entropy")
                   if hasattr(vars(model).get(name), "plain")}


def compile_blocks(model: GPT, device: torch.device, like: GPT | None = None):
    """Compile a built model for training, or to be evaluated as it trains.  like: a model whose twins were checked
    already; what does not serve there is not attached here."""
    cpu, compiled.failed = device.type == "cpu" and kernels.available(), False
    if like is None or _twins(like)[0]:
        if cpu:
            replace_attend(model, kernels.attention, kernels.serves)
        elif device.type == "cuda":
            replace_function(model, "mask", functools.partial(compiled.document_mask, model, model.mask))
            replace_attend(model, compiled.flex, _under_block_mask)
    ours = like is None or getattr(like.cross_entropy, "keywords", {}).get("arithmetic") is kernels.chunk_arithmetic
    compile_head(model, kernels.chunk_arithmetic if cpu and ours else compiled.chunk_arithmetic)
    random = like is None and draws(model)
    for block in model.blocks:  # one code object: compiled once, used by every layer
        block.forward = compiled.compile_or_not(block.forward, random)


def compile_head(model: GPT, arithmetic=compiled.chunk_arithmetic) -> GPT:
    """The loss head's arithmetic, compiled where that pays; returns the model."""
    if model.cross_entropy is fused_linear_cross_entropy:  # else it is a fork's, or tensor_parallel.py's
        replace_function(model, "cross_entropy", functools.partial(fused_linear_cross_entropy, arithmetic=arithmetic))
    return model


@torch.no_grad()
def draws(model) -> bool:
    """Whether a forward pass draws random numbers as the model trains: for dropout, or for what a fork has added."""
    def states():
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(ids.device)] if ids.is_cuda else [])]
    ids = torch.zeros(1, min(model.cfg.max_seq_len, 2), dtype=torch.long, device=model.embed.weight.device)
    with _as_before(model), torch.compiler.set_stance("force_eager"):
        model.train()
        before = states()
        model.hidden(ids)
        return not all(map(torch.equal, before, states()))


def _under_block_mask(attn, q, k, v, mask) -> bool:
    return mask is not None and not isinstance(mask, torch.Tensor)


# ---------------------------------------------------------------------------------------------------------------------
# A training step, compared


def check(model: GPT, x, y, docs, *, dtype: torch.dtype, z_loss: float = 0.0, again: bool = False) -> list[str]:
    """Compare the twins attached to `model` with model.py on a micro batch x, y (B, T), docs (B, T) or None; what
    differs steps aside.  Returns what to say about it, a line each; when asked again, for what changes as a model
    trains, only what is new.  Of several ranks all call it together."""
    attns, functions = _twins(model)
    started, same = time.perf_counter(), {}  # same: by what is compared, whether it is
    plain = functions["cross_entropy"].plain if "cross_entropy" in functions else model.cross_entropy
    odd = [] if again or _slope_is_gradient(plain, x.device, model.cfg.logit_softcap) else [
        "the loss head's gradient is not the slope of its loss: training will not go down what the log shows. In "
        "chunk_arithmetic both stand side by side, and a change has to be made in both."]
    if not attns and "cross_entropy" not in functions:
        return odd

    def note(what: str, equal: bool):
        same[what] = equal and same.get(what, True)
    n, docs = min(x.shape[1], NEAR), docs if docs is None else docs[:1]
    targets = torch.where(y < 0, x, y)[:1, :n]  # of conversations few tokens are learned, here perhaps none
    targets[:, ::7] = -100  # ignored ones too
    try:
        with (_as_before(model), torch.no_grad(), torch.compiler.set_stance("force_eager"),
              autocast(x.device, dtype), warnings.catch_warnings()):
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on purpose
            attend = _compared_attend(model, docs, n, min(x.shape[1], FAR), note)
            for attn in attns:
                attn.attend = functools.partial(attend, attn)
            for name, twin in functions.items():
                setattr(model, name, functools.partial(_compared_head, twin, note) if name == "cross_entropy" else
                        twin.plain)
            model(x[:1, :n], targets, docs=docs if docs is None else docs[:, :n], reduction="sum",
                  z_loss=float(z_loss > 0))  # whole: at its usual weight a change in it would be lost
    finally:
        vars(model).update(functions)
        for attn in attns:
            vars(attn).pop("attend", None)
        if hasattr(model, "reshard"):  # FSDP's, which only a backward would do
            model.reshard()
    if dist.is_initialized():  # together: what differs on one rank's batch steps aside on all
        verdict = torch.tensor([float(same.get(what, True)) for what in CHANGED], device=x.device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        same = {what: bool(well) for what, well in zip(CHANGED, verdict, strict=True) if what in same or not well}
    lines = _put_aside(model, same, time.perf_counter() - started)
    return odd + [line for line in lines if not again or not all(same.values())]


@contextlib.contextmanager
def _as_before(model):
    """For a forward pass as training calls it, but for dropout, which is no twin's: behind it random numbers, buffers,
    which may be statistics of what is trained on, and modes are as they were."""
    device, was_training, precision = model.embed.weight.device, model.training, torch.get_float32_matmul_precision()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train(was_training and not model.cfg.dropout)
    torch.set_float32_matmul_precision("highest")  # TF32's rounding would show where scores are large
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        model.train(was_training)
        for name, buffer in kept.items():
            model.get_buffer(name).copy_(buffer)


def _slope_is_gradient(head, device, softcap: float) -> bool:
    """Whether a loss head's gradients are its loss's, by a difference quotient in fp64 on a few random vectors; also
    true where it cannot be called so."""
    generator = torch.Generator(device).manual_seed(0)
    targets = torch.arange(32, device=device) * 3 - (torch.arange(32, device=device) % 7 == 0) * 200  # some ignored
    targets[targets < 0] = -100

    def at(tensors):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        loss = head(*tensors, targets, z_loss=0.01, softcap=softcap, n_valid_vocab=100, reduction="mean")
        return tensors, loss
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            start = [torch.randn(n, 32, device=device, dtype=torch.float64, generator=generator) for n in (32, 128)]
            tensors, loss = at(start)
            gradients = torch.autograd.grad(loss, tensors)
            noise = [torch.randn(g.shape, device=device, dtype=g.dtype, generator=generator) for g in gradients]
            along = [g + n * g.norm() / n.norm() for g, n in zip(gradients, noise, strict=True)]
            ahead, behind = (at([p + step * a for p, a in zip(start, along, strict=True)])[1] for step in (1e-5, -1e-5))
        slope = (ahead - behind).item() / 2e-5
        expected = sum((g * a).sum().item() for g, a in zip(gradients, along, strict=True))
    except Exception:  # another signature, another format
        return True
    return not abs(slope - expected) > 1e-3 * abs(expected)


def _compared_attend(model, docs, n: int, T: int, note):
    """For a forward pass of n tokens in place of attn.attend(...), as a function of (attn, ...): model.py's value, once
    the twin was held against it, there with gradients, at the length T without.  docs (1, T or more) or None."""
    attns, functions = _twins(model)
    device, twin, near, far_own, far_twin = model.embed.weight.device, functions.get("mask"), None, None, None
    if docs is not None:
        where = torch.arange(T, device=device)
        two = (where >= 8).to(docs.dtype)[None]  # documents, one long enough for a window to bite
        with contextlib.suppress(TypeError):  # of another signature: then training does not call the twin either
            far_own = (twin.plain if twin else model.mask)(where, T, two)
            far_twin = model.mask(where, T, two) if twin else far_own
            if twin:  # a layer may have a mask of its own, which the twin never gets
                near, near_own = twin(where[:n], n, docs[:, :n]), twin.plain(where[:n], n, docs[:, :n])
                near = None if torch.is_tensor(near) else near  # nothing compiles, and the twin leaves all to model.py
    some = attns[::-(-len(attns) // max(SCORES // (model.cfg.n_heads * T * T), 1)) or 1]  # over the whole depth

    @functools.cache
    def at_full_length(fast, shapes):
        """Random q, k, v (1, heads, T, D), of the size they have after QK-norm, and what fast makes of them.  Of every
        second query the scores are those of a long training, where a cap on them would bite."""
        generator = torch.Generator(device).manual_seed(0)
        tensors = [torch.randn(1, H, T, D, device=device, generator=generator) for H, D in shapes]
        tensors[0][:, :, ::2] *= LARGE
        return tensors, _results(fast, tensors, far_twin, gradients=False)

    def one_head(tensors, head: int):
        return [part[:, i:i + 1] for part in tensors for i in [head * part.shape[1] // tensors[0].shape[1]]]

    def attend(attn, *args, **options):
        own, fast = (functools.partial(cls.attend, attn) for cls in (attn.plain, type(attn)))
        tensors, rest = args[:3], args[3:]
        blocked = near is not None and rest and torch.is_tensor(rest[0]) and torch.equal(rest[0], near_own)
        if blocked or attn.takes(*args, **options):
            more = dict(weights=[p for p in attn.parameters() if p.requires_grad], **options)
            equal = _agree(_results(own, tensors, *rest, **more),
                           _results(fast, tensors, *((near, *rest[1:]) if blocked else rest), **more))
            if equal:
                tensors, got = at_full_length(attn.fast, tuple((part.shape[1], part.shape[3]) for part in tensors))
                head = attns.index(attn) % tensors[0].shape[1]
                want = None if attn in some else _results(own, one_head(tensors, head), far_own, gradients=False)
                if want and want[0].shape[:2] == (1, 1):
                    got = got and [got[0][:, head:head + 1]]
                else:  # all heads, as of some, or where one cannot be asked alone
                    want = _results(own, tensors, far_own, gradients=False)
                equal = _agree(want, got)
            note("attention", equal)
        return own(*args, **options)
    return attend


def _compared_head(twin, note, hidden, weight, targets, **options):
    """In place of model.cross_entropy: model.py's value, once the twin was held against it, which under tensor
    parallelism has some rows of the weight."""
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    mesh, mine = twin.keywords.get("mesh"), lambda rows: rows
    if mesh is not None:
        mine = lambda rows: rows.chunk(mesh.size())[mesh.get_local_rank()]  # noqa: E731
    equal = True
    for size in (LARGE, 1):
        want = _results(twin.plain, (size * hidden, whole), targets, **options)
        got = _results(twin, (size * hidden, mine(whole)), targets, **options)
        equal = equal and _agree(want and [*want[:2], mine(want[2])], got)
    if mesh is not None:  # together: a head for one rank alone would wait for the others'
        verdict = torch.tensor(float(equal), device=hidden.device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=mesh.get_group())
        equal = bool(verdict)
    note("loss head", equal)
    return want[0] if want else twin.plain(hidden, whole, targets, **options)


def _results(function, tensors, *rest, gradients: bool = True, weights=(), **options) -> list | None:
    """function(*tensors, *rest, **options) in fp32 and, None where it has none, its gradients by tensors and weights;
    None where it cannot be called so."""
    try:
        tensors = [tensor.detach().float().requires_grad_(gradients) for tensor in tensors]
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            value = function(*tensors, *rest, **options)
            if not gradients:
                return [value]
            generator = torch.Generator(value.device).manual_seed(0)
            towards = torch.randn(value.shape, device=value.device, generator=generator)
            return [value.detach(), *torch.autograd.grad(value, [*tensors, *weights], towards, allow_unused=True)]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # another signature, other shapes, another format
        return None


def _agree(want, got) -> bool:
    """Whether all results are the same but for rounding.  NaN in model.py's is damage, of which training speaks."""
    def close(a, b):
        if a is None or b is None or a.shape != b.shape:
            return a is b
        size = a.norm()
        return not size.isfinite() or bool((b - a).norm() <= BOUND * size)
    return None not in (want, got) and all(map(close, want, got))


def _put_aside(model, same: dict, seconds: float) -> list[str]:
    """Let model.py's own stand where a twin is not the same; what to say."""
    attns, functions = _twins(model)
    if same.get("attention") is False:
        for attn in attns:
            attn.__class__ = attn.plain
        if "mask" in functions:
            model.mask = functions["mask"].plain
    if same.get("loss head") is False:
        model.cross_entropy = plain = functions["cross_entropy"].plain
        if "mesh" in functions["cross_entropy"].keywords:  # the weight has to be put together first
            model.cross_entropy = lambda hidden, weight, *args, **options: plain(
                hidden, weight.full_tensor(), *args, **options)
    lines = [f"the fast {what} does not compute what model.py computes: training goes on without it, slower. Was "
             f"{CHANGED[what]} changed? State it in the twin too (stack/twins.py names it), or leave it so."
             for what, well in same.items() if not well]
    if all(same.values()) and same:
        lines.append(f"fast {' and '.join(same)}: compared with model.py on the first batch, equal ({seconds:.1f} s)")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def rounding(model) -> float:
    """What may differ between two ways to compute a model's logits in the format of its weights, as share of the norm.
    Narrower than fp32, model.py's own rounding is up to 0.01 times the root of the layers, measured with 3 and 30."""
    return EXACT if model.embed.weight.dtype == torch.float32 else 0.02 * math.sqrt(model.cfg.n_layers)


@torch.no_grad()
def check_cache(model: GPT) -> GPT:
    """Let `generate` read with a cache where that gives the logits of `forward`; returns the model.  It does not where
    a change of model.py mixes tokens elsewhere than in attention, counts positions from 0 in every call, or changes
    `forward` and not `logits`."""
    device, T, parts = model.embed.weight.device, min(model.cfg.max_seq_len, 32), []
    small = sum(p.numel() for p in model.parameters()) <= WIDENED
    ids = (torch.arange(T, device=device)[None] + model.cfg.vocab_size // 3) % model.cfg.vocab_size
    with (_as_before(model), torch.compiler.set_stance("force_eager"), torch.autocast(device.type, enabled=False),
          _in_fp32(model) if small else contextlib.nullcontext()):
        model.eval()
        bound = rounding(model)
        want, cache = model(ids), KVCache(model.cfg, 1, T, device, model.embed.weight.dtype)
        for part in ids.tensor_split(sorted({T // 2, max(T - 2, 0), T - 1} - {0}), 1):  # several at once, then one
            parts.append(model.hidden(part, cache=cache))
        got = model.logits(torch.cat(parts, 1))
    model.cached = not (got - want).norm() > bound * want.norm()  # NaN: damaged weights, which sample_next speaks of
    if not model.cached:
        warnings.warn("with the cache of generate this model computes other logits than without: all is read again for "
                      "each token, slower. Was model.py changed? What mixes tokens or counts positions has to go by "
                      "`cache` and `where` in GPT.hidden, and what changes logits belongs in GPT.logits.",
                      stacklevel=3)
    return model


def fast_decoding(model: GPT) -> GPT:
    """Let `generate` decode fast: decode.cpp on a CPU, else one compiled program for all tokens; returns the model."""
    model.decoder = functools.partial(_decoder, {})
    return model


def _decoder(known: dict, model, cache, docs):
    """For GPT.decoder: the first of the fast steps that is model.py's.  known: up to which length of cache a step is so
    for the weights at some addresses, as they stood, with documents or without, or False."""
    weights = tuple((p.data_ptr(), p._version) for p in model.parameters())
    for make in [compiled_step] if model.embed.weight.device.type != "cpu" else [decode.Step, compiled_step]:
        key, size = (make, docs is None, weights), cache.k.shape[3]
        if known.get(key, 0) is False:
            continue
        try:
            step = make(model, cache, docs)
        except (AttributeError, KeyError, TypeError):  # parts that decode.cpp cannot read
            if make is not decode.Step:
                raise
            known[key] = False
            warnings.warn("decode.cpp does not know the parts of this model: decoding goes on compiled, slower.",
                          stacklevel=4)
            continue
        at = None if known.get(key, 0) >= size else _differs_at(make, step, model, cache, docs)
        if at is None:
            known[key] = max(size, known.get(key, 0))
            return step
        known[key] = False
        what = "decode.cpp" if make is decode.Step else "compiled decoding"
        warnings.warn(f"{what} does not compute what model.py computes, seen at token {at}: decoding goes on without "
                      "it. Was the model changed? State the change there too, or leave it so.", stacklevel=4)
    return plain_step(model, cache, docs)


def compiled_step(model, cache, docs):
    replace_attend(model, compiled.attend_once, _single)
    return compiled.decoder(model, cache, docs)


def _single(attn, q, k, v, mask) -> bool:
    return torch.compiler.is_compiling() and q.shape[2] == 1 and mask is not None


def plain_step(model, cache, docs):
    """model.py's own, as generate has it."""
    @torch.compiler.set_stance("force_eager")
    @sdpa_kernel(ANY_LENGTH)
    def step(ids):
        return model.logits(model.hidden(ids, docs=docs, cache=cache)[:, -1])
    return step


def _differs_at(make, step, model, cache, docs) -> int | None:
    """The length of context at which a step's logits are not model.py's: the next token's or the last that the cache
    can hold, for which what is still empty is filled at random, so that a window shows that is shorter."""
    size, generator = cache.k.shape[3], torch.Generator(cache.k.device).manual_seed(0)
    for part in (cache.k, cache.v):
        part[:, :, :, cache.length:].normal_(generator=generator)  # each place is written before it is read in earnest
    if make is compiled_step and not all(
            _attends_once(block.attn, model, cache, docs, layer) for layer, block in enumerate(model.blocks)
            if hasattr(getattr(block, "attn", None), "fast")):
        return size - 1
    if cache.k.dtype == torch.float32:
        return _first_difference(step, model, cache, docs, EXACT)
    if make is decode.Step and sum(p.numel() for p in model.parameters()) <= WIDENED:
        with _in_fp32(model):
            wide = copy.copy(cache)
            wide.k, wide.v = cache.k.float(), cache.v.float()
            at = _first_difference(make(model, wide, docs), model, wide, docs, EXACT)
        if at is not None:
            return at
    return _first_difference(step, model, cache, docs, rounding(model))


def _first_difference(step, model, cache, docs, bound: float) -> int | None:
    length, last, plain = cache.length, cache.k.shape[3] - 1, plain_step(model, cache, docs)
    ids = (torch.arange(cache.k.shape[1], device=cache.k.device)[:, None] + model.cfg.vocab_size // 3) % (
        model.cfg.vocab_size)  # not the first ones, whose rows may have moved little

    def written(at):  # what a step leaves in the cache, which all later ones read
        return torch.stack((cache.k[:, :, :, at], cache.v[:, :, :, at])).float()
    try:
        for at in sorted({min(length, last), last}):
            cache.length = at
            got, left = step(ids).clone(), written(at)
            cache.length = at
            want = plain(ids)
            if want.isnan().any():  # damaged weights, which sample_next speaks of
                return None
            if not (left - written(at)).norm() <= bound * written(at).norm():
                return at
            if not (got - want).norm() <= bound * want.norm() < math.inf:  # infinite: a change that forbids ids
                return at
    finally:
        cache.length = length
    return None


@contextlib.contextmanager
def _in_fp32(model):
    """The model's weights in fp32 while it lasts; they come back to where they were."""
    low = {tensor: tensor.data for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    try:
        for tensor in low:
            tensor.data = tensor.data.float()
        with torch.autocast(model.embed.weight.device.type, enabled=False):
            yield
    finally:
        for tensor, data in low.items():
            tensor.data = data


def _attends_once(attn, model, cache, docs, layer: int) -> bool:
    """Whether compiled.attend_once is attn's own attend for one query at the end of a full cache."""
    size, device, H = cache.k.shape[3], cache.k.device, model.cfg.n_heads
    k, v = cache.k[layer], cache.v[layer]
    q = torch.randn(len(k), H, 1, k.shape[3], device=device, generator=torch.Generator(device).manual_seed(0))
    mask = model.mask(torch.tensor([size - 1], device=device), size, docs)
    given = None if docs is None and model.is_causal else mask  # as GPT.hidden has it
    return _agree(_results(functools.partial(attn.plain.attend, attn), (q, k, v), given, gradients=False),
                  _results(compiled.attend_once, (q, k, v), mask, gradients=False))

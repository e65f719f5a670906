"""torch.compile where it pays: blocks, the loss head's arithmetic, attention under document masks, decoding.

Each piece computes what a function of model.py computes; twins.py attaches them to a built model and compares.
"""

import contextlib
import copy
import functools
import math
import operator
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import model as plain
from model import GPT, KVCache

COMPILE_FROM = 1 << 22  # logits per call from which compiling the chunk arithmetic pays for itself
# in a traced graph: what counts on strides as they were traced, or writes where `_version` does not tell (.data)
UNSEEN = "as_strided", "triton_kernel_wrapper", "_get_data_attr", "_foreach_"
VIEWS = {"view": "reshape", "view_as": "reshape_as"}  # the same of what is not contiguous
failed = False  # whether nothing compiles here, as found out by trying


def compile_or_not(function, random: bool = False):
    """torch.compile(function) for fixed shapes; the function itself, with one warning, where nothing compiles.

    On a CPU cheap operations are done again in the backward pass: 2.3 GB where keeping their results took 2.9 GB, and
    no slower (Stack-100M, 2 x 1024 tokens, 2 cores); operators of ours, like attention, are not cheap and are kept.
    GPUs, not measured, keep PyTorch's choice, and have linears merged.  random: it draws, as for dropout, which
    PyTorch (2.13) would do again too, with other random numbers.
    """
    backend = {"backend": merged} if torch.cuda.is_available() else {}
    fast = torch.compile(function, dynamic=False, **backend)

    def call(*args, **options):
        try:
            with torch._functorch.config.patch(aggressive_recomputation=not random and not _on_gpu(args),
                                               force_non_lazy_backward_lowering=True,  # else it fails amid backward()
                                               is_non_builtin_to_include=True):
                return fast(*args, **options)
        except Exception as error:  # found out by trying: a test compilation would cost seconds at every start
            if not is_compilers(error):
                raise
            warnings.warn(f"nothing is compiled, training is slower: {type(error).__name__}: {beginning(error)}\n  If "
                          "that is for want of a C++ compiler, install one; --compile=false does without.",
                          stacklevel=2)
            torch.compiler.set_stance("force_eager")  # for everything else too: each attempt costs seconds
            global failed
            failed = True
            return function(*args, **options)
    return call


def _on_gpu(inputs) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)


def merged(graph, inputs):
    """A backend for torch.compile: Inductor, given a graph whose linears are merged if it is for a GPU; the graph as it
    was, with a warning, where that does not compile."""
    from torch._inductor.compile_fx import compile_fx
    if not _on_gpu(inputs):
        return compile_fx(graph, inputs)
    try:
        return compile_fx(merge_linears(copy.deepcopy(graph)), inputs)
    except Exception as error:
        result = compile_fx(graph, inputs)  # what fails here too is not for want of merging
        warnings.warn("linears of one input are not merged, a step is some per cent slower: "
                      f"{type(error).__name__}: {beginning(error)}", stacklevel=2)
        return result


def merge_linears(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Of a traced graph, linears of one input (wq, wk, wv; w_gate, w_up) become one, and slices of what it returns: the
    input is read once, and its gradient is one matmul, not several and their sum.

    It sees what was traced, hooks included, whatever the model's code says.  Left alone are weights that are computed,
    sharded, not trained like the others, or in the products' format already: autocast's cast of the others becomes a
    copy into one matrix, these would need one of their own; what was written into; what the graph returns; and what
    nothing is learned from, whose weight would get zeros for a gradient instead of none.  A slice is not contiguous:
    views become reshapes, and a graph with what else may count on that, or write unseen, is left alone: operators that
    are not PyTorch's, views as another format.
    """
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # recomputed ones too
    if any(_opaque(node) for part in parts for node in part.graph.nodes):
        return graph
    for calls in (part.graph for part in parts):
        groups, returned = {}, {_memory(x) for node in calls.find_nodes(op="output") for x in node.all_input_nodes}
        for node in calls.find_nodes(op="call_function", target=F.linear):
            if node.kwargs:  # a bias by its name
                continue
            x, weight, bias = (*node.args, None)[:3]
            values = [n.meta.get("example_value") for n in (node, x, weight, bias) if n is not None]
            if (all(n is None or n.op == "placeholder" for n in (weight, bias)) and not any(
                    v is None or v._version or hasattr(v, "placements") for v in values)
                    and values[2].ndim == 2 and values[2].dtype != values[0].dtype
                    and all(v.shape == values[2].shape[:1] for v in values[3:])
                    and (not values[0].requires_grad or _is_learned_from(node))
                    and _memory(node) not in {None, *returned}):
                kind = bias is None, *((v.dtype, v.requires_grad) for v in values)
                groups.setdefault((x, *kind), []).append(node)
        for (x, bare, *_), nodes in groups.items():
            if len(nodes) == 1:
                continue
            with calls.inserting_before(nodes[0]):
                weight, bias = (calls.call_function(torch.cat, ([node.args[i] for node in nodes],))
                                if i == 1 or not bare else None for i in (1, 2))
                sizes = [node.meta["example_value"].shape[-1] for node in nodes]
                whole = calls.call_function(F.linear, (x, weight, bias))
                slices = calls.call_function(torch.split, (whole, sizes, -1))
                for i, node in enumerate(nodes):
                    mine = calls.call_function(operator.getitem, (slices, i))
                    mine.meta.update(node.meta)  # without it the compiler's cache does not take the graph
                    node.replace_all_uses_with(mine)
            for node in nodes:
                calls.erase_node(node)
    for part in parts:
        for node in part.graph.nodes:
            if node.op == "call_method" and node.target in VIEWS:
                node.target = VIEWS[node.target]
                node.kwargs = {"shape" if key == "size" else key: value for key, value in node.kwargs.items()}
        part.recompile()
    return graph


def _opaque(node) -> bool:
    """Whether a traced call may count on strides, or write where nothing tells."""
    name, given = str(node.target), [*node.args, *node.kwargs.values()]
    packet = getattr(node.target, "overloadpacket", node.target)
    foreign = isinstance(packet, torch._ops.OpOverloadPacket) and not str(packet).startswith(("aten.", "prims."))
    return foreign or any(word in name for word in UNSEEN) or (
        node.target == "view" and any(isinstance(x, torch.dtype) for x in given))


def _is_learned_from(node) -> bool:
    """Whether a gradient comes back to a traced tensor that asks for one: not where all its users are detached."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and not value.requires_grad:
        return False
    return any(user.op == "output" or _is_learned_from(user) for user in node.users)


def _memory(node):
    """What tells whether two traced tensors are views of the same; None where nothing does."""
    value = node.meta.get("example_value")
    with contextlib.suppress(NotImplementedError):  # as in vmap
        return StorageWeakRef(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def is_compilers(error: Exception) -> bool:
    """Raised by torch.compile itself, not by what it compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def beginning(error: Exception) -> str:
    """Two lines of what it says: the first may only say whose error it is."""
    return " ".join(str(error).splitlines()[:2])


compiled = functools.cache(compile_or_not)


def run_chunk(function, logits, *args):
    """function(logits, *args), compiled where that pays: logits (n, V), tensors among args (n, ...)."""
    if logits.numel() < COMPILE_FROM or logits.dtype == torch.float64 or len(logits) < 2:
        return function(logits, *args)
    for tensor in (logits, *(x for x in args if isinstance(x, torch.Tensor))):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one graph for all chunk lengths; a length of 1 would get its own
    return compiled(function)(logits, *args)


def chunk_arithmetic(*args):
    """model.chunk_arithmetic, as it stands there now, compiled where that pays."""
    return run_chunk(plain.chunk_arithmetic, *args)


# ---------------------------------------------------------------------------------------------------------------------
# Attention under document masks on a GPU


def document_mask(model: GPT, plain, where, size: int, docs, *more):
    """In place of GPT.mask, `plain`, while training: a BlockMask, of which whole blocks of unseen keys are left out."""
    dropout = model.training and model.cfg.dropout > 0  # FlexAttention has none
    if docs is None or size != len(where) or dropout or more or failed:
        return plain(where, size, docs, *more)
    from torch.nn.attention.flex_attention import create_block_mask

    def same_document(b, h, q, k):
        return (q >= k) & (docs[b, q] == docs[b, k])
    made = compiled(create_block_mask)(same_document, len(docs), None, size, size, str(docs.device))
    return plain(where, size, docs) if failed else made  # FlexAttention would hold all scores, seven times


def flex(q, k, v, mask):
    """In place of Attention.attend under a BlockMask: FlexAttention, to be compiled."""
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


class StillCache(KVCache):
    """A cache from whose length on each step is one token, attends to the whole buffer under a mask and finds its place
    in a tensor, so that all steps are one program: for torch.compile and CUDA graphs."""

    def __init__(self, cache: KVCache):
        self.k, self.v, self.length = cache.k, cache.v, cache.length
        self.position = torch.tensor([cache.length - 1], device=cache.k.device)  # of the token before

    def places(self, T: int):
        if self.length + T > self.k.shape[3]:
            return super().places(T)  # which refuses
        self.position += T
        return self.position, self.k.shape[3], True

    def go_to(self, length: int):
        if length != self.length:
            self.length = length
            self.position.fill_(length - 1)


def attend_once(q, k, v, mask):
    """In place of Attention.attend for a single query, for the compiler to fuse.  q (B, H, 1, D), k, v (B, K, S, D),
    mask bool (B or 1, 1, 1, S) -> (B, H, 1, D)."""
    B, H, _, D = q.shape
    q = q.view(B, k.shape[1], -1, 1, D).float()  # (B, K, H/K, 1, D)
    scores = (q * k[:, :, None].float()).sum(-1) / math.sqrt(D)  # (B, K, H/K, S)
    weights = torch.where(mask, scores, -torch.inf).softmax(-1)
    return (weights[..., None] * v[:, :, None].float()).sum(-2).to(v.dtype).view(B, H, 1, D)


class Recorded:
    """One decoding step as a CUDA graph, and the buffers it reads: recorded once, replayed for every generation of its
    batch and size.  A cache that is decoded with moves into the buffers; the one that was there leaves with a copy."""

    def __init__(self, step, still: StillCache, cache: KVCache, docs):
        self.still, self.docs, self.owner = still, docs, weakref.ref(cache)
        length = cache.length
        self.ids = torch.zeros(cache.k.shape[1], 1, dtype=torch.long, device=cache.k.device)
        for _ in range(2):  # compile and warm up before; the first true step overwrites what they wrote
            still.go_to(length)
            step(self.ids)
        still.go_to(length)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = step(self.ids)
        still.length = -1  # while recording nothing ran: the first replay puts the position right

    def __deepcopy__(self, memo):
        return None  # a copy of the model has its weights elsewhere

    def take(self, cache: KVCache, docs):
        before, at = self.owner(), cache.length
        if before is cache:
            return
        if before is not None:
            before.k, before.v = before.k.clone(), before.v.clone()
        for buffer, filled in ((self.still.k, cache.k), (self.still.v, cache.v)):
            buffer[:, :, :, :at] = filled[:, :, :, :at]
        cache.k, cache.v, self.owner = self.still.k, self.still.v, weakref.ref(cache)
        if docs is not None:
            self.docs.copy_(docs)

    def decoder(self, cache: KVCache, docs):
        def replay(newest):
            self.take(cache, docs)
            self.still.go_to(cache.length)
            self.ids.copy_(newest)
            self.graph.replay()  # the position moves in the graph
            self.still.length = cache.length = cache.length + 1
            return self.logits
        self.take(cache, docs)
        return replay


def decoder(model: GPT, cache: KVCache, docs, record: bool | None = None):
    """For GPT.decoder: a function of ids (B, 1) to logits (B, vocab_size), compiled; on CUDA replayed from a graph, of
    which the model keeps one per batch and size.  Raises OSError at the first step where nothing compiles."""
    for block in model.blocks:  # one program for all of them
        block.compile(dynamic=False, options={"size_asserts": False})
    head = compiled(type(model).logits)
    record = model.embed.weight.device.type == "cuda" if record is None else record
    weights = tuple(p.data_ptr() for p in model.parameters())  # where a graph reads them
    recorded, key = vars(model).setdefault("recorded", {}), (cache.k.shape, cache.k.dtype, docs is None, weights)
    if record and key in recorded:
        return recorded[key].decoder(cache, docs)
    still, docs_read = StillCache(cache), docs if docs is None or not record else docs.clone()

    def step(ids):
        try:
            return head(model, model.hidden(ids, docs=docs_read, cache=still)[:, -1])
        except Exception as error:
            if not is_compilers(error):
                raise
            raise OSError(f"nothing can be compiled here: {beginning(error)}\n"
                          "  Install a C++ compiler, or generate without compiling.") from error

    def following(ids):
        still.go_to(cache.length)
        logits = step(ids)
        cache.length = still.length
        return logits
    if not record:
        return following
    for other in [other for other in recorded if other[-1] != weights]:
        del recorded[other]
    recorded[key] = Recorded(step, still, cache, docs_read)
    return recorded[key].decoder(cache, docs)

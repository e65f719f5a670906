"""A residual stream in bfloat16: what has that format and what does not, and that a run is hardly another one."""

import json

import pytest
import runs
import torch

import train
from model import generate
from stack.device import round_residual
from stack.parallel.ranks import Ranks
from stack.parallel.sharding import parallelize

CPU = torch.device("cpu")


def seen_formats(model, **how) -> dict[str, set]:
    """Formats of what enters and leaves blocks, of the gradients there and of the weights'."""
    seen = {"stream": set(), "gradients": set()}

    def look(block, args, out):
        for x in (args[0], out):
            seen["stream"].add(x.dtype)
            if x.requires_grad:
                x.register_hook(lambda grad: seen["gradients"].add(grad.dtype))
    for block in model.blocks:
        block.register_forward_hook(look)
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = parallelize(model, Ranks(), CPU, dtype=torch.bfloat16, **how)(ids, ids)
    loss.backward()
    return seen | {"weights": {p.grad.dtype for p in model.parameters()}}


@pytest.mark.parametrize("changes", [dict(), dict(pos="learned", norm="layernorm", mlp="gelu", bias=True)])
@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_stream_and_its_gradient_are_rounded(tiny, changes, remat):
    """Between all blocks, and nothing of it where it is not asked for; weights and their gradients are fp32."""
    rounded = seen_formats(tiny(**changes), remat=remat, residual_dtype=torch.bfloat16)
    assert rounded["stream"] == rounded["gradients"] == {torch.bfloat16} and rounded["weights"] == {torch.float32}
    assert seen_formats(tiny(**changes), remat=remat)["stream"] == {torch.float32}


def test_without_autocast_nothing_is_rounded(tiny):
    """As where a model is compared in fp32, or evaluated in it."""
    model, ids = tiny(), torch.arange(32)[None]
    want = model(ids)
    round_residual(model, torch.bfloat16)
    assert torch.equal(model(ids), want) and generate(model, ids, max_new_tokens=4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "auto"])
def test_refused_where_nothing_would_be_saved(data, tmp_path, dtype):
    """auto is float32 on a CPU."""
    cfgs = runs.settings(data, tmp_path / "run", dtype=dtype, residual_dtype="bfloat16")
    with pytest.raises(ValueError, match=f"is {dtype.replace('auto', 'float32')}: nothing would be saved"):
        raise ValueError(cfgs[1].problems()[0]) if cfgs[1].problems() else train.run(*cfgs)


def test_a_run_is_hardly_another_one(data, tmp_path, run_eval):
    """Losses and held-out loss are those of the fp32 stream within bf16's rounding, and not the same; so is what
    eval.py finds, which sums in fp32."""
    seen, settings = {}, dict(dtype="bfloat16", max_steps=12, micro_batch_size=8, eval_interval=12, eval_tokens=10**6)
    for residual in ("float32", "bfloat16"):
        out = runs.run(data, tmp_path / residual, residual_dtype=residual, **settings)
        seen[residual] = [[line[key] for line in runs.log(out, key=key)] for key in ("loss", "val_loss")]
    (full, held), (rounded, held_rounded) = seen["float32"], seen["bfloat16"]
    assert rounded == pytest.approx(full, rel=5e-3) and held_rounded == pytest.approx(held, rel=5e-3)
    assert held_rounded != held
    said = run_eval(out, "--json", "--dtype=bfloat16")[1].splitlines()[-1]
    assert json.loads(said)["loss"] == pytest.approx(held_rounded[0], rel=1e-3)

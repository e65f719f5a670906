"""Ranks that hold parts of one model train it as one process does, and what they saved anyone goes on from."""

import hashlib
import sys
from pathlib import Path

import pytest
import runs
import torch
from test_parallel import in_fp32, run_ranks

import checkpoint
import optim
import parallel
import train
from parallel import Ranks, parallelize, read_ranks

CPU = torch.device("cpu")
SAME = dict(max_steps=5, eval_interval=2, eval_tokens=7 * 32, micro_batch_size=1, grad_clip=0.5)  # 8 sequences a step


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return runs.make_data(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="session")
def single(data, tmp_path_factory):
    """single(**changes): the run folder of one process."""
    made = {}

    def get(**changes):
        key = tuple(changes.items())
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
                made[key] = runs.run(data, tmp_path_factory.mktemp("single") / "run", **SAME | changes)
        return made[key]
    return get


def weights(path) -> dict:
    return checkpoint.load_model(path)[0].state_dict()


def assert_close(a, b, rel=1e-5):
    """The logs and final weights of two runs agree to float rounding."""
    one, two = runs.log(a), runs.log(b)
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for x, y in zip(one, two, strict=True):
        assert x == pytest.approx(y, rel=rel)
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=rel)


# ---------------------------------------------------------------------------------------------------------------------
# The same as one process


def spy():
    """In the process: note what the initial weights are, and how many reductions of gradients a step takes."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
    in_fp32()
    make, reduce, schedule, lines = train.parallelize, group.foreach_reduce, train.schedule, []

    def parallelize(model, *args, **kwargs):
        replica = make(model, *args, **kwargs)
        tensors = parallel.whole(model).state_dict().values()
        lines.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
        return replica

    def foreach_reduce(*args, **kwargs):
        lines[-1] += "+"
        return reduce(*args, **kwargs)

    def step(*args):
        lines.append("")
        Path(sys.argv[1]).with_suffix(f".{read_ranks().rank}").write_text("\n".join(lines))
        return schedule(*args)
    train.parallelize, group.foreach_reduce, train.schedule = parallelize, foreach_reduce, step


@pytest.mark.parametrize("n, changes", [
    (2, dict()), (4, dict(tie_embeddings=False)), (2, dict(optimizer="adamw", tie_embeddings=False)),
    (4, dict(optimizer="adamw")),
    (2, dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False))])
def test_fsdp_is_one_process(data, single, tmp_path, n, changes):
    """From the same initial weights to the bit, the same losses, norms before clipping, held-out losses and weights;
    each group's gradients are reduced once a step, however many micro batches there are."""
    out = run_ranks(data, tmp_path, n=n, prepare=spy, dp="fsdp", **SAME | changes)
    assert_close(single(**changes), out)
    first, *steps = (tmp_path / "run.config.0").read_text().splitlines()
    torch.manual_seed(1337)
    whole = parallelize(train.GPT(runs.settings(data, out, **changes)[0]), Ranks(), CPU)
    assert first == hashlib.sha256(b"".join(t.numpy().tobytes() for t in whole.state_dict().values())).hexdigest()
    assert steps[:4] == ["+++"] * 4  # two blocks and the root
    files = sorted(p.name for p in (out / "ckpt_last").iterdir())
    assert files == [*(f"shard-{i + 1:05}-model-00001-of-00001.safetensors" for i in range(n)), "state.json",
                     "tokenizer.json"]


@pytest.mark.parametrize("changes", [dict(tie_embeddings=False), dict(optimizer="adamw")])
def test_ddp_on_four(data, single, tmp_path, changes):
    assert_close(single(**changes), run_ranks(data, tmp_path, n=4, prepare=in_fp32, **SAME | changes))


def test_bf16_is_autocast(data, single, tmp_path):
    """Blocks gathered in bf16 compute what autocast makes of fp32 ones: the first loss, with gains of 1, to the last
    digits of fp32; later ones within bf16's."""
    changes = dict(dtype="bfloat16", optimizer="adamw")
    out = run_ranks(data, tmp_path, dp="fsdp", **SAME | changes)
    one, two = ([line["loss"] for line in runs.log(run, key="loss")] for run in (single(**changes), out))
    assert two[0] == pytest.approx(one[0], rel=1e-6) and two == pytest.approx(one, rel=2e-3)
    assert {t.dtype for t in weights(out).values()} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------------
# Recomputation, in this process


class Held(torch.utils._python_dispatch.TorchDispatchMode):
    """How many bytes that operations made inside are still alive, wherever they are kept."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(t):
                self.storages[id(t.untyped_storage()._cdata)] = torch.multiprocessing.reductions.StorageWeakRef(
                    t.untyped_storage()), t.untyped_storage().nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


def step(tiny, remat, compile=False, **changes):
    """Loss, bytes held between forward and backward, gradients of one step."""
    model = tiny(n_layers=4, **changes)
    ids = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(1))
    replica = parallelize(model, Ranks(), CPU, remat=remat, compile=compile)
    torch.manual_seed(2)
    held = Held()
    with held if not compile else torch.enable_grad():
        loss = replica(ids[:, :-1], ids[:, 1:])
    size = held.bytes()
    loss.backward()
    return loss.item(), size, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("changes", [dict(), dict(dropout=0.2, mlp="gelu", bias=True, norm="layernorm")])
def test_recomputation_changes_memory_only(tiny, monkeypatch, changes, compile):
    """The same loss and gradients, dropout too, from less between the passes: selective keeps the matmuls' outputs,
    block the residual stream only.  Compiled by everything but the code generation, which takes a minute."""
    monkeypatch.setattr(parallel, "compile_or_not", lambda f: torch.compile(
        f, backend="aot_eager_decomp_partition", dynamic=False))
    loss, kept, grads = step(tiny, "none", compile, **changes)
    for remat, share in (("selective", 0.8), ("block", 0.2)):
        other, size, others = step(tiny, remat, compile, **changes)
        assert other == pytest.approx(loss, rel=1e-6) and (compile or size < share * kept)
        for a, b in zip(grads, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

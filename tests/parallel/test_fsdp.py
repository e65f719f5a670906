"""Ranks that hold parts of one model train it as one process does, and what they saved anyone goes on from."""

import errno
import functools
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file
from test_account import LiveStorage
from test_parallel import assert_close, check_output, in_fp32, run_ranks, weights

import convert
import train
from stack import optim
from stack.checkpoint import tensors as checkpoint
from stack.parallel import sharding
from stack.parallel.ranks import Ranks, read_ranks
from stack.parallel.sharding import parallelize

CPU = torch.device("cpu")
SAME = dict(max_steps=5, eval_interval=2, eval_tokens=7 * 32, micro_batch_size=1, grad_clip=0.5)  # 8 sequences a step


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


# ---------------------------------------------------------------------------------------------------------------------
# The same as one process


def spy():
    """In the process: note the initial weights, and for each step a + per reduction of gradients and an o per matrix
    orthogonalized."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
    in_fp32()
    make, reduce, schedule, lines = train.parallelize, group.foreach_reduce, train.schedule, []
    orthogonalize = optim.Muon._orthogonalize

    def parallelize(model, *args, **kwargs):
        replica = make(model, *args, **kwargs)
        tensors = sharding.whole(model).state_dict().values()
        lines.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())
        return replica

    def foreach_reduce(*args, **kwargs):
        lines[-1] += "+"
        return reduce(*args, **kwargs)

    def counted(self, update):
        lines[-1] += "o" * len(update)
        return orthogonalize(self, update)

    def step(*args):
        lines.append("")
        Path(sys.argv[1]).with_suffix(f".{read_ranks().rank}").write_text("\n".join(lines))
        return schedule(*args)
    train.parallelize, group.foreach_reduce, train.schedule = parallelize, foreach_reduce, step
    optim.Muon._orthogonalize = counted


@pytest.mark.parametrize("n, changes", [
    (2, dict()), (4, dict(tie_embeddings=False, d_ff=50, head_dim=6)),  # 13 + 13 + 13 + 11 rows, gains of 2 + 2 + 2 + 0
    (4, dict(optimizer="adamw")),
    (2, dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False))])
def test_fsdp_is_one_process(data, single, tmp_path, n, changes):
    """From the same initial weights to the bit, the same losses, norms before clipping, held-out losses and weights;
    each group's gradients are reduced once a step, however many micro batches there are, and each matrix is
    orthogonalized on one rank."""
    out = run_ranks(data, tmp_path, n=n, prepare=spy, dp="fsdp", **SAME | changes)
    assert_close(single(**changes), out)
    first = (tmp_path / "run.config.0").read_text().split()[0]
    torch.manual_seed(1337)
    whole = parallelize(train.GPT(runs.settings(data, out, **changes)[0]), Ranks(), CPU)
    assert first == hashlib.sha256(b"".join(t.numpy().tobytes() for t in whole.state_dict().values())).hexdigest()
    ranks = [(tmp_path / f"run.config.{rank}").read_text().splitlines()[1:5] for rank in range(n)]
    assert {line.count("+") for lines in ranks for line in lines} == {3}  # two blocks and the root
    matrices = sum(p.ndim == 2 for p in whole.blocks.parameters()) if "optimizer" not in changes else 0
    assert [sum(line.count("o") for line in lines) for lines in zip(*ranks, strict=True)] == [matrices] * 4
    files = sorted(p.name for p in (out / "ckpt_last").iterdir())
    assert files == [*(f"shard-{i + 1:05}-model-00001-of-00001.safetensors" for i in range(n)), "state.json",
                     "tokenizer.json"]


@pytest.mark.parametrize("changes", [dict(tie_embeddings=False), dict(optimizer="adamw")])
def test_ddp_on_four(data, single, tmp_path, changes):
    assert_close(single(**changes), run_ranks(data, tmp_path, n=4, prepare=in_fp32, **SAME | changes))


@pytest.mark.parametrize("residual", ["float32", "bfloat16"])
def test_bf16_is_autocast(data, single, tmp_path, residual):
    """Blocks gathered in bf16 compute what autocast makes of fp32 ones: the first loss, with gains of 1, to the last
    digits of fp32; later ones within bf16's."""
    changes = dict(dtype="bfloat16", optimizer="adamw", residual_dtype=residual)
    out = run_ranks(data, tmp_path, dp="fsdp", **SAME | changes)
    one, two = ([line["loss"] for line in runs.log(run, key="loss")] for run in (single(**changes), out))
    assert two[0] == pytest.approx(one[0], rel=1e-6) and two == pytest.approx(one, rel=2e-3)
    one, two = (runs.log(run, key="val_loss")[-1]["val_loss"] for run in (single(**changes), out))  # put together
    assert two == pytest.approx(one, rel=2e-3)
    assert {t.dtype for t in weights(out).values()} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------------
# What they save


def stop_after_one_step():
    stop_after(1)


def stop_after_three_steps():
    stop_after(3)


def stop_after(n, signal=15, rank=None):
    in_fp32()
    schedule, taken = train.schedule, []

    def stop(*args):
        taken.append(None)
        if len(taken) == n and read_ranks().rank in (rank, *([0] if rank is None else [])):
            os.kill(os.getpid(), signal)
        return schedule(*args)
    train.schedule = stop


def shards(run) -> dict:
    return {f"{file.name} {key}": tensor for file in (Path(run) / "ckpt_last").glob("shard-*")
            for key, tensor in load_file(file).items()}


def test_resume_in_the_same_layout_is_exact(data, tmp_path):
    """3 + 2 steps on two ranks are 5, bit for bit, dropout and the log too."""
    changes = SAME | dict(dp="fsdp", dropout=0.1)
    straight = run_ranks(data, tmp_path / "straight", prepare=in_fp32, **changes)
    stopped = run_ranks(data, tmp_path / "parts", prepare=stop_after_three_steps, **changes)
    assert runs.progress(stopped)["step"] == 3
    run_ranks(data, tmp_path / "parts", "--init_from=resume", prepare=in_fp32, **changes)
    one, two = shards(straight), shards(stopped)
    assert one.keys() == two.keys() and [key for key in one if not torch.equal(one[key], two[key])] == []
    assert runs.log(straight) == runs.log(stopped) and runs.progress(straight) == runs.progress(stopped)


def test_resume_across_layouts(data, single, tmp_path, monkeypatch):
    """One process, two sharded ranks, four, two replicas, one process: a step each, and it is still the same run."""
    run = run_ranks(data, tmp_path, prepare=stop_after_one_step, n=1, **SAME)
    for n, dp in ((2, "fsdp"), (4, "fsdp"), (2, "ddp")):
        run_ranks(data, tmp_path, "--init_from=resume", prepare=stop_after_one_step, n=n, dp=dp, **SAME)
        assert (run / "ckpt_last/model.safetensors").exists() == (dp == "ddp")
    monkeypatch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
    runs.run(data, run, init_from="resume", **SAME)
    assert_close(single(), run)


def test_saves_run_beside_training(data, single, tmp_path):
    """Every step saved while the next ones run: each checkpoint holds its own step, whole, in every copy kept."""
    out = run_ranks(data, tmp_path, prepare=in_fp32, dp="fsdp", **SAME | dict(save_interval=1, keep=9))
    one = single(save_interval=1, keep=9)
    for step in range(1, 6):
        name = f"ckpt_step_{step:07}"
        assert runs.progress(out, name)["step"] == step
        a, b = weights(one / name), weights(out / name)
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-5)
    assert not list(out.glob("*.new"))


def kill_rank_1_in_step_3():
    stop_after(3, signal=9, rank=1)


def test_a_killed_rank_ends_the_job(data, tmp_path):
    """The other one cannot go on and does not wait; what was saved before is whole, and one process goes on from it."""
    changes = SAME | dict(save_interval=1, dp="fsdp", eval_interval=0)
    processes = runs.start_ranks(2, runs.settings(data, tmp_path / "run", **changes), tmp_path / "output",
                                 prepare=kill_rank_1_in_step_3)
    codes = runs.finish(*processes)
    assert codes[0] not in (0, None) and codes[1] == -9
    assert runs.progress(tmp_path / "run")["step"] in (1, 2)
    assert runs.progress(runs.run(data, tmp_path / "run", init_from="resume", **changes))["step"] == 5


def fill_rank_1s_disk_once():
    """In the process: rank 1's second part does not fit, all others do."""
    from torch.distributed.checkpoint import FileSystemWriter
    in_fp32()
    write, calls = FileSystemWriter._write_data, []

    def once(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2 and read_ranks().rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args, **kwargs)
    FileSystemWriter._write_data = once


def test_a_full_disk_on_one_rank(data, single, tmp_path):
    """Is said once, on behalf of the run; the checkpoint before stays, training goes on, and the next save succeeds."""
    out = run_ranks(data, tmp_path, prepare=fill_rank_1s_disk_once, dp="fsdp",
                    **SAME | dict(save_interval=1, keep=9, eval_interval=0))
    assert sorted(p.name for p in out.glob("ckpt_*")) == ["ckpt_last"] + [f"ckpt_step_000000{n}" for n in (1, 3, 4, 5)]
    said = check_output(tmp_path)
    assert said.count("ckpt_last could not be saved: No space left on device. The one before it is intact.") == 1
    assert_close(single(eval_interval=0), out)


def damage(folder, change):
    file = sorted(folder.glob("shard-*"))[1]
    file.write_bytes(change(file.read_bytes()))
    return file.name


@pytest.mark.parametrize("change, says", [(lambda b: b[:-1] + bytes([b[-1] ^ 1]), "sha256"),
                                          (lambda b: b[:-4], "bytes")])
def test_damage_is_named(data, tmp_path, sharded_run, change, says):
    shutil.copytree(sharded_run / "ckpt_last", tmp_path / "ckpt_last")
    name = damage(tmp_path / "ckpt_last", change)
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        model = train.GPT(runs.settings(data, "-")[0])
        checkpoint.load_optimizers(tmp_path, model, optim.make_optimizers(model))


@pytest.fixture(scope="session")
def sharded_run(data, tmp_path_factory):
    return run_ranks(data, tmp_path_factory.mktemp("sharded"), dp="fsdp", **SAME | dict(max_steps=1, warmup_steps=1))


def test_everything_reads_a_sharded_run(data, sharded_run, tiny):
    """Weights in another format on the way; what does not fit is refused as from one file."""
    model, _, state = checkpoint.load_model(sharded_run, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and state["progress"]["step"] == 1
    with pytest.raises(ValueError, match="missing: head.weight .the file's tables are tied"):
        checkpoint.load_weights(train.GPT(runs.settings(data, "-", tie_embeddings=False)[0]), sharded_run)
    model = train.GPT(runs.settings(data, "-")[0])
    with pytest.raises(ValueError, match="blocks.0.attn.wq.weight is Muon's, the run uses AdamW"):
        checkpoint.load_optimizers(sharded_run, model, optim.make_optimizers(model, optimizer="adamw"))


def test_gathered_it_is_an_ordinary_run(data, sharded_run, tmp_path):
    """convert.py gather: the same weights, moments and next steps, from model.safetensors and optim.pt."""
    convert.main(["gather", str(sharded_run), str(tmp_path / "gathered")])
    assert sorted(p.name for p in (tmp_path / "gathered/ckpt_last").iterdir()) == [
        "model.safetensors", "optim.pt", "state.json", "tokenizer.json"]
    shutil.copytree(sharded_run, tmp_path / "parts")
    for name in ("parts", "gathered"):
        runs.run(data, tmp_path / name, init_from="resume", **SAME | dict(max_steps=3, warmup_steps=1))
    runs.assert_same_checkpoint(tmp_path / "parts", tmp_path / "gathered")


# ---------------------------------------------------------------------------------------------------------------------
# Recomputation, in this process


def step(tiny, remat, compile=False, **changes):
    """Loss, bytes held between forward and backward, gradients of one step."""
    model = tiny(n_layers=4, **changes)
    ids = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(1))
    replica = parallelize(model, Ranks(), CPU, remat=remat, compile=compile)
    torch.manual_seed(2)
    held = LiveStorage()
    with torch.enable_grad() if compile else held:
        loss = replica(ids[:, :-1], ids[:, 1:])
    size = held.live()
    loss.backward()
    return loss.item(), size, [p.grad for p in model.parameters()]


def without_code(monkeypatch):
    torch._dynamo.reset()
    compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compile)


def test_dropout_is_the_same_in_backward(tiny, monkeypatch):
    """Along the gradient of compiled blocks the loss, under the dropout it was drawn with, rises by its length."""
    without_code(monkeypatch)
    model = tiny(dropout=0.4)
    ids = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(1))
    replica, params = parallelize(model, Ranks(), CPU, compile=True), list(model.parameters())

    def loss():
        torch.manual_seed(2)
        return replica(ids[:, :-1], ids[:, 1:])
    loss().backward()
    grads = [p.grad for p in params]
    length, losses = torch.nn.utils.get_total_norm(grads).item(), []
    for far in (0.01, -0.02):
        torch._foreach_add_([p.data for p in params], grads, alpha=far / length)
        losses.append(loss().item())
    assert (losses[0] - losses[1]) / 0.02 == pytest.approx(length, rel=0.01)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("changes", [dict(), dict(dropout=0.2, mlp="gelu", bias=True, norm="layernorm")])
def test_recomputation_changes_memory_only(tiny, monkeypatch, changes, compile):
    """The same loss and gradients, dropout too, from less between the passes: selective keeps the matmuls' outputs,
    block the residual stream only.  Compiled by everything but the code generation, which takes a minute."""
    without_code(monkeypatch)
    loss, kept, grads = step(tiny, "none", compile, **changes)
    for remat, share in (("selective", 0.8), ("block", 0.35)):
        other, size, others = step(tiny, remat, compile, **changes)
        assert other == pytest.approx(loss, rel=1e-6) and (compile or size < share * kept)
        for a, b in zip(grads, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

"""Two processes train the model that one does: the same losses, gradients, weights and evaluations; none goes alone."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import runs
import torch
from safetensors.torch import load_file

import train
from stack import optim, start
from stack.checkpoint import tensors as checkpoint
from stack.data.batches import TokenData, iterate_windows
from stack.evaluation.held_out import evaluate
from stack.parallel import ranks as group
from stack.parallel.ranks import Ranks, connect, read_ranks

CPU = torch.device("cpu")


# 5 steps of 8 sequences; held-out windows that do not divide by the ranks
SAME = dict(max_steps=5, eval_interval=2, eval_tokens=7 * 32, micro_batch_size=2, grad_clip=0.5)


@pytest.fixture(scope="session")
def single(data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
        return runs.run(data, tmp_path_factory.mktemp("single") / "run", **SAME)


def in_fp32():
    """In the process: Muon in fp32, since its bf16 would turn the last bit of a sum into 8e-5 of a weight."""
    optim.fastest_matmul_dtype = lambda device: torch.float32


def weights(path) -> dict:
    return checkpoint.load_model(path)[0].state_dict()


def assert_close(a, b):
    """The logs and final weights of two runs agree to float rounding."""
    one, two = runs.log(a), runs.log(b)
    assert [line.keys() for line in one] == [line.keys() for line in two]
    for x, y in zip(one, two, strict=True):
        assert x == pytest.approx(y, rel=1e-5)
    torch.testing.assert_close(weights(a), weights(b), rtol=0, atol=2e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Under torchrun, as users start it

SPY = """
import hashlib, sys, torch, train
from stack import optim
from pathlib import Path
real, models, optim.fastest_matmul_dtype = train.parallelize, [], lambda device: torch.float32
def parallelize(model, *args, **kwargs):
    models.append(model)
    replica = real(model, *args, **kwargs)
    syncs = []
    forward = replica.forward
    def spied(*args, **kwargs):  # what DDP reads in its forward
        syncs.append(replica.require_backward_grad_sync)
        return forward(*args, **kwargs)
    replica.forward = spied
    models.append(syncs)
    return replica
train.parallelize = parallelize
if sys.argv[-1] == "--fail":
    sys.argv.pop()
    def evaluate(model, *args, ranks, **kwargs):
        if ranks.rank == 1:
            raise RuntimeError("rank 1 has had enough")
        return old(model, *args, ranks=ranks, **kwargs)
    old, train.evaluate = train.evaluate, evaluate
train.main()
model, syncs = models
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
name = f"rank{train.read_ranks().rank}"
(Path(__file__).parent / name).write_text(f"{weights} {''.join('01'[s] for s in syncs)}")
"""


def torchrun(folder, configs, *flags, timeout=600):
    train.save_json(folder / "config.json", configs)
    (folder / "spy.py").write_text(SPY)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(runs.ROOT)}
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(folder / "spy.py"), str(folder / "config.json"), *flags],
                          env=env, capture_output=True, text=True, timeout=timeout)


def test_torchrun(data, single, tmp_path):
    """2 ranks x 2 micro batches give the losses, norms, held-out losses and weights of 1 x 4; ranks stay bit-identical;
    gradients travel once a step, decided before the forward of its last micro step (F43); nothing complains (F47)."""
    done = torchrun(tmp_path, runs.settings(data, tmp_path / "run", **SAME))
    assert done.returncode == 0, done.stderr
    assert_close(single, tmp_path / "run")
    ranks = [(tmp_path / f"rank{r}").read_text() for r in (0, 1)]
    assert ranks[0] == ranks[1] and ranks[0].endswith(" " + "01" * 5)
    assert "destroy_process_group" not in done.stderr and "Warning" not in done.stderr, done.stderr
    assert done.stdout.count("step      5/5 | loss") == 1  # one rank speaks


def test_a_rank_that_raises_ends_the_job(data, tmp_path):
    """With an exit code that says so and the rank's own words; what was saved before is there."""
    done = torchrun(tmp_path, runs.settings(data, tmp_path / "run", **SAME | dict(save_interval=1)), "--fail")
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    assert runs.progress(tmp_path / "run")["step"] == 2


# ---------------------------------------------------------------------------------------------------------------------
# Ranks forked from a server, which is faster


def check_output(folder, n=2):
    return "\n".join((folder / f"output.{rank}").read_text() for rank in range(n))


def run_ranks(data, folder, *flags, prepare=None, n=2, **changes):
    processes = runs.start_ranks(n, runs.settings(data, folder / "run", **changes), folder / "output", *flags,
                                 prepare=prepare)
    codes = runs.finish(*processes)
    assert codes == [0] * n, check_output(folder, n)
    return folder / "run"


def spoil_a_gradient_on_rank_1():
    """In the process: an inf in rank 1's first micro step of step 2, where no other rank sees it yet."""
    make = train.parallelize

    def parallelize(model, ranks, *args, **kwargs):
        def spoil(grad):
            calls.append(grad)
            return grad * float("inf") if ranks.rank == 1 and len(calls) == 5 else grad
        calls = []
        model.norm.weight.register_hook(spoil)
        return make(model, ranks, *args, **kwargs)
    train.parallelize = parallelize


def test_a_bad_gradient_on_one_rank(data, tmp_path):
    """Both skip that step together: they go on bit-identical, and say so once."""
    out = run_ranks(data, tmp_path, prepare=spoil_a_gradient_on_rank_1, **SAME | dict(save_interval=1, keep=9))
    assert [line["grad_norm"] is None for line in runs.log(out, key="loss")] == [False, False, True, False, False]
    before, after = (load_file(out / f"ckpt_step_000000{step}" / "model.safetensors") for step in (2, 4))
    assert not any(torch.equal(before[k], after[k]) for k in before if before[k].ndim == 2)
    assert check_output(tmp_path).count("the step is skipped") == 1


def stop_after_3_steps_by_rank_1():
    in_fp32()
    schedule = train.schedule

    def stop(cfg, step):
        if step == 2 and read_ranks().rank == 1:
            os.kill(os.getpid(), 15)
        return schedule(cfg, step)
    train.schedule = stop


def test_resume_on_two_ranks_and_on_one(data, single, tmp_path, monkeypatch):
    """A signal to one rank stops both after the same step; 3 + 2 steps on two ranks are 5, bit for bit; going on with
    one rank neither repeats nor leaves out a sequence: F26."""
    straight = run_ranks(data, tmp_path / "straight", prepare=in_fp32, **SAME | dict(dropout=0.1))
    stopped = run_ranks(data, tmp_path / "parts", prepare=stop_after_3_steps_by_rank_1, **SAME | dict(dropout=0.1))
    assert runs.progress(stopped)["step"] == 3
    run_ranks(data, tmp_path / "parts", "--init_from=resume", prepare=in_fp32, **SAME | dict(dropout=0.1))
    runs.assert_same_checkpoint(straight, stopped)
    assert runs.log(straight) == runs.log(stopped)

    mixed = run_ranks(data, tmp_path / "mixed", prepare=stop_after_3_steps_by_rank_1, **SAME)
    monkeypatch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
    runs.run(data, mixed, init_from="resume", **SAME)
    assert_close(single, mixed)


def test_uneven_tokens(data, tmp_path, monkeypatch):
    """With targets ignored in some micro batches more than in others, 1 x 4, 2 x 2 and 4 x 1 (ranks x accumulation)
    have the same loss and gradient norm before clipping."""
    changes = dict(max_steps=2, grad_clip=0.1, micro_batch_size=2)
    one, two, four = (runs.log(run_ranks(data, tmp_path / str(n), prepare=ignore_some_targets, n=n, **changes))
                      for n in (1, 2, 4))
    for other in (two, four):
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in other] == pytest.approx([line[key] for line in one], rel=2e-5)


def in_a_folder_of_its_own():
    """In the process: the ranks' own folders, of two machines that share none."""
    os.chdir(os.environ["RANK"])


@pytest.mark.parametrize("what", ["settings", "data", "no data"])
def test_ranks_that_would_train_something_else(data, tmp_path, monkeypatch, what):
    """Other settings, or other data under the same name, are refused by all ranks, by name and with who has what;
    nothing is trained, nobody is left waiting."""
    configs, flags, prepare = runs.settings(data, tmp_path / "run", **SAME), [[], []], None
    if what == "settings":
        flags[1] = ["--adamw_lr=0.001", "--micro_batch_size=1", "--dp=fsdp"]
        said = ["adamw_lr: 0.003 on rank 0; 0.001 on rank 1", "micro_batch_size: 2 on rank 0; 1 on rank 1",
                "dp: ddp on rank 0; fsdp on rank 1"]
    else:
        meta = json.loads((data / "meta.json").read_text())
        for rank in "01":
            shutil.copytree(data, tmp_path / rank / "data")
            meta["data_fingerprint"] = rank * 64
            (tmp_path / rank / "data" / "meta.json").write_text(json.dumps(meta))
        configs, prepare = runs.settings("data", tmp_path / "run", **SAME), in_a_folder_of_its_own
        said = [f"data: {'0' * 12} on rank 0; {'1' * 12} on rank 1"]
        if what == "no data":
            shutil.rmtree(tmp_path / "1" / "data")
            said = ["data not found."]
    monkeypatch.chdir(tmp_path)
    assert runs.finish(*runs.start_ranks(2, configs, tmp_path / "output", prepare=prepare, of_rank=flags)) == [2, 2]
    for rank in range(2):
        output = (tmp_path / f"output.{rank}").read_text()
        assert all(line in output for line in said) and "Traceback" not in output, output
        assert output.count(" on rank 1") == len(said) * (what != "no data")
    assert not (tmp_path / "run").exists()


def test_ranks_that_differ_are_named():
    """Of many ranks: which have which value, and what only some have."""
    facts = [{"lr": 1, "seed": 2}] * 20
    group.compare(facts)
    with pytest.raises(ValueError, match=r"lr: 1 on rank 0, 2, 3, 4, 5, 6, 7, 8, \.\.\.; 3 on rank 1\n.*\n.*new: not"):
        group.compare([facts[0], {"lr": 3, "seed": 2}, *facts[2:19], {"lr": 1, "new": 5}])


def test_the_code_that_trains(tmp_path, monkeypatch):
    """A changed, a new or a missing file of what trains is a difference by its name."""
    configs = runs.settings("data", "out")
    before = start.what_trains(*configs)
    assert {"model.py", "train.py", "stack/optim.py", "stack/cpu/kernels.cpp", "adamw_lr", "torch"} <= before.keys()
    for name in ("model.py", "train.py"):
        shutil.copy(runs.ROOT / name, tmp_path)
    shutil.copytree(runs.ROOT / "stack", tmp_path / "stack")
    monkeypatch.setattr(start, "ROOT", tmp_path)
    assert start.what_trains(*configs) == before
    (tmp_path / "stack/optim.py").open("a").write("\n")
    (tmp_path / "stack/log.py").rename(tmp_path / "stack/logs.py")
    after = start.what_trains(*configs)
    assert {name for name, _ in before.items() ^ after.items()} == {"stack/optim.py", "stack/log.py", "stack/logs.py"}


def ignore_some_targets():
    class Batches(train.Batches):
        def __next__(self):
            x, y, docs = super().__next__()
            y = torch.where(y % 3 == 0, -100, y)
            return x, torch.where(y[:, :1] % 2 == 0, -100, y), docs
    train.Batches = Batches


# ---------------------------------------------------------------------------------------------------------------------
# Without processes


class Half(Ranks):
    """One of two ranks whose sums with the other's are made by hand."""

    def sum(self, tensor):
        self.mine = tensor.clone()
        return tensor


@pytest.mark.parametrize("n_windows", [1, 5, 8])
def test_shares_of_an_evaluation_add_up(data, tiny, n_windows):
    """Ranks evaluate disjoint shares, also uneven or empty ones, whose sums are those of one process: F45."""
    val, model = TokenData(data, "val", seq_len=16), tiny(vocab_size=320)
    sizes = torch.ones(320, dtype=torch.int32).numpy()
    whole = evaluate(model, iterate_windows(val, 2, max_windows=n_windows), sizes, device=CPU)
    shares = [Half(rank, rank, 2) for rank in (0, 1)]
    for share in shares:
        windows = iterate_windows(val, 2, max_windows=n_windows, rank=share.rank, world_size=2)
        try:
            evaluate(model, windows, sizes, device=CPU, ranks=share)
        except ValueError:
            assert n_windows == 1 and share.rank == 1
    nats, tokens, n_bytes = (shares[0].mine + shares[1].mine).tolist()
    assert (tokens, n_bytes) == (whole["tokens"], whole["bytes"])
    assert nats / tokens == pytest.approx(whole["loss"], rel=1e-7)


@pytest.mark.parametrize("env, ranks", [
    ({}, Ranks()),
    (dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1"), Ranks()),  # a cluster's leftover: nobody to meet
    (dict(MASTER_ADDR="node0"), Ranks()),
    (dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="node0"), Ranks(5, 1, 8)),
    (dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_RUN_ID="x"), Ranks()),
])
def test_who_am_i(monkeypatch, env, ranks):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert read_ranks() == ranks


@pytest.mark.parametrize("env", [dict(RANK="3"), dict(WORLD_SIZE="0"), dict(RANK="", WORLD_SIZE="2"),
                                 dict(RANK="x"), dict(RANK="-1", WORLD_SIZE="2")])
def test_a_rank_that_cannot_be_is_refused(monkeypatch, env):
    """RANK=3 of one process would train, write nothing and end well."""
    for key, value in {**dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="node0"), **env}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="RANK=.*WORLD_SIZE=.*unset"):
        read_ranks()


def test_groups_that_do_not_divide_are_refused(monkeypatch):
    for key, value in dict(RANK="0", WORLD_SIZE="3", MASTER_ADDR="node0").items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="tp is 2, and 3 processes"):
        read_ranks(tp=2)


def test_a_leftover_rank_is_harmless(data, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert runs.progress(runs.run(data, tmp_path / "run", max_steps=1))["step"] == 1


def test_batch_that_does_not_divide(data, tmp_path, monkeypatch):
    """Refused before any group is joined, with the numbers and the nearest that work: F03."""
    monkeypatch.setattr(start, "read_ranks", lambda tp: Ranks(0, 0, 3))
    found = start.check(*runs.settings(data, tmp_path))
    said = "batch_tokens ({}) must be a multiple of seq_len * micro_batch_size * ranks (32 * 2 * 3 = 192). "
    assert found == [said.format(256) + "Set it to 192 or 384."]
    found = start.check(*runs.settings(data, tmp_path, batch_tokens=288))
    assert found == [said.format(288) + "Set it to 192 or 384, or micro_batch_size to 1."]


def test_gpus(monkeypatch):
    """Each rank takes the GPU of its local rank, and says so where there is none; the GPU count divides nothing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(group.dist, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(group, "meet", lambda ranks, facts: None)
    monkeypatch.setattr(group, "init_device_mesh", lambda device, shape, mesh_dim_names: (shape, mesh_dim_names))
    joined = []
    assert connect(Ranks(9, 1, 16), torch.device("cuda"), {}) == torch.device("cuda:1")
    assert connect(Ranks(), torch.device("cuda:1"), {}) == torch.device("cuda:1")
    assert connect(Ranks(3, 3, 4), CPU, {}) == CPU
    assert joined == ["nccl", "gloo"]
    connect(ranks := Ranks(3, 3, 8, tp=2), CPU, {})
    assert ranks.mesh == ((4, 2), ("dp", "tp")) and (ranks.dp_rank, ranks.dp_size) == (1, 4)
    with pytest.raises(ValueError, match="no GPU for local rank 2: PyTorch sees 2"):
        connect(Ranks(2, 2, 4), torch.device("cuda"), {})
    with pytest.raises(ValueError, match="each of the 2 ranks needs a GPU of its own"):
        connect(Ranks(0, 0, 2), torch.device("cuda:0"), {})

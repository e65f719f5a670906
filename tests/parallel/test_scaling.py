"""docs/scaling.md: its byte counts are what ranks send, its tables are its formulas."""

import re
import shlex

import pytest
import runs
import torch
import torch.distributed as dist
from conftest import ROOT
from test_tensor_parallel import Watch
from torch.distributed.device_mesh import init_device_mesh

from model import GPT, ModelConfig
from stack import roofline
from stack.config import load
from stack.counts import build, num_params
from stack.memory import optimizers_of, train_state_bytes
from stack.parallel import sharding
from stack.parallel.ranks import Ranks
from stack.train_config import TrainConfig

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SHAPES = {
    "100M": ModelConfig(),
    "1B": ModelConfig(vocab_size=128256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, d_ff=8192, qk_norm=False),
    "7B": ModelConfig(vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=128, d_ff=11008,
                      qk_norm=False, tie_embeddings=False),
}
LINKS = (450, 32, 50)  # GB/s in one direction: NVLink, PCIe 4.0 x16, InfiniBand
TINY = ModelConfig(vocab_size=512, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64)


def work(cfg: ModelConfig, way: str, tokens: int, micro_steps: int) -> dict[str, int]:
    """Bytes that a step's collectives work on, as the page has them."""
    counts, C, L = num_params(cfg), cfg.d_model, cfg.n_layers
    P, B = counts["total"], L * counts["per_block"]
    return {"ddp": {"allreduce": 4 * P},
            "fsdp": {"allgather": micro_steps * (4 * B + 4 * (P - B)), "reducescatter": 4 * P},
            "tp": {"allreduce": micro_steps * tokens * (12 * L * C + 8 * C + 12)}}[way]


def sent(done: dict[str, int], n: int) -> float:
    """By each of n ranks in a ring."""
    return sum((2 if kind == "allreduce" else 1) * size * (n - 1) / n for kind, size in done.items())


def collectives_on_a_rank(way: str) -> list[tuple[str, int]]:
    """(kind, bytes) of each, in two micro batches of 64 tokens under bf16 autocast."""
    rank, n = dist.get_rank(), dist.get_world_size()
    shape, names = ((1, n), ("dp", "tp")) if way == "tp" else ((n,), ("dp",))
    ranks = Ranks(rank, rank, n, tp=n if way == "tp" else 1,
                           mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    replica = sharding.parallelize(GPT(TINY), ranks, torch.device("cpu"), dtype=torch.bfloat16,
                                   dp="fsdp" if way == "fsdp" else "ddp")
    if way == "ddp":  # which does in C++ what this hook does where it is seen
        replica.register_comm_hook(None, lambda _, bucket: dist.all_reduce(
            bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0]))
    with Watch() as watch:
        for i in range(2):
            sharding.sync_gradients(replica, i == 1)
            ids = torch.randint(0, 512, (2, 32))
            with torch.autocast("cpu", torch.bfloat16):
                loss = replica(ids, ids)
            loss.backward()
    return watch.collectives


@pytest.mark.parametrize("way, count", [("ddp", 1), ("fsdp", 2 * 7 + 4), ("tp", 2 * 16)])
def test_ranks_send_what_the_page_says(tmp_path, way, count):
    """In number and bytes; 3 layers, 2 micro batches."""
    for collectives in runs.call_ranks(2, tmp_path, collectives_on_a_rank, way):
        done = {}
        for kind, size in collectives:
            kind = re.match("allreduce|allgather|reducescatter", kind)[0]
            done[kind] = done.get(kind, 0) + size
        assert done == work(TINY, way, 64, 2) and len(collectives) == count
        assert all(f"{size:,} B" in PAGE for size in done.values())


def milliseconds(model, **settings) -> float:
    """An H100's for a micro batch of 4 x 2,048 tokens, documents of 1,000."""
    return 1e3 * sum(roofline.micro_step(
        model, optimizers_of(model, "muon"), TrainConfig(micro_batch_size=4, **settings), "H100",
        dtype=torch.bfloat16, mean_doc_len=1000).values())


@pytest.mark.parametrize("name", SHAPES)
def test_the_tables_are_the_formulas(name):
    cfg = SHAPES[name]
    model = build(cfg)
    for way, n in (("ddp", 8), ("fsdp", 8), ("tp", 2), ("tp", 8)):
        compute = 8 * milliseconds(model, batch_tokens=65_536, **(dict(tp=n) if way == "tp" else dict(dp=way)))
        size = sent(work(cfg, way, 8192 * (n if way == "tp" else 1), 8), n)
        times = [size / (link * 1e6) for link in LINKS]
        row = f"| {name} | {compute:,.0f} ms | {way}, {n} ranks | {size / 1e9:,.1f} GB | " + " | ".join(
            f"{ms:,.0f} ms" for ms in times) + " |"
        assert row in PAGE
    assert f" {train_state_bytes(model, optimizers_of(model, 'muon')) / 1e9:.1f} GB |" in PAGE


def test_a_micro_batch_a_step():
    """Of the 64 GPUs each has a whole optimizer step to itself."""
    compute = milliseconds(build(SHAPES["100M"]), batch_tokens=8192)
    assert f"the 100M model computes for {compute:.0f} ms" in PAGE


def test_printed_commands():
    """Their settings exist, and the batch divides by their numbers of whole models."""
    lines = re.findall(r"train\.py (configs/\S+.*)$", PAGE, re.MULTILINE)
    for line, ranks in zip(lines, (8, 2 * 8, 2, 1, 8 * 8), strict=True):
        _, cfg = load((ModelConfig, TrainConfig), shlex.split(line.replace("$from", "resume")))
        assert cfg.batch_tokens % (cfg.seq_len * cfg.micro_batch_size * ranks) == 0

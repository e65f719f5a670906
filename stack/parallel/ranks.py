"""Several processes: who am I, and what do the others say.

`torchrun` starts them; `tp` neighbours share one copy of the model and read the same batches, and dp_size such copies
divide the batch.  What decides something (stop, skip a step, best so far) is a value reduced over all ranks, so that no
rank goes where another does not.  Tested with gloo on CPU; with nccl none of this has run.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous


@dataclass
class Ranks:
    rank: int = 0  # of this process, over all machines
    local_rank: int = 0  # on this machine: which GPU
    world_size: int = 1
    tp: int = 1  # processes that share one copy of the model: neighbours, rank // tp is the same
    mesh: Any = field(default=None, compare=False)  # DeviceMesh ("dp", "tp"), or ("dp",) where tp is 1, once connected

    @property
    def dp_rank(self) -> int:
        """Which share of the batch is this process's; the tp ranks of one copy have the same."""
        return self.rank // self.tp

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp

    def sum(self, tensor):
        """Sum over the shares of the batch, in place; returns the tensor."""
        if self.dp_size > 1:
            dist.all_reduce(tensor, group=self.mesh.get_group("dp"))  # sum: gloo has no average
        return tensor

    def any(self, flag: bool, device) -> bool:
        """True on every rank if it is on one."""
        if self.world_size == 1:
            return flag
        votes = torch.tensor(float(flag), device=device)
        dist.all_reduce(votes)
        return bool(votes > 0)

    def barrier(self):
        if self.world_size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def together(self):
        """A ValueError or OSError of the body on one rank is one on all, as is any difference between what they put
        into the dict that they get.  Nothing in the body may wait for other ranks."""
        facts, fault = {}, None
        try:
            yield facts
        except (ValueError, OSError) as error:
            fault = error
        said = [(facts, fault and str(fault))] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(said, said[0])
        if fault is not None:
            raise fault
        for rank, (_, text) in enumerate(said):
            if text is not None:
                raise ValueError(f"rank {rank} cannot start:\n  {text}")
        compare([facts for facts, _ in said])


def read_ranks(tp: int = 1) -> Ranks:
    """What torchrun put into the environment; RANK without an address to meet at (a cluster's leftover) is no group."""
    said = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if "TORCHELASTIC_RUN_ID" in os.environ or "MASTER_ADDR" in os.environ:
        said |= {key: os.environ[key] for key in said if key in os.environ}
    if not all(value.isdecimal() for value in said.values()) or int(said["RANK"]) >= int(said["WORLD_SIZE"]):
        raise ValueError("the environment has " + ", ".join(f"{key}={value}" for key, value in said.items()) + ": RANK "
                         "must be less than WORLD_SIZE. Start several ranks with torchrun; for a single one, unset "
                         "RANK and MASTER_ADDR.")
    ranks = Ranks(*map(int, said.values()), tp)
    if ranks.world_size % tp:
        raise ValueError(f"tp is {tp}, and {ranks.world_size} processes cannot be divided into groups of {tp}. Start a "
                         "multiple of it (torchrun --nproc_per_node), or lower --tp.")
    return ranks


def compare(said: list[dict]):
    """ValueError with each name, and its values on which ranks, where the dicts of the ranks differ."""
    differ = []
    for name in dict.fromkeys(name for facts in said for name in facts):
        where = {}
        for rank, facts in enumerate(said):
            where.setdefault(str(facts.get(name, "not there")), []).append(rank)
        if len(where) > 1:
            differ.append(f"{name}: " + "; ".join(
                f"{value} on rank {', '.join(map(str, some[:8]))}{', ...' * (len(some) > 8)}"
                for value, some in where.items()))
    if differ:
        more = f"\n  and {len(differ) - 8} more" if len(differ) > 8 else ""
        raise ValueError("the ranks would not train the same:\n  " + "\n  ".join(differ[:8]) + more +
                         "\n  Start all of them with the same command, code and data.")


def meet(ranks: Ranks, facts: dict):
    """The store at which all ranks meet, once each knows that the others say the same of themselves.

    Before there is a group: ranks with other backends, devices or meshes would wait for each other in vain.
    """
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size))
    store.set(f"says/{ranks.rank}", json.dumps(facts))
    said = [json.loads(store.get(f"says/{rank}")) for rank in range(ranks.world_size)]
    store.add("heard", 1)
    try:
        compare(said)
    except ValueError:
        patience = time.monotonic() + 5 * (ranks.rank == 0)  # with which the store may end, for those who still listen
        while time.monotonic() < patience and store.add("heard", 0) < ranks.world_size:
            time.sleep(0.01)
        raise
    return store


def connect(ranks: Ranks, device: torch.device, facts: dict) -> torch.device:
    """Join the process group (nccl on CUDA, gloo elsewhere) and lay out ranks.mesh; returns this rank's device.

    facts: what must be the same on all ranks, by name; ValueError on all of them where it is not.
    """
    if device.type == "cuda" and device.index is not None and ranks.world_size > 1:
        raise ValueError(f"device is {device}, but each of the {ranks.world_size} ranks needs a GPU of its own. "
                         "Say --device=cuda.")
    if device.type == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise ValueError(f"there is no GPU for local rank {ranks.local_rank}: PyTorch sees "
                             f"{torch.cuda.device_count()} here. Lower --nproc_per_node, or say --device=cpu.")
        device = device if device.index is not None else torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    if ranks.world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=meet(ranks, facts), rank=ranks.rank,
                                world_size=ranks.world_size, device_id=device if device.type == "cuda" else None)
        shape = (ranks.dp_size, ranks.tp) if ranks.tp > 1 else (ranks.dp_size,)  # neighbours are of one tp group
        ranks.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp")[:len(shape)])
    return device


def disconnect(ranks: Ranks):
    """Leave the group at a clean end; after an exception the launcher ends the others, and asking them would hang."""
    if ranks.world_size > 1:
        dist.destroy_process_group()

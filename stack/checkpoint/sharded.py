"""Checkpoints of a run whose ranks hold parts: each writes its own, and the others' are none of its business.

A rank's shard-0000N-...safetensors has its part of every tensor: weights by name, optimizer state as optim/NAME/KEY,
with which part of the whole it is.  The folder must lie where all ranks can write; it becomes a checkpoint like any
other (folder.py), and any number of ranks reads it (tensors.py).  The parts are safetensors, not the own format of
torch.distributed.checkpoint, whose index is a pickle.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from stack.checkpoint.folder import writing
from stack.checkpoint.tensors import OF_OPTIM, dcp_faults, optimizer_state


class ShardedSaves:
    """`tensors.save` for such a run, in the background; all ranks call it together.

    torch.distributed.checkpoint copies the parts to memory of their own before `save` returns and writes them while
    training goes on.  The first rank publishes the folder once every rank has written; `finish` waits for that, and so
    does the next save.  An OSError on one rank is one on all.
    """

    def __init__(self):
        self.group = dist.new_group(backend="gloo")  # of its own: training's messages must not mix with these
        self.publisher = ThreadPoolExecutor(1)
        self.under_way = None

    def save(self, run_dir, name: str, *, model, optimizers=(), scaler=None, **what):
        import torch.distributed.checkpoint as dcp
        self.finish()
        optim = optimizer_state(model, optimizers, scaler)
        tensors = {key: t.detach() for key, t in model.state_dict().items()}
        tensors |= {f"{OF_OPTIM}{name}/{key}": value for name, entry in optim["optimizers"].items()
                    for key, value in entry["state"].items()}
        sharded = {"kinds": {name: entry["kind"] for name, entry in optim["optimizers"].items()},
                   "scaler": optim["scaler"]}
        publishing = contextlib.ExitStack()  # empty on other ranks than the first
        self._together(lambda: dist.get_rank() or publishing.enter_context(
            writing(run_dir, name, tensors.values(), sharded=sharded, **what)))
        written = dcp.async_save(tensors, process_group=self.group, storage_writer=dcp.HuggingFaceStorageWriter(
            str(Path(run_dir) / f"{name}.new"), save_distributed=True))  # safetensors: other writers pickle

        def publish():
            with publishing, dcp_faults():
                written.result()
        self.under_way = self.publisher.submit(publish)

    def finish(self):
        """Wait until the last save stands in its place; raises what `save` raises."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            self._together(under_way.result)

    def _together(self, act):
        fault = None
        try:
            act()
        except OSError as error:
            fault = error
        faults = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault and (fault.errno, str(fault)), group=self.group)
        for number, text in filter(None, faults):
            raised = OSError(text)
            raised.errno = number
            raise raised from fault

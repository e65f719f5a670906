"""The checkpoints of one run as it goes: written by rank 0, or by all ranks where each holds a part.

Then a rank's shard-0000N-...safetensors has its part of every tensor: weights by name, optimizer state as
optim/NAME/KEY, with which part of the whole it is.  The folder must lie where all ranks can write; it becomes one like
any other (folder.py), and any number of ranks reads it (tensors.py).  The parts are safetensors, not the own format of
torch.distributed.checkpoint, whose index is a pickle.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from stack.checkpoint.folder import writing
from stack.checkpoint.tensors import OF_OPTIM, dcp_faults, optimizer_state, save
from stack.config import RunFailed


class Saves:
    """`save` and `finish`, called by all ranks together.  What does not fit on the disk now may fit the next time, so
    an error is told to `say` and training goes on; the last checkpoint must fit: final=True raises RunFailed.

    Parts are copied to memory of their own before `save` returns and written while training goes on.  The first rank
    publishes the folder once every rank has written; `finish` waits for that, and so does the next save.

    step: of the newest ckpt_last that stands, or None.  what: `tensors.save`'s arguments that stay the same.
    """

    def __init__(self, run_dir, *, sharded: bool, main: bool, say, step: int | None = None, **what):
        self.run_dir, self.main, self.say, self.step, self.what = run_dir, main, say, step, what
        self.under_way, self.group = None, None
        if sharded:
            self.group = dist.new_group(backend="gloo")  # training's messages must not mix with these
            self.publisher = ThreadPoolExecutor(1)

    def save(self, name: str, state: dict, final: bool = False):
        self.finish(final=False)
        with self._faults_told(final):
            if self.group is not None:
                self._begin(name, state=state, **self.what)
            elif self.main:
                save(self.run_dir, name, state=state, **self.what)
            if name == "ckpt_last":
                self.step = state["progress"]["step"]

    def finish(self, final: bool = True):
        """Wait until what is being written in the background stands in its place."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            with self._faults_told(final):
                self._together(under_way.result)

    def _begin(self, name: str, *, model, optimizers, scaler, **what):
        import torch.distributed.checkpoint as dcp
        optim = optimizer_state(model, optimizers, scaler)
        tensors = {key: t.detach() for key, t in model.state_dict().items()}
        kinds = {}
        for of, entry in optim["optimizers"].items():
            kinds[of] = entry["kind"]
            tensors |= {f"{OF_OPTIM}{of}/{key}": value for key, value in entry["state"].items()}
        sharded = {"kinds": kinds, "scaler": optim["scaler"]}
        publishing = contextlib.ExitStack()  # empty on other ranks than the first
        self._together(lambda: self.main and publishing.enter_context(
            writing(self.run_dir, name, tensors.values(), sharded=sharded, **what)))
        written = dcp.async_save(tensors, process_group=self.group, storage_writer=dcp.HuggingFaceStorageWriter(
            str(Path(self.run_dir) / f"{name}.new"), save_distributed=True))  # safetensors: other writers pickle

        def publish():
            with publishing, dcp_faults():
                written.result()
        self.under_way = self.publisher.submit(publish)

    def _together(self, act):
        """An OSError on one rank is one on all."""
        fault = None
        try:
            act()
        except OSError as error:
            fault = error
        faults = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault and str(fault), group=self.group)
        for text in faults:
            if text is not None:
                raise OSError(text) from fault

    @contextlib.contextmanager
    def _faults_told(self, final: bool):
        try:
            yield
        except OSError as error:
            if final:
                raise RunFailed(error) from error
            self.say(f"{error}\n  Training goes on and tries again the next time.")

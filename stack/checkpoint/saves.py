"""The checkpoints of one run as it goes: written by rank 0, or by all ranks where each holds a part."""

from stack.checkpoint.sharded import ShardedSaves
from stack.checkpoint.tensors import save
from stack.config import RunFailed


class Saves:
    """`save` and `finish`, called by all ranks together.  What does not fit on the disk now may fit the next time, so
    an error is told to `say` and training goes on; the last checkpoint must fit: final=True raises RunFailed.

    step: of the newest ckpt_last that stands, or None.  what: `tensors.save`'s arguments that stay the same.
    """

    def __init__(self, run_dir, *, sharded: bool, main: bool, say, step: int | None = None, **what):
        self.run_dir, self.main, self.say, self.step, self.what = run_dir, main, say, step, what
        self.sharded = ShardedSaves() if sharded else None

    def save(self, name: str, state: dict, final: bool = False):
        if self.sharded:
            self._attempt(self.sharded.finish)
            done = self._attempt(lambda: self.sharded.save(self.run_dir, name, state=state, **self.what), final)
        else:
            done = self._attempt(lambda: self.main and save(self.run_dir, name, state=state, **self.what), final)
        if done and name == "ckpt_last":
            self.step = state["progress"]["step"]

    def finish(self):
        """Wait for what is still being written in the background."""
        if self.sharded:
            self._attempt(self.sharded.finish, final=True)

    def _attempt(self, saving, final: bool = False) -> bool:
        try:
            saving()
        except OSError as error:
            if final:
                raise RunFailed(error) from error
            self.say(f"{error}\n  Training goes on and tries again the next time.")
            return False
        return True

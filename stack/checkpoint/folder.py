"""Checkpoints: folders that are whole or absent, hold only tensors and plain JSON, and say what they belong to.

    out/run/ckpt_last/   model.safetensors  weights by name, a tied table once
                         optim.pt           optimizer state by parameter name, loss scaler; read with weights_only=True
                         tokenizer.json
                         state.json         both configs, progress, fingerprints of data and tokenizer; size and sha256
                                            of the other files, which are compared before anything is used
                         (a sharded run has shard-0000N-...safetensors, one per rank, for the first two: saves.py)
    out/run/ckpt_best/, out/run/ckpt_step_0001000/   the same; numbered ones are hard links and cost no writing

Everything is written into ckpt_x.new and fsynced, state.json last.  Then ckpt_x becomes ckpt_x.replaced, ckpt_x.new
becomes ckpt_x, and the replaced one goes to .removed, which is emptied; what cannot be deleted yet, since a network
file system keeps what somebody reads, is in no save's way there and goes the next time.  No portable call swaps two
folders, so a kill can fall between the two renames; then both neighbours are complete.  Readers look at ckpt_x,
ckpt_x.new and ckpt_x.replaced, in this order, and change nothing, since another process may be saving; the next save or
the start of a run `recover`s what was cut off.
(A symlink could be swapped in one call, but would not survive copying a run to a file system without links.)
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import inspect
import io
import json
import os
import re
import shutil
import time
import tokenize
from pathlib import Path

import torch

import model
from model import ModelConfig
from stack.data.tokenizer import Tokenizer

FORMAT = 1
TOKENIZER, STATE = "tokenizer.json", "state.json"
BESIDE = ".new", ".replaced"  # what a save that was cut off leaves next to a checkpoint
OF_A_RUN = "config.json", "log.jsonl", "loss.png", "report.html", "tensorboard"  # what else a run leaves in its folder
MIB = 2**20


@contextlib.contextmanager
def writing(run_dir, name: str, tensors, *, tokenizer: Tokenizer, model_cfg: ModelConfig, train_cfg=None, state: dict,
            keep: int = 0, **more):
    """Gives the folder to write the tensors into, which then becomes run_dir/name with all that belongs to it.

    With keep > 0 ckpt_last also stays as ckpt_step_N, the newest `keep`.  `state` is the caller's, of plain values; N
    is state["progress"]["step"].  Raises OSError, saying how much is needed and where, if the folder is full or cannot
    be written; what stood there before then still does.
    """
    from safetensors import SafetensorError
    run_dir = Path(run_dir)
    aside = run_dir / f"{name}.new"
    facts = {"format": FORMAT, "torch": torch.__version__, "tokenizer": tokenizer.fingerprint, "model": model_cfg,
             "train": train_cfg, "model_py": model_code(), **more, **state}
    facts = json.loads(json.dumps(facts, default=_plain_value))  # now: training may go on while this is written
    needed = sum(t.nbytes for t in tensors if torch.is_tensor(t)) + MIB
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        recover(run_dir)
        if shutil.disk_usage(run_dir).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside.mkdir()
        yield aside
        tokenizer.save(aside / TOKENIZER)
        _seal(aside, facts)
        _publish(aside, run_dir / name)
        if keep and name == "ckpt_last":
            _number(run_dir, run_dir / name, facts["progress"]["step"], keep)
    except (OSError, RuntimeError, SafetensorError) as error:  # the latter two wrap the system's in save and save_file
        _remove(aside)
        wrapped = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(wrapped[1]) if wrapped else None)
        reason = os.strerror(number) if number else str(error).partition("\n")[0]
        intact = " The one before it is intact." if _standing(run_dir / name) else ""
        free = f"{shutil.disk_usage(run_dir).free / MIB:,.0f} MiB are free" if run_dir.is_dir() else "it is not there"
        raised = (type(error) if isinstance(error, OSError) else OSError)(
            f"{run_dir / name} could not be saved: {reason}.{intact}\n"
            f"  {needed / MIB:,.0f} MiB are needed in {run_dir.absolute()}; {free}.\n"
            "  Make room, make the folder writable, or choose another --out_dir.")
        raised.errno = number or errno.EIO
        raise raised from error


@functools.cache
def model_code() -> str:
    """What model.py says, without comments and docstrings, as a hash: the same under every version of Python."""
    kept, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(model)).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        kept.append("" if docstring else tokenize.tok_name[token.type] if token.string.isspace() else token.string)
        before = token.type
    return hashlib.sha256("".join(kept).replace(" ", "").encode()).hexdigest()[:16]  # blanks: f-strings differ there


@contextlib.contextmanager
def occupied(run_dir):
    """A run folder for this process alone, recovered.  Raises OSError where another one trains in it; on a file system
    that knows no locks nobody is asked."""
    import fcntl
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process is training in {run_dir}: two would overwrite each other's checkpoints.\n"
                          "  Wait for it, end it, or choose another --out_dir.") from None
        except OSError:
            pass
        try:
            recover(run_dir)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(run_dir / ".lock")
                run_dir.rmdir()  # if nothing came of it


def recover(run_dir):
    """Finish or undo a save that was cut off and clear away its rest.  For the one process that writes the run."""
    run_dir = Path(run_dir)
    for folder in {p.with_suffix("") for p in run_dir.glob("ckpt_*") if p.suffix in BESIDE}:
        standing = _standing(folder)
        if standing not in (folder, None):
            os.rename(standing, folder)
            _fsync(folder.parent)
        for suffix in BESIDE:
            _remove(folder.with_suffix(suffix))
    shutil.rmtree(run_dir / ".removed", ignore_errors=True)


def start_fresh(run_dir) -> str:
    """Before a new run in an old run's folder, which is `occupied`: move all that the old one left to
    run_dir/previous/1, 2, ..., a run folder like any other.  Returns the sentence that says so, or "" where there was
    nothing.

    So the new run's best need not beat the old one's, and a run started by mistake has not destroyed another.
    """
    run_dir = Path(run_dir)
    old, log = sorted(run_dir.glob("ckpt_*")), run_dir / "log.jsonl"
    if not old and not (log.is_file() and log.stat().st_size):  # nothing was trained
        return ""
    old += [path for path in map(run_dir.joinpath, OF_A_RUN) if path.exists()]
    previous = _next_previous(run_dir)
    for path in old:
        os.rename(path, previous / path.name)
    return f"{run_dir} has a run in it, which is moved to {previous}: {', '.join(path.name for path in old)}"


def go_back(run_dir, name: str) -> str:
    """Make checkpoint `name` of an `occupied` run its ckpt_last.  Later ones go to run_dir/previous/N, beside a copy of
    log and settings as they were, so that the two lines do not mix.  Returns the sentence that says so, or ""."""
    run_dir = Path(run_dir)
    step, later = _step(run_dir / name), []
    if name != "ckpt_last":
        later = [path for path in sorted(run_dir.glob("ckpt_*")) if path.is_dir() and _step(path, step + 1) > step]
        aside = _linked(run_dir / name, run_dir / "ckpt_last")
    if later:
        previous = _next_previous(run_dir)
        for path in (run_dir / "config.json", run_dir / "log.jsonl"):
            if path.exists():
                shutil.copyfile(path, previous / path.name)
        for path in sorted(later, key=lambda path: path.name == "ckpt_last"):  # a kill leaves none that is newer
            os.rename(path, previous / path.name)
    if name != "ckpt_last":
        _publish(aside, run_dir / "ckpt_last")
    return later and (f"the run goes back to {name}, step {step}: what is later moves to {previous}, where a copy of "
                      f"its log stays ({', '.join(path.name for path in later)})") or ""


def _step(folder: Path, unread: int | None = None) -> int:
    """The step at which a checkpoint was saved; unread, if given, for one that cannot be read."""
    try:
        return _parse_state(folder)["progress"]["step"]
    except (OSError, ValueError, KeyError):
        if unread is None:
            raise
        return unread


def _next_previous(run_dir: Path) -> Path:
    taken = [int(path.name) for path in run_dir.glob("previous/*") if path.name.isdecimal()]
    folder = run_dir / "previous" / str(max(taken, default=0) + 1)
    folder.mkdir(parents=True)
    return folder


def _seal(folder: Path, facts: dict):
    """fsync the folder's files and write the state.json that vouches for them."""
    files = {}
    for path in sorted(folder.iterdir()):
        _fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    facts = {**facts, "files": files}
    (folder / STATE).write_text(json.dumps({**facts, "checksum": _checksum(facts)}, indent=1) + "\n", encoding="utf-8")
    _fsync(folder / STATE)
    _fsync(folder)


def _publish(aside: Path, folder: Path):
    """Put a sealed folder in the other's place; at every moment in between _standing finds a complete one."""
    old = folder.with_suffix(".replaced")
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    _fsync(folder.parent)
    _remove(old)


def _remove(folder: Path):
    """Take a folder away; what cannot be deleted now is left in .removed for `recover`, whatever the reason."""
    try:
        (folder.parent / ".removed").mkdir(exist_ok=True)
        os.rename(folder, folder.parent / ".removed" / f"{folder.name}.{time.time_ns()}")
    except OSError:  # .removed cannot be used, or the folder is not there
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.parent / ".removed", ignore_errors=True)


def _linked(folder: Path, other: Path) -> Path:
    """other.new, sealed, with the content of `folder`."""
    aside = other.with_suffix(".new")
    aside.mkdir()
    for path in sorted(folder.iterdir(), key=lambda p: p.name == STATE):  # state.json last, as in _seal
        try:
            os.link(path, aside / path.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, aside / path.name)
            _fsync(aside / path.name)
    return aside


def _number(run_dir: Path, folder: Path, step: int, keep: int):
    """Keep `folder` as ckpt_step_N too, and no more than the `keep` newest of these."""
    numbered = run_dir / f"ckpt_step_{step:07d}"
    _publish(_linked(folder, numbered), numbered)
    for old in _numbered(run_dir)[:-keep]:
        _remove(old)


def _numbered(run_dir: Path) -> list[Path]:
    """ckpt_step_N folders, oldest first."""
    found = [p for p in run_dir.glob("ckpt_step_*") if re.fullmatch(r"ckpt_step_\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.rpartition("_")[2]))


def _fsync(path: Path):
    if path.is_dir() and os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(facts: dict) -> str:
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _plain_value(value):
    """For what JSON lacks: dataclasses, numbers of numpy and torch, paths."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a checkpoint's state holds plain values only, no {type(value).__name__}")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_state(path, which: str | None = None) -> dict:
    """What state.json holds: the configs under "model" and "train", the rest under the names `save` was given."""
    return read(path, which, lambda folder, state: state)


def read(path, which: str | None, use):
    """use(folder, state), again if a save replaced the folder meanwhile (a sample drawn while the model trains)."""
    for _ in range(100):  # a small model may be saved every few milliseconds
        folder = find(path, which)
        before = _identity(folder)
        try:
            result = use(folder, _parse_state(folder))
        except (OSError, ValueError):
            if before and _identity(folder) == before:  # the folder is as it was, so the fault is in it
                raise
        else:
            if _identity(folder) == before:
                return result
        time.sleep(0.05)
    raise OSError(f"{folder} is replaced faster than it can be read.\n  Raise --save_interval, or read a copy.")


def find(path, which: str | None = None) -> Path:
    """The checkpoint meant, amid a save the complete one beside its place.  `path` is a checkpoint or a run folder, of
    which ckpt_{which} is meant, or ckpt_last (a WSD run is best where it ends), else ckpt_best, else the newest number.
    """
    path = Path(path)
    if path.name.startswith("ckpt_") or (path / STATE).exists():
        names = [path]
    else:
        names = [path / f"ckpt_{which}"] if which else [path / "ckpt_last", path / "ckpt_best", *_numbered(path)[::-1]]
    if found := next(filter(None, map(_standing, names)), None):
        return found
    there = sorted(str(p) for p in (path.parent if names == [path] else path).glob("ckpt_*"))
    raise FileNotFoundError(f"{names[0]} not found.\n  A checkpoint is needed, as train.py writes them. " + (
        f"There is: {', '.join(there)}." if there else f"From Hugging Face's: python convert.py import {path} "
        "out/NAME" if any(path.glob("*.safetensors")) else "Train one: python train.py configs/demo.py"))


def _standing(folder: Path) -> Path | None:
    """Where the complete checkpoint of this name is: in its place, or beside it where a save was cut off."""
    if not folder.exists():
        for suffix in BESIDE:
            with contextlib.suppress(OSError, ValueError):
                _parse_state(folder.with_suffix(suffix))
                return folder.with_suffix(suffix)
    return folder if folder.exists() else None  # asked again: a save may have ended in between


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder stands there; the number alone would not do, since the second save from now may get it again."""
    with contextlib.suppress(FileNotFoundError):
        stat = folder.stat()
        return stat.st_ino, stat.st_mtime_ns


def _parse_state(folder: Path) -> dict:
    file = folder / STATE
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: {folder} is no complete checkpoint.\n  Use another one.")
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version, checksum = state["format"], state.get("checksum")
        if version == FORMAT:
            unknown = set(state["model"]) - {field.name for field in dataclasses.fields(ModelConfig)}
            state["tokenizer"], state["files"], state["train"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error}).\n  Use another checkpoint.") from None
    if version != FORMAT:
        raise ValueError(f"{file} has format {version!r}; this code reads {FORMAT}.\n  Use the code that wrote it.")
    if checksum is not None and checksum != _checksum(state):
        raise ValueError(f"{file} is damaged or was edited: its checksum does not match.\n  Use another checkpoint. "
                         'If you edited it on purpose, remove its "checksum".')
    if unknown:
        raise ValueError(f"{file} has model settings unknown here: {', '.join(sorted(unknown))}.\n"
                         "  Use the version of this repository that wrote it.")
    return state


def verify(folder: Path, state: dict, name: str) -> Path:
    """The path of one of the folder's files, once its size and sha256 are those in state.json."""
    path, said = folder / name, state["files"].get(name)
    if said is None or not path.is_file():
        raise FileNotFoundError(f"{path} not found, or not listed in {folder / STATE}.\n  Use another checkpoint.")
    size = path.stat().st_size
    if size == said["bytes"] and _sha256(path) == said["sha256"]:
        return path
    fault = f"has {size:,} of {said['bytes']:,} bytes" if size != said["bytes"] else (
        f"is damaged: its sha256 is not the one in {folder / STATE}")
    raise ValueError(f"{path} {fault}.\n  Copy it again from where it came, or use another checkpoint.")

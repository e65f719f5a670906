"""Checkpoints: folders that are whole or absent, hold only tensors and plain JSON, and say what they belong to.

    out/run/ckpt_last/   model.safetensors  weights by name, a tied table once
                         optim.pt           optimizer state by parameter name, loss scaler; read with weights_only=True
                         tokenizer.json
                         state.json         both configs, progress, fingerprints of data and tokenizer; size and sha256
                                            of the other files, which are compared before anything is used
                         (a sharded run has shard-0000N-...safetensors, one per rank, for the first two: tensors by
                         name, optimizer state as optim/NAME/KEY, and which part of them is here)
    out/run/ckpt_best/, out/run/ckpt_step_0001000/   the same; numbered ones are hard links and cost no writing

*Saving.*  Everything is written into ckpt_x.new and fsynced, state.json last.  Then ckpt_x becomes ckpt_x.replaced,
ckpt_x.new becomes ckpt_x, and the replaced one is removed.  No portable call swaps two folders, so a kill can fall
between the two renames; then both neighbours are complete.  Readers therefore look at ckpt_x, a complete ckpt_x.new and
ckpt_x.replaced, in this order, and change nothing, since another process may be saving; the next save, or `recover` at
the start of a run, finishes or undoes what was cut off.  (A symlink to numbered folders could be swapped in one call,
but would not survive copying a run to a machine or file system without links.)

*Sharded runs* save through torch.distributed.checkpoint, each rank its part, while training goes on; the folder is
published in the same way once all have written.  It must lie where all ranks can write, and readers take it as they
take any other, on any number of ranks.  The parts are safetensors, not DCP's own format, whose index is a pickle.

*Names.*  torch.compile and DistributedDataParallel put `_orig_mod.` and `module.` before names.  Saving goes through
the bare module and loading strips them, so files never depend on how a run was started.  Optimizer state goes by name,
not by position, so it does not care how parameters are grouped, nor about the number of ranks.

*Loading* reads to the CPU, tensor by tensor into memory that is there already: dtypes convert on the way, and resuming
peaks no higher than training.  `load_model` takes ckpt_last unless asked for "best": a WSD run is best where it ends.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from model import GPT, ModelConfig
from stack.data.tokenizer import Tokenizer
from stack.parallel.parallel import fill, is_sharded

FORMAT = 1
WEIGHTS, OPTIM, TOKENIZER, STATE = "model.safetensors", "optim.pt", "tokenizer.json", "state.json"
OF_OPTIM = "optim/"  # before the names of optimizer state among a sharded checkpoint's tensors
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save(run_dir, name: str, *, model, tokenizer: Tokenizer, model_cfg: ModelConfig, train_cfg=None, optimizers=(),
         scaler=None, state: dict, keep: int = 0):
    """Write run_dir/name, whole or not at all.  With keep > 0 ckpt_last also stays as ckpt_step_N, the newest `keep`.

    `state` is the caller's, of plain values; N is state["progress"]["step"].  Raises OSError, saying how much is needed
    and where, if the folder is full or cannot be written; what stood there before then still does.
    """
    from safetensors.torch import save_file
    model = _unwrap(model)
    weights = {_plain_name(key): t.detach().cpu().contiguous() for key, t in model.state_dict().items()}
    optim = {"optimizers": _optimizer_state(model, optimizers), "scaler": _scaler_state(scaler)}
    tensors = [*weights.values(), *(v for entry in optim["optimizers"].values() for v in entry["state"].values())]
    facts = {"model": model_cfg, "train": train_cfg, **state}
    with _writing(run_dir, name, tokenizer, facts, keep, tensors) as aside:
        save_file(weights, aside / WEIGHTS, {"format": "pt"})
        torch.save(optim, aside / OPTIM)
        shutil.copymode(aside / OPTIM, aside / WEIGHTS)  # save_file makes files that only their owner can read


class ShardedSaves:
    """`save` for a run whose ranks hold parts: each writes its own, in the background, and all call it together.

    torch.distributed.checkpoint copies the parts to memory of their own before `save` returns and writes them while
    training goes on.  The first rank publishes the folder once every rank has written; `finish` waits for that, and so
    does the next save.  An OSError on one rank is one on all.
    """

    def __init__(self):
        self.group = dist.new_group(backend="gloo")  # of its own: training's messages must not mix with these
        self.publisher = ThreadPoolExecutor(1)
        self.under_way = None

    def save(self, run_dir, name: str, *, model, tokenizer: Tokenizer, model_cfg: ModelConfig, train_cfg=None,
             optimizers=(), scaler=None, state: dict, keep: int = 0):
        import torch.distributed.checkpoint as dcp
        self.finish()
        optim = _optimizer_state(model, optimizers)
        tensors = {key: t.detach() for key, t in model.state_dict().items()} | {
            f"{OF_OPTIM}{name}/{key}": value for name, entry in optim.items() for key, value in entry["state"].items()}
        sharded = {"kinds": {name: entry["kind"] for name, entry in optim.items()}, "scaler": _scaler_state(scaler)}
        facts = {"model": model_cfg, "train": train_cfg, "sharded": sharded, **state}
        writing, first = contextlib.ExitStack(), dist.get_rank() == 0
        self._together(lambda: first and writing.enter_context(
            _writing(run_dir, name, tokenizer, facts, keep, tensors.values())))
        written = dcp.async_save(tensors, process_group=self.group, storage_writer=dcp.HuggingFaceStorageWriter(
            str(Path(run_dir) / f"{name}.new"), save_distributed=True))  # safetensors: other writers pickle

        def publish():
            with writing:
                _wait(written)
        self.under_way = self.publisher.submit(publish).result if first else functools.partial(_wait, written)

    def finish(self):
        """Wait until the last save stands in its place; raises what `save` raises."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            self._together(under_way)

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


def _wait(written):
    """For the end of an asynchronous save; a rank's fault is an OSError here too."""
    from torch.distributed.checkpoint.api import CheckpointException
    try:
        written.result()
    except CheckpointException as error:
        fault = next(iter(error.failures.values()))[0]
        raise (fault if isinstance(fault, OSError) else OSError(errno.EIO, str(fault))) from error


@contextlib.contextmanager
def _writing(run_dir, name: str, tokenizer: Tokenizer, facts: dict, keep: int, tensors):
    """Gives the folder to write the tensors into, which then becomes run_dir/name with all that belongs to it."""
    run_dir = Path(run_dir)
    aside = run_dir / f"{name}.new"
    facts = {"format": FORMAT, "torch": torch.__version__, "tokenizer": tokenizer.fingerprint, **facts}
    facts = json.loads(json.dumps(facts, default=_plain_value))  # now: training may go on while this is written
    needed = sum(t.nbytes for t in tensors if torch.is_tensor(t)) + MIB
    from safetensors import SafetensorError
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
        shutil.rmtree(aside, ignore_errors=True)
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


def recover(run_dir):
    """Finish or undo a save that was cut off and clear away its rest.  For the one process that writes the run."""
    for folder in {p.with_suffix("") for p in Path(run_dir).glob("ckpt_*") if p.suffix in (".new", ".replaced")}:
        standing = _standing(folder)
        if standing not in (folder, None):
            os.rename(standing, folder)
            _fsync(folder.parent)
        for rest in _beside(folder):
            shutil.rmtree(rest, ignore_errors=True)


def start_fresh(run_dir):
    """Before a new run in an old run's folder: move its checkpoints to run_dir/previous, instead of those there.

    So the new run's best need not beat the old one's, and a run started by mistake has not destroyed another.
    """
    recover(run_dir)
    old, previous = list(Path(run_dir).glob("ckpt_*")), Path(run_dir) / "previous"
    if old:
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
    for folder in old:
        os.rename(folder, previous / folder.name)


def _optimizer_state(model, optimizers) -> dict:
    """{parameter name: {"kind": optimizer's class, "state": its tensors, on the CPU}}."""
    names = {p: _plain_name(key) for key, p in model.named_parameters()}
    return {names[p]: {"kind": type(opt).__name__, "state": {
                key: value.cpu() if torch.is_tensor(value) else value for key, value in opt.state.get(p, {}).items()}}
            for opt in optimizers for group in opt.param_groups for p in group["params"]}


def _scaler_state(scaler) -> dict | None:
    return scaler.state_dict() if scaler is not None and scaler.is_enabled() else None


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
    shutil.rmtree(old, ignore_errors=True)


def _number(run_dir: Path, folder: Path, step: int, keep: int):
    """Keep `folder` as ckpt_step_N too, and no more than the `keep` newest of these."""
    numbered = run_dir / f"ckpt_step_{step:07d}"
    aside = numbered.with_suffix(".new")
    aside.mkdir()
    for path in sorted(folder.iterdir(), key=lambda p: p.name == STATE):  # state.json last, as in _seal
        try:
            os.link(path, aside / path.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, aside / path.name)
            _fsync(aside / path.name)
    _publish(aside, numbered)
    for old in _numbered(run_dir)[:-keep]:
        shutil.rmtree(old)


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
# Loading.  `path` is a run folder or one of its checkpoints; of a run folder, ckpt_{which} is meant, or without `which`
# ckpt_last, else ckpt_best, else the newest numbered one.


def read_state(path, which: str | None = None) -> dict:
    """What state.json holds: the configs under "model" and "train", the rest under the names `save` was given."""
    return _read(path, which, lambda folder, state: state)


def load_weights(model, path):
    """Copy a checkpoint's weights into a model of the same shapes, on any device and in any dtype."""
    _read(path, None, lambda folder, state: _copy_weights(_unwrap(model), folder, state))


def load_optimizers(path, model, optimizers, scaler=None, *, strict: bool = True) -> list[str]:
    """Give parameters their optimizer state back, by name; learning rates and the like stay those of the new run.

    Works across devices and between fused and other implementations.  strict=False leaves parameters without state
    where it is missing, of another shape or another optimizer's (a resized table), and returns their names.
    """
    return _read(path, None, lambda folder, state: _restore(_unwrap(model), optimizers, scaler, folder, state, strict))


def load_model(path, *, device="cpu", dtype: torch.dtype | None = None, which: str | None = None):
    """(model in eval mode, tokenizer, state), from the checkpoint's folder alone."""
    def load(folder, state):
        tokenizer = Tokenizer.load(folder)
        if tokenizer.fingerprint != state["tokenizer"]:
            raise ValueError(f"{folder / TOKENIZER} is not the tokenizer that {folder / STATE} was saved with "
                             f"(fingerprints {tokenizer.fingerprint[:12]} and {state['tokenizer'][:12]}).\n"
                             "  Copy tokenizer.json again from the data the model was trained on.")
        _verify(folder, state, TOKENIZER)
        with torch.device("meta"):  # no memory and no time for initial weights that would be overwritten
            model = GPT(ModelConfig(**state["model"])).to(dtype)
        assert not list(model.buffers())  # they would stay uninitialised
        model = model.to_empty(device=device).eval()
        _copy_weights(model, folder, state)
        return model, tokenizer, state
    return _read(path, which, load)


def find(path, which: str | None = None) -> Path:
    """The folder of the checkpoint that `path` and `which` mean; amid a save, the complete one beside its place."""
    path = Path(path)
    if path.name.startswith("ckpt_") or (path / STATE).exists():
        names = [path]
    else:
        names = [path / f"ckpt_{which}"] if which else [path / "ckpt_last", path / "ckpt_best", *_numbered(path)[::-1]]
    for name in names:
        folder = _standing(name)
        if folder is not None:
            return folder
    there = sorted(str(p) for p in (path.parent if names == [path] else path).glob("ckpt_*"))
    raise FileNotFoundError(f"{names[0]} not found.\n  A checkpoint is needed, as train.py writes them. " + (
        f"There is: {', '.join(there)}." if there else f"From Hugging Face's: python convert.py import {path} "
        "out/NAME" if any(path.glob("*.safetensors")) else "Train one: python train.py configs/demo.py"))


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_suffix(".new"), folder.with_suffix(".replaced")


def _standing(folder: Path) -> Path | None:
    """Where the complete checkpoint of this name is: in its place, or beside it where a save was cut off."""
    if not folder.exists():
        for beside in _beside(folder):
            try:
                _parse_state(beside)
                return beside
            except (OSError, ValueError):
                pass
    return folder if folder.exists() else None  # asked again: a save may have ended in between


def _read(path, which, use):
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


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder stands there; the number alone would not do, since the second save from now may get it again."""
    try:
        stat = folder.stat()
    except FileNotFoundError:
        return None
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


def _verify(folder: Path, state: dict, name: str) -> Path:
    """The path of one of the folder's files, once its size and sha256 are those in state.json."""
    path, said = folder / name, state["files"].get(name)
    if said is None or not path.is_file():
        raise FileNotFoundError(f"{path} not found, or not listed in {folder / STATE}.\n  Use another checkpoint.")
    size = path.stat().st_size
    if size != said["bytes"]:
        fault = f"has {size:,} of {said['bytes']:,} bytes"
    elif _sha256(path) != said["sha256"]:
        fault = f"is damaged: its sha256 is not the one in {folder / STATE}"
    else:
        return path
    raise ValueError(f"{path} {fault}.\n  Copy it again from where it came, or use another checkpoint.")


def _copy_weights(model, folder: Path, state: dict):
    from safetensors import safe_open
    own = model.state_dict()  # which shares the parameters' memory
    if "sharded" in state:
        shards = Shards(folder, state)
        shapes = {key: shape for key, shape in shards.shapes.items() if not key.startswith(OF_OPTIM)}
        _refuse(folder, own, {key: key for key in shapes}, shapes)
        return shards.read(own)
    path = _verify(folder, state, WEIGHTS)
    with safe_open(path, framework="pt", device="cpu") as file:
        key_of, problems = {}, []  # our name -> the file's
        for key in file.keys():  # noqa: SIM118 (it is not a dict)
            name = key if key in own else _plain_name(key)
            if name in key_of:
                problems.append(f"twice: {key} and {key_of[name]}")
            key_of[name] = key
        if "head.weight" in key_of and "head.weight" not in own:  # tied: either name will do, or both
            head = key_of.pop("head.weight")
            table = key_of.setdefault("embed.weight", head)
            if table != head and not torch.equal(file.get_tensor(table), file.get_tensor(head)):
                problems.append(f"{table} and {head} differ, but the model ties them (tie_embeddings=True)")
        _refuse(path, own, key_of, {key: tuple(file.get_slice(key).get_shape()) for key in key_of.values()}, problems)
        for name, tensor in own.items():
            fill(tensor, file.get_tensor(key_of[name]))


def _refuse(path: Path, own: dict, key_of: dict, shapes: dict, problems=()):
    """Raise ValueError with all that keeps the tensors stored under these keys from being the model's own."""
    problems = [*problems]
    problems += [f"missing: {name}" + (" (the file's tables are tied, the model's are not)"
                                       if name == "head.weight" else "") for name in own if name not in key_of]
    problems += [f"unexpected: {key}" for name, key in key_of.items() if name not in own]
    problems += [f"{name} is {shapes[key_of[name]]}, the model's {tuple(own[name].shape)}"
                 for name in own.keys() & key_of.keys() if shapes[key_of[name]] != tuple(own[name].shape)]
    if problems:
        raise ValueError(f"{path} does not fit the model.\n  " + "\n  ".join(sorted(problems)))


class Shards:
    """The tensors of a sharded checkpoint: `shapes` by name, and `read` into tensors that may be sharded otherwise."""

    def __init__(self, folder: Path, state: dict):
        from torch.distributed.checkpoint import HuggingFaceStorageReader
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for name in sorted(state["files"])[rank::size]:  # one who finds damage ends the job for all
            _verify(folder, state, name)
        self.reader = HuggingFaceStorageReader(str(folder))
        self.shapes = {key: tuple(entry.size) for key, entry in self.reader.read_metadata().state_dict_metadata.items()}

    def read(self, tensors: dict):
        """Fill tensors, by name: each process takes what it needs of any rank's file."""
        import torch.distributed.checkpoint as dcp
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": nobody needs to agree on what to read
            dcp.load(tensors, storage_reader=self.reader, no_dist=True)


def _restore(model, optimizers, scaler, folder: Path, state: dict, strict: bool) -> list[str]:
    if sharded := state.get("sharded"):
        path, shards = folder, Shards(folder, state)
        saved = {"optimizers": {name: {"kind": kind, "state": {}} for name, kind in sharded["kinds"].items()},
                 "scaler": sharded["scaler"]}
        for key, shape in shards.shapes.items():
            if key.startswith(OF_OPTIM):
                name, _, of_state = key.removeprefix(OF_OPTIM).rpartition("/")
                saved["optimizers"][name]["state"][of_state] = torch.empty(shape, device="meta")
    else:
        path = _verify(folder, state, OPTIM)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    names = {p: _plain_name(key) for key, p in model.named_parameters()}
    faults, loads, wanted = {}, [], {}
    for opt in optimizers:
        whole = opt.state_dict()
        whole["state"] = {}
        for position, p in enumerate(p for group in opt.param_groups for p in group["params"]):  # state_dict's numbers
            entry = saved["optimizers"].pop(names[p], None)
            if entry is None:
                faults[names[p]] = "is not there"
            elif entry["kind"] != type(opt).__name__:
                faults[names[p]] = f"is {entry['kind']}'s, the run uses {type(opt).__name__}"
            elif any(torch.is_tensor(v) and v.ndim and v.shape != p.shape for v in entry["state"].values()):
                faults[names[p]] = "is of another shape"
            elif entry["state"]:
                whole["state"][position] = values = {key: _like(p, value) for key, value in entry["state"].items()}
                wanted |= {f"{OF_OPTIM}{names[p]}/{key}": value for key, value in values.items()}
        loads.append((opt, whole))
    unexpected = {name: "has no parameter in the model" for name in saved["optimizers"]}
    if strict and (faults or unexpected):
        raise ValueError(f"{path} does not fit: the state of\n  " + "\n  ".join(
            f"{name} {fault}" for name, fault in {**faults, **unexpected}.items()) +
            "\n  Resume with the settings it was saved with, or take only its weights with --init_from=RUN.")
    if sharded:
        shards.read(wanted)
    for opt, whole in loads:
        opt.load_state_dict(whole)  # casts and moves to where each parameter is
    if scaler is not None and scaler.is_enabled() and saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    return list(faults)


@torch.no_grad()
def _like(p, value):
    """A parameter's optimizer state as the parameter lies: sharded like it; memory for what is only announced."""
    if not torch.is_tensor(value) or value.ndim == 0 or not is_sharded(p):
        return torch.empty_like(value, device="cpu") if torch.is_tensor(value) and value.is_meta else value
    mine = torch.empty_like(p, dtype=value.dtype)
    if not value.is_meta:
        fill(mine, value)
    return mine


def _unwrap(model):
    """The bare module inside DistributedDataParallel and torch.compile."""
    while hasattr(model, "_orig_mod") or isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def _plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it, in any order, or a compiled block puts into it."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")

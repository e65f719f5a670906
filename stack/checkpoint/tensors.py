"""The tensors of a checkpoint: weights and optimizer state by name, loaded into a model of any layout.

Names are the bare module's, without `_orig_mod.` (torch.compile) and `module.` (DistributedDataParallel), so that files
never depend on how a run was started; optimizer state by name cares neither how parameters are grouped nor about the
number of ranks.  Loading reads tensor by tensor, a rank what it needs, into memory that is there already: dtypes
convert on the way, and resuming peaks no higher than training.  Registered buffers are stored like weights; those that
are not persistent are what the model's constructor makes.
"""

import contextlib
import errno
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from model import GPT, ModelConfig
from stack.checkpoint.folder import STATE, TOKENIZER, model_code, read, verify, writing
from stack.counts import undrawn
from stack.data.tokenizer import Tokenizer
from stack.optim import outside_state
from stack.parallel.sharding import part_of

WEIGHTS, OPTIM = "model.safetensors", "optim.pt"
OF_OPTIM = "optim/"  # before the names of optimizer state in a sharded checkpoint


def save(run_dir, name: str, *, model, optimizers=(), scaler=None, **what):
    """Write run_dir/name, whole or not at all.  `what` stands beside the tensors: see folder.writing."""
    from safetensors.torch import save_file
    model = unwrap(model)
    weights = {plain_name(key): t.detach().to("cpu", copy=True).contiguous()  # two names may share memory, no two files
               for key, t in model.state_dict().items()}
    optim = optimizer_state(model, optimizers, scaler)
    tensors = [*weights.values(), *(v for entry in optim["optimizers"].values() for v in entry["state"].values())]
    with writing(run_dir, name, tensors, **what) as aside:
        save_file(weights, aside / WEIGHTS, {"format": "pt"})
        torch.save(optim, aside / OPTIM)
        shutil.copymode(aside / OPTIM, aside / WEIGHTS)  # save_file makes files that only their owner can read


def optimizer_state(model, optimizers, scaler) -> dict:
    """{"optimizers": {parameter name: {"kind": optimizer's class, "state": its tensors, on the CPU}}, "scaler"}.  Warns
    of what an optimizer has changed elsewhere than in its state by parameter, which nothing would bring back."""
    for opt in optimizers:
        before = getattr(opt, "begun_with", None)
        if moved := [name for name, value in outside_state(opt).items() if before is not None
                     and not (name in before and torch.equal(*map(torch.as_tensor, (value, before[name]))))]:
            warnings.warn(f"{type(opt).__name__} changes {', '.join(moved)}, which no checkpoint keeps: a resumed run "
                          "would be another one. Keep it in self.state[p], as a tensor or a number.", stacklevel=3)
    names = {p: plain_name(key) for key, p in model.named_parameters()}
    states = {names[p]: {"kind": type(opt).__name__, "state": {
                  key: value.cpu() if torch.is_tensor(value) else value for key, value in opt.state.get(p, {}).items()}}
              for opt in optimizers for group in opt.param_groups for p in group["params"]}
    return {"optimizers": states, "scaler": scaler.state_dict() if scaler is not None and scaler.is_enabled() else None}


def load_model(path, *, device="cpu", dtype: torch.dtype | None = None, which: str | None = None):
    """(model in eval mode, tokenizer, state), from the checkpoint's folder alone."""
    def load(folder, state):
        tokenizer = Tokenizer.load(folder)
        if tokenizer.fingerprint != state["tokenizer"]:
            raise ValueError(f"{folder / TOKENIZER} is not the tokenizer that {folder / STATE} was saved with "
                             f"(fingerprints {tokenizer.fingerprint[:12]} and {state['tokenizer'][:12]}).\n"
                             "  Copy tokenizer.json again from the data the model was trained on.")
        verify(folder, state, TOKENIZER)
        with undrawn(), torch.device(device):  # no time for initial weights that would be overwritten
            model = GPT(ModelConfig(**state["model"])).to(dtype)
        _copy_weights(model, folder, state)
        return model.eval(), tokenizer, state
    return read(path, which, load)


def load_weights(model, path):
    """Copy a checkpoint's weights into a model of the same shapes, on any device and in any dtype."""
    read(path, None, lambda folder, state: _copy_weights(unwrap(model), folder, state))


def load_optimizers(path, model, optimizers, scaler=None, *, strict: bool = True) -> list[str]:
    """Give parameters their optimizer state back, by name; learning rates and the like stay those of the new run.

    Works across devices and between fused and other implementations.  strict=False leaves parameters without state
    where it is missing, of another shape or another optimizer's (a resized table), and returns their names.
    """
    return read(path, None, lambda folder, state: _restore(unwrap(model), optimizers, scaler, folder, state, strict))


def forgotten(model) -> list[str]:
    """What to say, a line each, of the buffers that no checkpoint keeps (persistent=False) and that a model built anew
    has otherwise: drawn at random, for one."""
    buffers = {name: value for name, value in model.named_buffers() if name not in model.state_dict()}
    if not buffers:
        return []
    with undrawn():
        anew = dict(GPT(model.cfg).named_buffers())
    return [f"model.py draws the buffer {name} anew for each model, and no checkpoint keeps it: a run resumed, "
            "evaluated or sampled has other values. Register it with persistent=True."
            for name, value in buffers.items() if not torch.equal(value, anew[name])]


class Stored:
    """The safetensors of a checkpoint, one file or a part of each rank: `shapes` by name, and `read`."""

    def __init__(self, folder: Path, state: dict):
        from torch.distributed.checkpoint import HuggingFaceStorageReader
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        names = {*state["files"], *(path.name for path in folder.glob("*.safetensors"))}
        for name in sorted(name for name in names if name.endswith(".safetensors"))[rank::size]:
            verify(folder, state, name)  # one who finds damage ends the job for all
        self.reader = HuggingFaceStorageReader(str(folder))
        self.shapes = {key: tuple(entry.size) for key, entry in self.reader.read_metadata().state_dict_metadata.items()}

    def read(self, tensors: dict):
        """Fill tensors, by name, which may be sharded as they like: a process takes what it needs of any file."""
        import torch.distributed.checkpoint as dcp
        with warnings.catch_warnings(), dcp_faults():
            warnings.simplefilter("ignore")  # "torch.distributed is disabled": nobody needs to agree on what to read
            dcp.load(tensors, storage_reader=self.reader, no_dist=True)


@contextlib.contextmanager
def dcp_faults():
    """What torch.distributed.checkpoint raises, a BaseException of its own, as the OSError behind it."""
    from torch.distributed.checkpoint.api import CheckpointException
    try:
        yield
    except CheckpointException as error:
        fault = next(iter(error.failures.values()))[0]
        raise (fault if isinstance(fault, OSError) else OSError(errno.EIO, str(fault))) from error


def _copy_weights(model, folder: Path, state: dict):
    """Raises ValueError, before anything is copied, with all that keeps the stored tensors from being the model's."""
    if state.get("model_py", model_code()) != model_code():  # older checkpoints do not say
        warnings.warn(f"model.py was changed since {folder} was saved: what it makes of these weights may not be "
                      "the model that was trained.", stacklevel=5)
    own, stored = model.state_dict(), Stored(folder, state)  # own shares the parameters' memory
    key_of, problems = {}, []  # our name -> the file's
    for key in stored.shapes:
        name = key if key in own else plain_name(key)
        if name in key_of:
            problems.append(f"twice: {key} and {key_of[name]}")
        if not key.startswith(OF_OPTIM):
            key_of[name] = key
    if "head.weight" in key_of and "head.weight" not in own:  # tied: either name will do, or both
        head = key_of.pop("head.weight")
        table = key_of.setdefault("embed.weight", head)
        pair = {key: torch.empty(stored.shapes[key]) for key in (table, head)}
        stored.read(pair)
        if not torch.equal(pair[table], pair[head]):
            problems.append(f"{table} and {head} differ, but the model ties them (tie_embeddings=True)")
    hints = {name: " (a buffer: register it with persistent=False if no file need hold it)"
             for name, _ in model.named_buffers(remove_duplicate=False)}
    hints["head.weight"] = " (the file's tables are tied, the model's are not)"
    problems += [f"missing: {name}{hints.get(name, '')}" for name in own if name not in key_of]
    problems += [f"unexpected: {key}" for name, key in key_of.items() if name not in own]
    problems += [f"{name} is {stored.shapes[key]}, the model's {tuple(own[name].shape)}"
                 for name, key in key_of.items() if name in own and stored.shapes[key] != tuple(own[name].shape)]
    if problems:
        path = folder if "sharded" in state else folder / WEIGHTS
        raise ValueError(f"{path} does not fit the model.\n  " + "\n  ".join(sorted(problems)) + "\n  Use the model.py "
                         "and the settings it was saved with, or train the changed model with --init_from=scratch.")
    stored.read({key_of[name]: tensor for name, tensor in own.items()})


def _restore(model, optimizers, scaler, folder: Path, state: dict, strict: bool) -> list[str]:
    params = {plain_name(key): p for key, p in model.named_parameters()}
    names = {p: name for name, p in params.items()}
    if "sharded" in state:
        path, stored, read_into = folder, Stored(folder, state), {}
        saved = {"optimizers": {name: {"kind": kind, "state": {}} for name, kind in state["sharded"]["kinds"].items()},
                 "scaler": state["sharded"]["scaler"]}
        for key, shape in stored.shapes.items():
            if key.startswith(OF_OPTIM):
                name, _, of_state = key.removeprefix(OF_OPTIM).rpartition("/")
                fits = name in params and params[name].shape == shape
                read_into[key] = torch.empty_like(params[name].detach()) if fits else torch.empty(shape)
                saved["optimizers"][name]["state"][of_state] = read_into[key]
        stored.read(read_into)
    else:
        path = verify(folder, state, OPTIM)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    faults, loads = {}, []
    for opt in optimizers:
        whole = opt.state_dict() | {"state": {}}
        for position, p in enumerate(p for group in opt.param_groups for p in group["params"]):  # state_dict's numbers
            entry = saved["optimizers"].pop(names[p], None)
            if entry is None:
                faults[names[p]] = "is not there"
            elif entry["kind"] != type(opt).__name__:
                faults[names[p]] = f"is {entry['kind']}'s, the run uses {type(opt).__name__}"
            elif any(torch.is_tensor(v) and v.ndim and v.shape != p.shape for v in entry["state"].values()):
                faults[names[p]] = "is of another shape"
            elif entry["state"]:
                whole["state"][position] = {key: part_of(value, p) if torch.is_tensor(value) and value.ndim else value
                                            for key, value in entry["state"].items()}
        loads.append((opt, whole))
    faults_of_file = {name: "has no parameter in the model" for name in saved["optimizers"]}
    if strict and (faults or faults_of_file):
        raise ValueError(f"{path} does not fit: the state of\n  " + "\n  ".join(
            f"{name} {fault}" for name, fault in {**faults, **faults_of_file}.items()) +
            "\n  Resume with the settings it was saved with, or take only its weights with --init_from=RUN.")
    for opt, whole in loads:
        opt.load_state_dict(whole)  # casts and moves to where each parameter is
    if scaler is not None and scaler.is_enabled() and saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    return list(faults)


def unwrap(model):
    """The bare module inside DistributedDataParallel and torch.compile."""
    while hasattr(model, "_orig_mod") or isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it, in any order, or a compiled block puts into it."""
    while name.startswith(("_orig_mod.", "module.")):
        name = name.partition(".")[2]
    return name.replace("._orig_mod.", ".")

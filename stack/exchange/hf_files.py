"""Reading the files of a Hugging Face folder on this machine; nothing is downloaded."""

import contextlib
import json
from pathlib import Path

import torch


def local(folder) -> Path:
    """The folder that a path means, or hf: and a path, as train.py and prepare.py take it."""
    path = Path(str(folder).removeprefix("hf:"))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder on this machine.\n  Download the model first: hf download NAME "
                                f"--local-dir {path}")
    if any(map(_is_checkpoint, [path, *path.glob("ckpt_*")])):
        raise ValueError(f"{path} is a run already, not a folder of Hugging Face's.\n  Name it as it is, without "
                         "hf: or import.")
    return path


def _is_checkpoint(folder: Path) -> bool:
    """By its state.json, which a data set that `datasets` saved has too, with something else in it."""
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((folder / "state.json").read_bytes())
        return isinstance(state, dict) and "progress" in state
    return False


@contextlib.contextmanager
def blaming(path: Path):
    """What shows a file to be damaged, or not what its name says, becomes a ValueError that names it."""
    from safetensors import SafetensorError
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or not what its name says ({type(error).__name__}: {error}).\n"
                         "  Download it again.") from error


def read_json(path: Path) -> dict:
    with blaming(path):
        return {**json.loads(path.read_text(encoding="utf-8"))}


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model.safetensors, or of the files its index lists."""
    from safetensors.torch import load_file
    index, listed, tensors = folder / "model.safetensors.index.json", {}, {}
    if not (folder / "model.safetensors").is_file() and index.is_file():
        with blaming(index):
            listed = {**read_json(index)["weight_map"]}
    elif not (folder / "model.safetensors").is_file():
        hint = "\n  It has pytorch_model.bin, which is a pickle: save the model again with transformers."
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {index.name}."
                                + hint * any(folder.glob("pytorch_model*.bin")))
    for name in sorted(set(listed.values())) or ["model.safetensors"]:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index} lists {name}, which is not there.\n  Download the folder again.")
        with blaming(folder / name):
            tensors |= load_file(folder / name)
    if lost := sorted(set(listed) - set(tensors)):
        raise ValueError(f"{index} lists {lost[0]} ({len(lost)} in all), which is in none of its files.")
    return tensors

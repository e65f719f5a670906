"""Change a run's vocabulary or tie, and exchange models with other tools.

    python convert.py resize out/RUN out/NEW --add "<|think|>" "<|answer|>"   more special tokens
    python convert.py untie out/RUN out/NEW                            a head of its own
    python convert.py tie out/RUN out/NEW [--keep embed]               one table again
    python convert.py gather out/RUN out/NEW                           a sharded run as one file of weights
    python convert.py export out/RUN DIR [--license mit]               a folder for transformers, vLLM and others
    python convert.py import DIR out/RUN                               the way back; DIR may be nanoGPT's ckpt.pt
    python convert.py gguf out/RUN FILE.gguf [--type q8_0]             a file for llama.cpp

out/RUN means its last checkpoint, of whatever layout; out/RUN/ckpt_best can be named instead.  Nothing is changed in
place: every command writes something new, and refuses to write over something old.  What a changed model.py has added,
settings, parameters or buffers, is refused by its names (stack/exchange/hf.py has those that are known).
"""

import contextlib
import copy
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from stack.config import not_installed  # first: it says how torch's threads are to wait

try:
    import torch
except ModuleNotFoundError as error:
    not_installed(error)

from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.config import Parser, as_command
from stack.counts import num_params
from stack.data.tokenizer import Tokenizer
from stack.exchange import gguf, hf
from stack.exchange.card import model_card
from stack.optim import make_optimizers

NOISE = 0.01  # of new rows, in standard deviations of the trained ones


# ---------------------------------------------------------------------------------------------------------------------
# The table's life


def load(run, *, known: bool = True):
    """Model, tokenizer, state with "moments" by parameter and "scaler"; `known`: refuse what model.py has added."""
    model, tokenizer, state = checkpoint.load_model(run)
    if known:
        hf.refuse_unknown(model)
    optimizers = make_optimizers(model, optimizer=(state["train"] or {}).get("optimizer", "muon"))
    scaler = torch.amp.GradScaler("cpu")
    fresh = scaler.state_dict()
    checkpoint.load_optimizers(run, model, optimizers, scaler, strict=False)
    state |= {"moments": {p: entry for opt in optimizers for p, entry in opt.state.items()},  # an import has none
              "scaler": scaler if scaler.state_dict() != fresh else None}
    return model, tokenizer, state


def save(out, model: GPT, tokenizer: Tokenizer, state: dict):
    """A run folder of one checkpoint, and the settings beside it as a config file."""
    moments = state.get("moments")
    optimizers = make_optimizers(model, optimizer=state["train"].get("optimizer", "muon")) if moments else []
    for opt in optimizers:
        opt.state |= {p: moments[p] for group in opt.param_groups for p in group["params"] if p in moments}
    train = state["train"] and {**state["train"], "out_dir": str(out)}  # None for an import: not trained here
    kept = {key: state[key] for key in ("data", "imported_from") if key in state}
    kept["progress"] = {**state["progress"], "wandb_id": None, "best_val": None}  # no ckpt_best is there to be beaten
    checkpoint.save(out, "ckpt_last", model=model, optimizers=optimizers, scaler=state.get("scaler"),
                    tokenizer=tokenizer, model_cfg=model.cfg, train_cfg=train, state=kept)
    (Path(out) / "config.json").write_text(json.dumps({**asdict(model.cfg), **(train or {})}, indent=2) + "\n")


def grow(table, n_real: int, n_rows: int):
    """Trained rows, then rows of mean + noise.  table (V, C), of which n_real rows are trained -> (n_rows, C).

    The mean is for an average logit, where random rows would come out on top; without noise new tokens would be twins
    with the same gradients for ever.  Pad rows have never been trained and are made anew likewise.
    """
    old = table[:n_real].float()
    generator = torch.Generator().manual_seed(n_real)  # not a constant: growing twice must not repeat the noise
    noise = torch.randn(n_rows - n_real, table.shape[1], generator=generator)
    return torch.cat([table[:n_real], (old.mean(0) + NOISE * old.std(0) * noise).to(table.dtype)])


def resize(run, out, names: list[str]):
    """Give a run more special tokens: tokenizer, table, head and moments (of new rows 0), so that training goes on."""
    model, tokenizer, state = load(run)
    old, larger = model.cfg, tokenizer.with_specials(names)
    cfg = model.cfg = replace(old, vocab_size=larger.vocab_size)
    n, rows = old.vocab_size, cfg.padded_vocab_size
    for table in {model.embed.weight, model.head_weight}:
        table.data = grow(table.data, n, rows)
        moments = state["moments"].get(table, {})
        moments |= {key: torch.cat([t[:n], t.new_zeros(rows - n, t.shape[1])]) for key, t in moments.items()
                    if torch.is_tensor(t) and t.ndim == 2}
    save(out, model, larger, state)
    added = ", ".join(f"{name} = {larger.special_ids[name]}" for name in names)
    print(f"{out}: {added}; {cfg.vocab_size} ids in {rows} rows (before: {n} in {old.padded_vocab_size}).  Make data "
          f"for it with: python prepare.py SOURCE --tokenizer {out}")


def untie(run, out):
    """Give the head a table of its own, equal to the embedding."""
    model, tokenizer, state = load(run)
    if not model.cfg.tie_embeddings:
        raise ValueError(f"{run} is untied already.\n  Give a run with tie_embeddings=True.")
    model.cfg = replace(model.cfg, tie_embeddings=False)
    table = model.embed.weight
    model.head = torch.nn.Linear(*table.shape[::-1], bias=False, device="meta")
    head = model.head.weight = torch.nn.Parameter(table.detach().clone())
    if table in state["moments"]:
        state["moments"][head] = copy.deepcopy(state["moments"][table])
    save(out, model, tokenizer, state)
    print(f"{out}: embedding and head are two tables; {table.numel():,} parameters more")


def tie(run, out, keep: str | None):
    """Make embedding and head one table; where they differ, which would change logits, `keep` names the one."""
    model, tokenizer, state = load(run)
    if model.cfg.tie_embeddings:
        raise ValueError(f"{run} is tied already.\n  Give a run with tie_embeddings=False.")
    n, tables = model.cfg.vocab_size, {"embed": model.embed.weight, "head": model.head.weight}
    apart = (tables["embed"][:n] - tables["head"][:n]).abs().max().item()  # pad rows do not matter
    if apart and keep is None:
        raise ValueError(f"embedding and head of {run} differ by up to {apart:.3g}: one of them has to go, and logits "
                         "change.\n  Say which one stays: --keep embed or --keep head.")
    model.embed.weight = tables[keep or "embed"]  # and its moments with it
    model.head, model.cfg = None, replace(model.cfg, tie_embeddings=True)
    save(out, model, tokenizer, state)
    print(f"{out}: one table" + (f", that of {keep}; the two differed by up to {apart:.3g}" if apart else ""))


def gather(run, out):
    """Put a run that several ranks saved in parts together: the same run in the ordinary files."""
    model, tokenizer, state = load(run, known=False)
    save(out, model, tokenizer, state)
    print(f"{out}: {num_params(model.cfg)['total']:,} parameters in one file; go on from it with --init_from=resume")


# ---------------------------------------------------------------------------------------------------------------------
# In and out


@contextlib.contextmanager
def made_whole(path: Path):
    """Where to write what becomes `path` when all of it is there, and is removed otherwise."""
    aside = path.with_name(path.name + ".new")
    if aside.exists():  # someone's own, or left by a kill: neither may go into the result, nor be removed
        raise ValueError(f"{aside} is in the way: it is written first and then renamed.\n  Rename or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        if path.is_dir():
            path.rmdir()  # empty, or main would have refused
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() else aside.unlink(missing_ok=True)


def export(run, out: Path, licence: str):
    """A Hugging Face folder with a model card."""
    model, tokenizer, state = checkpoint.load_model(run)
    with made_whole(out) as aside:
        hf.save_folder(model, tokenizer, aside)
        card = model_card(model, tokenizer, state, Path(run), out.resolve().name, licence)
        (aside / "README.md").write_text(card, encoding="utf-8")
    pads = model.cfg.padded_vocab_size - model.cfg.vocab_size
    print(f"{out}: {hf.settings_to_hf(model.cfg)['architectures'][0]}, {model.cfg.vocab_size} ids"
          + (f" ({pads} pad rows left out)" if pads else ""))


def write_gguf(run, path: Path, kind: str):
    """One file with weights and tokenizer for llama.cpp; kind: f32, f16, bf16 or q8_0."""
    model, tokenizer, _ = checkpoint.load_model(run)
    with made_whole(path) as aside:
        arch = gguf.write(aside, model, tokenizer, kind, run)
    print(f"{path}: {arch}, {kind}, {path.stat().st_size / 2**20:.1f} MiB"
          + ("; llama.cpp normalizes nothing, so give it text in NFC" if tokenizer.nfc else ""))


def import_model(source, out, tokenizer: str | None):
    """A run folder from a Hugging Face folder or a checkpoint of nanoGPT."""
    source, given = Path(source.removeprefix("hf:")), None
    if not source.exists():
        raise FileNotFoundError(f"{source} not found.\n  Give a Hugging Face folder on this machine or nanoGPT's file.")
    if tokenizer is not None:
        given = Tokenizer.load(tokenizer) if Path(tokenizer).exists() else Tokenizer.from_tiktoken(tokenizer)
    model, words = hf.load_nanogpt(source, given) if source.is_file() else hf.load_folder(source, tokenizer=given)
    save(out, model, words, {"train": None, "progress": {"step": 0, "seqs_seen": 0, "bad_steps": 0}, "data": None,
                             "imported_from": source.resolve().name})
    print(f"{out}: {num_params(model.cfg)['total']:,} parameters, {words.vocab_size} ids, documents begin with "
          f"{words.boundary}.\n  Finetune it with: python train.py CONFIG --init_from={out}")


# ---------------------------------------------------------------------------------------------------------------------

COMMANDS = {  # name: what runs, its line of help, what is read, what is written; a flag of its own and what that takes
    "resize": (resize, "add special tokens", "RUN", "NEW",
               "--add", dict(nargs="+", required=True, metavar="NAME", help="names of new special tokens")),
    "untie": (untie, "a head of its own", "RUN", "NEW"),
    "tie": (tie, "one table again", "RUN", "NEW",
            "--keep", dict(choices=("embed", "head"), help="the table that stays where they differ")),
    "gather": (gather, "one file of weights from a sharded run", "RUN", "NEW"),
    "export": (export, "write a Hugging Face folder", "RUN", "DIR",
               "--license", dict(default="unknown", help="for the model card, as Hugging Face writes it")),
    "gguf": (write_gguf, "write a file for llama.cpp", "RUN", "FILE",
             "--type", dict(choices=("f16", "q8_0", "bf16", "f32"), default="f16",
                            help="number format of the matrices (f16)")),
    "import": (import_model, "read a Hugging Face folder or nanoGPT's ckpt.pt", "DIR", "RUN",
               "--tokenizer", dict(metavar="FOLDER",
                                   help="a data or run folder, or tiktoken's name, instead of DIR's own")),
}
READ = {"RUN": "run folder (out/NAME: its ckpt_last) or a checkpoint folder (out/NAME/ckpt_best)",
        "DIR": "Hugging Face folder, or nanoGPT's ckpt.pt"}


def main(argv=None):
    parser = Parser(prog="convert.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, help_text, read, written, *own) in COMMANDS.items():
        example = next(line for line in __doc__.splitlines() if f" convert.py {name} " in line)
        command = commands.add_parser(name, help=help_text, description=example)
        command.add_argument("source", metavar=read, help=READ[read])
        command.add_argument("out", metavar=written, help="what to write; nothing may be there yet")
        if own:
            command.add_argument(own[0], dest="own", **own[1])
    args = parser.parse_args(argv)
    with as_command("convert.py"):
        out = Path(args.out)
        if out.exists() and (out.is_file() or any(out.iterdir())):
            raise ValueError(f"{out} exists, and nothing is written over.\n  Name another place, or remove it first.")
        COMMANDS[args.command][0](args.source, out, *([args.own] if "own" in args else []))


if __name__ == "__main__":
    main()

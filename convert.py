"""Change a run's vocabulary or tie, and exchange models with other tools.

    python convert.py resize out/RUN out/NEW --add "<|think|>" "<|answer|>"   more special tokens
    python convert.py untie out/RUN out/NEW                            a head of its own
    python convert.py tie out/RUN out/NEW [--keep embed]               one table again
    python convert.py gather out/RUN out/NEW                           a sharded run as one file of weights
    python convert.py export out/RUN DIR [--license mit]               a folder for transformers, vLLM and others
    python convert.py import DIR out/RUN                               the way back; DIR may be nanoGPT's ckpt.pt
    python convert.py gguf out/RUN FILE.gguf [--type q8_0]             a file for llama.cpp

out/RUN means its last checkpoint; out/RUN/ckpt_best can be named instead.  Nothing is changed in place: every command
writes something new, and refuses to write over something old.

How it works
------------
*resize* appends rows to the table (and to an untied head).  A new row is the mean of the trained rows plus noise of a
hundredth of their spread: the mean gives the new token an average logit instead of one that random rows would push to
the top, the noise keeps several new tokens from being each other's twins with the same gradients for ever.  Rows that
were padding have never been trained and are made anew in the same way.  Old rows are not touched.  Moments of new rows
start at 0, all others are carried over, so training goes on where it was.

*untie* copies the table, *tie* keeps one of two; the optimizer's moments go with their table.  Tables that differ are
not averaged and not chosen between silently: --keep says which one stays, and then logits change.

*gather* and all others read a run whatever its layout; elsewhere model.safetensors is what tools know.

*export*, *import* rest on hf.py, which holds the names, settings and tokenizers of others and says what is refused.

*gguf* writes llama.cpp's format through its own package.  Its `llama` and `smollm3` rotate neighbouring channels, so
rows of wq and wk change places there; its `qwen3` rotates as we do.  llama.cpp has its split patterns built in, under
names (PRE), and a tokenizer with another pattern cannot be said.  Norms and learned positions stay fp32, as in
llama.cpp's own converter.
"""

import argparse
import contextlib
import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    from stack.config import not_installed
    not_installed(error)

from model import GPT, ModelConfig
from stack.checkpoint import folder as checkpoint
from stack.config import as_command
from stack.counts import num_params
from stack.data.shards import read_meta
from stack.data.tokenizer import PATTERN, Tokenizer
from stack.exchange import hf
from stack.metrics import read_log
from stack.optim import make_optimizers

NOISE = 0.01  # of new rows, in standard deviations of the trained ones
PRE = {PATTERN: "llama-bpe", hf.GPT2_PATTERN: "gpt-2", hf.DIGITS_PATTERN: "smollm",
       PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}


# ---------------------------------------------------------------------------------------------------------------------
# The table's life


def grow(table, n_real: int, n_rows: int):
    """Trained rows, then rows of mean + noise.  table (V, C), of which n_real rows are trained -> (n_rows, C)."""
    old = table[:n_real].float()
    generator = torch.Generator().manual_seed(n_real)  # not a constant: growing twice must not repeat the noise
    noise = torch.randn(n_rows - n_real, table.shape[1], generator=generator)
    return torch.cat([table[:n_real], (old.mean(0) + NOISE * old.std() * noise).to(table.dtype)])


def resize(run, out, names: list[str]):
    """Give a run more special tokens: tokenizer, table, head and moments together."""
    model, tokenizer, state = checkpoint.load_model(run)
    old, larger = model.cfg, tokenizer.with_specials(names)
    cfg = replace(old, vocab_size=larger.vocab_size)
    weights = {name: grow(t, old.vocab_size, cfg.padded_vocab_size) if name in hf.TABLES else t
               for name, t in model.state_dict().items()}

    def moments(t):  # (V, C); new rows have none
        return torch.cat([t[:old.vocab_size], t.new_zeros(cfg.padded_vocab_size - old.vocab_size, t.shape[1])])

    rewrite(run, out, model, state, cfg, larger, weights, moments=moments)
    added = ", ".join(f"{name} = {larger.special_ids[name]}" for name in names)
    print(f"{out}: {added}; {cfg.vocab_size} ids in {cfg.padded_vocab_size} rows (before: {old.vocab_size} in "
          f"{old.padded_vocab_size}).  Make data for it with: python prepare.py SOURCE --tokenizer {out}")


def untie(run, out):
    """Give the head a table of its own, equal to the embedding."""
    model, tokenizer, state = checkpoint.load_model(run)
    if not model.cfg.tie_embeddings:
        raise ValueError(f"{run} is untied already.\n  Give a run with tie_embeddings=True.")
    weights = {**model.state_dict(), "head.weight": model.embed.weight.detach().clone()}
    rewrite(run, out, model, state, replace(model.cfg, tie_embeddings=False), tokenizer, weights,
            source={"head.weight": "embed.weight"})
    print(f"{out}: embedding and head are two tables; {model.embed.weight.numel():,} parameters more")


def tie(run, out, keep: str | None):
    """Make embedding and head one table; `keep` ("embed" or "head") decides where they differ."""
    model, tokenizer, state = checkpoint.load_model(run)
    if model.cfg.tie_embeddings:
        raise ValueError(f"{run} is tied already.\n  Give a run with tie_embeddings=False.")
    n, weights = model.cfg.vocab_size, model.state_dict()
    apart = (weights["embed.weight"][:n] - weights["head.weight"][:n]).abs().max().item()  # pad rows do not matter
    if apart and keep is None:
        raise ValueError(f"embedding and head of {run} differ by up to {apart:.3g}: one of them has to go, and logits "
                         "change.\n  Say which one stays: --keep embed or --keep head.")
    kept = {None: "embed.weight", "embed": "embed.weight", "head": "head.weight"}[keep]
    weights = {**weights, "embed.weight": weights[kept]}
    del weights["head.weight"]
    rewrite(run, out, model, state, replace(model.cfg, tie_embeddings=True), tokenizer, weights,
            source={"embed.weight": kept})
    print(f"{out}: one table" + (f", that of {kept.removesuffix('.weight')}; the two differed by up to {apart:.3g}"
                                 if apart else ""))


def gather(run, out):
    """Put a run that several ranks saved in parts together: the same run in the ordinary files."""
    model, tokenizer, state = checkpoint.load_model(run)
    rewrite(run, out, model, state, model.cfg, tokenizer, model.state_dict())
    print(f"{out}: {num_params(model.cfg)['total']:,} parameters in one file; go on from it with --init_from=resume")


def rewrite(run, out, old: GPT, state: dict, cfg: ModelConfig, tokenizer: Tokenizer, weights: dict, *, source=None,
            moments=None):
    """Write out/ckpt_last with these weights and the run's progress.

    Optimizer state of a parameter comes from the one `source` names, or from its own; that of a table goes through
    moments(tensor).
    """
    source = source or {}
    train = state["train"] and {**state["train"], "out_dir": str(out)}  # None for an import: not trained here
    with torch.device("meta"):
        model = GPT(cfg)
    model.load_state_dict(weights, assign=True)
    before, after = (make_optimizers(m, optimizer=(train or {}).get("optimizer", "muon")) for m in (old, model))
    scaler = torch.amp.GradScaler("cpu")
    fresh = scaler.state_dict()
    checkpoint.load_optimizers(run, old, before, scaler, strict=False)
    state_of = {name: opt.state[p] for opt in before for name, p in old.named_parameters() if p in opt.state}
    for opt in after:
        for name in (name for group in opt.param_groups for name in group["param_names"]):
            entry = state_of.get(source.get(name, name), {})
            change = moments if moments and name in hf.TABLES else torch.clone
            opt.state[model.get_parameter(name)] = {
                key: change(v) if torch.is_tensor(v) and v.ndim == 2 else v for key, v in entry.items()}
    progress = {**state["progress"], "wandb_id": None, "best_val": None}  # there is no ckpt_best to be better than
    save_run(out, model, tokenizer, {**state, "train": train, "progress": progress},
             optimizers=after if state_of else (), scaler=scaler if scaler.state_dict() != fresh else None)


def save_run(out, model: GPT, tokenizer: Tokenizer, state: dict, *, optimizers=(), scaler=None):
    """A run folder of one checkpoint, and the settings beside it as a config file."""
    kept = {key: state[key] for key in ("progress", "data", "imported_from") if key in state}
    checkpoint.save(out, "ckpt_last", model=model, optimizers=optimizers, scaler=scaler, tokenizer=tokenizer,
                    model_cfg=model.cfg, train_cfg=state["train"], state=kept)
    (Path(out) / "config.json").write_text(json.dumps({**asdict(model.cfg), **(state["train"] or {})}, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# In and out


@contextlib.contextmanager
def written_aside(path: Path):
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


def export(run, out: Path, licence: str = "unknown"):
    """A Hugging Face folder with a model card."""
    model, tokenizer, state = checkpoint.load_model(run)
    with written_aside(out) as aside:
        hf.save_folder(model, tokenizer, aside)
        card = model_card(model, tokenizer, state, Path(run), out.resolve().name, licence)
        (aside / "README.md").write_text(card, encoding="utf-8")
    pads = model.cfg.padded_vocab_size - model.cfg.vocab_size
    print(f"{out}: {hf.settings_to_hf(model.cfg)['architectures'][0]}, {model.cfg.vocab_size} ids"
          + (f" ({pads} pad rows left out)" if pads else ""))


def model_card(model: GPT, tokenizer: Tokenizer, state: dict, run: Path, name: str, licence: str) -> str:
    """README.md of an export: what the run's own files say about it, and how to use it."""
    cfg, counts = model.cfg, num_params(model.cfg)
    total = counts["total"] - (cfg.padded_vocab_size - cfg.vocab_size) * cfg.d_model * (1 if cfg.tie_embeddings else 2)
    architecture = hf.settings_to_hf(cfg)["architectures"][0]
    rows = [("Architecture", f"{architecture}: {cfg.n_layers} layers, width {cfg.d_model}, {cfg.n_heads} query "
             f"and {cfg.n_kv_heads} key/value heads of {cfg.head_dim}, MLP {cfg.d_ff}, context {cfg.max_seq_len}"),
            ("Parameters", f"{total:,}, embedding and head {'tied' if cfg.tie_embeddings else 'apart'}"),
            ("Tokenizer", f"byte-level BPE, {cfg.vocab_size:,} ids, sha256 {tokenizer.fingerprint[:16]}")]
    base, step, train = state.get("imported_from"), state["progress"]["step"], state["train"]
    made, hub, settings = f"converted from {base}" if base else "not yet trained", [], ""
    if step > 0:
        base = state["progress"].get("base")
        made = f"finetuned from {Path(base.removeprefix('hf:')).name}" if base else "trained from scratch"
        n_tokens = state["progress"].get("tokens") or state["progress"]["seqs_seen"] * train["seq_len"]
        sources = data_sources(train["data_dir"], state["data"])
        hub = [source.split(":")[1] for source in sources if source.startswith("hf:")]
        rates = f"{train['adamw_lr']:g} (AdamW)"
        if train["optimizer"] == "muon":
            rates = f"{train['muon_lr']:g} (Muon on matrices), " + rates
        rows += [("Training", f"{step:,} steps of {train['batch_tokens']:,} tokens, "
                  f"{n_tokens:,} tokens in all"),
                 ("Data", f"{Path(train['data_dir']).name}{': ' * bool(sources)}{', '.join(sources)}; sha256 "
                  f"{state['data'][:16]}"),
                 ("Learning rate", f"{rates}, {train['schedule']}, {train['warmup_steps']:,} steps of warm-up"),
                 ("Seed", train["seed"])]
        own = {key: value for key, value in train.items() if not key.endswith("_dir") and key not in (
            "init_from", "device", "wandb_project")}  # the rest is about a machine and its user
        settings = f"\nEvery training setting:\n\n```json\n{json.dumps(own, indent=1)}\n```\n"
    log = read_log((run.parent if run.name.startswith("ckpt_") else run) / "log.jsonl")
    if held := [line for line in log if line.get("val_bpb") is not None and line["step"] <= step]:
        rows.append(("Held-out", f"{held[-1]['val_loss']:.4f} nats per token, {held[-1]['val_bpb']:.4f} bits per "
                     f"byte at step {held[-1]['step']:,}"))
    head = "\n".join(["library_name: transformers", "pipeline_tag: text-generation", f"license: {licence}",
                      *["datasets:"] * bool(hub), *(f"- {name}" for name in hub)])
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"""---
{head}
---

# {name}

A language model {made} with Stack-100M.

| | |
|---|---|
{table}

Every document of its training data began with `{tokenizer.boundary}`, and so should a prompt.
The same token ends a text.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer(tokenizer.bos_token + "Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```
{settings}"""


def data_sources(data_dir, fingerprint: str) -> list[str]:
    """What a data set says it was made of, local files by their last name only; [] if it is gone or another one."""
    try:
        meta = read_meta(data_dir)
    except (ValueError, OSError):
        return []
    sources = [source["source"] for source in meta.get("sources", ()) if isinstance(source, dict)]
    return [source if source.startswith("hf:") else Path(source).name for source in sources
            if meta["data_fingerprint"] == fingerprint]


def import_model(source, out, *, tokenizer: str | None):
    """A run folder from a Hugging Face folder or a checkpoint of nanoGPT."""
    source, given = Path(source.removeprefix("hf:")), None
    if not source.exists():
        raise FileNotFoundError(f"{source} not found.\n  Give a Hugging Face folder on this machine or nanoGPT's file.")
    if tokenizer is not None:
        given = Tokenizer.load(tokenizer) if Path(tokenizer).exists() else Tokenizer.from_tiktoken(tokenizer)
    if source.is_file():
        model, words = load_nanogpt(source, given)
    else:
        model, words = hf.load_folder(source, tokenizer=given)
    progress = {"step": 0, "seqs_seen": 0, "bad_steps": 0, "best_val": None, "wandb_id": None}
    save_run(out, model, words, {"train": None, "progress": progress, "data": None,
                                 "imported_from": source.resolve().name})
    print(f"{out}: {num_params(model.cfg)['total']:,} parameters, {words.vocab_size} ids, documents begin with "
          f"{words.boundary}.\n  Finetune it with: python train.py CONFIG --init_from={out}")


def load_nanogpt(path: Path, tokenizer: Tokenizer | None) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer of nanoGPT's ckpt.pt; GPT-2's tokenizer unless another one is given."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        args, tensors = saved["model_args"], saved["model"]
    except Exception as error:  # whatever unpickling a foreign file comes to
        raise ValueError(f"{path} is no checkpoint that nanoGPT's train.py wrote ({type(error).__name__}: {error}).\n"
                         "  Give a Hugging Face folder, or a file with model and model_args.") from None
    if tokenizer is None and args["vocab_size"] not in (50257, 50304):
        raise ValueError(f"{path} has {args['vocab_size']} ids, which is not GPT-2's vocabulary, and no tokenizer.\n"
                         "  Name one: --tokenizer data/NAME (nanoGPT's character tables are no byte-level BPE).")
    tokenizer = tokenizer or Tokenizer.from_tiktoken("gpt2")
    cfg = ModelConfig(vocab_size=tokenizer.vocab_size, d_model=args["n_embd"], n_layers=args["n_layer"],
                      n_heads=args["n_head"], n_kv_heads=args["n_head"], head_dim=args["n_embd"] // args["n_head"],
                      d_ff=4 * args["n_embd"], max_seq_len=args["block_size"], pos="learned", norm="layernorm",
                      mlp="gelu", bias=args.get("bias", True), qk_norm=False, dropout=args.get("dropout", 0.0))
    print("convert.py: nanoGPT's GELU is the exact one, here it is GPT-2's tanh form; logits agree to about three "
          "digits", file=sys.stderr)
    return hf.from_theirs(tensors, cfg, hf.GPT2, conv1d=False), tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# GGUF


def write_gguf(run, path: Path, kind: str):
    """One file with weights and tokenizer for llama.cpp; kind: f32, f16, bf16 or q8_0."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError("the package gguf is not installed.\n  Install it with: pip install gguf") from None
    model, tokenizer, _ = checkpoint.load_model(run)
    cfg, arch = model.cfg, hf.family(model.cfg)
    if tokenizer.pattern not in PRE:
        raise ValueError(f"llama.cpp has no name for the split pattern of {run}'s tokenizer ({tokenizer.pattern!r}).\n"
                         f"  It has {', '.join(PRE.values())}.")
    if arch == "smollm3" and (cfg.nope_every != 4 or cfg.bias):
        raise ValueError(f"llama.cpp's smollm3 means nope_every=4 and no biases; {run} has nope_every={cfg.nope_every} "
                         f"and bias={cfg.bias}.\n  Export it to a folder instead: python convert.py export {run} DIR")
    if arch == "gpt2":
        model = hf.with_zero_biases(model)
    writer = gguf.GGUFWriter(None, arch)
    writer.add_name(Path(run).resolve().name)
    writer.add_context_length(cfg.max_seq_len)
    writer.add_embedding_length(cfg.d_model)
    writer.add_block_count(cfg.n_layers)
    writer.add_feed_forward_length(cfg.d_ff)
    writer.add_head_count(cfg.n_heads)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")])
    if arch == "gpt2":
        writer.add_layer_norm_eps(cfg.norm_eps)
    else:
        writer.add_head_count_kv(cfg.n_kv_heads)
        writer.add_layer_norm_rms_eps(cfg.norm_eps)
        writer.add_key_length(cfg.head_dim)
        writer.add_value_length(cfg.head_dim)
        writer.add_rope_dimension_count(cfg.head_dim)
        writer.add_rope_freq_base(cfg.rope_theta)
    add_words(writer, tokenizer, gguf.TokenType)
    for name, tensor in hf.to_theirs(model, hf.GGUF).items():
        if arch in ("llama", "smollm3") and (".attn_q." in name or ".attn_k." in name):
            heads = tensor.unflatten(0, (-1, 2, cfg.head_dim // 2))  # (H or K, 2, D/2, ...)
            tensor = heads.transpose(1, 2).flatten(0, 2)  # channel d next to d + D/2
        wanted = gguf.GGMLQuantizationType[kind.upper()]
        if tensor.ndim == 1 or name.startswith("position_embd"):
            wanted = gguf.GGMLQuantizationType.F32
        elif kind == "q8_0" and tensor.shape[1] % 32:  # its blocks are 32 wide
            wanted = gguf.GGMLQuantizationType.F16
        if wanted == gguf.GGMLQuantizationType.F16 and tensor.abs().max() > 65504:
            raise ValueError(f"{name} has values beyond fp16 (up to {tensor.abs().max():.3g}).\n  Use --type bf16.")
        writer.add_tensor(name, gguf.quantize(tensor.contiguous().numpy(), wanted), raw_dtype=wanted)
    with written_aside(path) as aside:
        writer.write_header_to_file(aside)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(f"{path}: {arch}, {kind}, {path.stat().st_size / 2**20:.1f} MiB"
          + ("; llama.cpp normalizes nothing, so give it text in NFC" if tokenizer.nfc else ""))


def add_words(writer, tokenizer: Tokenizer, types):
    """The tokenizer, in llama.cpp's terms: GPT-2's scheme of printable bytes, a type per token, merges."""
    letters = hf.byte_letters()
    texts = [f"[unused {i}]" for i in range(tokenizer.vocab_size)]
    kinds = [types.UNUSED] * tokenizer.vocab_size
    for token, i in tokenizer.ranks.items():
        texts[i], kinds[i] = "".join(letters[b] for b in token), types.NORMAL
    for name, i in tokenizer.special_ids.items():
        texts[i], kinds[i] = name, types.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE[tokenizer.pattern])
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join("".join(letters[b] for b in part) for part in pair)
                             for pair in hf.merges_of(tokenizer.ranks)])
    writer.add_bos_token_id(tokenizer.boundary_id)
    writer.add_eos_token_id(tokenizer.boundary_id)
    if "<|pad|>" in tokenizer.special_ids:
        writer.add_pad_token_id(tokenizer.special_ids["<|pad|>"])
    writer.add_add_bos_token(True)  # documents begin with the boundary here


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    text = __doc__.split("How it works")[0]
    parser = argparse.ArgumentParser(prog="convert.py", description=text, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in (
            ("resize", "add special tokens"), ("untie", "a head of its own"), ("tie", "one table again"),
            ("gather", "one file of weights from a sharded run"),
            ("export", "write a Hugging Face folder"), ("gguf", "write a file for llama.cpp"),
            ("import", "read a Hugging Face folder or nanoGPT's ckpt.pt")):
        example = next(line for line in text.splitlines() if f" convert.py {name} " in line)
        command = commands.add_parser(name, help=help_text, description=example, allow_abbrev=False,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_argument("source", metavar="DIR" if name == "import" else "RUN", help=(
            "Hugging Face folder, or nanoGPT's ckpt.pt" if name == "import" else
            "run folder (out/NAME: its ckpt_last) or a checkpoint folder (out/NAME/ckpt_best)"))
        command.add_argument("out", metavar={"export": "DIR", "gguf": "FILE", "import": "RUN"}.get(name, "NEW"),
                             help="what to write; nothing may be there yet")
        if name == "resize":
            command.add_argument("--add", nargs="+", required=True, metavar="NAME", help="names of new special tokens")
        elif name == "tie":
            command.add_argument("--keep", choices=("embed", "head"), help="the table that stays where they differ")
        elif name == "export":
            command.add_argument("--license", default="unknown", help="for the model card, as Hugging Face writes it")
        elif name == "gguf":
            command.add_argument("--type", choices=("f16", "q8_0", "bf16", "f32"), default="f16",
                                 help="number format of the matrices (f16)")
        elif name == "import":
            command.add_argument("--tokenizer", help="a data or run folder, or tiktoken's name, instead of DIR's own")
    args = parser.parse_args(argv)
    with as_command("convert.py"):
        out = Path(args.out)
        if out.exists() and (out.is_file() or any(out.iterdir())):
            raise ValueError(f"{out} exists, and nothing is written over.\n  Name another place, or remove it first.")
        if args.command == "resize":
            resize(args.source, out, args.add)
        elif args.command == "untie":
            untie(args.source, out)
        elif args.command == "tie":
            tie(args.source, out, args.keep)
        elif args.command == "gather":
            gather(args.source, out)
        elif args.command == "export":
            export(args.source, out, args.license)
        elif args.command == "gguf":
            write_gguf(args.source, out, args.type)
        else:
            import_model(args.source, out, tokenizer=args.tokenizer)


if __name__ == "__main__":
    main()

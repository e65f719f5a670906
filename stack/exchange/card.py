"""The README.md of an exported model: what the run's own files say about it, and how to use it."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

from model import GPT
from stack.counts import num_params
from stack.data.shards import read_meta
from stack.data.tokenizer import Tokenizer
from stack.exchange import hf
from stack.log import read_log
from stack.optim import make_optimizers


def model_card(model: GPT, tokenizer: Tokenizer, state: dict, run: Path, name: str, licence: str) -> str:
    """The card of `run`'s checkpoint under `name`; model, tokenizer and state as load_model gives them."""
    cfg = model.cfg
    architecture = hf.settings_to_hf(cfg)["architectures"][0]
    rows = [("Architecture", f"{architecture}: {cfg.n_layers} layers, width {cfg.d_model}, {cfg.n_heads} query and "
             f"{cfg.n_kv_heads} key/value heads of {cfg.head_dim}, MLP {cfg.d_ff}, context {cfg.max_seq_len}"),
            ("Parameters", f"{num_params(replace(cfg, vocab_multiple=1))['total']:,}, embedding and head "
             f"{'tied' if cfg.tie_embeddings else 'apart'}"),
            ("Tokenizer", f"byte-level BPE, {cfg.vocab_size:,} ids, sha256 {tokenizer.fingerprint[:16]}")]
    base, step, train = state.get("imported_from"), state["progress"]["step"], state["train"]
    made, hub, settings = f"converted from {base}" if base else "not yet trained", [], ""
    if step > 0:
        base = state["progress"].get("base")
        made = f"finetuned from {Path(base.removeprefix('hf:')).name}" if base else "trained from scratch"
        n_tokens = state["progress"].get("tokens") or state["progress"]["seqs_seen"] * train["seq_len"]
        sources = data_sources(train["data_dir"], state["data"])
        hub = [source.split(":")[1] for source in sources if source.startswith("hf:")]
        ramp = min(train.get("ramp_steps", 0), step)
        ramp = f" (half of that in the first {ramp:,})" if ramp else ""
        rows += [("Training", f"{step:,} steps of {train['batch_tokens']:,} tokens{ramp}, {n_tokens:,} learned in all"),
                 ("Data", f"{Path(train['data_dir']).name}{': ' * bool(sources)}{', '.join(sources)}; sha256 "
                  f"{state['data'][:16]}"),
                 ("Learning rate", f"{learning_rates(model, train)}, {train['schedule']}, {train['warmup_steps']:,} "
                  "steps of warm-up"),
                 ("Seed", train["seed"])]
        own = {key: value for key, value in train.items() if not key.endswith("_dir") and key not in (
            "init_from", "device", "wandb_project")}  # the rest is about a machine and its user
        settings = f"\nEvery training setting:\n\n```json\n{json.dumps(own, indent=1)}\n```\n"
    log = read_log((run.parent if run.name.startswith("ckpt_") else run) / "log.jsonl")
    if held := [line for line in log if line.get("val_bpb") is not None and line["step"] <= step]:
        rows.append(("Held-out", f"{held[-1]['val_loss']:.4f} nats per token, {held[-1]['val_bpb']:.4f} bits per "
                     f"byte at step {held[-1]['step']:,}"))
    said = (f"Every document of its training data began with `{tokenizer.boundary}`, and so should a prompt.\n"
            "The same token ends a text.")
    inputs = 'inputs = tokenizer(tokenizer.bos_token + "Once upon a time", return_tensors="pt")'
    if tokenizer.chat_template:
        said = "It was trained to answer in conversations, by the chat template that comes with it."
        inputs = ('messages = [{"role": "user", "content": "Hello"}]\ninputs = tokenizer.apply_chat_template('
                  'messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)')
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

{said}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
{inputs}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```
{settings}"""


def learning_rates(model: GPT, train: dict) -> str:
    """The peak of each optimizer that the run's settings make, by the optimizer's own name."""
    given = {key: train[key] for key in inspect.signature(make_optimizers).parameters if key in train}
    rates = {f"{group['peak_lr']:g} ({type(opt).__name__})": opt for opt in make_optimizers(model, **given)
             for group in opt.param_groups}
    return ", ".join(rates)


def data_sources(data_dir, fingerprint: str) -> list[str]:
    """What a data set says it was made of, local files by their last name only; [] if it is gone or another one."""
    try:
        meta = read_meta(data_dir)
    except (ValueError, OSError):
        return []
    sources = [source["source"] for source in meta.get("sources", ()) if isinstance(source, dict)]
    return [source if source.startswith("hf:") else Path(source).name for source in sources
            if meta["data_fingerprint"] == fingerprint]

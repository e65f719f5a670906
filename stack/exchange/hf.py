"""The same model in other people's words: names, shapes and settings of Hugging Face folders, and nanoGPT's files.

A model from here is one of four architectures elsewhere, and which one follows from its switches (`family`).  What none
of the four can say is refused with the switch that is in the way; nothing is approximated.  The way in adds Mistral,
which without its sliding window is Llama.

*A changed model.*  What model.py computes is the truth.  A setting, parameter or buffer that is not known here is
refused by its name (`refuse_unknown`), and a folder that has been written is read again and held against the model
(formulas.py).

*Tensors.*  NAMES is the whole map.  Everyone rotates channel d with d + D/2 as we do, so most tensors only change their
name; GPT-2 fuses q, k and v and stores its linears transposed.  Rows that pad the table never leave.

*Settings.*  A config.json is read with the defaults of its own architecture, because Hugging Face may leave out what
equals them (Mistral's unsaid sliding_window is 4096, not none).  Every field that changes the function is translated or
must have the value that means "not used".
"""

import hashlib
import json
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import torch

from model import GPT, ModelConfig
from stack.counts import undrawn
from stack.data import chat
from stack.data.tokenizer import Tokenizer
from stack.exchange import formulas
from stack.exchange.hf_files import blaming, load_tensors, local, read_json
from stack.exchange.hf_tokenizers import tokenizer_from_hf, tokenizer_to_hf

# ---------------------------------------------------------------------------------------------------------------------
# Tensors.  Shapes: V rows of a table, C d_model.

NAMES = {
    # ours:      (Llama, Mistral, Qwen3, SmolLM3; GPT-2, nanoGPT)
    "embed":       ("model.embed_tokens", "transformer.wte"),
    "pos_embed":   (None, "transformer.wpe"),
    "norm":        ("model.norm", "transformer.ln_f"),
    "head":        ("lm_head", "lm_head"),
    "blocks":      ("model.layers", "transformer.h"),  # and in each of them:
    "norm1":       ("input_layernorm", "ln_1"),
    "attn.wq":     ("self_attn.q_proj", "attn.c_attn"),
    "attn.wk":     ("self_attn.k_proj", "attn.c_attn"),
    "attn.wv":     ("self_attn.v_proj", "attn.c_attn"),
    "attn.wo":     ("self_attn.o_proj", "attn.c_proj"),
    "attn.q_norm": ("self_attn.q_norm", None),
    "attn.k_norm": ("self_attn.k_norm", None),
    "norm2":       ("post_attention_layernorm", "ln_2"),
    "mlp.w_gate":  ("mlp.gate_proj", None),
    "mlp.w_up":    ("mlp.up_proj", "mlp.c_fc"),
    "mlp.w_down":  ("mlp.down_proj", "mlp.c_proj"),
}
PARTS = re.compile(r"(blocks\.\d+\.|)(.*?)\.?(\w+)")  # of a parameter's name: layer, module, weight or bias
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's GPT-2, (out, in) elsewhere
BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and tables that older versions saved
ARITHMETIC = 1 << 38  # tokens times parameters, for which a model that comes in is compared: 2,048 of 100M, seconds
NO_BIAS = ("embed.weight", "head.weight", "wte.weight", "wpe.weight")  # ends of names, ours and theirs


def refuse_unknown(model: GPT) -> None:
    """Raise ValueError with the names of what a changed model.py has added: settings in use, parameters, buffers."""
    unknown = [f"the setting {field.name}={getattr(model.cfg, field.name)!r}" for field in fields(model.cfg)
               if field.name not in KNOWN and getattr(model.cfg, field.name) != field.default]
    for name, _ in model.named_parameters():
        _, module, kind = PARTS.fullmatch(name).groups()
        if module not in NAMES or kind not in ("weight", "bias"):
            unknown.append(f"the parameter {name}")
    unknown += [f"the buffer {name}" for name, _ in model.named_buffers()]
    if unknown:
        raise ValueError(f"model.py was changed: convert.py does not know {', '.join(unknown[:8])}"
                         f"{' and more' * (len(unknown) > 8)}.\n  The model can be used here as it is; "
                         "stack/exchange/hf.py has the names that are known.")


def renamed(ours, cfg: ModelConfig) -> dict[str, list[str]]:
    """Their name of every tensor -> our names: several, stacked by rows, where they fuse what we keep apart."""
    whose, names = int(cfg.pos == "learned"), {}
    for name in ours:
        layer, module, kind = PARTS.fullmatch(name).groups()
        theirs = f"{layer.replace('blocks', NAMES['blocks'][whose])}{NAMES[module][whose]}.{kind}"
        names.setdefault(theirs, []).append(name)
    return names


def with_biases(state: dict[str, torch.Tensor], cfg: ModelConfig) -> dict[str, torch.Tensor]:
    """GPT-2 elsewhere always has biases: zeros say the same as none.  Linears are (out, in)."""
    return {name.removesuffix("weight") + "bias": p.new_zeros(len(p)) for name, p in state.items()
            if cfg.pos == "learned" and name.endswith("weight") and not name.endswith(NO_BIAS)} | state


def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-2's linears (out, in) <-> (in, out); under their names."""
    return {name: tensor.t() if name.endswith(CONV1D) else tensor for name, tensor in tensors.items()}


def to_theirs(model: GPT) -> dict[str, torch.Tensor]:
    """The model's tensors under their names, in their shapes, without pad rows; NaN and infinity are refused."""
    refuse_unknown(model)
    state, tensors = with_biases(model.state_dict(), model.cfg), {}
    for theirs, ours in renamed(state, model.cfg).items():
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        if ours[0] in ("embed.weight", "head.weight"):
            tensor = tensor[:model.cfg.vocab_size]
        if not tensor.isfinite().all():
            raise ValueError(f"{' and '.join(ours)} has {int((~tensor.isfinite()).sum()):,} values that are NaN or "
                             "infinite: the weights are damaged.\n  Use an earlier checkpoint.")
        tensors[theirs] = tensor.float().cpu()
    tensors, written = {name: tensor.contiguous() for name, tensor in turned(tensors).items()}, set()
    for name, tensor in tensors.items():  # what layers share has to be there for each
        tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor
        written.add(tensor.data_ptr())
    return tensors


def from_theirs(tensors: dict[str, torch.Tensor], cfg: ModelConfig) -> GPT:
    """A model of their tensors, in fp32; a ValueError names each that is missing, left over or of the wrong shape."""
    def bare(name):
        return re.sub(r"^((module|_orig_mod|model|transformer)\.)*", "", name)

    with undrawn():
        model = GPT(cfg)
    refuse_unknown(model)
    state = {name: torch.zeros(p.shape) for name, p in model.state_dict().items()}  # ours in fp32; pad rows are zero
    names = renamed(with_biases(state, cfg), cfg)
    full = {bare(name): name for name in (*names, "lm_head.weight")}
    tensors = {full.get(bare(name), name): tensor for name, tensor in tensors.items() if not BUFFERS.search(name)}
    embed = NAMES["embed"][cfg.pos == "learned"] + ".weight"
    if cfg.tie_embeddings and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not torch.equal(tensors.setdefault(embed, head), head):
            raise ValueError(f"the settings tie embedding and head, but {embed} and lm_head.weight differ.\n"
                             "  Set tie_word_embeddings to false in config.json to keep both.")
    for name in {embed, "lm_head.weight"} & tensors.keys():
        tensors[name] = tensors[name][:cfg.vocab_size]  # their own pad rows go
    shapes = {name: tensor.to("meta", torch.float32) for name, tensor in tensors.items()}
    *_, problems = formulas.hidden(settings_to_hf(cfg), shapes, torch.zeros(1, 1, dtype=int, device="meta"))
    if problems:
        more = [f"... and {len(problems) - 8} more."] if len(problems) > 8 else []
        raise ValueError("the tensors do not fit the settings.\n  Is config.json that of these weights?\n  "
                         + "\n  ".join(sorted(problems)[:8] + more))
    for theirs, tensor in turned(tensors).items():
        for name, rows in zip(names[theirs], tensor.chunk(len(names[theirs])), strict=True):  # fused are q, k and v
            if name in state:  # not a bias that only they have
                state[name][:len(rows)] = rows
    model.load_state_dict(state, assign=True)
    if all(tensor.isfinite().all() for tensor in tensors.values()):  # else damaged, which is said where it is used
        most = ARITHMETIC // sum(tensor.numel() for tensor in tensors.values())
        formulas.compare(model, settings_to_hf(cfg), {name: tensor.float() for name, tensor in tensors.items()},
                         min(max(most, 64), formulas.LONGEST))
    return model


def checksum(model) -> str:
    """Of a model's weights: ranks that read them each for itself compare it."""
    sums = [(name, p.double().sum().item(), p.double().abs().sum().item()) for name, p in model.named_parameters()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Settings

ROTARY = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
          "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "d_ff": "intermediate_size",
          "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}
LEARNED = {"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "d_ff": "n_inner",
           "max_seq_len": "n_positions", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
           "dropout": "resid_pdrop"}
ROPE = dict(pos="rope", norm="rmsnorm", mlp="swiglu", embed_scale=False, logit_softcap=0.0)
UNSAID = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e4}
FAMILIES = {  # switches: what a model of ours must be; keys: our name -> theirs; fixed: theirs and all it can be here;
    # unsaid: what leaving a key out means there, where that is a value we use or must refuse
    "qwen3": dict(architecture="Qwen3ForCausalLM", keys=ROTARY,
                  switches=dict(**ROPE, qk_norm=True, bias=False, nope_every=0), unsaid=UNSAID | {"head_dim": 128},
                  fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}),
    "llama": dict(architecture="LlamaForCausalLM", keys=ROTARY, switches=dict(**ROPE, qk_norm=False, nope_every=0),
                  unsaid=UNSAID, fixed={"hidden_act": "silu"}),
    "smollm3": dict(architecture="SmolLM3ForCausalLM", keys=ROTARY, switches=dict(**ROPE, qk_norm=False),
                    unsaid={**UNSAID, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
                    fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "gpt2": dict(architecture="GPT2LMHeadModel", keys=LEARNED,
                 switches={**ROPE, "pos": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False},
                 unsaid={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "resid_pdrop": 0.1},
                 fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "add_cross_attention": False,
                        "scale_attn_by_inverse_layer_idx": False}),
}
FAMILIES["mistral"] = FAMILIES["llama"] | dict(  # only read: as a model it is a Llama
    unsaid=UNSAID | {"sliding_window": 4096}, fixed={"hidden_act": "silu", "sliding_window": None})
OPTIONAL = ("num_key_value_heads", "head_dim", "n_inner")  # or null: as many as heads, d_model / heads, 4 * d_model
KNOWN = {"vocab_size", "vocab_multiple", "rope_theta", *ROTARY, *LEARNED, *FAMILIES["qwen3"]["switches"],
         "embed_constant"}  # of initial values only: nothing to carry over, and 0 in what comes back


def family(cfg: ModelConfig) -> str:
    """The architecture that computes exactly what this model computes; a ValueError says what stands in the way."""
    shapes = {"gpt2": {"n_kv_heads": cfg.n_heads, "head_dim": cfg.d_model / cfg.n_heads},
              "llama": {"d_model": -(-cfg.d_model // cfg.n_heads) * cfg.n_heads},  # transformers insists on it
              "smollm3": {"nope_every": cfg.nope_every or 4}}
    differ = {}
    for name in ("qwen3", "llama", "smollm3", "gpt2"):
        needed = FAMILIES[name]["switches"] | shapes.get(name, {})
        differ[name] = [f"{key}={value!r} (here {getattr(cfg, key)!r})" for key, value in needed.items()
                        if getattr(cfg, key) != value]
        if not differ[name]:
            return name
    nearest = min(map(len, differ.values()))
    raise ValueError("no architecture elsewhere computes what this model computes:\n  " + "\n  ".join(
        f"{name} needs {', '.join(switches)}" for name, switches in differ.items() if len(switches) == nearest)
        + "\n  Train with those settings to exchange a model; it can be used here as it is.")


def rotating(every: int, n_layers: int) -> list[int]:
    """SmolLM3's no_rope_layers, which are 1 where there are rotary positions: all but every n-th (0: all)."""
    return [int(not every or (i + 1) % every != 0) for i in range(n_layers)]


def settings_to_hf(cfg: ModelConfig) -> dict:
    """config.json of this model."""
    name = family(cfg)
    facts = FAMILIES[name]
    config = {"architectures": [facts["architecture"]], "model_type": name, "dtype": "float32",
              "vocab_size": cfg.vocab_size}
    config |= {theirs: getattr(cfg, ours) for ours, theirs in facts["keys"].items()} | facts["fixed"]
    if name == "gpt2":
        return config | {"embd_pdrop": cfg.dropout, "attn_pdrop": cfg.dropout}
    # both spellings of theta: transformers 5 reads the second, everything older the first
    config |= {"rope_theta": cfg.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}}
    if name != "qwen3":
        config |= {"attention_bias": cfg.bias, "mlp_bias": cfg.bias}
    if name == "smollm3":
        config |= {"no_rope_layer_interval": cfg.nope_every, "no_rope_layers": rotating(cfg.nope_every, cfg.n_layers)}
    return config


def settings_from_hf(config: dict, vocab_size: int) -> ModelConfig:
    """The ModelConfig of a config.json; a ValueError lists every setting that cannot be expressed here."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type is {name!r}.\n  Models that can be read: {', '.join(sorted(FAMILIES))}.")
    facts = FAMILIES[name]
    said = facts["unsaid"] | config
    values, problems = dict(facts["switches"]), []
    for ours, theirs in facts["keys"].items():
        values[ours], default = said.get(theirs), getattr(ModelConfig, ours)
        if values[ours] is None and theirs not in OPTIONAL:
            problems.append(f"{theirs} is missing.")
        elif type(values[ours]) not in (type(default), type(None), *[int] * isinstance(default, float)):
            problems.append(f"{theirs} is {values[ours]!r}; it must be of type {type(default).__name__}.")
        else:
            continue
        values[ours] = default  # to go on to the other problems with
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    kind, part = rope.get("rope_type", rope.get("type", "default")), "partial_rotary_factor"
    attention_bias, mlp_bias = (bool(said.get(key)) for key in ("attention_bias", "mlp_bias"))
    values |= {"bias": attention_bias or name == "gpt2", "d_ff": values["d_ff"] or 4 * values["d_model"],
               "n_kv_heads": values.get("n_kv_heads") or values["n_heads"],
               "head_dim": values.get("head_dim") or values["d_model"] // max(values["n_heads"], 1),
               "rope_theta": float(rope.get("rope_theta") or said.get("rope_theta", ModelConfig.rope_theta))}
    rotated, every = [], 0
    if name == "smollm3":
        rotated = said.get("no_rope_layers") or rotating(said["no_rope_layer_interval"], values["n_layers"])
        values["nope_every"] = every = rotated.index(0) + 1 if 0 in rotated else 0
    refusals = [
        *((said.get(theirs, value) != value, f"{theirs} is {said.get(theirs)!r}; it must be {value!r}.")
          for theirs, value in facts["fixed"].items()),
        *((said.get(key) not in (None, 1), f"{key} is {said.get(key)!r}; there is none here.")
          for key in ("quantization_config", part)),
        (any(kind != "full_attention" for kind in said.get("layer_types") or ()),
         f"layer_types is {said.get('layer_types')}; attention here sees the whole context."),
        (name not in ("gpt2", "qwen3") and attention_bias != mlp_bias, f"attention_bias is {attention_bias}, mlp_bias "
         f"{mlp_bias}; here all linears have a bias or none has."),
        (kind != "default" or any(isinstance(value, dict) for value in rope.values()),
         f"rotary positions are scaled ({kind!r}: {rope}); only unscaled ones can be expressed."),
        (rope.get(part) not in (None, 1), f"{part} is {rope.get(part)}; here whole heads are rotated."),
        (rotated != rotating(every, len(rotated)),
         f"no_rope_layers is {rotated}; here every n-th layer goes without rotary positions."),
    ]
    problems += [sentence for refused, sentence in refusals if refused]
    if not problems:
        cfg = ModelConfig(vocab_size=vocab_size, **values)
        problems = cfg.problems()
    if problems:
        raise ValueError(f"this {name} model cannot be expressed here:\n  " + "\n  ".join(problems))
    return cfg


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def load_folder(folder, *, tokenizer: Tokenizer | None = None) -> tuple[GPT, Tokenizer]:
    """Model (fp32, CPU) and tokenizer of a local Hugging Face folder; refuses what cannot be expressed exactly."""
    folder = local(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} not found.\n  Give a folder that save_pretrained wrote, or "
                                "one from a model hub.")
    config = read_json(folder / "config.json")
    with blaming(folder / "config.json"):
        settings_from_hf(config, vocab_size=1)  # why a model cannot be read, before any reason about its tokenizer
    tokenizer = tokenizer or tokenizer_from_hf(folder)
    return from_theirs(load_tensors(folder), settings_from_hf(config, tokenizer.vocab_size)), tokenizer


def save_folder(model: GPT, tokenizer: Tokenizer, folder) -> None:
    """Write the model as a folder that transformers, vLLM and others read, fp32, one file; then compare the two.

    llama.cpp gets a file of its own (gguf.py): its converter knows tokenizers like ours by a list of theirs.  What was
    written before a refusal is the caller's to remove.
    """
    from safetensors.torch import save_file

    folder, cfg = Path(folder), model.cfg
    if cfg.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the model has {cfg.vocab_size} ids, the tokenizer {tokenizer.vocab_size}.\n  Export a run "
                         "with the tokenizer it was trained with.")
    config, tensors, words = settings_to_hf(cfg), to_theirs(model), tokenizer_to_hf(tokenizer)
    ends = {"bos_token": tokenizer.boundary, "eos_token": tokenizer.boundary}
    if "<|pad|>" in tokenizer.special_ids:
        ends["pad_token"] = "<|pad|>"
    ids = {f"{key}_id": tokenizer.special_ids[name] for key, name in ends.items()}
    stops = {"eos_token_id": chat.ends(tokenizer)} if tokenizer.chat_template else {}
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.chat_template:
        (folder / "chat_template.jinja").write_text(chat.jinja(tokenizer), encoding="utf-8")
    for name, content in {
        "config.json": config | ids, "generation_config.json": ids | stops, "tokenizer.json": words,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.max_seq_len,
                                  "clean_up_tokenization_spaces": False, **ends},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes for its owner only
    formulas.compare(model, read_json(folder / "config.json"), load_tensors(folder))


def load_nanogpt(path: Path, tokenizer: Tokenizer | None) -> tuple[GPT, Tokenizer]:
    """Model and tokenizer of nanoGPT's ckpt.pt; GPT-2's tokenizer unless another one is given.

    The file is a pickle, and is read without running what is in it.
    """
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
    cfg = ModelConfig(**FAMILIES["gpt2"]["switches"], vocab_size=tokenizer.vocab_size, d_model=args["n_embd"],
                      n_layers=args["n_layer"], n_heads=args["n_head"], n_kv_heads=args["n_head"],
                      head_dim=args["n_embd"] // args["n_head"], d_ff=4 * args["n_embd"],
                      max_seq_len=args["block_size"], bias=args.get("bias", True), dropout=args.get("dropout", 0.0))
    print("convert.py: nanoGPT's GELU is the exact one, here it is GPT-2's tanh form; logits agree to about three "
          "digits", file=sys.stderr)
    return from_theirs(turned(tensors if cfg.bias else with_biases(tensors, cfg)), cfg), tokenizer

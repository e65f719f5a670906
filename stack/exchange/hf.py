"""The same model in other people's words: names, shapes, settings and tokenizer of Hugging Face folders.

A model from here is one of four architectures elsewhere, and which one follows from its switches (`family`): the
defaults are Qwen3, without QK-norm it is Llama, with `nope_every` and no QK-norm SmolLM3, with the GPT-2 switches
GPT-2.  What none of the four can say is refused with the switch that is in the way; nothing is approximated.  The way
in adds Mistral, which without its sliding window is Llama.

*Tensors.*  TOP and BLOCK are the whole map.  Everyone rotates channel d with d + D/2 as we do, so most tensors only
change their name; GPT-2 fuses q, k and v and stores its linears transposed.  Rows that pad the table never leave: a
folder's vocab_size is its number of rows is the number of ids.

*Settings.*  A config.json is read with the defaults of its own architecture, because Hugging Face may leave out what
equals them (Mistral's unsaid sliding_window is 4096, not none).  Every field that changes the function is translated or
must have the value that means "not used".

*Tokenizer.*  tiktoken merges any two neighbours whose concatenation has a rank, lowest rank first; Hugging Face merges
listed pairs in listed order.  The two agree when every split of every token into two tokens is listed, in order of
rank, and a piece that is itself a token is taken whole (`ignore_merges`): written so on the way out.  On the way in the
conditions under which ranks can stand for merges are checked, and then both tokenizers encode a thousand hard strings
and the whole vocabulary; one that differs anywhere is refused, because wrong ids train a model on noise in silence.
"""

import contextlib
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from model import GPT, ModelConfig
from stack.data.tokenizer import BOUNDARY, Tokenizer

# ---------------------------------------------------------------------------------------------------------------------
# Tensors.  Shapes: V rows of a table, C d_model.

LLAMA, GPT2, GGUF = 0, 1, 2  # whose names: columns of TOP and BLOCK
TOP = {
    # ours:      (Llama, Mistral, Qwen3, SmolLM3; GPT-2, nanoGPT; llama.cpp)
    "embed":     ("model.embed_tokens", "transformer.wte", "token_embd"),
    "pos_embed": (None, "transformer.wpe", "position_embd"),
    "blocks":    ("model.layers", "transformer.h", "blk"),
    "norm":      ("model.norm", "transformer.ln_f", "output_norm"),
    "head":      ("lm_head", "lm_head", "output"),
}
BLOCK = {
    "norm1":       ("input_layernorm", "ln_1", "attn_norm"),
    "attn.wq":     ("self_attn.q_proj", "attn.c_attn", "attn_q"),
    "attn.wk":     ("self_attn.k_proj", "attn.c_attn", "attn_k"),
    "attn.wv":     ("self_attn.v_proj", "attn.c_attn", "attn_v"),
    "attn.wo":     ("self_attn.o_proj", "attn.c_proj", "attn_output"),
    "attn.q_norm": ("self_attn.q_norm", None, "attn_q_norm"),
    "attn.k_norm": ("self_attn.k_norm", None, "attn_k_norm"),
    "norm2":       ("post_attention_layernorm", "ln_2", "ffn_norm"),
    "mlp.w_gate":  ("mlp.gate_proj", None, "ffn_gate"),
    "mlp.w_up":    ("mlp.up_proj", "mlp.c_fc", "ffn_up"),
    "mlp.w_down":  ("mlp.down_proj", "mlp.c_proj", "ffn_down"),
}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # (in, out) in Hugging Face's GPT-2, (out, in) elsewhere
BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")  # masks and tables that older versions saved
TABLES = ("embed.weight", "head.weight")  # (V, C), padded here and nowhere else


def renamed(cfg: ModelConfig, whose: int) -> dict[str, list[str]]:
    """Their name of every tensor -> our names: several, stacked by rows, where they fuse what we keep apart."""
    with torch.device("meta"):
        ours = GPT(cfg).state_dict()
    names: dict[str, list[str]] = {}
    for name in ours:
        module, kind = name.rsplit(".", 1)
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            module = f"{TOP['blocks'][whose]}.{layer}.{BLOCK[inner][whose]}"
            if whose == GGUF and cfg.pos == "learned":
                module = re.sub("attn_[qkv]$", "attn_qkv", module)
        else:
            module = TOP[module][whose]
        names.setdefault(f"{module}.{kind}", []).append(name)
    return names


def to_theirs(model: GPT, whose: int) -> dict[str, torch.Tensor]:
    """The model's tensors under their names, in their shapes, without pad rows; NaN and infinity are refused."""
    state, tensors = model.state_dict(), {}
    for theirs, ours in renamed(model.cfg, whose).items():
        tensor = torch.cat([state[name] for name in ours]) if len(ours) > 1 else state[ours[0]]
        if ours[0] in TABLES:
            tensor = tensor[:model.cfg.vocab_size]
        if not tensor.isfinite().all():
            raise ValueError(f"{' and '.join(ours)} has {int((~tensor.isfinite()).sum()):,} values that are NaN or "
                             "infinite: the weights are damaged.\n  Use an earlier checkpoint.")
        if whose == GPT2 and theirs.endswith(CONV1D):
            tensor = tensor.t()
        tensors[theirs] = tensor.detach().cpu().contiguous()
    return tensors


def from_theirs(tensors: dict[str, torch.Tensor], cfg: ModelConfig, whose: int, *, conv1d: bool = True) -> GPT:
    """A model of their tensors, in fp32; a ValueError names each that is missing, left over or of the wrong shape."""
    def bare(name):
        return re.sub(r"^((module|_orig_mod|model|transformer)\.)*", "", name)

    tensors = {bare(name): tensor for name, tensor in tensors.items() if not BUFFERS.search(name)}
    embed, head = bare(TOP["embed"][whose]) + ".weight", bare(TOP["head"][whose]) + ".weight"
    if cfg.tie_embeddings and head in tensors:
        if embed in tensors and not torch.equal(tensors[embed], tensors[head]):
            raise ValueError(f"the settings tie embedding and head, but {embed} and {head} differ.\n"
                             "  Set tie_word_embeddings to false in config.json to keep both.")
        tensors.setdefault(embed, tensors[head])
        del tensors[head]
    wanted = {bare(theirs): ours for theirs, ours in renamed(cfg, whose).items()}
    problems = [f"{name} is missing." for name in wanted if name not in tensors]
    problems += [f"{name} {tuple(tensors[name].shape)} has no place here." for name in tensors if name not in wanted]
    with torch.device("meta"):
        model = GPT(cfg)
    shapes, state = {name: p.shape for name, p in model.state_dict().items()}, {}
    for theirs in wanted.keys() & tensors.keys():
        ours, tensor = wanted[theirs], tensors[theirs].float()
        if whose == GPT2 and conv1d and theirs.endswith(CONV1D):
            tensor = tensor.t()
        if ours[0] in TABLES and len(tensor) >= cfg.vocab_size:  # their own pad rows go, ours are zero
            pads = tensor.new_zeros(cfg.padded_vocab_size - cfg.vocab_size, tensor.shape[1])
            tensor = torch.cat([tensor[:cfg.vocab_size], pads])  # (V, C)
        rows = [shapes[name][0] for name in ours]
        needed = (sum(rows), *shapes[ours[0]][1:])
        if needed != tuple(tensor.shape):
            problems.append(f"{theirs} is {tuple(tensor.shape)}, the settings need {needed}.")
            continue
        state |= {name: piece.clone() for name, piece in zip(ours, tensor.split(rows), strict=True)}
    if problems:
        more = [f"... and {len(problems) - 8} more."] if len(problems) > 8 else []
        raise ValueError("the tensors do not fit the settings.\n  Is config.json that of these weights?\n  "
                         + "\n  ".join(sorted(problems)[:8] + more))
    model.load_state_dict(state, assign=True)
    return model


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

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.is_file() and not index.is_file():
        hint = ("\n  It has pytorch_model.bin, which is a pickle: save the model again with transformers."
                if list(folder.glob("pytorch_model*.bin")) else "")
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {index.name}.{hint}")
    with blaming(index):
        listed = {} if single.is_file() else read_json(index)["weight_map"]
        names = [folder / name for name in sorted(set(listed.values())) or [single.name]]
    tensors: dict[str, torch.Tensor] = {}
    for path in names:
        if not path.is_file():
            raise FileNotFoundError(f"{index} lists {path.name}, which is not there.\n  Download the folder again.")
        with blaming(path):
            tensors |= load_file(path)
    if lost := sorted(set(listed) - set(tensors)):
        raise ValueError(f"{index} lists {lost[0]} ({len(lost)} in all), which is in none of its files.")
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Settings

ROTARY = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
          "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "d_ff": "intermediate_size",
          "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}
LEARNED = {"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "d_ff": "n_inner",
           "max_seq_len": "n_positions", "norm_eps": "layer_norm_epsilon", "tie_embeddings": "tie_word_embeddings",
           "dropout": "resid_pdrop"}
ROPE = dict(pos="rope", norm="rmsnorm", mlp="swiglu")
FAMILIES = {  # switches: what a model of ours must be; keys: our name -> theirs; fixed: theirs and all it can be here
    "qwen3": dict(architecture="Qwen3ForCausalLM", keys=ROTARY,
                  switches=dict(**ROPE, qk_norm=True, bias=False, nope_every=0),
                  fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}),
    "llama": dict(architecture="LlamaForCausalLM", keys=ROTARY, switches=dict(**ROPE, qk_norm=False, nope_every=0),
                  fixed={"hidden_act": "silu"}),
    "smollm3": dict(architecture="SmolLM3ForCausalLM", keys=ROTARY, switches=dict(**ROPE, qk_norm=False),
                    fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "gpt2": dict(architecture="GPT2LMHeadModel", keys=LEARNED,
                 switches=dict(pos="learned", norm="layernorm", mlp="gelu", qk_norm=False),
                 fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "add_cross_attention": False,
                        "scale_attn_by_inverse_layer_idx": False}),
    "mistral": dict(architecture=None, keys=ROTARY, switches=None,  # only read: as a model it is a Llama
                    fixed={"hidden_act": "silu", "sliding_window": None}),
}
UNSAID = {  # what an architecture means by leaving a key out, where that is a value we use or must refuse
    "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128, "rope_theta": 10000.0},
    "llama": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0},
    "smollm3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "gpt2": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_inner": None, "resid_pdrop": 0.1},
    "mistral": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "sliding_window": 4096},
}


def family(cfg: ModelConfig) -> str:
    """The architecture that computes exactly what this model computes; a ValueError says what stands in the way."""
    whole = {"embed_scale": False, "logit_softcap": 0.0}
    shapes = {"gpt2": {"n_kv_heads": cfg.n_heads, "head_dim": cfg.d_model / cfg.n_heads},
              "llama": {"d_model": -(-cfg.d_model // cfg.n_heads) * cfg.n_heads},  # transformers insists on it
              "smollm3": {"nope_every": cfg.nope_every or 4}}
    reasons = []
    for name, facts in FAMILIES.items():
        if facts["switches"] is None:
            continue
        needed = facts["switches"] | whole | shapes.get(name, {})
        differ = [f"{key}={value!r} (here {getattr(cfg, key)!r})" for key, value in needed.items()
                  if getattr(cfg, key) != value]
        if not differ:
            return name
        reasons.append((len(differ), f"{name} needs {', '.join(differ)}"))
    closest = min(count for count, _ in reasons)
    raise ValueError("no architecture elsewhere computes what this model computes:\n  "
                     + "\n  ".join(reason for count, reason in reasons if count == closest)
                     + "\n  Train with those settings to exchange a model; it can be used here as it is.")


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
        config |= {"no_rope_layer_interval": cfg.nope_every,
                   "no_rope_layers": [int((i + 1) % cfg.nope_every != 0) for i in range(cfg.n_layers)]}
    return config


def settings_from_hf(config: dict, vocab_size: int) -> ModelConfig:
    """The ModelConfig of a config.json; a ValueError lists every setting that cannot be expressed here."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"model_type is {name!r}.\n  Models that can be read: {', '.join(sorted(FAMILIES))}.")
    facts, said = FAMILIES[name], UNSAID[name] | config
    problems = [f"{theirs} is {said[theirs]!r}; it must be {value!r}." for theirs, value in facts["fixed"].items()
                if said.get(theirs, value) != value]
    for key in ("quantization_config", "partial_rotary_factor"):
        if said.get(key) not in (None, 1, 1.0):
            problems.append(f"{key} is {said[key]!r}; there is none here.")
    if any(kind != "full_attention" for kind in said.get("layer_types") or ()):
        problems.append(f"layer_types has {sorted(set(said['layer_types']))}; attention here sees the whole context.")
    values = {ours: said.get(theirs) for ours, theirs in facts["keys"].items()}
    for ours, theirs in facts["keys"].items():
        kind = type(getattr(ModelConfig(), ours))
        if values[ours] is not None and type(values[ours]) not in ((int, float) if kind is float else (kind,)):
            problems.append(f"{theirs} is {values[ours]!r}; it must be of type {kind.__name__}.")
            values[ours] = getattr(ModelConfig(), ours)  # to go on to the other problems with
    if name == "gpt2":
        values |= {"n_kv_heads": values["n_heads"], "bias": True, **facts["switches"]}
        if values["d_ff"] is None and values["d_model"]:
            values["d_ff"] = 4 * values["d_model"]
    else:
        values |= ROPE | {"qk_norm": name == "qwen3", "bias": bool(said.get("attention_bias"))}
        if bool(said.get("mlp_bias")) != values["bias"] and name != "qwen3":
            problems.append(f"attention_bias is {values['bias']}, mlp_bias {bool(said.get('mlp_bias'))}; here all "
                            "linears have a bias or none has.")
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, dict) for value in rope.values()):
            problems.append(f"rotary positions are scaled ({kind!r}: {rope}); only unscaled ones can be expressed.")
        if rope.get("partial_rotary_factor", 1) not in (None, 1):
            problems.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}; here whole heads are rotated.")
        values["rope_theta"] = float(rope.get("rope_theta") or said["rope_theta"])
        values["n_kv_heads"] = values["n_kv_heads"] or values["n_heads"]
    if name == "smollm3":
        layers = said.get("no_rope_layers") or [
            int((i + 1) % said["no_rope_layer_interval"] != 0) for i in range(values["n_layers"] or 0)]
        every = layers.index(0) + 1 if 0 in layers else 0
        values["nope_every"] = every
        if layers != [int(every == 0 or (i + 1) % every != 0) for i in range(len(layers))]:
            problems.append(f"no_rope_layers is {layers}; here every n-th layer goes without rotary positions.")
    if not values.get("head_dim") and values["n_heads"] and values["d_model"]:
        values["head_dim"] = values["d_model"] // values["n_heads"]
    problems += [f"{facts['keys'].get(ours, ours)} is missing." for ours, value in values.items() if value is None]
    if not problems:
        cfg = ModelConfig(vocab_size=vocab_size, **values)
        problems = cfg.problems()
    if problems:
        raise ValueError(f"this {name} model cannot be expressed here:\n  " + "\n  ".join(problems))
    return cfg


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

# ByteLevel's own rule as tiktoken spells it, so that GPT-2's tokenizer has one fingerprint wherever it comes from
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# SmolLM cuts out single digits before ByteLevel's rule looks at what is between them: as one rule, no piece begins with
# a space and a digit, and white space before a digit stays in one piece
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"


def byte_letters() -> list[str]:
    """The printable character that byte-level BPE files write for each byte: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to split a token into two tokens, by rank of the token."""
    merges = []
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def tokenizer_to_hf(tokenizer: Tokenizer) -> dict:
    """tokenizer.json: byte-level BPE with our split pattern and special tokens."""
    letters = byte_letters()

    def spell(token):
        return "".join([letters[b] for b in token])

    vocab = {spell(token): rank for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1])}
    if clash := [name for name in tokenizer.special_ids if name in vocab]:
        raise ValueError(f"the special token {clash[0]!r} is spelled like token {vocab[clash[0]]}, and Hugging Face "
                         "keeps both in one table.\n  Add it under a name that is no word, such as <|name|>.")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    specials = sorted(tokenizer.special_ids.items(), key=lambda item: item[1])
    if [i for _, i in specials] != [*range(len(vocab), len(vocab) + len(specials))]:
        vocab |= specials  # else Hugging Face numbers them as if they stood right behind the ranks
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    # a possessive {1,3}+ of tiktoken's own patterns means "repeat that" to Oniguruma; without + it cuts the same pieces
    split = {"type": "Split", "pattern": {"Regex": re.sub(r"(\{\d+,\d*\})\+", r"\1", tokenizer.pattern)},
             "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in specials],
        "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                  "vocab": vocab, "merges": [f"{spell(a)} {spell(b)}" for a, b in merges_of(tokenizer.ranks)]},
    }


def split_pattern(pre: dict | None) -> str | None:
    """The one regular expression that cuts text as this pre_tokenizer does, or None where that is not known."""
    steps = pre.get("pretokenizers", []) if pre and pre.get("type") == "Sequence" else [pre or {}]
    kinds = [step.get("type") for step in steps]
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and regex:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and regex:
        return DIGITS_PATTERN
    if kinds == ["Split", "ByteLevel"] and not regex and "Regex" in steps[0]["pattern"] and (
            steps[0]["behavior"], steps[0]["invert"]) in (("Isolated", False), ("Removed", True)):
        return steps[0]["pattern"]["Regex"]
    return None


def hard_strings(n: int, specials=()) -> list[str]:
    """The same n texts every time: scripts, spaces, controls, contractions, digits and special names, shuffled."""
    family = "\u200d".join("👨👩👧👦")
    parts = ["a", "Hello", " world", "don't", "I'LL", "'ſ", "’s", "naïve", "ǅ", "ﬀ", "e\u0301", "x²", "½", "Ⅷ", "٣٤٥",
             "0", "42", "1234567", "3.14", "१२३४", "你好", "世界", "ひらがな", "한국어", "각", "ไทย", "العربية",
             "עברית", "हिन्दी", "ß", "👍🏽", "🇩🇪", "🤷", family, "\x00", "\x07", "\x1b[0m", "\x7f", "\x85", "\u200b",
             "\u200d", "\ufeff", "\ufffd", "\uffff", "\U0010ffff", " ", "  ", "    ", " " * 40, "\t", "\t\t", "\n",
             "\n\n\n", "\r\n", "\r", "\v", "\f", "\u00a0", "\u2003", "\u2028", "\u3000", "\u1680", "==", "->", "/*",
             "...", "!!!!", "def f(x):\n    return x", "_", "__init__", "<", "|>", "http://a.b/c?d=e&f", "\\n", '"',
             "'", "`", "…", "“", "a" * 30, "=" * 70, *specials]
    rng = random.Random(0)
    texts = ["", " " * 3000, "\n" * 500, "a" * 2000, "ab" * 800, "\u3000" * 300, "".join(parts)]
    ranges = ((0x20, 0x250), (0x20, 0xD800), (0xE000, 0x30000))
    while len(texts) < n:
        texts.append("".join(rng.choice(parts) if rng.random() < 0.9 else chr(rng.randrange(*rng.choice(ranges)))
                             for _ in range(rng.randint(1, 20))))
    return texts[:n]


def check_agreement(tokenizer: Tokenizer, theirs: dict) -> None:
    """Raise ValueError with the first of 1,000 hard strings, or of the vocabulary, that the two encode differently."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ValueError("the package tokenizers is not installed, and without it nobody can tell whether a converted "
                         "tokenizer gives the same ids.\n  Install it with: pip install tokenizers") from None
    other = tokenizers.Tokenizer.from_str(json.dumps(theirs))
    words = [token.decode("utf-8", "ignore") for token in tokenizer.ranks]
    texts = hard_strings(1000, tokenizer.special_ids) + words
    for text, found in zip(texts, other.encode_batch(texts, add_special_tokens=False), strict=True):
        ids = tokenizer.encode(text, special=True)
        if ids != found.ids:
            at = next((i for i, (a, b) in enumerate(zip(ids, found.ids, strict=False)) if a != b), 0)
            raise ValueError(f"the tokenizers disagree on {text[:60]!r}: from token {at} on {ids[at:at + 8]} here, "
                             f"{found.ids[at:at + 8]} there.  It has rules that ranks and one pattern cannot express.")


def tokenizer_from_hf(folder) -> Tokenizer:
    """Our tokenizer with the ids of a folder's tokenizer.json, or a ValueError that says why there is none."""
    folder = local(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found.\n  Save the tokenizer again with transformers, or name "
                                "another: --tokenizer data/NAME (or tiktoken's name, --tokenizer gpt2).")
    data, byte_of = read_json(path), {letter: b for b, letter in enumerate(byte_letters())}
    with blaming(path):
        bpe, added, pre, problems = data["model"], data.get("added_tokens") or [], data.get("pre_tokenizer"), []
        specials = {token["content"]: token["id"] for token in added}
        words = {word: i for word, i in bpe["vocab"].items() if word not in specials} if bpe["type"] == "BPE" else {}
        merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in bpe.get("merges") or ()]
    if bpe["type"] != "BPE" or bpe.get("byte_fallback") or not byte_of.keys() >= set("".join(words)):
        problems.append(f"it is {bpe['type']} over characters; only byte-level BPE can be expressed.")
    elif lost := 256 - sum(letter in words for letter in byte_of):
        problems.append(f"{lost} of the 256 bytes have no token.")
    elif unknown := [pair for pair in merges if not {*pair, "".join(pair)} <= words.keys()]:
        problems.append(f"it merges {unknown[0]}, which makes no token.")
    elif (order := [words[a + b] for a, b in merges]) != sorted(order):
        problems.append("its merges are not in the order of its ids, and tiktoken merges in the order of ids.")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if bpe.get(key):
            problems.append(f"{key} is {bpe[key]!r}; there is none here.")
    for token in added:
        if flags := [key for key in ("lstrip", "rstrip", "single_word") if token.get(key)]:
            problems.append(f"the added token {token['content']!r} has {', '.join(flags)}; here names match exactly.")
    pattern = split_pattern(pre)
    if pattern is None:
        problems.append("only one split pattern, or GPT-2's with or without single digits, before byte level can be "
                        f"expressed; its pre_tokenizer is {json.dumps(pre)[:200]}.")
    if (normalizer := (data.get("normalizer") or {}).get("type")) not in (None, "NFC"):
        problems.append(f"it normalizes text ({normalizer}); here there is NFC or nothing.")
    boundary = next((name for name in (BOUNDARY, *_end_tokens(folder, specials)) if name in specials), None)
    if boundary is None:
        problems.append(f"no special token can mark where documents start: {BOUNDARY} or an eos_token is needed.")
    if problems:
        raise ValueError(f"{path} cannot be converted with identical ids:\n  " + "\n  ".join(problems))
    ranks = {bytes(byte_of[letter] for letter in word): i for word, i in words.items()}
    tokenizer = Tokenizer(pattern, ranks, specials, boundary=boundary, nfc=normalizer == "NFC")
    check_agreement(tokenizer, data)
    return tokenizer


def _end_tokens(folder: Path, specials: dict[str, int]) -> list[str]:
    """What a folder's files call the end of a text, most specific first."""
    found = []
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        data = read_json(folder / name) if (folder / name).is_file() else {}
        token, ids = data.get("eos_token"), data.get("eos_token_id")
        found += [token["content"] if isinstance(token, dict) else token]
        found += [text for text, i in specials.items() if i in (ids if isinstance(ids, list) else [ids])]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def local(folder) -> Path:
    """The folder that a path means, or hf: and a path, as train.py and prepare.py take it; it is never downloaded."""
    path = Path(str(folder).removeprefix("hf:"))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder on this machine.\n  Download the model first: hf download NAME "
                                f"--local-dir {path}")
    return path


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
    cfg = settings_from_hf(config, tokenizer.vocab_size)
    return from_theirs(load_tensors(folder), cfg, GPT2 if cfg.pos == "learned" else LLAMA), tokenizer


def save_folder(model: GPT, tokenizer: Tokenizer, folder) -> None:
    """Write the model as a folder that transformers, vLLM, llama.cpp's converter and others read.  fp32, one file."""
    from safetensors.torch import save_file

    folder, cfg = Path(folder), model.cfg
    if cfg.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the model has {cfg.vocab_size} ids, the tokenizer {tokenizer.vocab_size}.\n  Export a run "
                         "with the tokenizer it was trained with.")
    config, words = settings_to_hf(cfg), tokenizer_to_hf(tokenizer)
    ends = {"bos_token": tokenizer.boundary, "eos_token": tokenizer.boundary}
    if "<|pad|>" in tokenizer.special_ids:
        ends["pad_token"] = "<|pad|>"
    ids = {f"{key}_id": tokenizer.special_ids[name] for key, name in ends.items()}
    if config["model_type"] == "gpt2" and not cfg.bias:  # Hugging Face's GPT-2 always has biases: zeros say the same
        model = with_zero_biases(model)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": config | ids, "generation_config.json": ids, "tokenizer.json": words,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.max_seq_len,
                                  "clean_up_tokenization_spaces": False, **ends},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(to_theirs(model, GPT2 if cfg.pos == "learned" else LLAMA), folder / "model.safetensors",
              metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes for its owner only


def with_zero_biases(model: GPT) -> GPT:
    """The same function with the biases it did without."""
    wider = GPT(replace(model.cfg, bias=True))
    wider.load_state_dict({name: torch.zeros_like(p) for name, p in wider.state_dict().items()} | model.state_dict())
    return wider

"""llama.cpp's format, written through its own package from a Hugging Face model's settings and tensors.

Names are the package's translation of Hugging Face's.  llama.cpp's `llama` and `smollm3` rotate neighbouring channels,
so rows of q and k change places there; its `qwen3` rotates as we do.  It has its split patterns built in, under names
(PRE), and a tokenizer with another pattern cannot be said; its own converter, which knows tokenizers by a list, takes
none of ours.  Norms and learned positions stay fp32, as in that converter.
"""

from pathlib import Path

from model import GPT
from stack.data import chat
from stack.data.tokenizer import PATTERN, Tokenizer
from stack.exchange import formulas, hf
from stack.exchange.hf_tokenizers import DIGITS_PATTERN, GPT2_PATTERN, merges_of, spell

PRE = {PATTERN: "llama-bpe", GPT2_PATTERN: "gpt-2", DIGITS_PATTERN: "smollm",
       PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}


def write(path: Path, model: GPT, tokenizer: Tokenizer, kind: str, run) -> str:
    """One file with weights and tokenizer of a run; kind: f32, f16, bf16 or q8_0.  -> the architecture's name"""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError("the package gguf is not installed.\n  Install it with: pip install gguf") from None
    cfg, config, tensors = model.cfg, hf.settings_to_hf(model.cfg), hf.to_theirs(model)
    arch = config["model_type"]
    if tokenizer.pattern not in PRE:
        raise ValueError(f"llama.cpp has no name for the split pattern of {run}'s tokenizer ({tokenizer.pattern!r}).\n"
                         f"  It has {', '.join(PRE.values())}.")
    if arch == "smollm3" and (cfg.nope_every != 4 or cfg.bias):
        raise ValueError(f"llama.cpp's smollm3 means nope_every=4 and no biases; {run} has nope_every={cfg.nope_every} "
                         f"and bias={cfg.bias}.\n  Export it to a folder instead: python convert.py export {run} DIR")
    formulas.compare(model, config, tensors)
    writer = gguf.GGUFWriter(path, arch)
    facts = {"name": Path(run).resolve().name, "context_length": cfg.max_seq_len, "embedding_length": cfg.d_model,
             "block_count": cfg.n_layers, "feed_forward_length": cfg.d_ff, "head_count": cfg.n_heads,
             "vocab_size": cfg.vocab_size,
             "file_type": gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{kind.upper()}")]}
    facts |= {"layer_norm_eps": cfg.norm_eps} if arch == "gpt2" else {
        "head_count_kv": cfg.n_kv_heads, "layer_norm_rms_eps": cfg.norm_eps, "key_length": cfg.head_dim,
        "value_length": cfg.head_dim, "rope_dimension_count": cfg.head_dim, "rope_freq_base": cfg.rope_theta}
    for key, value in (facts | words(tokenizer, gguf.TokenType)).items():
        getattr(writer, f"add_{key}")(value)
    types = gguf.GGMLQuantizationType
    for key, tensor in theirs(config, tensors).items():
        small = tensor.ndim == 1 or key.startswith("position_embd")
        narrow = kind == "q8_0" and tensor.shape[-1] % 32  # its blocks are 32 wide
        wanted = types.F32 if small else types.F16 if narrow else types[kind.upper()]
        if wanted == types.F16 and tensor.abs().max() > 65504:
            raise ValueError(f"{key} has values beyond fp16 (up to {tensor.abs().max():.3g}).\n  Use --type bf16.")
        writer.add_tensor(key, gguf.quantize(tensor.contiguous().numpy(), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arch


def theirs(config: dict, tensors: dict) -> dict:
    """A Hugging Face model's tensors under llama.cpp's names and in its order of channels."""
    import gguf
    arch = config["model_type"]
    names, renamed = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 999), {}
    for name, tensor in hf.turned(tensors).items():
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            heads = tensor.unflatten(0, (-1, 2, config["head_dim"] // 2))  # (H or K, 2, D/2, ...)
            tensor = heads.transpose(1, 2).flatten(0, 2)  # channel d next to d + D/2
        renamed[names.get_name(name, (".weight", ".bias"))] = tensor
    return renamed


def words(tokenizer: Tokenizer, types) -> dict:
    """The tokenizer, in llama.cpp's terms: GPT-2's scheme of printable bytes, a type per token, merges."""
    known = {i: (spell(token), types.NORMAL) for token, i in tokenizer.ranks.items()}
    known |= {i: (name, types.CONTROL) for name, i in tokenizer.special_ids.items()}
    every = [known.get(i, (f"[unused {i}]", types.UNUSED)) for i in range(tokenizer.vocab_size)]
    pad = {"pad_token_id": tokenizer.special_ids["<|pad|>"]} if "<|pad|>" in tokenizer.special_ids else {}
    talk = {}
    if tokenizer.chat_template:
        talk = {"chat_template": chat.jinja(tokenizer, marks=False), "eot_token_id": chat.ends(tokenizer)[0]}
    return talk | {"tokenizer_model": "gpt2", "tokenizer_pre": PRE[tokenizer.pattern],
            "token_list": [text for text, _ in every], "token_types": [kind for _, kind in every],
            "token_merges": [" ".join(map(spell, pair)) for pair in merges_of(tokenizer.ranks)],
            "bos_token_id": tokenizer.boundary_id, "eos_token_id": tokenizer.boundary_id, **pad,
            "add_bos_token": True}  # documents begin with the boundary here

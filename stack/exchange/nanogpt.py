"""nanoGPT's checkpoints: one pickled file, read without running what is in it."""

import sys
from pathlib import Path

import torch

from model import GPT, ModelConfig
from stack.data.tokenizer import Tokenizer
from stack.exchange import hf


def load(path: Path, tokenizer: Tokenizer | None) -> tuple[GPT, Tokenizer]:
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
    tensors = tensors if cfg.bias else hf.with_biases(tensors, cfg)
    tensors = {name: tensor.t() if name.endswith(hf.CONV1D) else tensor for name, tensor in tensors.items()}
    return hf.from_theirs(tensors, cfg), tokenizer

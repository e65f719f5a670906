"""What the families elsewhere compute, said once more and without model.py: what an export is held against.

Written from config.json, tensors and the papers; tests hold it against transformers.
"""

import copy

import torch
import torch.nn.functional as F

LONGEST = 2048  # tokens: seconds for 100M parameters on two cores; what only later tokens would show is not seen
EVERY = 16  # one token's logits out of so many are compared, the last one's too: by attention they know of the rest
MOST = 1e-4  # of the logits' spread; fp32's rounding is a few millionths


@torch.inference_mode()
def compare(model, config: dict, tensors: dict[str, torch.Tensor], longest: int = LONGEST) -> None:
    """Raise ValueError unless `model` computes, on random ids, what these settings and tensors mean elsewhere."""
    def apart(a, b):  # rms over the vocabulary, (T,): every token counts, as a window may show at the last one only
        return (a - b).square().mean(-1).sqrt()[0]

    twin, T = copy.deepcopy(model).cpu().float().eval(), min(model.cfg.max_seq_len, longest)
    ids = torch.randint(model.cfg.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))
    theirs, head, problems = hidden(config, tensors, ids)
    if not problems:
        with torch.compiler.set_stance("force_eager"):
            ours, first = twin.hidden(ids), twin(ids[:, :EVERY])
        if (first - twin.logits(ours[:, :EVERY])).norm() > 100 * MOST * first.norm():
            problems = ["GPT.forward gives other logits than GPT.logits makes of GPT.hidden."]
    if not problems:
        for at in (slice((T - 1) % EVERY, None, EVERY), slice(None)):  # all of them only to say where it begins
            a, b = twin.logits(ours[:, at]), theirs[:, at] @ head.t()
            found, most = apart(a, b), MOST * a.std()
            if (found <= most).all():  # not where NaN is
                return
        exact, head, _ = hidden(config, {name: tensor.double() for name, tensor in tensors.items()}, ids)
        most = max(most, 4 * apart(b, exact @ head.t()).max())  # some models multiply rounding: then by how much
        if (found <= most).all():
            return
        problems = [f"on {T} random tokens, from token {int((~(found <= most)).nonzero()[0])} on, logits differ by up "
                    f"to {(a - b).abs().max():.3g}, where they spread by {a.std():.3g}."]
    raise ValueError(f"model.py was changed, and this model is no {config['architectures'][0]}: {problems[0]}\n"
                     "  It can be used here, not exported; nor can such a model come in until model.py is as it was.")


def hidden(config: dict, tensors: dict[str, torch.Tensor], ids):
    """ids (B, T) -> what the head gets (B, T, C), the head (V, C), by the formula of config["model_type"]; and, as
    sentences, what is wrong with tensors: each has to be there in the shape that the settings say, none left over."""
    left, problems = dict(tensors), []

    def take(name: str, *shape: int):
        tensor = left.pop(name, None)
        if tensor is not None and tensor.shape == shape:
            return tensor
        problems.append(f"{name} is missing." if tensor is None else
                        f"{name} is {tuple(tensor.shape)}, the settings need {shape}.")
        return torch.zeros(shape, device=ids.device)  # to go on to the other problems with

    result = (gpt2 if config["model_type"] == "gpt2" else llama)(config, take, ids)
    return *result, problems + [f"{name} {tuple(tensor.shape)} has no place here." for name, tensor in left.items()]


def llama(config: dict, take, ids):
    """Llama (arXiv 2302.13971), Qwen3, which normalizes queries and keys, SmolLM3, which rotates not every layer."""
    B, T = ids.shape
    C, H, K, D, hidden = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                                                  "head_dim", "intermediate_size"))
    attention_bias, mlp_bias = (bool(config.get(key)) for key in ("attention_bias", "mlp_bias"))
    angles = torch.arange(T)[:, None] / config["rope_theta"] ** (torch.arange(0, D, 2) / D)  # (T, D/2)
    turns = torch.polar(torch.ones_like(angles), angles).to(ids.device)
    rotated = config.get("no_rope_layers", [1] * config["num_hidden_layers"])  # where it is not 0

    def linear(x, name, rows, bias):
        return F.linear(x, take(f"{name}.weight", rows, x.shape[-1]), take(f"{name}.bias", rows) if bias else None)

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], take(f"{name}.weight", x.shape[-1]), config["rms_norm_eps"])

    def rotate(x):  # channels d and d + D/2 are one complex number
        x = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat((x.real, x.imag), -1)

    table = take("model.embed_tokens.weight", config["vocab_size"], C)
    x = table[ids]  # (B, T, C)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(h, f"{layer}.self_attn.{name}_proj", n * D, attention_bias).view(B, T, n, D).transpose(1, 2)
                   for name, n in (("q", H), ("k", K), ("v", K)))  # (B, H or K, T, D)
        if config["model_type"] == "qwen3":
            q, k = norm(q, f"{layer}.self_attn.q_norm"), norm(k, f"{layer}.self_attn.k_norm")
        if rotated[i]:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, *(t.repeat_interleave(H // K, 1) for t in (k, v)), is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{layer}.self_attn.o_proj", C, attention_bias)
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (linear(h, f"{layer}.mlp.{name}_proj", hidden, mlp_bias) for name in ("gate", "up"))
        x = x + linear(F.silu(gate) * up, f"{layer}.mlp.down_proj", C, mlp_bias)
    head = table if config["tie_word_embeddings"] else take("lm_head.weight", *table.shape)
    return norm(x, "model.norm"), head


def gpt2(config: dict, take, ids):
    """GPT-2, whose linears are (in, out)."""
    C, V, T, H = config["n_embd"], config["vocab_size"], ids.shape[1], config["n_head"]

    def linear(x, name, columns):
        return x @ take(f"{name}.weight", x.shape[-1], columns) + take(f"{name}.bias", columns)

    def norm(x, name):
        return F.layer_norm(x, (C,), take(f"{name}.weight", C), take(f"{name}.bias", C), config["layer_norm_epsilon"])

    table = take("transformer.wte.weight", V, C)
    x = table[ids] + take("transformer.wpe.weight", config["n_positions"], C)[:T]  # (B, T, C)
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn", 3 * C)
        q, k, v = (part.unflatten(-1, (H, C // H)).transpose(1, 2) for part in qkv.chunk(3, -1))  # (B, H, T, C/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{layer}.attn.c_proj", C)
        h = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc", config["n_inner"])
        x = x + linear(F.gelu(h, approximate="tanh"), f"{layer}.mlp.c_proj", C)
    head = table if config["tie_word_embeddings"] else take("lm_head.weight", V, C)
    return norm(x, "transformer.ln_f"), head

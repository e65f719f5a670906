# The baseline of the demo: nanoGPT's model and recipe (github.com/karpathy/nanoGPT) at its best size for this budget.
# Hardware: two CPU cores. Time: 5 to 12 minutes with bf16, 20 to 30 without. Expected: see README "What you get".
# Needs: python prepare.py stdlib --out data/demo --vocab_size 4096 --val_fraction 0.05
# Launch: python train.py configs/demo_nanogpt.py

import torch

# model: GPT-2's blocks, without biases
pos, norm, mlp, bias, qk_norm = "learned", "layernorm", "gelu", False, False
vocab_size, d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff, max_seq_len = 4096, 128, 4, 4, 4, 32, 512, 128

# data
data_dir, out_dir = "data/demo", "out/demo_nanogpt"
seq_len, micro_batch_size, batch_tokens, doc_mask = 128, 12, 12 * 128, False

# optimizer: AdamW, cosine to a tenth
optimizer, adamw_lr, weight_decay, beta2, grad_clip, z_loss = "adamw", 1e-3, 0.1, 0.99, 1.0, 0.0
schedule, warmup_steps, min_lr_fraction = "cosine", 100, 0.1
max_steps = 5600

eval_interval, save_interval, sample_interval, log_interval = 1400, 2800, 0, 50
dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"  # as in demo.py

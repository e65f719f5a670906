# A model from nothing on a laptop: a 1.2M-parameter decoder learns Python from the standard library's own source.
# Hardware: two CPU cores. Time: 3 to 7 minutes with bf16, 20 to 30 without. Expected: 0.96 to 1.0 bits per byte.
# Needs: python prepare.py stdlib --out data/demo --vocab_size 4096 --val_fraction 0.05
# Launch: python train.py configs/demo.py

import torch

# model: small, so that it sees every document twice in minutes; a fourth layer or more heads only cost time. With one
# key head, before embed_constant, runs ended up to a seventh worse, by how late they learned to repeat
# (docs/lab-notes.md)
vocab_size, d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff, max_seq_len = 4096, 128, 3, 2, 2, 64, 384, 256
embed_constant = 3.0  # by it heads tell places apart from the start, and learn to repeat sooner (docs/lab-notes.md)

# data
data_dir, out_dir = "data/demo", "out/demo"
seq_len, micro_batch_size, batch_tokens, doc_mask = 256, 8, 16 * 256, False

# optimizer
muon_lr, adamw_lr, z_loss = 2.5e-3, 6e-3, 0.0  # 5e-3 and 4e-3 end as well, and are 2 to 7 % worse in a fifth of the run
warmup_steps, ramp_steps, max_steps = 100, 1900, 2850  # half the batch first, when steps count for more than tokens
decay_fraction = 1 / 3

eval_interval, save_interval, sample_interval, log_interval = 1000, 1000, 1000, 50
keep = 6  # step 1000, where configs/anneal.py branches off, is still there after three stops, each of which saves

# bf16 doubles the speed of a CPU that multiplies it (AVX-512 BF16, AMX) and is emulated, far slower, on others
dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"

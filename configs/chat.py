# The demo's model learns to answer: finetuned on questions about the standard library and what its docstrings say.
# Hardware: two CPU cores. Time: a minute or two with bf16, some five without. Expected: 98 % of answers end.
# Needs: make demo, then: python prepare.py stdlib --chat --tokenizer out/demo --out data/chat --val_fraction 0.05
# Launch: python train.py configs/chat.py

from configs.demo import *  # noqa: F403

init_from, data_dir, out_dir = "out/demo", "data/chat", "out/chat"
packing, doc_mask = "best_fit", True  # conversations whole, and blind for each other

batch_tokens, ramp_steps = 8 * 256, 0
muon_lr = adamw_lr = None  # a fifth of a first run's of this length (stack/resume.py): 1.6e-3 and 1.3e-3
warmup_steps, decay_fraction, max_steps = 20, 0.6, 800
eval_interval, save_interval, sample_interval, log_interval, keep = 400, 0, 0, 50, 0

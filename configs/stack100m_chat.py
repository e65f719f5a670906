# Stack-100M learns to answer: finetuned on smoltalk's conversations. Expected: answers that end (eval.py --answers).
# Hardware: one GPU of 24 GB or more. time, estimated: H200 0.7, H100 0.7, A100 1.5, RTX 4090 2.5 h
# Needs: python prepare.py hf:HuggingFaceTB/smoltalk:all --chat --tokenizer out/stack100m --out data/stack100m_chat
# Launch: python train.py configs/stack100m_chat.py

from configs.stack100m import *  # noqa: F403

# 1.0e6 conversations of 1,000 tokens are 7630 x 131072 = 1.0e9; where the summary of prepare.py says otherwise,
# max_steps is its tokens / 131072 for one pass. The time is that at account.py's roofline for the base run, an
# optimistic end; nobody has run it yet.
init_from, data_dir, out_dir = "out/stack100m", "data/stack100m_chat", "out/stack100m_chat"
packing, doc_mask = "best_fit", True  # conversations whole, and blind for each other

micro_batch_size, batch_tokens, max_steps = 4, 131072, 7630
muon_lr = adamw_lr = None  # a fifth of a first run's of this length (stack/resume.py): 2.9e-4 and 1.5e-3
warmup_steps, decay_fraction = 100, 0.5
eval_interval, save_interval, sample_interval, keep = 500, 1000, 0, 0

# Stack-100M learns to answer: finetuned on smoltalk's conversations
# Hardware: one GPU of 24 GB or more; nobody has run it yet: what follows is estimated
# data: 1.0e6 conversations x 1,000 tokens = 1.0e9 tokens; where the summary of prepare.py says otherwise, max_steps is
#       its tokens / 131072 for one pass
# time: 7630 x 131072 = 1.0e9 tokens at account.py's roofline for the base run, an optimistic end (H200 431k, H100
#       388k, A100 190k, RTX 4090 114k tokens/s): 0.6, 0.7, 1.5, 2.4 h
# Expected: answers that end (eval.py --answers); what is in them is what 100M parameters know
# Needs: python prepare.py hf:HuggingFaceTB/smoltalk:all --chat --tokenizer out/stack100m --out data/stack100m_chat
# Launch: python train.py configs/stack100m_chat.py

from configs.stack100m import *  # noqa: F403

init_from, data_dir, out_dir = "out/stack100m", "data/stack100m_chat", "out/stack100m_chat"
packing, doc_mask = "best_fit", True  # conversations whole, and blind for each other

micro_batch_size, batch_tokens, max_steps = 4, 131072, 7630
muon_lr = adamw_lr = None  # a fifth of a first run's of this length (stack/resume.py): 2.9e-4 and 1.5e-3
warmup_steps, decay_fraction = 100, 0.5
eval_interval, save_interval, sample_interval, keep = 500, 1000, 0, 0

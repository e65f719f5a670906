# Stack-100M ends otherwise: branched off before its decay, on more mathematics, code and textbooks, on a line to 0.
# Hardware: as stack100m.py; 24 GB: --micro_batch_size=8. time, estimated: H200 1.3, H100 1.4, A100 2.9, RTX 4090 5.0 h
# Needs: python prepare.py configs/data_stack100m_anneal.py --out data/stack100m_anneal, and out/stack100m's step 34000
# Launch: python train.py configs/stack100m_anneal.py   Expected: docs/midtraining.md

from configs.stack100m import *  # noqa: F403

# The time is 3815 x 524288 = 2.0e9 tokens at account.py's roofline, an optimistic end; nobody has run it yet.
init_from, keep_moments = "out/stack100m/ckpt_step_0034000", True  # the decay begins at 34,332
data_dir, out_dir = "data/stack100m_anneal", "out/stack100m_anneal"
muon_lr = adamw_lr = None  # goes on with the run's own
schedule, warmup_steps, decay_fraction, max_steps, keep = "linear", 0, 1.0, 3815, 0

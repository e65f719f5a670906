# Stack-100M ends otherwise: branched off before its decay, on more mathematics, code and textbooks, along a line to 0
# Hardware: one 80 GB GPU, as for configs/stack100m.py; nobody has run it yet: what follows is estimated
# time: 3815 x 524288 = 2.0e9 tokens at account.py's roofline, an optimistic end (H200 431k, H100 388k, A100 190k
#       tokens/s): 1.3, 1.4, 2.9 h
# Expected: a lower loss on the new mixture and about the same on the old one; docs/midtraining.md has the demo's
# Needs: python train.py configs/stack100m.py, which keeps step 34000, and then:
#        python prepare.py configs/data_stack100m_anneal.py --out data/stack100m_anneal
# Launch: python train.py configs/stack100m_anneal.py

from configs.stack100m import *  # noqa: F403

init_from, keep_moments = "out/stack100m/ckpt_step_0034000", True  # the decay begins at 34,332
data_dir, out_dir = "data/stack100m_anneal", "out/stack100m_anneal"
muon_lr = adamw_lr = None  # goes on with the run's own
schedule, warmup_steps, decay_fraction, max_steps, keep = "linear", 0, 1.0, 3815, 0

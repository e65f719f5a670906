# The demo's run ends otherwise: a branch from before its decay, with its moments, on another mixture, on a line to 0.
# Hardware: two CPU cores. Time: one minute, an estimate. Expected: docs/midtraining.md.
# Needs: make demo, then: python prepare.py configs/data_anneal.py --out data/anneal
# Launch: python train.py configs/anneal.py

from configs.demo import *  # noqa: F403

init_from, keep_moments = "out/demo/ckpt_step_0001000", True
data_dir, out_dir = "data/anneal", "out/anneal"
packing, doc_mask = "best_fit", True  # conversations whole, and blind for each other

batch_tokens, ramp_steps = 8 * 256, 0  # as at that step
muon_lr = adamw_lr = None  # goes on with the run's own
schedule, warmup_steps, decay_fraction, max_steps = "linear", 0, 1.0, 400
eval_interval, save_interval, sample_interval, log_interval, keep = 200, 0, 0, 50, 0

# Stack-100M on one 24 GB GPU: stack100m.py's run, 8 sequences at a time (peak about 11 GB; uncompiled 22: too much)
# time, estimated: account.py's roofline, an optimistic end: RTX 4090 49.5 h (112k tokens/s)
# loss, estimated: as stack100m.py, whose batches and updates are the same: 2.96 nats per token
# python train.py configs/stack100m_24gb.py   (make data/stack100m first: README, "The run this is for")

from configs.stack100m import *  # noqa: F403

out_dir = "out/stack100m_24gb"
micro_batch_size = 8  # x 2048 x 32: the same tokens a step, and so the same rates, 1.2e-3 and 6.1e-3

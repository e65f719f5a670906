# Stack-100M: 101,353,728 parameters, 20B tokens, one 80 GB GPU (peak about 37 GB, compiled; account.py has the parts)
# time, estimated: account.py's roofline, an optimistic end: H200 13.0 h, H100 14.3 h (387k tokens/s), A100 29.5 h
# loss, estimated: 1.82 + 482/N^0.348 + 2085/D^0.366 (Chinchilla's law refitted, arXiv 2404.10102) = 2.96 nats per token
# python train.py configs/stack100m.py   (make data/stack100m first: README, "The run this is for")

# model (the defaults of ModelConfig, restated because they are Stack-100M)
vocab_size = 32768
d_model = 512
n_layers = 30
n_heads = 8
n_kv_heads = 2
head_dim = 64
d_ff = 1408
max_seq_len = 2048

# data and run folder
data_dir = "data/stack100m"
out_dir = "out/stack100m"

# batch
seq_len = 2048
micro_batch_size = 32
batch_tokens = 524288  # 32 x 2048 x 8
max_steps = 38147  # ceil(20e9 / 524288)
doc_mask = True  # no difference at the demo's 256 tokens; at 2048 most windows hold several documents

# optimizer: Muon for the blocks' matrices, AdamW for the table and the gains. Their rates come from the demo's sweep by
# rates in stack/optim.py. Both times sqrt(524288 / 2048) * (20e9 / 7.78e6)^-0.3 = 1.52 for batch and tokens; Muon's
# also times sqrt(128 / 512 * 3 / 30) = 0.158 for the shape: 5e-3 becomes 1.2e-3, and 4e-3 6.1e-3. In the spectral norm
# that is 0.2 * sqrt(512) * 1.2e-3 = 0.0054 a step. Two published ones at about this batch, 0.016 (Qwen3-130M by marin,
# 2.6B tokens) and 0.025 (modded-nanogpt track 3, 1.7B), are 0.009 and 0.012 at 20B by the same law, before the depth:
# the second has 12 layers, which makes it 0.0076 at 30. The demo itself has half of 5e-3 by now, ahead early and
# as good at its end; these two speak for the higher rate in a long run.
# Sensitivity, as published: 2 times off the best costs 0.1 to 0.4 % of the loss, 4 times 0.7 to 1 %. Measure before a
# run that costs money: a tenth of it (--max_steps=3815, whose own is 1.6e-3: rates counts a step's tokens up to twice
# the critical batch, 237,000 there) at half and at twice that tells the way.
optimizer = "muon"
muon_lr = None  # 1.2e-3
adamw_lr = None  # 6.1e-3
weight_decay = 0.1
z_loss = 1e-4  # against drift over tens of thousands of steps; the demo, with 0, is too short for any
schedule = "wsd"
warmup_steps = 500
decay_fraction = 0.1  # the demo's third is for its few minutes: a long run has the steps to decay in

# every so many steps
log_interval = 10
eval_interval = 500
save_interval = 1000
keep = 12  # step 34000, where configs/stack100m_anneal.py branches off, outlasts six stops, each a save; 0.9 GB each
sample_interval = 2000

# machine
dtype = "bfloat16"
compile = True

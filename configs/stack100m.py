# Stack-100M: 101,353,728 parameters, 20B tokens, one 80 GB GPU (peak about 37 GB, compiled; account.py has the parts)
# time, estimated: tokens * 7.97e8 FLOPs = 1.59e19 at 40 % of peak: H100 or H200 11 h, A100 35 h
# loss, estimated: 1.82 + 482/N^0.348 + 2085/D^0.366 (Chinchilla's law refitted, arXiv 2404.10102) = 2.97 nats per token
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

# optimizer: Muon for the blocks' matrices, AdamW for the table and the gains. What the demo's sweep (docs/lab-notes.md)
# says that a size does not change: the table needs a large rate (half of it cost more than anything else, twice as much
# nothing), Muon's is flat from half to one and a half times the best, a separate head and no QK-norm are worse.
optimizer = "muon"
muon_lr = 6e-3
adamw_lr = 3e-3
weight_decay = 0.1
z_loss = 1e-4  # against drift over tens of thousands of steps; the demo, with 0, is too short for any
schedule = "wsd"
warmup_steps = 500
decay_fraction = 0.1  # the demo's 0.4 is for its few minutes: a long run has the steps to decay in

# every so many steps
log_interval = 10
eval_interval = 500
save_interval = 1000
sample_interval = 2000

# machine
dtype = "bfloat16"
compile = True

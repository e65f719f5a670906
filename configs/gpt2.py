# GPT-2 small, 124,439,808 parameters, with nanoGPT's recipe: 295B tokens, eight 80 GB GPUs (peak about 7 GB each)
# time, estimated: account.py's roofline of one GPU, an optimistic end, divided by 8: A100 49.4 h, H100 22.4 h
# loss, estimated: 2.85 nats per token on OpenWebText, which nanoGPT's README gives for this model and recipe
# torchrun --standalone --nproc_per_node=8 train.py configs/gpt2.py   (data: prepare.py ... --tokenizer gpt2)

# model; its matrices start from 0.02 * sqrt(128 / 768), as all here do by their width, not from nanoGPT's 0.02
vocab_size = 50257
vocab_multiple = 1  # exactly GPT-2; 64 makes the head's matmuls faster and adds 47 unused rows
d_model = 768
n_layers = 12
n_heads = 12
n_kv_heads = 12
head_dim = 64
d_ff = 3072
max_seq_len = 1024
pos = "learned"
norm = "layernorm"
norm_eps = 1e-5
mlp = "gelu"
bias = True
qk_norm = False
dropout = 0.0

# data and run folder
data_dir = "data/gpt2"
out_dir = "out/gpt2"

# batch
seq_len = 1024
micro_batch_size = 12
batch_tokens = 491520  # 12 x 1024 x 40: 5 micro-batches on each of 8 GPUs
max_steps = 600000
doc_mask = False

# optimizer
optimizer = "adamw"
adamw_lr = None  # 6e-4: this run is where rates in stack/optim.py knows AdamW's from. It goes with sqrt(batch_tokens),
# tokens^-0.3 and 1 / d_model; 2 times off costs 0.1 to 0.4 % of the loss, as published (Step Law, arXiv 2503.04715)
weight_decay = 0.1
z_loss = 0.0
schedule = "cosine"
warmup_steps = 2000
min_lr_fraction = 0.1

# every so many steps
log_interval = 10
eval_interval = 1000
save_interval = 1000
sample_interval = 2000

# machine
dtype = "bfloat16"
compile = True

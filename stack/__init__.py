"""What the commands are made of.  Nothing here is run by itself; nothing here knows a command.

    train_config.py   the settings of training, each once
    config.py     settings: defaults, then a config file, then flags; how a command ends
    device.py     device, number format, peak rate
    optim.py      Muon and AdamW, schedules
    compiled.py   torch.compile of blocks, head, attention, decoding
    twins.py      what computes as model.py does, faster: attached, compared, put aside
    quantize.py   weights of 8 bits
    talk.py       a conversation with a model, its cache kept
    resume.py     what ends a run cleanly, what a resumed one must keep
    log.py        log.jsonl, its curves, wandb, TensorBoard
    report.py     the page about a run
    counts.py     parameters, FLOPs, cache bytes; which parameters an optimizer moves
    memory.py     bytes that training takes
    data/         text to tokens to shards to batches
    checkpoint/   a run's state on disk: whole or not there
    parallel/     several processes
    cpu/          C++ for CPUs: training kernels, decoding
    exchange/     other programs' formats
    evaluation/   held-out loss, multiple choice, answers, the table's rows

Arrows go one way: commands use these, these use model.py; among the folders only as tests/test_repo.py allows.
"""

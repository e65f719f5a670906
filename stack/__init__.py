"""What the commands are made of.  Nothing here is run by itself; nothing here knows a command.

    config.py     settings: defaults, then a config file, then flags; TrainConfig; how a command ends
    compiled.py   torch.compile of blocks, head, attention, decoding
    counts.py     parameters, FLOPs, cache bytes; which parameters an optimizer moves
    memory.py     bytes that training takes
    device.py     device, number format, peak rate
    twins.py      what computes as model.py does, faster: attached, compared, put aside
    quantize.py   weights of 8 bits
    optim.py      Muon and AdamW, schedules
    metrics.py    evaluation, the log, curves
    report.py     the page about a run
    data/         text to tokens to shards to batches
    checkpoint/   a run's state on disk: whole or not there
    parallel/     several processes
    cpu/          C++ for CPUs: training kernels, decoding
    exchange/     other programs' formats
    evaluation/   what eval.py reports besides the loss

Arrows go one way: commands use these, these use model.py; among the folders only as tests/test_repo.py allows.
"""

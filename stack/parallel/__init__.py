"""Several processes train one model.

    ranks.py            who am I, what do the others say
    sharding.py         which part of the model is mine, and how gradients travel
    tensor_parallel.py  one model over several GPUs: blocks, table and loss head cut
"""

"""Several processes train one model.

    parallel.py         who am I, what do the others say, which part of the model is mine
    tensor_parallel.py  one model over several GPUs: blocks, table and loss head cut
"""

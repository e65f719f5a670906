"""C++ for CPUs.  model.py does without; stack/twins.py attaches each part to a built model.

    build.py               how a .cpp file of this folder becomes functions
    kernels.py, .cpp       attention and the loss head's arithmetic in compiled training
    decode.py, .cpp        one token through the whole model, for `sample.py --compile`
"""

"""A run's state on disk.

    folder.py     checkpoints: folders that are whole or absent, found, published, checked byte by byte
    tensors.py    what is in them: weights and optimizer state by name, saved and loaded
    sharded.py    the form in which each of several ranks writes its part
    saves.py      a run's checkpoints as it goes
"""

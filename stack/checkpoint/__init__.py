"""A run's state on disk.

    folder.py     checkpoints: folders that are whole or absent, found, published, checked byte by byte
    tensors.py    what is in them: weights and optimizer state by name, saved and loaded
    saves.py      a run's checkpoints as it goes, also where each of several ranks writes its part
"""

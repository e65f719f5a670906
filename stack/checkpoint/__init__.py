"""A run's state on disk.

    folder.py     checkpoints: folders that are whole or absent
"""

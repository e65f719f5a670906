"""Ours beside the alternatives: `python -m bench step|head|sample|prepare|growth|gpu`.
"""

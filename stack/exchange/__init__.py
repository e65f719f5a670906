"""Models and tokenizers of other programs.

    hf.py         Hugging Face's names and layouts
"""

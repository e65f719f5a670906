"""How good a model is.

    held_out.py    loss, perplexity and bits per byte, for train.py and eval.py
    choices.py     multiple choice by log-likelihood
    answers.py     whether answers to held-out questions end
    embeddings.py  what became of the table's rows
"""

"""What eval.py reports besides the loss.

    choices.py     multiple choice by log-likelihood
    embeddings.py  what became of the table's rows
"""

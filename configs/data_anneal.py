"""What the demo's run anneals on: its own text, and a part of conversations about the same library.
Launch     python prepare.py configs/data_anneal.py --out data/anneal
Hardware   any; the tokenizer is the demo's: make demo first
Time       half a minute

The conversations are the 5 % of the tokens that there are of them; --val_fraction is the demo's, so that the same
documents are held out. max_tokens is 400 steps of configs/anneal.py and what is held out.
"""

sources = [dict(source="stdlib", weight=75), dict(source="stdlib", weight=25, chat=True)]
tokenizer = "out/demo"
val_fraction = 0.05
max_tokens = 900_000

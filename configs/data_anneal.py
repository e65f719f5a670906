"""What the demo's run anneals on: its own text, and a part of conversations about the same library.
Launch     python prepare.py configs/data_anneal.py --out data/anneal
Hardware   any; the tokenizer is the demo's: make demo first
Time       half a minute

It ends with the conversations, about 3.5 million tokens: nearly all of the library, as a part of it would be another
text. val_fraction is the demo's, so that the same documents are held out.
"""

sources = [dict(source="stdlib", weight=90), dict(source="stdlib", weight=10, chat=True)]
tokenizer = "out/demo"
val_fraction = 0.05

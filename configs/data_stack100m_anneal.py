"""What Stack-100M anneals on: 2 billion tokens, more of them mathematics, code and textbooks than before.
Launch     python prepare.py configs/data_stack100m_anneal.py --out data/stack100m_anneal
Hardware   any machine with 5 GB of free disk and a network; a finished out/stack100m for its tokenizer
Time       estimate: a tenth of configs/data_stack100m.py

The streams are read from their beginnings, so these are documents that the run has seen once, long before. What it has
held out stays held out: a document's split follows from its text, and val_fraction is the same.
"""

sources = [
    dict(source="hf:HuggingFaceTB/finemath:finemath-4plus", weight=30, filter="math"),
    dict(source="hf:HuggingFaceFW/fineweb-edu:sample-100BT", weight=30, filter="web"),
    dict(source="hf:HuggingFaceTB/smollm-corpus:cosmopedia-v2", weight=20, filter="web"),
    dict(source="hf:bigcode/starcoderdata", weight=20, filter="code", data_dir="python", text_key="content"),
]
tokenizer = "out/stack100m"
max_tokens = 2_000_000_000
val_fraction = 0.0005

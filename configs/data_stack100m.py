"""The Stack-100M mixture: 20 billion tokens of web, textbooks, code and mathematics.
Launch     python prepare.py configs/data_stack100m.py --out data/stack100m
Hardware   any machine with 40 GB of free disk (uint16 shards; one shard more while it is written) and a network
Time       estimate: 20e9 tokens x 4.2 bytes = 84 GB of text; at 15 MB/s a core that is 1.6 hours divided by the
           cores; or as long as the download of some 50 GB of parquet takes
Before     accept the terms of bigcode/starcoderdata on its page, then: hf auth login

Weights are shares of the tokens; filters drop documents (stack/data/filters.py). Killed? The same command continues.
For a taste: --max_tokens 100e6. Exact duplicates are dropped across all four; near-duplicates are not: these sets come
deduplicated, and your own can be run through datatrove's MinHash pipeline, whose output folder of .jsonl.gz is then a
source.
"""

sources = [
    dict(source="hf:HuggingFaceFW/fineweb-edu:sample-100BT", weight=70, filter="web"),
    dict(source="hf:HuggingFaceTB/smollm-corpus:cosmopedia-v2", weight=15, filter="web"),
    dict(source="hf:bigcode/starcoderdata", weight=10, filter="code", data_dir="python", text_key="content"),
    dict(source="hf:HuggingFaceTB/finemath:finemath-4plus", weight=5, filter="math"),
]
max_tokens = 20_000_000_000
vocab_size = 32_768
val_fraction = 0.0005  # 10 million tokens
tokenizer_bytes = 500_000_000  # needs about 0.5 GB of memory while it trains

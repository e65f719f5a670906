"""From text to batches, in the order a token travels:

    sources.py    where documents come from: files, folders, Hugging Face
    tokenizer.py  byte-level BPE: trained by rustbpe, run by tiktoken
    writer.py     documents to shards: interleaved, deduplicated, restartable
    shards.py     token files and meta.json: written, read, checked
    batches.py    batches as a pure function of seed and position

All but batches.py do without torch, so that prepare.py starts fast.
"""

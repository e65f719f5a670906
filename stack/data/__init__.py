"""From text to batches, in the order a token travels:

    recipe.py     the recipe of a mixture: what its file may assign, how much of which source that is
    sources.py    where documents come from: files, folders, Hugging Face
    formats.py    what is in a file: unpacked, checked, decoded, in records; FORMATS has a line for each kind of file
    packings.py   packed bytes unpacked; PACKINGS has a line for each packing
    signatures.py what a file is by its first bytes, where its name says something else
    filters.py    which of them are kept: web, code, math
    tokenizer.py  byte-level BPE: trained by rustbpe, run by tiktoken
    parts.py      what of them is held out; special tokens by consent
    chat.py       conversations: the template, what of them is learned
    questions.py  conversations about Python source, of its docstrings
    writer.py     documents to shards: interleaved, deduplicated, restartable
    shards.py     token files and meta.json: written, read, checked
    verify.py     what a set holds: its summary, every checksum, one document
    batches.py    batches as a pure function of seed and position

All but batches.py do without torch, so that prepare.py starts fast.
"""

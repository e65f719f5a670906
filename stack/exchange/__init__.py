"""Models and tokenizers of other programs.

    hf.py             Hugging Face folders: names, shapes and settings of four families, read and written; nanoGPT's
                      ckpt.pt, read
    hf_files.py       a folder's files, read
    hf_tokenizers.py  its tokenizer, with identical ids or not at all
    formulas.py       the families' formulas without model.py: an export is compared with the model
    card.py           the README.md of an export
    gguf.py           a file for llama.cpp
"""

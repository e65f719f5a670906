"""A conversation with a model: what it has read it does not read again.

The cache stays between turns, so a turn costs its own tokens.  Where the context is full whole turns are forgotten, the
oldest first, never the system message; then what follows them is read once more, as positions have moved.
"""

import json

from model import GPT, KVCache, generate
from stack.data import chat
from stack.data.tokenizer import Tokenizer

SHARE = 4  # of the context, one part in so many is kept free for an answer, or max_new_tokens if these are fewer


class TooLong(ValueError):
    """A message that no context is left for."""


class Talk:
    """messages: all that was said, as in chat.py; forgotten: how many of them, behind the system's, no longer fit."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, messages=()):
        self.model, self.tokenizer, self.messages, self.forgotten = model, tokenizer, list(messages), 0
        self.cache, self.read = None, []  # read: the ids that the cache was given, of which it has the first `length`

    def reset(self):
        """Begin anew, behind the same system message."""
        self.messages, self.forgotten = [m for m in self.messages[:1] if m["role"] == "system"], 0

    def save(self, path):
        """Append what was said to a file, as a line that prepare.py --chat reads."""
        messages = [{key: message[key] for key in message if key != "ids"} for message in self.messages]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")

    def prompt(self, max_new_tokens: int) -> list[int]:
        """The ids to answer to: of the whole conversation, or of as much as leaves room for an answer."""
        limit = self.model.cfg.max_seq_len
        room = limit - min(max_new_tokens, limit // SHARE)
        first = int(bool(self.messages) and self.messages[0]["role"] == "system")
        while True:
            left = self.messages[first + self.forgotten:]
            ids = chat.encode(self.tokenizer, self.messages[:first] + left, answer=True).tolist()
            if len(ids) <= room:
                return ids
            later = [i for i, message in enumerate(left) if message["role"] == "user" and i > 0]
            if not later:
                raise TooLong(f"this message, with what goes before it, has {len(ids):,} tokens; of the context of "
                              f"{limit:,} it can have {room:,}.\n  Shorten it, or the system message.")
            self.forgotten += later[0]

    def answer(self, *, max_new_tokens: int, on_token=None, **how) -> list[int]:
        """The ids of the answer to the messages so far, which becomes one of them, also when Ctrl-C cuts it short.
        how: of model.generate; on_token(id), which ends the answer by returning True."""
        ids, new = self.prompt(max_new_tokens), []
        max_new_tokens = min(max_new_tokens, self.model.cfg.max_seq_len - len(ids))
        self.make_room(len(ids) + max_new_tokens)
        same = next((i for i, pair in enumerate(zip(self.read, ids, strict=False)) if pair[0] != pair[1]),
                    min(len(self.read), len(ids)))
        self.cache.length = min(self.cache.length, same, len(ids) - 1)

        def note(row, token):
            new.append(token)
            return on_token is not None and on_token(token)
        try:
            generate(self.model, [ids], max_new_tokens=max_new_tokens, stop_ids=chat.ends(self.tokenizer),
                     cache=self.cache, on_token=note, **how)
        finally:
            self.read = ids + new
            self.messages.append(chat.written(self.tokenizer, new))
        return new

    def make_room(self, n: int):
        """Let the cache hold n tokens; it grows by doubling, as a whole long context might not fit into memory."""
        size = min(self.model.cfg.max_seq_len, max(1 << (n - 1).bit_length(), 128))
        if self.cache is None or self.cache.k.shape[3] < size:
            weight = self.model.embed.weight
            old, self.cache = self.cache, KVCache(self.model.cfg, 1, size, weight.device, weight.dtype)
            if old is not None:
                self.cache.length = old.length
                self.cache.k[..., :old.length, :] = old.k[..., :old.length, :]
                self.cache.v[..., :old.length, :] = old.v[..., :old.length, :]

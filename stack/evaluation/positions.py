"""What a long context is good for: the loss by position, and a number told at the beginning and asked for at the end.

A position is the number of tokens that the model saw before the one it predicts from: in the window, or where it was
trained with document masks in the document's part of the window.

*The pass key.*  A text says a number of five digits, then other things of no use until so much of the context is full,
and begins the sentence with the number again.  Of ten numbers, the right one is found if it is the likeliest: chance is
0.1.  The choice is scored, and no answer generated, because a small model leans to what it has just read long before it
says it without fail; that shows a context that works at a size at which generation shows nothing.
"""

import random

import torch

from stack.config import written_aside
from stack.evaluation.choices import encode_pair, log_likelihoods

SHARES = 0.25, 0.5, 0.75, 1.0  # of the context
NUMBERS, TRIALS = 10, 40  # to choose from; texts of each length
TOLD, ASKED = "The pass key is {}.\n", "The pass key is"
BETWEEN = ("The road goes over a hill and down to the river.", "A boat lies there, and nobody comes for it.",
           "In the evening the wind turns, and it rains a little.", "Then the road goes on along the water.")


def by_powers(places) -> list[dict]:
    """[{"from", "to", "loss", "tokens"}], each as long as all before it: 0, 1, 2-3, 4-7, ...; places (2, T), as
    held_out.evaluate fills it.  Positions without a token are left out."""
    rows, first = [], 0
    while first < places.shape[1]:
        last = min(max(2 * first, 1), places.shape[1])
        nats, tokens = places[:, first:last].sum(1).tolist()
        if tokens:
            rows.append({"from": first, "to": last - 1, "loss": nats / tokens, "tokens": int(tokens)})
        first = last
    return rows


def text(rows: list[dict]) -> str:
    """The table for people."""
    lines = [f"{'tokens before':>16}{'loss':>9}{'tokens':>12}"]
    for row in rows:
        span = f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,} to {row['to']:,}"
        lines.append(f"{span:>16}{row['loss']:>9.4f}{row['tokens']:>12,}")
    return "\n".join(lines)


def plot(rows: list[dict], path, trained: int):
    """A PNG of it; trained: the context that the model says it has, drawn as a line."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state
    figure = Figure(figsize=(7, 4.2), layout="tight")
    axes = figure.subplots()
    axes.plot([row["to"] + 1 for row in rows], [row["loss"] for row in rows], marker="o", markersize=3)
    axes.axvline(trained, color="black", linewidth=1, linestyle="--", label="the run's context")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the context, up to", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=120, format="png")


def passkeys(tokenizer, length: int, n: int, seed: int = 0) -> list[tuple[list, int]]:
    """n texts of `length` tokens, answer included: [(before, answer) of each number], and which is the right one."""
    draw, made = random.Random(seed), []
    between = [tokenizer.encode(f"{sentence}\n") for sentence in BETWEEN]
    for _ in range(n):
        numbers = draw.sample(range(10_000, 100_000), NUMBERS)
        gold = draw.randrange(NUMBERS)
        asked, answers = None, []
        for number in numbers:
            asked, answer = encode_pair(tokenizer, ASKED, str(number))
            answers.append(answer)
        told = [asked[0], *tokenizer.encode(TOLD.format(numbers[gold]))]
        room = length - len(told) - len(asked[1:]) - max(map(len, answers))
        if room < 0:
            raise ValueError(f"a text with a pass key has {length - room} tokens or more, and a quarter of the context "
                             f"is {length}.\n  Give a longer --seq_len.")
        filler = []
        while len(filler) < room:
            filler += draw.choice(between)
        before = [*told, *filler[len(filler) - room:], *asked[1:]]  # cut at its beginning: a sentence ends at the end
        made.append(([(before, answer) for answer in answers], gold))
    return made


def passkey(model, tokenizer, seq_len: int, *, trials: int | None = None, device, dtype=torch.float32,
            rows: int = 8) -> dict:
    """{"context", "trials", "found": {length in tokens: share of the texts in which the right number is chosen}}."""
    found, trials = {}, trials or TRIALS
    for share in SHARES:
        texts = passkeys(tokenizer, int(share * seq_len), trials)
        scores = iter(log_likelihoods(model, [pair for pairs, _ in texts for pair in pairs], device=device, dtype=dtype,
                                      rows=rows))
        right = 0
        for pairs, gold in texts:
            of_each = [next(scores) for _ in pairs]
            right += of_each.index(max(of_each)) == gold
        found[int(share * seq_len)] = right / trials
    return {"context": seq_len, "trials": trials, "found": found}

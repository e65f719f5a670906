"""What became of an embedding table: rows that never learned, row norms, neighbours, rows touched per batch.

Which rows are undertrained is known in two ways.

*By counting*, where the training shards are at hand: ids that never occur in them, or fewer than RARE times.

*By the rows alone*, after Land and Bartolo (arXiv 2405.05417), who look for glitch tokens in models whose data is not
published.  Size is no guide: in a tied table every row gets the softmax's gradient at every step, an unused row only
its push away from the hidden states, and AdamW makes full-sized steps of however small a gradient.  So unused rows end
up long, not short, and all in one direction.  A row's cosine distance to the mean of rows known to be unused tells it:
about 1e-5 for rows that never occurred, 1e-3 to 1e-2 for those that occurred a few times, 0.3 and more for the others.
The known ones are the rows counted 0; without counts, the special tokens that no document holds.  In an untied model
the head's rows show it; its input rows, which nothing moved, are only short.

*Rows touched.*  A batch of n tokens reads and updates (through the lookup) only the rows it holds: the sum over ids of
1 - (1 - p)^n, if tokens were drawn independently.  Zipf's law is p ~ 1/rank; real windows touch fewer rows than the
same frequencies would drawn independently, because words repeat within a document.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from stack.config import written_aside

RARE = 10  # occurrences in training below which a row is called rare
SHOWN = 20  # undertrained rows in the text; the JSON has all
QUANTILES = (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)
NEAR = 0.05  # of the distance that 5 % of the rows exceed: nearer to the unused rows than that is undertrained


def zipf(vocab_size: int) -> np.ndarray:
    """Probability of each rank, p ~ 1/rank.  -> (V,)"""
    p = 1 / np.arange(1, vocab_size + 1)
    return p / p.sum()


def expected_rows(p, n: int) -> float:
    """Distinct ids among n independent draws from p (V,)."""
    with np.errstate(divide="ignore"):  # log(0) where p is 1
        return float(-np.expm1(n * np.log1p(-np.asarray(p, np.float64))).sum())


def unused_distance(rows, reference) -> np.ndarray | None:
    """Cosine distance of each row to the mean of the reference rows, of those to the mean of the other ones.

    rows (V, C), reference ids -> (V,), or None with fewer than two ids to refer to.
    """
    if len(reference) < 2:
        return None
    unit = F.normalize(rows.double(), dim=1)  # fp64: distances of 1e-5 are told apart
    total = unit[reference].sum(0)  # (C,)
    distance = 1 - F.cosine_similarity(unit, total[None], dim=1)
    distance[reference] = 1 - F.cosine_similarity(unit[reference], total - unit[reference], dim=1)
    return distance.numpy()


def neighbours(rows, ids, candidates, k: int = 6) -> dict[int, list[tuple[int, float]]]:
    """id -> its k nearest (id, cosine) among the candidates, the mean row taken out first.  rows (V, C)."""
    unit, found = F.normalize(rows - rows[candidates].mean(0), dim=1), {}
    for i in ids:
        others = torch.as_tensor(candidates[candidates != i])
        values, at = (unit[others] @ unit[i]).topk(min(k, len(others)))
        found[i] = list(zip(others[at].tolist(), values.tolist(), strict=True))
    return found


def report(model, tokenizer, *, counts=None, touched=(), words=()) -> tuple[dict, dict]:
    """(report, arrays for plot).  counts (V,): occurrences in training, or None where the shards are not at hand.

    touched: (tokens, rows) of real batches.  words: whose neighbours to show; by default frequent ones.
    """
    cfg, V = model.cfg, tokenizer.vocab_size
    head = model.head_weight.detach().float().cpu()[:V]  # (V, C)
    rows = model.embed.weight.detach().float().cpu()[:V]
    if not (head.isfinite().all() and rows.isfinite().all()):
        raise ValueError("the table contains NaN or infinity: the weights are damaged. Try an earlier checkpoint.")
    norms, specials = rows.norm(dim=1).numpy(), sorted(tokenizer.special_ids.values())
    flagged, order = np.zeros(V, bool), []  # order: of what is flagged, by the first that differs
    tokens = never = rare = near = direction = None
    reference, source = np.array([i for i in specials if i != tokenizer.boundary_id]), "special tokens"
    if counts is not None:
        order.append(counts)
        flagged |= counts < RARE
        tokens, never, rare = (int(n.sum()) for n in (counts, counts == 0, (counts > 0) & (counts < RARE)))
        if never > 1:
            reference, source = np.flatnonzero(counts == 0), "rows that never occur"
    distance = unused_distance(head, reference)
    if distance is not None:
        order.append(distance)
        far = float(np.quantile(distance, 0.95))  # most of a vocabulary can be unused
        near = NEAR * far
        flagged |= distance < near
        direction = {"reference": source, "median_distance": float(np.median(distance)), "far_distance": far,
                     "threshold": near, "rows": int((distance < near).sum())}

    def row(i):
        return {"id": int(i), "token": show(tokenizer, int(i)), **{
            name: None if values is None else values[i].item()
            for name, values in (("norm", norms), ("count", counts), ("distance", distance))}}

    single = tokenizer.token_bytes() == 1  # bytes last: they are there for any text, needed or not
    undertrained = sorted(np.flatnonzero(flagged), key=lambda i: [key[i] for key in (single, *order)])
    trained = np.flatnonzero(~flagged & ~np.isin(np.arange(V), specials))
    asked = [one_token(tokenizer, word) for word in words] or _frequent_words(tokenizer, trained, counts)
    near_ids = neighbours(rows, asked, trained) if len(trained) > 1 else {}
    tables = model.embed.weight.numel() * (1 if cfg.tie_embeddings else 2)
    result = {
        "table": {"rows": model.embed.num_embeddings, "ids": V, "d_model": cfg.d_model, "tied": cfg.tie_embeddings,
                  "parameters": tables, "share": tables / sum(p.numel() for p in model.parameters())},
        "norm_quantiles": {str(q): float(np.quantile(norms, q)) for q in QUANTILES},
        "distance_to_mean_row_quantiles": dict(zip(map(str, QUANTILES), np.quantile(
            (rows - rows.mean(0)).norm(dim=1).numpy(), QUANTILES).tolist(), strict=True)),
        "training_tokens": tokens, "never": never, "rare": rare, "unused_direction": direction,
        "undertrained": [row(i) for i in undertrained],
        "special_tokens": [{**row(i), "undertrained": bool(flagged[i])} for i in specials],
        "rows_touched": [{"tokens": n, "rows": seen, "independent": tokens and expected_rows(counts / tokens, n),
                          "zipf": expected_rows(zipf(V), n)} for n, seen in touched],
        "neighbours": [{"token": show(tokenizer, i), "near": [
            {"token": show(tokenizer, j), "cosine": c} for j, c in found]} for i, found in near_ids.items()],
    }
    return result, {"norms": norms, "counts": counts, "distance": distance, "flagged": flagged, "near": near}


def show(tokenizer, i: int) -> str:
    """A token as text, or as its bytes where those are no text of their own: <d9>."""
    raw, text = tokenizer.decode_bytes([i]), tokenizer.decode([i])
    return text if text.encode() == raw else f"<{raw.hex(' ')}>"


def one_token(tokenizer, word: str) -> int:
    """The id of a word that is one token, as it stands or after a space."""
    for text in (word, f" {word}"):
        if len(ids := tokenizer.encode(text)) == 1:
            return ids[0]
    raise ValueError(f"{word!r} is {len(tokenizer.encode(word))} tokens, and only single tokens have a row.\n"
                     "  Choose a commoner or shorter word.")


def _frequent_words(tokenizer, trained, counts, n: int = 6) -> list[int]:
    """Ids of the most frequent whole words of four letters or more; without counts, of the earliest merges."""
    order = trained if counts is None else trained[np.argsort(-counts[trained], kind="stable")]
    texts = ((i, tokenizer.decode([int(i)])) for i in order)
    return [int(i) for i, text in texts if text[:1] == " " and len(text) > 4 and text[1:].isalpha()][:n]


def text(r: dict) -> str:
    """The report for people."""
    t, q, d, counted = r["table"], r["norm_quantiles"].values(), r["unused_direction"], r["training_tokens"] is not None
    names = ("least", "1 %", "25 %", "median", "75 %", "99 %", "most")  # of QUANTILES
    untrained = [row["token"] for row in r["special_tokens"] if row["undertrained"]]
    others = [row for row in r["undertrained"] if row["id"] not in {special["id"] for special in r["special_tokens"]}]

    def table(rows):
        yield f"  {'id':>7}  {'token':<28}{'count' if counted else '':>10}{'norm':>9}{'distance':>12}"
        for row in rows:
            count = f"{row['count']:>10,}" if counted else ""
            distance = "" if row["distance"] is None else f"{row['distance']:>12.2e}"
            yield f"  {row['id']:>7}  {row['token']!r:<28.28}{count}{row['norm']:>9.3g}{distance}"

    lines = [
        f"Table: {t['rows']:,} rows of {t['d_model']} for {t['ids']:,} ids, {'tied' if t['tied'] else 'untied'}: "
        f"{t['parameters']:,} parameters, {t['share']:.1%} of the model",
        "Row norms: " + ", ".join(f"{name} {value:.3g}" for name, value in zip(names, q, strict=True)), "",
        f"By counting {r['training_tokens']:,} training tokens: {r['never']:,} rows never occur, {r['rare']:,} fewer "
        f"than {RARE} times" if counted else "By counting: the training shards are not at hand (--data)",
        f"By the rows alone: {d['rows']:,} within {d['threshold']:.3g} (cosine distance) of {d['reference']}; the "
        f"median is {d['median_distance']:.3g}" if d else
        "By the rows alone: no two rows are known to be unused, so there is no direction to compare with",
        "", f"Untrained special tokens: {' '.join(untrained) or 'none'}", *table(r["special_tokens"])]
    if others:
        shown = f", {SHOWN} of them" if len(others) > SHOWN else ""
        lines += ["", f"Other undertrained rows: {len(others):,}{shown}", *table(others[:SHOWN])]
    if r["rows_touched"]:
        lines += ["", "Rows touched by a batch of          tokens      rows   independent draws   Zipf's law"]
    for b in r["rows_touched"]:
        drawn = "" if b["independent"] is None else f"{b['independent']:,.0f}"
        lines.append(f"{'':<28}{b['tokens']:>14,}{b['rows']:>10,.0f}{drawn:>20}{b['zipf']:>13,.0f}")
    if r["neighbours"]:
        lines += ["", "Nearest rows"]
    for n in r["neighbours"]:
        lines.append(f"  {n['token']!r:<16} " + "  ".join(f"{m['token']!r} {m['cosine']:.2f}" for m in n["near"]))
    return "\n".join(lines + (["", f"Drawn in {r['png']}"] if r.get("png") else []))


def plot(arrays: dict, path):
    """A PNG: row norm against count (or id), and how far the rows are from the unused ones."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state
    norms, counts, distance, flagged = (arrays[key] for key in ("norms", "counts", "distance", "flagged"))
    figure = Figure(figsize=(10, 4.2), layout="tight")
    left, right = figure.subplots(1, 2)
    x = np.arange(len(norms)) if counts is None else counts + 0.5  # a place for 0 on a logarithmic axis
    for mask, label, color in ((~flagged, "trained", "C0"), (flagged, "undertrained", "C3")):
        left.scatter(x[mask], norms[mask], s=4, color=color, label=f"{label} ({mask.sum():,})", linewidths=0)
    left.set(xlabel="id" if counts is None else "occurrences in training + 0.5", ylabel="norm of the row",
             xscale="linear" if counts is None else "log")
    left.legend(markerscale=3)
    if distance is not None:
        shown = np.maximum(distance, 1e-7)
        bins = np.logspace(math.log10(shown.min()), math.log10(max(shown.max(), 2e-7)), 60)
        right.hist([shown[~flagged], shown[flagged]], bins, stacked=True, color=["C0", "C3"])
        right.axvline(arrays["near"], color="black", linewidth=1, linestyle="--")
        right.set(xscale="log", yscale="symlog", xlabel="cosine distance to the unused rows", ylabel="rows")
    else:
        right.hist(norms, 60)
        right.set(xlabel="norm of the row", ylabel="rows")
    with written_aside(path) as aside:
        figure.savefig(aside, dpi=120, format="png")

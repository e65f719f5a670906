"""The held-out loss, perplexity and bits per byte.

Loss in nats per token is what training minimises; bits per byte is what can be compared, between vocabularies and with
other repositories:  bpb = sum of nats / (ln 2 * bytes of the predicted tokens); special tokens count, as zero bytes.

A held-out loss is a property of the weights and the text, not of the machine: windows come in a fixed order, sums are
taken per token in float64, and neither the batch size nor the number of ranks enters.  It is what the model's loss head
returns, which a fork may have changed: whether that is -log p of the target, the logits say of the first tokens.
"""

import math
import warnings

import torch
import torch.nn.functional as F

from stack.device import autocast


@torch.no_grad()
def evaluate(model, windows, token_bytes, *, device, dtype=torch.float32, doc_mask: bool = False, ranks=None,
             rows: int = 0, places=None):
    """Loss, perplexity and bits per byte over batches of windows, each token weighing the same.

    windows yields (x, y, docs) as batches.iterate_windows does, (b, T) int64 with y = -100 where nothing is to be
    predicted; token_bytes (vocab_size,) is the length of each id's text.  ranks: who shares the windows.  Batches
    smaller than `rows`, or than the ones before, are filled up with ignored rows: one shape for a compiled model.
    doc_mask: attention stays inside a document, as trained.  Returns {"loss", "ppl", "bpb", "tokens", "bytes"}.
    places (2, T) float64, on the CPU: nats and tokens are added to it by how many tokens the model saw before a token.
    """
    token_bytes = torch.as_tensor(token_bytes, device=device, dtype=torch.int64)
    exact = "cpu" if device.type == "mps" else device  # MPS has no float64
    totals = torch.zeros(3, dtype=torch.float64, device=exact)  # nats, tokens, bytes
    was_training, checked = model.training, ranks is not None and ranks.rank > 0
    model.eval()
    try:
        for window in windows:
            rows = max(rows, len(window[0]))
            x, y, docs = (F.pad(part.to(device), (0, 0, 0, rows - len(part)), value=filling)
                          for part, filling in zip(window, (0, -100, 0), strict=True))
            with autocast(device, dtype):
                nats = model(x, y, docs=docs if doc_mask else None, reduction="none")  # (b*T,), 0 where ignored
            if not checked:  # known here: to ask totals would wait for the device, each time
                checked = _warn_of_other_loss(model, *(part[:1, :128] for part in (x, y, docs)), doc_mask)
            valid = y != -100
            totals += torch.stack([t.to(exact).double().sum() for t in (
                nats, valid, token_bytes[y.clamp(min=0)] * valid)])
            if places is not None:
                at = torch.arange(x.shape[1]).expand(x.shape)
                if doc_mask:  # counted from where its document begins in the window
                    begins = F.pad(docs.cpu().diff(dim=1) != 0, (1, 0), value=True)
                    at = at - (at * begins).cummax(dim=1).values
                places.index_add_(1, at.flatten(), torch.stack([nats.cpu().double(), valid.flatten().cpu().double()]))
    finally:
        model.train(was_training)
    nats, tokens, n_bytes = (ranks.sum(totals) if ranks is not None else totals).tolist()
    if tokens == 0:
        raise ValueError("there is no token to evaluate on. Prepare the data with a larger --val_fraction.")
    loss = nats / tokens
    return {"loss": loss, "ppl": math.exp(min(loss, 700)), "tokens": int(tokens), "bytes": int(n_bytes),
            "bpb": nats / (math.log(2) * n_bytes) if n_bytes else None}


def _warn_of_other_loss(model, x, y, docs, doc_mask: bool):
    """Say it where the loss of the first tokens, (1, n) each, is not -log p: what is trained is then no measure of the
    text.  Without autocast: compiled code rounds otherwise.  Returns whether there were any."""
    docs = docs if doc_mask else None
    with torch.compiler.set_stance("force_eager"):  # a shape that does not come again
        given = model(x, y, docs=docs, reduction="none").sum().item()
        logits = model.logits(model.hidden(x, docs=docs))[0]
    own = F.cross_entropy(logits, y[0], reduction="sum").item()
    if abs(given - own) > 0.001 * own:
        warnings.warn(f"the loss head returns {given / own:.3f} of the nats that the logits give: held-out loss and "
                      "bits per byte are no longer those of the text. Add to the loss in chunk_arithmetic only where "
                      "`grad` is true.", stacklevel=3)
    return own > 0

"""The loss by position is the loss, put in order; a pass key is found by a model that remembers, and by no other."""

import pytest
import runs
import torch
import torch.nn.functional as F
from conftest import document_ids
from exchange_models import trained_words

from stack.evaluation import positions
from stack.evaluation.held_out import evaluate

CPU = torch.device("cpu")


@pytest.mark.parametrize("doc_mask", [False, True])
def test_loss_by_position_by_hand(tiny, doc_mask):
    """Each token counts where it stands: in its window, or in its document where attention stays inside that."""
    model, ids = tiny().eval(), torch.randint(0, 300, (5, 33))
    ids[torch.rand(ids.shape) < 0.1] = 299
    x, y, docs = ids[:, :-1], ids[:, 1:].clone(), document_ids(ids[:, :-1], 299)
    y[:, 5] = -100
    places, sizes = torch.zeros(2, 32, dtype=torch.float64), torch.ones(300, dtype=torch.int64)
    halves = [(x[:3], y[:3], docs[:3]), (x[3:], y[3:], docs[3:])]
    got = evaluate(model, halves, sizes, device=CPU, doc_mask=doc_mask, rows=4, places=places)
    want = torch.zeros(2, 32, dtype=torch.float64)
    with torch.no_grad():
        nats = F.cross_entropy(model(x, docs=docs if doc_mask else None).double().flatten(0, 1), y.flatten(),
                               reduction="none").view(y.shape)
    for row in range(5):
        for t in range(32):
            before = int((docs[row, :t] == docs[row, t]).sum()) if doc_mask else t
            want[:, before] += torch.tensor([nats[row, t], y[row, t] != -100])
    torch.testing.assert_close(places, want, rtol=1e-5, atol=1e-9)
    rows = positions.by_powers(places)
    assert sum(row["loss"] * row["tokens"] for row in rows) / got["tokens"] == pytest.approx(got["loss"])
    if not doc_mask:
        assert [(row["from"], row["to"]) for row in rows] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
        assert [row["tokens"] for row in rows] == [5, 5, 10, 15, 40, 80]


class Remembers:
    """Gives all ids the same chance but those that followed the same two ids before, or, if it forgets, does not."""

    def __init__(self, tiny, reach: int):
        self.cfg, self.reach = tiny().cfg, reach
        self.cfg.max_seq_len = 4096

    def __call__(self, x, y, reduction):
        nats = torch.zeros(x.shape)
        for row, t in (y != -100).nonzero().tolist():
            ids = x[row].tolist()
            followed = {ids[i + 1] for i in range(1, t) if ids[i - 1:i + 1] == ids[t - 1:t + 1] and t - i < self.reach}
            nats[row, t] = 1.0 if y[row, t].item() in followed else 5.0
        return nats.flatten()


def test_pass_key(tiny):
    """A memory finds all as far as it reaches, and behind that chooses by chance; texts are as long as they say."""
    words = trained_words()
    for pairs, gold in positions.passkeys(words, 200, 20):
        (before, right), n = pairs[gold], len(pairs)
        assert n == 10 and max(len(before) + len(answer) for before, answer in pairs) == 200
        assert len({tuple(answer) for _, answer in pairs}) == 10 and before[0] == words.boundary_id
        text = words.decode(before[1:])
        assert text.startswith(f"The pass key is{words.decode(right)}.\n") and text.endswith("\nThe pass key is")
        assert [i for i, (_, answer) in enumerate(pairs) if words.decode(answer) in text] == [gold]
    all_of_it = positions.passkey(Remembers(tiny, 10_000), words, 800, trials=20, device=CPU)
    assert all_of_it == {"context": 800, "trials": 20, "found": {200: 1.0, 400: 1.0, 600: 1.0, 800: 1.0}}
    half = positions.passkey(Remembers(tiny, 450), words, 800, trials=40, device=CPU)["found"]
    assert half[200] == half[400] == 1 and half[600] < 0.4 and half[800] < 0.4
    with pytest.raises(ValueError, match="longer --seq_len"):
        positions.passkey(Remembers(tiny, 1), words, 40, device=CPU)


def test_eval_looks_beyond_the_context(data, tmp_path, run_eval):
    """--by_position has the loss of the plain evaluation, a table and a picture; beyond the context only if asked."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    code, said, _ = run_eval(out, "--by_position", "--seq_len", 64)
    assert code == 0 and "32 to 63" in said and (out / "positions.png").stat().st_size > 1000
    assert run_eval(out, "--seq_len", 64)[0] == 2
    assert run_eval(out)[1] == run_eval(out, "--by_position")[1].splitlines(keepends=True)[0]
    code, said, _ = run_eval(out, "--passkey", "--seq_len", 400, "--limit", 2)
    assert code == 0 and "400 tokens" in said
    learned = runs.run(data, tmp_path / "learned", max_steps=1, pos="learned", qk_norm=False)
    assert "Lower it" in run_eval(learned, "--by_position", "--seq_len", 64)[2]
    for flag in ("--passkey", "--answers", "--embeddings"):
        assert run_eval(out, "--by_position", flag)[0] == 2

"""The law that losses of several models and lengths follow: loss = E + A / N^a + B / D^a, fitted, with its uncertainty.

N parameters, D training tokens (Chinchilla, arXiv 2203.15556), with one exponent for both (arXiv 2305.16264): a dozen
runs hardly tell two apart (docs/scaling-laws.md).  Fitted by the Huber loss of the logarithm, so that one odd run does
not carry the rest along, with L-BFGS-B (arXiv 2412.04403).  A law is an array (log E, log A, log B, a).
"""

import math

import numpy as np

HUBER = 1e-3  # residuals of the logarithm beyond this count linearly (arXiv 2412.04403)
DRAWS = 100  # of the bootstrap
REACH = 300  # times the FLOPs of the largest fitted run: as far as a law is claimed
TIE = 0.005  # two losses that near are as good: seeds differ by as much (docs/scaling-laws.md)


def predict(law, n, d):
    """E + A / N^a + B / D^a of law (log E, log A, log B, a); n, d numbers or arrays."""
    e, a, b, alpha = law
    return np.exp(e) + np.exp(a - alpha * np.log(n)) + np.exp(b - alpha * np.log(d))


def fit(n, d, loss, law=None) -> np.ndarray:
    """The law with the least Huber loss in the logarithm, by L-BFGS-B from a grid of starts, or from `law` alone."""
    from scipy.optimize import minimize
    x, y, target = np.log(n), np.log(d), np.log(loss)
    mean_x, mean_y, low = x.mean(), y.mean(), target.min()
    x, y = x - mean_x, y - mean_y  # the terms' sizes are those amid the points, or the four would depend on each other

    def objective(p):
        terms = np.stack([p[0] + 0 * x, p[1] - p[3] * x, p[2] - p[3] * y])
        log_loss = np.logaddexp.reduce(terms)
        off, share = (log_loss - target) / HUBER, np.exp(terms - log_loss)
        value = np.where(abs(off) < 1, off ** 2 / 2, abs(off) - 0.5).sum()
        slope = np.clip(off, -1, 1) / HUBER * share
        return value, np.array([*slope.sum(axis=1), -(slope[1] * x + slope[2] * y).sum()])
    starts = [[math.log(e) + low, math.log((1 - e) * part) + low, math.log((1 - e) * (1 - part)) + low, alpha]
              for e in (0.2, 0.5, 0.8) for part in (0.2, 0.5, 0.8) for alpha in (0.2, 0.35, 0.5)]
    if law is not None:
        starts = [[law[0], law[1] - law[3] * mean_x, law[2] - law[3] * mean_y, law[3]]]
    bounds = [(low - 5, low), (low - 12, low + 3), (low - 12, low + 3), (0.1, 1)]  # published: .2 to .5
    options = {"maxiter": 1000, "maxfun": 5000, "ftol": 1e-11, "gtol": 1e-8}
    found = min((minimize(objective, np.clip(start, *np.transpose(bounds)), jac=True, method="L-BFGS-B", bounds=bounds,
                          options=options) for start in starts), key=lambda result: result.fun).x
    return np.array([found[0], found[1] + found[3] * mean_x, found[2] + found[3] * mean_y, found[3]])


def bootstrap(law, n, d, loss) -> np.ndarray:
    """Laws of a bootstrap: what the law leaves over is dealt out again among the points and fitted.  (DRAWS, 4)"""
    left = np.log(loss) - np.log(predict(law, n, d))
    left = left * math.sqrt(len(left) / max(len(left) - len(law), 1))  # four constants have taken their part of it
    rng = np.random.default_rng(0)
    return np.array([fit(n, d, predict(law, n, d) * np.exp(rng.choice(left, len(left))), law) for _ in range(DRAWS)])


def interval(values, off: float = 0.0) -> list[float]:
    """90 % of the bootstrap's values, and at both ends as much more as the law was `off`, in the logarithm."""
    low, high = np.percentile(values, (5, 95))
    return [float(low * math.exp(-off)), float(high * math.exp(off))]


def missed(points: list[dict]) -> float:
    """How far off the law is where it was not fitted: the largest |log(predicted / measured)| of what was held out."""
    return max((abs(math.log(p["predicted"] / p["loss"])) for p in points if p["held_out"]), default=0.0)


def best(law, sizes: dict) -> tuple[int, list[float]]:
    """Of sizes, {width: (parameters, tokens)}, the width with the lowest loss; the least and the most tokens per
    parameter that come within TIE of it."""
    loss = {width: predict(law, *size) for width, size in sizes.items()}
    least = min(loss, key=loss.get)
    tied = [tokens / n for width, (n, tokens) in sizes.items() if loss[width] <= loss[least] * (1 + TIE)]
    return least, [min(tied), max(tied)]


def warning(points: list[dict], own: dict | None) -> list[str]:
    """What to say where the law is off by more than 2 % on what was held out, or predicts for the config, `own`, more
    than what has no more parameters and saw no more text came to."""
    off, lines = max((abs(p["predicted"] / p["loss"] - 1) for p in points if p["held_out"]), default=0), []
    if off > 0.02:
        lines += [f"WARNING: the law is off by up to {off:.1%} on a rung just above those fitted, and by more on",
                  "larger models: do not pay by what follows. A larger --budget, in a new --out_dir, has wider ones.",
                  ""]
    if own and own["tokens"] < (fewest := min(p["tokens"] for p in points)):
        lines += [f"WARNING: the config sees {own['tokens']:,} tokens, fewer than any run here, {fewest:,} and more:",
                  "the law knows nothing of runs that short.", ""]
    below = [p for p in points if own and p["loss"] < own["loss"]
             and p["parameters"] <= own["parameters"] and p["tokens"] <= own["tokens"]]
    if below:
        best = min(below, key=lambda p: p["loss"])
        lines += [f"WARNING: {best['run']} came to {best['loss']:.4f}, with no more parameters and tokens than the",
                  f"config has: the {own['loss']:.4f} predicted for it is too high.", ""]
    return lines


def table(result: dict) -> str:
    """What conclude found, for people."""
    known = [p["tokens"] / p["parameters"] for p in result["points"]]

    def untried(r):
        return not min(known) * 0.95 < r["tokens"] / r["parameters"] < max(known) * 1.05  # steps are whole

    def row(name, r):
        name += " *" * untried(r)
        per_byte = "" if r["bpb"] is None else "{:>10.4f}  {:.4f} to {:.4f}".format(r["bpb"], *r["bpb_interval"])
        return (f"{name:<22}{r['parameters']:>13,}{r['tokens'] / r['parameters']:>9.1f}{r['loss']:>9.4f}  "
                "{:.4f} to {:.4f}".format(*r["interval"]) + per_byte)
    equal, own = result["equal_cost"], result["prediction"]
    lines = ["loss = {E:.3f} + {A:.4g} / N^{a:.3f} + {B:.4g} / D^{a:.3f}".format(**result["law"]), "",
             f"{'the widest rung, never fitted':<36}{'tokens':>14}{'loss':>9}{'predicted':>11}{'too high by':>13}",
             *(f"  {p['run']:<34}{p['tokens']:>14,}{p['loss']:>9.4f}{p['predicted']:>11.4f}"
               f"{p['predicted'] / p['loss'] - 1:>+13.2%}" for p in result["points"] if p["held_out"]), "",
             f"{'predicted, held out':<22}{'parameters':>13}{'tokens/p':>9}{'loss':>9}  {'between':<18}"
             f"{'bits/byte':>8}  between"]
    lines[-1:-1] = warning(result["points"], own)
    lines += [row("the config", own)] if own else []
    lines += [row(f"width {size['width']:,}", size) for size in equal["sizes"]]
    if any(map(untried, [*equal["sizes"], own or equal["sizes"][0]])):
        lines += [f"* no run here had so few or many tokens per parameter ({min(known):.0f} to {max(known):.0f}): less "
                  "sure than it says"]
    return "\n".join([*lines, "", f"Each width at {equal['flops']:.3g} FLOPs"
                      + ("." if own else f", {REACH} times the largest fitted run; the config's own run is beyond.")
                      + f" Best there: width {equal['best_width']:,}, {equal['tokens_per_parameter']:.1f} tokens per "
                      f"parameter; as good within {TIE * 100:g} %, in 90 % of draws, "
                      "{:.1f} to {:.1f}.".format(*equal["tokens_per_parameter_interval"])])


def plot(result: dict):
    """Loss over FLOPs, a colour a width, with what was fitted and predicted; below, what the law leaves over."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter
    figure = Figure(figsize=(8, 7), layout="tight")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    law = [*np.log([result["law"][key] for key in "EAB"]), result["law"]["a"]]
    for i, n in enumerate(sorted({p["parameters"] for p in result["points"]})):
        some = [p for p in result["points"] if p["parameters"] == n]
        flops, tokens = ([p[key] for p in some] for key in ("flops", "tokens"))
        kind = dict(color=f"C{i}", marker="x" if some[0]["held_out"] else "o", linestyle="none")
        above.plot(flops, [p["loss"] for p in some], **kind,
                   label=f"{n:,} parameters{', not fitted' * some[0]['held_out']}")
        d = np.geomspace(tokens[0] / 2, tokens[-1] * 8, 50)
        above.plot(d * flops[0] / tokens[0], predict(law, n, d), color=f"C{i}", linewidth=1)
        below.plot(flops, [100 * (p["predicted"] / p["loss"] - 1) for p in some], **kind)
    own = result["prediction"]
    furthest = own or min(result["equal_cost"]["sizes"], key=lambda size: size["loss"])
    low, high = furthest["interval"]
    above.errorbar([result["equal_cost"]["flops"]], [furthest["loss"]], color="black", marker="*", capsize=4,
                   yerr=[[max(furthest["loss"] - low, 0)], [max(high - furthest["loss"], 0)]],
                   label="predicted, of the config" if own else "predicted, as far as is claimed")
    above.set(xscale="log", yscale="log", ylabel="held-out loss, nats per token")
    above.yaxis.set_major_formatter(LogFormatter())  # 4, and not 4 x 10^0
    above.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    below.set(xlabel="training FLOPs", ylabel="predicted over\nmeasured, %")
    above.legend()
    for ax in (above, below):
        ax.grid(alpha=0.3)
    return figure

#!/usr/bin/env python3
"""How far logits are from the f32 reference on the fixed 512-token text: the measure by which quantised arithmetic is judged.

Usage: logit_error.py candidate.f32 [more.f32 …] [--reference .cache/peers/smollm2_text512.f32] [--json]
Each file is raw little-endian f32 [tokens, vocab]. Per file: root-mean-square and greatest difference of the logits after their mean
over the vocabulary was taken out (a common shift changes no probability), greatest and mean difference of the log-probability of the
reference's best token, mean Kullback-Leibler divergence from the reference in nats, share of positions with the same best token.
"""
import argparse
import json
import pathlib

import numpy as np

root = pathlib.Path(__file__).resolve().parent.parent.parent


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def compare(reference, candidate):
    square, worst, kl, same, logprob = 0.0, 0.0, 0.0, 0, []
    for a, b in zip(reference, candidate):
        a, b = a.astype(np.float64), b.astype(np.float64)
        difference = (b - b.mean()) - (a - a.mean())
        square += float((difference**2).mean())
        worst = max(worst, float(np.abs(difference).max()))
        la, lb = log_softmax(a), log_softmax(b)
        kl += float((np.exp(la) * (la - lb)).sum())
        same += int(a.argmax() == b.argmax())
        logprob.append(abs(float(la[a.argmax()] - lb[a.argmax()])))
    n = len(reference)
    return {
        "positions": n, "rms": (square / n) ** 0.5, "max_abs": worst, "mean_kl": kl / n, "same_argmax": same / n,
        "best_logprob_mean_abs": float(np.mean(logprob)), "best_logprob_max_abs": float(np.max(logprob)),
    }


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("files", nargs="+")
parser.add_argument("--reference", default=str(root / ".cache/peers/smollm2_text512.f32"))
parser.add_argument("--vocab", type=int, default=49152)
parser.add_argument("--json", action="store_true")
args = parser.parse_args()
load = lambda path: np.memmap(path, dtype="<f4", mode="r").reshape(-1, args.vocab)
reference = load(args.reference)
rows = {}
for path in args.files:
    candidate = load(path)
    assert candidate.shape == reference.shape, (path, candidate.shape, reference.shape)
    rows[path] = compare(reference, candidate)
if args.json:
    print(json.dumps(rows, indent=1))
else:
    for path, row in rows.items():
        print(pathlib.Path(path).name, " ".join(f"{k}={v:.6g}" for k, v in row.items()))

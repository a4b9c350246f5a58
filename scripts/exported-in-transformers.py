#!/usr/bin/env python3
"""Loads exported built-in models in `transformers` as they are and checks that it gives the same answers.

    suanpan export builtin:chain DIR/chain; suanpan export builtin:count DIR/count; suanpan export builtin:recall DIR/recall
    python3 scripts/exported-in-transformers.py DIR

Needs torch and transformers (any build; the CPU is enough). Exits with 1 if an answer is wrong or a margin is too small.
"""

import pathlib
import random
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILLER = "river stone morning ledger window copper harbour quiet garden paper winter signal market silver".split()


def name(i):
    """As crates/model/src/chain/vocab.rs spells names."""
    return "".join("bdfklmnr"[n >> 2 & 7] + "aeiu"[n & 3] for n in (i >> 10, i >> 5, i))


def words(rng, tokens, facts):
    """A text of about so many words with (key, value) facts at random places, in their order."""
    places = sorted(rng.sample(range(4, tokens), len(facts)))
    text = ""
    for at in range(tokens):
        text += " " + rng.choice(FILLER)
        if places and at == places[0]:
            places.pop(0)
            text += ". {}: {}.".format(*facts.pop(0))
    return text


def chain_cases(rng):
    names = [name(i) for i in rng.sample(range(20_000), 40)]
    stops, keys, values = names[:5], names[5:10], names[10:15]
    links = list(zip(stops, stops[1:]))
    rng.shuffle(links)
    facts = links + list(zip(keys, values)) + [(names[20], v) for v in names[21:26]]
    order = list(range(len(facts)))
    # Values of one key keep their order; all else may stand anywhere.
    head = [i for i in order if facts[i][0] != names[20]]
    rng.shuffle(head)
    places = sorted(rng.sample(order, 5))
    tail = iter(i for i in order if facts[i][0] == names[20])
    rest = iter(head)
    facts = [facts[next(tail) if i in places else next(rest)] for i in order]
    text = words(rng, 900, facts)
    yield text + f" {stops[0]}?4", " " + stops[4]
    yield text + f" {stops[1]}?2", " " + stops[3]
    yield text + f" {names[20]}?", "".join(" " + v for v in names[21:26])
    yield text + f" {names[30]}?", ""
    for k, v in zip(keys, values):
        yield text + f" {k}?", " " + v


def count_cases(rng):
    counts = {name(100): 0, name(2000): 1, name(300): 7, name(40): 100, name(5): 300}
    bag = [w for w, n in counts.items() for _ in range(n)] + rng.choices(FILLER, k=500)
    rng.shuffle(bag)
    text = " river stone " + " ".join(bag)
    text = text.replace("  ", " ")
    for w, n in counts.items():
        yield text + f" {w}?", f" {n}"


def recall_cases(rng):
    letters = "abcdefghijklmnopqrstuvwxyz"
    facts = [("".join(rng.choices(letters, k=9)), "".join(rng.choices(letters.upper(), k=12))) for _ in range(6)]
    text = ""
    for k, v in facts:
        text += " ".join(rng.choices(FILLER, k=20)) + f"\n{k}: {v}\n"
    for k, v in facts:
        yield text + f"\n{k}:", f" {v}\n"


def check(folder, cases, least_margin):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], f"{folder}: {key}: {info[key]}"
    wrong, asked, margin = 0, 0, float("inf")
    for prompt, answer in cases:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=16, do_sample=False, output_logits=True, return_dict_in_generate=True)
        new = out.sequences[0, ids["input_ids"].shape[1]:]
        text = tokenizer.decode(new, skip_special_tokens=True)
        for logits in out.logits:
            top = logits[0].float().topk(2).values
            margin = min(margin, (top[0] - top[1]).item())
        asked += 1
        if text != answer:
            wrong += 1
            print(f"{folder}: {text!r} instead of {answer!r}")
    print(f"{folder}: {asked - wrong} of {asked} right, smallest margin {margin:.4f}")
    return wrong == 0 and margin >= least_margin


def main():
    root = pathlib.Path(sys.argv[1])
    torch.manual_seed(0)
    rng = random.Random(1)
    jobs = [("chain", chain_cases, 31.9), ("count", count_cases, 12.0), ("recall", recall_cases, 31.9)]
    with torch.inference_mode():
        good = [check(str(root / what), list(cases(rng)), least) for what, cases, least in jobs]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

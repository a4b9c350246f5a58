#!/usr/bin/env python3
"""First tokens after 20 prompts (beginnings of one public-domain text) beside llama.cpp on the same GGUF: best token and log-probabilities.

usage: bench/first_token_logprobs.py OUT.json MODEL.gguf LONGEST [f32|int16|int8] [bf16|f32: our K/V]
First: scripts/fetch-texts, bench/peers/llama_cpp.sh build, cargo build --release -p suanpan-model --examples. A prompt is near a tie where
the peer's two best are within 0.1; log-probabilities are compared over tokens that either gives more than e^-5.
Environment: TOP (the example top_logprobs), ENCODE, PEER, TEXT, and PEER_MODEL: the same weights as F32 (bench/peers/gguf_to_f32.py), which
the peer then multiplies with floats and with keys and values in f32, so that what it rounds does not hide what we do.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOP = os.environ.get("TOP", str(ROOT / "target/release/examples/top_logprobs"))
ENCODE = os.environ.get("ENCODE", str(ROOT / "target/release/examples/encode_file"))
PEER = os.environ.get("PEER", str(ROOT / ".cache/peers/llama.cpp/bin/positions_llama_cpp"))
PEER_MODEL = os.environ.get("PEER_MODEL")
TEXT = pathlib.Path(os.environ.get("TEXT", ROOT / ".cache/texts/shakespeare.txt"))


def answers(command):
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main():
    out, model, longest, *how = sys.argv[1:]
    longest = int(longest)
    # Evenly in the logarithm from 16 tokens on, odd lengths among them.
    lengths = sorted({round(16 * (longest / 16) ** (i / 19)) for i in range(20)})
    assert len(lengths) == 20, lengths
    with tempfile.TemporaryDirectory() as folder:
        text, ids = f"{folder}/text", f"{folder}/ids"
        pathlib.Path(text).write_bytes(TEXT.read_bytes()[:longest * 12])
        subprocess.run([ENCODE, model, text, ids], check=True, stdout=subprocess.DEVNULL)
        wanted = ",".join(map(str, lengths))
        ours = answers([TOP, model, ids, wanted, *how])
        theirs = answers([PEER, PEER_MODEL or model, "top", ids, wanted, "2", "512", "f32" if PEER_MODEL else "f16"])
    rows = []
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"]
        mine, other = dict(zip(a["ids"], a["logprobs"])), dict(zip(b["ids"], b["logprobs"]))
        both = [(mine[i], other[i]) for i in mine.keys() & other.keys() if max(mine[i], other[i]) > -5]
        near = b["logprobs"][0] - b["logprobs"][1] < 0.1
        rows.append({"tokens": a["tokens"], "same_top": a["ids"][0] == b["ids"][0], "near_tie": near,
                     "first_off": abs(mine.get(b["ids"][0], -99.0) - b["logprobs"][0]), "largest_off": max(abs(x - y) for x, y in both)})
    same = sum(r["same_top"] for r in rows)
    wrong = sum(not r["same_top"] and not r["near_tie"] for r in rows)
    worst = max(r["largest_off"] for r in rows)
    print(f"{pathlib.Path(model).name}{' (peer: as F32)' if PEER_MODEL else ''}: {same} of {len(rows)} best tokens equal, {wrong} differ where it is no near tie; log-probability of the "
          f"peer's best within {max(r['first_off'] for r in rows):.3f}, of all above e^-5 within {worst:.3f}")
    pathlib.Path(out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

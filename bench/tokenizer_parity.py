#!/usr/bin/env python3
"""Token ids and speed on 10 MB of mixed text, piece by piece, beside llama.cpp (GGUF files) and the `tokenizers` library (tokenizer.json).

usage: bench/tokenizer_parity.py OUT.json [VOCABULARY..]     VOCABULARY: smollm2, gemma3, smollm2-json; default all
First: scripts/fetch-texts, scripts/fetch-smollm2, scripts/fetch-gemma3-270m, bench/peers/llama_cpp.sh build, cargo build --release -p
suanpan-model --examples; for smollm2-json a python with `tokenizers` and `gguf`. Pieces (PIECE bytes, 250,000) because llama.cpp's time grows with the
square of a run of spaces under SentencePiece. Environment: ENCODE, PEER, TEXT, MODELS, PIECE. Ids that differ end the run.
"""
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENCODE = os.environ.get("ENCODE", str(ROOT / "target/release/examples/encode_file"))
PEER = os.environ.get("PEER", str(ROOT / ".cache/peers/llama.cpp/bin/positions_llama_cpp"))
TEXT = pathlib.Path(os.environ.get("TEXT", ROOT / ".cache/texts/mixed.txt"))
MODELS = pathlib.Path(os.environ.get("MODELS", ROOT / ".cache/models"))
PIECE = int(os.environ.get("PIECE", "250000"))
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf", "smollm2-json": "SmolLM2-135M-Instruct.Q4_1.gguf"}


def seconds(text):
    return float(re.search(r"tokens of \d+ bytes in ([0-9.]+) s", text).group(1))


def pieces():
    """The text cut between characters."""
    data, at = TEXT.read_bytes(), 0
    while at < len(data):
        end = min(at + PIECE, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        yield data[at:end]
        at = end


def llama_cpp(model, piece, text):
    run = subprocess.run([PEER, model, "tokenize", piece], check=True, capture_output=True, text=True)
    return [int(i) for i in run.stdout.split()], seconds(run.stderr)


def library(tokenizer):
    def encode(model, piece, text):
        start = time.perf_counter()
        ids = tokenizer.encode(text.decode(), add_special_tokens=False).ids
        return ids, time.perf_counter() - start
    return encode


def compare(name, folder):
    model, peer, other = str(MODELS / FILES[name]), "llama.cpp", llama_cpp
    if name == "smollm2-json":
        spec = importlib.util.spec_from_file_location("fixtures", ROOT / "scripts/make-tokenizer-fixtures.py")
        fixtures = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fixtures)
        tokenizer = fixtures.from_gguf(model)
        model = f"{folder}/tokenizer.json"
        tokenizer.save(model)
        tokenizer.encode_special_tokens = True
        peer, other = f"tokenizers {fixtures.tokenizers.__version__}", library(tokenizer)
    row = {"vocabulary": name, "peer": peer, "bytes": 0, "tokens": 0, "pieces": 0, "seconds": 0.0, "peer_seconds": 0.0}
    for text in pieces():
        piece, out = f"{folder}/text", f"{folder}/ids"
        pathlib.Path(piece).write_bytes(text)
        run = subprocess.run([ENCODE, model, piece, out], check=True, capture_output=True, text=True)
        ours = [int(i) for i in pathlib.Path(out).read_text().split()]
        theirs, spent = other(model, piece, text)
        if ours != theirs:
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            sys.exit(f"{name}: piece {row['pieces']}: ids differ from {peer}'s from token {first} on: {ours[first:first + 8]} for {theirs[first:first + 8]}")
        row["bytes"] += len(text)
        row["tokens"] += len(ours)
        row["pieces"] += 1
        row["seconds"] += seconds(run.stdout)
        row["peer_seconds"] += spent
    row["ratio"] = row["peer_seconds"] / row["seconds"]
    print(f"{name}: {row['tokens']} ids of {row['bytes']} bytes equal {peer}'s; {row['seconds']:.2f} s against {row['peer_seconds']:.2f} ({row['ratio']:.2f} x)", flush=True)
    return row


def main():
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(name, folder) for name in sys.argv[2:] or FILES]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

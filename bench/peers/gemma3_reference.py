#!/usr/bin/env python3
"""What llama.cpp says about Gemma 3 270M Q4_K_M: writes crates/model/tests/fixtures/gemma3-270m/reference.json.

Text: text512.txt and the Apache licence of this repository, as llama.cpp tokenizes them, then the same ids again from ever later starts, up to
8,192. Reference: the 20 best log-probabilities after the first n of them, for 20 values of n on both sides of the window of 512.

Needs: bench/peers/llama_cpp.sh build, scripts/fetch-gemma3-270m. Usage: gemma3_reference.py [--threads 2]
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

here = pathlib.Path(__file__).resolve().parent
root = here.parent.parent
LENGTHS = [1, 2, 5, 17, 33, 64, 100, 200, 300, 400, 511, 512, 513, 514, 600, 800, 1024, 1500, 2048, 8192]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--threads", default="2")
    args.add_argument("--tool", default=str(root / ".cache/peers/llama.cpp/bin/positions_llama_cpp"))
    args = args.parse_args()
    model = str(root / ".cache/models/gemma-3-270m-q4_k_m.gguf")
    text = (here / "text512.txt").read_text() + (root / "LICENSE-APACHE").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text.txt"
        path.write_text(text)
        run = lambda *words: subprocess.run([args.tool, model, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
        base = [int(line) for line in run("tokenize", str(path)).split()]
        ids, k = list(base), 1
        while len(ids) < LENGTHS[-1]:
            ids += base[1 + 37 * k:] + base[1:1 + 37 * k]
            k += 1
        path.write_text("\n".join(map(str, ids)))
        tops = [json.loads(line) for line in run("top", str(path), ",".join(map(str, LENGTHS)), args.threads, "512").splitlines()]
    out = root / "crates/model/tests/fixtures/gemma3-270m/reference.json"
    out.parent.mkdir(exist_ok=True)
    rows = ",\n".join(json.dumps(top) for top in tops)
    out.write_text(f'{{"text": {json.dumps(text)},\n"ids": {json.dumps(base)},\n"tops": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()

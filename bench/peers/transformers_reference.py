#!/usr/bin/env python3
"""What `transformers` computes in f32 on the dequantised weights of a Llama GGUF: the reference for greedy text and logits.

Writes, small and committed: crates/model/tests/fixtures/smollm2/reference.json (per prompt: ids, 64 greedy ids, the margin between
the best two logits at each step, the 20 best log-probabilities of the first token; for the fixed text: ids and, per position, the
best id, its log-probability and its margin). Writes, large and not committed: .cache/peers/smollm2_text512.f32, raw little-endian
[512, vocab] logits, and smollm2_text512.ids beside it, one id a line.

Needs: pip install torch transformers gguf tokenizers (PyPI). Usage: transformers_reference.py [model.gguf] [--threads 2]
"""
import argparse
import hashlib
import json
import pathlib

import numpy as np
import torch
import transformers

import smollm2

here = pathlib.Path(__file__).resolve().parent
root = here.parent.parent
TOKENS = 64
LENGTH = 512
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def rounded(values, digits=6):
    return [round(float(v), digits) for v in values]


@torch.no_grad()
def greedy(model, prompts):
    """64 tokens for every prompt, end tokens not heeded, so that every prompt has as many steps to compare.

    All prompts go through together, padded on the left: padding keys get a weight of exactly zero and positions count from the first
    real token, so a row differs from a run alone by the rounding of the matrix library only.
    """
    width = max(map(len, prompts))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    new = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    rows = [{"greedy": [], "margins": [], "first_top20": None} for _ in prompts]
    past = None
    for step in range(TOKENS):
        out = model(new, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[:, -1]
        top = logits.topk(2)
        for row, l, ids, values in zip(rows, logits, top.indices, top.values):
            if step == 0:
                best = torch.log_softmax(l.double(), -1).topk(20)
                row["first_top20"] = {"ids": best.indices.tolist(), "logprobs": rounded(best.values)}
            row["greedy"].append(int(ids[0]))
            row["margins"].append(round(float(values[0] - values[1]), 6))
        new = top.indices[:, :1]
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        positions = positions[:, -1:] + 1
    return rows


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(root / ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, model = smollm2.load_tokenizer(args.model), smollm2.load_model(args.model)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    texts = [CHATML.format(p["chat"]) if "chat" in p else p["text"] for p in json.loads((here / "prompts.json").read_text())]
    prompts = []
    for text, row in zip(texts, greedy(model, [encode(t) for t in texts])):
        continuation = tokenizer.decode(row["greedy"], skip_special_tokens=False)
        prompts.append({"text": text, "ids": encode(text), **row, "continuation": continuation})
        print(f"{min(row['margins']):8.4f} {continuation[:90]!r}", flush=True)

    ids = encode((here / "text512.txt").read_text())[:LENGTH]
    assert len(ids) == LENGTH, len(ids)
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    cache = root / ".cache/peers"
    cache.mkdir(parents=True, exist_ok=True)
    logits.numpy().astype("<f4").tofile(cache / "smollm2_text512.f32")
    (cache / "smollm2_text512.ids").write_text("\n".join(map(str, ids)) + "\n")
    top, logprobs = logits.topk(2, -1), torch.log_softmax(logits.double(), -1)
    nll = -logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    best = logprobs[-1].topk(20)
    text512 = {
        "ids": ids,
        "mean_nll": round(float(nll.mean()), 6),
        "argmax": top.indices[:, 0].tolist(),
        "argmax_logprob": rounded(logprobs.gather(1, top.indices[:, :1])[:, 0]),
        "margins": rounded(top.values[:, 0] - top.values[:, 1]),
        "last_top20": {"ids": best.indices.tolist(), "logprobs": rounded(best.values)},
    }
    result = {
        "model_sha256": hashlib.sha256(pathlib.Path(args.model).read_bytes()).hexdigest(),
        "transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32", "attention": "eager",
        "prompts": prompts, "text512": text512,
    }
    folder = root / "crates/model/tests/fixtures/smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(p, ensure_ascii=False) for p in result.pop("prompts"))
    head = json.dumps({k: v for k, v in result.items() if k != "text512"})[1:-1]
    (folder / "reference.json").write_text(f'{{{head},\n"text512": {json.dumps(text512)},\n"prompts": [\n{body}\n]}}\n')
    print(f"mean negative log-likelihood of the fixed text: {text512['mean_nll']}")


main()

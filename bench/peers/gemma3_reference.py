#!/usr/bin/env python3
"""What `transformers` (f32, dequantised weights) and llama.cpp say about Gemma 3 270M Q4_K_M: writes
crates/model/tests/fixtures/gemma3-270m/reference.json.

Text: text512.txt and the Apache licence of this repository, as llama.cpp tokenizes them. Reference: the 20 best log-probabilities of
`transformers` after the first n tokens, for values of n on both sides of the window of 512, and llama.cpp's two best beside them.

Needs: bench/peers/llama_cpp.sh build, scripts/fetch-gemma3-270m, pip install torch transformers gguf. Usage: gemma3_reference.py [--threads 2]
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

import gguf
import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

here = pathlib.Path(__file__).resolve().parent
root = here.parent.parent
MODEL = str(root / ".cache/models/gemma-3-270m-q4_k_m.gguf")
LENGTHS = [1, 2, 5, 17, 33, 64, 100, 200, 300, 400, 511, 512, 513, 514, 600, 800, 1024]
NAMES = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def load():
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
        head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                         "full_attention": {"rope_type": "default", "rope_theta": 1e6}})
    config._attn_implementation = "eager"
    state = {}
    for t in gguf.GGUFReader(MODEL).tensors:
        shape = [int(n) for n in reversed(t.shape)]
        w = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape))
        name = t.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            key = f"model.layers.{layer}.{NAMES[part]}.weight"
        else:
            key = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name] + ".weight"
        # GGUF files hold norm weights with the 1 that the family adds.
        state[key] = w - 1.0 if "norm" in key else w
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = Gemma3RotaryEmbedding(config)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size ** 0.5)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def main():
    args = argparse.ArgumentParser()
    args.add_argument("--threads", default="2")
    args.add_argument("--tool", default=str(root / ".cache/peers/llama.cpp/bin/positions_llama_cpp"))
    args = args.parse_args()
    text = (here / "text512.txt").read_text() + (root / "LICENSE-APACHE").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "text.txt"
        path.write_text(text)
        run = lambda *words: subprocess.run([args.tool, MODEL, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
        ids = [int(line) for line in run("tokenize", str(path)).split()]
        path.write_text("\n".join(map(str, ids)))
        theirs = [json.loads(line) for line in run("top", str(path), ",".join(map(str, LENGTHS)), args.threads, "512").splitlines()]
    model = load()
    hidden = model.model(torch.tensor(ids[:LENGTHS[-1]])[None], use_cache=False).last_hidden_state[0]
    rows = []
    for other in theirs:
        logits = hidden[other["tokens"] - 1] @ model.model.embed_tokens.weight.T
        top = torch.log_softmax(logits.double(), -1).topk(20)
        rows.append(json.dumps({"tokens": other["tokens"], "ids": top.indices.tolist(), "logprobs": [round(float(v), 6) for v in top.values],
                                "llama_cpp_ids": other["ids"][:2], "llama_cpp_logprobs": other["logprobs"][:2]}))
    out = root / "crates/model/tests/fixtures/gemma3-270m/reference.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(f'{{"text": {json.dumps(text)},\n"ids": {json.dumps(ids)},\n"tops": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    main()

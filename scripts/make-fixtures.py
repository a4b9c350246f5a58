#!/usr/bin/env python3
"""Makes the tiny random-weight models of crates/model/tests/fixtures, their GGUF twins and reference logits.

Reproducible: fixed seeds, no network. Needs torch, transformers, tokenizers, safetensors, gguf, numpy.
The reference runs in float32 on the very weights that a file holds (quantised files: on the dequantised weights).
"""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "crates/model/tests/fixtures")
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"),
          ("Ġ", "the"), ("Ġ", "a"), ("in", "g"), ("an", "d"), ("Ġ", "and"), ("Ġ", "in")]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def byte_alphabet():
    """The printable stand-in of each byte, as GPT-2's byte-level BPE defines it."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(extra)) for b in range(256)]


TOKENS = byte_alphabet() + [a + b for a, b in MERGES] + SPECIALS
VOCAB = len(TOKENS)  # 272
BOS, EOS, IM_END = TOKENS.index("<s>"), TOKENS.index("</s>"), TOKENS.index("<|im_end|>")


def write_tokenizer(folder):
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=MERGES))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|im_end|>",
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": 2048,
        "chat_template": TEMPLATE}, indent=1) + "\n")


def make(cls, config, seed):
    """A model whose weights make attention and logits vary: unit-scale activations, peaked scores."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = cls(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1.0 + 0.2 * torch.randn_like(p))
            elif "embed" in name:
                # A tied embedding is also the head: a quarter keeps logits from saturating.
                p.copy_(torch.randn_like(p) * (0.25 if config.tie_word_embeddings else 1.0))
            else:
                gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
                p.copy_(torch.randn_like(p) * gain / p.shape[1] ** 0.5)
    return model


def round_to(model, dtype):
    """Rounds every weight to what a file of `dtype` can hold; the reference then runs on exactly those."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).float())


def state(model):
    tied = model.config.tie_word_embeddings
    return {k: v.detach().clone() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def write_logits(name, model, length, seed=7):
    rng = np.random.default_rng(seed)
    tokens = torch.tensor(rng.integers(0, VOCAB, length))
    # Some repetition, so that attention has something to find.
    tokens[length // 2:length // 2 + length // 4] = tokens[:length // 4]
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0].float().contiguous()
    (OUT / "logits").mkdir(exist_ok=True)
    save_file({"tokens": tokens.to(torch.int32), "logits": logits}, OUT / "logits" / f"{name}.safetensors")


def new_style(config):
    """config.json as transformers 5 writes it."""
    d = config.to_dict()
    d["transformers_version"] = "5.0.0"
    return d


def old_style(config):
    """config.json as transformers 4 wrote it: rope_theta beside rope_scaling."""
    d = new_style(config)
    rope = dict(d.pop("rope_parameters"))
    d["rope_theta"] = rope.pop("rope_theta")
    d["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return d


def write_folder(name, model, dtype, config_json, shards=1):
    folder = OUT / name
    folder.mkdir(parents=True)
    arch = type(model).__name__
    config_json |= {"architectures": [arch], "dtype": str(dtype).split(".")[1]}
    for private in ("_attn_implementation", "attn_implementation"):
        config_json.pop(private, None)
    (folder / "config.json").write_text(json.dumps(config_json, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [IM_END, EOS]}) + "\n")
    write_tokenizer(folder)
    tensors = {k: v.to(dtype).contiguous() for k, v in state(model).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for s in range(shards):
        part = names[len(names) * s // shards:len(names) * (s + 1) // shards]
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= {n: file for n in part}
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def interleave(weight, heads):
    """Rows of q or k in GGUF's order: a head's two rotary halves (i, i + d/2) become neighbours (2i, 2i + 1)."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def deinterleave(weight, heads):
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    base = name.removesuffix(".weight")
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
    return GGUF_NAMES[base] + ".weight"


def random_blocks(qtype, rows, cols, rng):
    """Blocks of a format that the `gguf` package reads but cannot write: random digits under sane scales."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    scale = lambda low, high: rng.uniform(low, high, (rows, cols // block, 1)).astype(np.float16).view(np.uint8)
    unit = 1.0 / cols ** 0.5
    if qtype == Q.Q4_K:  # d, dmin, 12 bytes of 6-bit scales, 128 bytes of digits
        raw[..., 0:2], raw[..., 2:4] = scale(0.005 * unit, 0.008 * unit), scale(0.03 * unit, 0.05 * unit)
    elif qtype == Q.Q6_K:  # 128 + 64 bytes of digits, 16 int8 scales, d
        raw[..., 208:210] = scale(0.0005 * unit, 0.0008 * unit)
    return raw.reshape(rows, cols // block * size)


def write_gguf(name, model, pick, seed=3):
    """Writes `<name>.gguf` with `pick(gguf name)` as each matrix's type, and puts the file's exact weights back into the model."""
    c, rng = model.config, np.random.default_rng(seed)
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    w = gguf.GGUFWriter(OUT / f"{name}.gguf", "llama")
    w.add_name(name)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(TOKENS)
    w.add_token_types([3 if t in SPECIALS else 1 for t in TOKENS])
    w.add_token_merges([f"{a} {b}" for a, b in MERGES])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(IM_END)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    rope = c.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        scaled = model.model.rotary_emb.inv_freq.numpy().astype(np.float64)
        w.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    file_state = {}
    for key, value in state(model).items():
        out, value = gguf_name(key), value.float().numpy()
        heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(out.split(".")[-2])
        if value.ndim == 1:
            w.add_tensor(out, value)
            file_state[key] = torch.from_numpy(value)
            continue
        qtype = pick(out)
        rows = interleave(value, heads) if heads else value
        if qtype in (Q.Q4_K, Q.Q6_K):
            data = random_blocks(qtype, *rows.shape, rng)
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(rows), qtype)
        w.add_tensor(out, data, raw_dtype=qtype)
        exact = gguf.quants.dequantize(data, qtype).astype(np.float32).reshape(rows.shape)
        file_state[key] = torch.from_numpy(np.ascontiguousarray(deinterleave(exact, heads) if heads else exact))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    model.load_state_dict(file_state, strict=False)
    model.tie_weights()


def llama(**changes):
    base = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, rms_norm_eps=1e-5, bos_token_id=BOS,
                eos_token_id=IM_END, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    return base | changes


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    tied = lambda: make(LlamaForCausalLM, LlamaConfig(**llama(tie_word_embeddings=True)), seed=1)
    model = tied()
    write_folder("tied", model, torch.float32, old_style(model.config))
    write_logits("tied", model, 48)
    for suffix, qtype in [("f16", Q.F16), ("q8_0", Q.Q8_0), ("q4_0", Q.Q4_0), ("q4_1", Q.Q4_1)]:
        model = tied()
        # As real files do: the embedding, which is also the head, keeps 8 bits.
        write_gguf(f"tied-{suffix}", model, lambda n: Q.Q8_0 if "token_embd" in n and qtype != Q.F16 else qtype)
        write_logits(f"tied-{suffix}", model, 48)

    # head_dim is not hidden_size / heads; own head; two shards; bf16.
    model = make(LlamaForCausalLM, LlamaConfig(**llama(head_dim=32)), seed=2)
    round_to(model, torch.bfloat16)
    write_folder("sharded", model, torch.bfloat16, new_style(model.config), shards=2)
    write_gguf("sharded-bf16", model, lambda n: Q.BF16)
    write_logits("sharded", model, 48)

    # A short original length, so that the scaling shows within the sequence. One kv head for all four.
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = make(LlamaForCausalLM, LlamaConfig(**llama(num_key_value_heads=1, rope_parameters=scaling,
                                                       tie_word_embeddings=True)), seed=3)
    round_to(model, torch.float16)
    write_folder("llama3-rope", model, torch.float16, old_style(model.config))
    write_gguf("llama3-rope-f16", model, lambda n: Q.F16)
    write_logits("llama3-rope", model, 160)

    # Window layers.
    mistral = {k: v for k, v in llama(sliding_window=8).items() if k not in ("attention_bias", "mlp_bias")}
    model = make(MistralForCausalLM, MistralConfig(**mistral), seed=4)
    round_to(model, torch.bfloat16)
    write_folder("window", model, torch.bfloat16, new_style(model.config))
    write_logits("window", model, 48)

    # 256-wide blocks, and an embedding in blocks that is also the head.
    model = make(LlamaForCausalLM, LlamaConfig(**llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1,
                                                       head_dim=64, tie_word_embeddings=True)), seed=5)
    q6 = ("token_embd", "attn_v", "ffn_down")
    write_gguf("kquants", model, lambda n: Q.Q6_K if any(k in n for k in q6) else Q.Q4_K)
    write_logits("kquants", model, 32)

    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
    total = sum(f.stat().st_size for f in OUT.rglob("*") if f.is_file())
    print(f"{total} bytes in {OUT}")
    assert total < 3_000_000, "the committed fixtures stay small"


if __name__ == "__main__":
    main()

"""SmolLM2 (or any plain Llama GGUF) for the reference scripts: dequantised weights as a `transformers` model, and its tokenizer.

Only what is needed here: no rope scaling, no bias; a file with either is refused.
"""
import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM


def fields_of(path):
    reader = GGUFReader(path)
    return reader, lambda key: reader.fields[key].contents()


def load_tokenizer(path):
    _, read = fields_of(path)
    assert (read("tokenizer.ggml.model"), read("tokenizer.ggml.pre")) == ("gpt2", "smollm")
    tokens, types = read("tokenizer.ggml.tokens"), read("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types) if k == 3])
    return tokenizer


def unpermuted(weight, heads):
    """GGUF's Llama files pair neighbours (2i, 2i+1) for the rotation, `transformers` pairs (i, i + head_dim / 2)."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


def load_model(path, dtype=torch.float32):
    reader, read = fields_of(path)
    heads, kv_heads = read("llama.attention.head_count"), read("llama.attention.head_count_kv")
    assert not any("rope.scaling" in key for key in reader.fields), "rope scaling is not handled here"
    config = LlamaConfig(
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight")
        if part in ("token_embd", "output_norm"):
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part]] = torch.tensor(weight)
            continue
        _, layer, part = part.split(".")
        if part in ("attn_q", "attn_k"):
            weight = unpermuted(weight, heads if part == "attn_q" else kv_heads)
        state[f"model.layers.{layer}.{names[part]}.weight"] = torch.tensor(weight)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()

#!/usr/bin/env python3
"""Makes a tiny random-weight model for each family and RoPE variant, with its GGUF twin and `transformers`' logits.

Reproducible: fixed seeds, no network. Needs torch, transformers, tokenizers, safetensors, gguf, numpy. The reference runs in float32 on the
very weights that a file holds. `logits/<name>.safetensors` holds, for each prompt length n, `tokens<n>` and all-position `logits<n>`.
"""

import importlib.util
import copy
import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

HERE = Path(__file__).parent
OUT = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "crates/model/tests/fixtures/families")
LETTERS = [c for c in "abcdefghijklmnopqrstuvwxyzĠ.,!?0123456789"]
SPECIALS = ["<s>", "</s>"]
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("Ġ", "a")]
TOKENS = (LETTERS + [a + b for a, b in MERGES] + SPECIALS)
VOCAB = 64  # more rows than tokens, as many real models have
BOS, EOS = TOKENS.index("<s>"), TOKENS.index("</s>")

spec = importlib.util.spec_from_file_location("make_fixtures", HERE / "make-fixtures.py")
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)


def write_tokenizer(folder):
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=MERGES))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}) + "\n")


def make(kind, seed, dtype=torch.bfloat16, **changes):
    """A model whose weights make attention, gates and logits vary, rounded to what a file of `dtype` can hold."""
    config = CONFIG_MAPPING[kind](**(dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=None, tie_word_embeddings=True) | changes))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(seed)
    gemma = kind.startswith("gemma")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 and "norm" in name:
                p.copy_((0.0 if gemma else 1.0) + 0.2 * torch.randn_like(p))
            elif p.ndim == 1 or name.endswith("_bias"):
                p.copy_((1.0 if "sinks" in name else 0.3) * torch.randn_like(p))
            elif "embed" in name or "lm_head" in name:
                # Logits of a few units: the bar is an absolute error.
                p.copy_(torch.randn_like(p) * (0.25 if config.tie_word_embeddings else 1.0 / 32 ** 0.5))
            elif p.ndim == 3:  # experts: [experts, in, out], but [experts, out, in] of DeepSeek-V2
                p.copy_(torch.randn_like(p) / p.shape[2 if kind == "deepseek_v2" else 1] ** 0.5)
            else:
                gain = 1.6 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0
                p.copy_(torch.randn_like(p) * gain / p.shape[1] ** 0.5)
        for p in model.parameters():
            p.copy_(p.to(dtype).float())
    model.file_dtype = dtype
    return model


def hub_state(model):
    """The tensors as files on the hub have them: experts of DeepSeek-V2 stand apart."""
    out = {}
    for key, value in base.state(model).items():
        if model.config.model_type != "deepseek_v2" or ".experts." not in key:
            out[key] = value
            continue
        stem = key.rsplit(".", 1)[0]
        for e, matrix in enumerate(value):
            if key.endswith("gate_up_proj"):
                gate, up = matrix.chunk(2)
                out |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
            else:
                out[f"{stem}.{e}.down_proj.weight"] = matrix
    return out


def write_folder(name, model, config_json=None):
    folder = OUT / name
    folder.mkdir(parents=True)
    d = config_json or base.new_style(model.config)
    d |= {"architectures": [type(model).__name__], "dtype": str(model.file_dtype).split(".")[1]}
    for private in ("_attn_implementation", "attn_implementation"):
        d.pop(private, None)
    (folder / "config.json").write_text(json.dumps(d, indent=1) + "\n")
    write_tokenizer(folder)
    tensors = {k: v.to(model.file_dtype).contiguous() for k, v in hub_state(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


BF16_ERRORS = {}  # what transformers itself loses: largest difference of its logits in bf16 from those in f32


def in_bf16(model):
    """The same with parameters in bf16, as a model loaded in bf16 has them: buffers (rotary frequencies) stay in f32."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product refuses rows as narrow as these in bf16
    return model


def write_logits(name, model, lengths):
    out, rounded = {}, in_bf16(model)
    for n in lengths:
        rng = np.random.default_rng(7 + n)
        tokens = torch.tensor(rng.integers(0, VOCAB, n))
        # Some repetition, so that attention has something to find.
        tokens[n // 2:n // 2 + n // 4] = tokens[:n // 4]
        with torch.no_grad():
            logits = model(tokens[None], use_cache=False).logits[0].float().contiguous()
            lost = (rounded(tokens[None], use_cache=False).logits[0].float() - logits).abs().max()
        BF16_ERRORS.setdefault(name, {})[str(n)] = float(lost)
        out |= {f"tokens{n}": tokens.to(torch.int32), f"logits{n}": logits}
        print(f"{name} {n}: largest logit {logits.abs().max():.2f}")
    (OUT / "logits").mkdir(exist_ok=True)
    save_file(out, OUT / "logits" / f"{name}.safetensors")
    (OUT / "logits" / f"{name}.safetensors").chmod(0o644)


def old_style(config, **extra):
    """config.json as transformers 4 wrote it: rope_theta beside rope_scaling, the type under `type`."""
    d = base.new_style(config)
    rope = dict(d.pop("rope_parameters"))
    d["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    rope.pop("partial_rotary_factor", None)
    d["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    return d | extra


PLAIN = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
         "self_attn.sinks": "attn_sinks.weight", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "mlp.gate_up_proj": "ffn_up", "mlp.router": "ffn_gate_inp", "input_layernorm": "attn_norm",
         "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
         "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate": "ffn_gate_inp",
         "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
         "mlp.shared_experts.down_proj": "ffn_down_shexp"}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}
GPT_OSS_NORMS = {"post_attention_layernorm": "post_attention_norm"}


def gguf_tensors(model):
    """(name, array) of every tensor, with the changes that llama.cpp's converter makes."""
    c, kind = model.config, model.config.model_type
    names = PLAIN | {"gemma2": GEMMA_NORMS, "gemma3_text": GEMMA_NORMS, "gpt_oss": GPT_OSS_NORMS}.get(kind, NORMS)
    permuted = kind in ("llama", "mistral", "smollm3")
    for key, value in base.state(model).items():
        value = value.float().numpy()
        if kind.startswith("gemma") and "norm" in key:
            value = value + 1.0
        if not key.startswith("model.layers."):
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                    "lm_head.weight": "output.weight"}[key]
            yield name, value
            continue
        _, _, layer, rest = key.split(".", 3)
        block = f"blk.{layer}."
        if rest == "self_attn.kv_b_proj.weight":
            # A head's keys are transposed, so that queries can be taken to the latent space.
            both = value.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
            yield f"{block}attn_k_b.weight", both[:, :c.qk_nope_head_dim].swapaxes(1, 2)
            yield f"{block}attn_v_b.weight", both[:, c.qk_nope_head_dim:]
            continue
        if ".experts." in rest and kind == "deepseek_v2":
            if rest.endswith("gate_up_proj"):
                yield f"{block}ffn_gate_exps.weight", value[:, :c.moe_intermediate_size]
                yield f"{block}ffn_up_exps.weight", value[:, c.moe_intermediate_size:]
            else:
                yield f"{block}ffn_down_exps.weight", value
            continue
        if ".experts." in rest:
            # [experts, in, out] to [experts, out, in]; gate and up lie side by side.
            part = rest.split(".")[-1]
            what = "bias" if part.endswith("_bias") else "weight"
            if value.ndim == 3:
                value = value.swapaxes(1, 2)
            if part.startswith("gate_up"):
                yield f"{block}ffn_gate_exps.{what}", value[:, 0::2]
                yield f"{block}ffn_up_exps.{what}", value[:, 1::2]
            else:
                yield f"{block}ffn_down_exps.{what}", value
            continue
        if rest == "self_attn.sinks":
            yield block + names[rest], value
            continue
        stem, what = rest.rsplit(".", 1)
        if permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = c.num_attention_heads if stem.endswith("q_proj") else c.num_key_value_heads
            value = base.interleave(value.reshape(value.shape[0], -1), heads).reshape(value.shape)
        yield f"{block}{names[stem]}.{what}", value


def write_gguf(name, model, arch):
    c = model.config
    head_dim = c.head_dim
    w = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    # llama.cpp looks for tokens of the real vocabulary in models whose name holds "phi3".
    w.add_name(f"tiny {c.model_type.split('_')[0][:3]}")
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    if arch == "deepseek2":
        w.add_head_count_kv(1)
        w.add_key_length(c.kv_lora_rank + head_dim)
        w.add_value_length(c.kv_lora_rank)
        w.add_key_length_mla(c.qk_nope_head_dim + head_dim)
        w.add_value_length_mla(c.v_head_dim)
        w.add_kv_lora_rank(c.kv_lora_rank)
        if c.q_lora_rank:
            w.add_q_lora_rank(c.q_lora_rank)
        w.add_leading_dense_block_count(c.first_k_dense_replace)
        w.add_expert_count(c.n_routed_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_shared_count(c.n_shared_experts)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
        w.add_expert_weights_scale(c.routed_scaling_factor)
        w.add_rope_scaling_yarn_log_mul(0.1 * c.rope_parameters["mscale_all_dim"])
    else:
        w.add_head_count_kv(c.num_key_value_heads)
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_vocab_size(VOCAB)
    rope = c.rope_parameters
    rope = rope.get("full_attention", rope)
    rotary = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    w.add_rope_dimension_count(rotary)
    w.add_rope_freq_base(rope["rope_theta"])
    if arch in ("gemma2", "gemma3", "gpt-oss", "phi3") and c.sliding_window:
        w.add_sliding_window(c.sliding_window)
    if arch == "gemma3":
        w.add_uint32("gemma3.attention.sliding_window_pattern", len(c.layer_types) // c.layer_types.count("full_attention"))
    if arch == "gemma2":
        # The scale is not among its metadata: llama.cpp and we take head_dim.
        w.add_attn_logit_softcapping(c.attn_logit_softcapping)
        w.add_final_logit_softcapping(c.final_logit_softcapping)
    if arch == "gpt-oss":
        w.add_expert_count(c.num_local_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.intermediate_size)
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR if kind == "linear" else gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_attn_factors(float(model.model.rotary_emb.attention_scaling))
        w.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
        w.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))
    tokens = TOKENS + [f"[PAD{i}]" for i in range(len(TOKENS), VOCAB)]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([3 if t in SPECIALS else 5 if t.startswith("[PAD") else 1 for t in tokens])
    w.add_token_merges([f"{a} {b}" for a, b in MERGES])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_add_bos_token(False)
    for tensor, value in gguf_tensors(model):
        value = np.ascontiguousarray(value.astype(np.float32))
        if value.ndim == 1 or tensor.endswith(".bias") or "ffn_gate_inp" in tensor:
            w.add_tensor(tensor, value)
        else:
            data = gguf.quants.quantize(value, gguf.GGMLQuantizationType.BF16)
            w.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def rope(kind="default", theta=10000.0, **more):
    return {"rope_type": kind, "rope_theta": theta} | more


def family_models():
    """Families; prompts shorter and longer than the window of 8."""
    # The second layer has a window, the first has not.
    qwen2 = make("qwen2", 1, use_sliding_window=True, sliding_window=8, max_window_layers=1, rope_parameters=rope())
    write_folder("qwen2", qwen2)
    write_logits("qwen2", qwen2, [6, 60])
    # llama.cpp takes no other head width for this family.
    plain = make("qwen2", 2, head_dim=8, rope_parameters=rope(theta=1e6), tie_word_embeddings=False)
    write_folder("qwen2-full", plain)
    write_gguf("qwen2-full", plain, "qwen2")
    write_logits("qwen2-full", plain, [60])

    qwen3 = make("qwen3", 3, rope_parameters=rope(theta=1e6), head_dim=32)
    write_folder("qwen3", qwen3)
    write_gguf("qwen3", qwen3, "qwen3")
    write_logits("qwen3", qwen3, [60])

    smollm3 = make("smollm3", 4, num_hidden_layers=4, rope_parameters=rope(theta=2e6))
    write_folder("smollm3", smollm3)
    write_gguf("smollm3", smollm3, "smollm3")
    write_logits("smollm3", smollm3, [60])

    biased = make("llama", 5, attention_bias=True, mlp_bias=True, rope_parameters=rope())
    write_folder("llama-bias", biased)
    write_gguf("llama-bias", biased, "llama")
    write_logits("llama-bias", biased, [40])

    two = {"sliding_attention": rope(), "full_attention": rope("linear", 1e6, factor=8.0)}
    gemma = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=8)
    gemma3 = make("gemma3_text", 6, rope_parameters=two, layer_types=["sliding_attention", "full_attention"], **gemma)
    write_folder("gemma3", gemma3)
    write_gguf("gemma3", gemma3, "gemma3")
    write_logits("gemma3", gemma3, [6, 60])
    # As transformers 4 wrote it: a pattern instead of types, two bases beside each other; another scale, a cap of the logits.
    old = make("gemma3_text", 7, num_hidden_layers=4, head_dim=16, query_pre_attn_scalar=24, sliding_window=8, sliding_window_pattern=2,
               final_logit_softcapping=4.0)
    d = base.new_style(old.config)
    for key in ("rope_parameters", "layer_types"):
        d.pop(key)
    d |= {"sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    write_folder("gemma3-old", old, d)
    write_logits("gemma3-old", old, [60])

    gemma2 = make("gemma2", 11, query_pre_attn_scalar=16, sliding_window=8, attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
                  rope_parameters=rope())
    write_folder("gemma2", gemma2)
    write_gguf("gemma2", gemma2, "gemma2")
    write_logits("gemma2", gemma2, [60])

    factors = dict(short_factor=[1.0 + 0.05 * i for i in range(6)], long_factor=[1.0 + 0.9 * i for i in range(6)])
    phi = dict(hidden_size=64, max_position_embeddings=512, original_max_position_embeddings=64, tie_word_embeddings=False,
               rope_parameters=rope("longrope", partial_rotary_factor=0.75, **factors))
    phi3 = make("phi3", 8, **phi)
    d = base.new_style(phi3.config)
    write_folder("phi3", phi3, d)
    write_gguf("phi3", phi3, "phi3")
    write_logits("phi3", phi3, [40, 64, 120])
    full = {k: [f * 1.1 for f in v] + [2.0, 2.5] for k, v in factors.items()}
    phi3 = make("phi3", 9, **(phi | dict(rope_parameters=rope("longrope", **full), sliding_window=20)))
    write_folder("phi3-old", phi3, old_style(phi3.config))
    write_logits("phi3-old", phi3, [64, 100])

    oss = make("gpt_oss", 10, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, tie_word_embeddings=False,
               rope_parameters=rope("yarn", 150000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                                    original_max_position_embeddings=64))
    write_folder("gpt-oss", oss)
    write_gguf("gpt-oss", oss, "gpt-oss")
    write_logits("gpt-oss", oss, [6, 100])


def latent_models():
    """DeepSeek-V2-Lite's shapes, its 576 and 512 wide keys and values among them; prompts within and past the original length."""
    common = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=12, v_head_dim=10,
                  moe_intermediate_size=20, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1,
                  tie_word_embeddings=False, max_position_embeddings=512)
    yarn = dict(factor=8.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)
    lite = make("deepseek_v2", 40, kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=None, num_hidden_layers=2,
                rope_parameters=rope("yarn", mscale=0.707, mscale_all_dim=0.707, **yarn), **common)
    write_folder("deepseek2-lite", lite, old_style(lite.config, topk_method="greedy", scoring_func="softmax"))
    write_logits("deepseek2-lite", lite, [20, 100])
    small = make("deepseek_v2", 41, kv_lora_rank=24, qk_rope_head_dim=8, q_lora_rank=16, num_hidden_layers=3, routed_scaling_factor=1.5,
                 rope_parameters=rope("yarn", mscale=1.0, mscale_all_dim=1.0, **yarn), **common)
    write_folder("deepseek2", small)
    write_gguf("deepseek2", small, "deepseek2")
    write_logits("deepseek2", small, [20, 100])


def write_fp8(name, kind, seed, blocks, quantization, end):
    """Matrices in E4M3 with scales a block (or a row: blocks of one row); the reference runs on what they stand for."""
    model = make(kind, seed, rope_parameters=rope(), tie_word_embeddings=False)
    tensors, exact = {}, {}
    for key, value in base.state(model).items():
        if value.ndim != 2 or "embed" in key or "lm_head" in key:
            tensors[key] = value.to(torch.bfloat16)
            continue
        rows, cols = value.shape
        br, bc = min(blocks[0], rows), min(blocks[1], cols)
        scales = torch.zeros(-(-rows // br), -(-cols // bc))
        data = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
        wide = torch.zeros(rows, cols)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * br, (i + 1) * br), slice(j * bc, (j + 1) * bc)
                scales[i, j] = value[at].abs().max() / 448.0
                data[at] = (value[at] / scales[i, j]).to(torch.float8_e4m3fn)
                wide[at] = data[at].float() * scales[i, j]
        tensors |= {key: data, key + end: scales}
        exact[key] = wide
    model.load_state_dict(exact, strict=False)
    d = base.new_style(model.config) | {"quantization_config": quantization}
    write_folder(name, model, d)
    save_file(tensors, OUT / name / "model.safetensors", metadata={"format": "pt"})
    (OUT / name / "model.safetensors").chmod(0o644)
    write_logits(name, model, [40])


def fp8_models():
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 24]}
    write_fp8("fp8-blocks", "llama", 30, (16, 24), fp8, "_scale_inv")
    packed = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    write_fp8("fp8-rows", "qwen3", 31, (1, 1 << 20), packed, "_scale")


def to_mxfp4(value):
    """[experts, rows, cols] to blocks of 32 as files hold them: two neighbours a byte, the first in the low half, and scales of a power of two."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([numbers, -numbers])
    blocks = value.reshape(*value.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2
    digits = (blocks / torch.exp2(exponent)).unsqueeze(-1).sub(numbers).abs().argmin(-1).to(torch.uint8)
    return digits[..., 0::2] | digits[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


def mxfp4_model():
    """Experts of gpt-oss in MXFP4; the reference runs on what `transformers` itself reads from the blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    model = make("gpt_oss", 12, hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                 tie_word_embeddings=False, rope_parameters=rope(theta=150000.0))
    tensors, exact = {}, {}
    for key, value in base.state(model).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = to_mxfp4(value.transpose(1, 2).contiguous())
            exact[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        else:
            tensors[key] = value.to(torch.bfloat16)
    model.load_state_dict(exact, strict=False)
    write_folder("gpt-oss-mxfp4", model, base.new_style(model.config) | {"quantization_config": {"quant_method": "mxfp4"}})
    save_file({k: v.contiguous() for k, v in tensors.items()}, OUT / "gpt-oss-mxfp4/model.safetensors", metadata={"format": "pt"})
    (OUT / "gpt-oss-mxfp4/model.safetensors").chmod(0o644)
    write_logits("gpt-oss-mxfp4", model, [40])


def rope_models():
    """RoPE variants on a Llama of an original length of 64 tokens; prompts within and past it."""
    linear = make("llama", 20, rope_parameters=rope("linear", factor=4.0))
    write_folder("rope-linear", linear, old_style(linear.config))
    write_gguf("rope-linear", linear, "llama")
    write_logits("rope-linear", linear, [100])
    # Its original length is max_position_embeddings.
    dynamic = make("llama", 21, max_position_embeddings=64, rope_parameters=rope("dynamic", factor=6.0))
    write_folder("rope-dynamic", dynamic, old_style(dynamic.config))
    write_logits("rope-dynamic", dynamic, [50, 64, 65, 128])
    yarn = dict(factor=16.0, original_max_position_embeddings=64)
    plain = make("llama", 22, max_position_embeddings=1024, rope_parameters=rope("yarn", **yarn))
    write_folder("rope-yarn", plain, old_style(plain.config))
    write_gguf("rope-yarn", plain, "llama")
    write_logits("rope-yarn", plain, [50, 120])
    scaled = make("llama", 23, max_position_embeddings=1024, rope_parameters=rope("yarn", mscale=0.7, mscale_all_dim=1.2, beta_fast=20.0, **yarn))
    write_folder("rope-yarn-mscale", scaled)
    write_logits("rope-yarn-mscale", scaled, [120])
    given = make("llama", 24, max_position_embeddings=1024, rope_parameters=rope("yarn", attention_factor=0.5, truncate=False, **yarn))
    write_folder("rope-yarn-factor", given)
    write_logits("rope-yarn-factor", given, [120])
    llama3 = make("llama", 25, rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                    original_max_position_embeddings=64))
    write_folder("rope-llama3", llama3, old_style(llama3.config))
    write_logits("rope-llama3", llama3, [100])


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    family_models()
    rope_models()
    fp8_models()
    latent_models()
    mxfp4_model()
    (OUT / "bf16-errors.json").write_text(json.dumps(BF16_ERRORS, indent=1) + "\n")
    total = sum(f.stat().st_size for f in OUT.rglob("*") if f.is_file())
    print(f"{total} bytes in {OUT}")
    assert total < 4_000_000, "the committed fixtures stay small"


if __name__ == "__main__":
    main()

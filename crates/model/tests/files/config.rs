//! `config.json`: what is honoured, what is refused by name.

use serde_json::{Value, json};
use suanpan_model::config_json::{apply_generation_config, config};
use suanpan_model::{ModelConfig, ModelError, rope};

fn base() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": true, "rope_theta": 500000.0,
    })
}

fn read(json: &Value) -> Result<ModelConfig, ModelError> {
    config("config.json", json.to_string().as_bytes(), "m")
}

/// `base` with one key changed.
fn with(key: &str, value: Value) -> Value {
    let mut json = base();
    json[key] = value;
    json
}

fn refused(json: &Value) -> (String, String) {
    let e = read(json).expect_err("must be refused");
    (e.field().unwrap_or_default().to_string(), e.to_string())
}

#[test]
fn a_llama_config_is_read() {
    let c = read(&base()).unwrap();
    assert_eq!((c.heads.num_q_heads, c.heads.num_kv_heads, c.heads.head_dim_qk), (32, 8, 64));
    assert_eq!((c.bos_token_id, c.eos_token_ids.as_slice()), (Some(128000), &[128001, 128008, 128009][..]));
    assert_eq!((c.ropes[0].theta, c.softmax_scale, c.layers.len()), (500_000.0, None, 2));
    assert_eq!(read(&with("num_key_value_heads", Value::Null)).unwrap().heads.num_kv_heads, 32);
    assert_eq!(read(&with("head_dim", json!(128))).unwrap().heads.head_dim_qk, 128);
    assert_eq!(read(&with("eos_token_id", json!(7))).unwrap().eos_token_ids, [7]);
}

#[test]
fn llama3_scaling_is_honoured_under_the_key_rope_type_and_the_older_type() {
    for key in ["rope_type", "type"] {
        let scaling = json!({key: "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let c = read(&with("rope_scaling", scaling)).unwrap();
        let f = rope::inv_freq(&c.ropes[0], 64, 131_072);
        let expected = [
            (14, 3.21145e-3),
            (15, 1.29055e-3),
            (16, 4.29557e-4),
            (17, 9.70829e-5),
            (18, 1.94616e-5),
            (31, 9.41833e-8),
        ];
        for (i, want) in expected {
            assert!((f[i] / want - 1.0).abs() < 3e-6, "{key} {i}: {} not {want}", f[i]);
        }
    }
    // As transformers 5 writes it: everything in one object.
    let mut json = with(
        "rope_parameters",
        json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    );
    json.as_object_mut().unwrap().remove("rope_theta");
    let c = read(&json).unwrap();
    assert!((rope::inv_freq(&c.ropes[0], 64, 131_072)[31] / 9.41833e-8 - 1.0).abs() < 3e-6);
}

#[test]
fn an_unknown_rope_type_is_refused_with_the_list() {
    for kind in ["ntk", "mrope", "proportional", ""] {
        let (field, message) = refused(&with("rope_scaling", json!({"rope_type": kind, "factor": 2.0})));
        assert_eq!(field, "rope_scaling.rope_type");
        assert!(message.contains(kind) && message.contains("default, linear, dynamic"), "{message}");
    }
    assert_eq!(refused(&with("rope_scaling", json!({"factor": 2.0}))).0, "rope_scaling.rope_type");
    for (kind, field) in [
        ("llama3", "low_freq_factor"),
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("longrope", "short_factor"),
        ("su", "short_factor"),
    ] {
        let factor = if field == "factor" { Value::Null } else { json!(8.0) };
        let scaling = json!({"type": kind, "factor": factor});
        assert_eq!(refused(&with("rope_scaling", scaling)).0, format!("rope_scaling.{field}"));
    }
    assert_eq!(refused(&with("rope_scaling", json!("llama3"))).0, "rope_scaling");
    // One set for each kind of layer is another family's way.
    let nested =
        json!({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}});
    assert_eq!(refused(&with("rope_parameters", nested)).0, "rope_parameters");
    assert!(read(&with("rope_scaling", json!({"rope_type": "default"}))).is_ok());
    assert!(read(&with("rope_scaling", Value::Null)).is_ok());
    assert_eq!(refused(&with("rope_theta", json!(0))).0, "rope_theta");
}

#[test]
fn numbers_that_give_no_rotary_positions_are_refused_by_name() {
    for (scaling, field) in [
        (json!({"type": "linear", "factor": 0.0}), "factor"),
        (json!({"type": "dynamic", "factor": 0.5}), "factor"),
        (json!({"type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}), "beta_fast"),
        (json!({"type": "yarn", "factor": 4.0, "attention_factor": -1.0}), "attention_factor"),
        (json!({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}), "short_factor"),
        (
            json!({"type": "longrope", "short_factor": vec![1.0; 32], "long_factor": vec![0.0; 32]}),
            "long_factor",
        ),
    ] {
        assert_eq!(refused(&with("rope_scaling", scaling)).0, field);
    }
    for share in [0.0, -0.5, 1.5, 0.01] {
        assert_eq!(refused(&with("partial_rotary_factor", json!(share))).0, "partial_rotary_factor");
    }
    assert_eq!(read(&with("partial_rotary_factor", json!(0.5))).unwrap().rotary_dim, 32);
    let inside = json!({"rope_type": "default", "partial_rotary_factor": 0.75});
    assert_eq!(read(&with("rope_parameters", inside)).unwrap().rotary_dim, 48);
}

#[test]
fn the_context_is_the_native_one_and_the_extended_one() {
    let context = |scaling: Value| {
        let mut json = with("rope_scaling", scaling);
        json["max_position_embeddings"] = json!(4096);
        let c = read(&json).unwrap();
        (c.native_len(), c.max_position_embeddings)
    };
    assert_eq!(context(Value::Null), (4096, 4096));
    assert_eq!(context(json!({"type": "dynamic", "factor": 6.0})), (4096, 24_576));
    assert_eq!(context(json!({"type": "yarn", "factor": 16.0})), (4096, 65_536));
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024});
    assert_eq!(context(yarn), (1024, 4096));
    // A claim that may be either: the smaller one is taken.
    assert_eq!(context(json!({"type": "linear", "factor": 4.0})), (4096, 4096));
}

#[test]
fn features_that_would_change_the_numbers_are_refused_by_name() {
    for (key, on) in [
        ("quantization_config", json!({"quant_method": "gptq"})),
        ("quantization_config", json!({"quant_method": "mxfp4"})),
        ("attention_multiplier", json!(0.1)),
        ("embedding_multiplier", json!(12.0)),
        ("residual_multiplier", json!(0.2)),
        ("logits_scaling", json!(8.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("query_pre_attn_scalar", json!(256)),
        ("num_local_experts", json!(8)),
        ("no_rope_layers", json!([1, 0])),
        ("sliding_window", json!(4096)),
        ("hidden_act", json!("gelu")),
        ("model_type", json!("gemma3")),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("architectures", json!(["MistralForCausalLM"])),
        ("layer_types", json!(["full_attention", "chunked_attention"])),
        ("layer_types", json!(["full_attention"])),
    ] {
        let (field, message) = refused(&with(key, on));
        assert_eq!(field, key, "{message}");
    }
    for (key, off) in [
        ("attention_bias", json!(false)),
        ("attention_bias", Value::Null),
        ("partial_rotary_factor", json!(1.0)),
        ("pretraining_tp", json!(1)),
        ("architectures", Value::Null),
    ] {
        assert!(read(&with(key, off)).is_ok(), "{key}");
    }
    let biases = |key: &str| read(&with(key, json!(true))).unwrap().biases;
    assert!(biases("attention_bias").qkv && biases("attention_bias").o && !biases("attention_bias").mlp);
    assert!(biases("mlp_bias").mlp && !biases("mlp_bias").qkv);
}

#[test]
fn a_window_of_a_family_that_asks_for_it_by_a_key_needs_the_key() {
    let mut json = with("sliding_window", json!(16));
    json["model_type"] = json!("qwen2");
    json["architectures"] = json!(["Qwen2ForCausalLM"]);
    json["max_window_layers"] = json!(1);
    let windows = |json: &Value| -> Vec<_> { read(json).unwrap().layers.iter().map(|l| l.window).collect() };
    assert_eq!(windows(&json), [None, None]);
    json["use_sliding_window"] = json!(true);
    assert_eq!(windows(&json), [None, Some(16)]);
}

#[test]
fn windows_follow_the_config() {
    let windows = |json: &Value| -> Vec<_> { read(json).unwrap().layers.iter().map(|l| l.window).collect() };
    let mut json = with("sliding_window", json!(4096));
    json["model_type"] = json!("mistral");
    json["architectures"] = json!(["MistralForCausalLM"]);
    assert_eq!(windows(&json), [Some(4096), Some(4096)]);
    json["layer_types"] = json!(["full_attention", "sliding_attention"]);
    assert_eq!(windows(&json), [None, Some(4096)]);
    json["layer_types"] = Value::Null;
    json["use_sliding_window"] = json!(false);
    assert_eq!(windows(&json), [None, None]);
    json["use_sliding_window"] = Value::Null;
    json["sliding_window"] = json!(0);
    assert_eq!(refused(&json).0, "sliding_window");
    json["sliding_window"] = Value::Null;
    assert_eq!(windows(&json), [None, None]);
    json["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_eq!(refused(&json).0, "sliding_window");
}

#[test]
fn sizes_that_no_kernel_could_run_are_refused() {
    for (key, value, field) in [
        ("hidden_size", json!(0), "hidden_size"),
        ("hidden_size", json!(-1), "hidden_size"),
        ("hidden_size", json!(1u64 << 60), "hidden_size"),
        ("hidden_size", json!("64"), "hidden_size"),
        ("hidden_size", json!(2047), "num_attention_heads"),
        ("hidden_size", Value::Null, "hidden_size"),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_key_value_heads", json!(7), "num_kv_heads"),
        ("num_key_value_heads", json!(0), "num_kv_heads"),
        ("num_hidden_layers", json!(0), "num_hidden_layers"),
        ("num_hidden_layers", json!(1_000_000_000), "num_hidden_layers"),
        ("head_dim", json!(63), "rotary_dim"),
        ("head_dim", json!(0), "head_dim_qk"),
        ("vocab_size", json!(0), "vocab_size"),
        ("vocab_size", json!(1.5), "vocab_size"),
        ("max_position_embeddings", json!(0), "max_position_embeddings"),
        ("rms_norm_eps", json!("1e-5"), "rms_norm_eps"),
        ("rms_norm_eps", json!(-1.0), "rms_norm_eps"),
        ("eos_token_id", json!(128256), "eos_token_id"),
        ("eos_token_id", json!(-1), "eos_token_id"),
        ("bos_token_id", json!(200_000), "bos_token_id"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings"),
    ] {
        let (found, message) = refused(&with(key, value));
        assert_eq!(found, field, "{message}");
    }
    for bytes in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe"] {
        assert_eq!(config("config.json", bytes, "m").unwrap_err().field(), Some("JSON"));
    }
    let huge = format!("{{\"a\":\"{}\"}}", "x".repeat(2 << 20));
    assert_eq!(config("config.json", huge.as_bytes(), "m").unwrap_err().field(), Some("file length"));
}

#[test]
fn a_generation_config_replaces_the_end_tokens() {
    let mut c = read(&base()).unwrap();
    apply_generation_config(&mut c, "generation_config.json", br#"{"temperature": 0.6}"#).unwrap();
    assert_eq!(c.eos_token_ids, [128001, 128008, 128009]);
    apply_generation_config(&mut c, "generation_config.json", br#"{"eos_token_id": [5, 6]}"#).unwrap();
    assert_eq!(c.eos_token_ids, [5, 6]);
    let e = apply_generation_config(&mut c, "generation_config.json", br#"{"eos_token_id": 128256}"#)
        .unwrap_err();
    assert!(e.field() == Some("eos_token_id") && e.to_string().contains("generation_config.json"), "{e}");
}

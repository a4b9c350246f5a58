//! Files that are nearly right: other spellings, contradictions, end tokens in one place only, other alignments, odd things in a folder.

use serde_json::{Value, json};
use suanpan_model::config_json::config;
use suanpan_model::{Model, rope};

use super::gguf_bytes::{GgufBytes, U32};
use super::{Scratch, cheaply, fixture, load_path, refusal};

const INDEX: &str = "model.safetensors.index.json";

/// A GGUF fixture with `from` replaced by `to`, of the same length.
fn patched(name: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture(name)).unwrap();
    let at = bytes.windows(from.len()).position(|w| w == from).expect("the text is in the file");
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

fn gguf(bytes: &[u8]) -> Model {
    load_path(&Scratch::new().write("m.gguf", bytes)).unwrap()
}

#[test]
fn a_turn_ends_where_the_tokenizer_config_says_when_config_json_says_otherwise() {
    let scratch = Scratch::copy_of("tied");
    for file in ["config.json", "generation_config.json"] {
        scratch.edit_json(file, |c| c["eos_token_id"] = json!(0));
    }
    scratch.edit_json("tokenizer_config.json", |c| c["eos_token"] = json!("<|im_end|>"));
    let model = load_path(&scratch.0).unwrap();
    let id = model.tokenizer.id_of("<|im_end|>").unwrap();
    assert_ne!(id, 0);
    assert_eq!(model.config.eos_token_ids, [0, id]);
}

#[test]
fn a_gguf_that_names_no_end_of_turn_still_ends_its_turns() {
    let key = b"tokenizer.ggml.eos_token_id";
    let model = gguf(&patched("tied-f16.gguf", key, b"tokenizer.ggml.eoz_token_id"));
    let id = model.tokenizer.id_of("<|im_end|>").unwrap();
    assert!(model.config.eos_token_ids.contains(&id), "{:?}", model.config.eos_token_ids);
    // The same text as a plain token is text.
    let mut plain = patched("tied-f16.gguf", key, b"tokenizer.ggml.eoz_token_id");
    let types = b"tokenizer.ggml.token_type";
    let at = plain.windows(types.len()).position(|w| w == types).unwrap() + types.len();
    // Value type, element type and count stand before the elements.
    let of_id = at + 4 + 4 + 8 + 4 * id as usize;
    assert_eq!(plain[of_id..of_id + 4], 3u32.to_le_bytes());
    plain[of_id] = 4;
    assert!(!gguf(&plain).config.eos_token_ids.contains(&id));
}

#[test]
fn a_gguf_of_version_2_is_the_same_model() {
    let mut bytes = std::fs::read(fixture("tied-q8_0.gguf")).unwrap();
    let third = gguf(&bytes);
    assert_eq!(bytes[4..8], 3u32.to_le_bytes());
    bytes[4] = 2;
    let second = gguf(&bytes);
    assert_eq!(second.config, third.config);
    assert!(second.weights.embed.to_f32() == third.weights.embed.to_f32());
}

#[test]
fn a_big_endian_gguf_is_refused_as_such() {
    let mut bytes = std::fs::read(fixture("tied-q8_0.gguf")).unwrap();
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    let e = refusal(&Scratch::new().write("m.gguf", &bytes));
    assert!(e.field() == Some("version") && e.to_string().contains("big-endian"), "{e}");
}

#[test]
fn an_alignment_that_moves_the_data_off_its_tensors_is_noticed() {
    // 4096 where offsets are multiples of 32: the first tensor that is not a multiple is named.
    let good = std::fs::read(fixture("tied-q8_0.gguf")).unwrap();
    let entry = GgufBytes(Vec::new()).key_u32("general.alignment", 4096);
    let mut bytes = good[..16].to_vec();
    bytes.extend((u64::from_le_bytes(good[16..24].try_into().unwrap()) + 1).to_le_bytes());
    bytes.extend(&entry.0);
    bytes.extend(&good[24..]);
    let e = refusal(&Scratch::new().write("m.gguf", &bytes));
    assert!(e.field().is_some_and(|f| f.starts_with("tensor ") && f.ends_with("offset")), "{e}");
}

#[test]
fn ids_of_a_gguf_that_no_token_has_are_refused() {
    let mut from = b"tokenizer.ggml.eos_token_id".to_vec();
    from.extend(U32.to_le_bytes());
    let mut bytes = std::fs::read(fixture("tied-f16.gguf")).unwrap();
    let at = bytes.windows(from.len()).position(|w| w == from).unwrap() + from.len();
    bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    let e = refusal(&Scratch::new().write("m.gguf", &bytes));
    assert!(e.to_string().contains("eos"), "{e}");
    // -1, as files write "none", where the type says signed.
    bytes[at - 4..at].copy_from_slice(&5u32.to_le_bytes());
    let e = refusal(&Scratch::new().write("m.gguf", &bytes));
    assert!(e.to_string().contains("eos_token_id"), "{e}");
}

fn llama(scaling: Value) -> Result<Vec<f64>, String> {
    let json = json!({
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 100, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_scaling": scaling,
    });
    let c = config("config.json", json.to_string().as_bytes(), "m").map_err(|e| e.to_string())?;
    Ok(rope::inv_freq(&c.ropes[0], c.rotary_dim, 4096))
}

#[test]
fn a_scaling_of_nulls_is_none_and_two_types_go_by_the_newer_key() {
    let plain = llama(Value::Null).unwrap();
    assert_eq!(llama(json!({"type": null, "factor": null})).unwrap(), plain);
    assert_eq!(llama(json!({"rope_type": "default", "factor": 8.0})).unwrap(), plain);
    let linear = llama(json!({"rope_type": "linear", "type": "default", "factor": 2.0})).unwrap();
    assert_eq!(linear, plain.iter().map(|f| f / 2.0).collect::<Vec<_>>());
}

#[test]
fn a_scaling_that_is_nearly_one_is_refused_by_its_key() {
    for (scaling, named) in [
        (json!({"factor": 2.0}), "rope_type"),
        (json!({"rope_type": "Linear", "factor": 2.0}), "Linear"),
        (json!({"rope_type": "linear"}), "factor"),
        (json!({"rope_type": "linear", "factor": "2.0"}), "factor"),
        (json!({"rope_type": "linear", "factor": 0}), "factor"),
        (json!({"rope_type": "linear", "factor": -4.0}), "factor"),
        (json!({"rope_type": 3}), "rope_type"),
        (json!([{"rope_type": "linear", "factor": 2.0}]), "rope_scaling"),
        (json!("linear"), "rope_scaling"),
        (
            json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 4.0}),
            "short_factor",
        ),
        (json!({"rope_type": "longrope", "factor": 4.0}), "short_factor"),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
            "original_max",
        ),
        (json!({"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 0}), "original"),
        (json!({"rope_type": "mrope", "mrope_section": [16, 24, 24]}), "mrope"),
    ] {
        let message = llama(scaling.clone()).expect_err(&scaling.to_string());
        assert!(message.contains(named), "{scaling}: {message}");
    }
}

#[test]
fn json_nested_a_hundred_thousand_deep_is_refused_without_recursion() {
    let deep = [b"{\"a\":".as_slice(), "[".repeat(100_000).as_bytes()].concat();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX] {
        let scratch = Scratch::copy_of("sharded");
        scratch.write(file, &deep);
        let e = cheaply(|| refusal(&scratch.0)).to_string();
        assert!(e.contains(file), "{file}: {e}");
    }
}

#[test]
fn a_shard_that_is_a_folder_a_loop_of_links_or_empty_is_named() {
    const FIRST: &str = "model-00001-of-00002.safetensors";
    let scratch = Scratch::copy_of("sharded");
    std::fs::remove_file(scratch.path(FIRST)).unwrap();
    std::fs::create_dir(scratch.path(FIRST)).unwrap();
    assert!(refusal(&scratch.0).to_string().contains(FIRST));
    std::fs::remove_dir(scratch.path(FIRST)).unwrap();
    std::os::unix::fs::symlink(FIRST, scratch.path(FIRST)).unwrap();
    assert!(refusal(&scratch.0).to_string().contains(FIRST));
    std::fs::remove_file(scratch.path(FIRST)).unwrap();
    scratch.write(FIRST, b"");
    assert!(refusal(&scratch.0).to_string().contains(FIRST));
}

#[test]
fn an_index_that_names_a_file_in_any_way_but_plainly_is_refused() {
    for name in [
        "./a.safetensors",
        "a/../b.safetensors",
        "/etc/hostname",
        "..",
        "",
        "a\0b",
        "C:\\a.safetensors",
        "sub/a.safetensors",
    ] {
        let scratch = Scratch::copy_of("sharded");
        scratch.edit_json(INDEX, |index| {
            let first = index["weight_map"].as_object_mut().unwrap().values_mut().next().unwrap();
            *first = json!(name);
        });
        let e = refusal(&scratch.0);
        assert_eq!(e.field(), Some("file name"), "{name:?}: {e}");
    }
}

#[test]
fn a_text_file_where_json_or_weights_should_be_is_refused_by_name() {
    // What a clone without large files leaves behind.
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665e0\nsize 988097824\n";
    for (name, file) in [("tied", "model.safetensors"), ("tied", "tokenizer.json"), ("tied", "config.json")] {
        let scratch = Scratch::copy_of(name);
        scratch.write(file, pointer);
        let e = refusal(&scratch.0).to_string();
        assert!(e.contains(file), "{e}");
    }
    let e = refusal(&Scratch::new().write("m.gguf", pointer));
    assert_eq!(e.field(), Some("magic"));
    let bom =
        [b"\xef\xbb\xbf".as_slice(), &std::fs::read(fixture("tied").join("config.json")).unwrap()].concat();
    let scratch = Scratch::copy_of("tied");
    scratch.write("config.json", &bom);
    assert_eq!(refusal(&scratch.0).field(), Some("JSON"));
}

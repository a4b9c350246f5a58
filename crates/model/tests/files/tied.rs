//! Tied embeddings: which tensor is the output head.

use super::shards::with_copy;
use super::{Scratch, fixture, load_path, refusal};

const HEAD: &str = "lm_head.weight";
const EMBED: &str = "model.embed_tokens.weight";

/// The tied fixture with a head of its own, whose data `edit` may change.
fn with_head(edit: impl FnOnce(&mut Vec<u8>)) -> Scratch {
    let scratch = Scratch::copy_of("tied");
    scratch.write("model.safetensors", &with_copy(&scratch.read("model.safetensors"), EMBED, HEAD, edit));
    scratch
}

#[test]
fn a_tied_model_without_a_head_uses_its_embedding() {
    let m = load_path(&fixture("tied")).unwrap();
    assert!(m.config.tie_word_embeddings && m.warnings.is_empty());
    assert!(m.weights.lm_head.same_bytes(&m.weights.embed), "no copy is made");
}

#[test]
fn a_tied_model_with_an_identical_head_is_the_same_model() {
    let scratch = with_head(|_| {});
    let m = load_path(&scratch.0).unwrap();
    assert!(m.warnings.is_empty(), "{:?}", m.warnings);
    assert!(m.weights.lm_head.same_bytes(&m.weights.embed));
    assert_eq!(m.weights.lm_head.to_f32(), load_path(&fixture("tied")).unwrap().weights.lm_head.to_f32());
}

#[test]
fn a_tied_model_with_another_head_uses_its_embedding_and_says_so() {
    let scratch = with_head(|data| data[0] ^= 1);
    let m = load_path(&scratch.0).unwrap();
    assert!(m.weights.lm_head.same_bytes(&m.weights.embed));
    assert!(m.warnings.len() == 1 && m.warnings[0].contains(HEAD), "{:?}", m.warnings);
}

#[test]
fn an_untied_model_without_a_head_is_refused() {
    let scratch = Scratch::copy_of("tied");
    scratch.edit_json("config.json", |json| json["tie_word_embeddings"] = false.into());
    assert_eq!(refusal(&scratch.0).field(), Some("tensor lm_head.weight"));
    // The key's own default in this family is "not tied".
    scratch.edit_json("config.json", |json| {
        json.as_object_mut().unwrap().remove("tie_word_embeddings");
    });
    assert_eq!(refusal(&scratch.0).field(), Some("tensor lm_head.weight"));
}

#[test]
fn an_untied_model_uses_its_own_head() {
    let scratch = with_head(|data| data.fill(0));
    scratch.edit_json("config.json", |json| json["tie_word_embeddings"] = false.into());
    let m = load_path(&scratch.0).unwrap();
    assert!(m.weights.lm_head.to_f32().iter().all(|&x| x == 0.0));
    assert!(m.weights.embed.to_f32().iter().any(|&x| x != 0.0));
}

#[test]
fn a_gguf_without_an_output_tensor_is_tied_also_when_quantised() {
    for name in ["tied-f16.gguf", "tied-q4_0.gguf", "kquants.gguf"] {
        let m = load_path(&fixture(name)).unwrap();
        assert!(m.config.tie_word_embeddings, "{name}");
        assert!(m.weights.lm_head.same_bytes(&m.weights.embed), "{name}");
    }
    let m = load_path(&fixture("sharded-bf16.gguf")).unwrap();
    assert!(!m.config.tie_word_embeddings && !m.weights.lm_head.same_bytes(&m.weights.embed));
}

//! Sharded folders: missing, cut and contradictory shards, and files outside the folder.

use std::borrow::Cow;
use std::os::unix::fs::symlink;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, View};

use super::{Scratch, fixture, load_path, refusal};

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The bytes of a safetensors file with `name` added, or replaced, by a copy of tensor `from` whose data `edit` may change.
pub fn with_copy(bytes: &[u8], from: &str, name: &str, edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let source = file.tensor(from).unwrap();
    let mut data = source.data().to_vec();
    edit(&mut data);
    let copy = TensorView::new(source.dtype(), source.shape().to_vec(), &data).unwrap();
    let mut tensors: Vec<(String, TensorView)> =
        file.tensors().into_iter().filter(|(n, _)| n != name).collect();
    tensors.push((name.to_string(), copy));
    safetensors::serialize(tensors, None).unwrap()
}

#[test]
fn a_missing_shard_is_named() {
    for gone in [FIRST, SECOND] {
        let scratch = Scratch::copy_of("sharded");
        std::fs::remove_file(scratch.path(gone)).unwrap();
        assert_eq!(refusal(&scratch.0).field(), Some(gone));
    }
}

#[test]
fn a_cut_shard_is_named() {
    for shard in [FIRST, SECOND] {
        let whole = Scratch::copy_of("sharded").read(shard);
        for keep in [whole.len() - 1, whole.len() / 2, 100, 8, 1, 0] {
            let scratch = Scratch::copy_of("sharded");
            scratch.write(shard, &whole[..keep]);
            let e = refusal(&scratch.0).to_string();
            assert!(e.contains(shard), "cut to {keep}: {e}");
        }
        let scratch = Scratch::copy_of("sharded");
        scratch.write(shard, &[&whole[..], &[0]].concat());
        assert_eq!(refusal(&scratch.0).field(), Some("file length"));
    }
}

/// A two-shard folder of FP8 weights: layer 0 in the first file, the scales of layer 1 in the second.
fn quantised() -> Scratch {
    let scratch = Scratch::copy_of("families/fp8-blocks");
    let bytes = scratch.read("model.safetensors");
    std::fs::remove_file(scratch.path("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let second = |name: &str| name.ends_with("_scale_inv") && name.contains("layers.1.");
    let mut map = serde_json::Map::new();
    for (name, shard) in [(FIRST, false), (SECOND, true)] {
        let part: Vec<_> = file.tensors().into_iter().filter(|(n, _)| second(n) == shard).collect();
        part.iter().for_each(|(n, _)| drop(map.insert(n.clone(), name.into())));
        scratch.write(name, &safetensors::serialize(part, None).unwrap());
    }
    scratch.write(INDEX, serde_json::json!({ "weight_map": map }).to_string().as_bytes());
    scratch
}

/// Scales in a shard of their own that is gone, cut or forgotten: never weights without scales, never zeros.
#[test]
fn a_quantised_model_without_the_shard_of_its_scales_is_refused() {
    let whole = load_path(&fixture("families/fp8-blocks")).unwrap();
    let split = load_path(&quantised().0).unwrap_or_else(|e| panic!("{e}"));
    for (a, b) in whole.weights.tensors().zip(split.weights.tensors()) {
        assert_eq!(a.1.to_f32(), b.1.to_f32(), "{}", a.0);
    }
    let scratch = quantised();
    std::fs::remove_file(scratch.path(SECOND)).unwrap();
    assert_eq!(refusal(&scratch.0).field(), Some(SECOND));
    let bytes = quantised().read(SECOND);
    for keep in [bytes.len() - 1, bytes.len() / 2, 0] {
        let scratch = quantised();
        scratch.write(SECOND, &bytes[..keep]);
        assert!(refusal(&scratch.0).to_string().contains(SECOND), "cut to {keep}");
    }
    let scratch = quantised();
    let scales = "model.layers.1.mlp.up_proj.weight_scale_inv";
    scratch.edit_json(INDEX, |json| {
        json["weight_map"].as_object_mut().unwrap().remove(scales);
    });
    assert_eq!(refusal(&scratch.0).field(), Some(format!("tensor {scales}").as_str()));
}

#[test]
fn an_index_that_points_to_the_wrong_shard_is_refused() {
    let scratch = Scratch::copy_of("sharded");
    let tensor = "model.norm.weight";
    scratch.edit_json(INDEX, |json| json["weight_map"][tensor] = FIRST.into());
    let e = refusal(&scratch.0);
    assert_eq!(e.field(), Some("tensor model.norm.weight"));
    assert!(e.to_string().contains(FIRST) && e.to_string().contains(&format!("(it is in {SECOND})")), "{e}");
}

#[test]
fn the_index_decides_between_copies() {
    let tensor = "model.norm.weight";
    let expected = load_path(&fixture("sharded")).unwrap();
    let scratch = Scratch::copy_of("sharded");
    let other = |data: &mut Vec<u8>| data.fill(0x11);
    scratch.write(
        FIRST,
        &with_copy(&scratch.read(FIRST), "model.layers.0.input_layernorm.weight", tensor, other),
    );
    let m = load_path(&scratch.0).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(m.weights.final_norm, expected.weights.final_norm);
    assert!(
        m.warnings.len() == 1 && m.warnings[0].contains(tensor) && m.warnings[0].contains(FIRST),
        "{:?}",
        m.warnings
    );
    // The other copy, when the index says so.
    scratch.edit_json(INDEX, |json| json["weight_map"][tensor] = FIRST.into());
    let m = load_path(&scratch.0).unwrap_or_else(|e| panic!("{e}"));
    assert_ne!(m.weights.final_norm, expected.weights.final_norm);
}

#[test]
fn a_tensor_that_the_index_forgets_is_missing_not_zero() {
    let scratch = Scratch::copy_of("sharded");
    let tensor = "model.layers.1.mlp.up_proj.weight";
    scratch.edit_json(INDEX, |json| {
        json["weight_map"].as_object_mut().unwrap().remove(tensor);
    });
    assert_eq!(refusal(&scratch.0).field(), Some("tensor model.layers.1.mlp.up_proj.weight"));
    let scratch = Scratch::copy_of("sharded");
    scratch.edit_json(INDEX, |json| json["weight_map"]["model.layers.9.extra.weight"] = FIRST.into());
    assert_eq!(refusal(&scratch.0).field(), Some("tensor model.layers.9.extra.weight"));
}

#[test]
fn damaged_indexes_are_refused() {
    let scratch = Scratch::copy_of("sharded");
    let text = r#"{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}"#;
    for (bytes, field) in [
        (&b"{"[..], "JSON"),
        (b"[]", "JSON"),
        (b"{\"weight_map\":{\"a\":1}}", "JSON"),
        (b"{\"weight_map\":{}}", "weight_map"),
        (text.as_bytes(), "JSON"),
        (b"", "file length"),
    ] {
        scratch.write(INDEX, bytes);
        assert_eq!(refusal(&scratch.0).field(), Some(field), "{}", bytes.escape_ascii());
    }
}

#[test]
fn folders_without_weights_or_config_are_refused() {
    let scratch = Scratch::new();
    assert_eq!(refusal(&scratch.0).field(), Some("config.json"));
    for gone in ["config.json", "tokenizer.json", "model.safetensors"] {
        let scratch = Scratch::copy_of("tied");
        std::fs::remove_file(scratch.path(gone)).unwrap();
        assert_eq!(refusal(&scratch.0).field(), Some(gone));
    }
    let scratch = Scratch::copy_of("sharded");
    std::fs::remove_file(scratch.path(INDEX)).unwrap();
    assert_eq!(refusal(&scratch.0).field(), Some(INDEX));
}

#[test]
fn files_outside_the_folder_are_refused_by_name() {
    let outside = Scratch::copy_of("sharded");
    let shard = outside.path(FIRST);
    for name in [
        "../outside.safetensors",
        shard.to_str().unwrap(),
        "..",
        "a/../../b.safetensors",
        "sub/x.safetensors",
        ".",
        "",
    ] {
        let scratch = Scratch::copy_of("sharded");
        scratch.edit_json(INDEX, |json| json["weight_map"]["lm_head.weight"] = name.into());
        let e = refusal(&scratch.0);
        assert_eq!(e.field(), Some("file name"), "{name}: {e}");
        assert!(e.to_string().contains(&format!("{name:?}")), "{e}");
    }
}

/// Replaces `name` in `folder` by a link to `target`.
fn link(folder: &Scratch, name: &str, target: &Path) {
    std::fs::remove_file(folder.path(name)).unwrap();
    symlink(target, folder.path(name)).unwrap();
}

#[test]
fn a_link_that_leaves_the_folder_is_refused() {
    let outside = Scratch::copy_of("sharded");
    for name in [FIRST, "config.json", "tokenizer.json", INDEX] {
        let scratch = Scratch::copy_of("sharded");
        link(&scratch, name, &outside.path(name));
        let e = refusal(&scratch.0);
        assert_eq!(e.field(), Some(name), "{e}");
        assert!(e.to_string().contains("a link to"), "{e}");
    }
    // Inside it is nobody's business how the files are arranged.
    let scratch = Scratch::copy_of("sharded");
    std::fs::rename(scratch.path(FIRST), scratch.path("real.bin")).unwrap();
    symlink("real.bin", scratch.path(FIRST)).unwrap();
    assert!(load_path(&scratch.0).is_ok());
    // A link to the whole folder is the user's own choice.
    let elsewhere = Scratch::new();
    symlink(&scratch.0, elsewhere.path("model")).unwrap();
    assert!(load_path(&elsewhere.path("model")).is_ok());
}

#[test]
fn a_dangling_link_is_refused() {
    let scratch = Scratch::copy_of("sharded");
    link(&scratch, SECOND, Path::new("nowhere"));
    assert!(refusal(&scratch.0).to_string().contains(SECOND));
}

#[test]
fn a_tensor_of_the_wrong_shape_or_type_is_named() {
    let name = "model.layers.1.self_attn.k_proj.weight";
    let scratch = Scratch::copy_of("sharded");
    let shard = if scratch.read(INDEX).is_empty() { FIRST } else { SECOND };
    scratch.write(shard, &with_copy(&scratch.read(shard), "model.layers.1.mlp.up_proj.weight", name, |_| {}));
    let e = refusal(&scratch.0);
    assert_eq!(e.field(), Some("tensor model.layers.1.self_attn.k_proj.weight"));
    assert!(e.to_string().contains("[96, 64]") && e.to_string().contains("[64, 64]"), "{e}");

    let scratch = Scratch::copy_of("tied");
    let bytes = scratch.read("model.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let as_integers = |(name, view): (String, TensorView<'_>)| {
        let dtype = if name == "model.norm.weight" { safetensors::Dtype::I32 } else { view.dtype() };
        let data = view.data().to_vec();
        (name, Owned(dtype, view.shape().to_vec(), data))
    };
    let changed = safetensors::serialize(file.tensors().into_iter().map(as_integers), None).unwrap();
    scratch.write("model.safetensors", &changed);
    let e = refusal(&scratch.0);
    assert_eq!(e.field(), Some("tensor model.norm.weight"));
    assert!(e.to_string().contains("I32"), "{e}");
}

struct Owned(safetensors::Dtype, Vec<usize>, Vec<u8>);

impl View for Owned {
    fn dtype(&self) -> safetensors::Dtype {
        self.0
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (&self.2).into()
    }

    fn data_len(&self) -> usize {
        self.2.len()
    }
}

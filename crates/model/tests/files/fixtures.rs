//! The committed models load, and both containers mean the same weights.

use suanpan_base::DType;
use suanpan_model::{Ffn, LayerWeights, LoadStage, Mlp, Model, RopeScaling, Tensor, Values, rope};
use suanpan_ops::RopeStyle;

use super::{fixture, load_path};

const FOLDERS: [&str; 4] = ["tied", "sharded", "llama3-rope", "window"];
const GGUFS: [&str; 7] = [
    "tied-f16.gguf",
    "tied-q8_0.gguf",
    "tied-q4_0.gguf",
    "tied-q4_1.gguf",
    "sharded-bf16.gguf",
    "llama3-rope-f16.gguf",
    "kquants.gguf",
];

fn values(layer: &LayerWeights) -> Vec<f32> {
    match &layer.v {
        Values::Own(v) => v.weight.to_f32(),
        Values::InKeys(_) => panic!("a Llama's values are a product of their own"),
    }
}

fn model(name: &str) -> Model {
    load_path(&fixture(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn every_fixture_loads_with_its_tokenizer_and_template() {
    for name in FOLDERS.iter().chain(&GGUFS) {
        let m = model(name);
        assert_eq!(m.config.vocab_size, 272, "{name}");
        assert_eq!(m.tokenizer.vocab_size(), 272, "{name}");
        assert!(m.chat_template.is_some() && m.warnings.is_empty(), "{name}: {:?}", m.warnings);
        assert_eq!(m.config.bos_token_id, Some(268), "{name}");
        assert!(m.config.eos_token_ids.starts_with(&[271]) && !m.config.add_bos, "{name}");
        let ids = m.tokenizer.encode("the theme", false).unwrap();
        assert_eq!(m.tokenizer.decode(&ids, false), "the theme", "{name}");
        assert!(ids.len() < "the theme".len(), "{name}: merges are used");
    }
}

#[test]
fn sizes_come_from_the_file() {
    let m = model("tied-q4_1.gguf");
    let c = &m.config;
    assert_eq!((c.hidden_size, c.intermediate_size, c.layers.len()), (64, 96, 2));
    assert_eq!((c.heads.num_q_heads, c.heads.num_kv_heads, c.heads.head_dim_qk), (4, 2, 16));
    assert_eq!((c.max_position_embeddings, c.rms_norm_eps, c.ropes[0].theta), (2048, 1e-5, 10_000.0));
    assert_eq!((c.architecture.as_str(), c.name.as_str()), ("llama", "tied-q4_1"));
    assert!(c.tie_word_embeddings && c.rope_style == RopeStyle::Interleaved);
    assert_eq!(m.kv_bytes_per_token(DType::Bf16), 2 * 2 * (16 + 16) * 2);
    // 272·64 embedding, a layer 64·64·2 + 32·64·2 + 3·96·64 and two norms, one final norm.
    assert_eq!(m.num_parameters(), 272 * 64 + 2 * (4096 * 2 + 2048 * 2 + 3 * 6144 + 128) + 64);
    let formats = m.weights.formats();
    assert_eq!(formats["Q4_1"].0, 14);
    assert_eq!(formats["Q8_0"], (1, 272 * 64 / 32 * 34));
    let wide = model("sharded");
    assert_eq!((wide.config.heads.head_dim_qk, wide.weights.layers[0].q.weight.rows()), (32, 128));
    assert_eq!(wide.config.eos_token_ids, [271, 269]);
    assert_eq!(wide.config.layers[0].window, None);
    assert!(model("window").config.layers.iter().all(|l| l.window == Some(8)));
}

#[test]
fn weights_stay_in_the_format_and_size_of_their_file() {
    for name in GGUFS.iter().chain(&FOLDERS) {
        let m = model(name);
        let (held, file) = (m.weight_bytes() as f64, m.file_bytes as f64);
        assert!(held <= file && held > 0.85 * file, "{name}: {held} bytes held of {file}");
    }
}

/// Row `r` of head `head`.
fn row(tensor: &Tensor, head_dim: usize, head: usize, r: usize) -> Vec<f32> {
    let mut out = vec![0.0; tensor.cols()];
    tensor.weight().dequantize_row(head * head_dim + r, &mut out);
    out
}

#[test]
fn rotary_pairs_of_q_and_k_are_neighbours_in_gguf_and_halves_in_safetensors() {
    let (folder, gguf) = (model("sharded"), model("sharded-bf16.gguf"));
    assert_eq!(folder.config.rope_style, RopeStyle::Half);
    assert_eq!(gguf.config.rope_style, RopeStyle::Interleaved);
    let d = folder.config.heads.head_dim_qk;
    for (a, b) in folder.weights.layers.iter().zip(&gguf.weights.layers) {
        for (a, b, heads) in [(&a.q.weight, &b.q.weight, 4), (&a.k.weight, &b.k.weight, 2)] {
            for head in 0..heads {
                for i in 0..d / 2 {
                    assert_eq!(row(a, d, head, i), row(b, d, head, 2 * i));
                    assert_eq!(row(a, d, head, i + d / 2), row(b, d, head, 2 * i + 1));
                }
            }
        }
        assert_eq!(values(a), values(b));
        assert_eq!(a.o.weight.to_f32(), b.o.weight.to_f32());
        let (fa, fb) = (a.ffn.as_ref().unwrap(), b.ffn.as_ref().unwrap());
        let down = |ffn: &Ffn| match &ffn.mlp {
            Mlp::Dense(gated) => gated.down.weight.to_f32(),
            Mlp::Experts { .. } => panic!("a Llama has no experts"),
        };
        assert_eq!(down(fa), down(fb));
        assert_eq!((&a.attn_norm, &fa.norm), (&b.attn_norm, &fb.norm));
    }
    assert_eq!(folder.weights.lm_head.to_f32(), gguf.weights.lm_head.to_f32());
    assert_ne!(folder.weights.lm_head.to_f32(), folder.weights.embed.to_f32());
}

#[test]
fn llama3_scaling_is_the_same_from_config_and_from_the_factor_tensor() {
    let (folder, gguf) = (model("llama3-rope").config, model("llama3-rope-f16.gguf").config);
    assert!(matches!(folder.ropes[0].scaling, RopeScaling::Llama3 { .. }));
    assert!(matches!(gguf.ropes[0].scaling, RopeScaling::Factors(_)));
    let (a, b) = (rope::inv_freq(&folder.ropes[0], 16, 2048), rope::inv_freq(&gguf.ropes[0], 16, 2048));
    assert!(a.iter().zip(&b).all(|(a, b)| (a / b - 1.0).abs() < 1e-6), "{a:?} {b:?}");
    let plain = rope::inv_freq(&suanpan_model::RopeConfig::plain(10_000.0), 16, 2048);
    assert!((plain[7] / a[7] - 8.0).abs() < 1e-9 && plain[0] == a[0]);
}

#[test]
fn one_weight_file_of_a_folder_can_be_named() {
    let m = model("tied/model.safetensors");
    assert_eq!(m.weights.embed.to_f32(), model("tied").weights.embed.to_f32());
}

#[test]
fn progress_ends_with_everything_done() {
    let mut last = None;
    let path = fixture("tied-q4_0.gguf");
    suanpan_model::load(path.to_str().unwrap(), &Default::default(), &mut |p| last = Some(p)).unwrap();
    let last = last.expect("loading reports progress");
    assert_eq!(last.stage, LoadStage::Read);
    assert_eq!((last.done_bytes, last.done_items), (last.total_bytes, last.total_items));
    assert!(last.total_bytes > 0 && last.total_items == 15);
}

#[test]
fn a_model_that_does_not_exist_is_refused_with_the_forms() {
    for spec in
        ["no/such/model", "builtin:other", "hf:justaname", "hf:a/../b", "hf:a/b:../x.gguf", "hf:a/b@..", ""]
    {
        let e = match suanpan_model::load(spec, &Default::default(), &mut |_| {}) {
            Ok(_) => panic!("{spec:?} must be refused"),
            Err(e) => e.to_string(),
        };
        assert!(e.contains("supported"), "{e}");
    }
    let m = suanpan_model::load("builtin:recall", &Default::default(), &mut |_| {}).unwrap();
    assert!(m.file_bytes == 0 && m.config.check().is_ok());
}

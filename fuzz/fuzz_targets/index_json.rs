//! Any bytes as the index of a sharded model.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::folder::parse_index;
use suanpan_model::source::Source;

fuzz_target!(|data: &[u8]| {
    if let Ok(map) = parse_index(&Source::owned("fuzz.index.json", data.to_vec())) {
        assert!(!map.is_empty());
    }
});

//! Files with random damage: refused or loaded, never a panic. A short, fixed run of what the fuzz targets do for longer.

use suanpan_model::gguf::Gguf;
use suanpan_model::load::from_gguf;
use suanpan_model::safetensors::SafeTensors;
use suanpan_model::source::Source;

use super::{Scratch, fixture, load_path};

/// A small generator with a fixed seed (xorshift64*): the same damage in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }

    /// Damages a few places among the first `reach` bytes: flips, extreme numbers, cuts, repeats.
    fn damage(&mut self, bytes: &mut Vec<u8>, reach: usize) {
        for _ in 0..=self.below(3) {
            let at = self.below(reach.min(bytes.len()));
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.next() as u8,
                2 => {
                    let extreme = [0, 1, u64::MAX, 1 << 31, 1 << 32, 1 << 63, i64::MAX as u64][self.below(7)];
                    let end = bytes.len().min(at + 8);
                    bytes[at..end].copy_from_slice(&extreme.to_le_bytes()[..end - at]);
                }
                3 => {
                    let end = bytes.len().min(at + 1 + self.below(16));
                    bytes.drain(at..end);
                }
                4 => {
                    let end = bytes.len().min(at + 1 + self.below(16));
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
                _ => bytes.truncate(at.max(1)),
            }
        }
    }
}

#[test]
fn damaged_gguf_files_never_panic() {
    let mut random = Random(0x5eed);
    let (mut refused, mut loaded) = (0, 0);
    for name in ["tied-q4_0.gguf", "kquants.gguf", "llama3-rope-f16.gguf"] {
        let good = std::fs::read(fixture(name)).unwrap();
        for _ in 0..400 {
            let mut bytes = good.clone();
            random.damage(&mut bytes, 7000);
            match Gguf::parse(Source::owned(name, bytes)).and_then(|g| from_gguf(&g)) {
                Ok(_) => loaded += 1,
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    refused += 1;
                }
            }
        }
    }
    // Damage inside a token's text or a weight is still a readable file; most damage is not.
    assert!(refused > 400 && loaded > 50, "refused {refused}, loaded {loaded}");
}

#[test]
fn damaged_folders_never_panic() {
    let mut random = Random(0xf01de5);
    let mut refused = 0;
    for file in [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let scratch = Scratch::copy_of("sharded");
        let good = scratch.read(file);
        for _ in 0..120 {
            let mut bytes = good.clone();
            random.damage(&mut bytes, 3000);
            scratch.write(file, &bytes);
            refused += usize::from(load_path(&scratch.0).is_err());
        }
    }
    assert!(refused > 200, "refused {refused}");
}

/// Every byte of the header of a safetensors file, two changes each: refused by name, or every tensor as it was or with one name less.
#[test]
fn every_single_byte_change_of_a_safetensors_header_gives_a_typed_error_or_a_file_within_its_bounds() {
    let good = std::fs::read(fixture("families/gpt-oss-mxfp4/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut bytes = good.clone();
    let mut refused = 0;
    for at in 0..header {
        for change in [1 << (at % 8), 0x55] {
            bytes[at] = good[at] ^ change;
            match SafeTensors::parse(Source::owned("changed", bytes.clone())) {
                Ok(file) => {
                    let mut held = 0;
                    for name in file.tensor_names() {
                        let info = file.tensor_info(name).unwrap();
                        assert!(info.bytes.start <= info.bytes.end && info.bytes.end <= good.len());
                        held += info.bytes.len();
                    }
                    assert_eq!(held, good.len() - header, "byte {at}: a part of the data belongs to nobody");
                }
                Err(e) => {
                    assert!(e.field().is_some(), "byte {at}: {e}");
                    refused += 1;
                }
            }
        }
        bytes[at] = good[at];
    }
    assert!(refused > header, "only {refused} of {} changes refused", 2 * header);
}

/// Every byte of the header of files with each kind of metadata: an error or a model that passes its own checks, never a panic.
#[test]
fn every_single_byte_change_of_a_header_gives_a_typed_error_or_a_model() {
    for name in
        ["families/gpt-oss.gguf", "families/phi3.gguf", "families/deepseek2.gguf", "tokenizer/spm-plain.gguf"]
    {
        let good = std::fs::read(fixture(name)).unwrap();
        let gguf = Gguf::parse(Source::owned(name, good.clone())).unwrap();
        let starts = gguf.tensor_names().map(|n| gguf.tensor_info(n).unwrap().bytes.start);
        let header = starts.min().unwrap_or(good.len());
        let mut bytes = good;
        let mut refused = 0;
        for at in 0..header {
            let was = bytes[at];
            // A different bit for each byte: over the neighbours all eight occur.
            bytes[at] ^= 1 << (at % 8);
            match Gguf::parse(Source::owned(name, bytes.clone())).and_then(|g| from_gguf(&g)) {
                Ok(model) => assert!(model.config.check().is_ok()),
                Err(e) => {
                    assert!(!e.to_string().is_empty());
                    refused += 1;
                }
            }
            bytes[at] = was;
        }
        assert!(refused * 4 > header, "{name}: only {refused} of {header} changes refused");
    }
}

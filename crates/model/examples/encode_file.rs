//! Token ids of a text file, one a line, and the time it took: `encode_file MODEL TEXT OUT`. The text is a user's: control tokens stay text.
//!
//! MODEL may also be a tokenizer.json alone. bench/tokenizer_parity.py holds it beside other engines.

use std::fmt::Write as _;
use std::time::Instant;

use suanpan_model::{LoadOptions, Tokenizer, load};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, out] = words.as_slice() else {
        return Err("usage: encode_file MODEL TEXT OUT".into());
    };
    let start = Instant::now();
    let tokenizer = if model.ends_with(".json") {
        Tokenizer::from_json(&std::fs::read(model)?, None)?.tokenizer
    } else {
        load(model, &LoadOptions { lazy: true, ..LoadOptions::default() }, &mut |_| {})?.tokenizer
    };
    println!("loaded in {:.3} s ({})", start.elapsed().as_secs_f64(), tokenizer.kind());
    let text = std::fs::read_to_string(text)?;
    let start = Instant::now();
    let ids = tokenizer.encode(&text, true)?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{} tokens of {} bytes in {seconds:.3} s", ids.len(), text.len());
    let mut lines = String::new();
    ids.iter().try_for_each(|id| writeln!(lines, "{id}"))?;
    std::fs::write(out, lines)?;
    Ok(())
}

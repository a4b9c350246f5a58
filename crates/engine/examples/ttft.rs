//! Time to the first token of one prompt: cold, found in the prefix cache, and reloaded from disk by a new engine. Least of three each.
//!
//! `cargo run --release -p suanpan-engine --example ttft -- MODEL TOKENS [bf16|int8|…]`; the prompt is read from standard input.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use suanpan_engine::{Engine, EngineOptions, Event, LowerTiers, Request, SamplingParams};
use suanpan_model::{LoadOptions, Model, load};

type Failure = Box<dyn std::error::Error>;

fn engine(model: &Arc<Model>, dtype: &str, tokens: usize) -> Result<Engine, Failure> {
    let options = EngineOptions {
        kv_cache_dtype: dtype.parse()?,
        max_model_len: Some(tokens + 32),
        max_num_seqs: 1,
        kv_cache_memory_bytes: None,
        num_pages_override: Some((tokens + 64).div_ceil(16) * 2),
        window_groups: false,
        ..EngineOptions::default()
    };
    Ok(Engine::new(Arc::clone(model), options)?)
}

/// Seconds to the first token, tokens found, and the token.
fn first_token(engine: &mut Engine, prompt: &[u32]) -> Result<(Duration, usize, u32), Failure> {
    let start = Instant::now();
    engine.submit(Request {
        prompt: prompt.to_vec(),
        params: SamplingParams::greedy(1),
        ..Request::default()
    })?;
    let (mut took, mut cached, mut token) = (Duration::ZERO, 0, None);
    while engine.has_work() {
        for event in engine.step() {
            match event {
                Event::Token { tokens, .. } => {
                    took = start.elapsed();
                    token = tokens.first().copied();
                }
                Event::Finished { books, .. } => cached = books.cached_tokens,
                _ => {}
            }
        }
    }
    engine.check()?;
    Ok((took, cached, token.ok_or("no token came")?))
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, tokens, rest @ ..] = args.as_slice() else {
        return Err("usage: ttft MODEL TOKENS [KV TYPE]".into());
    };
    let (tokens, dtype) = (tokens.parse::<usize>()?, rest.first().map_or("bf16", String::as_str));
    let model = Arc::new(load(spec, &LoadOptions::default(), &mut |_| ())?);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let mut prompt = model.tokenizer.encode_plain(&text)?;
    if prompt.len() < tokens {
        return Err(format!("the text has {} tokens", prompt.len()).into());
    }
    prompt.truncate(tokens);
    let folder = std::env::temp_dir().join(format!("suanpan-ttft-{}", std::process::id()));
    let disk = LowerTiers {
        folder: Some(folder.clone()),
        disk_bytes: 8 << 30,
        host_bytes: 0,
        staging_bytes: 2 << 30,
    };
    let mut first = engine(&model, dtype, tokens)?.with_lower_tiers(&disk)?;
    let (cold, _, answer) = first_token(&mut first, &prompt)?;
    let mut warm = Duration::MAX;
    for _ in 0..3 {
        let (took, cached, token) = first_token(&mut first, &prompt)?;
        assert_eq!((cached, token), (tokens - 1, answer), "a warm prompt answers as a cold one");
        warm = warm.min(took);
    }
    drop(first); // and with it what still waits to be written
    let mut reloaded = Duration::MAX;
    for _ in 0..3 {
        let mut next = engine(&model, dtype, tokens)?.with_lower_tiers(&disk)?;
        let (took, cached, token) = first_token(&mut next, &prompt)?;
        println!("reloaded: {cached} tokens from disk, the same token: {}", token == answer);
        reloaded = reloaded.min(took);
    }
    std::fs::remove_dir_all(folder)?;
    let share = |d: Duration| d.as_secs_f64() / cold.as_secs_f64() * 100.0;
    println!(
        "{tokens} tokens, {dtype}: first token cold {cold:.1?}, warm {warm:.1?} ({:.2} %), reloaded {reloaded:.1?} ({:.2} %)",
        share(warm),
        share(reloaded)
    );
    Ok(())
}

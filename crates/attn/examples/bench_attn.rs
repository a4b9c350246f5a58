//! Prints the attention bench: `bench_attn [threads] [repeats] [length,...] [head_dim,...] [decode_keys]`.

use suanpan_attn::bench;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut config = bench::Config::default();
    let list = |s: &String| {
        s.split(',').filter(|x| !x.is_empty()).map(str::parse).collect::<Result<Vec<usize>, _>>()
    };
    if let Some(threads) = args.first() {
        config.threads = threads.parse()?;
    }
    if let Some(repeats) = args.get(1) {
        config.repeats = repeats.parse()?;
    }
    if let Some(lengths) = args.get(2) {
        config.lengths = list(lengths)?;
    }
    if let Some(head_dims) = args.get(3) {
        config.head_dims = list(head_dims)?;
    }
    if let Some(keys) = args.get(4) {
        config.decode_keys = keys.parse()?;
    }
    for row in bench::run(&config)? {
        println!("{row}");
    }
    Ok(())
}

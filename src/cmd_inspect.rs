//! `suanpan inspect MODEL`: what a model's files say and what was made of it, without running it.

use std::fmt::Write as _;

use suanpan_base::{BadArgument, DType};
use suanpan_model::inspect::{Inspection, inspect};
use suanpan_model::{LoadOptions, load};

#[derive(clap::Args)]
pub struct InspectArgs {
    /// A .gguf file, a folder with config.json, builtin:recall (or :chain, :count), or hf:owner/name with an optional @revision and :file.gguf.
    model: String,
    /// Longest sequence in tokens: positions that depend on a length are shown as for it. Default: the whole context.
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Element type of stored keys and values that bytes are counted for.
    #[arg(long, default_value = "bf16")]
    kv_cache_dtype: DType,
    /// List every matrix.
    #[arg(long)]
    tensors: bool,
    /// Print JSON; docs/models.md explains the keys.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    print!("{}", render(args)?);
    Ok(())
}

fn render(args: &InspectArgs) -> anyhow::Result<String> {
    let model = load(&args.model, &LoadOptions { lazy: true, ..LoadOptions::default() }, &mut |_| ())?;
    let longest = model.config.max_position_embeddings;
    let max_model_len = args.max_model_len.unwrap_or(longest);
    if !(1..=longest).contains(&max_model_len) {
        return Err(
            BadArgument::new("inspect", "max_model_len", max_model_len, format!("1 to {longest}")).into()
        );
    }
    let mut facts = inspect(&model, max_model_len, args.kv_cache_dtype);
    if !args.tensors {
        facts.tensors.clear();
    }
    if args.json {
        return Ok(serde_json::to_string_pretty(&facts)? + "\n");
    }
    let mut out = String::new();
    write_text(&mut out, &facts)?;
    Ok(out)
}

/// Layer numbers with runs joined: `0-4, 6-10`.
fn ranges(layers: &[usize]) -> String {
    let mut runs: Vec<[usize; 2]> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some(run) if run[1] + 1 == layer => run[1] = layer,
            _ => runs.push([layer, layer]),
        }
    }
    let text = |[a, b]: &[usize; 2]| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

fn write_text(out: &mut String, f: &Inspection) -> std::fmt::Result {
    let c = &f.config;
    writeln!(out, "{} ({}, architecture {})", f.name, f.family, f.architecture)?;
    writeln!(out, "weights      {} parameters, {} of files", f.parameters, mib(f.file_bytes))?;
    for format in &f.formats {
        writeln!(out, "  {:<10} {} matrices, {}", format.format, format.tensors, mib(format.bytes))?;
    }
    writeln!(
        out,
        "layers       {} of {} (MLP {}), vocabulary {}",
        c.num_layers, c.hidden_size, c.intermediate_size, c.vocab_size
    )?;
    writeln!(
        out,
        "heads        {} query, {} key/value, widths {} and {}, {} rotated, scale {}",
        c.num_q_heads, c.num_kv_heads, c.head_dim_qk, c.head_dim_v, c.rotary_dim, c.softmax_scale
    )?;
    writeln!(out, "made of      {}", parts(f))?;
    let context = f.context;
    writeln!(
        out,
        "context      {} tokens native, {} extended; shown for {}",
        context.native_tokens, context.extended_tokens, context.max_model_len
    )?;
    for (i, rope) in f.ropes.iter().enumerate() {
        writeln!(
            out,
            "rope {i}       base {}, {}, cosine x {:.6}, radians a token {:.4e} to {:.4e}",
            rope.theta, rope.scaling, rope.attention_factor, rope.first_frequency, rope.last_frequency
        )?;
    }
    writeln!(out, "keys/values  {} bytes a token in {}", f.kv_bytes_per_token, f.kv_cache_dtype)?;
    for group in &f.layer_groups {
        let window = group.window.map_or("all tokens".to_string(), |w| format!("window {w}"));
        let rope = group.rope.map_or("no positions".to_string(), |r| format!("rope {r}"));
        writeln!(
            out,
            "  {window}, {rope}: {} bytes a token, {} at {} tokens; layers {}",
            group.kv_bytes_per_token,
            mib(group.kv_bytes_at_max_len),
            context.max_model_len,
            ranges(&group.layers)
        )?;
    }
    let t = &f.tokenizer;
    writeln!(
        out,
        "tokenizer    {}, {} ids, begin {:?} ({}), end {:?}",
        t.kind,
        t.vocab_size,
        t.bos_token_id,
        if t.add_bos { "written" } else { "not written" },
        t.eos_token_ids
    )?;
    match &f.chat_template {
        None => writeln!(out, "template     none: chat requests are refused")?,
        Some(source) => writeln!(out, "template     {} characters", source.chars().count())?,
    }
    for t in &f.tensors {
        writeln!(out, "  {:<28} {:<7} [{}, {}] {} bytes", t.name, t.format, t.rows, t.cols, t.bytes)?;
    }
    f.warnings.iter().try_for_each(|w| writeln!(out, "warning      {w}"))
}

/// What tells the layers apart from a Llama's, in words.
fn parts(f: &Inspection) -> String {
    let c = &f.config;
    let mut parts = vec![format!("{} norms", c.norms), c.activation.clone()];
    if c.qk_norm {
        parts.push("norms of q and k".into());
    }
    if c.sinks {
        parts.push("sinks".into());
    }
    if !c.biases.is_empty() {
        parts.push(format!("biases ({})", c.biases.join(", ")));
    }
    if let Some([count, used]) = c.experts {
        parts.push(format!("{count} experts, {used} a token"));
    }
    parts.extend(c.shared_experts_width.map(|n| format!("{n} wide beside them")));
    parts.extend(
        c.latent.map(|[nope, v]| format!("latent keys and values (heads of {nope} + {}, {v})", c.rotary_dim)),
    );
    parts.extend(c.attn_softcap.map(|cap| format!("scores capped at {cap}")));
    parts.extend(c.logit_softcap.map(|cap| format!("logits capped at {cap}")));
    if c.tie_word_embeddings {
        parts.push("tied head".into());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: InspectArgs,
    }

    fn output(model: &str, flags: &str) -> anyhow::Result<String> {
        let model = if model.contains(':') {
            model.to_string()
        } else {
            format!("{}/crates/model/tests/fixtures/families/{model}", env!("CARGO_MANIFEST_DIR"))
        };
        let line = ["inspect", &model].into_iter().chain(flags.split_whitespace());
        render(&Cli::try_parse_from(line)?.args)
    }

    fn json(model: &str, flags: &str) -> serde_json::Value {
        serde_json::from_str(&output(model, &format!("{flags} --json")).unwrap()).unwrap()
    }

    #[test]
    fn groups_of_layers_count_their_own_bytes() {
        let json = json("gemma3-old", "");
        assert_eq!(json["family"], "Gemma 3");
        let groups = json["layer_groups"].as_array().unwrap();
        assert_eq!(groups.len(), 2);
        assert_eq!((&groups[0]["layers"], &groups[0]["window"]), (&serde_json::json!([0, 2]), &8.into()));
        // 4 layers of 2 heads of 16 + 16 elements of 2 bytes.
        assert_eq!(
            (&json["kv_bytes_per_token"], &groups[0]["kv_bytes_per_token"]),
            (&512.into(), &256.into())
        );
        assert_eq!(
            (&groups[0]["kv_bytes_at_max_len"], &groups[1]["kv_bytes_at_max_len"]),
            (&2048.into(), &131_072.into())
        );
        assert_eq!((&json["ropes"][0]["theta"], &json["ropes"][1]["theta"]), (&1e6.into(), &1e4.into()));
    }

    #[test]
    fn positions_are_those_in_force_for_the_longest_sequence() {
        let scaling = |flags: &str| json("phi3", flags)["ropes"][0]["scaling"].as_str().unwrap().to_string();
        assert!(scaling("--max-model-len 64").contains("short"));
        assert!(scaling("").contains("long factors"));
        let context = json("rope-dynamic", "")["context"].clone();
        assert_eq!((&context["native_tokens"], &context["extended_tokens"]), (&64.into(), &384.into()));
        assert!(
            output("rope-dynamic", "--max-model-len 385").unwrap_err().to_string().contains("max_model_len")
        );
    }

    #[test]
    fn text_and_tensors_name_what_is_there() {
        let text = output("gpt-oss.gguf", "--tensors").unwrap();
        for part in [
            "gpt-oss",
            "sinks",
            "4 experts, 2 a token",
            "yarn, factor 8",
            "layer 1 expert 3 down",
            "layers 0",
        ] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        let text = output("builtin:recall", "").unwrap();
        assert!(text.contains("window 8, rope 0") && text.contains("all tokens, no positions"), "{text}");
        assert_eq!(ranges(&[0, 1, 2, 4, 6, 7]), "0-2, 4, 6-7");
    }
}

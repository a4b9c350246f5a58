//! `suanpan generate`: text from one prompt or one chat message, streamed to standard output.

use std::io::{Read, Write};

use anyhow::{Context, bail};
use suanpan_engine::{Request, SamplingParams};
use suanpan_model::Model;

use crate::ask::{self, Progress};
use crate::engine_flags::{self, EngineFlags};

#[derive(clap::Args)]
pub struct GenerateArgs {
    /// The model: a file or folder, builtin:recall (or :chain, :count), or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(long)]
    model: String,
    /// The prompt; `-` reads standard input.
    #[arg(long, short)]
    prompt: String,
    /// Put the prompt into the model's chat template as a user's message.
    #[arg(long)]
    chat: bool,
    /// Output tokens at most.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Nucleus mass, in (0, 1].
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Most probable tokens kept; 0 is off.
    #[arg(long, default_value_t = 0)]
    top_k: i64,
    /// Seed of the draws.
    #[arg(long)]
    seed: Option<u64>,
    /// A text that ends the output; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// Do not end at the model's end token.
    #[arg(long)]
    ignore_eos: bool,
    /// Print JSON at the end: {"text", "finish_reason", "ttft_ms", "tpot_ms", "ledger": {…}}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineFlags,
}

fn prompt_tokens(args: &GenerateArgs, model: &Model) -> anyhow::Result<Vec<u32>> {
    let mut text = args.prompt.clone();
    if text == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text).context("reading the prompt from standard input")?;
    }
    if !args.chat {
        return Ok(model.tokenizer.encode_with_specials(&text, true)?);
    }
    let Some(template) = &model.chat_template else { bail!("--chat: {} has no chat template", args.model) };
    let messages = serde_json::json!([{"role": "user", "content": text}]);
    Ok(template.encode(&model.tokenizer, &messages, true, None, &serde_json::Map::new())?)
}

pub fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let model = engine_flags::load(&args.model)?;
    let prompt = prompt_tokens(args, &model)?;
    let engine =
        engine_flags::start(&model, args.engine.options(&args.model)?, args.engine.lower_tiers(), 1)?;
    let params = SamplingParams {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        max_tokens: Some(args.max_tokens),
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..SamplingParams::default()
    };
    let request = Request { id: "generate".into(), prompt, params, ..Request::default() };
    let bar = engine_flags::prefill_bar();
    let mut out = std::io::stdout();
    let answer = ask::ask(&engine, request, |progress| match progress {
        Progress::Prefill { computed, known } => {
            bar.set_length(known as u64);
            bar.set_position(computed as u64);
        }
        Progress::Text(piece) => {
            bar.finish_and_clear();
            if !args.json {
                // A closed pipe ends the text, not the run: the books are still right.
                let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
            }
        }
    })?;
    let ms = |d: std::time::Duration| d.as_secs_f64() * 1e3;
    if args.json {
        let report = serde_json::json!({
            "text": answer.text, "finish_reason": answer.reason.as_str(), "ttft_ms": ms(answer.ttft),
            "tpot_ms": answer.tpot().map(ms), "ledger": answer.books,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        let b = &answer.books;
        println!();
        eprintln!(
            "[{}] {} prompt + {} output tokens, TTFT {:.0} ms, TPOT {:.1} ms, books {}",
            answer.reason.as_str(),
            b.prompt_tokens,
            b.output_tokens,
            ms(answer.ttft),
            answer.tpot().map_or(f64::NAN, ms),
            if b.agree() { "agree" } else { "DISAGREE" },
        );
    }
    Ok(())
}

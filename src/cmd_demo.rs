//! `suanpan demo`: a haystack of exact facts, questions about it, the answers judged, the latencies, and the books.
//!
//! The model is `builtin:recall`, which cannot forget: a wrong answer is a fault of kernel, mask, page, position or scheduler.

use std::time::Duration;

use anyhow::ensure;
use suanpan_engine::{EngineHandle, Request, SamplingParams};
use suanpan_ledger::AttnBooks;
use suanpan_model::recall::{self, Haystack};

use crate::ask::{self, Answer, Progress};
use crate::engine_flags::{self, EngineFlags};

const MODEL: &str = "builtin:recall";

#[derive(clap::Args)]
pub struct DemoArgs {
    /// Tokens (bytes) of the haystack.
    #[arg(long, default_value_t = 65_536)]
    context: usize,
    /// Facts hidden at evenly spread depths; each is asked for.
    #[arg(long, default_value_t = 12)]
    facts: usize,
    /// Seed of the text.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON: {"context_tokens", "asked", "right", "books_agree", "ttft_ms" (cold, first question), "ttft_warm_ms" (median of
    /// the others), "tpot_ms" (median), "ledger": {"predicted", "counted"}, "answers": […]}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineFlags,
}

/// One question and what became of it.
struct Judged {
    question: usize,
    right: bool,
    answer: Answer,
}

/// Sums of both columns over all questions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
struct Column {
    tokens: usize,
    pages: usize,
    #[serde(flatten)]
    attention: AttnBooks,
}

fn median(mut values: Vec<Duration>) -> Option<Duration> {
    values.sort();
    values.get(values.len() / 2).copied()
}

fn question(engine: &EngineHandle, hay: &Haystack, i: usize, show_bar: bool) -> anyhow::Result<Judged> {
    let mut prompt = hay.tokens();
    prompt.extend(hay.question(i).bytes().map(u32::from));
    // Room for one token more than the answer and its newline: running on is a wrong answer, not a long one.
    let max_tokens = hay.answer(i).len() + 2;
    let params =
        SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ..SamplingParams::default() };
    let request = Request { id: format!("question-{i}"), prompt, params, ..Request::default() };
    let bar = show_bar.then(engine_flags::prefill_bar);
    let answer = ask::ask(engine, request, |progress| {
        if let (Some(bar), Progress::Prefill { computed, known }) = (&bar, progress) {
            bar.set_length(known as u64);
            bar.set_position(computed as u64);
        }
    })?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let right = answer.text.trim_end_matches('\n') == hay.answer(i);
    Ok(Judged { question: i, right, answer })
}

fn columns(judged: &[Judged]) -> (Column, Column) {
    let (mut predicted, mut counted) = (Column::default(), Column::default());
    for j in judged {
        let b = &j.answer.books;
        predicted.tokens += b.computed_tokens_predicted;
        predicted.pages += b.pages_predicted;
        predicted.attention += b.predicted;
        counted.tokens += b.computed_tokens;
        counted.pages += b.pages_peak;
        counted.attention += b.counted;
    }
    (predicted, counted)
}

fn print_books(predicted: &Column, counted: &Column) {
    println!("\n{:<28}{:>24}{:>24}", "books", "predicted", "counted");
    let rows: [(&str, u64, u64); 6] = [
        ("tokens computed", predicted.tokens as u64, counted.tokens as u64),
        ("pages at peak, summed", predicted.pages as u64, counted.pages as u64),
        ("visible pairs x heads", predicted.attention.pairs, counted.attention.pairs),
        ("attention FLOPs", predicted.attention.flops, counted.attention.flops),
        ("K/V bytes read", predicted.attention.kv_read_bytes, counted.attention.kv_read_bytes),
        ("K/V bytes written", predicted.attention.kv_write_bytes, counted.attention.kv_write_bytes),
    ];
    for (name, p, c) in rows {
        println!("{name:<28}{p:>24}{c:>24}  {}", if p == c { "agree" } else { "DISAGREE" });
    }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

fn print_answer(hay: &Haystack, j: &Judged) {
    let fact = &hay.facts[j.question];
    println!(
        "{:>5.1} %  {}: {:<14} {}  TTFT {:>8.1} ms, {} of {} prompt tokens cached",
        100.0 * fact.depth as f64 / hay.text.len() as f64,
        fact.key,
        j.answer.text.trim(),
        if j.right { "right" } else { "WRONG" },
        ms(j.answer.ttft),
        j.answer.books.cached_tokens,
        j.answer.books.prompt_tokens,
    );
}

pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    ensure!(args.facts >= 1, "--facts 0: supported: at least 1");
    let model = engine_flags::load(MODEL)?;
    let hay = recall::haystack(args.seed, args.context, args.facts)?;
    let mut options = args.engine.options(MODEL)?;
    // A question, its answer and the newline come on top of the haystack.
    let longest = (0..args.facts).map(|i| hay.question(i).len() + hay.answer(i).len() + 2).max().unwrap_or(0);
    let wanted = (hay.text.len() + longest).max(model.config.max_position_embeddings.min(131_072));
    options.max_model_len = options.max_model_len.or(Some(wanted));
    let engine = engine_flags::start(&model, options, args.engine.lower_tiers(), args.facts)?;
    if !args.json {
        println!(
            "{MODEL}: {} tokens of context, {} facts\n{}\n",
            hay.text.len(),
            args.facts,
            engine.report()
        );
    }
    let mut judged = Vec::with_capacity(args.facts);
    for i in 0..args.facts {
        let j = question(&engine, &hay, i, i == 0 && !args.json)?;
        if !args.json {
            print_answer(&hay, &j);
        }
        judged.push(j);
    }
    report(args, &hay, &judged)
}

fn report(args: &DemoArgs, hay: &Haystack, judged: &[Judged]) -> anyhow::Result<()> {
    let right = judged.iter().filter(|j| j.right).count();
    let agree = judged.iter().all(|j| j.answer.books.agree());
    let (predicted, counted) = columns(judged);
    let cold = judged.first().map(|j| ms(j.answer.ttft));
    let warm = median(judged.iter().skip(1).map(|j| j.answer.ttft).collect()).map(ms);
    let tpot = median(judged.iter().filter_map(|j| j.answer.tpot()).collect()).map(ms);
    if args.json {
        let answers: Vec<_> = judged
            .iter()
            .map(|j| {
                let fact = &hay.facts[j.question];
                serde_json::json!({
                    "key": fact.key, "expected": fact.value, "got": j.answer.text.trim(), "right": j.right, "depth_tokens": fact.depth,
                    "ttft_ms": ms(j.answer.ttft), "tpot_ms": j.answer.tpot().map(ms), "cached_tokens": j.answer.books.cached_tokens,
                })
            })
            .collect();
        let report = serde_json::json!({
            "context_tokens": hay.text.len(), "asked": judged.len(), "right": right, "books_agree": agree,
            "ttft_ms": cold, "ttft_warm_ms": warm, "tpot_ms": tpot,
            "ledger": {"predicted": predicted, "counted": counted}, "answers": answers,
        });
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        let show = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.1} ms"));
        println!(
            "\n{right} of {} right; TTFT {} cold, {} warm; TPOT {}",
            judged.len(),
            show(cold),
            show(warm),
            show(tpot)
        );
        print_books(&predicted, &counted);
    }
    ensure!(
        right == judged.len(),
        "{} of {} answers are wrong: the stack has a fault",
        judged.len() - right,
        judged.len()
    );
    ensure!(agree, "the books do not agree: the stack has a fault");
    Ok(())
}

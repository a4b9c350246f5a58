//! The `suanpan` command line: a façade over the crates. Every command takes `--json` with documented keys (docs/cli.md).

mod ask;
mod attn_bench;
#[cfg(feature = "cuda")]
mod attn_cuda;
mod cmd_bench;
mod cmd_demo;
mod cmd_doctor;
mod cmd_eval;
mod cmd_eval_report;
mod cmd_eval_run;
mod cmd_export;
mod cmd_generate;
mod cmd_inspect;
mod cmd_ledger;
mod cmd_ledger_parallel;
mod cmd_perplexity;
mod cmd_serve;
mod engine_flags;
mod eval_engine;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exact attention for long context, with books that balance.
#[derive(Parser)]
#[command(name = "suanpan", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hide facts in a long text, ask for each, check every answer and the books. Needs no model file.
    Demo(cmd_demo::DemoArgs),
    /// Text from a model, once.
    Generate(cmd_generate::GenerateArgs),
    /// Serve a model over OpenAI's HTTP API.
    Serve(cmd_serve::ServeArgs),
    /// What a model's files say: config, positions, bytes a token, tensors, tokenizer, template.
    Inspect(cmd_inspect::InspectArgs),
    /// A built-in model as a folder that transformers and other servers load.
    Export(cmd_export::ExportArgs),
    /// What attention or a KV cache should compute, move and hold.
    Ledger(cmd_ledger::LedgerArgs),
    /// Measure kernels or a whole model, with the answer checked first.
    Bench(cmd_bench::BenchArgs),
    /// What a choice loses in quality, beside what it gains.
    Eval(cmd_eval::EvalArgs),
    /// Each feature of this binary on this machine: active or not, and why.
    Doctor(cmd_doctor::DoctorArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => cmd_demo::run(&args),
        Command::Generate(args) => cmd_generate::run(&args),
        Command::Serve(args) => cmd_serve::run(args),
        Command::Inspect(args) => cmd_inspect::run(&args),
        Command::Export(args) => cmd_export::run(&args),
        Command::Ledger(args) => cmd_ledger::run(&args),
        Command::Bench(args) => cmd_bench::run(&args),
        Command::Eval(args) => cmd_eval::run(&args),
        Command::Doctor(args) => cmd_doctor::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("suanpan: {e:#}");
            ExitCode::FAILURE
        }
    }
}

//! `suanpan eval run`: a plan, the read-proof, the run with its log. The same for an engine in this process and for any endpoint.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use suanpan_eval::conditions::{Conditions, Sources, client_host};
use suanpan_eval::corpus::{Files, Prose};
use suanpan_eval::count::{Bytes, Counter, Pieces};
use suanpan_eval::endpoint::{Ask, Clock, Endpoint, HttpEndpoint, HttpOptions, Known, Limits, Protocol};
use suanpan_eval::item::{Prompt, Role, Turn, View};
use suanpan_eval::load::{Arrivals, Load};
use suanpan_eval::run::log::{FORMAT, Header, Log};
use suanpan_eval::run::proof::{Probe, Proof};
use suanpan_eval::run::spec::{CacheState, Plan, Spec, plan};
use suanpan_eval::run::{Ended, Progress, Runner};
use suanpan_eval::stats::cost::Prices;
use suanpan_eval::stats::serving::Goals;
use suanpan_eval::task::{Haystack, Kit, Task};
use suanpan_eval::tasks;

use crate::engine_flags::{self, EngineFlags};
use crate::eval_engine::{self, EngineEndpoint, ModelCounter};

/// By what share the endpoint's count may lie under that of its own tokenizer, and of a calibrated one.
const TOLERANCE: (f64, f64) = (0.02, 0.3);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ProtocolArg {
    Chat,
    Completion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ViewArg {
    ClosedBook,
    Focused,
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum CacheArg {
    Cold,
    Warm,
    Mixed,
}

#[derive(clap::Args)]
pub struct RunArgs {
    /// A model to run in this process: a file or folder, a builtin, or `hf:owner/name[@revision][:file.gguf]`.
    #[arg(long, required_unless_present = "endpoint", conflicts_with = "endpoint")]
    model: Option<String>,
    /// An OpenAI-compatible endpoint: http(s)://host:port/path. Its key is read from SUANPAN_API_KEY or OPENAI_API_KEY.
    #[arg(long, requires = "served_model_name", conflicts_with = "EngineFlags")]
    endpoint: Option<String>,
    /// Name of the model there.
    #[arg(long, requires = "endpoint")]
    served_model_name: Option<String>,
    /// Model whose tokenizer counts prompts for the endpoint [default: bytes, calibrated by two requests].
    #[arg(long, requires = "endpoint")]
    tokenizer: Option<String>,
    /// Further roots for TLS (PEM).
    #[arg(long, requires = "endpoint")]
    ca_file: Option<PathBuf>,
    /// Ask for whole answers instead of streams.
    #[arg(long, requires = "endpoint")]
    no_stream: bool,
    /// Field that limits the answer in chat.
    #[arg(long, requires = "endpoint", default_value = "max_tokens")]
    max_tokens_field: String,
    /// A JSON object whose fields are added to every request.
    #[arg(long, requires = "endpoint")]
    extra_body: Option<String>,
    /// How prompts are spoken [default: chat, or completion for a model without a chat template].
    #[arg(long, value_enum)]
    protocol: Option<ProtocolArg>,
    /// Tasks with their options (`suanpan eval tasks` lists them), or `all`.
    #[arg(long, value_delimiter = ',', default_value = "all")]
    tasks: Vec<String>,
    /// Lengths in tokens, prompt and answer together.
    #[arg(long, value_delimiter = ',', required = true)]
    lengths: Vec<usize>,
    /// Items of each task and length.
    #[arg(long, default_value_t = 20)]
    samples: u32,
    /// How much of the context is shown; three views say what is knowledge, skill and length.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "full")]
    views: Vec<ViewArg>,
    /// Seed of the pack.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Text file to hide facts in [default: the shipped prose].
    #[arg(long)]
    haystack: Option<PathBuf>,
    /// Tokens of each length that are left to the chat template and the salt.
    #[arg(long, default_value_t = 64)]
    reserve_tokens: usize,
    /// Answer tokens instead of each task's own.
    #[arg(long)]
    answer_tokens: Option<usize>,
    /// A text that ends an answer; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// Go on past the model's end token (load tests).
    #[arg(long)]
    ignore_eos: bool,
    /// Users that each wait for their answer.
    #[arg(long, default_value_t = 1, conflicts_with = "rate")]
    concurrency: usize,
    /// Requests a second of an open load: sent when the schedule says so, whatever the endpoint does.
    #[arg(long)]
    rate: Option<f64>,
    /// Arrivals of the open load: poisson, constant, gamma:SHAPE.
    #[arg(long, default_value = "poisson", requires = "rate")]
    arrivals: String,
    /// Requests in flight at most under the open load; the wait for a place is measured.
    #[arg(long, default_value_t = 256, requires = "rate")]
    max_in_flight: usize,
    /// What is claimed of caches: cold salts every prompt; the measured share is held against it.
    #[arg(long, value_enum, default_value = "cold")]
    cache: CacheArg,
    /// Tries after a failed request (closed load).
    #[arg(long, default_value_t = 2)]
    retries: u32,
    /// Seconds a request may take in all.
    #[arg(long, default_value_t = 600)]
    request_timeout: u64,
    /// Do not prove that the endpoint reads whole prompts; the report says so.
    #[arg(long)]
    no_read_proof: bool,
    #[command(flatten)]
    numbers: NumberArgs,
    /// A condition the endpoint does not tell: NAME=VALUE (names: docs/evidence-run.md).
    #[arg(long)]
    condition: Vec<String>,
    /// A condition nobody knows: NAME=REASON.
    #[arg(long)]
    unknown_condition: Vec<String>,
    /// Why all other missing conditions are unknown.
    #[arg(long)]
    unknown_conditions: Option<String>,
    /// Folder of the run. The same command goes on where it stopped.
    #[arg(long)]
    out: PathBuf,
    /// Print the plan and stop.
    #[arg(long)]
    plan: bool,
    /// Print JSON at the end: {"plan", "proof", "asked", "failed", "stopped", "valid", "invalid"}.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineFlags,
}

/// Limits of goodput, and prices.
#[derive(clap::Args)]
struct NumberArgs {
    /// Goodput: time to first token at most, from the schedule under an open load.
    #[arg(long)]
    goal_ttft_ms: Option<f64>,
    /// Goodput: time per output token at most.
    #[arg(long)]
    goal_tpot_ms: Option<f64>,
    /// Goodput: end to end at most.
    #[arg(long)]
    goal_e2el_ms: Option<f64>,
    /// Price of one device for an hour.
    #[arg(long)]
    price_per_hour: Option<f64>,
    /// Devices that are paid for.
    #[arg(long, requires = "price_per_hour")]
    price_devices: Option<f64>,
    /// Price of a million prompt tokens.
    #[arg(long)]
    price_input: Option<f64>,
    /// Price of a million cached prompt tokens.
    #[arg(long, requires = "price_input")]
    price_cached: Option<f64>,
    /// Price of a million answer tokens.
    #[arg(long)]
    price_output: Option<f64>,
}

/// Who answers, what counts for it, and what it says of itself.
struct Party {
    endpoint: Box<dyn Endpoint>,
    counter: Box<dyn Counter>,
    tolerance: Option<f64>,
    protocol: Protocol,
    known: Known,
    model: String,
}

fn tokens_counter(model: Arc<suanpan_model::Model>, name: &str) -> Box<dyn Counter> {
    Box::new(Pieces::new(ModelCounter { model, name: name.to_owned() }))
}

fn in_process(args: &RunArgs, spec: &str) -> anyhow::Result<Party> {
    let model = engine_flags::load(spec)?;
    let options = args.engine.options(spec)?;
    let requests = args.concurrency.max(args.max_in_flight).max(1);
    let engine = engine_flags::start(&model, options, args.engine.lower_tiers(), requests)?;
    let conditions = eval_engine::conditions(spec, &model, &engine, &options);
    let protocol = match args.protocol {
        Some(ProtocolArg::Chat) => Protocol::Chat,
        Some(ProtocolArg::Completion) => Protocol::Completion,
        None if model.chat_template.is_some() => Protocol::Chat,
        None => Protocol::Completion,
    };
    let name = model.config.name.clone();
    let endpoint = EngineEndpoint { engine, model: Arc::clone(&model), name: name.clone(), conditions };
    let known = endpoint.known()?;
    Ok(Party {
        endpoint: Box::new(endpoint),
        counter: tokens_counter(model, &name),
        tolerance: Some(TOLERANCE.0),
        protocol,
        known,
        model: name,
    })
}

fn api_key() -> anyhow::Result<Option<String>> {
    for name in ["SUANPAN_API_KEY", "OPENAI_API_KEY"] {
        match std::env::var(name) {
            Ok(key) if !key.is_empty() => return Ok(Some(key)),
            Ok(_) | Err(std::env::VarError::NotPresent) => {}
            Err(e) => bail!("{name}: {e}"),
        }
    }
    Ok(None)
}

fn over_http(args: &RunArgs, url: &str) -> anyhow::Result<Party> {
    let model = args.served_model_name.clone().unwrap_or_default();
    let extra_body = match &args.extra_body {
        None => Map::new(),
        Some(text) => serde_json::from_str(text).context("--extra-body: supported: a JSON object")?,
    };
    let options = HttpOptions {
        api_key: api_key()?,
        ca_file: args.ca_file.clone(),
        stream: !args.no_stream,
        limit_field: args.max_tokens_field.clone(),
        extra_body,
        ..HttpOptions::new(url, &model)
    };
    let endpoint = HttpEndpoint::new(options)?;
    let known = endpoint.known().with_context(|| format!("--endpoint {url}"))?;
    let protocol = match args.protocol {
        Some(ProtocolArg::Completion) => Protocol::Completion,
        _ => Protocol::Chat,
    };
    let (counter, tolerance) = match &args.tokenizer {
        Some(spec) => (tokens_counter(engine_flags::load(spec)?, spec), Some(TOLERANCE.0)),
        None => calibrated(&endpoint, protocol, limits(args))?,
    };
    Ok(Party { endpoint: Box::new(endpoint), counter, tolerance, protocol, known, model })
}

/// Bytes a token, as two requests of one text and of four of it showed.
struct Calibrated(f64);

impl Counter for Calibrated {
    fn count(&self, text: &str) -> usize {
        (text.len() as f64 / self.0).ceil() as usize
    }

    fn whole(&self, text: &str, _by_pieces: usize) -> usize {
        self.count(text)
    }

    fn name(&self) -> String {
        format!("bytes / {:.2} (calibrated)", self.0)
    }
}

fn calibrated(
    endpoint: &HttpEndpoint,
    protocol: Protocol,
    limits: Limits,
) -> anyhow::Result<(Box<dyn Counter>, Option<f64>)> {
    let prose = Prose::shipped();
    let text = |n: u64| (0..n).map(|i| prose.sentence(i)).collect::<Vec<_>>().join(" ");
    let mut seen = Vec::new();
    for n in [2, 10] {
        let text = text(n);
        let prompt = Prompt { turns: vec![Turn::text(Role::User, &text)], ..Prompt::default() };
        let ask = Ask {
            prompt: &prompt,
            protocol,
            max_tokens: 1,
            stop: &[],
            ignore_eos: false,
            logprobs: false,
            limits,
        };
        let exchange = endpoint.ask(&ask, &Clock::default());
        if let Some(fault) = exchange.fault {
            bail!("the endpoint does not answer a short question: {fault}");
        }
        seen.push((text.len() as f64, exchange.usage.prompt_tokens.map(|t| t as f64)));
    }
    match seen[..] {
        [(a, Some(ta)), (b, Some(tb))] if tb > ta => {
            // A counter that guesses high keeps prompts inside their length.
            Ok((Box::new(Calibrated(((b - a) / (tb - ta) * 0.95).max(1.0))), Some(TOLERANCE.1)))
        }
        _ => Ok((Box::new(Bytes), None)),
    }
}

fn limits(args: &RunArgs) -> Limits {
    let total = Duration::from_secs(args.request_timeout.clamp(1, 86_400));
    Limits { total, idle: total, ..Limits::default() }
}

fn load(args: &RunArgs) -> anyhow::Result<Load> {
    Ok(match args.rate {
        None => Load::Closed { concurrency: args.concurrency },
        Some(rate) => Load::Open {
            rate,
            arrivals: Arrivals::parse(&args.arrivals)?,
            most_in_flight: args.max_in_flight,
        },
    })
}

fn spec(args: &RunArgs, party: &Party, haystack: &dyn Haystack) -> anyhow::Result<Spec> {
    let tasks = match args.tasks.as_slice() {
        [all] if all == "all" => tasks::all().iter().map(|t| t.name().to_owned()).collect(),
        named => named.to_vec(),
    };
    let views = args.views.iter().map(|v| match v {
        ViewArg::ClosedBook => View::ClosedBook,
        ViewArg::Focused => View::Focused,
        ViewArg::Full => View::Full,
    });
    let n = &args.numbers;
    Ok(Spec {
        tasks,
        lengths: args.lengths.clone(),
        samples: args.samples,
        views: views.collect(),
        seed: args.seed,
        protocol: party.protocol,
        reserve_tokens: args.reserve_tokens,
        answer_tokens: args.answer_tokens,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        load: load(args)?,
        cache: match args.cache {
            CacheArg::Cold => CacheState::Cold,
            CacheArg::Warm => CacheState::Warm,
            CacheArg::Mixed => CacheState::Mixed,
        },
        retries: args.retries,
        read_proof: !args.no_read_proof,
        haystack: haystack.identity(),
        counter: party.counter.name(),
        generator: tasks::build::GENERATOR,
        goals: Goals { ttft_ms: n.goal_ttft_ms, tpot_ms: n.goal_tpot_ms, e2el_ms: n.goal_e2el_ms },
        prices: Prices {
            per_hour: n.price_per_hour,
            devices: n.price_devices,
            input_per_million: n.price_input,
            cached_per_million: n.price_cached,
            output_per_million: n.price_output,
        },
    })
}

fn conditions(args: &RunArgs, party: &Party, spec: &Spec) -> anyhow::Result<Conditions> {
    let load = match spec.load {
        Load::Closed { concurrency } => format!("closed, {concurrency} at once"),
        Load::Open { rate, arrivals, most_in_flight } => {
            format!("open, {rate} requests/s, {arrivals:?}, at most {most_in_flight} in flight")
        }
    };
    let host = match &args.endpoint {
        None => format!("{}; the model runs in the same process", client_host()),
        Some(_) => client_host(),
    };
    let answer = spec.answer_tokens.map_or("each task's answer".into(), |n| format!("{n} answer tokens"));
    let run = json!({
        "phase": "mixed: prefill and decode",
        "lengths": format!("{:?} tokens, of these at most {answer}", spec.lengths),
        "load": load,
        "cache_state": spec.cache.name(),
        "sampling": if spec.ignore_eos { "greedy, past end tokens" } else { "greedy" },
        "client_host": host,
        "protocol": spec.protocol.name(),
        "token_counter": spec.counter,
        "model": party.model,
        "max_context": party.known.max_model_len,
    });
    let Value::Object(run) = run else { bail!("conditions of the run are no object") };
    Ok(Conditions::gather(&Sources {
        endpoint: party.known.conditions.clone(),
        run,
        flags: args.condition.clone(),
        unknown: args.unknown_condition.clone(),
        rest_unknown: args.unknown_conditions.clone(),
    })?)
}

fn show_plan(plan: &Plan, spec: &Spec) {
    eprintln!(
        "{} items of {} tasks; {} prompt and up to {} answer tokens, {} more for the read-proof",
        plan.items,
        spec.tasks.len(),
        plan.prompt_tokens,
        plan.answer_tokens,
        plan.proof_tokens
    );
    if let Some(cost) = plan.token_cost {
        eprintln!("at most {cost:.4} for the tokens");
    }
    for (length, difference) in &plan.detectable {
        eprintln!("at {length} tokens, differences above {:.1} points will show", difference * 100.0);
    }
}

fn bar(len: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(len);
    let style = format!("{what} {{wide_bar}} {{pos}}/{{len}}, {{elapsed}} gone, {{eta}} left {{msg}}");
    bar.set_style(ProgressStyle::with_template(&style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

fn prove(args: &RunArgs, party: &Party, kit: &Kit<'_>, spec: &Spec, salt: u64) -> Proof {
    let probe = Probe {
        endpoint: party.endpoint.as_ref(),
        kit,
        protocol: spec.protocol,
        length_tokens: spec.built_tokens(spec.lengths.iter().max().copied().unwrap_or(0)),
        tolerance: party.tolerance,
        salt,
        limits: limits(args),
    };
    let progress = bar(5, "read-proof");
    let proof = probe.run(&Clock::default(), |n| progress.set_position(n as u64));
    progress.finish_and_clear();
    proof
}

fn unix_nanos() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos())
}

fn header(spec: &Spec, conditions: Conditions) -> Header {
    let now = unix_nanos();
    // Whoever ran the same pack before must not have warmed a server's cache for this run.
    let salt = (now as u64) ^ (u64::from(std::process::id()) << 40);
    let hide = |a: String| if a.contains(' ') { format!("'{a}'") } else { a };
    Header {
        format: FORMAT,
        spec: spec.clone(),
        pack: spec.pack(),
        conditions,
        salt,
        sessions: vec![(now / 1_000_000_000) as u64],
        proof: None,
        reproduce: format!("suanpan {}", std::env::args().skip(1).map(hide).collect::<Vec<_>>().join(" ")),
    }
}

pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let named = match args.tasks.as_slice() {
        [all] if all == "all" => tasks::all().to_vec(),
        names => names.iter().map(|n| tasks::by_name(n)).collect::<Result<Vec<&'static dyn Task>, _>>()?,
    };
    let files = args.haystack.as_deref().map(Files::open).transpose()?;
    let haystack: &dyn Haystack = files.as_ref().map_or(Prose::shipped() as &dyn Haystack, |f| f);
    let party = match (&args.model, &args.endpoint) {
        (Some(model), _) => in_process(args, model)?,
        (None, Some(url)) => over_http(args, url)?,
        (None, None) => bail!("neither --model nor --endpoint was given"),
    };
    let spec = spec(args, &party, haystack)?;
    let kit = Kit { seed: spec.seed, counter: party.counter.as_ref(), haystack };
    let plan = plan(&spec, &named, &kit, party.known.max_model_len)?;
    show_plan(&plan, &spec);
    let conditions = conditions(args, &party, &spec)?;
    if args.plan {
        if args.json {
            println!("{}", serde_json::to_string_pretty(&json!({"plan": plan, "pack": spec.pack()}))?);
        }
        return Ok(());
    }
    let (log, done) = Log::open(&args.out, header(&spec, conditions))?;
    let salt = log.header().salt;
    let proof = match log.header().proof {
        Some(proof) if proof.invalid.is_none() => Some(proof),
        _ if spec.read_proof => {
            let proof = prove(args, &party, &kit, &spec, salt);
            log.set_proof(proof.clone())?;
            Some(proof)
        }
        _ => None,
    };
    if let Some(proof) = &proof {
        eprintln!("read-proof: {}", proof.verdict);
        if let (Some(seconds), None) = (proof.seconds_per_prompt_token, &proof.invalid) {
            let left = plan.prompt_tokens as f64 * seconds / args.concurrency.max(1) as f64;
            eprintln!("about {:.0} s for the prompts at this pace", left);
        }
    }
    let invalid = proof.as_ref().and_then(|p| p.invalid.clone());
    let ended = if invalid.is_none() {
        let runner = Runner {
            spec: &spec,
            tasks: &named,
            kit: &kit,
            endpoint: party.endpoint.as_ref(),
            limits: limits(args),
            tolerance: party.tolerance,
        };
        let progress = bar(plan.items as u64, "items");
        progress.set_position(done.len() as u64);
        let ended = runner.run(&log, &done, &|p: Progress| {
            progress.set_position(p.done as u64);
            if p.failed > 0 {
                progress.set_message(format!("({} failed)", p.failed));
            }
        })?;
        progress.finish_and_clear();
        ended
    } else {
        Ended::default()
    };
    finish(args, &plan, proof.as_ref(), &ended)
}

fn finish(args: &RunArgs, plan: &Plan, proof: Option<&Proof>, ended: &Ended) -> anyhow::Result<()> {
    let report = suanpan_eval::report::build(&args.out)?;
    if args.json {
        let line = json!({
            "plan": plan, "proof": proof, "asked": ended.asked, "failed": ended.failed, "stopped": ended.stopped,
            "valid": report.valid, "invalid": report.invalid,
        });
        println!("{}", serde_json::to_string_pretty(&line)?);
    } else {
        for l in &report.lengths {
            println!(
                "{:>8} tokens {:<12} strict {:>5.1} [{:.1}, {:.1}]  upstream {:>5.1}  n {}",
                l.length_tokens,
                format!("{:?}", l.view),
                l.strict.value * 100.0,
                l.strict.low * 100.0,
                l.strict.high * 100.0,
                l.compatible.value * 100.0,
                l.n
            );
        }
        report.verdict.iter().chain(&report.warnings).for_each(|line| println!("{line}"));
    }
    ensure!(report.valid, "the run is invalid: {}", report.invalid.join("; "));
    Ok(())
}

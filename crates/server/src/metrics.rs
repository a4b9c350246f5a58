//! Prometheus text under vLLM's names, so that existing boards work, and `suanpan:*` for the books.
//!
//! The recorder belongs to one server: nothing global is installed. Times come from the caller's monotonic clock.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use suanpan_engine::EngineStats;

/// Seconds for latencies of whole requests and of their phases.
const LATENCY_BUCKETS_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// Seconds between two tokens; finer than vLLM's below 10 ms.
const GAP_BUCKETS_S: [f64; 18] =
    [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0];
const TOKEN_HISTOGRAMS: [&str; 4] = [
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
];
const LATENCY_HISTOGRAMS: [&str; 6] = [
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
];
const GAPS: &str = "vllm:inter_token_latency_seconds";
const CHOICES: &str = "vllm:request_params_n";
/// Every way in which a choice can end, as the label `finished_reason`.
pub const FINISHED_REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// What one finished choice adds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// One of [`FINISHED_REASONS`].
    pub reason: &'static str,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Generated tokens allowed.
    pub max_tokens: u64,
    /// Arrival to first scheduling.
    pub queue: Duration,
    /// First scheduling to first token; None if there was none.
    pub prefill: Option<Duration>,
    /// First to last token.
    pub decode: Duration,
    /// Arrival to end.
    pub total: Duration,
    /// Attention FLOPs, counted and predicted.
    pub attention_flops: [u64; 2],
    /// K/V bytes read, counted and predicted.
    pub kv_read_bytes: [u64; 2],
    /// K/V bytes written, counted and predicted.
    pub kv_write_bytes: [u64; 2],
    /// Whether every pair above is equal; None if the request did not run to its end.
    pub books_agree: Option<bool>,
}

/// What happens to pages of the tier, as labels.
const TIER_EVENTS: [&str; 4] = ["written", "loaded", "not_stored", "faulty"];

/// The instruments of one server.
pub struct Metrics {
    handle: PrometheusHandle,
    running: Gauge,
    waiting: Gauge,
    usage: Gauge,
    pages: [Gauge; 3],
    tier_pages: [Counter; 4],
    tier_bytes: [Gauge; 2],
    prefix_queries: Counter,
    prefix_hits: Counter,
    preemptions: Counter,
    steps: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    finished: [Counter; FINISHED_REASONS.len()],
    latencies: [Histogram; LATENCY_HISTOGRAMS.len()],
    tokens: [Histogram; TOKEN_HISTOGRAMS.len()],
    gaps: Histogram,
    choices: Histogram,
    flops: [Counter; 2],
    read_bytes: [Counter; 2],
    write_bytes: [Counter; 2],
    disagreements: Counter,
    step_us: [Counter; 2],
    lost_tokens: Counter,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    /// Instruments labelled `model_name`; token histograms reach to `max_model_len`.
    pub fn new(model_name: &str, max_model_len: usize, cache: &[(&'static str, String)]) -> Metrics {
        let recorder = builder(model_name, max_model_len).build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            let info: Vec<metrics::Label> =
                cache.iter().map(|(k, v)| metrics::Label::new(*k, v.clone())).collect();
            metrics::gauge!("vllm:cache_config_info", info).set(1.0);
            Self::register(handle)
        })
    }

    fn register(handle: PrometheusHandle) -> Metrics {
        let kinds = ["counted", "predicted"];
        let pair = |name: &'static str| kinds.map(|kind| metrics::counter!(name, "kind" => kind));
        Metrics {
            handle,
            running: metrics::gauge!("vllm:num_requests_running"),
            waiting: metrics::gauge!("vllm:num_requests_waiting"),
            usage: metrics::gauge!("vllm:kv_cache_usage_perc"),
            pages: ["free", "cached", "active"].map(|s| metrics::gauge!("suanpan:kv_pages", "state" => s)),
            tier_pages: TIER_EVENTS.map(|e| metrics::counter!("suanpan:tier_pages_total", "event" => e)),
            tier_bytes: ["stored", "staged"].map(|s| metrics::gauge!("suanpan:tier_bytes", "state" => s)),
            prefix_queries: metrics::counter!("vllm:prefix_cache_queries_total"),
            prefix_hits: metrics::counter!("vllm:prefix_cache_hits_total"),
            preemptions: metrics::counter!("vllm:num_preemptions_total"),
            steps: metrics::counter!("suanpan:steps_total"),
            prompt_tokens: metrics::counter!("vllm:prompt_tokens_total"),
            generation_tokens: metrics::counter!("vllm:generation_tokens_total"),
            finished: FINISHED_REASONS
                .map(|r| metrics::counter!("vllm:request_success_total", "finished_reason" => r)),
            latencies: LATENCY_HISTOGRAMS.map(|name| metrics::histogram!(name)),
            tokens: TOKEN_HISTOGRAMS.map(|name| metrics::histogram!(name)),
            gaps: metrics::histogram!(GAPS),
            choices: metrics::histogram!(CHOICES),
            flops: pair("suanpan:attention_flops_total"),
            read_bytes: pair("suanpan:kv_read_bytes_total"),
            write_bytes: pair("suanpan:kv_write_bytes_total"),
            disagreements: metrics::counter!("suanpan:books_disagree_total"),
            step_us: ["layers", "rest"]
                .map(|part| metrics::counter!("suanpan:step_us_total", "part" => part)),
            lost_tokens: metrics::counter!("suanpan:preemption_lost_tokens_total"),
        }
    }

    /// A request asks for `n` choices per prompt.
    pub fn asked(&self, n: usize) {
        self.choices.record(n as f64);
    }

    /// The first token of a choice, `since` its arrival.
    pub fn first_token(&self, since: Duration) {
        self.latencies[0].record(since);
    }

    /// A later token, `gap` after the one before it.
    pub fn next_token(&self, gap: Duration) {
        self.gaps.record(gap);
    }

    /// A choice has ended, whatever the reason.
    pub fn done(&self, done: &Done) {
        if let Some(i) = FINISHED_REASONS.iter().position(|r| *r == done.reason) {
            self.finished[i].increment(1);
        }
        self.prompt_tokens.increment(done.prompt_tokens);
        let prefill = done.prefill.unwrap_or_default();
        let phases = [done.total, done.queue, prefill, done.decode, prefill + done.decode];
        for (histogram, value) in self.latencies[1..].iter().zip(phases) {
            histogram.record(value);
        }
        let tokens = [done.prompt_tokens, done.output_tokens, done.output_tokens, done.max_tokens];
        for (histogram, value) in self.tokens.iter().zip(tokens) {
            histogram.record(value as f64);
        }
        for (counters, values) in [
            (&self.flops, done.attention_flops),
            (&self.read_bytes, done.kv_read_bytes),
            (&self.write_bytes, done.kv_write_bytes),
        ] {
            counters[0].increment(values[0]);
            counters[1].increment(values[1]);
        }
        // Samples pile up until they are folded into buckets; nobody may ever scrape.
        self.handle.run_upkeep();
    }

    /// The whole page, with the engine's state of this moment.
    pub fn render(&self, now: &EngineStats) -> String {
        self.running.set(now.running as f64);
        self.waiting.set(now.waiting as f64);
        // As vLLM counts it: pages that only the prefix cache holds are free to take.
        self.usage.set(now.kv_usage);
        for (gauge, value) in self.pages.iter().zip([now.pages_free, now.pages_cached, now.pages_held]) {
            gauge.set(value as f64);
        }
        let tier = &now.tier;
        let pages = [tier.pages_written, tier.pages_loaded, tier.pages_not_stored, tier.faults];
        self.tier_pages.iter().zip(pages).for_each(|(counter, n)| counter.absolute(n));
        self.tier_bytes[0].set(tier.stored_bytes as f64);
        self.tier_bytes[1].set(tier.staged_bytes as f64);
        self.prefix_queries.absolute(now.prefix_query_tokens);
        self.prefix_hits.absolute(now.prefix_hit_tokens);
        self.preemptions.absolute(now.preemptions);
        self.lost_tokens.absolute(now.lost_tokens);
        self.steps.absolute(now.totals.steps);
        self.step_us[0].absolute(now.totals.model_us);
        self.step_us[1].absolute(now.totals.step_us.saturating_sub(now.totals.model_us));
        self.generation_tokens.absolute(now.totals.generation_tokens);
        self.disagreements.absolute(now.totals.books_disagree);
        self.handle.render()
    }
}

fn builder(model_name: &str, max_model_len: usize) -> PrometheusBuilder {
    let mut lengths = Vec::new();
    let mut decade = 1usize;
    while decade <= max_model_len {
        lengths.extend([decade, 2 * decade, 5 * decade].into_iter().filter(|l| *l <= max_model_len));
        decade = decade.saturating_mul(10);
    }
    let lengths: Vec<f64> = lengths.into_iter().chain([max_model_len]).map(|l| l as f64).collect();
    let sets = LATENCY_HISTOGRAMS
        .iter()
        .map(|name| (*name, LATENCY_BUCKETS_S.as_slice()))
        .chain(TOKEN_HISTOGRAMS.iter().map(|name| (*name, lengths.as_slice())))
        .chain([
            (GAPS, GAP_BUCKETS_S.as_slice()),
            (CHOICES, [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0].as_slice()),
        ]);
    let mut builder = PrometheusBuilder::new().add_global_label("model_name", model_name);
    for (name, buckets) in sets {
        builder = match builder.set_buckets_for_metric(Matcher::Full(name.into()), buckets) {
            Ok(with_buckets) => with_buckets,
            Err(e) => unreachable!("only empty buckets are refused and none of ours is: {e}"),
        };
    }
    builder
}

fn describe() {
    metrics::describe_gauge!("vllm:num_requests_running", "Requests in the batch.");
    metrics::describe_gauge!("vllm:num_requests_waiting", "Requests in the queue.");
    metrics::describe_gauge!("vllm:kv_cache_usage_perc", "Share of the pages that requests hold (0 to 1).");
    metrics::describe_gauge!("vllm:cache_config_info", "Settings of the KV cache, as labels.");
    metrics::describe_gauge!(
        "suanpan:kv_pages",
        "Pages by state: free, cached (prefix cache alone), active."
    );
    metrics::describe_counter!(
        "suanpan:tier_pages_total",
        "Pages of the tier on disk: written, loaded, not_stored, faulty (not believed)."
    );
    metrics::describe_gauge!("suanpan:tier_bytes", "Bytes of that tier: stored, and staged in memory.");
    metrics::describe_counter!(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache."
    );
    metrics::describe_counter!("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.");
    metrics::describe_counter!("vllm:num_preemptions_total", "Requests thrown back because pages ran out.");
    metrics::describe_counter!("vllm:prompt_tokens_total", "Prompt tokens of ended requests.");
    metrics::describe_counter!("vllm:generation_tokens_total", "Generated tokens.");
    metrics::describe_counter!("vllm:request_success_total", "Ended requests by cause.");
    metrics::describe_counter!("suanpan:steps_total", "Steps of the engine.");
    metrics::describe_counter!("suanpan:step_us_total", "Microseconds in steps, by part: layers, rest.");
    metrics::describe_counter!(
        "suanpan:preemption_lost_tokens_total",
        "Computed tokens that preemptions threw away."
    );
    metrics::describe_counter!("suanpan:attention_flops_total", "Attention FLOPs of ended requests.");
    metrics::describe_counter!("suanpan:kv_read_bytes_total", Unit::Bytes, "K/V bytes read by attention.");
    metrics::describe_counter!(
        "suanpan:kv_write_bytes_total",
        Unit::Bytes,
        "K/V bytes written to the cache."
    );
    metrics::describe_counter!("suanpan:books_disagree_total", "Requests whose books disagree: must stay 0.");
    metrics::describe_histogram!("vllm:time_to_first_token_seconds", "Arrival to first token.");
    metrics::describe_histogram!(GAPS, "Gap between two tokens of a request.");
    metrics::describe_histogram!("vllm:e2e_request_latency_seconds", "Arrival to end.");
    metrics::describe_histogram!("vllm:request_queue_time_seconds", "Arrival to first scheduling.");
    metrics::describe_histogram!("vllm:request_prefill_time_seconds", "First scheduling to first token.");
    metrics::describe_histogram!("vllm:request_decode_time_seconds", "First to last token.");
    metrics::describe_histogram!("vllm:request_inference_time_seconds", "First scheduling to last token.");
}

#[cfg(test)]
mod tests {
    use super::*;
    use suanpan_engine::Totals;

    #[test]
    fn the_page_carries_vllms_names_with_the_model_and_two_servers_do_not_mix() {
        let (a, b) = (Metrics::new("a", 2048, &[("block_size", "16".into())]), Metrics::new("b", 2048, &[]));
        a.asked(2);
        a.first_token(Duration::from_millis(3));
        a.next_token(Duration::from_millis(1));
        a.done(&Done {
            reason: "stop",
            prompt_tokens: 5,
            output_tokens: 7,
            books_agree: Some(true),
            ..Done::default()
        });
        let totals = Totals { generation_tokens: 7, ..Totals::default() };
        let now = EngineStats { running: 1, kv_usage: 0.4, pages_held: 4, totals, ..EngineStats::default() };
        let page = a.render(&now);
        for line in [
            r#"vllm:num_requests_running{model_name="a"} 1"#,
            r#"vllm:kv_cache_usage_perc{model_name="a"} 0.4"#,
            r#"vllm:prompt_tokens_total{model_name="a"} 5"#,
            r#"vllm:generation_tokens_total{model_name="a"} 7"#,
            r#"vllm:request_success_total{model_name="a",finished_reason="stop"} 1"#,
            r#"vllm:time_to_first_token_seconds_count{model_name="a"} 1"#,
            r#"vllm:inter_token_latency_seconds_bucket{model_name="a",le="0.002"} 1"#,
            r#"vllm:request_prompt_tokens_bucket{model_name="a",le="2048"} 1"#,
            r#"suanpan:kv_pages{model_name="a",state="active"} 4"#,
            r#"suanpan:books_disagree_total{model_name="a"} 0"#,
            r#"vllm:cache_config_info{model_name="a",block_size="16"} 1"#,
        ] {
            assert!(page.lines().any(|l| l == line), "{line} is missing in\n{page}");
        }
        let page = b.render(&EngineStats::default());
        assert!(page.contains(r#"vllm:prompt_tokens_total{model_name="b"} 0"#), "{page}");
        assert!(!page.contains(r#"model_name="a""#));
    }
}

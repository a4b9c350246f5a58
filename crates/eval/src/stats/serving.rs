//! Serving metrics from raw exchanges: what one request took, what a run took, and how five tools would read the same log.
//!
//! Definitions are in docs/evidence-run.md. All times here are milliseconds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::percentile::Summary;
use crate::endpoint::{Chunk, Exchange};

/// One exchange with its place in the schedule.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// When it was to be sent, under an open load.
    pub scheduled_us: Option<u64>,
    /// How long it waited for a place among the requests in flight.
    pub queued_us: u64,
    /// What came.
    pub exchange: &'a Exchange,
}

/// What one completed request took.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Sent − scheduled, less the wait for a place in flight: the client's own lateness.
    pub lag: Option<f64>,
    /// Wait for a place in flight.
    pub queue: Option<f64>,
    /// First token − sent.
    pub ttft: f64,
    /// First token − scheduled.
    pub ttft_schedule: Option<f64>,
    /// First token of the answer (reasoning excluded) − sent.
    pub ttfo: Option<f64>,
    /// Last token − sent.
    pub e2el: f64,
    /// Last token − scheduled.
    pub e2el_schedule: Option<f64>,
    /// (Last token − first token) / (output tokens − tokens of the first chunk); nothing if the divisor is below 1.
    pub tpot: Option<f64>,
    /// Gaps between chunks, each spread over the tokens that end it.
    pub itl: Vec<f64>,
    /// Gaps between chunks as they are.
    pub icl: Vec<f64>,
    /// Output tokens.
    pub output_tokens: f64,
    /// Tokens of the first chunk.
    pub first_tokens: f64,
    /// Prompt tokens, if the server says.
    pub input_tokens: Option<f64>,
    /// Of these cached, if the server says.
    pub cached_tokens: Option<f64>,
}

fn ms(later: u64, earlier: u64) -> f64 {
    (later as f64 - earlier as f64) / 1e3
}

/// Chunks that carry tokens. A chunk without text counts only if the server says that a token came with it.
fn bearing(exchange: &Exchange) -> Vec<&Chunk> {
    exchange.chunks.iter().filter(|c| c.is_output() || c.3.is_some_and(|n| n >= 1.0)).collect()
}

/// Timing of a request that came to its end with at least one token; nothing for others.
pub fn timing(request: &Request<'_>) -> Option<Timing> {
    let x = request.exchange;
    if x.fault.is_some() {
        return None;
    }
    let chunks = bearing(x);
    let (first, last) = (chunks.first()?, chunks.last()?);
    let tokens_of = |c: &Chunk| c.3.unwrap_or(1.0);
    let counted: f64 = chunks.iter().map(|c| tokens_of(c)).sum();
    let output_tokens = x.usage.completion_tokens.map_or(counted, |n| n as f64);
    let divisor = output_tokens - tokens_of(first);
    let gaps = || chunks.windows(2).map(|w| (ms(w[1].0, w[0].0), tokens_of(w[1])));
    let itl = gaps().flat_map(|(gap, n)| {
        let n = n.round().max(1.0);
        std::iter::repeat_n(gap / n, n as usize)
    });
    let answer = x.chunks.iter().find(|c| matches!(c.1, crate::endpoint::Carries::Answer));
    let schedule = |at: u64| request.scheduled_us.map(|s| ms(at, s));
    Some(Timing {
        lag: schedule(x.sent_us).map(|l| (l - request.queued_us as f64 / 1e3).max(0.0)),
        queue: request.scheduled_us.map(|_| request.queued_us as f64 / 1e3),
        ttft: ms(first.0, x.sent_us),
        ttft_schedule: schedule(first.0),
        ttfo: answer.map(|c| ms(c.0, x.sent_us)),
        e2el: ms(last.0, x.sent_us),
        e2el_schedule: schedule(last.0),
        tpot: (divisor >= 1.0 && chunks.len() > 1).then(|| ms(last.0, first.0) / divisor),
        itl: itl.collect(),
        icl: gaps().map(|(gap, _)| gap).collect(),
        output_tokens,
        first_tokens: tokens_of(first),
        input_tokens: x.usage.prompt_tokens.map(|n| n as f64),
        cached_tokens: x.usage.cached_tokens.map(|n| n as f64),
    })
}

/// Limits that a good request meets, all of those given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Goals {
    /// Milliseconds.
    pub ttft_ms: Option<f64>,
    /// Milliseconds.
    pub tpot_ms: Option<f64>,
    /// Milliseconds.
    pub e2el_ms: Option<f64>,
}

impl Goals {
    /// Whether any limit was given.
    pub fn any(&self) -> bool {
        self.ttft_ms.is_some() || self.tpot_ms.is_some() || self.e2el_ms.is_some()
    }

    /// Whether a request meets all of them. Under an open load waiting counts from the schedule.
    pub fn meets(&self, t: &Timing) -> bool {
        let under = |limit: Option<f64>, value: f64| limit.is_none_or(|l| value <= l);
        under(self.ttft_ms, t.ttft_schedule.unwrap_or(t.ttft))
            && under(self.tpot_ms, t.tpot.unwrap_or(0.0))
            && under(self.e2el_ms, t.e2el_schedule.unwrap_or(t.e2el))
    }
}

/// Requests that met the goals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The goals.
    pub goals: Goals,
    /// Good requests a second.
    pub per_second: f64,
    /// Good requests of all, failed ones included.
    pub share: f64,
}

/// A run's requests, summed up. Keys in milliseconds end in `_ms`, as vLLM's do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Serving {
    /// Seconds from the first request sent (scheduled) to the last byte, pauses between sessions left out.
    pub duration: f64,
    /// Requests with an answer.
    pub completed: usize,
    /// Requests without.
    pub failed: usize,
    /// By kind of fault.
    pub failures: BTreeMap<String, usize>,
    /// Prompt tokens.
    pub total_input_tokens: f64,
    /// Answer tokens.
    pub total_output_tokens: f64,
    /// Completed requests a second.
    pub request_throughput: f64,
    /// Answer tokens a second.
    pub output_throughput: f64,
    /// All tokens a second.
    pub total_token_throughput: f64,
    /// Mean requests in flight: sum of E2EL over duration.
    pub concurrency: f64,
    /// Most requests in flight at once.
    pub concurrency_max: usize,
    /// Cached share of prompt tokens; null when the server does not say.
    pub cached_share: Option<f64>,
    /// Requests whose output token count rests on chunks alone.
    pub tokens_guessed: usize,
    /// Distributions by name: `ttft_ms`, `ttft_schedule_ms`, `ttfo_ms`, `tpot_ms`, `itl_ms`, `icl_ms`, `e2el_ms`,
    /// `e2el_schedule_ms`, `ntpot_ms`, `client_lag_ms`, `client_queue_ms`.
    pub times: BTreeMap<String, Summary>,
    /// Goodput, where goals were given.
    pub goodput: Option<Goodput>,
    /// The same log as other tools read it.
    pub readings: Vec<Reading>,
}

/// One word of one tool, over this log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Tool.
    pub tool: String,
    /// Its word.
    pub metric: String,
    /// Its formula.
    pub formula: String,
    /// Mean, milliseconds.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
}

/// Most at once, by a sweep over starts and ends; an end at the moment of a start comes first.
fn peak(requests: &[Request<'_>]) -> usize {
    let mut edges: Vec<(u64, i32)> =
        requests.iter().flat_map(|r| [(r.exchange.sent_us, 1), (r.exchange.end_us, -1)]).collect();
    edges.sort_unstable();
    let (mut now, mut most) = (0i32, 0);
    for (_, step) in edges {
        now += step;
        most = most.max(now);
    }
    most.max(0) as usize
}

fn span(requests: &[Request<'_>]) -> f64 {
    let start = requests.iter().map(|r| r.scheduled_us.unwrap_or(r.exchange.sent_us)).min().unwrap_or(0);
    let end = requests.iter().map(|r| r.exchange.end_us).max().unwrap_or(0);
    end.saturating_sub(start) as f64 / 1e6
}

fn distributions(timings: &[Timing]) -> BTreeMap<String, Summary> {
    let mut times = BTreeMap::new();
    let mut put = |name: &str, samples: Vec<f64>| {
        if let Some(summary) = Summary::of(samples) {
            times.insert(name.to_owned(), summary);
        }
    };
    let all = |f: fn(&Timing) -> Option<f64>| timings.iter().filter_map(f).collect::<Vec<f64>>();
    put("client_lag_ms", all(|t| t.lag));
    put("client_queue_ms", all(|t| t.queue));
    put("ttft_ms", all(|t| Some(t.ttft)));
    put("ttft_schedule_ms", all(|t| t.ttft_schedule));
    put("ttfo_ms", all(|t| t.ttfo));
    put("tpot_ms", all(|t| t.tpot));
    put("e2el_ms", all(|t| Some(t.e2el)));
    put("e2el_schedule_ms", all(|t| t.e2el_schedule));
    put("ntpot_ms", all(|t| Some(t.e2el / t.output_tokens.max(1.0))));
    put("itl_ms", timings.iter().flat_map(|t| t.itl.iter().copied()).collect());
    put("icl_ms", timings.iter().flat_map(|t| t.icl.iter().copied()).collect());
    times
}

/// Sums up requests. `sessions` holds each session's requests apart: their clocks do not compare.
pub fn summarise(sessions: &[Vec<Request<'_>>], goals: &Goals) -> Serving {
    let all: Vec<Request<'_>> = sessions.iter().flatten().copied().collect();
    let timings: Vec<Timing> = all.iter().filter_map(timing).collect();
    let duration: f64 = sessions.iter().map(|s| span(s)).sum();
    let per_second = |x: f64| if duration > 0.0 { x / duration } else { 0.0 };
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    for request in &all {
        let kind = match &request.exchange.fault {
            Some(fault) => format!("{:?}", fault.kind).to_lowercase(),
            None if timing(request).is_none() => "no_token".to_owned(),
            None => continue,
        };
        *failures.entry(kind).or_default() += 1;
    }
    let input: f64 = timings.iter().filter_map(|t| t.input_tokens).sum();
    let output: f64 = timings.iter().map(|t| t.output_tokens).sum();
    // A server that tells the share of some requests only tells nothing about the rest.
    let cached = timings.iter().map(|t| t.cached_tokens.zip(t.input_tokens)).collect::<Option<Vec<_>>>();
    let cached_share = cached.filter(|c| !c.is_empty()).map(|c| {
        let (cached, input) = c.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
        if input > 0.0 { cached / input } else { 0.0 }
    });
    let good = timings.iter().filter(|t| goals.meets(t)).count() as f64;
    let by_chunks = |r: &&Request<'_>| {
        r.exchange.tokens_by == crate::endpoint::TokensBy::Chunks
            && r.exchange.usage.completion_tokens.is_none()
    };
    Serving {
        duration,
        completed: timings.len(),
        failed: failures.values().sum(),
        failures,
        total_input_tokens: input,
        total_output_tokens: output,
        request_throughput: per_second(timings.len() as f64),
        output_throughput: per_second(output),
        total_token_throughput: per_second(input + output),
        concurrency: per_second(timings.iter().map(|t| t.e2el / 1e3).sum()),
        concurrency_max: sessions.iter().map(|s| peak(s)).max().unwrap_or(0),
        cached_share,
        tokens_guessed: all.iter().filter(by_chunks).count(),
        times: distributions(&timings),
        goodput: goals.any().then(|| Goodput {
            goals: *goals,
            per_second: per_second(good),
            share: good / all.len().max(1) as f64,
        }),
        readings: readings(&all),
    }
}

/// vLLM's stamps: its clock stops at the first event with a choice, a role included, and at the last event of all.
fn first_and_last_event(x: &Exchange) -> Option<(f64, f64)> {
    let (first, last) = (x.chunks.first()?, x.chunks.last()?);
    Some((ms(first.0, x.sent_us), ms(last.0, x.sent_us)))
}

/// How other tools read the same requests.
pub fn readings(all: &[Request<'_>]) -> Vec<Reading> {
    let done: Vec<(&Exchange, Timing)> = all.iter().filter_map(|r| Some((r.exchange, timing(r)?))).collect();
    let mut table = Vec::new();
    let mut put = |tool: &str, metric: &str, formula: &str, samples: Vec<f64>| {
        let mut sorted: Vec<f64> = samples.into_iter().filter(|x| x.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            return;
        }
        table.push(Reading {
            tool: tool.into(),
            metric: metric.into(),
            formula: formula.into(),
            mean_ms: sorted.iter().sum::<f64>() / sorted.len() as f64,
            p50_ms: super::percentile::linear(&sorted, 50.0),
            p99_ms: super::percentile::linear(&sorted, 99.0),
        });
    };
    let per = |f: &dyn Fn(&Exchange, &Timing) -> Option<f64>| -> Vec<f64> {
        done.iter().filter_map(|(x, t)| f(x, t)).collect()
    };
    let over = |a: f64, n: f64| (n >= 1.0).then(|| a / n);
    put(
        "suanpan",
        "TPOT",
        "(last token − first token) / (n − tokens of the first chunk)",
        per(&|_, t| t.tpot),
    );
    put(
        "vLLM",
        "TTFT",
        "first event − sent; a role-only event counts",
        per(&|x, _| Some(first_and_last_event(x)?.0)),
    );
    put(
        "vLLM",
        "TPOT",
        "(last event − first event) / (n − 1)",
        per(&|x, t| first_and_last_event(x).and_then(|(a, b)| over(b - a, t.output_tokens - 1.0))),
    );
    let gaps = |x: &Exchange| x.chunks.windows(2).map(|w| ms(w[1].0, w[0].0)).collect::<Vec<_>>();
    put("vLLM", "ITL", "gaps between events, pooled", done.iter().flat_map(|(x, _)| gaps(x)).collect());
    put(
        "AIPerf",
        "ITL",
        "(latency − TTFT) / (n − tokens of the first chunk), a request",
        per(&|_, t| over(t.e2el - t.ttft, t.output_tokens - t.first_tokens)),
    );
    put("GuideLLM", "TPOT", "last token / n, the first included", per(&|_, t| over(t.e2el, t.output_tokens)));
    put(
        "GuideLLM",
        "ITL",
        "(last token − first token) / (n − 1), a request",
        per(&|_, t| over(t.e2el - t.ttft, t.output_tokens - 1.0)),
    );
    put("LLMPerf", "ITL", "mean over all tokens, TTFT included", per(&|_, t| over(t.e2el, t.output_tokens)));
    put(
        "inference-perf",
        "TPOT",
        "(E2EL − TTFT) / (n − 1)",
        per(&|_, t| over(t.e2el - t.ttft, t.output_tokens - 1.0)),
    );
    put("inference-perf", "NTPOT", "E2EL / n", per(&|_, t| over(t.e2el, t.output_tokens)));
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{Carries, TokensBy, Usage};

    /// A role at 5 ms, then bundles of 4 tokens each 40 ms from 100 ms on, an end at 400 ms.
    fn bundled() -> Exchange {
        let mut chunks = vec![Chunk(6_000, Carries::Nothing, 0, Some(0.0))];
        chunks.extend((0..8u64).map(|i| Chunk(101_000 + 40_000 * i, Carries::Answer, 16, Some(4.0))));
        chunks.push(Chunk(401_000, Carries::Nothing, 0, None));
        Exchange {
            sent_us: 1_000,
            end_us: 402_000,
            streamed: true,
            chunks,
            tokens_by: TokensBy::Server,
            usage: Usage { completion_tokens: Some(32), prompt_tokens: Some(10), ..Usage::default() },
            ..Exchange::default()
        }
    }

    #[test]
    fn chunks_are_not_tokens_and_a_role_is_not_the_first() {
        let x = bundled();
        let t = timing(&Request { scheduled_us: Some(0), queued_us: 0, exchange: &x }).unwrap();
        assert_eq!((t.ttft, t.e2el, t.lag), (100.0, 380.0, Some(1.0)));
        assert_eq!(t.ttft_schedule, Some(101.0));
        assert!((t.tpot.unwrap() - 10.0).abs() < 1e-9, "{:?}", t.tpot);
        assert_eq!(t.itl.len(), 28);
        assert!(
            t.itl.iter().all(|g| (g - 10.0).abs() < 1e-9) && t.icl.iter().all(|g| (g - 40.0).abs() < 1e-9)
        );
    }

    #[test]
    fn five_tools_read_one_log_five_ways() {
        let x = bundled();
        let table = readings(&[Request { scheduled_us: None, queued_us: 0, exchange: &x }]);
        let mean = |tool: &str, metric: &str| {
            table.iter().find(|r| r.tool == tool && r.metric == metric).unwrap().mean_ms
        };
        assert!((mean("suanpan", "TPOT") - 10.0).abs() < 1e-9);
        assert!((mean("vLLM", "TTFT") - 5.0).abs() < 1e-9);
        assert!((mean("vLLM", "TPOT") - 395.0 / 31.0).abs() < 1e-9);
        assert!((mean("AIPerf", "ITL") - 10.0).abs() < 1e-9);
        assert!((mean("GuideLLM", "TPOT") - 380.0 / 32.0).abs() < 1e-9);
        assert!((mean("GuideLLM", "ITL") - 280.0 / 31.0).abs() < 1e-9);
        assert!((mean("LLMPerf", "ITL") - 380.0 / 32.0).abs() < 1e-9);
        assert!((mean("inference-perf", "TPOT") - 280.0 / 31.0).abs() < 1e-9);
    }

    #[test]
    fn failed_requests_cannot_improve_the_numbers() {
        let good = bundled();
        let fault = crate::endpoint::Fault::new(crate::endpoint::FaultKind::Busy, "status 429");
        let bad = Exchange { sent_us: 0, end_us: 1_000, fault: Some(fault), ..Exchange::default() };
        let request = |exchange| Request { scheduled_us: None, queued_us: 0, exchange };
        let goals = Goals { ttft_ms: Some(150.0), ..Goals::default() };
        let s = summarise(&[vec![request(&good), request(&bad), request(&bad)]], &goals);
        assert_eq!((s.completed, s.failed, s.failures["busy"]), (1, 2, 2));
        assert!((s.goodput.unwrap().share - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(s.cached_share, None, "unknown is not 0");
        assert_eq!(s.concurrency_max, 2 + 1 - 1 + usize::from(good.sent_us < 1_000));
    }
}

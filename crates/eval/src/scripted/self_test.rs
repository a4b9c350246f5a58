//! The harness against endpoints whose scores and times are known: what `suanpan eval self-test` runs, and CI with it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;

use super::faults::Bad;
use super::minds::{Book, Mind, Model};
use super::server::{MODEL, Script, Server};
use super::timers::{Drawn, Pace, Stall};
use crate::EvalError;
use crate::conditions::{Conditions, Sources};
use crate::corpus::Prose;
use crate::count::Bytes;
use crate::endpoint::{Clock, Endpoint, HttpEndpoint, HttpOptions, Limits, Protocol};
use crate::item::View;
use crate::load::{Arrivals, Load};
use crate::report::{self, Report};
use crate::run::Runner;
use crate::run::log::{FORMAT, Header, Log};
use crate::run::proof::Probe;
use crate::run::spec::{CacheState, Spec, plan};
use crate::stats::cost::Prices;
use crate::stats::percentile::linear;
use crate::stats::serving::Goals;
use crate::task::{Kit, Task};

/// Tries of a check of times: a machine that is busy elsewhere is late at random, a wrong timer always.
const TIMER_TRIES: usize = 6;

/// One comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// What had to come out.
    pub expected: String,
    /// What came out.
    pub got: String,
    /// Whether it did.
    pub ok: bool,
}

/// What the checks ask.
pub struct SelfTest<'a> {
    /// Tasks with their names.
    pub tasks: &'a [(String, &'static dyn Task)],
    /// Lengths in bytes.
    pub lengths: &'a [usize],
    /// Items a task and length.
    pub samples: u32,
    /// An empty folder.
    pub folder: &'a Path,
}

fn check(name: impl Into<String>, expected: impl Into<String>, got: impl Into<String>, ok: bool) -> Check {
    Check { name: name.into(), expected: expected.into(), got: got.into(), ok }
}

impl SelfTest<'_> {
    fn kit(&self) -> Kit<'static> {
        Kit { seed: 5, counter: &Bytes, haystack: Prose::shipped() }
    }

    /// The spec of a run over all tasks.
    pub fn spec(&self, protocol: Protocol) -> Spec {
        Spec {
            tasks: self.tasks.iter().map(|(name, _)| name.clone()).collect(),
            lengths: self.lengths.to_vec(),
            samples: self.samples,
            views: vec![View::Full],
            seed: 5,
            protocol,
            reserve_tokens: 64,
            answer_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            load: Load::Closed { concurrency: 4 },
            cache: CacheState::Cold,
            retries: 0,
            read_proof: true,
            haystack: self.kit().haystack.identity(),
            counter: "bytes".into(),
            generator: crate::tasks::build::GENERATOR,
            goals: Goals::default(),
            prices: Prices::default(),
        }
    }

    /// A script with every question of `spec` in its book.
    pub fn model(&self, spec: &Spec, mind: Mind) -> Result<Model, EvalError> {
        let mut book = Book::default();
        self.each_item(spec, |item, task| book.add(item, task, spec.protocol))?;
        Ok(Model { mind, book, max_model_len: None })
    }

    fn each_item(
        &self,
        spec: &Spec,
        mut each: impl FnMut(crate::item::Item, &'static dyn Task),
    ) -> Result<(), EvalError> {
        let kit = self.kit();
        for cell in spec.cells() {
            let Some((_, task)) = self.tasks.iter().find(|(name, _)| *name == cell.task) else { continue };
            let built = crate::item::Cell { length_tokens: spec.built_tokens(cell.length_tokens), ..cell };
            each(task.item(&kit, &built)?, *task);
        }
        Ok(())
    }

    /// A whole run against a script, through real HTTP, and its report.
    pub fn run(&self, name: &str, spec: &Spec, script: Arc<dyn Script>) -> Result<Report, EvalError> {
        let server =
            Server::start(script).map_err(|source| EvalError::Io { path: "127.0.0.1:0".into(), source })?;
        let endpoint = HttpEndpoint::new(HttpOptions::new(server.url(), MODEL))?;
        let limits = Limits {
            total: Duration::from_secs(20),
            connect: Duration::from_secs(5),
            idle: Duration::from_secs(10),
            ..Limits::default()
        };
        let kit = self.kit();
        let tasks: Vec<&'static dyn Task> = spec
            .tasks
            .iter()
            .filter_map(|n| self.tasks.iter().find(|(m, _)| m == n))
            .map(|(_, t)| *t)
            .collect();
        let known = endpoint.known().unwrap_or_default();
        plan(spec, &tasks, &kit, known.max_model_len)?;
        let conditions = Conditions::gather(&Sources {
            rest_unknown: Some("a scripted endpoint".into()),
            ..Sources::default()
        })?;
        let header = Header {
            format: FORMAT,
            pack: spec.pack(),
            spec: spec.clone(),
            conditions,
            salt: 77,
            sessions: vec![0],
            proof: None,
            reproduce: "suanpan eval self-test".into(),
        };
        let folder = self.folder.join(name);
        let (log, done) = Log::open(&folder, header)?;
        let tolerance = Some(0.0);
        if spec.read_proof {
            let probe = Probe {
                endpoint: &endpoint,
                kit: &kit,
                protocol: spec.protocol,
                length_tokens: spec.lengths.iter().max().copied().unwrap_or(0),
                tolerance,
                salt: 77,
                limits,
            };
            log.set_proof(probe.run(&Clock::default(), |_| ()))?;
        }
        let runner = Runner { spec, tasks: &tasks, kit: &kit, endpoint: &endpoint, limits, tolerance };
        runner.run(&log, &done, &|_| ())?;
        report::build(&folder)
    }

    fn mind(&self, name: &str, spec: &Spec, mind: Mind) -> Result<Report, EvalError> {
        self.run(name, spec, Arc::new(self.model(spec, mind)?))
    }

    /// Everything; `tick` sees each check as it is made.
    ///
    /// Errors: tasks that have no question at these lengths, a folder that cannot be written.
    pub fn all(&self, tick: &mut dyn FnMut(&Check)) -> Result<Vec<Check>, EvalError> {
        let mut all = Vec::new();
        type Part<'a> = fn(&SelfTest<'a>) -> Result<Vec<Check>, EvalError>;
        let parts: [Part<'_>; 6] =
            [Self::oracles, Self::guesser, Self::blind, Self::liar, Self::cuts, Self::times];
        for part in parts {
            for check in part(self)? {
                tick(&check);
                all.push(check);
            }
        }
        Ok(all)
    }

    fn oracles(&self) -> Result<Vec<Check>, EvalError> {
        let mut checks = Vec::new();
        for protocol in [Protocol::Chat, Protocol::Completion] {
            let mut spec = self.spec(protocol);
            if protocol == Protocol::Completion {
                // Follow-ups and tools need turns.
                let one_turn = |n: &&String| self.has_one_turn(n);
                spec.tasks = spec.tasks.iter().filter(one_turn).cloned().collect();
            }
            let report = self.mind(&format!("oracle-{}", protocol.name()), &spec, Mind::Oracle)?;
            let perfect = |c: &report::summary::CellScore| {
                c.strict.value == 1.0 && c.compatible.value == 1.0 && c.n == spec.samples as usize
            };
            let bad: Vec<String> = (report.cells.iter().filter(|c| !perfect(c)))
                .map(|c| format!("{} at {}: {:.3} (n={})", c.task, c.length_tokens, c.strict.value, c.n))
                .collect();
            let got = if bad.is_empty() {
                format!("100.0 in {} cells", report.cells.len())
            } else {
                bad.join("; ")
            };
            let name = format!("oracle, {} protocol", protocol.name());
            checks.push(check(name, "100.0 in every cell", got, bad.is_empty() && !report.cells.is_empty()));
            let verdict = report.run.proof.as_ref().map_or(String::new(), |p| p.verdict.clone());
            let read = report.valid && verdict.starts_with("read: every canary");
            let got = if report.valid { verdict } else { report.invalid.join("; ") };
            checks.push(check("read-proof of an endpoint that reads", "every canary comes back", got, read));
        }
        Ok(checks)
    }

    fn has_one_turn(&self, name: &str) -> bool {
        let Some((_, task)) = self.tasks.iter().find(|(n, _)| n == name) else { return false };
        let cell = crate::item::Cell {
            task: name.into(),
            length_tokens: self.lengths.iter().max().copied().unwrap_or(0),
            index: 0,
            view: View::Full,
        };
        task.item(&self.kit(), &cell).is_ok_and(|item| {
            let right = task.right_answer(&item, &[]);
            let text =
                |t: &crate::item::Turn| t.parts.iter().all(|p| matches!(p, crate::item::Part::Text { .. }));
            right.tool_calls.is_empty()
                && item.prompt.turns.iter().all(text)
                && task.follow_up(&item, &[right]).is_none()
        })
    }

    fn guesser(&self) -> Result<Vec<Check>, EvalError> {
        let report = self.mind("guesser", &self.wide(), Mind::Guesser(3))?;
        let (mut got, mut chance, mut variance, mut n) = (0.0, 0.0, 0.0, 0);
        for c in &report.cells {
            let items = c.n as f64;
            got += c.compatible.value * items;
            chance += c.chance * items;
            variance += c.chance * (1.0 - c.chance) * items;
            n += c.n;
        }
        let half = 4.0 * variance.sqrt() + 1.0;
        let expected = format!("{:.2} ± {half:.2} of {n}", chance);
        Ok(vec![check("guesser", expected, format!("{got:.2}"), (got - chance).abs() <= half && n > 0)])
    }

    /// Long enough for what guessers and liars say to end by itself.
    fn wide(&self) -> Spec {
        Spec { answer_tokens: Some(1 << 20), ..self.spec(Protocol::Chat) }
    }

    /// Minds that read a part: the reported curve is the one that the facts' offsets give.
    fn blind(&self) -> Result<Vec<Check>, EvalError> {
        let mut checks = Vec::new();
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        let minds =
            [("window oracle", Mind::Window(longest / 2)), ("middle-blind oracle", Mind::MiddleBlind)];
        for (name, mind) in minds {
            // The proof rightly refuses these; here their scores are wanted.
            let spec = Spec { read_proof: false, ..self.wide() };
            let report = self.mind(name, &spec, mind)?;
            let mut expected: std::collections::BTreeMap<(String, usize), (f64, f64)> = Default::default();
            self.each_item(&spec, |item, task| {
                let mut answers = Vec::new();
                loop {
                    answers.push(mind.answer(&item, task, &answers));
                    if task.follow_up(&item, &answers).is_none() || answers.len() >= 64 {
                        break;
                    }
                }
                let length = item.cell.length_tokens + spec.reserve_tokens;
                let sum = expected.entry((item.cell.task.clone(), length)).or_default();
                sum.0 += task.score(&item, &answers).strict;
                sum.1 += f64::from(u8::from(mind.reads_item(&item)));
            })?;
            let n = f64::from(spec.samples);
            let off = report.cells.iter().filter_map(|c| {
                let (score, _) = expected.get(&(c.task.clone(), c.length_tokens))?;
                Some((c.strict.value - score / n).abs())
            });
            let worst = off.fold(0.0, f64::max);
            let read: f64 = expected.values().map(|e| e.1).sum();
            let total = n * expected.len() as f64;
            let ok = worst < 1e-9 && report.cells.len() == expected.len() && read > 0.0 && read < total;
            let want = format!("the curve of the facts' offsets ({read} of {total} items readable)");
            checks.push(check(name, want, format!("largest difference {worst:.1e}"), ok));
        }
        Ok(checks)
    }

    fn liar(&self) -> Result<Vec<Check>, EvalError> {
        let report = self.mind("liar", &self.wide(), Mind::Liar)?;
        let worst = report.cells.iter().map(|c| c.strict.value).fold(0.0, f64::max);
        let fooled = report.cells.iter().map(|c| c.compatible.value).fold(0.0, f64::max);
        let ok = worst <= 0.5 && fooled > worst;
        let got = format!("strict at most {:.1}, upstream up to {:.1}", worst * 100.0, fooled * 100.0);
        Ok(vec![check("list-everything liar", "strict at most 50.0, upstream above it", got, ok)])
    }

    /// Cut prompts, cut answers, errors in the stream: invalid, never low.
    fn cuts(&self) -> Result<Vec<Check>, EvalError> {
        let mut checks = Vec::new();
        let keep = self.lengths.iter().max().copied().unwrap_or(0) * 6 / 10;
        for (name, mind) in [
            ("truncating endpoint", Mind::Truncating(keep)),
            ("truncating endpoint that hides it", Mind::TruncatingLiar(keep)),
        ] {
            let report = self.mind(name, &self.spec(Protocol::Chat), mind)?;
            let why = report.invalid.first().cloned().unwrap_or_else(|| "valid".into());
            checks.push(check(name, "an invalid run", why, !report.valid));
        }
        let spec = Spec { answer_tokens: Some(1), read_proof: false, ..self.spec(Protocol::Chat) };
        let report = self.mind("cut answers", &spec, Mind::Oracle)?;
        let items: usize = report.cells.iter().map(|c| c.n + c.cut_answer).sum();
        let missed: usize = report.cells.iter().flat_map(|c| c.failures.values()).sum();
        let cut: usize = report.cells.iter().map(|c| c.cut_answer).sum();
        let ok = items == spec.cells().len() && missed == 0 && cut > 0;
        checks.push(check("answers cut by the limit", "no miss", format!("{cut} cut, {missed} misses"), ok));
        let spec = Spec { read_proof: false, samples: 2, ..self.spec(Protocol::Chat) };
        let report = self.run("error mid-stream", &spec, Arc::new(Bad::InBand))?;
        let why = report.invalid.first().cloned().unwrap_or_else(|| "valid".into());
        let ok =
            !report.valid && report.serving.completed == 0 && report.serving.failures.contains_key("inband");
        checks.push(check("error in the middle of a stream", "failed requests, an invalid run", why, ok));
        Ok(checks)
    }

    /// A run of small questions for servers that only keep time.
    fn timed(&self, samples: u32, load: Load) -> Spec {
        Spec {
            tasks: self.tasks.iter().take(1).map(|(n, _)| n.clone()).collect(),
            lengths: self.lengths.iter().min().copied().into_iter().collect(),
            samples,
            load,
            read_proof: false,
            ..self.spec(Protocol::Chat)
        }
    }

    fn tried(
        &self,
        name: &str,
        expected: &str,
        mut one: impl FnMut(usize) -> Result<(String, bool), EvalError>,
    ) -> Result<Check, EvalError> {
        let mut last = String::new();
        for attempt in 0..TIMER_TRIES {
            let (got, ok) = one(attempt)?;
            if ok {
                return Ok(check(name, expected, got, true));
            }
            last = got;
        }
        Ok(check(name, expected, last, false))
    }

    fn times(&self) -> Result<Vec<Check>, EvalError> {
        Ok(vec![self.role_first()?, self.bundles()?, self.delays()?, self.omission()?])
    }

    fn role_first(&self) -> Result<Check, EvalError> {
        let pace = Pace {
            first: Duration::from_millis(120),
            gap: Duration::from_millis(4),
            tokens: 8,
            bundle: 1,
            role_first: true,
        };
        self.tried("role-first streamer: TTFT", "120 ms within 1 % or 1 ms", |attempt| {
            // Some in flight at any time: a processor that sleeps between requests would wake late.
            let load = Load::Open { rate: 100.0, arrivals: Arrivals::Constant, most_in_flight: 64 };
            let spec = self.timed(100, load);
            let report = self.run(&format!("role-{attempt}"), &spec, Arc::new(pace))?;
            let ttft = report.serving.times.get("ttft_ms").and_then(|t| t.p(50.0)).map_or(0.0, |p| p.value);
            let vllm = report.serving.readings.iter().find(|r| r.tool == "vLLM" && r.metric == "TTFT");
            let fooled = vllm.is_some_and(|r| r.p50_ms < 60.0);
            let got = format!("{ttft:.2} ms; by the first event {:.2} ms", vllm.map_or(0.0, |r| r.p50_ms));
            Ok((got, (ttft - 120.0).abs() <= 1.2 && fooled))
        })
    }

    fn bundles(&self) -> Result<Check, EvalError> {
        let pace = Pace {
            first: Duration::from_millis(20),
            gap: Duration::from_millis(5),
            tokens: 64,
            bundle: 4,
            role_first: true,
        };
        self.tried("bundles of 4 tokens: TPOT", "5 ms within 1 %", |attempt| {
            let spec = self.timed(6, Load::Closed { concurrency: 1 });
            let report = self.run(&format!("bundles-{attempt}"), &spec, Arc::new(pace))?;
            let times = &report.serving.times;
            let tpot = times.get("tpot_ms").and_then(|t| t.p(50.0)).map_or(0.0, |p| p.value);
            let itl = times.get("itl_ms").map_or(0.0, |t| t.mean);
            let ok = (tpot - 5.0).abs() <= 0.05 && (itl - 5.0).abs() <= 0.05;
            Ok((format!("TPOT {tpot:.3} ms, ITL {itl:.3} ms"), ok))
        })
    }

    fn delays(&self) -> Result<Check, EvalError> {
        let n = 700;
        let drawn = Drawn { n, floor: Duration::from_millis(5), mean: Duration::from_millis(20) };
        let mut truth: Vec<f64> = (0..n).map(|i| drawn.delay(i).as_secs_f64() * 1e3).collect();
        truth.sort_by(f64::total_cmp);
        let load = Load::Open { rate: 200.0, arrivals: Arrivals::Poisson, most_in_flight: 256 };
        let want: Vec<String> =
            [50.0, 95.0, 99.0].iter().map(|&p| format!("P{p} {:.2}", linear(&truth, p))).collect();
        let expected = format!("{} ms, each within 1 % or 1 ms; client lag P99 below 1 ms", want.join(", "));
        self.tried("known delays, 200 requests/s", &expected, |attempt| {
            let spec = self.timed(n as u32, load);
            let report = self.run(&format!("delays-{attempt}"), &spec, Arc::new(drawn))?;
            let times = &report.serving.times;
            let (mut ok, mut got) = (true, Vec::new());
            for p in [50.0, 95.0, 99.0] {
                let value = times.get("ttft_ms").and_then(|t| t.p(p)).map_or(0.0, |p| p.value);
                let want = linear(&truth, p);
                ok &= (value - want).abs() <= (0.01 * want).max(1.0);
                got.push(format!("P{p} {value:.2}"));
            }
            let lag = times.get("client_lag_ms").and_then(|t| t.p(99.0)).map_or(f64::INFINITY, |p| p.value);
            got.push(format!("lag {lag:.2}"));
            Ok((got.join(", "), ok && lag < 1.0))
        })
    }

    /// One stall of a server that serves one at a time: whoever counts from the sending sees one late answer, whoever counts from the
    /// schedule sees all that had to wait.
    fn omission(&self) -> Result<Check, EvalError> {
        let (n, rate, stall) = (700usize, 300.0, Duration::from_millis(300));
        let load = Load::Open { rate, arrivals: Arrivals::Constant, most_in_flight: 1 };
        self.tried("coordinated omission: one stall of 300 ms", "P99 from the schedule as a queue predicts, within 5 %; from the sending below 30 ms", |attempt| {
            let script = Stall { at: 200, time: stall, turn: Mutex::new(()) };
            let spec = self.timed(n as u32, load);
            let report = self.run(&format!("stall-{attempt}"), &spec, Arc::new(script))?;
            let times = &report.serving.times;
            let p = |name: &str, p: f64| times.get(name).and_then(|t| t.p(p)).map_or(0.0, |p| p.value);
            // Lindley's recursion with the median service time; a request also waits for its predecessor's end.
            let service = p("e2el_ms", 50.0);
            let (mut wait, mut waits) = (0.0f64, Vec::new());
            for i in 0..n {
                let own = if i == 200 { service + 300.0 } else { service };
                waits.push(wait + own);
                wait = (wait + own - 1e3 / rate).max(0.0);
            }
            waits.sort_by(f64::total_cmp);
            let (want, from_schedule, from_sent) =
                (linear(&waits, 99.0), p("ttft_schedule_ms", 99.0), p("ttft_ms", 99.0));
            let ok = (from_schedule - want).abs() <= 0.05 * want && from_sent < 30.0 && report.valid;
            let got = format!("from the schedule {from_schedule:.1} ms (predicted {want:.1}), from the sending {from_sent:.1} ms {}", report.invalid.join("; "));
            Ok((got, ok))
        })
    }
}

//! What a log says: scores with intervals, failures by kind, effective lengths, serving metrics, cost, and which claims it supports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::EvalError;
use crate::item::{Cell, View};
use crate::run::log::{self, Header, Outcome, Row};
use crate::run::spec::CacheState;
use crate::stats::Interval;
use crate::stats::bootstrap::{self, Scored};
use crate::stats::cost::{self, Cost, Work};
use crate::stats::effective::{self, Effective};
use crate::stats::paired;
use crate::stats::serving::{self, Request, Serving};

/// Depth is shown in so many bands.
pub const DEPTH_BANDS: usize = 5;
/// A client that sends later than this (P99) measures itself.
const CLIENT_LAG_MS_MAX: f64 = 10.0;
/// Cached share above which a run is not cold, and below which it is not warm.
const SHARE: (f64, f64) = (0.05, 0.5);

/// One task at one length in one view.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CellScore {
    /// Task with its options.
    pub task: String,
    /// Length.
    pub length_tokens: usize,
    /// View.
    pub view: View,
    /// Items that count.
    pub n: usize,
    /// As upstream scores.
    pub compatible: Interval,
    /// As it should be scored.
    pub strict: Interval,
    /// `compatible` if every cut answer were a miss, as other tools count.
    pub cut_as_miss: f64,
    /// Chance of a guess.
    pub chance: f64,
    /// Items that do not count, and why.
    pub cut_answer: usize,
    /// See `cut_answer`.
    pub cut_prompt: usize,
    /// See `cut_answer`.
    pub overflow: usize,
    /// See `cut_answer`.
    pub failed: usize,
    /// Counted items that are not strictly right, by kind.
    pub failures: BTreeMap<String, usize>,
    /// Score by band of depth: items and mean.
    pub by_depth: Vec<(usize, f64)>,
    /// Means of the task's other numbers.
    pub detail: BTreeMap<String, f64>,
}

/// All tasks at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LengthScore {
    /// Length.
    pub length_tokens: usize,
    /// View.
    pub view: View,
    /// Items.
    pub n: usize,
    /// Mean of the tasks' means.
    pub compatible: Interval,
    /// See `compatible`.
    pub strict: Interval,
}

/// What the views of the same items differ by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Task.
    pub task: String,
    /// Length.
    pub length_tokens: usize,
    /// Strict score, closed book.
    pub closed_book: Option<f64>,
    /// Strict score, focused.
    pub focused: Option<f64>,
    /// Strict score, full.
    pub full: f64,
    /// Focused less full on the same items.
    pub distraction: Option<Interval>,
}

/// Serving at one length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LengthServing {
    /// Length.
    pub length_tokens: usize,
    /// Metrics.
    pub serving: Serving,
    /// Cost of this length's share of the run.
    pub cost: Vec<Cost>,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version.
    pub format: u32,
    /// The run as it was asked, its conditions, its read-proof.
    pub run: Header,
    /// Whether the numbers may be used.
    pub valid: bool,
    /// Why not.
    pub invalid: Vec<String>,
    /// What a reader should know.
    pub warnings: Vec<String>,
    /// Scores by task, length, view.
    pub cells: Vec<CellScore>,
    /// Scores by length and view.
    pub lengths: Vec<LengthScore>,
    /// Effective lengths of the full view, upstream's scores and strict ones.
    pub effective_compatible: Vec<Effective>,
    /// See `effective_compatible`.
    pub effective_strict: Vec<Effective>,
    /// Views against each other.
    pub gaps: Vec<Gap>,
    /// Serving metrics of the whole run.
    pub serving: Serving,
    /// And of each length.
    pub serving_by_length: Vec<LengthServing>,
    /// Cost of the run.
    pub cost: Vec<Cost>,
    /// Which claims the run supports.
    pub verdict: Vec<String>,
}

type Key = (usize, usize, View);

/// Rows in the order of the spec.
struct Rows {
    /// All requests.
    all: Vec<Row>,
    /// Index of each item's last row.
    last: BTreeMap<Cell, usize>,
}

fn read(folder: &Path) -> Result<Rows, EvalError> {
    let mut rows = Rows { all: Vec::new(), last: BTreeMap::new() };
    log::for_rows(folder, |row| {
        rows.last.insert(row.cell.clone(), rows.all.len());
        rows.all.push(row);
    })?;
    Ok(rows)
}

fn read_run(folder: &Path) -> Result<(Header, Rows), EvalError> {
    let header = log::read_header(folder)?.ok_or_else(|| {
        EvalError::bad("folder", folder.display(), "the folder of a run, with its run.json")
    })?;
    Ok((header, read(folder)?))
}

/// Why no number of the run in `folder` may be used; empty where they may.
///
/// Errors: as [`build`].
pub fn why_invalid(folder: &Path) -> Result<Vec<String>, EvalError> {
    let (header, rows) = read_run(folder)?;
    let serving = serve(&rows.all.iter().collect::<Vec<_>>(), &header);
    Ok(invalid(&header, &rows, &serving))
}

/// Reads a run's folder.
///
/// Errors: no run there, or files that do not read as one.
pub fn build(folder: &Path) -> Result<Report, EvalError> {
    let (header, rows) = read_run(folder)?;
    let spec = &header.spec;
    let groups = group(&header, &rows);
    let cells: Vec<CellScore> = groups.iter().map(|(key, rows)| cell_score(&header, *key, rows)).collect();
    let lengths = length_scores(&header, &groups);
    let full = |f: fn(&LengthScore) -> Interval| -> Vec<(usize, Interval)> {
        lengths.iter().filter(|l| l.view == View::Full && l.n > 0).map(|l| (l.length_tokens, f(l))).collect()
    };
    let effective_compatible = effective::lengths(&full(|l| l.compatible));
    let effective_strict = effective::lengths(&full(|l| l.strict));
    let requests: Vec<&Row> = rows.all.iter().collect();
    let serving = serve(&requests, &header);
    let correct = |rows: &[&Row]| rows.iter().filter_map(|r| r.score.as_ref()).map(|s| s.strict).sum::<f64>();
    let serving_by_length = (spec.lengths.iter())
        .map(|&length_tokens| {
            let of: Vec<&Row> =
                requests.iter().filter(|r| r.cell.length_tokens == length_tokens).copied().collect();
            let serving = serve(&of, &header);
            let work = Work {
                seconds: busy_share(&of, &requests) * total_seconds(&requests),
                ..work(&serving, correct(&of))
            };
            LengthServing { length_tokens, cost: cost::costs(&spec.prices, &work), serving }
        })
        .collect();
    let total = Work { seconds: total_seconds(&requests), ..work(&serving, correct(&requests)) };
    let invalid = invalid(&header, &rows, &serving);
    let mut report = Report {
        format: log::FORMAT,
        valid: invalid.is_empty(),
        invalid,
        warnings: warnings(&header, &cells, &serving),
        gaps: gaps(&header, &groups),
        cost: cost::costs(&spec.prices, &total),
        run: header,
        cells,
        lengths,
        effective_compatible,
        effective_strict,
        serving,
        serving_by_length,
        verdict: Vec::new(),
    };
    report.verdict = verdict(&report);
    Ok(report)
}

fn group<'a>(header: &Header, rows: &'a Rows) -> BTreeMap<Key, Vec<&'a Row>> {
    let spec = &header.spec;
    let mut groups: BTreeMap<Key, Vec<&Row>> = BTreeMap::new();
    for (cell, &at) in &rows.last {
        let task = spec.tasks.iter().position(|t| *t == cell.task);
        let length = spec.lengths.iter().position(|l| *l == cell.length_tokens);
        if let (Some(task), Some(length)) = (task, length) {
            groups.entry((task, length, cell.view)).or_default().push(&rows.all[at]);
        }
    }
    groups
}

fn counts<'a>(rows: &[&'a Row]) -> Vec<&'a Row> {
    rows.iter().filter(|r| r.outcome == Outcome::Scored && r.score.is_some()).copied().collect()
}

fn scored(task: usize, rows: &[&Row], strict: bool) -> Vec<Scored> {
    let one = |r: &&Row| {
        let score = r.score.as_ref().map(|s| if strict { s.strict } else { s.compatible });
        score.map(|score| Scored { stratum: task, cluster: r.cluster, score })
    };
    rows.iter().filter_map(one).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0u32), |(s, n), x| (s + x, n + 1));
    if n == 0 { 0.0 } else { sum / f64::from(n) }
}

fn cell_score(header: &Header, (task, length, view): Key, rows: &[&Row]) -> CellScore {
    let spec = &header.spec;
    let counted = counts(rows);
    let outcome = |o: Outcome| rows.iter().filter(|r| r.outcome == o).count();
    let name = &spec.tasks[task];
    let label = format!("{name} {} {view:?}", spec.lengths[length]);
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    let mut bands = vec![(0usize, 0.0); DEPTH_BANDS];
    let mut detail: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for row in &counted {
        let Some(score) = &row.score else { continue };
        if let Some(kind) = score.failure {
            let name = serde_json::to_value(kind).ok().and_then(|v| v.as_str().map(str::to_owned));
            *failures.entry(name.unwrap_or_default()).or_default() += 1;
        }
        if let Some(depth) = row.depth {
            let band = ((depth * DEPTH_BANDS as f64) as usize).min(DEPTH_BANDS - 1);
            bands[band].0 += 1;
            bands[band].1 += score.strict;
        }
        score.detail.iter().for_each(|(k, v)| detail.entry(k.clone()).or_default().push(*v));
    }
    let of = |r: &&&Row| r.score.as_ref().map_or(0.0, |s| s.compatible);
    let with_cut: Vec<&Row> =
        rows.iter().filter(|r| matches!(r.outcome, Outcome::Scored | Outcome::CutAnswer)).copied().collect();
    CellScore {
        task: name.clone(),
        length_tokens: spec.lengths[length],
        view,
        n: counted.len(),
        compatible: finite(bootstrap::mean(&scored(task, &counted, false), &label)),
        strict: finite(bootstrap::mean(&scored(task, &counted, true), &label)),
        cut_as_miss: mean(with_cut.iter().map(|r| of(&r))),
        chance: mean(rows.iter().map(|r| r.chance)),
        cut_answer: outcome(Outcome::CutAnswer),
        cut_prompt: outcome(Outcome::CutPrompt),
        overflow: outcome(Outcome::Overflow),
        failed: outcome(Outcome::Failed),
        failures,
        by_depth: bands.into_iter().map(|(n, sum)| (n, if n == 0 { 0.0 } else { sum / n as f64 })).collect(),
        detail: detail.into_iter().map(|(k, v)| (k, mean(v.into_iter()))).collect(),
    }
}

/// JSON has no NaN: without items the value is 0 and the interval says that nothing is known.
fn finite(i: Interval) -> Interval {
    if i.value.is_finite() { i } else { Interval { value: 0.0, low: 0.0, high: 1.0 } }
}

fn length_scores(header: &Header, groups: &BTreeMap<Key, Vec<&Row>>) -> Vec<LengthScore> {
    let spec = &header.spec;
    let mut all = Vec::new();
    let mut order: Vec<usize> = (0..spec.lengths.len()).collect();
    order.sort_by_key(|&i| spec.lengths[i]);
    for &view in &spec.views {
        for &length in &order {
            let of = |strict: bool| -> Vec<Scored> {
                let rows = groups.iter().filter(|(k, _)| k.1 == length && k.2 == view);
                rows.flat_map(|(k, rows)| scored(k.0, &counts(rows), strict)).collect()
            };
            let (compatible, strict) = (of(false), of(true));
            let label = format!("all {} {view:?}", spec.lengths[length]);
            all.push(LengthScore {
                length_tokens: spec.lengths[length],
                view,
                n: strict.len(),
                compatible: finite(bootstrap::mean(&compatible, &label)),
                strict: finite(bootstrap::mean(&strict, &label)),
            });
        }
    }
    all
}

fn gaps(header: &Header, groups: &BTreeMap<Key, Vec<&Row>>) -> Vec<Gap> {
    let spec = &header.spec;
    if spec.views.len() < 2 {
        return Vec::new();
    }
    let mut all = Vec::new();
    for ((task, length, _), rows) in groups.iter().filter(|(k, _)| k.2 == View::Full) {
        let strict_of = |view: View| -> BTreeMap<u32, f64> {
            let rows = groups.get(&(*task, *length, view)).map_or(&[][..], |r| r);
            counts(rows).iter().filter_map(|r| Some((r.cell.index, r.score.as_ref()?.strict))).collect()
        };
        let (closed, focused, full) =
            (strict_of(View::ClosedBook), strict_of(View::Focused), strict_of(View::Full));
        let average = |m: &BTreeMap<u32, f64>| (!m.is_empty()).then(|| mean(m.values().copied()));
        let pairs: Vec<(f64, f64)> =
            full.iter().filter_map(|(i, full)| Some((*full, *focused.get(i)?))).collect();
        let label = format!("gap {task} {length} {}", rows.len());
        all.push(Gap {
            task: spec.tasks[*task].clone(),
            length_tokens: spec.lengths[*length],
            closed_book: average(&closed),
            focused: average(&focused),
            full: average(&full).unwrap_or(0.0),
            distraction: (!pairs.is_empty()).then(|| paired::compare(&pairs, &label).difference),
        });
    }
    all
}

fn serve(rows: &[&Row], header: &Header) -> Serving {
    let mut sessions: BTreeMap<u32, Vec<Request<'_>>> = BTreeMap::new();
    for row in rows {
        let request =
            Request { scheduled_us: row.scheduled_us, queued_us: row.queued_us, exchange: &row.exchange };
        sessions.entry(row.session).or_default().push(request);
    }
    let sessions: Vec<Vec<Request<'_>>> = sessions.into_values().collect();
    serving::summarise(&sessions, &header.spec.goals)
}

fn work(serving: &Serving, correct: f64) -> Work {
    Work {
        input_tokens: serving.total_input_tokens,
        cached_tokens: serving.cached_share.unwrap_or(0.0) * serving.total_input_tokens,
        output_tokens: serving.total_output_tokens,
        seconds: 0.0,
        correct,
    }
}

fn in_flight_us(rows: &[&Row]) -> f64 {
    rows.iter().map(|r| r.exchange.end_us.saturating_sub(r.exchange.sent_us) as f64).sum()
}

/// Share of the time in flight: how a run's hours are split over its lengths.
fn busy_share(part: &[&Row], all: &[&Row]) -> f64 {
    let total = in_flight_us(all);
    if total > 0.0 { in_flight_us(part) / total } else { 0.0 }
}

fn total_seconds(rows: &[&Row]) -> f64 {
    let mut spans: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for row in rows {
        let start = row.scheduled_us.unwrap_or(row.exchange.sent_us);
        let span = spans.entry(row.session).or_insert((start, row.exchange.end_us));
        *span = (span.0.min(start), span.1.max(row.exchange.end_us));
    }
    spans.values().map(|(a, b)| (b - a) as f64 / 1e6).sum()
}

fn invalid(header: &Header, rows: &Rows, serving: &Serving) -> Vec<String> {
    let mut why = Vec::new();
    match (&header.proof, header.spec.read_proof) {
        (Some(proof), _) => why.extend(proof.invalid.clone()),
        (None, true) => why.push("the read-proof was not made".into()),
        (None, false) => {}
    }
    let wanted: BTreeSet<Cell> = header.spec.cells().into_iter().collect();
    let ended = |c: &&Cell| rows.last.get(*c).is_some_and(|&at| rows.all[at].ends_item());
    let open = wanted.iter().filter(|c| !ended(c)).count();
    if open > 0 {
        let fault = rows.all.iter().rev().find_map(|r| r.exchange.fault.as_ref());
        let fault = fault.map_or("the run has not come to its end".into(), |f| format!("last fault: {f}"));
        why.push(format!("{open} of {} items have no answer ({fault})", wanted.len()));
    }
    let cut = rows.last.values().filter(|&&at| rows.all[at].outcome == Outcome::CutPrompt).count();
    if cut > 0 {
        why.push(format!("the endpoint cut {cut} prompts"));
    }
    let lag = serving.times.get("client_lag_ms").and_then(|s| s.p(99.0)).map(|p| p.value);
    if let Some(lag) = lag.filter(|l| *l > CLIENT_LAG_MS_MAX) {
        why.push(format!(
            "the client sent {lag:.1} ms late (P99; at most {CLIENT_LAG_MS_MAX} ms): it measured itself"
        ));
    }
    why
}

fn warnings(header: &Header, cells: &[CellScore], serving: &Serving) -> Vec<String> {
    let mut all = Vec::new();
    match (header.spec.cache, serving.cached_share) {
        (CacheState::Cold, Some(s)) if s > SHARE.0 => {
            all.push(format!("declared cold, but {:.1} % of prompt tokens came from a cache", s * 100.0));
        }
        (CacheState::Warm, Some(s)) if s < SHARE.1 => {
            all.push(format!(
                "declared warm, but only {:.1} % of prompt tokens came from a cache",
                s * 100.0
            ));
        }
        (state, None) => all.push(format!(
            "declared {}; the endpoint does not say how many prompt tokens came from a cache",
            state.name()
        )),
        _ => {}
    }
    let cut: usize = cells.iter().map(|c| c.cut_answer).sum();
    if cut > 0 {
        all.push(format!("{cut} answers were cut by the limit before they were right: they count neither as right nor as wrong"));
    }
    let over: usize = cells.iter().map(|c| c.overflow).sum();
    if over > 0 {
        all.push(format!("{over} prompts did not fit the endpoint's context"));
    }
    if serving.tokens_guessed > 0 {
        all.push(format!(
            "{} requests without a count of tokens: a chunk was taken as one",
            serving.tokens_guessed
        ));
    }
    if header.sessions.len() > 1 {
        all.push(format!("made in {} sessions; times between them are left out", header.sessions.len()));
    }
    if !header.spec.read_proof {
        all.push("made without a read-proof".into());
    }
    let unknown: Vec<&str> =
        header.conditions.0.iter().filter(|(_, c)| c.reason.is_some()).map(|(n, _)| n.as_str()).collect();
    if !unknown.is_empty() {
        all.push(format!("unknown conditions: {}", unknown.join(", ")));
    }
    all
}

fn verdict(report: &Report) -> Vec<String> {
    if !report.valid {
        return vec!["INVALID: no number of this run may be used".into()];
    }
    let mut all = Vec::new();
    if let Some(proof) = &report.run.proof {
        all.push(format!("at {} tokens, {}", proof.length_tokens, proof.verdict));
    }
    for (reading, list) in [("upstream", &report.effective_compatible), ("strict", &report.effective_strict)]
    {
        for e in list {
            let tokens = |t: Option<usize>| t.map_or("none".into(), |t| format!("{t} tokens"));
            all.push(format!(
                "effective length, {reading} scores, {} threshold {:.1}: {} on the lower bound ({} on the plain mean)",
                e.kind,
                e.threshold * 100.0,
                tokens(e.certified_tokens),
                tokens(e.plain_tokens)
            ));
        }
    }
    for name in ["ttft_schedule_ms", "ttft_ms", "tpot_ms"] {
        let Some(times) = report.serving.times.get(name) else { continue };
        let most = times.percentiles.iter().rev().find_map(|p| Some((p.p, p.certified?)));
        all.push(match most {
            Some((p, bound)) => format!("{name}: P{p} certified at or below {bound:.1} (n = {})", times.n),
            None => format!("{name}: no percentile certified (n = {})", times.n),
        });
    }
    all
}

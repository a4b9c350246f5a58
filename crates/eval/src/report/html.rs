//! The report as one HTML page: verdict first, then curves, heat maps, failures, tables, conditions. Nothing is loaded from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::markdown::{condition, percentile, score, view};
use super::summary::{DEPTH_BANDS, Report};
use super::svg::{self, HUES, Series, escape};
use crate::item::View;
use crate::stats::effective;

const STYLE: &str = "
:root{color-scheme:light}
body{margin:0;background:#f5f7fa;color:#1f2933;font:14px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:32px 0 10px}
.sub{color:#616e7c;margin:0 0 16px}
.card{background:#fff;border:1px solid #e4e7eb;border-radius:8px;padding:16px 18px;margin:12px 0;overflow-x:auto}
.grid{display:flex;flex-wrap:wrap;gap:18px 26px}
.badge{display:inline-block;border-radius:999px;padding:2px 12px;font-weight:600;font-size:13px;color:#fff;vertical-align:4px;margin-left:10px}
.ok{background:#1a7f5a}.bad{background:#b23a48}
.tiles{display:flex;flex-wrap:wrap;gap:12px}.tile{flex:1 1 190px;background:#fff;border:1px solid #e4e7eb;border-radius:8px;padding:12px 16px}
.tile b{display:block;font-size:22px;font-variant-numeric:tabular-nums}.tile span{color:#616e7c;font-size:12px}
ul{margin:6px 0;padding-left:20px}.warn li{color:#8d5a00}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}
th{text-align:left;color:#616e7c;font-weight:600;border-bottom:1px solid #cbd2d9;padding:4px 14px 4px 0;white-space:nowrap}
td{border-bottom:1px solid #eef1f4;padding:4px 14px 4px 0;vertical-align:top}td.n{text-align:right;white-space:nowrap}
code{background:#eef1f4;border-radius:4px;padding:1px 5px;font-size:12.5px;overflow-wrap:anywhere}
";

fn table(out: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let _ = write!(out, "<div class=\"card\"><table><tr>");
    for h in head {
        let _ = write!(out, "<th>{}</th>", escape(h));
    }
    out.push_str("</tr>");
    for row in rows {
        out.push_str("<tr>");
        for (i, cell) in row.iter().enumerate() {
            let class = if i > 0 && cell.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
                " class=\"n\""
            } else {
                ""
            };
            let _ = write!(out, "<td{class}>{}</td>", escape(cell));
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>");
}

fn list(out: &mut String, class: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    let _ = write!(out, "<ul class=\"{class}\">");
    for l in lines {
        let _ = write!(out, "<li>{}</li>", escape(l));
    }
    out.push_str("</ul>");
}

fn lengths(r: &Report) -> Vec<usize> {
    r.lengths.iter().map(|l| l.length_tokens).collect::<BTreeSet<_>>().into_iter().collect()
}

fn head(r: &Report, out: &mut String) {
    let text =
        |name: &str| r.run.conditions.get(name).map(|v| v.as_str().map_or(v.to_string(), str::to_owned));
    let model = text("model").unwrap_or_else(|| "a model".into());
    let (class, word) = if r.valid { ("ok", "valid") } else { ("bad", "INVALID") };
    let _ = write!(out, "<h1>{}<span class=\"badge {class}\">{word}</span></h1>", escape(&model));
    let sub =
        [text("server_version"), text("device"), text("kv_dtype").map(|k| format!("keys and values in {k}"))];
    let sub: Vec<String> = sub.into_iter().flatten().collect();
    let _ = write!(
        out,
        "<p class=\"sub\">{} · pack {} · {} tasks</p>",
        escape(&sub.join(" · ")),
        r.run.pack,
        r.run.spec.tasks.len()
    );
    tiles(r, out);
    out.push_str("<div class=\"card\">");
    list(out, "", &r.invalid);
    list(out, "", &r.verdict);
    list(out, "warn", &r.warnings);
    let _ = write!(out, "<p>Again: <code>{}</code></p></div>", escape(&r.run.reproduce));
}

fn tiles(r: &Report, out: &mut String) {
    let certified = |list: &[effective::Effective], kind: &str| {
        let of = list.iter().find(|e| e.kind == kind).and_then(|e| e.certified_tokens);
        of.map_or("none".to_owned(), svg::tokens)
    };
    let full = r.lengths.iter().filter(|l| l.view == View::Full).max_by_key(|l| l.length_tokens);
    let mut tile = |value: String, what: &str| {
        let _ =
            write!(out, "<div class=\"tile\"><b>{}</b><span>{}</span></div>", escape(&value), escape(what));
    };
    out_tiles_open(&mut tile, full.map(|l| (l.strict.value, l.length_tokens)));
    tile(certified(&r.effective_strict, "absolute"), "effective length, strict, lower bound over 85.6");
    tile(certified(&r.effective_strict, "relative"), "effective length, strict, 85 % of own base");
    let time = |name: &str| {
        r.serving
            .times
            .get(name)
            .and_then(|t| t.p(50.0))
            .map_or("–".into(), |p| format!("{:.1} ms", p.value))
    };
    tile(time("ttft_ms"), "median time to first token");
    tile(time("tpot_ms"), "median time per output token");
}

fn out_tiles_open(tile: &mut impl FnMut(String, &str), longest: Option<(f64, usize)>) {
    if let Some((score, length)) = longest {
        tile(format!("{:.1}", score * 100.0), &format!("strict score at {} tokens", svg::tokens(length)));
    }
}

fn charts(r: &Report, out: &mut String) {
    let xs = lengths(r);
    out.push_str("<h2>Score by length</h2><div class=\"card\"><div class=\"grid\">");
    let of = |name: &str, v: View, f: fn(&super::summary::LengthScore) -> crate::stats::Interval| {
        let points = r.lengths.iter().filter(|l| l.view == v && l.n > 0).map(|l| (l.length_tokens, f(l)));
        let points = points.map(|(n, i)| (n, i.low, i.value, i.high)).collect();
        Series { name: name.into(), points }
    };
    let mut series =
        vec![of("strict", View::Full, |l| l.strict), of("upstream", View::Full, |l| l.compatible)];
    for v in r.run.spec.views.iter().filter(|v| **v != View::Full) {
        series.push(of(view(*v), *v, |l| l.strict));
    }
    series.retain(|s| !s.points.is_empty());
    let threshold = Some(effective::ABSOLUTE);
    out.push_str(&svg::curves("All tasks, mean with 95 % interval", &xs, &series, threshold, (620.0, 300.0)));
    out.push_str(&svg::heat_map(
        "All tasks, strict score by depth of what is needed",
        &xs,
        &depth_columns(r, &xs, None),
    ));
    out.push_str(
        "</div></div><h2>Length × depth, by task (strict)</h2><div class=\"card\"><div class=\"grid\">",
    );
    let with_depth =
        |task: &str| r.cells.iter().any(|c| c.task == task && c.by_depth.iter().any(|d| d.0 > 0));
    for task in r.run.spec.tasks.iter().filter(|t| with_depth(t)) {
        out.push_str(&svg::heat_map(task, &xs, &depth_columns(r, &xs, Some(task))));
    }
    out.push_str("</div></div><h2>Tasks over length (strict)</h2><div class=\"card\"><div class=\"grid\">");
    for task in &r.run.spec.tasks {
        let mut points: Vec<_> = r
            .cells
            .iter()
            .filter(|c| c.task == *task && c.view == View::Full && c.n > 0)
            .map(|c| (c.length_tokens, c.strict.low, c.strict.value, c.strict.high))
            .collect();
        points.sort_by_key(|p| p.0);
        let series = [Series { name: task.clone(), points }];
        out.push_str(&svg::curves(task, &xs, &series, None, (240.0, 150.0)));
    }
    out.push_str("</div></div>");
    failures(r, out);
}

/// By length: items and mean of each band of depth, of one task or of all.
fn depth_columns(r: &Report, xs: &[usize], task: Option<&str>) -> Vec<Vec<(usize, f64)>> {
    let one = |&length: &usize| {
        let mut bands = vec![(0usize, 0.0); DEPTH_BANDS];
        let cells = r.cells.iter().filter(|c| c.length_tokens == length && c.view == View::Full);
        for cell in cells.filter(|c| task.is_none_or(|t| c.task == t)) {
            for (band, (n, mean)) in bands.iter_mut().zip(&cell.by_depth) {
                band.0 += n;
                band.1 += mean * *n as f64;
            }
        }
        bands.into_iter().map(|(n, sum)| (n, if n == 0 { 0.0 } else { sum / n as f64 })).collect()
    };
    xs.iter().map(one).collect()
}

fn failures(r: &Report, out: &mut String) {
    let full = || r.cells.iter().filter(|c| c.view == View::Full);
    let mut kinds: BTreeSet<String> = full().flat_map(|c| c.failures.keys().cloned()).collect();
    let extra = [
        ("cut answer", full().any(|c| c.cut_answer > 0)),
        ("no answer", full().any(|c| c.failed > 0)),
        ("overflow", full().any(|c| c.overflow > 0)),
    ];
    kinds.extend(extra.iter().filter(|(_, any)| *any).map(|(k, _)| (*k).to_owned()));
    let mut hues = vec![("right".to_owned(), "#cfe8dc".to_owned())];
    hues.extend(kinds.iter().enumerate().map(|(i, k)| (k.clone(), HUES[(i + 1) % HUES.len()].to_owned())));
    let mut rows = Vec::new();
    for c in full() {
        let all = (c.n + c.cut_answer + c.failed + c.overflow + c.cut_prompt).max(1) as f64;
        let mut parts: BTreeMap<String, usize> = c.failures.clone();
        parts.extend([
            ("cut answer".to_owned(), c.cut_answer),
            ("no answer".to_owned(), c.failed),
            ("overflow".to_owned(), c.overflow),
        ]);
        let wrong: usize = c.failures.values().sum();
        let mut shares = vec![("right".to_owned(), c.n.saturating_sub(wrong) as f64 / all)];
        shares.extend(parts.into_iter().filter(|(_, n)| *n > 0).map(|(k, n)| (k, n as f64 / all)));
        rows.push((format!("{} {}", c.task, svg::tokens(c.length_tokens)), shares));
    }
    let _ = write!(
        out,
        "<h2>How answers failed</h2><div class=\"card\">{}</div>",
        svg::bars("Share of items by what became of them", &rows, &hues, 980.0)
    );
}

fn tables(r: &Report, out: &mut String) {
    let percent = |x: f64| format!("{:.1}", x * 100.0);
    out.push_str("<h2>Scores by task</h2>");
    table(
        out,
        &[
            "task",
            "length",
            "view",
            "n",
            "upstream",
            "strict",
            "cut as miss",
            "chance",
            "cut",
            "failed",
            "overflow",
        ],
        r.cells.iter().map(|c| {
            vec![
                c.task.clone(),
                c.length_tokens.to_string(),
                view(c.view).into(),
                c.n.to_string(),
                score(&c.compatible),
                score(&c.strict),
                percent(c.cut_as_miss),
                percent(c.chance),
                c.cut_answer.to_string(),
                c.failed.to_string(),
                c.overflow.to_string(),
            ]
        }),
    );
    if !r.gaps.is_empty() {
        out.push_str("<h2>Three views of the same items (strict)</h2>");
        let some = |x: Option<f64>| x.map_or("–".into(), |x| format!("{:.1}", x * 100.0));
        table(
            out,
            &["task", "length", "closed book", "focused", "full", "distraction gap (focused − full)"],
            r.gaps.iter().map(|g| {
                let gap = g.distraction.as_ref().map_or("–".into(), score);
                vec![
                    g.task.clone(),
                    g.length_tokens.to_string(),
                    some(g.closed_book),
                    some(g.focused),
                    some(Some(g.full)),
                    gap,
                ]
            }),
        );
    }
    serving(r, out);
    out.push_str("<h2>Conditions</h2>");
    table(
        out,
        &["name", "value", "said by"],
        r.run.conditions.0.iter().map(|(name, c)| vec![name.clone(), condition(c), c.source.clone()]),
    );
}

fn serving(r: &Report, out: &mut String) {
    out.push_str("<h2>Serving, by length</h2>");
    let p = |s: &crate::stats::serving::Serving, name: &str, p: f64| {
        s.times.get(name).and_then(|t| Some(percentile(t.p(p)?, t.n))).unwrap_or_else(|| "–".into())
    };
    table(
        out,
        &[
            "length",
            "answered",
            "failed",
            "TTFT P50 ms",
            "TTFT P99 ms",
            "TPOT P50 ms",
            "TPOT P99 ms",
            "cached share",
            "cost a correct answer",
        ],
        r.serving_by_length.iter().map(|l| {
            let s = &l.serving;
            let cost = l.cost.first().and_then(|c| c.per_correct_answer);
            vec![
                l.length_tokens.to_string(),
                s.completed.to_string(),
                s.failed.to_string(),
                p(s, "ttft_ms", 50.0),
                p(s, "ttft_ms", 99.0),
                p(s, "tpot_ms", 50.0),
                p(s, "tpot_ms", 99.0),
                s.cached_share.map_or("unknown".into(), |c| format!("{:.1} %", c * 100.0)),
                cost.map_or("–".into(), |c| format!("{c:.6}")),
            ]
        }),
    );
    let s = &r.serving;
    let _ = write!(
        out,
        "<p class=\"sub\">{:.1} s, {:.2} requests/s, {:.1} answer tokens/s, {:.2} requests in flight on average and {} at most. A percentile is printed only where the sample carries it (99 % confidence).</p>",
        s.duration, s.request_throughput, s.output_throughput, s.concurrency, s.concurrency_max
    );
    out.push_str("<h2>One log, five readings</h2>");
    table(
        out,
        &["tool", "word", "formula", "mean ms", "P50 ms", "P99 ms"],
        s.readings.iter().map(|x| {
            vec![
                x.tool.clone(),
                x.metric.clone(),
                x.formula.clone(),
                format!("{:.3}", x.mean_ms),
                format!("{:.3}", x.p50_ms),
                format!("{:.3}", x.p99_ms),
            ]
        }),
    );
    for c in &r.cost {
        let per =
            c.per_correct_answer.map_or("no correct answer".into(), |p| format!("{p:.6} a correct answer"));
        let _ = write!(out, "<p class=\"sub\">Cost by {}: {:.6}; {per}.</p>", escape(&c.by), c.total);
    }
}

/// The whole page.
pub fn render(r: &Report) -> String {
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>Evidence</title><style>{STYLE}</style></head><body><main>"
    );
    head(r, &mut out);
    charts(r, &mut out);
    tables(r, &mut out);
    out.push_str("</main></body></html>\n");
    out
}

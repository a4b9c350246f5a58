//! The report as Markdown: what a reader needs first, in tables.

use super::summary::Report;
use crate::item::View;
use crate::stats::Interval;

/// A score in percent with its interval.
pub fn score(i: &Interval) -> String {
    format!("{:.1} [{:.1}, {:.1}]", i.value * 100.0, i.low * 100.0, i.high * 100.0)
}

/// A view's name.
pub fn view(v: View) -> &'static str {
    match v {
        View::ClosedBook => "closed book",
        View::Focused => "focused",
        View::Full => "full",
    }
}

/// A condition's value, or why it is unknown.
pub fn condition(c: &crate::conditions::Condition) -> String {
    match (&c.reason, &c.value) {
        (Some(reason), _) => format!("unknown: {reason}"),
        (None, serde_json::Value::String(s)) => s.clone(),
        (None, other) => other.to_string(),
    }
}

/// How a percentile reads: with its bound where there is one.
pub fn percentile(p: &crate::stats::percentile::Percentile, n: usize) -> String {
    match p.certified {
        Some(bound) => format!("{:.2} (≤ {bound:.2})", p.value),
        None => format!("not certified (n={n})"),
    }
}

fn head(r: &Report, out: &mut String) {
    let model = r.run.conditions.get("model").map(|m| m.to_string()).unwrap_or_default();
    *out += &format!("# Evidence: {}\n\n", model.trim_matches('"'));
    *out += if r.valid { "**Valid.**\n\n" } else { "**INVALID.**\n\n" };
    for line in r.invalid.iter().chain(&r.verdict) {
        *out += &format!("- {line}\n");
    }
    if !r.warnings.is_empty() {
        *out += "\nTo know:\n";
        r.warnings.iter().for_each(|w| *out += &format!("- {w}\n"));
    }
    *out += &format!("\nAgain: `{}` (pack {})\n", r.run.reproduce, r.run.pack);
}

fn quality(r: &Report, out: &mut String) {
    *out += "\n## Score by length\nMean of the tasks' means, in percent, with 95 % intervals.\n\n| length | view | n | upstream | strict |\n|---|---|---|---|---|\n";
    for l in &r.lengths {
        *out += &format!(
            "| {} | {} | {} | {} | {} |\n",
            l.length_tokens,
            view(l.view),
            l.n,
            score(&l.compatible),
            score(&l.strict)
        );
    }
    *out += "\n## Score by task\n\n| task | length | view | n | upstream | strict | chance | cut answers | cut prompts | overflow | failed | failures |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for c in &r.cells {
        let failures: Vec<String> = c.failures.iter().map(|(k, n)| format!("{k} {n}")).collect();
        *out += &format!(
            "| {} | {} | {} | {} | {} | {} | {:.1} | {} | {} | {} | {} | {} |\n",
            c.task,
            c.length_tokens,
            view(c.view),
            c.n,
            score(&c.compatible),
            score(&c.strict),
            c.chance * 100.0,
            c.cut_answer,
            c.cut_prompt,
            c.overflow,
            c.failed,
            failures.join(", ")
        );
    }
    if r.gaps.is_empty() {
        return;
    }
    *out += "\n## Three views\nThe same items, strict scores: closed book is knowledge, focused is skill, focused less full is what length and distraction cost.\n\n| task | length | closed book | focused | full | distraction gap |\n|---|---|---|---|---|---|\n";
    let percent = |x: Option<f64>| x.map_or("–".into(), |x| format!("{:.1}", x * 100.0));
    for g in &r.gaps {
        let gap = g.distraction.as_ref().map_or("–".into(), score);
        let (closed, focused) = (percent(g.closed_book), percent(g.focused));
        *out += &format!(
            "| {} | {} | {closed} | {focused} | {} | {gap} |\n",
            g.task,
            g.length_tokens,
            percent(Some(g.full))
        );
    }
}

fn serving(r: &Report, out: &mut String) {
    let s = &r.serving;
    *out += &format!(
        "\n## Serving\n{} requests answered, {} failed, {:.1} s; {:.0} prompt and {:.0} answer tokens; {:.2} requests/s, {:.1} answer tokens/s; {:.2} in flight on average, {} at most; cached share {}.\n",
        s.completed,
        s.failed,
        s.duration,
        s.total_input_tokens,
        s.total_output_tokens,
        s.request_throughput,
        s.output_throughput,
        s.concurrency,
        s.concurrency_max,
        s.cached_share.map_or("unknown".into(), |c| format!("{:.1} %", c * 100.0)),
    );
    if let Some(g) = &s.goodput {
        *out += &format!("\nGoodput: {:.3} requests/s, {:.1} % of all.\n", g.per_second, g.share * 100.0);
    }
    *out += "\n| | n | mean | std | P50 | P90 | P99 |\n|---|---|---|---|---|---|---|\n";
    for (name, t) in &s.times {
        let p = |p: f64| t.p(p).map_or(String::new(), |x| percentile(x, t.n));
        *out += &format!(
            "| {name} | {} | {:.2} | {:.2} | {} | {} | {} |\n",
            t.n,
            t.mean,
            t.std,
            p(50.0),
            p(90.0),
            p(99.0)
        );
    }
    if !s.readings.is_empty() {
        *out += "\nThe same log as other tools read it (milliseconds):\n\n| tool | word | formula | mean | P50 | P99 |\n|---|---|---|---|---|---|\n";
    }
    for x in &s.readings {
        *out += &format!(
            "| {} | {} | {} | {:.3} | {:.3} | {:.3} |\n",
            x.tool, x.metric, x.formula, x.mean_ms, x.p50_ms, x.p99_ms
        );
    }
    for c in &r.cost {
        let per =
            c.per_correct_answer.map_or("no correct answer".into(), |p| format!("{p:.6} a correct answer"));
        *out += &format!("\nCost by {}: {:.6}, {per}.\n", c.by, c.total);
    }
}

/// The whole report.
pub fn render(r: &Report) -> String {
    let mut out = String::new();
    head(r, &mut out);
    quality(r, &mut out);
    serving(r, &mut out);
    out += "\n## Conditions\n\n| name | value | from |\n|---|---|---|\n";
    for (name, c) in &r.run.conditions.0 {
        out +=
            &format!("| {name} | {} | {} |\n", condition(c).replace('|', "\\|").replace('\n', " "), c.source);
    }
    out
}

//! The cells as a table for spreadsheets.

use super::summary::Report;

fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// One line a cell.
pub fn render(report: &Report) -> String {
    let mut out = String::from(
        "task,length_tokens,view,n,compatible,compatible_low,compatible_high,strict,strict_low,strict_high,cut_as_miss,chance,cut_answer,cut_prompt,overflow,failed,failures\n",
    );
    for c in &report.cells {
        let failures: Vec<String> = c.failures.iter().map(|(k, n)| format!("{k}={n}")).collect();
        let view = serde_json::to_value(c.view).ok().and_then(|v| v.as_str().map(str::to_owned));
        out += &format!(
            "{},{},{},{},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{},{},{},{},{}\n",
            quoted(&c.task),
            c.length_tokens,
            view.unwrap_or_default(),
            c.n,
            c.compatible.value,
            c.compatible.low,
            c.compatible.high,
            c.strict.value,
            c.strict.low,
            c.strict.high,
            c.cut_as_miss,
            c.chance,
            c.cut_answer,
            c.cut_prompt,
            c.overflow,
            c.failed,
            quoted(&failures.join(" ")),
        );
    }
    out
}

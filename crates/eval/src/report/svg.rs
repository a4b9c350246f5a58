//! Small charts as SVG text: heat maps, curves with bands, stacked bars. Each stands alone: no style sheet, no script, no font file.

use std::fmt::Write;

/// Text made safe for markup.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Viridis at five points: even steps for the eye, and for eyes that see fewer colours.
const RAMP: [(f64, f64, f64); 5] =
    [(68.0, 1.0, 84.0), (59.0, 82.0, 139.0), (33.0, 145.0, 140.0), (94.0, 201.0, 98.0), (253.0, 231.0, 37.0)];
/// Colours of series and of kinds of failure.
pub const HUES: [&str; 9] =
    ["#2166ac", "#d6604d", "#1a9850", "#984ea3", "#e08214", "#35978f", "#c51b7d", "#8c510a", "#636363"];
const INK: &str = "#1f2933";
const MUTED: &str = "#7b8794";
const GRID: &str = "#e4e7eb";

fn ramp(share: f64) -> (String, &'static str) {
    let at = share.clamp(0.0, 1.0) * (RAMP.len() - 1) as f64;
    let i = (at as usize).min(RAMP.len() - 2);
    let (a, b, t) = (RAMP[i], RAMP[i + 1], at - i as f64);
    let mix = |x: f64, y: f64| x + (y - x) * t;
    let (r, g, b) = (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2));
    let light = 0.299 * r + 0.587 * g + 0.114 * b;
    (format!("rgb({r:.0},{g:.0},{b:.0})"), if light > 140.0 { "#111" } else { "#fff" })
}

/// 512, 4k, 128k, 1M; other numbers as they are.
pub fn tokens(n: usize) -> String {
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{}k", n >> 10),
        n => n.to_string(),
    }
}

/// Opens a chart of a size.
fn open(width: f64, height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{0}\" font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\" font-size=\"11\"><title>{0}</title>",
        escape(title)
    )
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, colour: &str, what: &str) {
    let _ = write!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{}</text>",
        escape(what)
    );
}

/// Columns are lengths, rows are bands of depth; a cell holds items and a mean in 0 ..= 1.
pub fn heat_map(title: &str, lengths: &[usize], columns: &[Vec<(usize, f64)>]) -> String {
    let bands = columns.iter().map(Vec::len).max().unwrap_or(0);
    let (left, top, w, h) = (62.0, 28.0, 46.0, 22.0);
    let (width, height) = (left + w * lengths.len() as f64 + 8.0, top + h * bands as f64 + 24.0);
    let mut out = open(width.max(150.0), height, title);
    let _ = write!(
        out,
        "<text x=\"0\" y=\"14\" font-weight=\"600\" font-size=\"12\" fill=\"{INK}\">{}</text>",
        escape(title)
    );
    for band in 0..bands {
        let y = top + h * band as f64;
        let label = format!("{}–{} %", 100 * band / bands, 100 * (band + 1) / bands);
        text(&mut out, left - 6.0, y + h / 2.0 + 4.0, "end", MUTED, &label);
        for (i, column) in columns.iter().enumerate() {
            let x = left + w * i as f64;
            let (n, mean) = column.get(band).copied().unwrap_or((0, 0.0));
            let (fill, ink) = if n == 0 { ("#f1f3f5".to_owned(), MUTED) } else { ramp(mean) };
            let label = if n == 0 { "·".to_owned() } else { format!("{:.0}", mean * 100.0) };
            let _ = write!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\" fill=\"{fill}\"><title>{} tokens, depth {} %: {:.1} (n={n})</title></rect>",
                w - 2.0,
                h - 2.0,
                lengths[i],
                100 * band / bands,
                mean * 100.0
            );
            text(&mut out, x + w / 2.0 - 1.0, y + h / 2.0 + 3.0, "middle", ink, &label);
        }
    }
    for (i, &length) in lengths.iter().enumerate() {
        let x = left + w * (i as f64 + 0.5) - 1.0;
        text(&mut out, x, top + h * bands as f64 + 13.0, "middle", MUTED, &tokens(length));
    }
    out + "</svg>"
}

/// One line of a chart: name, and (length, low, value, high) in 0 ..= 1.
pub struct Series {
    /// Name.
    pub name: String,
    /// Points, shortest length first.
    pub points: Vec<(usize, f64, f64, f64)>,
}

/// Scores over length, each length a step, with bands and a threshold.
pub fn curves(
    title: &str,
    lengths: &[usize],
    series: &[Series],
    threshold: Option<f64>,
    size: (f64, f64),
) -> String {
    let (width, height) = size;
    let (left, right, top, bottom) = (38.0, 14.0, 30.0, 26.0 + 16.0 * (series.len() > 1) as usize as f64);
    let x = |length: usize| {
        let at = lengths.iter().position(|&l| l == length).unwrap_or(0) as f64;
        let steps = lengths.len().saturating_sub(1).max(1) as f64;
        let shift = if lengths.len() == 1 { 0.5 } else { at / steps };
        left + (width - left - right) * shift
    };
    let y = |score: f64| top + (height - top - bottom) * (1.0 - score.clamp(0.0, 1.0));
    let mut out = open(width, height, title);
    let _ = write!(
        out,
        "<text x=\"0\" y=\"14\" font-weight=\"600\" font-size=\"12\" fill=\"{INK}\">{}</text>",
        escape(title)
    );
    for step in 0..=4 {
        let at = f64::from(step) / 4.0;
        let _ = write!(
            out,
            "<line x1=\"{left}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"{GRID}\"/>",
            width - right,
            y(at)
        );
        text(&mut out, left - 6.0, y(at) + 4.0, "end", MUTED, &format!("{:.0}", at * 100.0));
    }
    for &length in lengths {
        text(&mut out, x(length), height - bottom + 15.0, "middle", MUTED, &tokens(length));
    }
    if let Some(t) = threshold {
        let _ = write!(
            out,
            "<line x1=\"{left}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"#b23a48\" stroke-dasharray=\"5 4\"/>",
            width - right,
            y(t)
        );
        text(&mut out, width - right, y(t) - 4.0, "end", "#b23a48", &format!("{:.1}", t * 100.0));
    }
    for (i, s) in series.iter().enumerate() {
        curve(&mut out, s, HUES[i % HUES.len()], &x, &y);
    }
    if series.len() > 1 {
        let names: Vec<(&str, &str)> =
            series.iter().enumerate().map(|(i, s)| (HUES[i % HUES.len()], s.name.as_str())).collect();
        legend(&mut out, left, height - 5.0, &names);
    }
    out + "</svg>"
}

/// One series: its band, its line, and its points with their intervals.
fn curve(out: &mut String, s: &Series, hue: &str, x: &impl Fn(usize) -> f64, y: &impl Fn(f64) -> f64) {
    let upper: Vec<String> = s.points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.3))).collect();
    let lower: Vec<String> = s.points.iter().rev().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1))).collect();
    let _ = write!(
        out,
        "<polygon points=\"{} {}\" fill=\"{hue}\" opacity=\"0.15\"/>",
        upper.join(" "),
        lower.join(" ")
    );
    let line: Vec<String> = s.points.iter().map(|p| format!("{:.1},{:.1}", x(p.0), y(p.2))).collect();
    let _ = write!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{hue}\" stroke-width=\"2\"/>",
        line.join(" ")
    );
    for p in &s.points {
        let _ = write!(
            out,
            "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{2:.1}\" stroke=\"{hue}\" opacity=\"0.5\"/><circle cx=\"{0:.1}\" cy=\"{3:.1}\" r=\"3\" fill=\"{hue}\"><title>{4} at {5} tokens: {6:.1} [{7:.1}, {8:.1}]</title></circle>",
            x(p.0),
            y(p.1),
            y(p.3),
            y(p.2),
            escape(&s.name),
            p.0,
            p.2 * 100.0,
            p.1 * 100.0,
            p.3 * 100.0
        );
    }
}

fn legend(out: &mut String, left: f64, y: f64, names: &[(&str, &str)]) {
    let mut x = left;
    for (hue, name) in names {
        let _ = write!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"9\" height=\"9\" rx=\"2\" fill=\"{hue}\"/>",
            y - 8.0
        );
        text(out, x + 13.0, y, "start", INK, name);
        x += 26.0 + 6.2 * name.chars().count() as f64;
    }
}

/// Stacked shares, one bar a row: (label, parts), each part (kind, share of 0 ..= 1).
pub fn bars(
    title: &str,
    rows: &[(String, Vec<(String, f64)>)],
    kinds: &[(String, String)],
    width: f64,
) -> String {
    let (left, top, h) = (190.0, 44.0, 18.0);
    let height = top + h * rows.len() as f64 + 8.0;
    let mut out = open(width, height, title);
    let _ = write!(
        out,
        "<text x=\"0\" y=\"14\" font-weight=\"600\" font-size=\"12\" fill=\"{INK}\">{}</text>",
        escape(title)
    );
    let names: Vec<(&str, &str)> = kinds.iter().map(|(k, hue)| (hue.as_str(), k.as_str())).collect();
    legend(&mut out, left, 34.0, &names);
    for (i, (label, parts)) in rows.iter().enumerate() {
        let y = top + h * i as f64;
        text(&mut out, left - 6.0, y + h / 2.0 + 4.0, "end", INK, label);
        let mut x = left;
        for (kind, share) in parts {
            let w = (width - left - 8.0) * share;
            let hue = kinds.iter().find(|(k, _)| k == kind).map_or(MUTED, |(_, hue)| hue);
            let _ = write!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{w:.1}\" height=\"{:.1}\" fill=\"{hue}\"><title>{}: {} {:.1} %</title></rect>",
                y + 1.0,
                h - 3.0,
                escape(label),
                escape(kind),
                share * 100.0
            );
            x += w;
        }
    }
    out + "</svg>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_the_markup() {
        let map = heat_map("<script>\"&", &[1024], &[vec![(1, 0.5); 5]]);
        assert!(!map.contains("<script>") && map.contains("&lt;script&gt;") && map.ends_with("</svg>"));
    }

    #[test]
    fn lengths_are_short_where_they_are_round() {
        assert_eq!([512, 4096, 131_072, 1 << 20, 5000].map(tokens), ["512", "4k", "128k", "1M", "5000"]);
    }

    #[test]
    fn empty_charts_are_still_charts() {
        for svg in
            [heat_map("x", &[], &[]), curves("x", &[], &[], None, (200.0, 100.0)), bars("x", &[], &[], 300.0)]
        {
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && !svg.contains("NaN"));
        }
    }
}

//! The ledgers as people and programs read them: aligned tables, and JSON with stable keys.
//!
//! Formats numbers that other files of this crate computed, and parses sizes; computes nothing else.

mod cache;
mod kernel;

pub use cache::CacheReport;
pub use kernel::{Cost, KernelReport, KernelRequest, MachineFloors, MaskReport, PlainCost};

use suanpan_base::BadArgument;

/// `1234567` as `1,234,567`.
pub fn digits(n: u64) -> String {
    let plain = n.to_string();
    let mut out = String::with_capacity(plain.len() + plain.len() / 3);
    for (i, c) in plain.chars().enumerate() {
        if i > 0 && (plain.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Bytes in the largest binary unit that leaves at least 1: `512 MiB`, `1.50 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (n.max(1).ilog2() / 10) as usize;
    let size = 1u64 << (10 * unit);
    if n.is_multiple_of(size) {
        format!("{} {}", digits(n / size), UNITS[unit])
    } else {
        format!("{:.2} {}", n as f64 / size as f64, UNITS[unit])
    }
}

/// Microseconds in a unit that is easy to read.
pub fn time(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{us:.2} us"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

/// A size such as `80GiB`, `512MB` or `1048576` in bytes. Whole numbers only; KiB = 1024 bytes, KB = 1000.
pub fn parse_bytes(text: &str) -> Result<u64, BadArgument> {
    let refuse = || {
        BadArgument::new(
            "size",
            "memory",
            text,
            "a whole number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB",
        )
    };
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err(refuse()),
    };
    text[..digits].parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(refuse)
}

/// Rows in columns two spaces apart: the first column to the left, the others to the right.
fn table(f: &mut std::fmt::Formatter<'_>, rows: &[Vec<String>]) -> std::fmt::Result {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let width = widths[c];
            line += &if c == 0 { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_people_write_them() {
        assert_eq!([0, 999, 1000, 268_435_456].map(digits), ["0", "999", "1,000", "268,435,456"]);
        assert_eq!([0, 1023, 512 << 20, 1 << 34].map(bytes), ["0 B", "1,023 B", "512 MiB", "16 GiB"]);
        assert_eq!(bytes(3 << 29), "1.50 GiB");
        assert_eq!([0.5, 1500.0, 2e6].map(time), ["0.50 us", "1.50 ms", "2.00 s"]);
    }

    #[test]
    fn sizes_parse_and_anything_else_is_refused_by_name() {
        let ok = [("80GiB", 80 << 30), ("80 GiB", 80 << 30), ("7", 7), ("5KB", 5000), ("0B", 0)];
        for (text, n) in ok {
            assert_eq!(parse_bytes(text), Ok(n), "{text}");
        }
        for text in
            ["", "GiB", "80Gib", "-1GiB", "1.5GiB", "80GiB!", "99999999999999999999", "20000000TiB", "1 é"]
        {
            let e = parse_bytes(text).unwrap_err();
            assert_eq!((e.field.as_str(), e.asked.as_str()), ("memory", text));
        }
    }
}

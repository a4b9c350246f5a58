//! Writes the thirteen-task pack and says what it cost: `cargo run --release -p suanpan-eval --example pack [length] [samples] [bytes|words]`.
//! Peak memory is read from the kernel where it says so.

use std::io::Write;
use std::time::Instant;

use suanpan_eval::EvalError;
use suanpan_eval::corpus::Prose;
use suanpan_eval::count::{Bytes, Counter, Pieces};
use suanpan_eval::item::View;
use suanpan_eval::pack::{self, Plan, THIRTEEN};
use suanpan_eval::task::Kit;

/// Four bytes a token, every word and every number at least one, looked up by piece: the cost of a tokenizer without the tokenizer.
struct Words;

impl Counter for Words {
    fn count(&self, text: &str) -> usize {
        text.split_inclusive([' ', '\n']).map(|w| w.len().div_ceil(4)).sum()
    }

    fn name(&self) -> String {
        "words of four bytes".into()
    }
}

fn main() -> Result<(), EvalError> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().and_then(|a| a.parse().ok()).unwrap_or(default);
    let (length, samples) = (number(131_072), number(100));
    let words = Pieces::new(Words);
    let counter: &dyn Counter = if arguments.next().as_deref() == Some("words") { &words } else { &Bytes };
    let start = Instant::now();
    let plan = Plan {
        tasks: THIRTEEN.map(String::from).to_vec(),
        lengths: vec![length],
        samples: samples as u32,
        views: vec![View::Full],
    };
    let kit = Kit { seed: 2026, counter, haystack: Prose::shipped() };
    let mut bytes = 0;
    let summary = pack::write(&kit, plan.cells(), &mut Counting(&mut bytes), |_| ())?;
    let peak = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = peak.lines().find(|l| l.starts_with("VmHWM")).unwrap_or("VmHWM: unknown").to_string();
    println!(
        "{} rows, {} prompt tokens ({}), {bytes} bytes of pack, {:.2} s, {peak}, {}",
        summary.rows,
        summary.prompt_tokens,
        kit.counter.name(),
        start.elapsed().as_secs_f64(),
        summary.hash
    );
    Ok(())
}

struct Counting<'a>(&'a mut usize);

impl Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        *self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

//! Which scheme for a layer and pass: every scheme that fits is planned and simulated under the given constants, and the fastest is taken.

use suanpan_base::BadArgument;

use crate::plan::{ParallelPlan, Request, Scheme};
use crate::simulate::{Constants, Forecast, simulate_plan};

/// A scheme with what speaks for it.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The fastest one.
    pub scheme: Scheme,
    /// Its times.
    pub forecast: Forecast,
    /// The time of each candidate, and why the choice fell, line by line.
    pub why: Vec<String>,
}

/// Chooses for this request, whose own scheme does not count. Among times within 1 % the fewest bytes sent win.
pub fn choose(request: &Request<'_>, constants: &Constants) -> Result<Choice, BadArgument> {
    let n = request.cp_size;
    let hybrids = (2..n).filter(|size| n.is_multiple_of(*size) && *size <= request.heads.num_q_heads);
    let (mut best, mut lines): (Option<(Scheme, Forecast, f64)>, Vec<String>) = (None, Vec::new());
    for scheme in Scheme::ALL.into_iter().chain(hybrids.map(Scheme::Hybrid)) {
        let plan = ParallelPlan::new(&Request { scheme, ..request.clone() })?;
        let forecast = simulate_plan(&plan, constants)?;
        let sent = forecast.ranks.iter().map(|r| r.sent_bytes).fold(0.0, f64::max);
        lines.push(format!(
            "{scheme}: {:.1} us, {:.1} us exposed, {sent:.0} bytes sent",
            forecast.us,
            forecast.exposed_us()
        ));
        let better = best.as_ref().is_none_or(|(_, f, bytes)| {
            forecast.us < f.us * 0.99 || forecast.us < f.us * 1.01 && sent < *bytes
        });
        if better {
            best = Some((scheme, forecast, sent));
        }
    }
    let (scheme, forecast, _) = best.expect("there are schemes");
    let pass = request.pass;
    let mut why = vec![format!("{pass:?} over {n} ranks: {scheme} takes least time under these constants")];
    why.extend(lines.into_iter().map(|line| format!("  {line}")));
    Ok(Choice { scheme, forecast, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::MaskSlices;
    use crate::plan::Pass;
    use crate::shard::Layout;
    use crate::simulate::Link;
    use suanpan_base::{HeadShape, Mask};

    fn chosen(mask: Mask, heads: HeadShape, layout: Layout, constants: Constants) -> Scheme {
        let mask = MaskSlices::packed(mask, &[1 << 16]).unwrap();
        let (cp_size, scheme, pass) = (8, Scheme::Ring, Pass::Forward);
        let request = Request { heads, mask: &mask, layout, cp_size, scheme, pass, invariant_block: None };
        let choice = choose(&request, &constants).unwrap();
        assert!(choice.why[0].contains(&choice.scheme.to_string()), "{:?}", choice.why);
        choice.scheme
    }

    #[test]
    fn a_window_takes_its_halo_and_a_slow_link_what_sends_least() {
        let base = Constants::h200(128);
        let heads = HeadShape::new(64, 8, 128);
        assert_eq!(chosen(Mask::window(512), heads, Layout::Contiguous, base), Scheme::Halo);
        // Causal over a very slow link: bytes decide. One kv head for 64 query heads: keys travel. 64 kv heads: not as a ring.
        let slow = Constants { near: Link { message_us: 0.0, bytes_per_us: 100.0 }, ..base };
        let few = chosen(Mask::CAUSAL, HeadShape::new(64, 1, 128), Layout::Zigzag, slow);
        assert!(matches!(few, Scheme::Ring | Scheme::AllGather | Scheme::Halo), "{few}");
        let many = chosen(Mask::CAUSAL, HeadShape::new(64, 64, 128), Layout::Zigzag, slow);
        assert!(matches!(many, Scheme::Ulysses | Scheme::Hybrid(_)), "{many}");
    }
}

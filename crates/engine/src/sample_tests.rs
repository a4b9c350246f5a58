//! Sampling against slow, obvious versions: full sorts and f64 sums.

use super::*;

fn logits(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| (rng::uniform(seed, i) * 12.0 - 6.0) as f32).collect()
}

fn sampler(change: impl Fn(&mut SamplingParams)) -> Sampler {
    let mut params = SamplingParams { seed: Some(9), ..SamplingParams::default() };
    change(&mut params);
    params.validate(1 << 20).unwrap();
    Sampler::new(&params, &[1, 2, 2, 3], &[0], 5)
}

fn drawn_ids(s: &Sampler, logits: &[f32], draws: usize) -> Vec<u32> {
    let mut scratch = Scratch::default();
    let mut ids: Vec<u32> = (0..draws).map(|i| s.sample(logits, i, &mut scratch).unwrap()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The kept set by a full sort, in f64.
fn kept_slowly(logits: &[f32], t: f64, top_k: usize, top_p: f64, min_p: f64) -> Vec<u32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let p = |l: f32| (f64::from(l - max) / t).exp();
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|&i| p(logits[i as usize]) >= min_p).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    if top_k > 0 {
        order.truncate(top_k);
    }
    let total: f64 = order.iter().map(|&i| p(logits[i as usize])).sum();
    let mut mass = 0.0;
    let reached = order.iter().position(|&i| {
        mass += p(logits[i as usize]);
        top_p < 1.0 && mass >= top_p * total
    });
    order.truncate(reached.map_or(order.len(), |r| r + 1));
    order.sort_unstable();
    order
}

#[test]
fn kept_sets_equal_a_full_sort() {
    let cases = [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.3, 0.0),
        (0, 0.9, 0.0),
        (40, 0.7, 0.0),
        (0, 1.0, 0.2),
        (50, 0.8, 0.05),
    ];
    for (case, &(top_k, top_p, min_p)) in cases.iter().enumerate() {
        for t in [0.3, 1.0, 3.0] {
            let row = logits(700, case as u64);
            let s = sampler(|p| (p.temperature, p.top_k, p.top_p, p.min_p) = (t, top_k as i64, top_p, min_p));
            let max = highest(&row).unwrap();
            let mut candidates = Vec::new();
            let (least, last) = s.threshold(&row, max, &mut candidates);
            let kept = |id: &u32| {
                let l = row[*id as usize];
                l > least || (l == least && *id <= last)
            };
            let fast: Vec<u32> = (0..700).filter(kept).collect();
            assert_eq!(fast, kept_slowly(&row, t, top_k, top_p, min_p), "case {case}, temperature {t}");
        }
    }
}

#[test]
fn frequencies_follow_the_distribution() {
    let row = [0.0f32, 1.0, 2.0, f32::NEG_INFINITY, 0.5];
    let s = sampler(|p| p.temperature = 0.8);
    let mut scratch = Scratch::default();
    let mut counts = [0usize; 5];
    (0..40_000).for_each(|i| counts[s.sample(&row, i, &mut scratch).unwrap() as usize] += 1);
    let total: f64 = row.iter().map(|&l| (f64::from(l) / 0.8).exp()).sum();
    for (id, &l) in row.iter().enumerate() {
        let p = (f64::from(l) / 0.8).exp() / total;
        let sigma = (p * (1.0 - p) * 40_000.0).sqrt();
        assert!((counts[id] as f64 - p * 40_000.0).abs() <= 4.0 * sigma, "token {id}: {}", counts[id]);
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    let s = sampler(|p| p.temperature = 0.0);
    assert_eq!(s.sample(&[1.0, 3.0, 3.0, -1.0], 0, &mut Scratch::default()), Ok(1));
}

#[test]
fn a_tiny_temperature_neither_overflows_nor_misses_the_best() {
    let s = sampler(|p| p.temperature = 1.1e-5);
    assert_eq!(drawn_ids(&s, &[-3e38, 3e38, 2.9e38], 20), [1]);
}

#[test]
fn equal_logits_at_the_cut_keep_exactly_k() {
    let s = sampler(|p| p.top_k = 3);
    assert_eq!(drawn_ids(&s, &[1.0; 100], 500), [0, 1, 2]);
}

#[test]
fn top_p_smaller_than_the_best_token_keeps_that_one() {
    let s = sampler(|p| p.top_p = 1e-9);
    assert_eq!(drawn_ids(&s, &logits(500, 3), 50).len(), 1);
}

#[test]
fn seeds_decide_draws_and_position_moves_them() {
    let row = logits(300, 1);
    let mut scratch = Scratch::default();
    let mut text = |seed| {
        let s = sampler(|p| p.seed = seed);
        (0..32).map(|i| s.sample(&row, i, &mut scratch).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(text(Some(4)), text(Some(4)));
    assert_ne!(text(Some(4)), text(Some(5)));
    assert_eq!(text(None), text(Some(5)), "without a seed the request's own is used");
    let one = text(Some(4));
    assert!(one.iter().any(|&t| t != one[0]));
}

#[test]
fn presence_and_frequency_see_generated_tokens_only() {
    let mut s = sampler(|p| (p.presence_penalty, p.frequency_penalty) = (0.5, 0.25));
    let mut out = Vec::new();
    s.adjust(&[1.0; 6], 0, &mut out);
    assert_eq!(out, [1.0; 6], "prompt tokens 1, 2, 3 are not penalised");
    [4, 4, 5].into_iter().for_each(|t| s.accept(t));
    s.adjust(&[1.0; 6], 3, &mut out);
    assert_eq!(out, [1.0, 1.0, 1.0, 1.0, 0.0, 0.25]);
}

#[test]
fn repetition_sees_prompt_and_output_once_each() {
    let mut s = sampler(|p| p.repetition_penalty = 2.0);
    [3, 4, 4].into_iter().for_each(|t| s.accept(t));
    let mut out = Vec::new();
    s.adjust(&[1.0, 1.0, -1.0, 4.0, 4.0, 4.0], 3, &mut out);
    assert_eq!(out, [1.0, 0.5, -2.0, 2.0, 2.0, 4.0]);
}

#[test]
fn end_tokens_are_ruled_out_until_min_tokens() {
    let s = sampler(|p| (p.temperature, p.min_tokens) = (0.0, 2));
    let mut scratch = Scratch::default();
    let row = [9.0, 1.0, 2.0, 0.0];
    let text: Vec<u32> = (0..3).map(|i| s.sample(&row, i, &mut scratch).unwrap()).collect();
    assert_eq!(text, [2, 2, 0]);
}

#[test]
fn bias_and_allowed_ids_move_the_choice() {
    let mut scratch = Scratch::default();
    let biased = sampler(|p| (p.temperature, p.logit_bias) = (0.0, vec![(3, 100.0)]));
    assert_eq!(biased.sample(&[9.0, 1.0, 2.0, 0.0], 0, &mut scratch), Ok(3));
    let allowed = sampler(|p| p.allowed_token_ids = Some(vec![1, 3]));
    assert_eq!(drawn_ids(&allowed, &[9.0, 0.1, 9.0, 0.0], 200), [1, 3]);
}

#[test]
fn nan_or_empty_rows_are_a_typed_fault() {
    let mut scratch = Scratch::default();
    for s in [sampler(|p| p.temperature = 0.0), sampler(|_| ()), sampler(|p| p.logit_bias = vec![(1, 1.0)])] {
        assert_eq!(s.sample(&[0.0, f32::NAN, 1.0], 0, &mut scratch), Err(LogitFault::NotFinite));
        assert_eq!(s.sample(&[0.0, f32::INFINITY], 0, &mut scratch), Err(LogitFault::NotFinite));
        assert_eq!(s.sample(&[f32::NEG_INFINITY; 3], 0, &mut scratch), Err(LogitFault::NoCandidate));
    }
    let nothing_left = sampler(|p| p.allowed_token_ids = Some(vec![1]));
    assert_eq!(nothing_left.sample(&[0.0, f32::NEG_INFINITY], 0, &mut scratch), Err(LogitFault::NoCandidate));
}

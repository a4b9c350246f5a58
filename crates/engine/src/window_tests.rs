//! Layers with a window: what goes back, what is found again, and how long.

use super::tests::{Sim, opts};
use crate::rng;

const PAGE: usize = 16;
const WINDOW: usize = 64;

/// Conversations that take turns: each turn repeats all that was said and adds to it. Share of the tokens said before that were found
/// again in the last round.
fn round_robin(sessions: u64, pages: usize, window_pages: usize, turns: usize) -> f64 {
    let mut sim = Sim::windowed(pages, (window_pages, WINDOW), PAGE, opts(4, 128));
    let mut said: Vec<Vec<u32>> = (0..sessions).map(|s| vec![(s % 5) as u32; 150]).collect();
    let (mut found, mut could) = (0, 0);
    for turn in 0..turns {
        for (session, said) in said.iter_mut().enumerate() {
            let key = sim.submit(session as u64, said, 6);
            sim.run_dry();
            let closed = &sim.done[&key];
            if turn + 1 == turns {
                found += closed.cached_tokens;
                // The last token drawn was never computed, and all that is new comes behind it.
                could += closed.prompt_len - if turn > 0 { 41 } else { 0 };
            }
            *said = closed.tokens.clone();
            said.extend([3; 40]);
        }
    }
    sim.scheduler.check().unwrap();
    found as f64 / could as f64
}

/// The case in which other engines' reuse collapses at a quarter of their pool: here it holds until the windows of all conversations
/// do not fit any more.
#[test]
fn a_window_models_hit_rate_holds_until_the_pool_is_really_full() {
    // Of each conversation: its last window, up to the page in front of it and the page begun, and the page of one turn computed.
    let one = WINDOW / PAGE + 2;
    for sessions in [4, 12, 24] {
        let running = one + 4 + 128 / PAGE;
        let enough = sessions as usize * one + running;
        let pages = sessions as usize * 32;
        assert_eq!(round_robin(sessions, pages, enough, 5), 1.0, "{sessions} conversations");
        // The bound is no idle one: where the windows themselves do not fit, some are gone.
        let fewer = (sessions as usize * (WINDOW / PAGE)).max(running);
        assert!(sessions < 12 || round_robin(sessions, pages, fewer, 5) < 1.0, "{sessions} conversations");
    }
}

#[test]
fn pages_left_of_the_window_go_back_while_a_prompt_is_computed_and_while_it_decodes() {
    let mut sim = Sim::windowed(64, (40, WINDOW), PAGE, opts(2, 32));
    let prompt: Vec<u32> = (0..600).map(|i| i % 5).collect();
    sim.submit(0, &prompt, 200);
    let mut most_decoding = 0;
    while sim.scheduler.has_work() {
        sim.step();
        let held = sim.scheduler.window_books().unwrap().active_pages;
        // The window, the chunk and the two pages of reserve behind the start.
        assert!(held <= (WINDOW + 32) / PAGE + 3, "{held} pages");
        if sim.scheduler.running.first().is_some_and(|s| s.tokens.len() > 620) {
            most_decoding = most_decoding.max(held);
        }
    }
    assert_eq!(most_decoding, WINDOW / PAGE + 1);
    sim.settle();
}

/// The second prompt that shares a long beginning with the first is computed whole, for the window there was not kept; from then on it is.
#[test]
fn a_place_where_prompts_part_keeps_its_window_once_it_was_seen() {
    let mut sim = Sim::windowed(128, (60, WINDOW), PAGE, opts(2, 32));
    let shared: Vec<u32> = (0..320).map(|i| i % 5).collect();
    let mut cached = Vec::new();
    for tail in 0..4u32 {
        let prompt: Vec<u32> = shared.iter().copied().chain([7 + tail; 100]).collect();
        let key = sim.submit(0, &prompt, 2);
        sim.run_dry();
        cached.push(sim.done[&key].cached_tokens);
    }
    assert_eq!(cached, [0, 0, 320, 320]);
    sim.settle();
}

#[test]
fn the_same_prompt_again_and_one_that_ends_on_a_page_are_found() {
    for len in [15, 16, 17, 63, 64, 65, 160, 161, 175, 176, 177] {
        let mut sim = Sim::windowed(64, (40, WINDOW), PAGE, opts(2, 64));
        let prompt: Vec<u32> = (0..len).map(|i| i % 5).collect();
        for round in 0..3 {
            let key = sim.submit(0, &prompt, 30);
            sim.run_dry();
            let expected = if round == 0 { 0 } else { len as usize - 1 };
            assert_eq!(sim.done[&key].cached_tokens, expected, "{len} tokens");
        }
        sim.settle();
    }
}

/// Pages allocated and not needed, over a mix of long and short prompts with shared beginnings, in bytes of a model in which five of
/// six layers have a window.
#[test]
fn memory_waste_on_a_mixed_trace_is_below_four_percent() {
    let mut sim = Sim::windowed(2048, (700, 512), PAGE, opts(16, 256));
    let mut random = 1u64;
    let mut below = |n: usize| {
        random = rng::derive(random, 5);
        (random % n as u64) as usize
    };
    let (mut allocated, mut empty) = (0usize, 0usize);
    for i in 0..60usize {
        let len = [120, 300, 900, 2500, 6000][below(5)] + below(100);
        let prompt: Vec<u32> =
            (0..len).map(|p| if p < 100 { p as u32 % 5 } else { (p * (i + 2)) as u32 % 7 }).collect();
        sim.submit(0, &prompt, 20 + below(200));
        for _ in 0..8 {
            sim.step();
            let (a, e) = waste(&sim);
            (allocated, empty) = (allocated + a, empty + e);
        }
    }
    let waste = empty as f64 / allocated as f64;
    assert!(waste < 0.04, "{waste}");
    sim.settle();
}

/// Slots of all pages that running requests hold, and those of them that no request needs: past its tokens, or left of its window.
/// A layer with a window counts five times.
fn waste(sim: &Sim) -> (usize, usize) {
    let window = sim.scheduler.window.as_ref().unwrap().window;
    let mut needed: [std::collections::HashMap<u32, std::collections::BTreeSet<usize>>; 2] =
        Default::default();
    for seq in &sim.scheduler.running {
        for (group, table) in [&seq.pages, seq.window.as_ref().unwrap()].into_iter().enumerate() {
            for id in table.held_ids() {
                needed[group].entry(id).or_default();
            }
            let first = if group == 1 { (seq.computed + 1).saturating_sub(window) } else { 0 };
            let end = seq.tokens.len().min(table.capacity_tokens());
            for position in first..end {
                let slot = table.slot(position) as usize;
                needed[group].entry((slot / PAGE) as u32).or_default().insert(slot % PAGE);
            }
        }
    }
    let of = |group: usize| {
        let slots = needed[group].len() * PAGE;
        (slots, slots - needed[group].values().map(|s| s.len()).sum::<usize>())
    };
    let (full, window) = (of(0), of(1));
    (full.0 + 5 * window.0, full.1 + 5 * window.1)
}

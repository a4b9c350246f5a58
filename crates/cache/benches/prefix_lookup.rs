//! How long it takes to find, and to hold, the pages of a 131,072-token prompt in a prefix tree of a million pages, and
//! to store new keys and values. Prints medians; each answer is checked before it is timed.

use std::hint::black_box;
use std::time::Instant;

use suanpan_base::{DType, HeadShape};
use suanpan_cache::{EvictionPolicy, Hit, KvStorage, LayerShape, PagePool, PageTable, PrefixCache};

const PAGE_SIZE: usize = 16;
const PROMPT: usize = 131_072;
const OTHERS: usize = 122;

fn median_us(runs: usize, mut run: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}

/// Prompt `n`: a head of 4,096 tokens that all prompts share, then tokens of its own.
fn prompt(n: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| if i < 4096 { i } else { (n << 18) | i }).collect()
}

fn lookups() {
    let pages = (PROMPT / PAGE_SIZE) * (OTHERS + 2);
    let pool = PagePool::new(pages, PAGE_SIZE).unwrap();
    let mut cache = PrefixCache::new(pool.clone(), true, EvictionPolicy::Lru);
    for n in 0..OTHERS as u32 {
        let tokens = prompt(n, PROMPT);
        let mut table = PageTable::new(&pool);
        table.push_hit(cache.lookup(0, &tokens));
        table.reserve(PROMPT).unwrap();
        cache.insert(0, &tokens, table.pages(), 0);
    }
    let tokens = prompt(7, PROMPT + 1);
    assert_eq!(cache.lookup(0, &tokens).pages.len(), PROMPT / PAGE_SIZE);
    println!("prefix tree of {} pages, prompt of {PROMPT} tokens:", cache.cached_pages());
    let mut held = Hit::default();
    let hit = median_us(51, || held = cache.lookup(0, black_box(&tokens)));
    println!("  lookup, one prompt again and again  {hit:8.1} us (with the last hit's release)");
    let mut n = 0;
    let prompts: Vec<_> = (0..OTHERS as u32).map(|n| prompt(n, PROMPT + 1)).collect();
    let mut hits = Vec::with_capacity(OTHERS);
    let cold = median_us(OTHERS, || {
        hits.push(cache.lookup(0, black_box(&prompts[n])));
        n += 1;
    });
    println!("  lookup, a different prompt each time {cold:7.1} us");
    let release = median_us(OTHERS, || drop(hits.pop()));
    println!("  dropping one hit, handle by handle  {release:8.1} us");
    drop((held, hits));
    let evicted = median_us(21, || assert_eq!(cache.evict(1000), 1000));
    println!("  evicting 1,000 pages                {evicted:8.1} us");
    cache.check().unwrap();
    pool.check_holders(cache.ids()).unwrap();
}

fn writes() {
    let heads = HeadShape::new(9, 3, 64);
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::E4m3, DType::I8, DType::I4] {
        let mut storage = KvStorage::new(&[LayerShape { heads, dtype }], 64, PAGE_SIZE).unwrap();
        let slots: Vec<u64> = (0..512).collect();
        let rows: Vec<f32> = (0..512 * 3 * 64).map(|i| i as f32 * 0.37).collect();
        let bytes = storage.write(0, &slots, &rows, &rows);
        let scales = storage.k_scales(0);
        let scale = if scales.is_empty() { 1.0 } else { scales.get(0) };
        let lost = (storage.k(0).get(1) * scale - 0.37).abs();
        assert!(bytes >= 512 * 3 * 64 * dtype.bits() as u64 / 4 && lost < 2.0, "{dtype}: {lost}");
        let us = median_us(101, || {
            storage.write(0, &slots, black_box(&rows), black_box(&rows));
        });
        println!(
            "writing 512 tokens x 3 kv heads x 64 + 64 in {dtype}: {us:.1} us, {:.2} GB/s",
            bytes as f64 / us / 1e3
        );
    }
}

fn main() {
    lookups();
    writes();
}

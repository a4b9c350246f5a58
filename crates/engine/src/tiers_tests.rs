//! Which store is loaded from: the measured ones, over stores that take their time.

use std::sync::Mutex;
use std::time::Duration;

use suanpan_base::{DType, HeadShape};
use suanpan_cache::PagePool;
use suanpan_cache::tier::Digest;

use super::*;
use crate::scheduler::{SchedulerOptions, SeqSpec};

/// Objects in memory that take a time to read, which can be changed.
#[derive(Clone, Default)]
struct Slow {
    objects: std::sync::Arc<Mutex<std::collections::HashMap<Digest, Vec<u8>>>>,
    delay_us: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

impl Slow {
    fn of(delay_us: u64) -> Slow {
        let slow = Slow::default();
        slow.delay_us.store(delay_us, std::sync::atomic::Ordering::Relaxed);
        slow
    }
}

impl Store for Slow {
    fn read(&self, name: &Digest) -> std::io::Result<Vec<u8>> {
        std::thread::sleep(Duration::from_micros(self.delay_us.load(std::sync::atomic::Ordering::Relaxed)));
        self.objects.lock().unwrap().get(name).cloned().ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    fn write(&self, name: &Digest, object: &[u8]) -> std::io::Result<()> {
        self.objects.lock().unwrap().insert(*name, object.to_vec());
        Ok(())
    }

    fn remove(&self, name: &Digest) -> std::io::Result<()> {
        self.objects.lock().unwrap().remove(name);
        Ok(())
    }

    fn list(&self) -> std::io::Result<Vec<(Digest, u64)>> {
        Ok(self.objects.lock().unwrap().iter().map(|(name, o)| (*name, o.len() as u64)).collect())
    }
}

const PAGE: usize = 16;
const TOKENS: usize = 400;
const LIMITS: TierOptions =
    TierOptions { capacity_bytes: 1 << 30, staging_bytes: 1 << 30, seconds: super::clock };

fn spec(key: u64) -> SeqSpec {
    SeqSpec {
        key: RequestKey(key),
        namespace: 0,
        prompt: (0..TOKENS as u32).collect(),
        max_total: TOKENS + 4,
        reuse_prefix: true,
        fork_of: None,
        cache_priority: 0,
    }
}

/// Tiers over `store`, in which the prompt's pages lie; computing a token takes 100 us.
fn tiers(store: impl Store + 'static) -> (Tiers, Scheduler) {
    let layer = LayerShape { heads: HeadShape::new(1, 1, 8), dtype: DType::Bf16 };
    let layout = Layout::new(&[1; 32], &[layer], PAGE).unwrap();
    let mut tiers = Tiers::over(layout.clone(), Box::new(store), LIMITS).unwrap();
    tiers.compute.enter(1.0, 1e-4);
    let page = vec![7; layout.page_bytes];
    for name in layout.names(0, &spec(0).prompt) {
        tiers.tier.store(&name, &page);
    }
    while tiers.books().pages_written < (TOKENS / PAGE) as u64 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pool = PagePool::new(64, PAGE).unwrap();
    (tiers, Scheduler::new(pool, true, SchedulerOptions::default()).unwrap())
}

/// Loading a page takes 20 ms, computing it 1.6 ms: no request ever waits for the first, not even the very first.
#[test]
fn a_slow_store_is_never_chosen_and_one_that_became_fast_is_found_out() {
    let store = Slow::of(20_000);
    let (mut tiers, scheduler) = tiers(store.clone());
    for key in 0..40 {
        assert!(tiers.hold(spec(key), &scheduler).is_some(), "request {key} waits for a slow store");
        if let Some(fetch) = &tiers.probe {
            // One page is read by nobody's request.
            assert!(key >= u64::from(PROBE_EVERY) - 1);
            while fetch.poll().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            tiers.probe = None;
        }
    }
    store.delay_us.store(0, std::sync::atomic::Ordering::Relaxed);
    let mut asked = 40;
    while tiers.hold(spec(asked), &scheduler).is_some() {
        asked += 1;
        assert!(asked < 400, "a store that became fast is never tried again");
        std::thread::sleep(Duration::from_millis(1));
        tiers.take_probe();
    }
    assert!(tiers.held[0].pages == TOKENS.div_ceil(PAGE) - 1);
}

/// The same slow store behind host memory: what lies in memory is loaded, what was evicted there is computed.
#[test]
fn host_memory_in_front_of_a_slow_store_is_chosen_and_the_store_is_not() {
    let (mut tiers, scheduler) = tiers(MemoryStore::new(1 << 20, Some(Box::new(Slow::of(20_000)))));
    assert!(tiers.far.predict(1.0).is_some_and(|s| s > 0.01), "the store itself was measured");
    assert!(tiers.hold(spec(0), &scheduler).is_none(), "its pages lie in memory");
    let (mut small, scheduler) = self::tiers(MemoryStore::new(1 << 11, Some(Box::new(Slow::of(20_000)))));
    assert!(small.hold(spec(0), &scheduler).is_some(), "most of its pages do not");
}

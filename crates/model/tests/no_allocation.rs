//! A step allocates nothing: counted by the allocator itself.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::driver::{Driver, Extend, all, last, options};
use common::random::{Random, config, model};
use suanpan_model::forward::{ExecOptions, LogitRows, StepSeq};
use suanpan_model::{LoadOptions, load};
use suanpan_ops::Precision;

struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this thread's requests count: the test harness's own threads allocate when they like.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTED.get() {
        CALLS.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: hands every request on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Has each of the pool's two workers take a job from the other: the first time, a worker registers itself with the memory
/// reclaimer of the job queues, which is an allocation once in its life and would be counted as a step's.
fn let_both_workers_steal(pool: &rayon::ThreadPool) {
    for giver in 0..2 {
        pool.broadcast(|worker| {
            let taken = AtomicBool::new(false);
            let wait = || {
                while !taken.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
            };
            if worker.index() == giver {
                rayon::join(wait, || taken.store(true, Ordering::SeqCst));
            }
        });
    }
}

/// One test, so that no other test's allocations are counted.
#[test]
fn steps_of_every_kind_allocate_nothing_once_the_executor_stands() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tied-q4_1.gguf");
    let quantised = Arc::new(load(file, &LoadOptions::default(), &mut |_| {}).unwrap());
    let floats = model(config(), 1);
    // Experts, sinks and biases; norms of heads and of outputs.
    let families = ["gpt-oss", "gemma3"].map(|name| {
        let file = format!("{}/tests/fixtures/families/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
        Arc::new(load(&file, &LoadOptions::default(), &mut |_| {}).unwrap())
    });
    for (model, precision) in [
        (&families[0], Precision::F32),
        (&families[1], Precision::F32),
        (&floats, Precision::F32),
        (&floats, Precision::Int8),
        (&quantised, Precision::F32),
        (&quantised, Precision::Int8),
    ] {
        let opts = ExecOptions { precision, max_tokens: 128, ..options() };
        let mut d = Driver::new(Arc::clone(model), opts, 64);
        let tokens = Random(2).tokens(128, model.config.vocab_size.min(96));
        // Fills the batch (whose memory is kept) and the pages of two sequences.
        let (a, b) = (d.start(), d.start());
        d.step(&[all(a, &tokens[..100]), Extend { seq: b, tokens: &tokens[..28], logits: LogitRows::None }]);
        let mut batches = vec![d.batch.clone()];
        d.step(&[last(a, &tokens[..1]), last(b, &tokens[..1])]);
        batches.push(d.batch.clone());
        d.step(&[last(a, &tokens[..9]), all(b, &tokens[..65])]);
        batches.push(d.batch.clone());
        let mut bad = d.batch.clone();
        bad.seqs[0] = StepSeq { cached_len: 0, extend_len: 0, logits: LogitRows::All };

        // Inside the pool, as an engine's loop runs: nothing at all.
        let pool = d.exec.pool();
        let_both_workers_steal(&pool);
        pool.broadcast(|_| COUNTED.set(true));
        COUNTED.set(true);
        let mut thirty_steps = || {
            let before = CALLS.load(Ordering::SeqCst);
            for batch in batches.iter().cycle().take(30) {
                d.exec.step(batch, &mut d.kv).unwrap();
                let rows = d.exec.num_logit_rows().min(64);
                assert!(d.exec.logits(0..rows).iter().all(|x| x.is_finite()));
            }
            CALLS.load(Ordering::SeqCst) - before
        };
        // A step that allocates does so every time; what a thread's runtime asks for once in its life happens once.
        let inside = pool.install(|| thirty_steps().min(thirty_steps()));
        assert_eq!(inside, 0, "{precision:?}: allocations in 30 steps inside the pool");

        // From another thread, the pool's queue takes one block in 63 hand-overs (a step and its logits are two).
        let before = CALLS.load(Ordering::SeqCst);
        for batch in batches.iter().cycle().take(63) {
            d.exec.step(batch, &mut d.kv).unwrap();
            d.exec.logits(0..1);
        }
        let outside = CALLS.load(Ordering::SeqCst) - before;
        assert!(outside <= 3, "{precision:?}: {outside} allocations in 126 hand-overs");
        assert!(d.exec.step(&bad, &mut d.kv).is_err());
    }
}

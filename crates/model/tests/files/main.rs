//! Model files as a user meets them: good ones load and mean what they say, bad ones are refused by name, cheaply.

mod config;
mod fixtures;
mod gguf;
mod gguf_bytes;
mod hostile;
mod hub;
mod mutate;
mod safetensors;
mod shards;
mod tied;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use suanpan_model::{LoadOptions, Model, ModelError, load};

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Counts what the current thread holds, so that a test can bound what refusing a file costs.
struct Counting;

fn note(change: isize) {
    let held = HELD.get() + change;
    HELD.set(held);
    PEAK.set(PEAK.get().max(held));
}

// SAFETY: every call is passed on to the system allocator unchanged; the counters are thread-local cells without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What this thread has computed so far, so that a busy machine does not fail a test: the scheduler's own count where there is one.
fn spent() -> Duration {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let counted = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanos = counted.and_then(|s| s.split_whitespace().next()?.parse().ok());
    nanos.map_or_else(|| START.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

/// Runs `f` and asserts that it stayed within the second and the 50 MB that a bad file may cost.
fn cheaply<T>(f: impl FnOnce() -> T) -> T {
    let held = HELD.get();
    let start = spent();
    PEAK.set(held);
    let out = f();
    let peak = PEAK.get();
    let took = spent() - start;
    assert!(took < Duration::from_secs(1), "took {took:?}");
    assert!(peak - held < 50_000_000, "held {} bytes", peak - held);
    out
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load_path(path: &Path) -> Result<Model, ModelError> {
    load(path.to_str().unwrap(), &LoadOptions::default(), &mut |_| {})
}

/// The error of a load that must not succeed.
fn refusal(path: &Path) -> ModelError {
    match cheaply(|| load_path(path)) {
        Ok(_) => panic!("{} must be refused", path.display()),
        Err(e) => e,
    }
}

/// A folder of its own that is gone when the value is.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let unique = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("suanpan-model-{unique}"));
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path.canonicalize().unwrap())
    }

    /// A scratch copy of the fixture folder `name`.
    fn copy_of(name: &str) -> Scratch {
        let scratch = Scratch::new();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), scratch.0.join(entry.file_name())).unwrap();
        }
        scratch
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// Rewrites the JSON file `name`.
    fn edit_json(&self, name: &str, edit: impl FnOnce(&mut serde_json::Value)) {
        let mut json = serde_json::from_slice(&self.read(name)).unwrap();
        edit(&mut json);
        self.write(name, json.to_string().as_bytes());
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left-overs in the temporary folder are no reason to fail a test.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

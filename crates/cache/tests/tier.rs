//! Pages on disk: what comes back is what was written, or nothing. Slow, full, lying and damaged stores, restarts and kill -9.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use suanpan_base::{DType, HeadShape};
use suanpan_cache::LayerShape;
use suanpan_cache::tier::{
    Digest, DiskStore, Fetched, Layout, MemoryStore, ObjectFault, PageName, Store, Tier, TierOptions, decode,
    encode,
};

const PAGE: usize = 4;
const OPTIONS: TierOptions = TierOptions { capacity_bytes: 1 << 30, staging_bytes: 1 << 24, seconds: || 0.0 };

fn layout(model: u8, dtype: DType) -> Layout {
    let layers = [LayerShape { heads: HeadShape::new(2, 1, 8), dtype }; 2];
    Layout::new(&[model; 32], &layers, PAGE).unwrap()
}

/// The bytes that the page of a name should hold.
fn page_of(layout: &Layout, name: &PageName) -> Vec<u8> {
    name.digest.iter().chain(&name.parent).copied().cycle().take(layout.page_bytes).collect()
}

fn names(layout: &Layout, seed: u32, pages: usize) -> Vec<PageName> {
    let tokens: Vec<u32> =
        (0..(pages * PAGE) as u32).map(|i| seed.wrapping_mul(31).wrapping_add(i * i)).collect();
    layout.names(7, &tokens)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never came");
        sleep(Duration::from_millis(1));
    }
}

fn fetch(tier: &Tier, names: &[PageName]) -> Fetched {
    let fetch = tier.fetch(names.to_vec()).expect("room");
    let mut fetched = None;
    until("a fetch", || {
        fetched = fetch.poll();
        fetched.is_some()
    });
    fetched.unwrap()
}

fn store_all(tier: &Tier, names: &[PageName]) {
    let before = tier.books().pages_written;
    let new = names.iter().filter(|n| tier.store(n, &page_of(tier.layout(), n))).count() as u64;
    until("the writes", || tier.books().pages_written == before + new);
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("suanpan-tier-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&path).ok();
    path
}

fn disk(path: &Path, layout: &Layout, options: TierOptions) -> Tier {
    Tier::new(layout.clone(), Box::new(DiskStore::open(path).unwrap()), options).unwrap()
}

/// A store in memory that can be told to misbehave.
#[derive(Default)]
struct Odd {
    objects: Mutex<HashMap<Digest, Vec<u8>>>,
    /// Bytes of a name that count.
    name_bytes: Option<usize>,
    full: AtomicBool,
    slow: AtomicBool,
}

impl Odd {
    fn key(&self, name: &Digest) -> Digest {
        let mut key = [0; 32];
        let n = self.name_bytes.unwrap_or(32);
        key[..n].copy_from_slice(&name[..n]);
        key.iter_mut().take(n).for_each(|b| *b &= if n < 32 { 1 } else { 0xff });
        key
    }
}

impl Store for &'static Odd {
    fn read(&self, name: &Digest) -> io::Result<Vec<u8>> {
        if self.slow.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(20));
        }
        self.objects
            .lock()
            .unwrap()
            .get(&self.key(name))
            .cloned()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(&self, name: &Digest, object: &[u8]) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.objects.lock().unwrap().insert(self.key(name), object.to_vec());
        Ok(())
    }

    fn remove(&self, name: &Digest) -> io::Result<()> {
        self.objects.lock().unwrap().remove(&self.key(name));
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<(Digest, u64)>> {
        Ok(self.objects.lock().unwrap().iter().map(|(k, v)| (*k, v.len() as u64)).collect())
    }
}

fn odd(name_bytes: Option<usize>) -> &'static Odd {
    Box::leak(Box::new(Odd { name_bytes, ..Odd::default() }))
}

#[test]
fn pages_come_back_after_a_restart_and_only_for_their_own_tokens() {
    let (path, layout) = (folder("restart"), layout(1, DType::Bf16));
    let (a, b) = (names(&layout, 1, 5), names(&layout, 2, 5));
    let tier = disk(&path, &layout, OPTIONS);
    store_all(&tier, &a);
    assert!(!tier.store(&a[0], &page_of(&layout, &a[0])), "it is stored");
    drop(tier);
    let tier = disk(&path, &layout, OPTIONS);
    assert_eq!((tier.books().objects, tier.stored(&a), tier.stored(&b)), (5, 5, 0));
    let fetched = fetch(&tier, &a);
    assert_eq!(fetched.pages, a.iter().map(|n| page_of(&layout, n)).collect::<Vec<_>>());
    assert_eq!(tier.books().staged_bytes, 5 * layout.page_bytes as u64);
    drop(fetched);
    assert_eq!((tier.books().staged_bytes, tier.books().faults), (0, 0));
    // Another namespace, another model, another element type: nothing is found under their names.
    let tokens: Vec<u32> = a.iter().flat_map(|n| n.tokens.clone()).collect();
    assert_eq!(tier.stored(&layout.names(8, &tokens)), 0);
    for other in [self::layout(2, DType::Bf16), self::layout(1, DType::I8)] {
        assert_eq!(tier.stored(&other.names(7, &tokens)), 0);
    }
    std::fs::remove_dir_all(path).unwrap();
}

/// Every single flipped bit, every cut and every added byte is noticed: the page is not believed, and its object goes.
#[test]
fn a_damaged_object_is_never_believed() {
    let layout = layout(1, DType::I8);
    let name = names(&layout, 3, 2).pop().unwrap();
    let whole = encode(&layout, &name, &page_of(&layout, &name));
    assert_eq!(decode(&layout, &name, &whole).unwrap(), page_of(&layout, &name));
    for bit in 0..whole.len() * 8 {
        let mut object = whole.clone();
        object[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&layout, &name, &object).is_err(), "bit {bit}");
    }
    for len in [0, 1, 31, whole.len() - 1] {
        assert!(matches!(decode(&layout, &name, &whole[..len]), Err(ObjectFault::Length { .. })));
    }
    assert!(decode(&layout, &name, &[&whole[..], &[0]].concat()).is_err());
    // Whole objects of something else.
    let mut other = name.clone();
    other.tokens[1] += 1;
    assert_eq!(decode(&layout, &other, &whole), Err(ObjectFault::Tokens));
    let mut other = name.clone();
    other.parent[0] ^= 1;
    assert_eq!(decode(&layout, &other, &whole), Err(ObjectFault::Tokens));
    let foreign = Layout { id: [9; 32], ..layout.clone() };
    assert_eq!(decode(&foreign, &name, &whole), Err(ObjectFault::Layout));
}

#[test]
fn a_fetch_ends_before_the_first_damaged_page() {
    let (path, layout) = (folder("damage"), layout(1, DType::Bf16));
    let names = names(&layout, 4, 6);
    let tier = disk(&path, &layout, OPTIONS);
    store_all(&tier, &names);
    let third = path.join(blake3::Hash::from(names[3].digest).to_hex().as_str());
    let mut bytes = std::fs::read(&third).unwrap();
    bytes[200] ^= 4;
    std::fs::write(&third, bytes).unwrap();
    assert_eq!(fetch(&tier, &names).pages.len(), 3);
    assert_eq!((tier.books().faults, tier.stored(&names), third.exists()), (1, 3, false));
    // It can be stored anew.
    store_all(&tier, &names);
    assert_eq!(fetch(&tier, &names).pages.len(), 6);
    std::fs::remove_dir_all(path).unwrap();
}

/// Digests cut to 8 bits collide all the time: a page of other tokens is never given out.
#[test]
fn a_digest_collision_is_a_miss() {
    let layout = layout(1, DType::Bf16);
    let tier = Tier::new(layout.clone(), Box::new(odd(Some(8))), OPTIONS).unwrap();
    let prompts: Vec<_> = (0..300).map(|seed| names(&layout, seed, 3)).collect();
    for prompt in &prompts {
        store_all(&tier, prompt);
    }
    let mut came = 0;
    for prompt in &prompts {
        for (page, name) in fetch(&tier, prompt).pages.iter().zip(prompt) {
            assert_eq!(page, &page_of(&layout, name));
            came += 1;
        }
    }
    assert!(came < 600 && tier.books().faults > 100, "{came} pages, {:?}", tier.books());
}

#[test]
fn a_full_store_loses_pages_and_nothing_else() {
    let layout = layout(1, DType::Bf16);
    let store = odd(None);
    let tier = Tier::new(layout.clone(), Box::new(store), OPTIONS).unwrap();
    let names = names(&layout, 5, 4);
    store_all(&tier, &names[..2]);
    store.full.store(true, Ordering::Relaxed);
    assert!(tier.store(&names[2], &page_of(&layout, &names[2])));
    until("the refusal", || tier.books().pages_not_stored == 1);
    assert_eq!((tier.books().staged_bytes, tier.stored(&names)), (0, 2));
    store.full.store(false, Ordering::Relaxed);
    store_all(&tier, &names);
    assert_eq!(fetch(&tier, &names).pages.len(), 4);
}

/// A fetch that nobody waits for any more stops, and gives back what it had read; pages past the staging limit are not taken.
#[test]
fn an_abandoned_fetch_frees_all_copies() {
    let layout = layout(1, DType::Bf16);
    let store = odd(None);
    let options = TierOptions { staging_bytes: 6 * layout.page_bytes as u64, ..OPTIONS };
    let tier = Tier::new(layout.clone(), Box::new(store), options).unwrap();
    let names = names(&layout, 6, 12);
    for part in names.chunks(4) {
        store_all(&tier, part);
    }
    store.slow.store(true, Ordering::Relaxed);
    let abandoned = tier.fetch(names.clone()).unwrap();
    sleep(Duration::from_millis(50));
    drop(abandoned);
    store.slow.store(false, Ordering::Relaxed);
    until("the copies' end", || tier.books().staged_bytes == 0);
    assert_eq!(fetch(&tier, &names).pages.len(), 6, "as many as may wait");
    until("the copies' end", || tier.books().staged_bytes == 0);
}

#[test]
fn the_least_recently_used_pages_go_when_the_folder_is_full() {
    let (path, layout) = (folder("capacity"), layout(1, DType::Bf16));
    let (a, b, c) = (names(&layout, 1, 3), names(&layout, 2, 3), names(&layout, 3, 3));
    let object = encode(&layout, &a[0], &page_of(&layout, &a[0])).len() as u64;
    let tier = disk(&path, &layout, TierOptions { capacity_bytes: 7 * object, ..OPTIONS });
    store_all(&tier, &a);
    store_all(&tier, &b);
    assert_eq!(fetch(&tier, &a).pages.len(), 3);
    store_all(&tier, &c);
    until("the room", || tier.books().objects == 7);
    assert_eq!((tier.stored(&a), tier.stored(&b), tier.stored(&c)), (3, 0, 3));
    drop(tier);
    assert_eq!(DiskStore::open(&path).unwrap().list().unwrap().len(), 7);
    std::fs::remove_dir_all(path).unwrap();
}

/// Writes pages for ever; the test below starts it as a process of its own and kills it.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Some(path) = std::env::var_os("SUANPAN_TIER_CHILD") else { return };
    let layout = layout(1, DType::Bf16);
    let tier = disk(Path::new(&path), &layout, OPTIONS);
    for seed in 0.. {
        for name in names(&layout, seed, 8) {
            tier.store(&name, &page_of(&layout, &name));
        }
    }
}

#[test]
fn a_folder_is_consistent_after_kill_9() {
    let (path, layout) = (folder("kill"), layout(1, DType::Bf16));
    for round in 0..3u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_it_is_killed"])
            .env("SUANPAN_TIER_CHILD", &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let files = || std::fs::read_dir(&path).map_or(0, Iterator::count);
        let before = files();
        until("the first pages", || files() > before + 50);
        sleep(Duration::from_millis(3 * round + 1));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = DiskStore::open(&path).unwrap();
        let objects = store.list().unwrap();
        assert_eq!(objects.len(), files(), "nothing unfinished is left");
        let stored: HashMap<Digest, u64> = objects.into_iter().collect();
        let mut whole = 0;
        for name in (0..200_000).flat_map(|seed| names(&layout, seed, 8)) {
            if stored.contains_key(&name.digest) {
                let object = store.read(&name.digest).unwrap();
                assert_eq!(decode(&layout, &name, &object).unwrap(), page_of(&layout, &name));
                whole += 1;
            }
            if whole == stored.len() {
                break;
            }
        }
        assert_eq!(whole, stored.len());
    }
    std::fs::remove_dir_all(path).unwrap();
}

/// What API keys and salts are called in the tier must be the same after a restart, and nobody else's to read.
#[test]
fn a_folders_secret_is_kept_and_another_folder_has_another() {
    let folder =
        |name: &str| std::env::temp_dir().join(format!("suanpan-secret-{name}-{}", std::process::id()));
    let (a, b) = (folder("a"), folder("b"));
    let secret = |f: &std::path::Path| suanpan_cache::tier::folder_secret(Some(f)).unwrap();
    let first = secret(&a);
    assert_eq!(first, secret(&a));
    assert_ne!(first, secret(&b));
    let none = || suanpan_cache::tier::folder_secret(None).unwrap();
    assert_ne!(none(), none());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(a.join("secret")).unwrap().permissions().mode() & 0o777, 0o600);
    }
    std::fs::write(a.join("secret"), b"short").unwrap();
    assert!(suanpan_cache::tier::folder_secret(Some(&a)).is_err(), "a broken one is not replaced in silence");
    for folder in [a, b] {
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// Host memory in front of a store: the least recently used goes, what is below comes back, damage is found there as anywhere.
#[test]
fn host_memory_keeps_what_was_used_last_and_is_believed_no_more_than_a_disk() {
    let layout = layout(1, DType::Bf16);
    let names = names(&layout, 1, 4);
    let objects: Vec<Vec<u8>> = names.iter().map(|n| encode(&layout, n, &page_of(&layout, n))).collect();
    let store = MemoryStore::new(2 * objects[0].len() as u64, None);
    for (name, object) in names.iter().zip(&objects).take(2) {
        store.write(&name.digest, object).unwrap();
    }
    store.read(&names[0].digest).unwrap();
    store.write(&names[2].digest, &objects[2]).unwrap();
    let there = |i: usize| store.is_near(&names[i].digest);
    assert_eq!([there(0), there(1), there(2)], [true, false, true]);
    assert_eq!(store.bytes(), 2 * objects[0].len() as u64);
    assert_eq!(store.list().unwrap().len(), 2);
    let mut damaged = objects[0].clone();
    damaged[200] ^= 4;
    store.write(&names[0].digest, &damaged).unwrap();
    let options = TierOptions { capacity_bytes: 1 << 20, staging_bytes: 1 << 20, ..OPTIONS };
    let tier = Tier::new(layout.clone(), Box::new(store.clone()), options).unwrap();
    assert_eq!(fetch(&tier, &names[..1]).pages.len(), 0);
    until("the damaged object is gone", || tier.books().faults == 1);
    assert!(!store.is_near(&names[0].digest));
}

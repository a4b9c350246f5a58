//! A cache and its model side by side: each operation is applied to both, and all books are checked after it.

use std::collections::BTreeMap;

use suanpan_cache::{OutOfPages, PageHandle, PagePool, PageTable, PrefixCache};

pub const PAGE_SIZE: usize = 2;
const MAX_TABLES: usize = 8;
const MAX_HANDLES: usize = 12;

/// One random act. Indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub enum Op {
    Alloc,
    Share(usize),
    DropHandle(usize),
    /// Looks a prompt up, reserves the rest and evicts where that is needed; keeps the table.
    Admit {
        namespace: u64,
        tokens: Vec<u32>,
    },
    /// The running request `table` gets one more token.
    Decode {
        table: usize,
        token: u32,
    },
    /// Publishes the complete pages of a running request, up to a number of tokens.
    Publish {
        table: usize,
        tokens: usize,
    },
    /// Publishes a request's pages under other tokens: must not be believed for pages published already.
    PublishElsewhere {
        table: usize,
        namespace: u64,
    },
    Truncate {
        table: usize,
        tokens: usize,
    },
    Fork {
        table: usize,
        tokens: usize,
    },
    DropTable(usize),
    /// Holds one page out of the middle of a hit.
    HoldPart {
        namespace: u64,
        tokens: Vec<u32>,
        page: usize,
    },
    Evict(usize),
    Clear,
}

/// A running request.
struct Running {
    namespace: u64,
    tokens: Vec<u32>,
    table: PageTable,
}

/// A cached page in the model: its id and its time of last use, by namespace and every token up to its end.
type Model = BTreeMap<(u64, Vec<u32>), (u32, u64)>;

pub struct World {
    pub pool: PagePool,
    pub cache: PrefixCache,
    running: Vec<Running>,
    handles: Vec<PageHandle>,
    model: Model,
    clock: u64,
    pub seen: Seen,
}

/// How often the interesting things happened: a run that never met them proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub hit_pages: usize,
    pub evicted_pages: usize,
    pub forgotten_pages: usize,
    pub duplicate_pages: usize,
    pub refused_reservations: usize,
}

impl World {
    pub fn new(num_pages: usize) -> World {
        let pool = PagePool::new(num_pages, PAGE_SIZE).unwrap();
        let cache = PrefixCache::new(pool.clone(), true);
        World {
            pool,
            cache,
            running: vec![],
            handles: vec![],
            model: Model::new(),
            clock: 0,
            seen: Seen::default(),
        }
    }

    /// Applies `op` to the cache and to the model and compares everything that can be seen.
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Alloc if self.handles.len() < MAX_HANDLES => {
                let free = self.pool.num_free();
                let page = self.pool.alloc();
                assert_eq!(page.is_some(), free > 0);
                self.handles.extend(page);
            }
            Op::Share(i) if !self.handles.is_empty() && self.handles.len() < MAX_HANDLES => {
                let i = i % self.handles.len();
                let shared = self.handles[i].share();
                assert_eq!(shared.id(), self.handles[i].id());
                self.handles.push(shared);
            }
            Op::DropHandle(i) if !self.handles.is_empty() => {
                let i = i % self.handles.len();
                self.handles.swap_remove(i);
            }
            Op::Admit { namespace, tokens } if self.running.len() < MAX_TABLES => {
                self.admit(*namespace, tokens)
            }
            Op::HoldPart { namespace, tokens, page } if self.handles.len() < MAX_HANDLES => {
                let mut hit = self.lookup(*namespace, tokens);
                if !hit.is_empty() {
                    let page = hit.swap_remove(page % hit.len());
                    self.handles.push(page);
                }
            }
            Op::DropTable(i) if !self.running.is_empty() => {
                let i = i % self.running.len();
                self.running.swap_remove(i);
            }
            Op::Evict(pages) => {
                self.evict(*pages);
            }
            Op::Clear => {
                self.cache.clear();
                self.model.clear();
            }
            Op::Decode { .. }
            | Op::Publish { .. }
            | Op::PublishElsewhere { .. }
            | Op::Truncate { .. }
            | Op::Fork { .. }
                if !self.running.is_empty() =>
            {
                self.apply_to_running(op);
            }
            _ => {}
        }
        self.check();
    }

    fn apply_to_running(&mut self, op: &Op) {
        let count = self.running.len();
        match op {
            Op::Decode { table, token } => {
                let r = &mut self.running[table % count];
                let (free, had) = (self.pool.num_free(), r.table.ids().len());
                let needed = (r.tokens.len() + 1).div_ceil(PAGE_SIZE).saturating_sub(had);
                match r.table.reserve(r.tokens.len() + 1) {
                    Ok(()) => r.tokens.push(*token),
                    Err(e) => {
                        assert_eq!((e, r.table.ids().len()), (OutOfPages { needed, free }, had));
                        assert!(needed > free);
                        self.seen.refused_reservations += 1;
                    }
                }
            }
            Op::Publish { table, tokens } => {
                let i = table % count;
                let len = (*tokens).min(self.running[i].tokens.len());
                let (namespace, tokens) = (self.running[i].namespace, self.running[i].tokens[..len].to_vec());
                self.insert(i, namespace, &tokens);
            }
            Op::PublishElsewhere { table, namespace } => {
                let i = table % count;
                // The same pages with the tokens turned round: only pages never published may be taken over.
                let tokens: Vec<u32> = self.running[i].tokens.iter().map(|t| t + 2).collect();
                self.insert(i, *namespace, &tokens);
            }
            Op::Truncate { table, tokens } => {
                let r = &mut self.running[table % count];
                let keep = (*tokens).min(r.tokens.len());
                r.tokens.truncate(keep);
                r.table.truncate_to(keep);
                assert_eq!(r.table.ids().len(), keep.div_ceil(PAGE_SIZE));
            }
            Op::Fork { table, tokens } if count < MAX_TABLES => {
                let r = &self.running[table % count];
                let tokens = (*tokens).min(r.tokens.len());
                let table = r.table.fork(tokens);
                let full = tokens / PAGE_SIZE;
                assert_eq!(table.ids(), &r.table.ids()[..full]);
                assert!((0..full).all(|p| table.is_shared(p)));
                let tokens = r.tokens[..full * PAGE_SIZE].to_vec();
                self.running.push(Running { namespace: r.namespace, tokens, table });
            }
            _ => {}
        }
    }

    fn admit(&mut self, namespace: u64, tokens: &[u32]) {
        let mut table = PageTable::new(&self.pool);
        self.lookup(namespace, tokens).into_iter().for_each(|page| table.push_shared(page));
        // Listed before it has all its pages, so that the model knows what it holds while pages are evicted.
        self.running.push(Running { namespace, tokens: tokens.to_vec(), table });
        let last = self.running.len() - 1;
        if let Err(short) = self.running[last].table.reserve(tokens.len()) {
            self.evict(short.needed - short.free);
            if self.running[last].table.reserve(tokens.len()).is_err() {
                self.running.pop();
                return;
            }
        }
        let table = &self.running[last].table;
        for (position, page) in (0..tokens.len()).map(|p| (p, table.ids()[p / PAGE_SIZE])) {
            assert_eq!(
                table.slot(position),
                u64::from(page) * PAGE_SIZE as u64 + (position % PAGE_SIZE) as u64
            );
        }
    }

    fn lookup(&mut self, namespace: u64, tokens: &[u32]) -> Vec<PageHandle> {
        let hit = self.cache.lookup(namespace, tokens);
        let limit = tokens.len().saturating_sub(1) / PAGE_SIZE;
        let expected = self.matching(namespace, tokens, limit);
        self.touch(namespace, tokens, expected.len());
        assert_eq!(hit.iter().map(PageHandle::id).collect::<Vec<_>>(), expected);
        self.seen.hit_pages += hit.len();
        hit
    }

    fn insert(&mut self, running: usize, namespace: u64, tokens: &[u32]) {
        let pages = self.running[running].table.pages();
        let added = self.cache.insert(namespace, tokens, pages);
        let ids: Vec<u32> = pages.iter().map(PageHandle::id).collect();
        let limit = (tokens.len() / PAGE_SIZE).min(ids.len());
        let present = self.matching(namespace, tokens, limit);
        let matched = present.len();
        self.seen.duplicate_pages += present.iter().zip(&ids).filter(|(cached, own)| cached != own).count();
        let mut end = matched;
        while end < limit && !self.model.values().any(|&(id, _)| id == ids[end]) {
            self.model.insert((namespace, tokens[..(end + 1) * PAGE_SIZE].to_vec()), (ids[end], 0));
            end += 1;
        }
        self.touch(namespace, tokens, end);
        assert_eq!(added, end - matched);
    }

    fn matching(&self, namespace: u64, tokens: &[u32], limit: usize) -> Vec<u32> {
        (1..=limit)
            .map_while(|n| self.model.get(&(namespace, tokens[..n * PAGE_SIZE].to_vec())))
            .map(|&(id, _)| id)
            .collect()
    }

    fn touch(&mut self, namespace: u64, tokens: &[u32], pages: usize) {
        self.clock += 1;
        for n in 1..=pages {
            self.model.get_mut(&(namespace, tokens[..n * PAGE_SIZE].to_vec())).unwrap().1 = self.clock;
        }
    }

    /// The model's eviction, one page at a time: the least recently used idle page at an end of the tree; where only
    /// held pages are at ends, the least recently used one above which an idle page waits is forgotten.
    fn evict(&mut self, pages: usize) {
        let refs = self.other_references();
        let idle = |id: u32| refs[id as usize] == 0;
        let goal = pages.min(self.model.values().filter(|&&(id, _)| idle(id)).count());
        let mut freed = 0;
        while freed < goal {
            let is_end = |key: &(u64, Vec<u32>)| {
                !self.model.keys().any(|k| k.0 == key.0 && k.1.len() > key.1.len() && k.1.starts_with(&key.1))
            };
            let blocks = |key: &(u64, Vec<u32>)| {
                self.model.iter().any(|(k, &(id, _))| k.0 == key.0 && key.1.starts_with(&k.1) && idle(id))
            };
            let ends: Vec<_> = self.model.iter().filter(|(key, _)| is_end(key)).collect();
            let oldest_idle = ends.iter().filter(|(_, v)| idle(v.0)).min_by_key(|(_, v)| v.1);
            let next = oldest_idle
                .or_else(|| ends.iter().filter(|(key, _)| blocks(key)).min_by_key(|(_, v)| v.1))
                .map(|(key, v)| ((*key).clone(), v.0))
                .expect("an idle page can be reached");
            freed += usize::from(idle(next.1));
            self.seen.forgotten_pages += usize::from(!idle(next.1));
            self.model.remove(&next.0);
        }
        self.seen.evicted_pages += goal;
        assert_eq!(self.cache.evict(pages), goal);
    }

    /// References to each page from outside the cache.
    fn other_references(&self) -> Vec<u32> {
        let mut refs = vec![0; self.pool.num_pages()];
        self.held_ids().for_each(|id| refs[id as usize] += 1);
        refs
    }

    fn held_ids(&self) -> impl Iterator<Item = u32> + '_ {
        let tables = self.running.iter().flat_map(|r| r.table.ids().iter().copied());
        tables.chain(self.handles.iter().map(PageHandle::id))
    }

    fn check(&self) {
        self.pool.check_holders(self.held_ids().chain(self.cache.ids())).unwrap();
        self.cache.check().unwrap();
        let books = self.pool.books();
        books.check().unwrap();
        let mut cached: Vec<u32> = self.cache.ids().collect();
        let mut expected: Vec<u32> = self.model.values().map(|v| v.0).collect();
        cached.sort_unstable();
        expected.sort_unstable();
        assert_eq!(cached, expected);
        assert_eq!((self.cache.cached_pages(), books.cached_pages), (expected.len(), expected.len()));
        let refs = self.other_references();
        let idle = expected.iter().filter(|&&id| refs[id as usize] == 0).count();
        assert_eq!((self.cache.evictable_pages(), books.idle_pages), (idle, idle));
        assert_eq!(books.active_pages, refs.iter().filter(|&&r| r > 0).count());
    }

    /// Lets go of everything: the pool must be as it was at the start.
    pub fn finish(mut self) {
        self.running.clear();
        self.handles.clear();
        let cached = self.cache.cached_pages();
        assert_eq!(self.cache.evict(usize::MAX), cached);
        assert_eq!(self.pool.num_free(), self.pool.num_pages());
        self.pool.check_holders([]).unwrap();
        self.cache.check().unwrap();
    }
}

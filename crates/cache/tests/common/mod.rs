//! A cache and its model side by side: each operation is applied to both, and all books are checked after it. Every slot of the
//! pool has a content, so that a page written while somebody else relies on it shows at once.

mod model;

use suanpan_cache::{EvictionPolicy, Hit, OutOfPages, PageHandle, PagePool, PageTable, PrefixCache};

use model::Model;

pub const PAGE_SIZE: usize = 3;
const MAX_TABLES: usize = 8;
const MAX_HANDLES: usize = 12;

/// One random act. Indices are taken modulo what exists.
#[derive(Clone, Debug)]
pub enum Op {
    Alloc,
    Share(usize),
    DropHandle(usize),
    /// Looks a prompt up, reserves the rest and evicts where that is needed; keeps the table. Computes nothing yet.
    Admit {
        namespace: u64,
        tokens: Vec<u32>,
    },
    /// Computes up to a number of tokens of the running request `table`.
    Chunk {
        table: usize,
        tokens: usize,
    },
    /// The running request `table` computes what is missing and gets one more token.
    Decode {
        table: usize,
        token: u32,
    },
    /// Publishes what a running request has computed, up to a number of tokens.
    Publish {
        table: usize,
        tokens: usize,
        priority: i32,
    },
    /// Publishes a request's pages in another namespace: must not be believed for pages published already.
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
    /// Loses its pages and is admitted anew.
    Preempt(usize),
    /// Ends or is aborted.
    DropTable(usize),
    /// Leaves, and the bytes of its whole pages are kept elsewhere.
    SwapOut(usize),
    /// Brings the bytes of a request swapped out back into the prefix cache; `fails_at` is the page whose copy fails, if it has so many.
    SwapIn {
        swapped: usize,
        fails_at: usize,
    },
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
    computed: usize,
    table: PageTable,
}

/// What is kept of a request elsewhere: its tokens and the contents of its whole pages.
struct Swapped {
    namespace: u64,
    tokens: Vec<u32>,
    pages: Vec<[u32; PAGE_SIZE]>,
}

pub struct World {
    pub pool: PagePool,
    pub cache: PrefixCache,
    running: Vec<Running>,
    handles: Vec<PageHandle>,
    swapped: Vec<Swapped>,
    model: Model,
    /// The token in each slot.
    contents: Vec<u32>,
    pub seen: Seen,
}

/// How often the interesting things happened: a run that never met them proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub hit_pages: usize,
    pub partial_hits: usize,
    pub copies: usize,
    pub evicted_pages: usize,
    pub forgotten_pages: usize,
    pub duplicate_pages: usize,
    pub refused_reservations: usize,
    pub preemptions: usize,
    pub swapped_in: usize,
    pub failed_copies: usize,
}

impl World {
    pub fn new(num_pages: usize, policy: EvictionPolicy) -> World {
        let pool = PagePool::new(num_pages, PAGE_SIZE).unwrap();
        let cache = PrefixCache::new(pool.clone(), true, policy);
        World {
            pool,
            cache,
            running: vec![],
            handles: vec![],
            swapped: vec![],
            model: Model::new(policy),
            contents: vec![u32::MAX; num_pages * PAGE_SIZE],
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
                let mut hit = self.lookup(*namespace, tokens).pages;
                if !hit.is_empty() {
                    let page = hit.swap_remove(page % hit.len());
                    self.handles.push(page);
                }
            }
            Op::SwapIn { swapped, fails_at } if !self.swapped.is_empty() => {
                let swapped = self.swapped.swap_remove(swapped % self.swapped.len());
                self.swap_in(&swapped, *fails_at);
            }
            Op::Evict(pages) => self.evict(*pages),
            Op::Clear => {
                self.cache.clear();
                self.model.clear();
            }
            _ if !self.running.is_empty() => self.apply_to_running(op),
            _ => {}
        }
        self.check();
    }

    fn apply_to_running(&mut self, op: &Op) {
        let count = self.running.len();
        match op {
            Op::Chunk { table, tokens } => self.compute(table % count, *tokens),
            Op::Decode { table, token } => self.decode(table % count, *token),
            Op::Publish { table, tokens, priority } => {
                let i = table % count;
                let namespace = self.running[i].namespace;
                self.insert(i, namespace, *tokens, *priority);
            }
            Op::PublishElsewhere { table, namespace } => {
                self.insert(table % count, *namespace, usize::MAX, 0)
            }
            Op::Truncate { table, tokens } => {
                let r = &mut self.running[table % count];
                r.tokens.truncate(*tokens);
                r.computed = r.computed.min(r.tokens.len());
                r.table.truncate_to(r.tokens.len());
                assert_eq!(r.table.ids().len(), r.tokens.len().div_ceil(PAGE_SIZE));
            }
            Op::Fork { table, tokens } if count < MAX_TABLES => {
                let r = &self.running[table % count];
                let tokens = (*tokens).min(r.computed);
                let table = r.table.fork(tokens);
                let pages = tokens.div_ceil(PAGE_SIZE);
                assert_eq!(table.ids(), &r.table.ids()[..pages]);
                assert!((0..pages).all(|p| table.is_shared(p)));
                let fork = Running {
                    namespace: r.namespace,
                    tokens: r.tokens[..tokens].to_vec(),
                    computed: tokens,
                    table,
                };
                self.running.push(fork);
            }
            Op::Preempt(i) => {
                let Running { namespace, tokens, table, .. } = self.running.swap_remove(i % count);
                drop(table);
                self.seen.preemptions += 1;
                self.admit(namespace, &tokens);
            }
            Op::DropTable(i) => drop(self.running.swap_remove(i % count)),
            Op::SwapOut(i) if self.swapped.len() < 4 => {
                let Running { namespace, tokens, computed, table } = self.running.swap_remove(i % count);
                let page = |&id: &u32| {
                    let at = id as usize * PAGE_SIZE;
                    self.contents[at..at + PAGE_SIZE].try_into().unwrap()
                };
                let pages = table.ids()[..computed / PAGE_SIZE].iter().map(page).collect();
                self.swapped.push(Swapped { namespace, tokens, pages });
            }
            _ => {}
        }
    }

    /// As the scheduler restores pages from a tier: published only when all copies were made.
    fn swap_in(&mut self, swapped: &Swapped, fails_at: usize) {
        let Swapped { namespace, tokens, pages } = swapped;
        let mut table = PageTable::new(&self.pool);
        let found = self.lookup(*namespace, tokens).pages;
        let from = found.len();
        found.into_iter().for_each(|page| table.push_shared(page));
        if from >= pages.len() {
            return;
        }
        let tokens = tokens[..pages.len() * PAGE_SIZE].to_vec();
        let reserve = tokens.len();
        self.running.push(Running { namespace: *namespace, tokens, computed: from * PAGE_SIZE, table });
        let last = self.running.len() - 1;
        if let Err(short) = self.running[last].table.reserve(reserve) {
            self.evict(short.needed - short.free);
        }
        if self.running[last].table.reserve(reserve).is_ok() {
            for (i, page) in pages.iter().enumerate().skip(from) {
                if i == fails_at {
                    self.seen.failed_copies += 1;
                    self.running.pop();
                    return;
                }
                let at = self.running[last].table.ids()[i] as usize * PAGE_SIZE;
                self.contents[at..at + PAGE_SIZE].copy_from_slice(page);
            }
            self.running[last].computed = reserve;
            self.insert(last, *namespace, reserve, 0);
            self.seen.swapped_in += 1;
        }
        self.running.pop();
    }

    /// Writes the next tokens of a request, as a step does: copies first.
    fn compute(&mut self, i: usize, most: usize) {
        let r = &mut self.running[i];
        let end = r.tokens.len().min(r.computed.saturating_add(most)).min(r.table.capacity_tokens());
        if r.computed == end || !Self::make_writable(r, &mut self.contents, &mut self.seen) {
            return;
        }
        for position in r.computed..end {
            self.contents[r.table.slot(position) as usize] = r.tokens[position];
        }
        r.computed = end;
    }

    /// False where the copy found no page.
    fn make_writable(r: &mut Running, contents: &mut [u32], seen: &mut Seen) -> bool {
        match r.table.make_writable(r.computed) {
            Ok(None) => true,
            Ok(Some(copy)) => {
                seen.copies += 1;
                let at = |page: u32| page as usize * PAGE_SIZE;
                contents.copy_within(at(copy.from.id())..at(copy.from.id() + 1), at(copy.to));
                true
            }
            Err(short) => {
                assert_eq!(short, OutOfPages { needed: 1, free: 0 });
                false
            }
        }
    }

    fn decode(&mut self, i: usize, token: u32) {
        self.compute(i, usize::MAX);
        let r = &mut self.running[i];
        let (free, had) = (self.pool.num_free(), r.table.ids().len());
        let needed = (r.tokens.len() + 1).div_ceil(PAGE_SIZE).saturating_sub(had);
        match r.table.reserve(r.tokens.len() + 1) {
            Ok(()) => r.tokens.push(token),
            Err(e) => {
                assert_eq!((e, r.table.ids().len()), (OutOfPages { needed, free }, had));
                assert!(needed > free);
                self.seen.refused_reservations += 1;
            }
        }
        self.compute(i, usize::MAX);
    }

    fn admit(&mut self, namespace: u64, tokens: &[u32]) {
        let mut table = PageTable::new(&self.pool);
        let hit = self.lookup(namespace, tokens);
        let computed = table.push_hit(hit);
        // Listed before it has all its pages, so that the model knows what it holds while pages are evicted.
        self.running.push(Running { namespace, tokens: tokens.to_vec(), computed, table });
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

    fn lookup(&mut self, namespace: u64, tokens: &[u32]) -> Hit {
        let hit = self.cache.lookup(namespace, tokens);
        let usable = tokens.len().saturating_sub(1);
        let expected = self.model.found(namespace, tokens, usable / PAGE_SIZE);
        assert_eq!(hit.pages.iter().map(PageHandle::id).collect::<Vec<_>>(), expected);
        let partial = self.model.partial(namespace, &tokens[..usable], expected.len());
        assert_eq!(hit.partial.as_ref().map_or(0, |p| p.tokens), partial);
        if let Some(p) = &hit.partial {
            let start = hit.pages.len() * PAGE_SIZE;
            let slots = &self.contents[p.page.id() as usize * PAGE_SIZE..][..p.tokens];
            assert_eq!(slots, &tokens[start..start + p.tokens], "a partial hit holds other tokens");
            self.seen.partial_hits += 1;
        }
        self.seen.hit_pages += hit.pages.len();
        hit
    }

    fn insert(&mut self, i: usize, namespace: u64, tokens: usize, priority: i32) {
        let r = &self.running[i];
        let tokens = &r.tokens[..tokens.min(r.computed)];
        let added = self.cache.insert(namespace, tokens, r.table.pages(), priority);
        let (expected, duplicates) = self.model.insert(namespace, tokens, r.table.ids(), priority);
        self.seen.duplicate_pages += duplicates;
        assert_eq!(added, expected);
    }

    fn evict(&mut self, pages: usize) {
        let refs = self.other_references();
        let (goal, forgotten) = self.model.evict(pages, |id| refs[id as usize] == 0);
        self.seen.forgotten_pages += forgotten;
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
        let mut expected: Vec<u32> = self.model.ids().collect();
        cached.sort_unstable();
        expected.sort_unstable();
        assert_eq!(cached, expected);
        assert_eq!((self.cache.cached_pages(), books.cached_pages), (expected.len(), expected.len()));
        let refs = self.other_references();
        let idle = expected.iter().filter(|&&id| refs[id as usize] == 0).count();
        assert_eq!((self.cache.evictable_pages(), books.idle_pages), (idle, idle));
        assert_eq!(books.active_pages, refs.iter().filter(|&&r| r > 0).count());
        for r in &self.running {
            let held = (0..r.computed).map(|p| self.contents[r.table.slot(p) as usize]);
            assert!(held.eq(r.tokens[..r.computed].iter().copied()), "a request's tokens were overwritten");
        }
        for (tokens, id) in self.model.pages() {
            let slots = &self.contents[id as usize * PAGE_SIZE..][..tokens.len()];
            assert_eq!(slots, tokens, "a cached page was overwritten");
        }
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

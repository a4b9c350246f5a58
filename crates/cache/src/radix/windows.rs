//! Last windows of cached prefixes: what layers with a window need to go on from a cached token.
//!
//! Such layers look back a window and no further, so their pages are of a pool of their own, and of a cached prefix only those of its
//! last window are kept, as one unit: it comes and goes whole. A hit is a prefix of which the tree has all pages and a unit has the
//! window. A page that lies in several units is kept until the last of them goes.
//!
//! What goes first: units that were passed over (a later end of the same prefix is kept, and at most one request ever went on from
//! here: the turns before the last of a conversation), then the others, each in the policy's order. So the last windows of as many
//! conversations stay as the pool holds, whatever their number of turns.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;

use super::PrefixCache;
use super::evict::{EvictionPolicy, Rank};
use super::tree::{NodeId, Parent, Reached};
use crate::page_table::PageTable;
use crate::pool::{CachedPage, Imbalance, PageHandle, PagePool};

/// Index of a unit.
pub(super) type UnitId = u32;

/// What a look-up found for layers with a window.
#[derive(Debug, Default)]
pub struct WindowHit {
    /// Index of the first page in the sequence.
    pub first_page: usize,
    /// The first pages of the sequence that are in sight of every token, as far as they lie in front of `first_page`.
    pub sinks: Vec<PageHandle>,
    /// The pages of the window, in order.
    pub pages: Vec<PageHandle>,
    /// The hit ends inside the last of them: it must be copied before anything is written.
    pub ends_inside: bool,
}

/// The last window of one cached prefix.
struct Unit {
    node: NodeId,
    /// Where in the node's tokens the prefix ends.
    end: usize,
    /// Index in the sequence of the window's first page.
    first_page: usize,
    /// The first `sinks` pages of the sequence, then those from `first_page` on.
    pages: Vec<u32>,
    sinks: usize,
    passed: bool,
    hits: u64,
    priority: i32,
    last_use: u64,
}

impl Unit {
    /// The id of a page of the sequence that the unit has: a sink or one of the window.
    fn page(&self, page: usize) -> u32 {
        self.pages[page.checked_sub(self.first_page).map_or(page, |at| self.sinks + at)]
    }
}

/// A page and how many units hold it.
struct Kept {
    page: CachedPage,
    units: u32,
}

/// All units of a prefix cache.
pub(super) struct Windows {
    pool: PagePool,
    /// The widest window, the current token included.
    window: usize,
    /// Pages of a sequence that stay in sight, from its first on.
    sinks: usize,
    units: Vec<Option<Unit>>,
    unused: Vec<UnitId>,
    order: BTreeSet<(bool, Rank, UnitId)>,
    pages: HashMap<u32, Kept>,
    clock: u64,
}

/// A place in the tree where a request can go on.
pub(super) struct Agreed {
    /// Tokens that full and window layers both have.
    pub tokens: usize,
    unit: UnitId,
}

impl Windows {
    pub fn new(pool: PagePool, window: usize, sinks: usize) -> Windows {
        Windows {
            pool,
            window,
            sinks,
            units: Vec::new(),
            unused: Vec::new(),
            order: BTreeSet::new(),
            pages: HashMap::new(),
            clock: 0,
        }
    }

    fn unit(&self, id: UnitId) -> &Unit {
        let Some(unit) = &self.units[id as usize] else { unreachable!("a listed unit is there") };
        unit
    }

    /// Place in the order of eviction; units that were passed over come first.
    fn rank(unit: &Unit, policy: EvictionPolicy, id: UnitId) -> (bool, Rank, UnitId) {
        (!unit.passed, policy.rank_of(unit.hits, unit.priority, unit.last_use), id)
    }

    /// Changes a unit and its place in the order with it.
    fn change(&mut self, id: UnitId, policy: EvictionPolicy, change: impl FnOnce(&mut Unit)) {
        let Some(unit) = &mut self.units[id as usize] else { unreachable!("a listed unit is there") };
        self.order.remove(&Windows::rank(unit, policy, id));
        change(unit);
        self.order.insert(Windows::rank(unit, policy, id));
    }

    /// Tokens that a request of `tokens` tokens could go on from with this unit, whose prefix ends at `end`; None where its first
    /// query would look past the unit's first page.
    fn reach(&self, id: UnitId, end: usize, tokens: usize) -> Option<usize> {
        let first = self.unit(id).first_page * self.pool.page_size();
        let reach = end.min(tokens);
        (reach > 0 && (first == 0 || reach + 1 >= first + self.window)).then_some(reach)
    }

    /// First page that the unit of a prefix of `end` tokens should have: one token more than its window, so that a prompt that ends
    /// right there, whose last token is computed again, finds it too.
    fn first_page(&self, end: usize) -> usize {
        end.saturating_sub(self.window) / self.pool.page_size()
    }

    fn add(&mut self, unit: Unit, policy: EvictionPolicy) -> UnitId {
        let id = self.unused.pop().unwrap_or(self.units.len() as UnitId);
        self.order.insert(Windows::rank(&unit, policy, id));
        if id as usize == self.units.len() {
            self.units.push(Some(unit));
        } else {
            self.units[id as usize] = Some(unit);
        }
        id
    }

    /// Takes a unit out; pages that no other unit has go with it. Returns how many of those nobody else holds.
    fn remove(&mut self, id: UnitId, policy: EvictionPolicy) -> usize {
        let Some(unit) = self.units[id as usize].take() else { unreachable!("a listed unit is there") };
        self.order.remove(&Windows::rank(&unit, policy, id));
        self.unused.push(id);
        let free = self.pool.num_free();
        // From the end, so that the pool hands the run out again in the order in which it was held.
        for page in unit.pages.iter().rev() {
            let Some(kept) = self.pages.get_mut(page) else { unreachable!("a unit's page is kept") };
            kept.units -= 1;
            if kept.units == 0 {
                self.pages.remove(page);
            }
        }
        self.pool.num_free() - free
    }

    fn is_idle(&self, page: u32) -> bool {
        self.pool.idle_suffix(std::slice::from_ref(&self.pages[&page].page), 1) == 1
    }

    /// Another unit's hold on pages kept already.
    fn share(&mut self, pages: &[u32]) {
        for page in pages {
            let Some(kept) = self.pages.get_mut(page) else { unreachable!("a unit's page is kept") };
            kept.units += 1;
        }
    }

    /// Takes pages for a unit: the cache's reference to each, or one more unit of those it has. False, and nothing taken, where one
    /// is of another cache.
    fn take(&mut self, pages: &[&PageHandle]) -> bool {
        for (i, page) in pages.iter().enumerate() {
            if let Some(kept) = self.pages.get_mut(&page.id()) {
                kept.units += 1;
                continue;
            }
            let Some(cached) = page.publish().filter(|_| page.pool().is_same(&self.pool)) else {
                for page in &pages[..i] {
                    self.drop_one(page.id());
                }
                return false;
            };
            self.pages.insert(page.id(), Kept { page: cached, units: 1 });
        }
        true
    }

    fn drop_one(&mut self, page: u32) {
        if let Some(kept) = self.pages.get_mut(&page) {
            kept.units -= 1;
            if kept.units == 0 {
                self.pages.remove(&page);
            }
        }
    }

    pub fn clear(&mut self) {
        *self = Windows::new(self.pool.clone(), self.window, self.sinks);
    }

    /// The unit's place moved: its node was split or grew in front.
    pub fn moved(&mut self, id: UnitId, node: NodeId, end: usize) {
        if let Some(unit) = &mut self.units[id as usize] {
            (unit.node, unit.end) = (node, end);
        }
    }
}

impl PrefixCache {
    /// Keeps the windows of layers that look back `window` tokens at most, the current one included, and to the first `sinks` pages of a
    /// sequence, in pages of `pool`.
    pub fn with_windows(mut self, pool: PagePool, window: usize, sinks: usize) -> PrefixCache {
        self.windows = Some(Windows::new(pool, window, sinks));
        self
    }

    /// The longest prefix of `tokens`, at most `usable` of them, that both kinds of layers can go on from, where `matched` tokens are
    /// in the tree.
    pub(super) fn agree(&self, reached: &Reached, tail: &[u32], matched: usize) -> Option<Agreed> {
        let windows = self.windows.as_ref()?;
        let page_size = self.pool.page_size();
        let mut best: Option<Agreed> = None;
        let mut consider = |node: NodeId, start: usize| {
            for (&end, &unit) in self.nodes[node as usize].units.iter().rev() {
                if let Some(tokens) = windows.reach(unit, start + end, matched)
                    && best.as_ref().is_none_or(|b| b.tokens < tokens)
                {
                    best = Some(Agreed { tokens, unit });
                }
            }
            best.as_ref().map_or(0, |b| b.tokens)
        };
        let inside = reached.pages_in_node < self.nodes[reached.node as usize].pages.len();
        if !inside && let Some((child, _)) = self.nearest_child(reached.node, tail) {
            consider(child, reached.pages * page_size);
        }
        let mut node = reached.node;
        let mut start = (reached.pages - reached.pages_in_node) * page_size;
        loop {
            if consider(node, start) >= start {
                return best;
            }
            let Parent::Node(above) = self.nodes[node as usize].parent else { return best };
            start -= self.nodes[above as usize].pages.len() * page_size;
            node = above;
        }
    }

    /// The pages of the window in front of the agreed token. That place becomes a unit of its own: a prefix that was found is one.
    pub(super) fn take_window(&mut self, namespace: u64, tokens: &[u32], agreed: &Agreed) -> WindowHit {
        let place = self.place_of(namespace, &tokens[..agreed.tokens]);
        let (policy, page_size) = (self.policy, self.pool.page_size());
        let Some(windows) = &mut self.windows else { return WindowHit::default() };
        let unit = windows.unit(agreed.unit);
        let first_page = windows.first_page(agreed.tokens).max(unit.first_page);
        let sinks = windows.sinks.min(first_page);
        let wanted = (0..sinks).chain(first_page..agreed.tokens.div_ceil(page_size));
        let ids: Vec<u32> = wanted.map(|page| unit.page(page)).collect();
        let priority = unit.priority;
        windows.clock += 1;
        let clock = windows.clock;
        let mut shared = ids.iter().map(|id| windows.pages[id].page.share());
        let (sink_pages, pages) = (shared.by_ref().take(sinks).collect(), shared.collect());
        let found = |unit: &mut Unit| {
            (unit.hits, unit.last_use) = (unit.hits + 1, clock);
            unit.passed &= unit.hits < 2;
        };
        if let Some((node, end)) = place {
            let known = self.nodes[node as usize].units.get(&end).copied();
            let id = known.unwrap_or_else(|| {
                windows.share(&ids);
                let unit = Unit {
                    node,
                    end,
                    first_page,
                    pages: ids,
                    sinks,
                    passed: false,
                    hits: 0,
                    priority,
                    last_use: clock,
                };
                windows.add(unit, policy)
            });
            windows.change(id, policy, found);
            self.nodes[node as usize].units.insert(end, id);
        }
        WindowHit {
            first_page,
            sinks: sink_pages,
            pages,
            ends_inside: !agreed.tokens.is_multiple_of(page_size),
        }
    }

    /// Node and offset of the end of `tokens`, all of which are in the tree.
    fn place_of(&self, namespace: u64, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let page_size = self.pool.page_size();
        let (whole, tail) = (tokens.len() / page_size, tokens.len() % page_size);
        let reached = self.walk(namespace, tokens, whole).filter(|r| r.pages == whole)?;
        let covered = self.covering(&reached, &tokens[whole * page_size..])?;
        let pages = covered.pages_in_node - usize::from(tail > 0);
        let end = pages * page_size + tail;
        (end > 0).then_some((covered.node, end))
    }

    /// Keeps the last windows of prefixes of `tokens` that end at `ends`, as far as `table`, the table of the layers with windows,
    /// still holds them and the tree has the tokens. Only computed tokens may be given. The last end is the request's own; the
    /// others are where other requests were seen to part from it.
    pub fn insert_windows(
        &mut self,
        namespace: u64,
        tokens: &[u32],
        ends: &[usize],
        table: &PageTable,
        priority: i32,
    ) {
        if !self.enabled {
            return;
        }
        // The token before each end as well: the same prompt again is found up to its last token, which may lie in another page.
        let ends = ends.iter().filter(|&&end| end <= tokens.len());
        for (end, shared) in ends.flat_map(|&end| {
            let shared = end < tokens.len();
            [(end.saturating_sub(1), false), (end, shared)]
        }) {
            if end == 0 {
                continue;
            }
            if let Some((node, at)) = self.place_of(namespace, &tokens[..end]) {
                self.pass_over(node, at);
                self.insert_unit((node, at), end, table, (priority, shared));
            }
        }
    }

    fn insert_unit(
        &mut self,
        (node, end): (NodeId, usize),
        tokens: usize,
        table: &PageTable,
        (priority, shared): (i32, bool),
    ) {
        let (policy, page_size) = (self.policy, self.pool.page_size());
        let Some(windows) = &mut self.windows else { return };
        windows.clock += 1;
        let clock = windows.clock;
        let hits = if shared { 2 } else { 0 };
        if let Some(&known) = self.nodes[node as usize].units.get(&end) {
            windows.change(known, policy, |unit| {
                unit.last_use = clock;
                unit.priority = unit.priority.max(priority);
                unit.hits = unit.hits.max(hits);
                unit.passed = false;
            });
            return;
        }
        let last = tokens.div_ceil(page_size);
        let wanted = windows.first_page(tokens);
        let first_page = if table.page_at(wanted).is_some() { wanted } else { wanted + 1 };
        let sinks = windows.sinks.min(first_page);
        let wanted = (0..sinks).chain(first_page..last);
        let pages: Vec<&PageHandle> = wanted.map_while(|page| table.page_at(page)).collect();
        let reaches = first_page == 0 || tokens + 1 >= first_page * page_size + windows.window;
        if first_page + pages.len() < sinks + last || !reaches || !windows.take(&pages) {
            return;
        }
        let pages = pages.iter().map(|page| page.id()).collect();
        let unit =
            Unit { node, end, first_page, pages, sinks, passed: false, hits, priority, last_use: clock };
        let id = windows.add(unit, policy);
        self.nodes[node as usize].units.insert(end, id);
    }

    /// Marks the units in front of `end` on the way to `node` that at most one request went on from.
    fn pass_over(&mut self, node: NodeId, end: usize) {
        let policy = self.policy;
        let Some(windows) = &mut self.windows else { return };
        let (mut id, mut before) = (node, end);
        loop {
            for &unit in self.nodes[id as usize].units.range(..before).map(|(_, unit)| unit) {
                if windows.unit(unit).hits < 2 {
                    windows.change(unit, policy, |unit| unit.passed = true);
                }
            }
            let Parent::Node(above) = self.nodes[id as usize].parent else { return };
            (id, before) = (above, usize::MAX);
        }
    }

    /// Frees idle window pages, whole units at a time, and returns how many became free: at least the smaller of `pages` and
    /// `evictable_window_pages()`.
    pub fn evict_windows(&mut self, pages: usize) -> usize {
        let Some(windows) = &self.windows else { return 0 };
        let goal = pages.min(windows.pool.books().idle_pages);
        let mut freed = 0;
        let mut from = None;
        while freed < goal {
            let Some(windows) = &self.windows else { return freed };
            let start = from.map_or(Bound::Unbounded, Bound::Excluded);
            // One that running requests hold whole frees nothing.
            let frees = |id: UnitId| windows.unit(id).pages.iter().any(|&page| windows.is_idle(page));
            let mut rest = windows.order.range((start, Bound::Unbounded));
            let Some(&next) = rest.find(|(_, _, id)| frees(*id)) else { break };
            from = Some(next);
            freed += self.drop_unit(next.2);
        }
        freed
    }

    /// Takes a unit out of the tree. Returns how many pages became free.
    fn drop_unit(&mut self, id: UnitId) -> usize {
        let policy = self.policy;
        let Some(windows) = &mut self.windows else { return 0 };
        let unit = windows.unit(id);
        self.nodes[unit.node as usize].units.remove(&unit.end);
        windows.remove(id, policy)
    }

    /// Takes out the units of a node that end behind `keep` of its tokens.
    pub(super) fn drop_units_behind(&mut self, node: NodeId, keep: usize) {
        let gone = self.nodes[node as usize].units.split_off(&(keep + 1));
        self.drop_units(gone.into_values());
    }

    /// Takes out units that are in no node any more.
    pub(super) fn drop_units(&mut self, units: impl Iterator<Item = UnitId>) {
        let policy = self.policy;
        if let Some(windows) = &mut self.windows {
            for id in units {
                windows.remove(id, policy);
            }
        }
    }

    /// Window pages that only units hold: what `evict_windows` can free.
    pub fn evictable_window_pages(&self) -> usize {
        self.windows.as_ref().map_or(0, |w| w.pool.books().idle_pages)
    }

    /// Last windows kept.
    pub fn num_windows(&self) -> usize {
        self.windows.as_ref().map_or(0, |w| w.order.len())
    }

    /// The ids of all window pages the cache holds, one reference each (for `PagePool::check_holders`).
    pub fn window_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.windows.iter().flat_map(|w| w.pages.keys().copied())
    }

    /// Checks units, their places and their pages from scratch.
    pub(super) fn check_windows(&self) -> Result<(), Imbalance> {
        let Some(windows) = &self.windows else { return Ok(()) };
        let (mut places, mut counts) = (0, HashMap::<u32, u32>::new());
        for (id, node) in self.nodes.iter().enumerate() {
            places += node.units.len();
            for (&end, &unit) in &node.units {
                let unit_of = |u: &Unit| u.node == id as NodeId && u.end == end;
                let linked = windows.units[unit as usize].as_ref().is_some_and(unit_of);
                if !linked || end > node.tokens.len() || end == 0 {
                    return Err(Imbalance::Tree { node: id as NodeId, fault: "a window unit is misplaced" });
                }
                let unit_ref = windows.unit(unit);
                if !windows.order.contains(&Windows::rank(unit_ref, self.policy, unit)) {
                    return Err(Imbalance::Tree { node: id as NodeId, fault: "a unit is out of order" });
                }
                unit_ref.pages.iter().for_each(|&page| *counts.entry(page).or_default() += 1);
            }
        }
        let live = windows.units.iter().flatten().count();
        for (counter, kept, recomputed) in [
            ("window units in order", windows.order.len(), live),
            ("window units in the tree", places, live),
            ("window pages", windows.pages.len(), counts.len()),
            ("cached window pages of the pool", windows.pool.books().cached_pages, counts.len()),
        ] {
            if kept != recomputed {
                return Err(Imbalance::Counter { counter, kept, recomputed });
            }
        }
        match counts.iter().find(|(page, n)| windows.pages.get(page).is_none_or(|kept| kept.units != **n)) {
            Some((&page, &found)) => {
                let recorded = windows.pages.get(&page).map_or(0, |kept| kept.units);
                Err(Imbalance::References { page, recorded, found })
            }
            None => Ok(()),
        }
    }
}

//! The prefix cache: which pages hold which tokens, as a radix tree over pages with exact token comparison.
//!
//! Does not hash tokens and does not look into pages. A node holds a run of pages and their tokens; its children are
//! keyed by their first page of tokens. A page that is only begun is a leaf of its own. Namespaces are disjoint trees.
//!
//! What makes it safe:
//! - Looking a prefix up and pinning it are one act: `lookup` returns references, so nothing can be evicted between.
//! - Only ends of the tree are ever removed, so whatever is in the tree is reachable from its root: a hit never counts
//!   past a page that is gone.
//! - A page is published once, under one prefix. Publishing it again is ignored, whatever the tokens; only the prefix it
//!   stands for may grow, as its owner fills it.
//! - A page of which a hit covers only the first tokens is lent to be copied (`PageTable::push_borrowed`), never written.
//!
//! Pages of one node are always used together: a lookup or an insert that ends inside a node splits it there. Each node
//! has therefore one rank, and removing lowest-ranked leaves page by page from their ends is exactly the policy over pages.

mod check;
mod evict;
mod tree;
mod windows;

use std::collections::{BTreeSet, HashMap};

use crate::pool::{CachedPage, PageHandle, PagePool};
pub use evict::EvictionPolicy;
use evict::Rank;
use tree::{Node, NodeId, Reached, Use};
pub use windows::WindowHit;
use windows::Windows;

/// A prefix cache over the pages of one pool. A pool has at most one.
pub struct PrefixCache {
    pool: PagePool,
    enabled: bool,
    policy: EvictionPolicy,
    roots: HashMap<u64, NodeId>,
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    /// Nodes without children, roots excluded, in order of eviction.
    leaves: BTreeSet<(Rank, NodeId)>,
    clock: u64,
    cached_pages: usize,
    /// The last windows of cached prefixes, for layers that look back no further.
    windows: Option<Windows>,
}

/// What a look-up found, each page with a reference of the caller's own.
#[derive(Debug, Default)]
pub struct Hit {
    /// Pages of which every token matches, in order.
    pub pages: Vec<PageHandle>,
    /// The page after them, where its first tokens match. It must be copied before anything is written behind them.
    pub partial: Option<PartialPage>,
    /// The window in front of the hit's end, where the cache keeps windows.
    pub window: WindowHit,
    /// Tokens in whole pages that the tree has of the prompt, though the hit may end before for want of a window: there other
    /// prompts parted from it.
    pub branch: usize,
}

/// The beginning of a page.
#[derive(Debug)]
pub struct PartialPage {
    /// The page.
    pub page: PageHandle,
    /// How many of its tokens match: at least 1, fewer than a page.
    pub tokens: usize,
}

impl Hit {
    /// Tokens found.
    pub fn tokens(&self, page_size: usize) -> usize {
        self.pages.len() * page_size + self.partial.as_ref().map_or(0, |p| p.tokens)
    }

    /// Nothing was found.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.partial.is_none()
    }
}

impl PrefixCache {
    /// An empty cache. Where `enabled` is false nothing is ever kept or found.
    pub fn new(pool: PagePool, enabled: bool, policy: EvictionPolicy) -> PrefixCache {
        PrefixCache {
            pool,
            enabled,
            policy,
            roots: HashMap::new(),
            nodes: Vec::new(),
            unused: Vec::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            cached_pages: 0,
            windows: None,
        }
    }

    /// The longest cached prefix of `tokens`: whole pages, then the beginning of one more. Where the cache keeps windows, the
    /// longest whose window is kept.
    ///
    /// Capped at `tokens.len() - 1` tokens, so that at least one token is left to compute logits from. The page of a partial hit
    /// is not renewed in the order of eviction: whoever copies it publishes a page of the same beginning.
    pub fn lookup(&mut self, namespace: u64, tokens: &[u32]) -> Hit {
        let usable = tokens.len().saturating_sub(1);
        if self.windows.is_none() {
            return self.lookup_within(namespace, &tokens[..usable]);
        }
        let (agreed, branch) = self.find_agreed(namespace, &tokens[..usable]);
        let Some(agreed) = agreed else { return Hit { branch, ..Hit::default() } };
        let hit = self.lookup_within(namespace, &tokens[..agreed.tokens]);
        debug_assert_eq!(hit.tokens(self.pool.page_size()), agreed.tokens, "all of it was in the tree");
        Hit { window: self.take_window(namespace, tokens, &agreed), branch, ..hit }
    }

    /// Where full and window layers agree that `tokens` can go on, and how many tokens in whole pages the tree has.
    fn find_agreed(&self, namespace: u64, tokens: &[u32]) -> (Option<windows::Agreed>, usize) {
        let page_size = self.pool.page_size();
        let Some(reached) = self.walk(namespace, tokens, tokens.len() / page_size) else { return (None, 0) };
        let whole = reached.pages * page_size;
        let tail = &tokens[whole..];
        let matched = whole + self.partial_tokens(&reached, tail);
        (self.agree(&reached, tail, matched), whole)
    }

    fn lookup_within(&mut self, namespace: u64, tokens: &[u32]) -> Hit {
        let page_size = self.pool.page_size();
        let Some(reached) = self.walk(namespace, tokens, tokens.len() / page_size) else {
            return Hit::default();
        };
        let mut pages = Vec::with_capacity(reached.pages);
        let end = if reached.pages == 0 {
            reached.node
        } else {
            let end = self.end_at(&reached);
            let path = self.touch(end, Use::Found);
            let found = path.iter().rev().flat_map(|&n| &self.nodes[n as usize].pages);
            self.pool.share_into(found, &mut pages);
            end
        };
        let branch = reached.pages * page_size;
        let partial = self.nearest_child(end, &tokens[branch..]);
        let partial = partial
            .map(|(child, tokens)| PartialPage { page: self.nodes[child as usize].pages[0].share(), tokens });
        Hit { pages, partial, window: WindowHit::default(), branch }
    }

    /// Tokens of `tail`, less than a page of them or more, in which the page right after `reached` begins.
    fn partial_tokens(&self, reached: &Reached, tail: &[u32]) -> usize {
        let node = &self.nodes[reached.node as usize];
        if reached.pages_in_node < node.pages.len() {
            let next = &node.tokens[reached.pages_in_node * self.pool.page_size()..];
            return tree::common_prefix(next, tail);
        }
        self.nearest_child(reached.node, tail).map_or(0, |(_, tokens)| tokens)
    }

    /// How many whole pages `lookup` would find; renews and pins nothing.
    pub fn peek(&self, namespace: u64, tokens: &[u32]) -> usize {
        let page_size = self.pool.page_size();
        let usable = tokens.len().saturating_sub(1);
        if self.windows.is_some() {
            let agreed = self.find_agreed(namespace, &tokens[..usable]).0;
            return agreed.map_or(0, |agreed| agreed.tokens / page_size);
        }
        self.walk(namespace, tokens, usable / page_size).map_or(0, |reached| reached.pages)
    }

    /// Publishes the pages of `tokens` that are not cached yet, sharing them; `pages[i]` holds the tokens `i * page_size ..`,
    /// the last one perhaps only the first of its tokens. Where the same tokens are cached already, the cached page stays and
    /// the caller's is not kept. Returns how many pages were added.
    ///
    /// Only tokens that are computed may be given: from here on others read them. What lies behind `tokens` in the last page
    /// may still be written by the page's owner. Pages with a higher `priority` are kept longer under that policy.
    pub fn insert(&mut self, namespace: u64, tokens: &[u32], pages: &[PageHandle], priority: i32) -> usize {
        let page_size = self.pool.page_size();
        let tokens = &tokens[..tokens.len().min(pages.len() * page_size)];
        if !self.enabled || tokens.is_empty() {
            return 0;
        }
        let reached = self.walk(namespace, tokens, tokens.len() / page_size);
        let matched = reached.as_ref().map_or(0, |r| r.pages);
        let rest = &tokens[matched * page_size..];
        if let Some(covered) =
            reached.as_ref().filter(|_| rest.len() < page_size).and_then(|r| self.covering(r, rest))
        {
            let end = self.end_at(&covered);
            self.touch(end, Use::Published(priority));
            return 0;
        }
        // A page that was published when less of it was filled, by this caller or by another.
        let shorter =
            reached.as_ref().and_then(|r| self.shorter_child(r, &rest[..rest.len().min(page_size)]));
        let (new, added) = self.publish(&pages[matched..rest.len().div_ceil(page_size) + matched], shorter);
        if new.is_empty() {
            if let Some(reached) = reached.filter(|r| r.pages > 0) {
                let end = self.end_at(&reached);
                self.touch(end, Use::Published(priority));
            }
            return 0;
        }
        let end = match &reached {
            Some(reached) => self.end_at(reached),
            None => self.add_root(namespace),
        };
        let (end, first) = self.append(end, rest, new, priority);
        if let Some(shorter) = shorter {
            // What it stood for is the beginning of the first new page now, and so are the windows of prefixes that end in it.
            let units = std::mem::take(&mut self.nodes[shorter as usize].units);
            self.place_units(first.0, units.into_iter().map(|(end, unit)| (first.1 + end, unit)));
            self.remove_leaf(shorter);
        }
        self.touch(end, Use::Published(priority));
        added
    }

    /// The cache's references to the longest run of `pages` that it may hold, and how many of them are new. The page of the leaf
    /// `shorter` may be the first of them: then its reference moves over.
    fn publish(&mut self, pages: &[PageHandle], shorter: Option<NodeId>) -> (Vec<CachedPage>, usize) {
        let mut new = Vec::with_capacity(pages.len());
        if let Some(shorter) = shorter {
            let held = &mut self.nodes[shorter as usize].pages;
            if pages.first().is_some_and(|page| page.id() == held[0].id()) {
                new.append(held);
                self.cached_pages -= 1;
            }
        }
        let moved = new.len();
        new.extend(
            pages[moved..]
                .iter()
                .map_while(|page| if page.pool().is_same(&self.pool) { page.publish() } else { None }),
        );
        let added = new.len() - moved;
        (new, added)
    }

    /// Forgets everything. Pages that nobody else holds become free.
    pub fn clear(&mut self) {
        self.roots.clear();
        self.nodes.clear();
        self.unused.clear();
        self.leaves.clear();
        self.cached_pages = 0;
        if let Some(windows) = &mut self.windows {
            windows.clear();
        }
    }

    /// Whether anything is kept at all.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// What goes first when pages are needed.
    pub fn policy(&self) -> EvictionPolicy {
        self.policy
    }

    /// Pages the cache holds.
    pub fn cached_pages(&self) -> usize {
        self.cached_pages
    }

    /// Pages that only the cache holds, in O(1): what `evict` can free.
    pub fn evictable_pages(&self) -> usize {
        if self.cached_pages == 0 { 0 } else { self.pool.books().idle_pages }
    }

    /// The ids of all cached pages, one reference each (for `PagePool::check_holders`).
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.iter().flat_map(|n| n.pages.iter().map(CachedPage::id))
    }
}

//! What goes when pages are needed: the policy's order over leaves, and pages that stand below held ones.

use std::fmt;
use std::ops::Bound;
use std::str::FromStr;

use suanpan_base::BadArgument;

use super::PrefixCache;
use super::tree::{Node, NodeId, Parent};

/// Place in the order of eviction: what the policy counts, then the time of last use. A parent never ranks below its children.
pub(super) type Rank = (i64, u64);

/// Which cached pages go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// The least recently used.
    #[default]
    Lru,
    /// The least often found; among equals the least recently used.
    Lfu,
    /// Those of the lowest priority; among equals the least recently used.
    Priority,
}

impl EvictionPolicy {
    /// Every policy.
    pub const ALL: [EvictionPolicy; 3] = [EvictionPolicy::Lru, EvictionPolicy::Lfu, EvictionPolicy::Priority];

    /// The name used in options.
    pub const fn name(self) -> &'static str {
        match self {
            EvictionPolicy::Lru => "lru",
            EvictionPolicy::Lfu => "lfu",
            EvictionPolicy::Priority => "priority",
        }
    }

    pub(super) fn rank(self, node: &Node) -> Rank {
        self.rank_of(node.hits, node.priority, node.last_use)
    }

    /// The rank of what was found `hits` times, has this priority and was used last at that time.
    pub(super) fn rank_of(self, hits: u64, priority: i32, last_use: u64) -> Rank {
        let counted = match self {
            EvictionPolicy::Lru => 0,
            EvictionPolicy::Lfu => i64::try_from(hits).unwrap_or(i64::MAX),
            EvictionPolicy::Priority => i64::from(priority),
        };
        (counted, last_use)
    }

    /// Whether pages just published with `priority` behind `leaf` rank as its own, so that they may be of one node.
    pub(super) fn may_grow(self, leaf: &Node, priority: i32) -> bool {
        match self {
            EvictionPolicy::Lru => true,
            EvictionPolicy::Lfu => leaf.hits == 0,
            EvictionPolicy::Priority => leaf.priority <= priority,
        }
    }
}

impl fmt::Display for EvictionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EvictionPolicy {
    type Err = BadArgument;

    fn from_str(s: &str) -> Result<Self, BadArgument> {
        let known = EvictionPolicy::ALL.into_iter().find(|p| p.name() == s);
        known.ok_or_else(|| BadArgument::new("prefix cache", "eviction policy", s, "lru, lfu, priority"))
    }
}

impl PrefixCache {
    /// Frees up to `pages` idle pages, first those that the policy ranks lowest, and returns how many became free: the smaller
    /// of `pages` and `evictable_pages()`.
    ///
    /// A page that somebody else holds is never freed. Where such a page stands below an idle one (its holder was given
    /// only a part of the prefix, or had computed the first part itself), idle pages can run out before it: then the
    /// cache forgets the held page, which stays with its holder, and frees what stood above it.
    pub fn evict(&mut self, pages: usize) -> usize {
        let goal = pages.min(self.evictable_pages());
        let mut freed = 0;
        while freed < goal {
            let before = freed;
            freed += self.evict_leaves(goal - freed);
            if freed < goal && !self.forget_one_blocker() && freed == before {
                break;
            }
        }
        freed
    }

    /// Frees up to `goal` idle pages from the ends of leaves, lowest-ranked leaf first.
    fn evict_leaves(&mut self, goal: usize) -> usize {
        let mut freed = 0;
        // The last leaf that was left standing because its end is held.
        let mut held: Option<(Rank, NodeId)> = None;
        while freed < goal {
            let from = held.map_or(Bound::Unbounded, Bound::Excluded);
            let Some(&leaf) = self.leaves.range((from, Bound::Unbounded)).next() else { break };
            let pages = &self.nodes[leaf.1 as usize].pages;
            let idle = self.pool.idle_suffix(pages, goal - freed);
            let emptied = idle == pages.len();
            freed += idle;
            let new_leaf = self.cut(leaf.1, idle);
            if !emptied {
                held = Some(leaf);
            } else if new_leaf.is_some_and(|new| held.is_some_and(|at| new < at)) {
                // The parent, now a leaf, comes earlier in order than where the scan has come to.
                held = None;
            }
        }
        freed
    }

    /// Drops the cache's references to the held pages at the end of the lowest-ranked leaf that stands below an idle page.
    /// False where there is none.
    fn forget_one_blocker(&mut self) -> bool {
        let blocks = |&(_, leaf): &(Rank, NodeId)| {
            let mut id = leaf;
            loop {
                let node = &self.nodes[id as usize];
                let Parent::Node(above) = node.parent else { return false };
                if self.pool.busy_suffix(&node.pages) < node.pages.len() {
                    return true;
                }
                id = above;
            }
        };
        let Some(&(_, leaf)) = self.leaves.iter().find(|leaf| blocks(leaf)) else { return false };
        let busy = self.pool.busy_suffix(&self.nodes[leaf as usize].pages);
        self.cut(leaf, busy);
        busy > 0
    }

    /// Drops the last `pages` pages of a leaf. A leaf left empty goes; where that makes its parent a leaf, the parent's
    /// entry in `leaves` is returned.
    fn cut(&mut self, leaf: NodeId, pages: usize) -> Option<(Rank, NodeId)> {
        let node = &mut self.nodes[leaf as usize];
        let keep = node.pages.len() - pages;
        if keep == 0 {
            return self.remove_leaf(leaf);
        }
        self.cached_pages -= pages;
        // From the end, so that the pool hands the run out again in the order in which it was held.
        node.pages.drain(keep..).rev().for_each(drop);
        if pages > 0 {
            let tokens = keep * self.pool.page_size();
            node.tokens.truncate(tokens);
            self.drop_units_behind(leaf, tokens);
        }
        None
    }
}

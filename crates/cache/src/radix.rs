//! The prefix cache: which pages hold which tokens, as a radix tree over whole pages with exact token comparison.
//!
//! Does not hash tokens and does not look into pages. A node holds a run of pages and their tokens; its children are
//! keyed by their first page of tokens. Namespaces are disjoint trees.
//!
//! What makes it safe:
//! - Looking a prefix up and pinning it are one act: `lookup` returns references, so nothing can be evicted between.
//! - Only ends of the tree are ever removed, so whatever is in the tree is reachable from its root: a hit never counts
//!   past a page that is gone.
//! - A page is published once, under one prefix. Publishing it again is ignored, whatever the tokens.
//!
//! Pages of one node are always used together: a lookup or an insert that ends inside a node splits it there. Each node
//! has therefore one time of last use, and removing least recently used leaves page by page from their ends is exactly
//! LRU over pages.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use crate::pool::{CachedPage, Imbalance, PageHandle, PagePool};

/// Index of a node in `PrefixCache::nodes`.
type NodeId = u32;

enum Parent {
    /// The node is the empty root of this namespace.
    Root(u64),
    Node(NodeId),
    /// The record is unused.
    Unused,
}

struct Node {
    parent: Parent,
    /// `page_size` tokens a page.
    tokens: Vec<u32>,
    pages: Vec<CachedPage>,
    /// By the child's first page of tokens.
    children: BTreeMap<Box<[u32]>, NodeId>,
    /// Value of the logical clock at the last lookup or insert that ended in or passed this node.
    last_use: u64,
}

/// A prefix cache over the pages of one pool. A pool has at most one.
pub struct PrefixCache {
    pool: PagePool,
    enabled: bool,
    roots: HashMap<u64, NodeId>,
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    /// Nodes without children, roots excluded, by time of last use.
    leaves: BTreeSet<(u64, NodeId)>,
    clock: u64,
    cached_pages: usize,
}

/// Where a walk from the root ended.
struct Reached {
    node: NodeId,
    /// Pages of `node` that matched (all of them, or the tree ends here for these tokens).
    pages_in_node: usize,
    /// Pages that matched in all.
    pages: usize,
}

impl PrefixCache {
    /// An empty cache. Where `enabled` is false nothing is ever kept or found.
    pub fn new(pool: PagePool, enabled: bool) -> PrefixCache {
        PrefixCache {
            pool,
            enabled,
            roots: HashMap::new(),
            nodes: Vec::new(),
            unused: Vec::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            cached_pages: 0,
        }
    }

    /// The pages of the longest cached whole-page prefix of `tokens`, each with a reference of the caller's own.
    ///
    /// Capped at `tokens.len() - 1` tokens, so that at least one token is left to compute logits from.
    pub fn lookup(&mut self, namespace: u64, tokens: &[u32]) -> Vec<PageHandle> {
        let limit = tokens.len().saturating_sub(1) / self.pool.page_size();
        let Some(reached) = self.walk(namespace, tokens, limit) else { return Vec::new() };
        if reached.pages == 0 {
            return Vec::new();
        }
        let end = self.end_at(&reached);
        let path = self.touch(end);
        let mut found = Vec::with_capacity(reached.pages);
        let pages = path.iter().rev().flat_map(|&n| &self.nodes[n as usize].pages);
        self.pool.share_into(pages, &mut found);
        found
    }

    /// Publishes the pages of `tokens` that are filled completely and not cached yet, sharing them; `pages[i]` holds the
    /// tokens `i * page_size ..`. Where the same tokens are cached already, the cached page stays and the caller's is
    /// not kept. Returns how many pages were added.
    ///
    /// Only pages whose every token is computed may be given: from here on others read them.
    pub fn insert(&mut self, namespace: u64, tokens: &[u32], pages: &[PageHandle]) -> usize {
        let page_size = self.pool.page_size();
        let limit = (tokens.len() / page_size).min(pages.len());
        if !self.enabled || limit == 0 {
            return 0;
        }
        let reached = self.walk(namespace, tokens, limit);
        let matched = reached.as_ref().map_or(0, |r| r.pages);
        let new: Vec<CachedPage> = pages[matched..limit]
            .iter()
            .map_while(|page| if page.pool().is_same(&self.pool) { page.publish() } else { None })
            .collect();
        if matched + new.len() == 0 {
            return 0;
        }
        let end = match &reached {
            Some(reached) => self.end_at(reached),
            None => self.add_root(namespace),
        };
        let added = new.len();
        let end = if added == 0 {
            end
        } else {
            self.append(end, &tokens[matched * page_size..][..added * page_size], new)
        };
        self.cached_pages += added;
        self.touch(end);
        added
    }

    /// Frees up to `pages` idle pages, least recently used first, and returns how many became free: the smaller of
    /// `pages` and `evictable_pages()`.
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

    /// Forgets everything. Pages that nobody else holds become free.
    pub fn clear(&mut self) {
        self.roots.clear();
        self.nodes.clear();
        self.unused.clear();
        self.leaves.clear();
        self.cached_pages = 0;
    }

    /// Whether anything is kept at all.
    pub fn is_enabled(&self) -> bool {
        self.enabled
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

// The tree itself.
impl PrefixCache {
    /// Follows `tokens` for at most `limit` pages. None where the namespace is empty.
    fn walk(&self, namespace: u64, tokens: &[u32], limit: usize) -> Option<Reached> {
        let page_size = self.pool.page_size();
        let mut reached = Reached { node: *self.roots.get(&namespace)?, pages_in_node: 0, pages: 0 };
        while reached.pages < limit {
            let rest = &tokens[reached.pages * page_size..limit * page_size];
            let Some(&child) = self.nodes[reached.node as usize].children.get(&rest[..page_size]) else {
                break;
            };
            let node = &self.nodes[child as usize];
            let pages = matching_pages(&node.tokens, rest, page_size);
            reached = Reached { node: child, pages_in_node: pages, pages: reached.pages + pages };
            if pages < node.pages.len() {
                break;
            }
        }
        Some(reached)
    }

    /// The node that ends exactly where the walk ended.
    fn end_at(&mut self, reached: &Reached) -> NodeId {
        if reached.pages_in_node < self.nodes[reached.node as usize].pages.len() {
            self.split(reached.node, reached.pages_in_node)
        } else {
            reached.node
        }
    }

    /// Cuts the first `pages` pages off `lower` into a new node above it and returns that node.
    fn split(&mut self, lower: NodeId, pages: usize) -> NodeId {
        let page_size = self.pool.page_size();
        let node = &mut self.nodes[lower as usize];
        let (rest_tokens, rest_pages) =
            (node.tokens.split_off(pages * page_size), node.pages.split_off(pages));
        let upper = Node {
            parent: std::mem::replace(&mut node.parent, Parent::Unused),
            tokens: std::mem::replace(&mut node.tokens, rest_tokens),
            pages: std::mem::replace(&mut node.pages, rest_pages),
            children: BTreeMap::from([(node.tokens[..page_size].into(), lower)]),
            last_use: node.last_use,
        };
        let Parent::Node(above) = upper.parent else { unreachable!("a root has no pages to split") };
        let key: Box<[u32]> = upper.tokens[..page_size].into();
        let upper = self.add_node(upper);
        self.nodes[lower as usize].parent = Parent::Node(upper);
        self.nodes[above as usize].children.insert(key, upper);
        upper
    }

    fn add_root(&mut self, namespace: u64) -> NodeId {
        let root = self.add_node(Node::empty(Parent::Root(namespace), self.clock));
        self.roots.insert(namespace, root);
        root
    }

    /// Puts new pages behind `end` and returns the node that they end in. A leaf grows in place; its time of last use
    /// is the caller's to renew.
    fn append(&mut self, end: NodeId, tokens: &[u32], pages: Vec<CachedPage>) -> NodeId {
        let node = &mut self.nodes[end as usize];
        if node.children.is_empty() && matches!(node.parent, Parent::Node(_)) {
            node.tokens.extend_from_slice(tokens);
            node.pages.extend(pages);
            return end;
        }
        let mut child = Node::empty(Parent::Node(end), self.clock);
        child.tokens.extend_from_slice(tokens);
        child.pages = pages;
        let last_use = child.last_use;
        let child = self.add_node(child);
        let key = tokens[..self.pool.page_size()].into();
        self.nodes[end as usize].children.insert(key, child);
        self.leaves.insert((last_use, child));
        child
    }

    fn add_node(&mut self, node: Node) -> NodeId {
        match self.unused.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        }
    }

    /// Marks `end` and everything above it as used now. Returns the path, `end` first, without the root.
    fn touch(&mut self, end: NodeId) -> Vec<NodeId> {
        self.clock += 1;
        let mut path = Vec::new();
        let mut id = end;
        loop {
            let node = &mut self.nodes[id as usize];
            let before = std::mem::replace(&mut node.last_use, self.clock);
            let Parent::Node(above) = node.parent else { return path };
            if self.leaves.remove(&(before, id)) {
                self.leaves.insert((self.clock, id));
            }
            path.push(id);
            id = above;
        }
    }

    /// Frees up to `goal` idle pages from the ends of leaves, least recently used leaf first.
    fn evict_leaves(&mut self, goal: usize) -> usize {
        let mut freed = 0;
        // The last leaf that was left standing because its end is held.
        let mut held: Option<(u64, NodeId)> = None;
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

    /// Drops the cache's references to the held pages at the end of the least recently used leaf that stands below an
    /// idle page. False where there is none.
    fn forget_one_blocker(&mut self) -> bool {
        let blocks = |&(_, leaf): &(u64, NodeId)| {
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
    fn cut(&mut self, leaf: NodeId, pages: usize) -> Option<(u64, NodeId)> {
        let page_size = self.pool.page_size();
        self.cached_pages -= pages;
        let node = &mut self.nodes[leaf as usize];
        let keep = node.pages.len() - pages;
        // From the end, so that the pool hands the run out again in the order in which it was held.
        node.pages.drain(keep..).rev().for_each(drop);
        if keep > 0 {
            node.tokens.truncate(keep * page_size);
            return None;
        }
        let Parent::Node(above) = node.parent else { unreachable!("a root is not a leaf") };
        self.leaves.remove(&(node.last_use, leaf));
        let gone = std::mem::replace(node, Node::empty(Parent::Unused, 0));
        self.unused.push(leaf);
        let parent = &mut self.nodes[above as usize];
        parent.children.remove(&gone.tokens[..page_size]);
        if !parent.children.is_empty() {
            return None;
        }
        if let Parent::Root(namespace) = parent.parent {
            *parent = Node::empty(Parent::Unused, 0);
            self.roots.remove(&namespace);
            self.unused.push(above);
            return None;
        }
        let entry = (parent.last_use, above);
        self.leaves.insert(entry);
        Some(entry)
    }

    /// Checks the tree from scratch, in O(pages): every node reachable under its own tokens, parents used no earlier
    /// than children, leaves and counts as kept.
    pub fn check(&self) -> Result<(), Imbalance> {
        let (mut seen, mut pages, mut leaves) = (0, 0, 0);
        let mut todo: Vec<NodeId> = self.roots.values().copied().collect();
        while let Some(id) = todo.pop() {
            let node = &self.nodes[id as usize];
            seen += 1;
            pages += node.pages.len();
            let is_root = matches!(node.parent, Parent::Root(_));
            let is_leaf = node.children.is_empty() && !is_root;
            leaves += usize::from(is_leaf);
            let holds = [
                (
                    node.tokens.len() == node.pages.len() * self.pool.page_size(),
                    "tokens do not fill the pages",
                ),
                (is_root == node.pages.is_empty(), "only roots are empty"),
                (!is_root || !node.children.is_empty(), "an empty namespace is kept"),
                (is_leaf == self.leaves.contains(&(node.last_use, id)), "not in the order of eviction"),
            ];
            if let Some((_, fault)) = holds.iter().find(|(holds, _)| !holds) {
                return Err(Imbalance::Tree { node: id, fault });
            }
            for (key, &child) in &node.children {
                let below = &self.nodes[child as usize];
                let linked = matches!(below.parent, Parent::Node(above) if above == id);
                if !linked || !below.tokens.starts_with(key) || below.last_use > node.last_use {
                    return Err(Imbalance::Tree {
                        node: child,
                        fault: "parent, key or time of use is wrong",
                    });
                }
                todo.push(child);
            }
        }
        for (counter, kept, recomputed) in [
            ("cached_pages of the tree", self.cached_pages, pages),
            ("nodes", self.nodes.len() - self.unused.len(), seen),
            ("leaves", self.leaves.len(), leaves),
        ] {
            if kept != recomputed {
                return Err(Imbalance::Counter { counter, kept, recomputed });
            }
        }
        Ok(())
    }
}

impl Node {
    fn empty(parent: Parent, last_use: u64) -> Node {
        Node { parent, tokens: Vec::new(), pages: Vec::new(), children: BTreeMap::new(), last_use }
    }
}

/// Whole pages in which `a` and `b` agree from their start.
fn matching_pages(a: &[u32], b: &[u32], page_size: usize) -> usize {
    let len = a.len().min(b.len());
    if a[..len] == b[..len] {
        return len / page_size;
    }
    a.chunks_exact(page_size).zip(b.chunks_exact(page_size)).take_while(|(a, b)| a == b).count()
}

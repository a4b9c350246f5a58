//! The tree itself: walking, splitting, growing. What is kept and what goes is decided elsewhere.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::PrefixCache;
use super::evict::Rank;
use super::windows::UnitId;
use crate::pool::CachedPage;

/// Index of a node in `PrefixCache::nodes`.
pub(super) type NodeId = u32;

pub(super) enum Parent {
    /// The node is the empty root of this namespace.
    Root(u64),
    Node(NodeId),
    /// The record is unused.
    Unused,
}

pub(super) struct Node {
    pub parent: Parent,
    /// `page_size` tokens a page; fewer in a leaf of one page that is only begun.
    pub tokens: Vec<u32>,
    pub pages: Vec<CachedPage>,
    /// By the child's first page of tokens. No key begins another.
    pub children: BTreeMap<Box<[u32]>, NodeId>,
    /// Last windows kept of prefixes that end in this node, by where in its tokens they end.
    pub units: BTreeMap<usize, UnitId>,
    /// Value of the logical clock at the last lookup or insert that ended in or passed this node.
    pub last_use: u64,
    /// Lookups that ended in or passed this node.
    pub hits: u64,
    /// The highest priority of those who published it or what stands behind it.
    pub priority: i32,
}

/// How a path is used.
#[derive(Clone, Copy)]
pub(super) enum Use {
    Found,
    Published(i32),
}

/// Where a walk from the root ended.
pub(super) struct Reached {
    pub node: NodeId,
    /// Pages of `node` that matched (all of them, or the tree ends here for these tokens).
    pub pages_in_node: usize,
    /// Pages that matched in all.
    pub pages: usize,
}

impl Node {
    pub fn empty(parent: Parent, last_use: u64) -> Node {
        Node {
            parent,
            tokens: Vec::new(),
            pages: Vec::new(),
            children: BTreeMap::new(),
            units: BTreeMap::new(),
            last_use,
            hits: 0,
            priority: i32::MIN,
        }
    }

    /// The key under which the parent keeps this node.
    pub fn key(&self, page_size: usize) -> &[u32] {
        &self.tokens[..page_size.min(self.tokens.len())]
    }
}

impl PrefixCache {
    /// Follows `tokens` for at most `limit` whole pages. None where the namespace is empty.
    pub(super) fn walk(&self, namespace: u64, tokens: &[u32], limit: usize) -> Option<Reached> {
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

    /// The child of `node` that agrees longest with the start of `tokens`, and how long: at least 1, less than a page.
    pub(super) fn nearest_child(&self, node: NodeId, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let children = &self.nodes[node as usize].children;
        // In the order of keys nothing agrees longer than the neighbours.
        let before = children.range::<[u32], _>((Bound::Unbounded, Bound::Included(tokens))).next_back();
        let after = children.range::<[u32], _>((Bound::Excluded(tokens), Bound::Unbounded)).next();
        let neighbours = before.into_iter().chain(after);
        let agree = neighbours.map(|(key, &child)| (common_prefix(key, tokens), child));
        let (tokens, child) = agree.max_by_key(|&(n, _)| n)?;
        (tokens > 0).then_some((child, tokens))
    }

    /// Where the page ends that begins with `tail` (less than a page) right after `reached`; with an empty tail, `reached`.
    pub(super) fn covering(&self, reached: &Reached, tail: &[u32]) -> Option<Reached> {
        let Reached { node, pages_in_node, pages } = *reached;
        if tail.is_empty() {
            return Some(Reached { node, pages_in_node, pages });
        }
        let at = &self.nodes[node as usize];
        if pages_in_node < at.pages.len() {
            let next = &at.tokens[pages_in_node * self.pool.page_size()..];
            return next.starts_with(tail).then_some(Reached {
                node,
                pages_in_node: pages_in_node + 1,
                pages: pages + 1,
            });
        }
        let (key, &child) =
            at.children.range::<[u32], _>((Bound::Included(tail), Bound::Unbounded)).next()?;
        key.starts_with(tail).then_some(Reached { node: child, pages_in_node: 1, pages: pages + 1 })
    }

    /// The leaf right after `reached` whose page holds only the first few tokens of `head`.
    pub(super) fn shorter_child(&self, reached: &Reached, head: &[u32]) -> Option<NodeId> {
        if reached.pages_in_node < self.nodes[reached.node as usize].pages.len() {
            return None;
        }
        let (_, agree) = self.nearest_child(reached.node, head)?;
        let children = &self.nodes[reached.node as usize].children;
        // At most one key begins `head`, since no key begins another.
        (1..=agree.min(head.len() - 1)).find_map(|n| children.get(&head[..n]).copied())
    }

    /// The node that ends exactly where the walk ended.
    pub(super) fn end_at(&mut self, reached: &Reached) -> NodeId {
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
        let behind = node.units.split_off(&(pages * page_size + 1));
        let upper = Node {
            parent: std::mem::replace(&mut node.parent, Parent::Unused),
            tokens: std::mem::replace(&mut node.tokens, rest_tokens),
            pages: std::mem::replace(&mut node.pages, rest_pages),
            children: BTreeMap::from([(node.tokens[..page_size].into(), lower)]),
            units: std::mem::take(&mut node.units),
            ..*node
        };
        let Parent::Node(above) = upper.parent else { unreachable!("a root has no pages to split") };
        let key: Box<[u32]> = upper.key(page_size).into();
        let upper = self.add_node(upper);
        self.nodes[lower as usize].parent = Parent::Node(upper);
        self.nodes[above as usize].children.insert(key, upper);
        let here = std::mem::take(&mut self.nodes[upper as usize].units);
        self.place_units(upper, here.into_iter());
        self.place_units(lower, behind.into_iter().map(|(end, unit)| (end - pages * page_size, unit)));
        upper
    }

    /// Puts units, by where they end, into a node.
    pub(super) fn place_units(&mut self, node: NodeId, units: impl Iterator<Item = (usize, UnitId)>) {
        for (end, unit) in units {
            self.nodes[node as usize].units.insert(end, unit);
            if let Some(windows) = &mut self.windows {
                windows.moved(unit, node, end);
            }
        }
    }

    pub(super) fn add_root(&mut self, namespace: u64) -> NodeId {
        let root = self.add_node(Node::empty(Parent::Root(namespace), self.clock));
        self.roots.insert(namespace, root);
        root
    }

    /// Puts new pages behind `end` and returns the node that they end in, and where the first of them begins: its node, and the offset
    /// in the node's tokens. `tokens` are theirs, and of the last page perhaps
    /// only the first. A leaf grows in place where its old pages will rank as the new ones; its time of last use is the
    /// caller's to renew.
    pub(super) fn append(
        &mut self,
        mut end: NodeId,
        tokens: &[u32],
        mut pages: Vec<CachedPage>,
        priority: i32,
    ) -> (NodeId, (NodeId, usize)) {
        let page_size = self.pool.page_size();
        self.cached_pages += pages.len();
        let mut first = None;
        let whole = pages.len().min(tokens.len() / page_size);
        let begun = pages.split_off(whole);
        if whole > 0 {
            let tokens = &tokens[..whole * page_size];
            let node = &mut self.nodes[end as usize];
            let is_leaf = node.children.is_empty() && matches!(node.parent, Parent::Node(_));
            if is_leaf && self.policy.may_grow(node, priority) {
                first = Some((end, node.tokens.len()));
                node.tokens.extend_from_slice(tokens);
                node.pages.append(&mut pages);
            } else {
                end = self.add_leaf(end, tokens, pages, priority);
            }
            first = first.or(Some((end, 0)));
        }
        if !begun.is_empty() {
            end = self.add_leaf(end, &tokens[whole * page_size..], begun, priority);
        }
        (end, first.unwrap_or((end, 0)))
    }

    fn add_leaf(&mut self, above: NodeId, tokens: &[u32], pages: Vec<CachedPage>, priority: i32) -> NodeId {
        let page_size = self.pool.page_size();
        // Until now `above` may have been a leaf itself.
        let entry = (self.policy.rank(&self.nodes[above as usize]), above);
        self.leaves.remove(&entry);
        let leaf =
            Node { tokens: tokens.to_vec(), pages, priority, ..Node::empty(Parent::Node(above), self.clock) };
        let (rank, key) = (self.policy.rank(&leaf), leaf.key(page_size).into());
        let leaf = self.add_node(leaf);
        self.nodes[above as usize].children.insert(key, leaf);
        self.leaves.insert((rank, leaf));
        leaf
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
    pub(super) fn touch(&mut self, end: NodeId, how: Use) -> Vec<NodeId> {
        self.clock += 1;
        let mut path = Vec::new();
        let mut id = end;
        loop {
            let node = &mut self.nodes[id as usize];
            let before = self.policy.rank(node);
            node.last_use = self.clock;
            match how {
                Use::Found => node.hits += 1,
                Use::Published(priority) => node.priority = node.priority.max(priority),
            }
            let after = self.policy.rank(node);
            let Parent::Node(above) = node.parent else { return path };
            if self.leaves.remove(&(before, id)) {
                self.leaves.insert((after, id));
            }
            path.push(id);
            id = above;
        }
    }

    /// Takes a leaf out, with whatever pages it still has. Where that makes its parent a leaf, the parent's entry in `leaves`
    /// is returned.
    pub(super) fn remove_leaf(&mut self, leaf: NodeId) -> Option<(Rank, NodeId)> {
        let page_size = self.pool.page_size();
        let gone = std::mem::replace(&mut self.nodes[leaf as usize], Node::empty(Parent::Unused, 0));
        let Parent::Node(above) = gone.parent else { unreachable!("a root is not a leaf") };
        self.leaves.remove(&(self.policy.rank(&gone), leaf));
        self.unused.push(leaf);
        self.cached_pages -= gone.pages.len();
        self.drop_units(gone.units.values().copied());
        let parent = &mut self.nodes[above as usize];
        parent.children.remove(gone.key(page_size));
        // From the end, so that the pool hands the run out again in the order in which it was held.
        gone.pages.into_iter().rev().for_each(drop);
        if !parent.children.is_empty() {
            return None;
        }
        if let Parent::Root(namespace) = parent.parent {
            *parent = Node::empty(Parent::Unused, 0);
            self.roots.remove(&namespace);
            self.unused.push(above);
            return None;
        }
        let entry = (self.policy.rank(parent), above);
        self.leaves.insert(entry);
        Some(entry)
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

/// Tokens in which `a` and `b` agree from their start.
pub(super) fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

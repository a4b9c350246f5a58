//! The tree checked from scratch, for tests and debug builds.

use super::PrefixCache;
use super::tree::{NodeId, Parent};
use crate::pool::Imbalance;

impl PrefixCache {
    /// Checks the tree from scratch, in O(pages): every node reachable under its own tokens, no parent ranked below its
    /// children, no key the beginning of its neighbour, leaves and counts as kept.
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
            let full = node.tokens.len() == node.pages.len() * self.pool.page_size();
            let begun = is_leaf && node.pages.len() == 1 && !node.tokens.is_empty();
            let mut neighbours = node.children.keys().zip(node.children.keys().skip(1));
            let holds = [
                (full || begun, "tokens do not fill the pages"),
                (is_root == node.pages.is_empty(), "only roots are empty"),
                (!is_root || !node.children.is_empty(), "an empty namespace is kept"),
                (
                    is_leaf == self.leaves.contains(&(self.policy.rank(node), id)),
                    "not in the order of eviction",
                ),
                (neighbours.all(|(a, b)| !b.starts_with(a)), "one page is the beginning of another"),
            ];
            if let Some((_, fault)) = holds.iter().find(|(holds, _)| !holds) {
                return Err(Imbalance::Tree { node: id, fault });
            }
            for (key, &child) in &node.children {
                let below = &self.nodes[child as usize];
                let linked = matches!(below.parent, Parent::Node(above) if above == id);
                let keyed = below.key(self.pool.page_size()) == &key[..];
                if !linked || !keyed || self.policy.rank(below) > self.policy.rank(node) {
                    return Err(Imbalance::Tree { node: child, fault: "parent, key or rank is wrong" });
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
        self.check_windows()
    }
}

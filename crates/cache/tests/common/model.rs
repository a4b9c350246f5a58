//! What the prefix cache should hold, page by page, without a tree: a map from every token up to a page's end to the page.

use std::collections::BTreeMap;

use suanpan_cache::EvictionPolicy;

use super::PAGE_SIZE;

#[derive(Clone, Copy)]
struct Entry {
    id: u32,
    last_use: u64,
    hits: u64,
    priority: i32,
}

pub struct Model {
    policy: EvictionPolicy,
    /// By namespace and every token up to the page's end; a page that is only begun ends early.
    pages: BTreeMap<(u64, Vec<u32>), Entry>,
    clock: u64,
}

impl Model {
    pub fn new(policy: EvictionPolicy) -> Model {
        Model { policy, pages: BTreeMap::new(), clock: 0 }
    }

    pub fn clear(&mut self) {
        self.pages.clear();
    }

    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages.values().map(|e| e.id)
    }

    /// Each page's own tokens and its id.
    pub fn pages(&self) -> impl Iterator<Item = (&[u32], u32)> + '_ {
        self.pages
            .iter()
            .map(|((_, tokens), e)| (&tokens[(tokens.len() - 1) / PAGE_SIZE * PAGE_SIZE..], e.id))
    }

    /// Ids of the whole pages that a look-up should find; renews them.
    pub fn found(&mut self, namespace: u64, tokens: &[u32], limit: usize) -> Vec<u32> {
        let found = self.matching(namespace, tokens, limit);
        if !found.is_empty() {
            self.touch(namespace, tokens, &[found.len() * PAGE_SIZE], None);
        }
        found
    }

    fn matching(&self, namespace: u64, tokens: &[u32], limit: usize) -> Vec<u32> {
        (1..=limit)
            .map_while(|n| self.pages.get(&(namespace, tokens[..n * PAGE_SIZE].to_vec())))
            .map(|e| e.id)
            .collect()
    }

    /// Pages right behind the first `matched` pages of `tokens`.
    fn behind<'a>(
        &'a self,
        namespace: u64,
        tokens: &'a [u32],
        matched: usize,
    ) -> impl Iterator<Item = &'a Vec<u32>> + 'a {
        let start = matched * PAGE_SIZE;
        self.pages.keys().filter_map(move |(ns, key)| {
            let next = key.len() > start && key.len() <= start + PAGE_SIZE;
            (*ns == namespace && next && key.starts_with(&tokens[..start])).then_some(key)
        })
    }

    /// Tokens of the longest partial hit behind `matched` whole pages.
    pub fn partial(&self, namespace: u64, tokens: &[u32], matched: usize) -> usize {
        let agree = |key: &Vec<u32>| key.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let longest = self.behind(namespace, tokens, matched).map(agree).max().unwrap_or(0);
        longest.saturating_sub(matched * PAGE_SIZE)
    }

    /// Publishes; returns how many pages are new to the cache, and how many were there in other pages.
    pub fn insert(&mut self, namespace: u64, tokens: &[u32], ids: &[u32], priority: i32) -> (usize, usize) {
        let tokens = &tokens[..tokens.len().min(ids.len() * PAGE_SIZE)];
        if tokens.is_empty() {
            return (0, 0);
        }
        let present = self.matching(namespace, tokens, tokens.len() / PAGE_SIZE);
        let duplicates = present.iter().zip(ids).filter(|(cached, own)| cached != own).count();
        let matched = present.len();
        let end = |page: usize| tokens.len().min((page + 1) * PAGE_SIZE);
        let whole: Vec<usize> = if matched > 0 { vec![matched * PAGE_SIZE] } else { vec![] };
        if tokens.len() < (matched + 1) * PAGE_SIZE {
            if tokens.len() == matched * PAGE_SIZE {
                self.touch(namespace, tokens, &whole, Some(priority));
                return (0, duplicates);
            }
            // The first in order, as the cache takes it.
            let covering =
                self.behind(namespace, tokens, matched).find(|key| key.starts_with(tokens)).cloned();
            if let Some(key) = covering {
                self.touch(namespace, &key, &[key.len()], Some(priority));
                return (0, duplicates);
            }
        }
        let head = &tokens[..end(matched)];
        let shorter =
            self.behind(namespace, tokens, matched).find(|k| k.len() < head.len() && head.starts_with(k));
        let shorter = shorter.cloned();
        let moves =
            shorter.as_ref().is_some_and(|key| self.pages[&(namespace, key.clone())].id == ids[matched]);
        let mut last = matched;
        while last * PAGE_SIZE < tokens.len()
            && (last == matched && moves || !self.ids().any(|id| id == ids[last]))
        {
            let entry = Entry { id: ids[last], last_use: 0, hits: 0, priority };
            self.pages.insert((namespace, tokens[..end(last)].to_vec()), entry);
            last += 1;
        }
        if last > matched
            && let Some(key) = shorter
        {
            self.pages.remove(&(namespace, key));
        }
        if last > matched {
            self.touch(namespace, tokens, &[end(last - 1)], Some(priority));
        } else {
            self.touch(namespace, tokens, &whole, Some(priority));
        }
        (last - matched - usize::from(moves), duplicates)
    }

    /// Renews every page on the way to the given end.
    fn touch(&mut self, namespace: u64, tokens: &[u32], end: &[usize], published: Option<i32>) {
        let Some(&end) = end.first() else { return };
        self.clock += 1;
        for n in (0..end).step_by(PAGE_SIZE).map(|start| end.min(start + PAGE_SIZE)) {
            let entry = self.pages.get_mut(&(namespace, tokens[..n].to_vec())).expect("a page on the way");
            entry.last_use = self.clock;
            match published {
                None => entry.hits += 1,
                Some(priority) => entry.priority = entry.priority.max(priority),
            }
        }
    }

    fn rank(&self, e: &Entry) -> (i64, u64) {
        let counted = match self.policy {
            EvictionPolicy::Lru => 0,
            EvictionPolicy::Lfu => e.hits as i64,
            EvictionPolicy::Priority => i64::from(e.priority),
        };
        (counted, e.last_use)
    }

    /// Eviction, one page at a time: the lowest-ranked idle page at an end; where only held pages are at ends, the lowest-ranked
    /// one above which an idle page waits is forgotten. Returns (freed, forgotten).
    pub fn evict(&mut self, pages: usize, idle: impl Fn(u32) -> bool) -> (usize, usize) {
        let goal = pages.min(self.ids().filter(|&id| idle(id)).count());
        let (mut freed, mut forgotten) = (0, 0);
        while freed < goal {
            let is_end = |key: &(u64, Vec<u32>)| {
                !self.pages.keys().any(|k| k.0 == key.0 && k.1.len() > key.1.len() && k.1.starts_with(&key.1))
            };
            let blocks = |key: &(u64, Vec<u32>)| {
                self.pages.iter().any(|(k, e)| k.0 == key.0 && key.1.starts_with(&k.1) && idle(e.id))
            };
            let ends: Vec<_> = self.pages.iter().filter(|(key, _)| is_end(key)).collect();
            let lowest_idle = ends.iter().filter(|(_, e)| idle(e.id)).min_by_key(|(_, e)| self.rank(e));
            let next = lowest_idle
                .or_else(|| ends.iter().filter(|(key, _)| blocks(key)).min_by_key(|(_, e)| self.rank(e)))
                .map(|(key, e)| ((*key).clone(), e.id))
                .expect("an idle page can be reached");
            freed += usize::from(idle(next.1));
            forgotten += usize::from(!idle(next.1));
            self.pages.remove(&next.0);
        }
        (goal, forgotten)
    }
}

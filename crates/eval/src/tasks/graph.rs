//! Walks on a directed graph given as a list of edges, of the GraphWalks kind: the nodes at exactly a stated distance, or all parents of a
//! node. No edge leads from a node to itself, and names are random, not hashes of small numbers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::build::{Context, Frame, rng};
use crate::EvalError;
use crate::item::{Answer, Cell, Failure, Item, Score, View};
use crate::rng::ItemRng;
use crate::score::retrieval::{judged, says};
use crate::score::sets::{bracketed, f1};
use crate::task::{Kit, Task};

/// One of the two questions.
pub struct Walk {
    name: &'static str,
    about: &'static str,
    parents: bool,
}

/// Nodes at exactly a distance.
pub static BFS: Walk = Walk {
    name: "graphwalks_bfs",
    about: "the nodes at exactly a stated distance from a node",
    parents: false,
};
/// Parents of a node.
pub static PARENTS: Walk =
    Walk { name: "graphwalks_parents", about: "all nodes with an edge to a node", parents: true };

const EXAMPLE: &str = "Below is a list of directed edges, one a line. You will be asked about the graph. Three examples on the graph
aa11 -> bb22
aa11 -> cc33
bb22 -> dd44
cc33 -> dd44
dd44 -> ee55
1. Which nodes are at distance exactly 2 from aa11? Final Answer: [dd44]
2. Which nodes have an edge to dd44? Final Answer: [bb22, cc33]
3. Which nodes have an edge to aa11? Final Answer: []

The graph that counts:
";

/// Most nodes that an answer names.
const MOST_NAMED: usize = 48;

struct Graph {
    names: Vec<String>,
    edges: Vec<(usize, usize)>,
}

/// A question, the nodes that answer it, and the edges that it needs.
type Asked = (String, Vec<usize>, BTreeSet<(usize, usize)>);

impl Graph {
    fn draw(rng: &mut ItemRng, edges: usize) -> Graph {
        let nodes = (edges / 2).max(4);
        let mut seen = BTreeSet::new();
        while seen.len() < nodes {
            seen.insert(format!("{:010x}", rng.next_u64() >> 24));
        }
        let mut names: Vec<String> = seen.into_iter().collect();
        rng.shuffle(&mut names);
        let mut known = BTreeSet::new();
        let mut list = Vec::new();
        while list.len() < edges {
            let (a, b) = (rng.below(nodes), rng.below(nodes));
            if a != b && known.insert((a, b)) {
                list.push((a, b));
            }
        }
        Graph { names, edges: list }
    }

    /// Nodes by distance from `start`, up to `most` steps.
    fn layers(&self, next: &BTreeMap<usize, Vec<usize>>, start: usize, most: usize) -> Vec<Vec<usize>> {
        let mut seen = BTreeSet::from([start]);
        let mut layers = vec![vec![start]];
        for _ in 0..most {
            let mut layer = BTreeSet::new();
            for node in &layers[layers.len() - 1] {
                layer.extend(next.get(node).into_iter().flatten().filter(|n| !seen.contains(n)));
            }
            seen.extend(&layer);
            layers.push(layer.into_iter().collect());
        }
        layers
    }

    /// A question with between 1 and `most` nodes for an answer: the question, the answer, the edges that it needs.
    fn ask(&self, rng: &mut ItemRng, parents: bool, most: usize) -> Option<Asked> {
        let mut next: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &(a, b) in &self.edges {
            next.entry(a).or_default().push(b);
        }
        for _ in 0..200 {
            let node = rng.below(self.names.len());
            if parents {
                let needed: BTreeSet<_> = self.edges.iter().copied().filter(|e| e.1 == node).collect();
                let found: Vec<usize> = needed.iter().map(|e| e.0).collect();
                if (1..=most).contains(&found.len()) {
                    return Some((
                        format!("Which nodes have an edge to {}?", self.names[node]),
                        found,
                        needed,
                    ));
                }
                continue;
            }
            let distance = 1 + rng.below(4);
            let layers = self.layers(&next, node, distance);
            let found = &layers[distance];
            if (1..=most).contains(&found.len()) {
                let walked: BTreeSet<usize> = layers[..distance].iter().flatten().copied().collect();
                let needed = self.edges.iter().copied().filter(|e| walked.contains(&e.0)).collect();
                let question =
                    format!("Which nodes are at distance exactly {distance} from {}?", self.names[node]);
                return Some((question, found.clone(), needed));
            }
        }
        None
    }
}

impl Walk {
    fn context(&self, frame: &Frame<'_>, graph: &Graph, needed: &BTreeSet<(usize, usize)>) -> Context {
        let mut context = Context { units: graph.edges.len(), ..Context::default() };
        for edge in &graph.edges {
            let line = format!("{} -> {}\n", graph.names[edge.0], graph.names[edge.1]);
            match (frame.cell.view, needed.contains(edge)) {
                (View::ClosedBook, _) | (View::Focused, false) => {}
                (_, true) => context.push_fact(frame.kit.counter, &line, true),
                (View::Full, false) => context.push(frame.kit.counter, &line),
            }
        }
        context
    }
}

fn list(names: &[&str]) -> Answer {
    says(format!("Final Answer: [{}]", names.join(", ")))
}

impl Task for Walk {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut rng = rng(kit, cell, "graph");
        let name_tokens = kit.counter.count(", 0123456789");
        let mut frame = Frame {
            kit,
            cell,
            head: EXAMPLE.into(),
            tail: "\nWhich nodes are at distance exactly 4 from 0123456789? End with a line \"Final Answer: [...]\" that lists them, or [] if there are none.".into(),
            lead_in: Some("\n".into()),
            answer_tokens: kit.counter.count("Final Answer: []") + 8,
        };
        // The mean line, over random names: what a node costs differs between tokenizers.
        let sample = Graph::draw(&mut rng, 64);
        let lines: String = sample
            .edges
            .iter()
            .map(|e| format!("{} -> {}\n", sample.names[e.0], sample.names[e.1]))
            .collect();
        let sample_tokens = kit.counter.count(&lines).max(1);
        let line_tokens = sample_tokens.div_ceil(64);
        let least = frame.fixed_tokens() + 10 * line_tokens + 3 * name_tokens;
        let room = frame.room(0).unwrap_or(0);
        let most = (room / 8 / name_tokens.max(1)).clamp(3, MOST_NAMED);
        frame.answer_tokens += most * name_tokens;
        let mut edges = frame.room(0).unwrap_or(0) * 64 / sample_tokens;
        loop {
            if edges < 10 {
                return Err(frame.too_short(least.max(cell.length_tokens + 1)));
            }
            let graph = Graph::draw(&mut rng, edges);
            let most_here = most.min((graph.names.len() * 3 / 10).max(1));
            if let Some((question, found, needed)) = graph.ask(&mut rng, self.parents, most_here) {
                frame.tail = format!(
                    "\n{question} End with a line \"Final Answer: [...]\" that lists them, or [] if there are none."
                );
                let context = self.context(&frame, &graph, &needed);
                let over = frame.over(&context);
                if over == 0 {
                    let gold: Vec<String> = found.iter().map(|&n| graph.names[n].clone()).collect();
                    let decoys =
                        graph.names.iter().filter(|n| !gold.contains(n)).take(2 * gold.len() + 8).cloned();
                    let decoys = decoys.collect();
                    let more = [("edges", json!(edges)), ("nodes", json!(graph.names.len()))];
                    return frame.finish(context, gold, decoys, more);
                }
                edges = edges.saturating_sub(over / line_tokens);
            }
            edges = edges.saturating_sub(1);
        }
    }

    fn score(&self, item: &Item, answers: &[Answer]) -> Score {
        let answer = super::last(answers);
        let last = answer.text.trim().lines().last().unwrap_or("");
        let Some(said) = bracketed(last).filter(|_| last.contains("Final Answer")) else {
            return judged(answer, 0.0, 0.0, Failure::Unparsed);
        };
        let said: BTreeSet<&str> = said.iter().map(String::as_str).collect();
        let gold: BTreeSet<&str> = item.gold.iter().map(String::as_str).collect();
        let hits = said.intersection(&gold).count();
        let wrong = said.len() - hits;
        let strict =
            if said == gold { 1.0 } else { hits.saturating_sub(wrong) as f64 / gold.len().max(1) as f64 };
        let why = match (hits, wrong) {
            (0, _) => Failure::Wrong,
            (_, 0) => Failure::Partial,
            _ => Failure::Listed,
        };
        judged(answer, f1(&said, &gold), strict, why)
    }

    fn right_answer(&self, item: &Item, _answers: &[Answer]) -> Answer {
        list(&item.gold.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn chance(&self, item: &Item) -> f64 {
        item.gold.len() as f64 / (item.gold.len() + item.decoys.len()).max(1) as f64
    }

    fn guess(&self, item: &Item, draw: &mut dyn FnMut(usize) -> usize) -> Answer {
        let mut pool: Vec<&str> = item.gold.iter().chain(&item.decoys).map(String::as_str).collect();
        let chosen: Vec<&str> = (0..item.gold.len()).map(|_| pool.swap_remove(draw(pool.len()))).collect();
        list(&chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_exact() {
        let names = (0..5).map(|i| i.to_string()).collect();
        let graph = Graph { names, edges: vec![(0, 1), (1, 2), (0, 2), (2, 3), (3, 0), (3, 4)] };
        let mut next: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &(a, b) in &graph.edges {
            next.entry(a).or_default().push(b);
        }
        assert_eq!(graph.layers(&next, 0, 3), [vec![0], vec![1, 2], vec![3], vec![4]]);
    }
}

//! Questions about a repository of Rust modules: the value of a constant through renames and re-exports, and the callers of a function within
//! two steps. The modules are made up; what is right is read out of the finished text by a parser ([`Index`]), not remembered from making it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use syn::visit::Visit;

use super::build::{Context, Frame, Insert, answer_tokens, depths, prose, rng};
use super::values::{Kind, Source, number};
use crate::EvalError;
use crate::corpus::words;
use crate::item::{Cell, Item, View};
use crate::rng::ItemRng;
use crate::score::retrieval::Combine;
use crate::task::{Kit, Task};

/// What a parser finds in Rust source: constants, the names that stand for them, and who calls whom. Names are taken by their last segment;
/// a name that is defined twice is in `ambiguous`, and nothing should be asked about it.
#[derive(Default)]
pub struct Index {
    /// Constants with a literal whole number.
    pub values: BTreeMap<String, String>,
    /// Constants and renames that stand for another name.
    pub aliases: BTreeMap<String, String>,
    /// Functions, with the names that they call.
    pub calls: BTreeMap<String, BTreeSet<String>>,
    /// Names with more than one definition.
    pub ambiguous: BTreeSet<String>,
}

struct Calls<'a>(&'a mut BTreeSet<String>);

impl Visit<'_> for Calls<'_> {
    fn visit_expr_call(&mut self, call: &syn::ExprCall) {
        if let syn::Expr::Path(path) = &*call.func
            && let Some(last) = path.path.segments.last()
        {
            self.0.insert(last.ident.to_string());
        }
        syn::visit::visit_expr_call(self, call);
    }
}

impl Index {
    /// Reads one file's source.
    pub fn read(&mut self, source: &str) -> Result<(), syn::Error> {
        for item in &syn::parse_file(source)?.items {
            self.item(item);
        }
        Ok(())
    }

    fn define(&mut self, name: &str) {
        let known = self.values.contains_key(name)
            || self.aliases.contains_key(name)
            || self.calls.contains_key(name);
        if known {
            self.ambiguous.insert(name.to_string());
        }
    }

    fn item(&mut self, item: &syn::Item) {
        match item {
            syn::Item::Const(c) => {
                let name = c.ident.to_string();
                self.define(&name);
                match &*c.expr {
                    syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(n), .. }) => {
                        self.values.insert(name, n.base10_digits().to_string());
                    }
                    syn::Expr::Path(path) => {
                        if let Some(last) = path.path.segments.last() {
                            self.aliases.insert(name, last.ident.to_string());
                        }
                    }
                    _ => {}
                }
            }
            syn::Item::Use(u) => self.renames(&u.tree),
            syn::Item::Fn(f) => {
                let name = f.sig.ident.to_string();
                self.define(&name);
                let mut called = BTreeSet::new();
                Calls(&mut called).visit_block(&f.block);
                self.calls.insert(name, called);
            }
            syn::Item::Mod(m) => m.content.iter().flat_map(|(_, items)| items).for_each(|i| self.item(i)),
            _ => {}
        }
    }

    fn renames(&mut self, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => self.renames(&path.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|t| self.renames(t)),
            syn::UseTree::Rename(r) => {
                let name = r.rename.to_string();
                self.define(&name);
                self.aliases.insert(name, r.ident.to_string());
            }
            syn::UseTree::Name(_) | syn::UseTree::Glob(_) => {}
        }
    }

    /// The number that a constant stands for, through at most 16 other names.
    pub fn value(&self, name: &str) -> Option<&str> {
        let mut name = name;
        for _ in 0..16 {
            if let Some(value) = self.values.get(name) {
                return Some(value);
            }
            name = self.aliases.get(name)?;
        }
        None
    }

    /// Functions that call `name` in at most `steps` steps, itself left out.
    pub fn callers<'a>(&'a self, name: &'a str, steps: usize) -> BTreeSet<&'a str> {
        let mut found: BTreeSet<&str> = BTreeSet::new();
        let mut layer: BTreeSet<&str> = BTreeSet::from([name]);
        for _ in 0..steps {
            let next =
                self.calls.iter().filter(|(_, called)| called.iter().any(|c| layer.contains(c.as_str())));
            layer = next.map(|(f, _)| f.as_str()).filter(|f| *f != name && !found.contains(f)).collect();
            found.extend(&layer);
        }
        found
    }
}

/// One of the two questions.
pub struct Code {
    name: &'static str,
    about: &'static str,
    callers: bool,
}

/// Value of a constant.
pub static CONSTANT: Code = Code {
    name: "code_constant",
    about: "the value of a constant behind a rename and a re-export, in a repository of modules",
    callers: false,
};
/// Callers of a function.
pub static CALLERS: Code = Code {
    name: "code_callers",
    about: "every function that calls another, directly or through one more",
    callers: true,
};

const STEPS: usize = 2;

/// Names of modules, functions and constants that do not repeat.
struct Namer {
    codes: Source,
}

impl Namer {
    fn module(&mut self, rng: &mut ItemRng) -> String {
        format!("{}_{}", rng.word(words::nouns()), &self.codes.must(rng)[3..])
    }

    fn function(&mut self, rng: &mut ItemRng) -> String {
        format!("{}_{}", ["load", "mix", "trim", "fold", "weigh", "rank"][rng.below(6)], self.module(rng))
    }

    fn constant(&mut self, rng: &mut ItemRng) -> String {
        self.module(rng).to_uppercase()
    }
}

/// A file as it stands in the text: its path as a comment, then its items.
fn file(module: &str, items: &[String]) -> String {
    format!("// src/{module}.rs\n{}\n\n", items.join("\n"))
}

fn constant(name: &str, value: &str) -> String {
    format!("pub const {name}: u64 = {value};")
}

fn function(rng: &mut ItemRng, name: &str, calls: Option<(&str, &str)>) -> String {
    let (a, b) = (1 + rng.below(90), 1 + rng.below(90));
    match calls {
        Some((module, callee)) => {
            format!("pub fn {name}(x: u64) -> u64 {{\n    crate::{module}::{callee}(x + {a}) * {b}\n}}")
        }
        None => format!("pub fn {name}(x: u64) -> u64 {{\n    x.rotate_left({a}) ^ {b}\n}}"),
    }
}

/// Files that a question needs, and the name that it asks about.
fn needed(rng: &mut ItemRng, namer: &mut Namer, callers: bool) -> (Vec<String>, String) {
    let modules: Vec<String> = (0..4).map(|_| namer.module(rng)).collect();
    if !callers {
        let names: Vec<String> = (0..3).map(|_| namer.constant(rng)).collect();
        let files = vec![
            file(&modules[0], &[constant(&names[0], &number(rng, 5))]),
            file(&modules[1], &[format!("pub use crate::{}::{} as {};", modules[0], names[0], names[1])]),
            file(&modules[2], &[constant(&names[2], &format!("crate::{}::{}", modules[1], names[1]))]),
        ];
        return (files, names[2].clone());
    }
    let names: Vec<String> = (0..4).map(|_| namer.function(rng)).collect();
    // 1 and 2 call 0; 3 calls 1.
    let calls = [None, Some(0), Some(0), Some(1)];
    let files = (0..4)
        .map(|i| {
            let callee = calls[i].map(|c: usize| (modules[c].as_str(), names[c].as_str()));
            file(&modules[i], &[function(rng, &names[i], callee)])
        })
        .collect();
    (files, names[0].clone())
}

impl Task for Code {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn item(&self, kit: &Kit<'_>, cell: &Cell) -> Result<Item, EvalError> {
        super::options::Options::of(self, &cell.task)?;
        let mut facts = rng(kit, cell, "facts");
        let mut namer = Namer { codes: Source::new(Kind::Code) };
        let (files, asked) = needed(&mut facts, &mut namer, self.callers);
        let frame = Frame {
            kit,
            cell,
            head: "Below are the modules of a Rust crate.\n".into(),
            tail: if self.callers {
                format!(
                    "Which functions call `{asked}`, directly or through one other function? Answer with their names, separated by commas."
                )
            } else {
                format!("Which number does the constant `{asked}` hold? Answer with the number alone.")
            },
            lead_in: Some("\nAnswer:".into()),
            answer_tokens: answer_tokens(kit, 96, &files[..1]),
        };
        let inserts: Vec<Insert> = files
            .into_iter()
            .zip(depths(frame.depth(), 4))
            .map(|(text, depth)| Insert { text, depth, needed: true })
            .collect();
        let mut filler = rng(kit, cell, "filler");
        let mut docs = prose(kit.haystack, &mut rng(kit, cell, "docs"));
        let mut written: Vec<String> = Vec::new();
        let mut last: Option<(String, String)> = None;
        let mut write = |i: usize, out: &mut String| {
            while written.len() <= i {
                let (module, name) = (namer.module(&mut filler), namer.function(&mut filler));
                let mut comment = String::from("///");
                docs(1 + 7 * written.len(), &mut comment);
                let callee = last.as_ref().filter(|_| filler.below(3) > 0).cloned();
                let called = callee.as_ref().map(|(m, f)| (m.as_str(), f.as_str()));
                let body = function(&mut filler, &name, called);
                let items = [
                    constant(&namer.constant(&mut filler), &number(&mut filler, 5)),
                    format!("{}\n{body}", comment.replace('\n', " ")),
                ];
                written.push(file(&module, &items));
                last = Some((module, name));
            }
            out.push_str(&written[i]);
            true
        };
        let context = frame.fill(&inserts, 2, &mut write)?;
        // What is right is read from the text that is shown; a closed-book question is judged by the files that it leaves out.
        let source = match cell.view {
            View::ClosedBook => inserts.iter().map(|i| i.text.as_str()).collect(),
            _ => context.text.clone(),
        };
        let (gold, decoys) = self.answers(&source, &asked, &mut facts, &mut namer)?;
        self.finish(frame, context, gold, decoys, &asked)
    }

    named_answers!(Combine::All);
}

impl Code {
    fn answers(
        &self,
        source: &str,
        asked: &str,
        rng: &mut ItemRng,
        namer: &mut Namer,
    ) -> Result<(Vec<String>, Vec<String>), EvalError> {
        let mut index = Index::default();
        index.read(source).map_err(|e| EvalError::bad("source", e, "Rust that parses"))?;
        let gold: Vec<String> = if self.callers {
            index.callers(asked, STEPS).into_iter().map(str::to_string).collect()
        } else {
            index.value(asked).map(str::to_string).into_iter().collect()
        };
        let offered: Vec<&String> =
            if self.callers { index.calls.keys().collect() } else { index.values.values().collect() };
        let mut decoys: Vec<String> =
            offered.into_iter().filter(|d| !gold.contains(d) && *d != asked).take(64).cloned().collect();
        while decoys.len() < 2 * gold.len() + 4 {
            decoys.push(if self.callers { namer.function(rng) } else { number(rng, 5) });
        }
        Ok((gold, decoys))
    }

    fn finish(
        &self,
        frame: Frame<'_>,
        context: Context,
        gold: Vec<String>,
        decoys: Vec<String>,
        asked: &str,
    ) -> Result<Item, EvalError> {
        frame.finish(context, gold, decoys, [("asked", json!([asked])), ("gold_from", json!("parser"))])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parser_finds_values_and_callers() {
        let mut index = Index::default();
        index.read("pub const A: u64 = 1_000; mod m { pub use crate::A as B; pub fn f() { g(h(2)); } } const C: u64 = m::B; fn k() { m::f() } fn g() {} fn h() {}").unwrap();
        assert_eq!(index.value("C"), Some("1000"));
        assert_eq!(index.value("nothing"), None);
        assert_eq!(index.callers("g", 1), BTreeSet::from(["f"]));
        assert_eq!(index.callers("h", 2), BTreeSet::from(["f", "k"]));
        index.read("fn g() {}").unwrap();
        assert!(index.ambiguous.contains("g"));
        assert!(index.read("fn {").is_err());
    }
}

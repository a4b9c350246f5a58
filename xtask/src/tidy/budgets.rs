//! Size budgets: files, functions, ARCHITECTURE.md. Exemptions carry their reason and may only go away.

use syn::spanned::Spanned;
use syn::visit::Visit;

use super::Tree;

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const ARCHITECTURE_LINES_MAX: usize = 150;

/// (file, reason). The list may only shrink without an argument.
const LONG_FILES: &[(&str, &str)] = &[(
    "crates/cuda/kernels/attention/decode_cluster.cu",
    "one kernel: its steps share registers, and how the assembler deals those out decides its speed",
)];

/// (file, function, reason).
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

struct Functions<'a> {
    path: &'a str,
    faults: Vec<String>,
}

impl Functions<'_> {
    fn measure(&mut self, name: &str, span: proc_macro2::Span) {
        let lines = span.end().line - span.start().line + 1;
        let exempt = LONG_FUNCTIONS.iter().any(|(file, function, _)| *file == self.path && *function == name);
        if lines > FUNCTION_LINES_MAX && !exempt {
            let start = span.start().line;
            self.faults.push(format!(
                "{}:{start}: fn {name} has {lines} lines, {FUNCTION_LINES_MAX} allowed",
                self.path
            ));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, f: &'ast syn::ItemFn) {
        self.measure(&f.sig.ident.to_string(), f.block.span());
        syn::visit::visit_item_fn(self, f);
    }

    fn visit_impl_item_fn(&mut self, f: &'ast syn::ImplItemFn) {
        self.measure(&f.sig.ident.to_string(), f.block.span());
        syn::visit::visit_impl_item_fn(self, f);
    }
}

/// Measures every file and function.
pub fn check(tree: &Tree) -> Vec<String> {
    let mut faults = Vec::new();
    for file in &tree.files {
        let lines = file.text.lines().count();
        if file.path == "ARCHITECTURE.md" && lines > ARCHITECTURE_LINES_MAX {
            faults.push(format!("ARCHITECTURE.md has {lines} lines, {ARCHITECTURE_LINES_MAX} allowed"));
        }
        let source = [".rs", ".cu", ".cuh", ".py"].iter().any(|e| file.path.ends_with(e));
        if source && lines > FILE_LINES_MAX && !LONG_FILES.iter().any(|(p, _)| *p == file.path) {
            faults.push(format!("{}: {lines} lines, {FILE_LINES_MAX} allowed", file.path));
        }
        if file.path.ends_with(".rs") {
            match syn::parse_file(&file.text) {
                Ok(parsed) => {
                    let mut functions = Functions { path: &file.path, faults: Vec::new() };
                    functions.visit_file(&parsed);
                    faults.append(&mut functions.faults);
                }
                Err(e) => faults.push(format!("{}: does not parse: {e}", file.path)),
            }
        }
    }
    faults
}

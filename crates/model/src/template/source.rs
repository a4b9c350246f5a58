//! Rewrites the one block that `transformers` adds to the template language.

use std::sync::LazyLock;

use regex::{Captures, Regex};

static GENERATION: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
        .expect("a pattern written in this file compiles")
});

/// `{% generation %}…{% endgeneration %}` marks what a trainer learns from; for a prompt it is a plain scope. White-space control
/// signs stay where they are.
pub(super) fn without_generation_tags(source: &str) -> String {
    GENERATION
        .replace_all(source, |found: &Captures<'_>| {
            let end = if found.get(2).is_some() { "end" } else { "" };
            format!("{{%{} {end}with {}%}}", &found[1], &found[3])
        })
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_a_scope_and_nothing_else_changes() {
        assert_eq!(
            without_generation_tags("a{%- generation %}b{% endgeneration -%}c"),
            "a{%- with %}b{% endwith -%}c"
        );
        let other = "{{ generation }}{% if generation %}{% endif %}";
        assert_eq!(without_generation_tags(other), other);
    }
}

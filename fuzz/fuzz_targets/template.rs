//! Any text as a chat template: it compiles or is refused, and rendering ends within its bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::ChatTemplate;

fuzz_target!(|data: &[u8]| {
    let Ok(source) = std::str::from_utf8(data) else { return };
    let Ok(template) = ChatTemplate::compile(source, Some("<s>"), Some("</s>")) else { return };
    let messages = serde_json::json!([{"role": "user", "content": "Hello <s> world"}]);
    let _ = template.render(&messages, true, None, &serde_json::Map::new());
});

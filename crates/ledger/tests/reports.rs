//! The reports as they are printed: whole texts and whole JSON, because people and programs read them.

use suanpan_base::{DType, HeadShape, Mask, SeqLen};
use suanpan_ledger::cache::CacheRequest;
use suanpan_ledger::report::{CacheReport, KernelRequest};
use suanpan_ledger::shapes::NamedShape;

fn kernel_16k() -> KernelRequest {
    let (heads, len) = (HeadShape::new(1, 1, 128), SeqLen::new(16384, 16384));
    KernelRequest { heads, mask: Mask::FULL, len, dtype: DType::Bf16, tile_q: 128 }
}

fn cache(name: &str, context_tokens: usize, batch: usize, memory_bytes: Option<u64>) -> CacheRequest {
    let layers = NamedShape::find(name).unwrap().cache_layers();
    CacheRequest { layers, context_tokens, batch, page_size: 16, memory_bytes }
}

/// Compares with the committed text; SUANPAN_BLESS=1 writes it anew, to be read in the diff.
fn golden(name: &str, text: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("SUANPAN_BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{name}");
}

fn json(report: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(report).unwrap() + "\n"
}

#[test]
fn the_kernel_report_reads_as_committed() {
    let report = kernel_16k().report().unwrap();
    golden("kernel_16k.txt", &report.to_string());
    golden("kernel_16k.json", &json(&report));
}

#[test]
fn the_cache_report_reads_as_committed() {
    let request = cache("llama-3.1-8b", 131_072, 8, Some(80 << 30));
    let report = CacheReport::new("llama-3.1-8b", &request).unwrap();
    golden("cache_llama_128k.txt", &report.to_string());
    golden("cache_llama_128k.json", &json(&report));
}

#[test]
fn windows_and_layers_that_differ_are_told() {
    let request = cache("gpt-oss-20b", 1001, 1, None);
    golden("cache_windows.txt", &CacheReport::new("gpt-oss-20b", &request).unwrap().to_string());
    let mut layers = request.layers.clone();
    layers[0].heads = HeadShape::with_widths(4, 2, 192, 128);
    let report = CacheReport::new("two kinds of layers", &CacheRequest { layers, ..request }).unwrap();
    golden("cache_two_kinds.txt", &report.to_string());
}

#[test]
fn a_mask_changes_the_pairs_and_not_the_scores() {
    let full = kernel_16k().report().unwrap();
    let causal = KernelRequest { mask: Mask::CAUSAL, ..kernel_16k() }.report().unwrap();
    let window = KernelRequest { mask: Mask::window(1024), ..kernel_16k() }.report().unwrap();
    assert_eq!(causal.pairs, 16384 * 16385 / 2);
    assert_eq!(window.pairs, 1024 * 16384 - 1023 * 1024 / 2);
    assert_eq!((causal.plain.scores, window.plain), (full.plain.scores, full.plain));
    assert_eq!(causal.tiled.entry.flops, 4 * 128 * causal.pairs);
    assert!(window.tiled.entry.device_read_bytes < causal.tiled.entry.device_read_bytes);
    assert_eq!((window.mask.causal, window.mask.window), (true, Some(1024)));
}

#[test]
fn impossible_calls_are_refused_by_field() {
    let field = |change: fn(&mut KernelRequest)| {
        let mut request = kernel_16k();
        change(&mut request);
        request.report().unwrap_err().field
    };
    assert_eq!(field(|r| r.len.seqlen_q = 0), "seqlen_q");
    assert_eq!(field(|r| r.len.seqlen_k = 0), "seqlen_k");
    assert_eq!(field(|r| r.tile_q = 0), "tile_q");
    assert_eq!(field(|r| r.heads.num_kv_heads = 3), "num_kv_heads");
    assert_eq!(field(|r| (r.len.seqlen_q, r.tile_q) = (1 << 40, 1)), "tile_q");
    assert_eq!(field(|r| r.len = SeqLen::new(1 << 31, 1 << 31)), "seqlen_q * seqlen_k");
    assert_eq!(field(|r| r.heads.head_dim_v = usize::MAX), "seqlen_q * seqlen_k");
    // The largest that is accepted is computed without wrapping.
    let largest = KernelRequest { len: SeqLen::new(1 << 26, 1 << 25), ..kernel_16k() };
    assert_eq!(largest.report().unwrap().plain.cost.entry.flops, 1 << 60);
}

//! GGUF headers, hostile and merely wrong.

use suanpan_model::ModelError;
use suanpan_model::gguf::Gguf;
use suanpan_model::source::Source;

use super::gguf_bytes::{ARRAY, F32_TENSOR, GgufBytes, STRING};
use super::{Scratch, cheaply, fixture, load_path, refusal};

fn parse(bytes: &[u8]) -> Result<Gguf, ModelError> {
    let source = Source::owned("test.gguf", bytes.to_vec());
    cheaply(|| Gguf::parse(source))
}

/// Asserts that the bytes are refused over `field`, both as bytes and as a file given to `load`.
fn refused(file: GgufBytes, field: &str) -> String {
    let Err(e) = parse(&file.0) else { panic!("must be refused over {field}") };
    assert_eq!(e.field(), Some(field), "{e}");
    let scratch = Scratch::new();
    let from_file = refusal(&scratch.write("x.gguf", &file.0));
    assert_eq!(from_file.field(), Some(field), "{from_file}");
    e.to_string()
}

fn one_tensor(dims: &[u64], kind: u32, offset: u64) -> GgufBytes {
    GgufBytes::header(1, 0).tensor("t", dims, kind, offset)
}

#[test]
fn counts_beyond_the_file_are_refused_before_allocation() {
    let file = GgufBytes::header(1 << 63, 0);
    assert_eq!(file.0.len(), 24);
    let message = refused(file, "tensor count");
    assert!(message.contains("9223372036854775808"), "{message}");
    refused(GgufBytes::header(0, u64::MAX), "metadata count");
    refused(GgufBytes::header(0, 2).key_u32("a", 1), "metadata count");
    refused(GgufBytes::header(1 << 20, 0).data(36 << 20), "tensor count");
}

#[test]
fn a_name_longer_than_the_file_is_refused() {
    let file = GgufBytes::header(0, 1).u64(1 << 30);
    assert_eq!(file.0.len(), 32);
    refused(file, "metadata count");
    refused(GgufBytes::header(0, 1).u64(1 << 30).bytes(&[b'k'; 64]), "metadata key 0 name");
    refused(GgufBytes::header(1, 0).u64(1 << 62).bytes(&[b't'; 64]), "tensor 0 name");
    refused(GgufBytes::header(1, 0).tensor(&"t".repeat(65), &[1], F32_TENSOR, 0).data(4), "tensor 0 name");
}

#[test]
fn a_dimension_of_zero_is_refused() {
    let file = one_tensor(&[4, 0], F32_TENSOR, 0);
    assert_eq!(file.0.len(), 65);
    refused(file, "tensor t dimension 1");
}

#[test]
fn a_byte_size_that_wraps_to_zero_is_refused() {
    refused(one_tensor(&[4, 1 << 62], F32_TENSOR, 0), "tensor t dimensions");
    refused(one_tensor(&[1 << 62], F32_TENSOR, 0), "tensor t dimension 0");
    refused(one_tensor(&[1 << 32, 1 << 32], F32_TENSOR, 0), "tensor t dimensions");
    refused(one_tensor(&[u64::MAX], F32_TENSOR, 0), "tensor t dimension 0");
    refused(one_tensor(&[32, 1 << 31, 1 << 31, 1 << 31], 2, 0), "tensor t dimensions");
}

#[test]
fn more_than_four_dimensions_are_refused() {
    let file = one_tensor(&[1; 5], F32_TENSOR, 0);
    assert_eq!(file.0.len(), 89);
    refused(file, "tensor t dimension count");
    let million = GgufBytes::header(1, 0).string(b"t").u32(1_000_000).bytes(&[0; 64]);
    refused(million, "tensor t dimension count");
    refused(GgufBytes::header(1, 0).string(b"t").u32(0).bytes(&[0; 64]), "tensor t dimension count");
}

#[test]
fn strange_alignments_are_refused() {
    const KEY: &str = "general.alignment";
    let field = "metadata general.alignment";
    for alignment in [0, 3, 1 << 30, 1] {
        refused(GgufBytes::header(0, 1).key_u32(KEY, alignment), field);
    }
    refused(GgufBytes::header(0, 1).key_string(KEY, "32"), field);
    let wide = GgufBytes::header(1, 1).key_u32(KEY, 64).tensor("t", &[4], F32_TENSOR, 32).data(128);
    refused(wide, "tensor t offset");
}

#[test]
fn empty_and_repeated_names_are_refused() {
    refused(GgufBytes::header(0, 1).key_u32("", 1), "metadata key 0 name");
    refused(GgufBytes::header(0, 2).key_u32("a", 1).key_u32("a", 1), "metadata a");
    refused(GgufBytes::header(0, 1).string(&[0xff, 0xfe]).u32(4).u32(1), "metadata key 0 name");
    let twice = GgufBytes::header(2, 0).tensor("t", &[4], F32_TENSOR, 0).tensor("t", &[4], F32_TENSOR, 32);
    refused(twice.data(64), "tensor t");
}

#[test]
fn unknown_tensor_types_are_refused_by_name() {
    let message = refused(one_tensor(&[32], 9, 0).data(64), "tensor t type");
    assert!(message.contains("Q8_1 (9)") && message.contains("Q4_K"), "{message}");
    let message = refused(one_tensor(&[32], 999, 0).data(64), "tensor t type");
    assert!(message.contains("unknown type (999)"), "{message}");
    refused(one_tensor(&[33], 2, 0).data(64), "tensor t dimension 0");
}

#[test]
fn data_past_the_end_or_shared_is_refused() {
    refused(one_tensor(&[4], F32_TENSOR, 1 << 40).data(64), "tensor t");
    refused(one_tensor(&[4], F32_TENSOR, 32).data(47), "tensor t");
    assert!(parse(&one_tensor(&[4], F32_TENSOR, 32).data(48).0).is_ok());
    refused(one_tensor(&[16], F32_TENSOR, u64::MAX - 31).data(64), "tensor t offset");
    refused(one_tensor(&[4], F32_TENSOR, 4).data(64), "tensor t offset");
    let overlap = GgufBytes::header(2, 0).tensor("a", &[16], F32_TENSOR, 0).tensor("b", &[4], F32_TENSOR, 32);
    refused(overlap.data(128), "tensor b");
}

#[test]
fn arrays_nested_ten_thousand_deep_are_refused_without_recursion() {
    let mut file = GgufBytes::header(0, 1).string(b"deep").u32(ARRAY);
    for _ in 0..10_000 {
        file = file.u32(ARRAY).u64(1);
    }
    refused(file.u32(4).u64(0), "metadata deep");
}

#[test]
fn long_arrays_are_refused_before_they_are_walked() {
    let array =
        |elem: u32, count: u64| GgufBytes::header(0, 1).string(b"list").u32(ARRAY).u32(elem).u64(count);
    refused(array(STRING, u64::MAX).bytes(&[0; 64]), "metadata list");
    refused(array(4, 1 << 62).bytes(&[0; 64]), "metadata list");
    refused(array(10, 1 << 61).bytes(&[0; 64]), "metadata list");
    refused(array(77, 1).bytes(&[0; 64]), "metadata list");
    refused(array(STRING, 2).u64(1 << 63).bytes(&[0; 64]), "metadata list");
    // A file that is as long as it claims may still not make us walk for ever.
    let scratch = Scratch::new();
    let path = scratch.write("long.gguf", &array(STRING, 20 << 20).0);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(200 << 20).unwrap();
    assert_eq!(refusal(&path).field(), Some("metadata list"));
}

#[test]
fn values_of_the_wrong_type_are_refused() {
    refused(GgufBytes::header(0, 1).string(b"k").u32(13).u64(0), "metadata k");
    refused(GgufBytes::header(0, 1).string(b"k").u32(7).bytes(&[2]).bytes(&[0; 8]), "metadata k");
    let gguf = parse(&GgufBytes::header(0, 2).key_u32("n", 5).key_string("s", "text").0).unwrap();
    assert_eq!(gguf.uint("n").unwrap(), Some(5));
    assert_eq!(gguf.string("s").unwrap(), Some("text"));
    assert_eq!(gguf.uint("absent").unwrap(), None);
    for e in [gguf.string("n").err(), gguf.float("n").err(), gguf.strings("n").err(), gguf.boolean("n").err()]
    {
        assert_eq!(e.unwrap().field(), Some("metadata n"));
    }
    assert_eq!(gguf.uint("s").unwrap_err().field(), Some("metadata s"));
}

#[test]
fn other_files_and_versions_are_refused() {
    let with = |version: u32| GgufBytes(b"GGUF".to_vec()).u32(version).u64(0).u64(0);
    refused(GgufBytes(b"GGML".to_vec()).u32(3).u64(0).u64(0), "magic");
    refused(with(1), "version");
    refused(with(4), "version");
    let message = refused(with(3u32.swap_bytes()), "version");
    assert!(message.contains("big-endian"), "{message}");
    assert!(parse(&with(2).0).is_ok());
    let scratch = Scratch::new();
    assert_eq!(refusal(&scratch.write("empty.gguf", b"")).field(), Some("file length"));
}

#[test]
fn every_prefix_of_a_good_file_is_refused() {
    let good = std::fs::read(fixture("tied-q4_0.gguf")).unwrap();
    let gguf = parse(&good).unwrap();
    // The writer pads after the last tensor; the data ends before.
    let names: Vec<_> = gguf.tensor_names().map(|n| gguf.tensor_info(n).unwrap().bytes.end).collect();
    let end = names.into_iter().max().unwrap();
    for n in 0..end {
        let Err(e) = Gguf::parse(Source::owned("cut.gguf", good[..n].to_vec())) else {
            panic!("prefix of {n} bytes")
        };
        assert!(e.field().is_some(), "prefix of {n} bytes: {e}");
    }
    let scratch = Scratch::new();
    for n in [1, 7, 23, 24, 1000, 6000, end / 2, end - 1] {
        refusal(&scratch.write("cut.gguf", &good[..n]));
    }
    assert!(load_path(&scratch.write("whole.gguf", &good[..end])).is_ok());
}

#[test]
fn an_architecture_that_is_not_supported_is_refused_with_the_list() {
    let message = {
        let file = GgufBytes::header(0, 1).key_string("general.architecture", "mamba");
        let e = refusal(&Scratch::new().write("x.gguf", &file.0));
        assert_eq!(e.field(), Some("metadata general.architecture"));
        e.to_string()
    };
    assert!(message.contains("mamba") && message.contains("llama"), "{message}");
    let e = refusal(&Scratch::new().write("x.gguf", &GgufBytes::header(0, 0).0));
    assert_eq!(e.field(), Some("metadata general.architecture"));
}

/// Replaces one occurrence of `from` by `to` of the same length.
fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|w| w == from).expect("the text is in the file");
    let mut out = bytes.to_vec();
    out[at..at + to.len()].copy_from_slice(to);
    out
}

#[test]
fn a_missing_misnamed_or_misshapen_tensor_is_named() {
    let good = std::fs::read(fixture("tied-q8_0.gguf")).unwrap();
    let scratch = Scratch::new();
    let gone = replace(&good, b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight");
    assert_eq!(refusal(&scratch.write("a.gguf", &gone)).field(), Some("tensor blk.1.ffn_up.weight"));
    // A bias that nobody adds would be a silently different model.
    let extra = replace(&good, b"output_norm.weight", b"output_norm.weighx");
    assert_eq!(refusal(&scratch.write("b.gguf", &extra)).field(), Some("tensor output_norm.weight"));
    let mut shape = b"llama.embedding_length".to_vec();
    shape.extend([4, 0, 0, 0, 64, 0, 0, 0]);
    let mut wrong = shape.clone();
    wrong[26] = 32;
    let e = refusal(&scratch.write("c.gguf", &replace(&good, &shape, &wrong)));
    assert_eq!(e.field(), Some("tensor token_embd.weight"));
    assert!(e.to_string().contains("[272, 64]") && e.to_string().contains("[272, 32]"), "{e}");
}

#[test]
fn scaling_that_a_file_names_but_we_do_not_know_is_refused() {
    let good = std::fs::read(fixture("llama3-rope-f16.gguf")).unwrap();
    let scratch = Scratch::new();
    // Without its factors the model would run, and answer wrongly beyond short prompts.
    let gone = replace(&good, b"rope_freqs.weight", b"rope_freqz.weight");
    assert_eq!(refusal(&scratch.write("a.gguf", &gone)).field(), Some("tensor rope_freqz.weight"));
    for kind in ["ntk", "longrope", "yarn"] {
        // Factors beside a formula contradict each other; LongRoPE without its two lists is not one.
        let copy = copy_with(&good, GgufBytes(Vec::new()).key_string("llama.rope.scaling.type", kind));
        let field = refusal(&scratch.write("b.gguf", &copy)).field().map(String::from);
        assert_eq!(field.as_deref(), Some("metadata llama.rope.scaling.type"), "{kind}");
    }
    let plain = std::fs::read(fixture("tied-f16.gguf")).unwrap();
    for kind in ["linear", "yarn"] {
        let copy = copy_with(&plain, GgufBytes(Vec::new()).key_string("llama.rope.scaling.type", kind));
        let field = refusal(&scratch.write("c.gguf", &copy)).field().map(String::from);
        assert_eq!(field.as_deref(), Some("metadata llama.rope.scaling.factor"), "{kind}");
    }
}

/// The file with one more metadata entry. Tensor offsets count from the aligned end of the header, so the data must be moved along.
fn copy_with(good: &[u8], entry: GgufBytes) -> Vec<u8> {
    let keys = u64::from_le_bytes(good[16..24].try_into().unwrap());
    let gguf = parse(good).unwrap();
    let start = gguf.tensor_names().map(|n| gguf.tensor_info(n).unwrap().bytes.start).min().unwrap();
    let mut out = good[..16].to_vec();
    out.extend((keys + 1).to_le_bytes());
    out.extend(&entry.0);
    out.extend(&good[24..start]);
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(&good[start..]);
    out
}

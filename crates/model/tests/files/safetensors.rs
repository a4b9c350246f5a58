//! safetensors headers, hostile and merely wrong.

use suanpan_model::ModelError;
use suanpan_model::safetensors::SafeTensors;
use suanpan_model::source::Source;

use super::{Scratch, cheaply, fixture, refusal};

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn parse(bytes: Vec<u8>) -> Result<SafeTensors, ModelError> {
    let source = Source::owned("test.safetensors", bytes);
    cheaply(|| SafeTensors::parse(source))
}

fn refused(bytes: Vec<u8>, field: &str) -> String {
    let Err(e) = parse(bytes) else { panic!("must be refused over {field}") };
    assert_eq!(e.field(), Some(field), "{e}");
    e.to_string()
}

const GOOD: &str =
    r#"{"__metadata__":{"format":"pt"},"t":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;

#[test]
fn a_good_header_is_read() {
    let st = parse(file(GOOD, 16)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(st.tensor_names().collect::<Vec<_>>(), ["t"]);
    assert_eq!(st.tensor("t", &[2, 2]).unwrap().to_f32(), [0.0; 4]);
    assert_eq!(st.tensor("t", &[4]).unwrap_err().field(), Some("tensor t"));
    assert_eq!(st.tensor("u", &[4]).unwrap_err().field(), Some("tensor u"));
    // An empty or scalar tensor that nobody asks for is the format's right.
    let header = r#"{"e":{"dtype":"I64","shape":[0,9],"data_offsets":[0,0]},"s":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}"#;
    let st = parse(file(header, 1)).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(st.tensor("e", &[0, 9]).unwrap_err().field(), Some("tensor e"));
}

#[test]
fn header_lengths_beyond_the_file_are_refused() {
    for len in [u64::MAX, 1 << 63, 100_000_001, 200] {
        let mut bytes = file(GOOD, 16);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        refused(bytes, "header length");
    }
    refused(vec![0; 7], "header length");
    refused(vec![], "header length");
    refused(file("", 0), "header");
    refused(file("[]", 0), "header");
    refused(file(&"[".repeat(100_000), 0), "header");
    refused(file(&format!(r#"{{"__metadata__":{}"#, r#"{"a":"#.repeat(100_000)), 0), "header");
}

#[test]
fn offsets_and_sizes_that_do_not_fit_are_refused_by_tensor() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    refused(file(&one("F32", "[2,2]", "[0,20]"), 16), "tensor t");
    refused(file(&one("F32", "[2,2]", "[16,0]"), 16), "tensor t");
    refused(file(&one("F32", "[2,2]", "[0,12]"), 16), "tensor t");
    refused(file(&one("F32", "[4611686018427387904,4]", "[0,0]"), 0), "tensor t");
    refused(file(&one("F32", "[18446744073709551615]", "[0,16]"), 16), "tensor t");
    refused(file(&one("F32", "[2,2]", "[0,18446744073709551615]"), 16), "tensor t");
    refused(file(&one("F4", "[1]", "[0,1]"), 1), "tensor t");
    let message = refused(file(&one("Q4_0", "[2,2]", "[0,16]"), 16), "tensor t");
    assert!(message.contains("Q4_0") && message.contains("BF16"), "{message}");
    for (shape, offsets) in
        [("[-1]", "[0,16]"), ("[1.5]", "[0,16]"), ("[1,1,1,1,1,1,1,1,4]", "[0,16]"), ("[4]", "[0]")]
    {
        let message = refused(file(&one("F32", shape, offsets), 16), "header");
        assert!(message.contains("tensor t"), "{message}");
    }
}

#[test]
fn a_type_that_is_not_a_weight_is_refused_when_used() {
    let header = r#"{"t":{"dtype":"I32","shape":[4],"data_offsets":[0,16]}}"#;
    let e = parse(file(header, 16)).unwrap_or_else(|e| panic!("{e}")).tensor("t", &[4]).unwrap_err();
    assert!(e.to_string().contains("I32") && e.to_string().contains("BF16"), "{e}");
}

#[test]
fn gaps_overlaps_and_tails_are_refused() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{b}}}}}"#
        )
    };
    assert!(parse(file(&two("[8,16]", "[0,8]"), 16)).is_ok());
    refused(file(&two("[0,8]", "[12,20]"), 20), "tensor b");
    refused(file(&two("[0,8]", "[4,12]"), 12), "tensor b");
    refused(file(&two("[0,8]", "[8,16]"), 17), "file length");
    refused(file(&two("[4,12]", "[12,20]"), 20), "tensor a");
}

#[test]
fn the_same_tensor_twice_is_refused() {
    let entry = r#""t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let message = refused(file(&format!("{{{entry},{entry}}}"), 8), "header");
    assert!(message.contains("tensor t: the name twice"), "{message}");
    let unknown = r#"{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"strides":[1]}}"#;
    refused(file(unknown, 8), "header");
    let long = format!(r#"{{"{}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#, "n".repeat(600));
    refused(file(&long, 8), "header");
}

#[test]
fn a_header_of_a_million_tensors_is_refused_within_its_limits() {
    let mut header = String::from("{");
    for i in 0..100_000 {
        header.push_str(&format!(r#""t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}},"#));
    }
    header.pop();
    header.push('}');
    refused(file(&header, 0), "header");
}

#[test]
fn every_prefix_of_a_good_file_is_refused() {
    let good = std::fs::read(fixture("sharded/model-00002-of-00002.safetensors")).unwrap();
    // Each byte of the header, then steps through the data.
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for n in (0..header + 64).chain((header..good.len()).step_by(997)).chain(good.len() - 64..good.len()) {
        let Err(e) = SafeTensors::parse(Source::owned("cut", good[..n].to_vec())) else {
            panic!("prefix of {n} bytes")
        };
        assert!(e.field().is_some(), "prefix of {n} bytes: {e}");
    }
    assert!(SafeTensors::parse(Source::owned("whole", good)).is_ok());
}

#[test]
fn a_tensor_at_an_odd_byte_is_still_read_right() {
    // A header of odd length puts binary32 data at an address that no typed slice may start at.
    for pad in 0..4 {
        let header =
            format!(r#"{{"t":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}{}"#, " ".repeat(pad));
        let mut bytes = file(&header, 0);
        bytes.extend(1.5f32.to_le_bytes());
        bytes.extend((-2.25f32).to_le_bytes());
        let tensor = parse(bytes).unwrap_or_else(|e| panic!("{e}")).tensor("t", &[2]).unwrap();
        assert_eq!(tensor.bytes().as_ptr() as usize % 4, 0, "pad {pad}");
        assert_eq!(tensor.to_f32(), [1.5, -2.25], "pad {pad}");
    }
}

#[test]
fn the_reference_library_agrees_about_good_files() {
    for name in
        ["tied/model.safetensors", "window/model.safetensors", "sharded/model-00001-of-00002.safetensors"]
    {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let theirs = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let ours = parse(bytes.clone()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(ours.tensor_names().count(), theirs.names().len());
        for (tensor, view) in theirs.tensors() {
            let mine = ours.tensor(&tensor, view.shape()).unwrap();
            assert_eq!(mine.bytes(), view.data(), "{tensor}");
        }
    }
}

#[test]
fn a_biased_model_is_not_loaded_without_its_biases() {
    let scratch = Scratch::copy_of("tied");
    let mut bytes = scratch.read("model.safetensors");
    let name = b"model.layers.0.self_attn.q_proj.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(b"model.layers.0.self_attn.q_proj.biases");
    scratch.write("model.safetensors", &bytes);
    let e = refusal(&scratch.0);
    assert_eq!(e.field(), Some("tensor model.layers.0.self_attn.q_proj.weight"), "{e}");
}

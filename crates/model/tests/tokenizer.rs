//! Tokenizers against the ids that the `tokenizers` library gives (scripts/make-tokenizer-fixtures.py), and their refusals.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;
use suanpan_model::Tokenizer;
use suanpan_model::gguf::Gguf;
use suanpan_model::tokenizer::{Detokenizer, GgufVocab, TokenizerError};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer").join(name)
}

fn read_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

fn small(name: &str) -> Tokenizer {
    Tokenizer::from_json(&std::fs::read(fixture(name)).unwrap(), None).unwrap().tokenizer
}

/// The GGUF form of a small tokenizer.json.
fn as_gguf(name: &str, pre: &str) -> GgufVocab {
    let json = read_json(name);
    let vocab = json.pointer("/model/vocab").unwrap().as_object().unwrap();
    let added = json["added_tokens"].as_array().unwrap();
    let mut tokens =
        vec![String::new(); vocab.len() + added.iter().filter(|t| t["special"] == false).count()];
    let mut token_types = vec![1; tokens.len()];
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize] = text.clone();
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        token_types[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merges = json.pointer("/model/merges").unwrap().as_array().unwrap();
    let merge = |m: &Value| format!("{} {}", m[0].as_str().unwrap(), m[1].as_str().unwrap());
    GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        tokens,
        token_types,
        merges: merges.iter().map(merge).collect(),
        bos: Some(0),
        eos: Some(2),
        ..GgufVocab::default()
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Every case of an expected file: plain ids, ids with control tokens meant, the begin token, and decoding.
fn check(tokenizer: &Tokenizer, expected: &str) {
    let rows = read_json(expected);
    for row in rows.as_array().unwrap() {
        let text = row["text"].as_str().unwrap();
        let plain = ids(&row["plain"]);
        let meant = row.get("with_specials").map_or_else(|| plain.clone(), ids);
        let whole = row.get("add_special").map_or_else(|| meant.clone(), ids);
        assert_eq!(tokenizer.encode_plain(text).unwrap(), plain, "{text:?}");
        assert_eq!(tokenizer.encode_with_specials(text, false).unwrap(), meant, "{text:?}");
        if !text.starts_with("<|endoftext|>") {
            assert_eq!(tokenizer.encode_with_specials(text, true).unwrap(), whole, "{text:?}");
        }
        assert!(
            plain.iter().all(|&id| !tokenizer.is_special(id)),
            "{text:?} made a control token: {plain:?}"
        );
        let decoded = row.get("decoded").map_or(text, |d| d.as_str().unwrap());
        assert_eq!(tokenizer.decode(&plain, false), decoded, "{text:?}");
        if let Some(skipping) = row.get("decoded_skipping") {
            assert_eq!(tokenizer.decode(&meant, true), skipping.as_str().unwrap(), "{text:?}");
        }
        for skip in [false, true] {
            let mut stream = Detokenizer::new(tokenizer, skip);
            let mut joined: String = meant.iter().map(|&id| stream.push(id)).collect();
            joined += &stream.flush();
            assert_eq!(joined, tokenizer.decode(&meant, skip), "{text:?}");
        }
    }
}

#[test]
fn smollm_ids_equal_the_reference() {
    check(&small("smollm_small.json"), "smollm_small.expected.json");
    check(
        &Tokenizer::from_gguf(as_gguf("smollm_small.json", "smollm")).unwrap(),
        "smollm_small.expected.json",
    );
}

#[test]
fn llama3_ids_equal_the_reference() {
    check(&small("llama3_small.json"), "llama3_small.expected.json");
    check(
        &Tokenizer::from_gguf(as_gguf("llama3_small.json", "llama-bpe")).unwrap(),
        "llama3_small.expected.json",
    );
}

#[test]
fn tekken_ids_equal_the_reference() {
    check(&small("tekken_small.json"), "tekken_small.expected.json");
    check(
        &Tokenizer::from_gguf(as_gguf("tekken_small.json", "tekken")).unwrap(),
        "tekken_small.expected.json",
    );
}

/// The real file is not committed; the test says so when it is not there.
#[test]
fn smollm2_ids_equal_the_reference() {
    let default =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = std::env::var_os("SUANPAN_SMOLLM2").map_or(default, PathBuf::from);
    if !path.exists() {
        eprintln!("SKIPPED: {} is not there (scripts/fetch-smollm2, or set SUANPAN_SMOLLM2)", path.display());
        return;
    }
    let gguf = Gguf::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(GgufVocab::read(&gguf).unwrap()).unwrap();
    check(&tokenizer, "smollm2.expected.json");
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.encode_with_specials("<|im_end|>\nuser", false).unwrap(), [2, 198, 4093]);
    assert_eq!(tokenizer.missing_bytes().len(), 21);
    assert_eq!(tokenizer.special_ids().eos, Some(2));
}

/// SentencePiece: against the `sentencepiece` library from GGUF, against `tokenizers` from tokenizer.json.
#[test]
fn sentencepiece_ids_equal_the_reference() {
    for name in ["spm-plain", "spm-prefix", "spm-phrases"] {
        let gguf = Gguf::open(&fixture(&format!("{name}.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_gguf(GgufVocab::read(&gguf).unwrap()).unwrap();
        check(&tokenizer, &format!("{name}-expected.json"));
        assert!(tokenizer.missing_bytes().is_empty());
    }
    for name in ["spm-plain", "spm-prefix"] {
        check(&small(&format!("{name}.json")), &format!("{name}-json-expected.json"));
    }
}

#[test]
fn sentencepiece_keeps_every_byte_of_a_text_and_splits_no_character_in_a_stream() {
    let gguf = Gguf::open(&fixture("spm-plain.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(GgufVocab::read(&gguf).unwrap()).unwrap();
    let text = "a\u{0}b 🎉 \u{10ffff}\u{7f} né";
    let ids = tokenizer.encode_plain(text).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), text);
    let mut stream = Detokenizer::new(&tokenizer, true);
    let parts: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(parts.concat() + &stream.flush(), text);
    assert!(!parts.iter().any(|p| p.contains('\u{fffd}')), "{parts:?}");
}

#[test]
fn a_begin_token_is_never_written_twice() {
    let llama = small("llama3_small.json");
    let bos = llama.id_of("<|endoftext|>").unwrap();
    assert_eq!(llama.prefix(), [bos]);
    assert_eq!(llama.encode_with_specials("<|endoftext|>a", true).unwrap(), llama.encode("a", true).unwrap());
    assert_eq!(llama.encode("a", true).unwrap()[0], bos);
    // Spelled by a user it is text, so the real one still goes before it.
    let spelled = llama.encode("<|endoftext|>a", true).unwrap();
    assert_eq!(spelled.iter().filter(|&&id| id == bos).count(), 1);
    assert_eq!(llama.decode(&spelled, true), "<|endoftext|>a");

    let asked = |add_bos, add_eos| {
        let vocab = GgufVocab { add_bos, add_eos, ..as_gguf("smollm_small.json", "smollm") };
        Tokenizer::from_gguf(vocab).unwrap().encode("a", true).unwrap()
    };
    assert_eq!(asked(None, None), asked(Some(false), Some(false)));
    assert_eq!(asked(Some(true), Some(true)), [&[0], asked(None, None).as_slice(), &[2]].concat());
}

#[test]
fn a_megabyte_takes_linear_time() {
    let tokenizer = small("smollm_small.json");
    type Make = fn(usize) -> String;
    let texts: [(&str, Make); 4] = [
        ("prose", |n| "The abacus counts, in 2024, what it's told.\n".repeat(n / 44)),
        ("one letter", |n| "a".repeat(n)),
        ("spaces", |n| " ".repeat(n) + "x"),
        ("emoji", |n| "🎉".repeat(n / 4)),
    ];
    for (name, make) in texts {
        let seconds = |bytes: usize| {
            let text = make(bytes);
            let start = Instant::now();
            let ids = tokenizer.encode_plain(&text).unwrap();
            assert_eq!(tokenizer.decode(&ids, true), text, "{name}");
            start.elapsed().as_secs_f64()
        };
        let (eighth, whole) = (seconds(1 << 17), seconds(1 << 20));
        // Eight times the text: 64 times the time would be quadratic; the margin is for a shared machine.
        assert!(whole < 24.0 * eighth + 0.5, "{name}: {eighth:.3} s for 128 KiB, {whole:.3} s for 1 MiB");
    }
}

fn refusal(change: impl Fn(&mut GgufVocab)) -> TokenizerError {
    let mut vocab = as_gguf("smollm_small.json", "smollm");
    change(&mut vocab);
    Tokenizer::from_gguf(vocab).unwrap_err()
}

#[test]
fn gguf_vocabularies_that_are_not_understood_are_refused_by_name() {
    let unknown = refusal(|v| v.pre = Some("bloom".into())).to_string();
    assert!(
        unknown.contains("tokenizer.ggml.pre") && unknown.contains("bloom") && unknown.contains("smollm"),
        "{unknown}"
    );
    let unigram = refusal(|v| v.model = "t5".into()).to_string();
    assert!(unigram.contains("tokenizer.ggml.model") && unigram.contains("t5"), "{unigram}");
    let kind = refusal(|v| v.token_types[300] = 9).to_string();
    assert!(kind.contains("token_type") && kind.contains("300"), "{kind}");
}

#[test]
fn gguf_vocabularies_that_contradict_themselves_are_refused() {
    type Change = fn(&mut GgufVocab);
    let changes: [(&str, Change); 9] = [
        ("no tokens", |v| v.tokens.clear()),
        ("types of another length", |v| v.token_types.truncate(100)),
        ("a begin token outside", |v| v.bos = Some(1 << 20)),
        ("a merge of one token", |v| v.merges[0] = "Ġ".into()),
        ("a merge of three tokens", |v| v.merges[0] = "Ġ a b".into()),
        ("a merge of a token that is not there", |v| v.merges[0] = "q zzzz".into()),
        ("a merge whose result is not there", |v| v.merges[0] = "Ġ \u{143}".into()),
        ("a token outside the alphabet", |v| v.tokens[300] = "a b".into()),
        ("an added token without text", |v| v.tokens[0] = String::new()),
    ];
    for (name, change) in changes {
        let mut vocab = as_gguf("smollm_small.json", "smollm");
        change(&mut vocab);
        let outcome = Tokenizer::from_gguf(vocab);
        assert!(matches!(outcome, Err(TokenizerError::Damaged { .. })), "{name}: {outcome:?}");
    }
}

#[test]
fn tokenizer_json_parts_that_change_ids_are_refused_by_name() {
    let change = |pointer: &str, value: Value| {
        let mut json = read_json("llama3_small.json");
        match json.pointer_mut(pointer) {
            Some(place) => *place = value,
            None => json["model"][pointer.rsplit('/').next().unwrap()] = value,
        }
        Tokenizer::from_json(json.to_string().as_bytes(), None).unwrap_err().to_string()
    };
    use serde_json::json;
    let cases = [
        ("/normalizer", json!({"type": "NFKC"}), "normalizer"),
        ("/decoder", json!({"type": "WordPiece"}), "decoder"),
        ("/model/type", json!("Unigram"), "model.type"),
        ("/model/dropout", json!(0.1), "model.dropout"),
        ("/model/unk_token", json!("<unk>"), "model.unk_token"),
        ("/model/byte_fallback", json!(true), "pre_tokenizer"),
        ("/model/end_of_word_suffix", json!("</w>"), "model.end_of_word_suffix"),
        ("/model/merges", json!(["a b c"]), "a b c"),
        ("/model/merges", json!([["a"]]), "two tokens"),
        ("/model/vocab", json!({"a": 4294967295u32}), "model.vocab"),
        ("/pre_tokenizer", json!({"type": "Whitespace"}), "pre_tokenizer"),
        ("/pre_tokenizer", json!({"type": "ByteLevel", "add_prefix_space": true}), "pre_tokenizer"),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("\\w+"), "pre_tokenizer"),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("a++a"), "pre_tokenizer"),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!("a(?=b)"), "pre_tokenizer"),
        ("/post_processor", json!({"type": "BertProcessing"}), "post_processor"),
        ("/added_tokens/0/id", json!(300), "used twice"),
    ];
    for (pointer, value, named) in cases {
        let message = change(pointer, value.clone());
        assert!(message.contains(named), "{pointer} = {value}: {message}");
    }
    assert!(Tokenizer::from_json(b"{}", None).is_err());
    assert!(Tokenizer::from_json(b"\xff", None).is_err());
}

#[test]
fn tokenizer_config_names_tokens_and_the_template() {
    let json = std::fs::read(fixture("smollm_small.json")).unwrap();
    let config =
        br#"{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": true,
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#;
    let both = Tokenizer::from_json(&json, Some(config)).unwrap();
    assert_eq!(both.chat_template.as_deref(), Some("D"));
    assert_eq!(both.tokenizer.special_ids().bos, Some(1));
    assert_eq!(both.tokenizer.special_ids().eos, Some(2));
    assert_eq!(both.tokenizer.prefix(), [1]);
    assert!(Tokenizer::from_json(&json, Some(br#"{"chat_template": 7}"#)).is_err());
}

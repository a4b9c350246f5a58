//! Hub names: fetched once, from one commit, with progress; then served from the cache, also offline.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use suanpan_model::hub::{HubFiles, HubSpec, cached};
use suanpan_model::{LoadOptions, LoadStage, Model, ModelError, load};

use super::{Scratch, fixture};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REVISION: &str = "v2";

/// A hub of one repository on the loopback device. Ends with the test's process.
struct FakeHub {
    endpoint: String,
    /// Path and authorization of every request.
    seen: Arc<Mutex<Vec<(String, String)>>>,
}

impl FakeHub {
    /// Serves the files of the fixture folder or, if it is a file, that file as `model.gguf`.
    fn serve(name: &str) -> FakeHub {
        FakeHub::with(name, |_| {})
    }

    /// The same with the files changed.
    fn with(name: &str, edit: impl FnOnce(&mut Vec<(String, Vec<u8>)>)) -> FakeHub {
        let path = fixture(name);
        let mut files: Vec<(String, Vec<u8>)> = if path.is_dir() {
            let entries = std::fs::read_dir(&path).unwrap().map(|e| e.unwrap());
            entries
                .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
                .collect()
        } else {
            vec![
                ("model.gguf".into(), std::fs::read(&path).unwrap()),
                ("README.md".into(), b"hello".to_vec()),
            ]
        };
        edit(&mut files);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, &files, &log);
            }
        });
        FakeHub { endpoint, seen }
    }

    fn options(&self, cache: &Scratch) -> LoadOptions {
        LoadOptions {
            hub_cache: Some(cache.0.clone()),
            hub_endpoint: Some(self.endpoint.clone()),
            hub_token: Some("secret".into()),
            offline: Some(false),
            ..LoadOptions::default()
        }
    }

    fn requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

fn answer(mut stream: TcpStream, files: &[(String, Vec<u8>)], log: &Mutex<Vec<(String, String)>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(path) = lines.next().and_then(|l| l.split(' ').nth(1).map(String::from)) else { return };
    let (mut range, mut token) = (None, String::new());
    for line in lines.take_while(|l| !l.is_empty()) {
        let (name, value) = line.split_once(':').unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "range" => range = value.trim().strip_prefix("bytes=").map(String::from),
            "authorization" => token = value.trim().into(),
            _ => {}
        }
    }
    log.lock().unwrap().push((path.clone(), token));
    let (status, headers, body) =
        if ["main", REVISION].iter().any(|r| path == format!("/api/models/owner/name/revision/{r}")) {
            let siblings: Vec<_> = files.iter().map(|(n, _)| serde_json::json!({ "rfilename": n })).collect();
            (
                "200 OK",
                String::new(),
                serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string().into_bytes(),
            )
        } else if let Some((name, bytes)) =
            files.iter().find(|(n, _)| path == format!("/owner/name/resolve/{COMMIT}/{n}"))
        {
            let (start, end) = range.as_deref().and_then(|r| r.split_once('-')).unwrap_or(("0", ""));
            let start: usize = start.parse().unwrap();
            let end = end.parse().map_or(bytes.len(), |e: usize| e + 1).min(bytes.len());
            let headers = format!(
                "Content-Range: bytes {start}-{}/{}\r\nETag: \"etag-{name}\"\r\nx-repo-commit: {COMMIT}\r\n",
                end - 1,
                bytes.len()
            );
            ("206 Partial Content", headers, bytes[start..end].to_vec())
        } else {
            ("404 Not Found", String::new(), b"{}".to_vec())
        };
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n", body.len());
    // A client that hangs up early is its own affair.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

fn get(spec: &str, options: &LoadOptions) -> Result<Model, ModelError> {
    load(spec, options, &mut |_| {})
}

#[test]
fn a_folder_is_fetched_once_and_then_served_offline() {
    let (hub, cache) = (FakeHub::serve("sharded"), Scratch::new());
    let mut downloaded = std::collections::BTreeMap::new();
    let m = load("hf:owner/name", &hub.options(&cache), &mut |p| {
        if p.stage == LoadStage::Download {
            assert!(p.done_bytes <= p.total_bytes && p.done_items <= p.total_items, "{p:?}");
            downloaded.insert(p.item, p.done_bytes);
        }
    })
    .unwrap_or_else(|e| panic!("{e}"));
    let local = super::load_path(&fixture("sharded")).unwrap();
    assert_eq!(m.weights.lm_head.to_f32(), local.weights.lm_head.to_f32());
    assert_eq!(m.config.eos_token_ids, local.config.eos_token_ids, "generation_config.json came along");
    assert_eq!(m.config.name, "owner/name", "not the commit");
    for (name, bytes) in &downloaded {
        assert_eq!(*bytes, fixture("sharded").join(name).metadata().unwrap().len(), "{name}");
    }
    assert_eq!(downloaded.len(), 7);
    assert!(hub.seen.lock().unwrap().iter().all(|(_, token)| token == "Bearer secret"));
    // Now it is all there: nobody is asked again.
    let requests = hub.requests();
    let offline = LoadOptions { offline: Some(true), ..hub.options(&cache) };
    for options in [&hub.options(&cache), &offline] {
        assert!(get("hf:owner/name", options).is_ok());
        assert!(get(&format!("hf:owner/name@{COMMIT}"), options).is_ok());
    }
    assert_eq!(hub.requests(), requests);
}

#[test]
fn an_incomplete_cache_is_completed_or_refused_offline() {
    let (hub, cache) = (FakeHub::serve("tied"), Scratch::new());
    let offline = LoadOptions { offline: Some(true), ..hub.options(&cache) };
    let refused = |spec: &str, options: &LoadOptions| match get(spec, options) {
        Ok(_) => panic!("{spec} must be refused"),
        Err(e) => e.to_string(),
    };
    assert!(refused("hf:owner/name", &offline).contains("offline"));
    assert_eq!(hub.requests(), 0);
    get("hf:owner/name", &hub.options(&cache)).unwrap_or_else(|e| panic!("{e}"));
    let spec = HubSpec::parse("owner/name").unwrap();
    let Some(HubFiles::Folder(folder)) = cached(&spec, &cache.0) else { panic!("the folder is cached") };
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(refused("hf:owner/name", &offline).contains("offline"));
    let requests = hub.requests();
    get("hf:owner/name", &hub.options(&cache)).unwrap_or_else(|e| panic!("{e}"));
    let again: Vec<_> = hub.seen.lock().unwrap()[requests..].iter().map(|(path, _)| path.clone()).collect();
    assert!(again.iter().any(|p| p.ends_with("model.safetensors")), "{again:?}");
    assert!(!again.iter().any(|p| p.ends_with("config.json")), "only what was missing: {again:?}");
}

#[test]
fn a_gguf_file_is_fetched_by_name_or_because_it_is_the_only_one() {
    for spec in ["hf:owner/name:model.gguf", "hf:owner/name"] {
        let (hub, cache) = (FakeHub::serve("tied-q4_0.gguf"), Scratch::new());
        let m = get(spec, &hub.options(&cache)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(m.config.hidden_size, 64);
        let offline = LoadOptions { offline: Some(true), ..hub.options(&cache) };
        assert!(get("hf:owner/name:model.gguf", &offline).is_ok());
    }
    let (hub, cache) = (FakeHub::serve("tied-q4_0.gguf"), Scratch::new());
    let Err(e) = get("hf:owner/name:other.gguf", &hub.options(&cache)) else { panic!("must be refused") };
    assert!(e.to_string().contains("other.gguf") && e.to_string().contains("model.gguf"), "{e}");
    let Err(e) = get("hf:owner/absent", &hub.options(&cache)) else { panic!("must be refused") };
    assert!(e.to_string().contains("owner/absent") && e.to_string().contains("404"), "{e}");
}

/// What a hub says about itself is not believed: an index that leads out of the folder fetches and writes nothing.
#[test]
fn an_index_of_a_hub_that_leads_out_of_the_cache_is_refused() {
    for name in
        ["../../../stolen.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", "a\\b.safetensors"]
    {
        let index = serde_json::json!({ "weight_map": { "model.embed_tokens.weight": name } }).to_string();
        let hub = FakeHub::with("sharded", |files| {
            let at = files.iter().position(|(n, _)| n == "model.safetensors.index.json").unwrap();
            files[at].1 = index.clone().into_bytes();
            files.push((name.to_string(), b"stolen".to_vec()));
        });
        let cache = Scratch::new();
        let Err(e) = get("hf:owner/name", &hub.options(&cache)) else { panic!("{name} must be refused") };
        assert!(e.to_string().contains("model.safetensors.index.json"), "{e}");
        assert!(
            !hub.seen
                .lock()
                .unwrap()
                .iter()
                .any(|(path, _)| path.contains("stolen") || path.contains("passwd"))
        );
        let offline = LoadOptions { offline: Some(true), ..hub.options(&cache) };
        assert!(get("hf:owner/name", &offline).is_err(), "{name}");
    }
}

#[test]
fn a_revision_is_asked_for_by_name_and_kept_beside_the_main_one() {
    let (hub, cache) = (FakeHub::serve("tied"), Scratch::new());
    let spec = format!("hf:owner/name@{REVISION}");
    get(&spec, &hub.options(&cache)).unwrap_or_else(|e| panic!("{e}"));
    let asked: Vec<String> = hub.seen.lock().unwrap().iter().map(|(path, _)| path.clone()).collect();
    assert!(asked[0].ends_with(&format!("/revision/{REVISION}")), "{asked:?}");
    let offline = LoadOptions { offline: Some(true), ..hub.options(&cache) };
    assert!(
        get(&spec, &offline).is_ok() && get("hf:owner/name", &offline).is_err(),
        "main was never asked for"
    );
    let Err(e) = get("hf:owner/name@v3", &hub.options(&cache)) else { panic!("must be refused") };
    assert!(e.to_string().contains("v3"), "{e}");
}

/// Loads the model that the test below names, with everything from the environment. Nothing to do otherwise.
#[test]
fn child_of_the_environment_test() {
    if let Ok(spec) = std::env::var("SUANPAN_TEST_SPEC") {
        match get(&spec, &LoadOptions::default()) {
            Ok(model) => println!("LOADED {}", model.config.name),
            Err(e) => println!("REFUSED {e}"),
        }
    }
}

#[test]
fn the_environment_names_cache_hub_and_token_and_forbids_fetching() {
    let (hub, cache) = (FakeHub::serve("tied-q4_0.gguf"), Scratch::new());
    let run = |offline: &str, spec: &str| {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "hub::child_of_the_environment_test", "--nocapture"]);
        child.env("SUANPAN_TEST_SPEC", spec).env("HF_HUB_CACHE", &cache.0).env("HF_ENDPOINT", &hub.endpoint);
        child.env("HF_TOKEN", "from-the-environment").env("HF_HUB_OFFLINE", offline);
        String::from_utf8(child.output().unwrap().stdout).unwrap()
    };
    let spec = "hf:owner/name:model.gguf";
    for word in ["1", "TRUE", "yes", "on"] {
        let out = run(word, spec);
        assert!(out.contains("REFUSED") && out.contains("offline") && hub.requests() == 0, "{word}: {out}");
    }
    let out = run("0", spec);
    assert!(out.contains("LOADED"), "{out}");
    assert!(hub.seen.lock().unwrap().iter().all(|(_, token)| token == "Bearer from-the-environment"));
    let requests = hub.requests();
    let out = run("1", spec);
    assert!(out.contains("LOADED") && hub.requests() == requests, "{out}");
}

#[test]
fn hub_names_are_parsed_and_strange_ones_refused() {
    let spec = HubSpec::parse("owner/name@refs/pr/1:q4/model.GGUF").unwrap();
    assert_eq!((spec.repo.as_str(), spec.revision.as_str()), ("owner/name", "refs/pr/1"));
    assert_eq!(spec.file.as_deref(), Some("q4/model.GGUF"));
    assert_eq!(HubSpec::parse("owner/name").unwrap().revision, "main");
    for bad in [
        "",
        "name",
        "a/b/c",
        "a/..",
        "../b",
        "a/b@",
        "a/b@x/../y",
        "a/b:",
        "a/b:x.bin",
        "a/b:../x.gguf",
        "a b/c",
        "a/b?x",
    ] {
        assert!(HubSpec::parse(bad).is_err(), "{bad:?}");
    }
}

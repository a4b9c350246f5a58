//! The routes: each reads, checks, runs and answers. What a field means is in `wire`, how text becomes ids in `prompt`.

use std::collections::BTreeSet;

use axum::body::{Body, Bytes};
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use serde_json::json;

use crate::app::{App, unix_seconds};
use crate::auth::Tenant;
use crate::collect::{self, Heading};
use crate::error::ApiError;
use crate::http::{self, RequestId};
use crate::prompt::{self, Ready};
use crate::run::{Run, Work};
use crate::stream::{self, ChatSpelling, CompletionSpelling, UsageMode};
use crate::wire::{
    self, ChatRequest, Common, CompletionRequest, DetokenizeReply, ModelCard, ModelList, TokenizeInput,
    TokenizeReply,
};

/// OpenAI's default length of a text completion.
const COMPLETION_TOKENS: usize = 16;
const PAGE: &str = include_str!("page.html");

/// Every route behind the guard.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/capabilities", get(capability_list))
        .route("/v1/conditions", get(conditions))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/", get(page))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), http::guard))
        .with_state(app)
}

/// Runs `work` where it may take long without holding up other requests.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => Err(ApiError::internal(format!("reading the request failed: {failed}"))),
    }
}

async fn read(app: &App, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    http::json_body(headers, body, app.options.max_body_bytes).await
}

/// A request read, checked and turned into token ids.
struct Prepared {
    heading: Heading,
    work: Work,
    prompts: Vec<Ready>,
    stream: Option<UsageMode>,
}

/// Which route asks, in the words that the shared preparation needs.
struct Asker<'a> {
    route: &'static str,
    id_prefix: &'static str,
    request_id: &'a str,
    tenant: Tenant,
    prompt_logprobs: bool,
    default_tokens: usize,
    /// Choices drawn for each prompt where more are drawn than come back.
    best_of: Option<usize>,
}

fn prepare(
    app: &App,
    asker: &Asker<'_>,
    model: String,
    common: &Common,
    prompts: Vec<(String, Ready)>,
) -> Result<Prepared, ApiError> {
    let limit = app.facts.max_model_len;
    let mut work = Vec::with_capacity(prompts.len());
    for (name, ready) in &prompts {
        let asked = common.sampling.max_tokens;
        let max_tokens = prompt::budget(limit, name, ready.ids.len(), asked, asker.default_tokens)?;
        let mut params = prompt::params(&app.model, &common.sampling, max_tokens)?;
        if asker.best_of.is_some() {
            // They are ranked by what their tokens' probabilities were.
            params.logprobs = params.logprobs.or(Some(0));
        }
        work.push((ready.ids.clone(), params));
    }
    Ok(Prepared {
        heading: Heading {
            id: app.ids.fresh(asker.id_prefix),
            created: unix_seconds(),
            model,
            n: common.n,
            logprobs: common.sampling.logprobs,
            prompt_logprobs: asker.prompt_logprobs,
            token_ids: common.return_token_ids,
        },
        work: Work {
            prompts: work,
            n: asker.best_of.unwrap_or(common.n),
            namespace: namespace(app, asker.tenant, common.cache_salt.as_deref()),
            cache_priority: common.cache_priority,
            label: common.request_id.clone().unwrap_or_else(|| asker.request_id.to_owned()),
            route: asker.route,
        },
        prompts: prompts.into_iter().map(|(_, ready)| ready).collect(),
        stream: common
            .stream
            .then_some(UsageMode { include: common.include_usage, continuous: common.continuous_usage }),
    })
}

/// Keys and salts split the prefix cache. The number is keyed by the server's secret, so it can be neither guessed nor steered; it does
/// not depend on the order of the keys.
fn namespace(app: &App, tenant: Tenant, salt: Option<&str>) -> u64 {
    let keys = &app.options.api_keys;
    if keys.is_open() && salt.is_none() {
        return 0;
    }
    let mut hash = blake3::Hasher::new_keyed(&app.options.namespace_secret);
    let key = keys.of(tenant).as_bytes();
    hash.update(&(key.len() as u64).to_le_bytes()).update(key);
    hash.update(&[u8::from(salt.is_some())]).update(salt.unwrap_or_default().as_bytes());
    let mut number = [0; 8];
    number.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    u64::from_le_bytes(number)
}

async fn chat(
    State(app): State<App>,
    Extension(RequestId(id)): Extension<RequestId>,
    Extension(tenant): Extension<Tenant>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read(&app, &headers, body).await?;
    let shared = app.clone();
    let prepared = off_thread(move || {
        let ChatRequest { common, conversation } = wire::parse_chat(&body)?;
        let model = shared.model_name(common.model.as_deref())?;
        let ids = prompt::chat(&shared.model, &conversation)?;
        let ready = Ready { ids, text: String::new() };
        let asker = Asker {
            route: "/v1/chat/completions",
            id_prefix: "chatcmpl-",
            request_id: &id,
            tenant,
            prompt_logprobs: common.sampling.prompt_logprobs.is_some(),
            default_tokens: usize::MAX,
            best_of: None,
        };
        prepare(&shared, &asker, model, &common, vec![("messages".into(), ready)])
    })
    .await?;
    let Prepared { heading, work, prompts, stream } = prepared;
    let run = Run::start(&app, &work)?;
    match (stream, prompts.first()) {
        (Some(mode), _) => {
            let spelling =
                ChatSpelling { logprobs: heading.logprobs.is_some(), token_ids: heading.token_ids };
            Ok(stream::respond(&app, run, heading, prompts, mode, spelling))
        }
        (None, Some(ready)) => collect::chat(&app, run, &heading, ready).await,
        (None, None) => Err(ApiError::internal("a chat without a prompt")),
    }
}

async fn completion(
    State(app): State<App>,
    Extension(RequestId(id)): Extension<RequestId>,
    Extension(tenant): Extension<Tenant>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read(&app, &headers, body).await?;
    let shared = app.clone();
    let (prepared, echo) = off_thread(move || {
        let request = wire::parse_completion(&body)?;
        let model = shared.model_name(request.common.model.as_deref())?;
        let prompts = completion_prompts(&shared, &request)?;
        let asker = Asker {
            route: "/v1/completions",
            id_prefix: "cmpl-",
            request_id: &id,
            tenant,
            prompt_logprobs: request.prompt_logprobs,
            default_tokens: COMPLETION_TOKENS,
            best_of: (request.best_of > request.common.n).then_some(request.best_of),
        };
        Ok((prepare(&shared, &asker, model, &request.common, prompts)?, request.echo))
    })
    .await?;
    let Prepared { heading, work, prompts, stream } = prepared;
    let run = Run::start(&app, &work)?;
    match stream {
        Some(mode) => {
            let spelling = completion_spelling(&heading, &prompts, echo);
            Ok(stream::respond(&app, run, heading, prompts, mode, spelling))
        }
        None => collect::completion(&app, run, &heading, &prompts, echo).await,
    }
}

fn completion_prompts(app: &App, request: &CompletionRequest) -> Result<Vec<(String, Ready)>, ApiError> {
    let skip_special = request.common.sampling.skip_special_tokens;
    let one = |(i, p): (usize, &wire::Prompt)| {
        let name = if request.prompts.len() == 1 { "prompt".to_owned() } else { format!("prompt[{i}]") };
        let ready = prompt::completion(&app.model, &name, p, request.add_special_tokens, skip_special)?;
        Ok((name, ready))
    };
    request.prompts.iter().enumerate().map(one).collect()
}

fn completion_spelling(heading: &Heading, prompts: &[Ready], echo: bool) -> CompletionSpelling {
    let choices = || prompts.iter().flat_map(|p| std::iter::repeat_n(p, heading.n));
    CompletionSpelling {
        logprobs: heading.logprobs,
        token_ids: heading.token_ids,
        offsets: choices().map(|p| if echo { p.text.chars().count() } else { 0 }).collect(),
        echo: if echo { choices().map(|p| p.text.clone()).collect() } else { Vec::new() },
        prompt_ids: if heading.token_ids { choices().map(|p| p.ids.clone()).collect() } else { Vec::new() },
        opened: BTreeSet::new(),
    }
}

async fn tokenize(State(app): State<App>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let body = read(&app, &headers, body).await?;
    off_thread(move || {
        let request = wire::parse_tokenize(&body)?;
        app.model_name(request.model.as_deref())?;
        let tokens = match &request.input {
            TokenizeInput::Prompt { text, add_special_tokens } => {
                prompt::text_ids(&app.model, "prompt", text, *add_special_tokens)?
            }
            TokenizeInput::Chat(conversation) => prompt::chat(&app.model, conversation)?,
        };
        let text = |id: &u32| crate::logprobs::token_text(&app.model.tokenizer, *id);
        let token_strs = request.return_token_strs.then(|| tokens.iter().map(text).collect());
        let max_model_len = app.facts.max_model_len;
        http::json(&TokenizeReply { count: tokens.len(), max_model_len, tokens, token_strs })
    })
    .await
}

async fn detokenize(State(app): State<App>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let body = read(&app, &headers, body).await?;
    off_thread(move || {
        let request = wire::parse_detokenize(&body)?;
        app.model_name(request.model.as_deref())?;
        prompt::check_ids(&app.model, "tokens", &request.tokens)?;
        http::json(&DetokenizeReply { prompt: app.model.tokenizer.decode(&request.tokens, false) })
    })
    .await
}

fn card(app: &App, id: String) -> ModelCard {
    ModelCard {
        id,
        object: "model",
        created: app.started,
        owned_by: "suanpan",
        root: app.model.config.name.clone(),
        parent: None,
        max_model_len: app.facts.max_model_len,
    }
}

/// Under which conditions this server answers: what a report of a measurement must say.
async fn conditions(State(app): State<App>) -> Result<Response, ApiError> {
    http::json(&app.facts.conditions)
}

async fn models(State(app): State<App>) -> Result<Response, ApiError> {
    let names = app.options.served_model_names.iter();
    http::json(&ModelList { object: "list", data: names.map(|name| card(&app, name.clone())).collect() })
}

async fn model(State(app): State<App>, uri: Uri) -> Result<Response, ApiError> {
    let asked = uri.path().trim_start_matches("/v1/models/");
    let name = app.model_name(Some(&percent_decoded(asked)))?;
    http::json(&card(&app, name))
}

/// A path segment as text; a broken escape stays as it is. The result is only ever compared with served names.
fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = |j: usize| bytes.get(j).and_then(|b| char::from(*b).to_digit(16));
        match (bytes[i], hex(i + 1), hex(i + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                i += 3;
            }
            (byte, ..) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

async fn capability_list(State(app): State<App>) -> Result<Response, ApiError> {
    http::json(&json!({"object": "list", "data": app.capabilities()}))
}

async fn health(State(app): State<App>) -> Result<StatusCode, ApiError> {
    app.ensure_alive().map(|()| StatusCode::OK)
}

async fn version() -> Result<Response, ApiError> {
    http::json(&json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn metrics(State(app): State<App>) -> Response {
    let page = app.metrics.render(&app.engine.stats());
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], page).into_response()
}

async fn page() -> Response {
    // Nothing but the page itself may run or be fetched.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy)),
    ];
    (headers, PAGE).into_response()
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::unknown_route(method.as_str(), uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

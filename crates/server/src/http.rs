//! What surrounds every route: request ids, keys, body limits. No route and no engine is known here.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio_stream::StreamExt;

use crate::app::App;
use crate::error::ApiError;

const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID_BYTES: usize = 128;
/// A body that has not arrived by then is given up.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// The request's name for logs and for the `X-Request-Id` header of the reply.
#[derive(Clone, Debug)]
pub struct RequestId(pub String);

/// Makes names that are unique in this process and cannot be guessed.
#[derive(Debug, Default)]
pub struct Ids {
    next: AtomicU64,
    keys: (RandomState, RandomState),
}

impl Ids {
    /// `prefix` and 32 hexadecimal digits.
    pub fn fresh(&self, prefix: &str) -> String {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:016x}{:016x}", self.keys.0.hash_one(n), self.keys.1.hash_one(n))
    }
}

/// Gives every request a name, checks its key, and names the reply.
pub async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let (id, valid) = match request.headers().get(REQUEST_ID) {
        None => (app.ids.fresh("req-"), true),
        Some(value) => match value.to_str() {
            Ok(s)
                if (1..=MAX_REQUEST_ID_BYTES).contains(&s.len())
                    && s.bytes().all(|b| b.is_ascii_graphic()) =>
            {
                (s.to_owned(), true)
            }
            _ => (app.ids.fresh("req-"), false),
        },
    };
    let mut response = match app.options.api_keys.tenant(request.headers()) {
        None if request.uri().path() == "/" => {
            // The page is for browsers: they ask for a login, and send it again with every call of the page.
            let login = HeaderValue::from_static("Basic realm=\"suanpan: any user, the key as password\"");
            let mut response = ApiError::unauthorized().into_response();
            response.headers_mut().insert(header::WWW_AUTHENTICATE, login);
            response
        }
        None if request.uri().path() != "/health" => ApiError::unauthorized().into_response(),
        _ if !valid => {
            let message = format!("supported: 1 to {MAX_REQUEST_ID_BYTES} visible ASCII characters.");
            ApiError::bad_field("X-Request-Id", message).into_response()
        }
        tenant => {
            request.extensions_mut().insert(RequestId(id.clone()));
            request.extensions_mut().insert(tenant.unwrap_or_default());
            next.run(request).await
        }
    };
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Reads a JSON body up to `limit` bytes.
pub async fn json_body(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let media = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    let essence = media.split(';').next().unwrap_or("").trim();
    // A page of another origin can post text/plain to a loopback server unasked, but not application/json.
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::media_type(essence));
    }
    match tokio::time::timeout(BODY_TIMEOUT, collect(body, limit)).await {
        Ok(read) => read,
        Err(_elapsed) => Err(ApiError::body_timeout(BODY_TIMEOUT.as_secs())),
    }
}

/// A reply as JSON. The wire types cannot fail to serialise; if one did, that is a 500 and not a panic.
pub fn json(reply: &impl Serialize) -> Result<Response, ApiError> {
    let text = serde_json::to_string(reply).map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text).into_response())
}

async fn collect(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut chunks = body.into_data_stream();
    let mut read = Vec::new();
    let mut dropped = 0usize;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|e| ApiError::bad_json(format!("the body broke off: {e}")))?;
        if dropped == 0 && read.len() + chunk.len() <= limit {
            read.extend_from_slice(&chunk);
            continue;
        }
        // Most clients read no reply before they have written their body: take in as much again, unstored.
        read = Vec::new();
        dropped += chunk.len();
        if dropped > limit.saturating_mul(2) {
            break;
        }
    }
    if dropped > 0 { Err(ApiError::body_too_large(limit)) } else { Ok(read.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_names_differ() {
        let ids = Ids::default();
        let names: std::collections::HashSet<_> = (0..10_000).map(|_| ids.fresh("x-")).collect();
        assert_eq!(names.len(), 10_000);
    }

    #[tokio::test]
    async fn a_body_one_byte_too_long_is_refused_and_one_of_the_limit_is_read() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
        assert_eq!(json_body(&headers, Body::from(vec![b'x'; 10]), 10).await.unwrap().len(), 10);
        assert_eq!(json_body(&headers, Body::from(vec![b'x'; 11]), 10).await.unwrap_err().status, 413);
        let plain = HeaderMap::new();
        assert_eq!(json_body(&plain, Body::from("{}"), 10).await.unwrap_err().status, 415);
    }
}

//! The one error type of the HTTP surface: a status and OpenAI's error object. It knows no engine and no model.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use suanpan_base::BadArgument;

/// A refusal or failure, ready to be sent: `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status of the reply (200 has been sent already when the error ends a stream).
    pub status: StatusCode,
    /// What went wrong, in words, with the value asked and what is supported.
    pub message: String,
    /// OpenAI's error class, for example `invalid_request_error`.
    pub kind: &'static str,
    /// The request field at fault, if one is.
    pub param: Option<String>,
    /// A stable machine-readable code, if the class alone does not say it.
    pub code: Option<&'static str>,
    /// Seconds after which a retry may succeed (sent as `Retry-After`).
    pub retry_after_s: Option<u32>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), kind, param: None, code: None, retry_after_s: None }
    }

    fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// 400: the value of `param` cannot be honoured.
    pub fn bad_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        e.message = format!("Invalid value for '{param}': {}", e.message);
        e.param = Some(param);
        e.coded("invalid_value")
    }

    /// 400: `param` is a field that this server does not know.
    pub fn unknown_field(param: impl Into<String>) -> Self {
        let param = param.into();
        let message =
            format!("Unknown field '{param}': the fields of this route are listed in the API reference.");
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        e.param = Some(param);
        e.coded("unknown_field")
    }

    /// 400: `param` is known, and this value of it is not supported here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "");
        e.message = format!("Unsupported value for '{param}': {}", message.into());
        e.param = Some(param);
        e.coded("unsupported_value")
    }

    /// 400: the body is not JSON of the expected outer shape.
    pub fn bad_json(message: impl std::fmt::Display) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
            format!("The body of the request is not valid JSON: {message}"),
        )
        .coded("invalid_json")
    }

    /// 400: prompt and completion do not fit into the context. `param` is the field that holds the prompt.
    pub fn context_length(
        param: &str,
        limit: usize,
        prompt_tokens: usize,
        completion: Option<usize>,
    ) -> Self {
        let message = match completion {
            Some(max_tokens) => format!(
                "This model's maximum context length is {limit} tokens. However, you requested {} tokens \
                 ({prompt_tokens} in the {param}, {max_tokens} in the completion). \
                 Please reduce the length of the {param} or completion.",
                prompt_tokens.saturating_add(max_tokens)
            ),
            None => format!(
                "This model's maximum context length is {limit} tokens. However, your {param} resulted in \
                 {prompt_tokens} tokens, which leaves no room for a completion token. \
                 Please reduce the length of the {param}."
            ),
        };
        let mut e = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        e.param = Some(param.to_owned());
        e.coded("context_length_exceeded")
    }

    /// 401: no key, or a wrong one.
    pub fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "invalid_request_error",
            "Missing or wrong API key: send it as 'Authorization: Bearer KEY'.",
        )
        .coded("invalid_api_key")
    }

    /// 404: a model name that is not served.
    pub fn model_not_found(name: &str) -> Self {
        let mut e = Self::new(
            StatusCode::NOT_FOUND,
            "invalid_request_error",
            format!("The model '{}' does not exist; GET /v1/models lists what is served.", shorten(name)),
        );
        e.param = Some("model".into());
        e.coded("model_not_found")
    }

    /// 404: an unknown path.
    pub fn unknown_route(method: &str, path: &str) -> Self {
        let message = format!("Unknown request URL: {method} {}.", shorten(path));
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).coded("unknown_url")
    }

    /// 405: a known path, another method.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("Not allowed to {method} on {}.", shorten(path));
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .coded("method_not_allowed")
    }

    /// 408: the body did not arrive in time.
    pub fn body_timeout(seconds: u64) -> Self {
        let message = format!("The body of the request did not arrive within {seconds} s.");
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message).coded("request_timeout")
    }

    /// 413: the body is longer than the limit.
    pub fn body_too_large(limit_bytes: usize) -> Self {
        let message = format!("The body of the request is larger than the limit of {limit_bytes} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).coded("request_too_large")
    }

    /// 415: the body is not declared as JSON.
    pub fn media_type(got: &str) -> Self {
        let got = if got.is_empty() { "none" } else { got };
        let message =
            format!("Unsupported media type '{}': send 'Content-Type: application/json'.", shorten(got));
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
            .coded("unsupported_media_type")
    }

    /// 429: the waiting line is full.
    pub fn queue_full(unfinished: usize, limit: usize) -> Self {
        let message = format!(
            "The server is busy: {unfinished} choices run or wait, at most {limit} may. Retry later."
        );
        let mut e = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        e.retry_after_s = Some(1);
        e.coded("rate_limit_exceeded")
    }

    /// 503: the engine has ended or the server is going down.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).coded("service_unavailable")
    }

    /// 500: a failure inside this request that is not the client's fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).coded("internal_error")
    }

    /// The error object as one line of JSON.
    pub fn to_json(&self) -> String {
        let error = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        serde_json::to_string(&Body { error })
            .unwrap_or_else(|_| r#"{"error":{"message":"internal error"}}"#.into())
    }
}

impl From<BadArgument> for ApiError {
    /// A refusal from a lower room names its field as clients spell it: it becomes a 400.
    fn from(e: BadArgument) -> Self {
        Self::bad_field(e.field, format!("{}: supported: {}.", shorten(&e.asked), e.supported))
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.status.as_u16(), self.message)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (self.status, json, self.to_json()).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Values echoed back in a message are cut, so that a refusal never grows with the request.
pub(crate) fn shorten(value: &str) -> String {
    const LIMIT: usize = 120;
    if value.chars().count() <= LIMIT {
        return value.to_owned();
    }
    let head: String = value.chars().take(LIMIT).collect();
    format!("{head}…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_is_openais_with_nulls_present() {
        let e: serde_json::Value =
            serde_json::from_str(&ApiError::unknown_route("GET", "/x").to_json()).unwrap();
        let keys: Vec<_> = e["error"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys.len(), 4);
        assert!(e["error"]["param"].is_null());
        assert_eq!(e["error"]["code"], "unknown_url");
    }

    #[test]
    fn context_errors_name_the_limit_and_both_parts() {
        let m = ApiError::context_length("prompt", 2048, 8, Some(2045)).message;
        for part in ["2048", "2053", "8 in the prompt", "2045 in the completion"] {
            assert!(m.contains(part), "{m}");
        }
        let m = ApiError::context_length("messages", 2048, 2048, None).message;
        assert!(m.contains("2048") && !m.contains('-'), "{m}");
    }

    #[test]
    fn a_long_value_is_not_echoed_whole() {
        let e = ApiError::model_not_found(&"é".repeat(5000));
        assert!(e.message.len() < 500);
    }
}

//! API keys: a constant-time comparison, and one prefix-cache tenant per key. Keys are never logged.

use axum::http::{HeaderMap, header};
use base64::Engine as _;

/// Which key a request came with; requests of different tenants share no cached pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tenant(pub usize);

/// The accepted keys; none = every request is tenant 0.
#[derive(Clone, Default)]
pub struct Keys(Vec<String>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    /// Keys as given; an empty one is refused because it would let a header without a key in.
    pub fn new(keys: Vec<String>) -> Result<Keys, suanpan_base::BadArgument> {
        if keys.iter().any(|k| k.is_empty() || !k.bytes().all(|b| b.is_ascii_graphic())) {
            let supported = "visible ASCII characters, at least one";
            return Err(suanpan_base::BadArgument::new("serve", "api_key", "a key (not shown)", supported));
        }
        Ok(Keys(keys))
    }

    /// True when every request is let in.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// The key of a tenant; empty where none is needed.
    pub(crate) fn of(&self, tenant: Tenant) -> &str {
        self.0.get(tenant.0).map_or("", String::as_str)
    }

    /// The tenant of a request, or None when its key is missing or wrong.
    pub fn tenant(&self, headers: &HeaderMap) -> Option<Tenant> {
        if self.is_open() {
            return Some(Tenant(0));
        }
        let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, given) = value.split_once(' ')?;
        let key = match scheme.to_ascii_lowercase().as_str() {
            "bearer" => given.trim().to_owned(),
            "basic" => password(given.trim())?,
            _ => return None,
        };
        let mut found = None;
        // Every key is compared whole, so that the time tells neither which key nor how much of it matched.
        for (i, expected) in self.0.iter().enumerate() {
            if same(expected.as_bytes(), key.as_bytes()) {
                found = Some(Tenant(i));
            }
        }
        found
    }
}

/// The password of HTTP's Basic scheme, which is how a browser that opens the built-in page sends a key.
fn password(encoded: &str) -> Option<String> {
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
    let pair = String::from_utf8(decoded).ok()?;
    pair.split_once(':').map(|(_user, password)| password.to_owned())
}

/// Equality in a time that depends on the lengths only.
fn same(expected: &[u8], given: &[u8]) -> bool {
    let mut difference = expected.len() ^ given.len();
    for (i, &e) in expected.iter().enumerate() {
        let g = given.get(i).copied().unwrap_or(0);
        difference |= usize::from(std::hint::black_box(e ^ g));
    }
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(keys: &Keys, value: &str) -> Option<Tenant> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        keys.tenant(&headers)
    }

    #[test]
    fn only_whole_keys_open_the_door() {
        let keys = Keys::new(vec!["alpha".into(), "beta".into()]).unwrap();
        assert_eq!(tenant(&keys, "Bearer alpha"), Some(Tenant(0)));
        assert_eq!(tenant(&keys, "bearer beta"), Some(Tenant(1)));
        assert_eq!(tenant(&keys, "Basic YW55OmJldGE="), Some(Tenant(1)));
        for bad in [
            "Basic YW55OmJldA==",
            "Basic YmV0YQ==",
            "Basic !",
            "Bearer alph",
            "Bearer alphaa",
            "Bearer ",
            "Basic alpha",
            "alpha",
            "Bearer \u{1}",
        ] {
            let parsed = bad.parse::<axum::http::HeaderValue>();
            assert!(parsed.is_err() || tenant(&keys, bad).is_none(), "{bad}");
        }
        assert!(keys.tenant(&HeaderMap::new()).is_none());
        assert_eq!(Keys::default().tenant(&HeaderMap::new()), Some(Tenant(0)));
    }

    #[test]
    fn an_empty_key_is_refused_and_none_is_printed() {
        assert!(Keys::new(vec![String::new()]).is_err());
        let keys = Keys::new(vec!["secret".into()]).unwrap();
        assert!(!format!("{keys:?}").contains("secret"));
    }
}

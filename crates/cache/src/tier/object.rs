//! One stored page as bytes: a header that says what it is, the tokens it stands for, the page, and a checksum over all of it.
//!
//! ```text
//! magic 8 | layout 32 | digest 32 | parent 32 | tokens n · 4 | page | BLAKE3 of everything before 32
//! ```

use super::{Digest, Layout};

const MAGIC: &[u8; 8] = b"SUANPAN1";
const HEADER_BYTES: usize = 8 + 32 + 32 + 32;

/// Which page is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageName {
    /// Digest of all tokens up to the page's end.
    pub digest: Digest,
    /// The digest of the page before it.
    pub parent: Digest,
    /// The page's own tokens, compared when it comes back.
    pub tokens: Vec<u32>,
}

/// Why an object was not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectFault {
    /// It is cut short, or longer than a page of this layout.
    #[error("it has {found} bytes, not {expected}")]
    Length {
        /// Bytes found.
        found: usize,
        /// Bytes of an object of this layout.
        expected: usize,
    },
    /// It is no object of this version.
    #[error("it is not of this format")]
    Magic,
    /// Its bytes are not those that were written.
    #[error("its checksum is wrong")]
    Checksum,
    /// Another model, element type or page layout.
    #[error("it was written for another model or layout")]
    Layout,
    /// It is whole, and is another page.
    #[error("it holds other tokens")]
    Tokens,
}

pub(super) fn object_bytes(layout: &Layout) -> usize {
    HEADER_BYTES + 4 * layout.page_size + layout.page_bytes + 32
}

/// The object of a page. Panics on a page or name that is not of `layout`.
pub fn encode(layout: &Layout, name: &PageName, page: &[u8]) -> Vec<u8> {
    assert!(
        page.len() == layout.page_bytes && name.tokens.len() == layout.page_size,
        "a page of this layout"
    );
    let mut object = Vec::with_capacity(object_bytes(layout));
    object.extend_from_slice(MAGIC);
    for part in [&layout.id, &name.digest, &name.parent] {
        object.extend_from_slice(part);
    }
    name.tokens.iter().for_each(|token| object.extend_from_slice(&token.to_le_bytes()));
    object.extend_from_slice(page);
    let sum = blake3::hash(&object);
    object.extend_from_slice(sum.as_bytes());
    object
}

/// The page inside an object, if it is whole and the one that `name` means.
pub fn decode<'a>(layout: &Layout, name: &PageName, object: &'a [u8]) -> Result<&'a [u8], ObjectFault> {
    let expected = object_bytes(layout);
    if object.len() != expected {
        return Err(ObjectFault::Length { found: object.len(), expected });
    }
    let (body, sum) = object.split_at(expected - 32);
    if &body[..8] != MAGIC {
        return Err(ObjectFault::Magic);
    }
    if blake3::hash(body).as_bytes() != sum {
        return Err(ObjectFault::Checksum);
    }
    if body[8..40] != layout.id {
        return Err(ObjectFault::Layout);
    }
    let (tokens, page) = body[HEADER_BYTES..].split_at(4 * layout.page_size);
    let same = name.tokens.iter().zip(tokens.chunks_exact(4)).all(|(t, bytes)| t.to_le_bytes() == bytes);
    if !same || body[72..104] != name.parent {
        return Err(ObjectFault::Tokens);
    }
    Ok(page)
}

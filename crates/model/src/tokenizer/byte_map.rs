//! The printable alphabet of byte-level BPE: each byte has one visible character, so that a vocabulary is plain text.
//!
//! Public source: the GPT-2 encoder. Bytes that print keep their own character, the other 68 take U+0100 onwards in byte order.

use std::sync::LazyLock;

/// Characters of the alphabet lie below this code point.
const END: usize = 0x144;

static CHARS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 0x100u32;
    std::array::from_fn(|byte| match byte as u32 {
        kept @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => char::from_u32(kept).unwrap_or('\u{FFFD}'),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or('\u{FFFD}')
        }
    })
});

static BYTES: LazyLock<[Option<u8>; END]> = LazyLock::new(|| {
    let mut bytes = [None; END];
    for (byte, &c) in CHARS.iter().enumerate() {
        bytes[c as usize] = Some(byte as u8);
    }
    bytes
});

/// The visible character of `byte`.
pub(crate) fn char_of(byte: u8) -> char {
    CHARS[byte as usize]
}

/// The byte that `c` stands for; None outside the alphabet.
pub(crate) fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).copied().flatten()
}

/// Replaces `out` by the visible form of `text`.
pub(crate) fn write_visible(text: &str, out: &mut String) {
    out.clear();
    out.extend(text.bytes().map(char_of));
}

/// The bytes behind a vocabulary entry, or None if some character is outside the alphabet.
pub(crate) fn bytes_of(visible: &str) -> Option<Vec<u8>> {
    visible.chars().map(byte_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_the_published_one_and_inverts() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
        assert_eq!(char_of(0xAD), '\u{143}');
        assert_eq!(char_of(b'a'), 'a');
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('中'), None);
    }
}

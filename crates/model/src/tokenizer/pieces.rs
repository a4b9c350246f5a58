//! The bytes of every token in one flat buffer: what decoding reads.

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain text of the vocabulary.
    Text,
    /// Added by whoever tuned the model; text like any other, but matched whole before merging.
    Added,
    /// Steers the model (`<|im_end|>`, `<s>`): never made from a user's text, left out of decoding on request.
    Control,
}

/// Bytes and kind by token id. Ids without a token are empty and of kind [`Kind::Text`].
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// `ends[id]` is where the bytes of `id` stop; they start where those of `id − 1` stop.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

impl Pieces {
    /// Packs `entries`, ordered by id without gaps. Refuses (None) more than 4 GiB of token text.
    pub(crate) fn pack<'a>(
        entries: impl Iterator<Item = (std::borrow::Cow<'a, [u8]>, Kind)>,
    ) -> Option<Pieces> {
        let (mut bytes, mut ends, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
        for (piece, kind) in entries {
            bytes.extend_from_slice(&piece);
            ends.push(u32::try_from(bytes.len()).ok()?);
            kinds.push(kind);
        }
        bytes.shrink_to_fit();
        ends.shrink_to_fit();
        kinds.shrink_to_fit();
        Some(Pieces { bytes, ends, kinds })
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of `id`; None for an id outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// Bytes of `id` in a decoded text: none outside the vocabulary, and none for a control token if `skip_control`.
    pub(crate) fn text(&self, id: u32, skip_control: bool) -> &[u8] {
        let skipped = skip_control && self.kind(id) == Some(Kind::Control);
        if skipped { &[] } else { self.get(id).unwrap_or(&[]) }
    }

    /// Kind of `id`; None outside the vocabulary.
    pub(crate) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }
}

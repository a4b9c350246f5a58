//! Which layers of a config.json have a window and which have positions: by lists of the file, else by the family's rule.

use super::fields::Fields;
use crate::config::{LayerConfig, MAX_LAYERS};
use crate::error::ModelError;
use crate::family::{Family, Windows};

/// One entry for each layer. `local`: index of the rotary positions of window layers; global layers have 0.
pub(super) fn layers(fields: &Fields, family: &Family, local: usize) -> Result<Vec<LayerConfig>, ModelError> {
    let count = fields.need("num_hidden_layers", fields.size("num_hidden_layers")?)?;
    if count == 0 || count > MAX_LAYERS {
        return Err(ModelError::bad(fields.file, "num_hidden_layers", count, format!("1 to {MAX_LAYERS}")));
    }
    let with_rope = rope_layers(fields, family, count)?;
    let windows = windows(fields, family, &with_rope)?;
    let layer = |(window, rope): (Option<usize>, bool)| LayerConfig {
        window,
        rope: rope.then_some(if window.is_some() { local } else { 0 }),
    };
    Ok(windows.into_iter().zip(with_rope).map(layer).collect())
}

/// Whether each layer has rotary positions: `no_rope_layers` holds 1 for those that have.
fn rope_layers(fields: &Fields, family: &Family, count: usize) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "no_rope_layers";
    let list = fields.get::<Vec<u8>>(KEY, "a list of 0 and 1")?;
    match (list, family.no_rope_interval) {
        (None, None) => Ok(vec![true; count]),
        (None, Some(interval)) => {
            let interval = fields.size("no_rope_layer_interval")?.unwrap_or(interval);
            if interval == 0 {
                return Err(ModelError::bad(fields.file, "no_rope_layer_interval", 0, "at least 1"));
            }
            Ok((0..count).map(|i| !(i + 1).is_multiple_of(interval)).collect())
        }
        (Some(list), None) => {
            let found = format!("a list of {}", list.len());
            Err(ModelError::bad(fields.file, KEY, found, format!("null for {} models", family.name)))
        }
        (Some(list), Some(_)) if list.len() >= count && list.iter().all(|&x| x <= 1) => {
            Ok(list[..count].iter().map(|&x| x == 1).collect())
        }
        (Some(list), Some(_)) => {
            let found = format!("{list:?}").chars().take(80).collect::<String>();
            Err(ModelError::bad(fields.file, KEY, found, format!("{count} entries of 0 or 1")))
        }
    }
}

/// The window of each layer.
fn windows(fields: &Fields, family: &Family, with_rope: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let count = with_rope.len();
    // Where the family asks for it by a key, a size alone means nothing.
    let asked = matches!(family.windows, Windows::From | Windows::NoRope);
    let used = fields.flag("use_sliding_window")?.unwrap_or(!asked);
    let window = fields.size("sliding_window")?.filter(|_| used);
    if window == Some(0) {
        return Err(ModelError::bad(fields.file, "sliding_window", 0, "null, or at least 1"));
    }
    if let (Windows::AllOfGguf, Some(found)) = (family.windows, window) {
        // The reference reads no window here: its models see everything, whatever the file says.
        let supported = format!("null: {} models have no window (Mistral's have)", family.name);
        return Err(ModelError::bad(fields.file, "sliding_window", found, supported));
    }
    if let Some(types) = fields.get::<Vec<&str>>("layer_types", "a list of layer types")? {
        if types.len() != count {
            let found = format!("{} entries", types.len());
            let supported = format!("num_hidden_layers = {count}");
            return Err(ModelError::bad(fields.file, "layer_types", found, supported));
        }
        return types.into_iter().map(|kind| by_type(fields, kind, window)).collect();
    }
    let has_window: Box<dyn Fn(usize) -> bool> = match family.windows {
        Windows::All | Windows::AllOfGguf => Box::new(|_| true),
        Windows::From => {
            let first = fields.size("max_window_layers")?.unwrap_or(28);
            Box::new(move |i| i >= first)
        }
        Windows::Pattern(default) => {
            let n = fields.size("sliding_window_pattern")?.unwrap_or(default);
            if n == 0 {
                return Err(ModelError::bad(fields.file, "sliding_window_pattern", 0, "at least 1"));
            }
            fields.need("sliding_window", window)?;
            Box::new(move |i| !(i + 1).is_multiple_of(n))
        }
        Windows::NoRope => Box::new(|i| !with_rope[i]),
    };
    Ok((0..count).map(|i| window.filter(|_| has_window(i))).collect())
}

fn by_type(fields: &Fields, kind: &str, window: Option<usize>) -> Result<Option<usize>, ModelError> {
    match kind {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => {
            Err(ModelError::missing(fields.file, "sliding_window", "a layer of type sliding_attention"))
        }
        _ => {
            let found = format!("{kind:?}");
            Err(ModelError::bad(fields.file, "layer_types", found, "full_attention, sliding_attention"))
        }
    }
}

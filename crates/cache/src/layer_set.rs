//! A set of layers, small enough to travel in options: which layers keep their keys and values in 16 bits.

use std::fmt;
use std::str::FromStr;

use suanpan_base::{BadArgument, DType};

/// Layers that a set can name.
pub const MAX_LAYERS: usize = 256;

/// Some of the layers 0 to 255. Parsed from numbers and ranges: `0,1,28-29`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSet([u64; MAX_LAYERS / 64]);

impl LayerSet {
    /// No layer.
    pub const NONE: LayerSet = LayerSet([0; MAX_LAYERS / 64]);

    /// Whether `layer` is in the set.
    pub fn contains(&self, layer: usize) -> bool {
        layer < MAX_LAYERS && self.0[layer / 64] >> (layer % 64) & 1 == 1
    }

    /// Adds a layer. Panics past `MAX_LAYERS`.
    pub fn insert(&mut self, layer: usize) {
        self.0[layer / 64] |= 1 << (layer % 64);
    }

    /// What `layer` stores where `dtype` is asked for and this set is spared: bf16 instead of fewer bits.
    pub fn stored(&self, dtype: DType, layer: usize) -> DType {
        if dtype.bits() < 16 && self.contains(layer) { DType::Bf16 } else { dtype }
    }

    /// The layers, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..MAX_LAYERS).filter(|&layer| self.contains(layer))
    }

    /// Refuses a set that names a layer the model does not have.
    pub fn check(&self, num_layers: usize) -> Result<(), BadArgument> {
        match self.iter().last().filter(|&last| last >= num_layers) {
            Some(last) => {
                Err(BadArgument::new("KV storage", "layers", last, format!("0 to {}", num_layers - 1)))
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for LayerSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.iter().map(|layer| layer.to_string()).collect();
        f.write_str(&numbers.join(","))
    }
}

impl FromStr for LayerSet {
    type Err = BadArgument;

    fn from_str(s: &str) -> Result<Self, BadArgument> {
        let bad =
            || BadArgument::new("KV storage", "layers", s, "numbers and ranges up to 255, as in 0,1,28-29");
        let number = |s: &str| s.trim().parse::<usize>().ok().filter(|&n| n < MAX_LAYERS).ok_or_else(bad);
        let mut set = LayerSet::NONE;
        for part in s.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            (first..=last).for_each(|layer| set.insert(layer));
        }
        Ok(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_parse_and_print_and_nonsense_is_refused() {
        let set: LayerSet = "0, 28-30,255".parse().unwrap();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 28, 29, 30, 255]);
        assert_eq!(set.to_string().parse::<LayerSet>().unwrap(), set);
        for bad in ["", "a", "3-1", "256", "1,,2", "-1"] {
            assert_eq!(bad.parse::<LayerSet>().unwrap_err().asked, bad);
        }
        assert!(set.check(30).unwrap_err().to_string().contains("255") && LayerSet::NONE.check(1).is_ok());
    }
}

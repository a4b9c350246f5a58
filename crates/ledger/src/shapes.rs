//! Attention shapes of a few public models, so that their cache can be asked about without their files.
//!
//! Facts only, each from the model's published `config.json`; nothing here chooses a kernel.

use suanpan_base::HeadShape;

use crate::cache::CacheLayer;

/// Which layers of a model see a window only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// None.
    No,
    /// Every layer, this many tokens.
    All(usize),
    /// Layers 0, 2, 4 and so on, this many tokens.
    Even(usize),
}

/// A public model's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedShape {
    /// The name to ask for.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Heads of every layer.
    pub heads: HeadShape,
    /// Windows.
    pub windows: Windows,
    /// Whose `config.json` says so.
    pub source: &'static str,
}

const fn shape(name: &'static str, source: &'static str, layers: usize, heads: HeadShape) -> NamedShape {
    NamedShape { name, layers, heads, windows: Windows::No, source }
}

/// Every named shape.
pub const NAMED_SHAPES: [NamedShape; 7] = [
    shape("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", 30, HeadShape::new(9, 3, 64)),
    shape("qwen3-0.6b", "Qwen/Qwen3-0.6B", 28, HeadShape::new(16, 8, 128)),
    shape("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, HeadShape::new(32, 8, 128)),
    shape("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, HeadShape::new(64, 8, 128)),
    shape("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, HeadShape::new(128, 8, 128)),
    NamedShape {
        windows: Windows::All(4096),
        ..shape("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 32, HeadShape::new(32, 8, 128))
    },
    NamedShape {
        windows: Windows::Even(128),
        ..shape("gpt-oss-20b", "openai/gpt-oss-20b", 24, HeadShape::new(64, 8, 64))
    },
];

impl NamedShape {
    /// The shape of that name.
    pub fn find(name: &str) -> Option<&'static NamedShape> {
        NAMED_SHAPES.iter().find(|s| s.name == name)
    }

    /// One entry for each layer.
    pub fn cache_layers(&self) -> Vec<CacheLayer> {
        let window = |layer: usize| match self.windows {
            Windows::No => None,
            Windows::All(w) => Some(w),
            Windows::Even(w) => layer.is_multiple_of(2).then_some(w),
        };
        (0..self.layers).map(|layer| CacheLayer { heads: self.heads, window: window(layer) }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_shapes_are_possible() {
        for s in &NAMED_SHAPES {
            assert_eq!(NamedShape::find(s.name), Some(s));
            s.heads.check(s.name).unwrap();
            assert_eq!(s.cache_layers().len(), s.layers);
        }
        assert_eq!(NamedShape::find("llama"), None);
        let windows: Vec<_> =
            NamedShape::find("gpt-oss-20b").unwrap().cache_layers().iter().map(|l| l.window).collect();
        assert_eq!(windows[..3], [Some(128), None, Some(128)]);
    }
}

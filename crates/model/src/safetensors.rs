//! The safetensors container: an 8-byte length, a JSON header, data. Header checked against the file before anything is used.
//!
//! Knows no model and no folder; that is `folder.rs`. Own parser, because the refusals must name the tensor, the same name twice must
//! be refused (the format's reference library keeps the last one), and a header must not take memory beyond its limits.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use suanpan_ops::WeightFormat;

use crate::error::ModelError;
use crate::source::Source;
use crate::weights::Tensor;

/// Longest header, in bytes, as in the format's reference library.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most tensors in one file.
pub const MAX_TENSORS: usize = 65_536;
/// Longest tensor name, in bytes.
pub const MAX_NAME_BYTES: usize = 512;
/// Most dimensions.
pub const MAX_DIMS: usize = 8;

/// Bits of one element of each type of the format.
const DTYPE_BITS: [(&str, usize); 21] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
];
const SUPPORTED_DTYPES: &str = "F32, F16, BF16, F8_E4M3 with scales";

/// An opened safetensors file whose header has been checked whole.
pub struct SafeTensors {
    source: Source,
    tensors: BTreeMap<Box<str>, TensorInfo>,
}

/// One entry of the header.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// Element type, by the format's name.
    pub dtype: &'static str,
    /// Sizes, slowest-running first.
    pub shape: Vec<usize>,
    /// Bytes of the data, counted from the start of the file.
    pub bytes: Range<usize>,
}

impl SafeTensors {
    /// Checks the header in `source`. Reads no tensor data.
    pub fn parse(source: Source) -> Result<SafeTensors, ModelError> {
        let bad = |field: &str, found: String, supported: String| {
            ModelError::bad(source.name(), field, found, supported)
        };
        let Some((len, rest)) = source.split_first_chunk::<8>() else {
            return Err(bad(
                "header length",
                format!("a file of {} bytes", source.len()),
                "8 bytes or more".into(),
            ));
        };
        let len = u64::from_le_bytes(*len);
        if len > rest.len() as u64 || len > MAX_HEADER_BYTES {
            let supported = format!("at most {} in this file", MAX_HEADER_BYTES.min(rest.len() as u64));
            return Err(bad("header length", len.to_string(), supported));
        }
        let (json, data) = rest.split_at(len as usize);
        let header: Header = serde_json::from_slice(json)
            .map_err(|e| bad("header", e.to_string(), "a JSON object of tensors".into()))?;
        let start = 8 + json.len();
        let mut tensors = BTreeMap::new();
        for (name, entry) in header.0 {
            let info = entry
                .check(data.len(), start)
                .map_err(|(found, supported)| bad(&format!("tensor {name}"), found, supported))?;
            tensors.insert(name, info);
        }
        check_coverage(&tensors, start..source.len())
            .map_err(|(field, found, supported)| bad(&field, found, supported))?;
        Ok(SafeTensors { source, tensors })
    }

    /// The file's name, for errors.
    pub fn name(&self) -> &str {
        self.source.name()
    }

    /// The file's bytes.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Entry `name` of the header.
    pub fn tensor_info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// All tensor names, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(|name| &**name)
    }

    /// The tensor `name` as a view of the file; it must have exactly `shape`. All sizes but the last become rows.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let (field, info) = self.info_of_shape(name, shape)?;
        let format = match info.dtype {
            "F32" => WeightFormat::F32,
            "F16" => WeightFormat::F16,
            "BF16" => WeightFormat::Bf16,
            "F8_E4M3" => WeightFormat::F8E4M3,
            other => {
                return Err(ModelError::bad(self.name(), field, format!("type {other}"), SUPPORTED_DTYPES));
            }
        };
        let (rows, cols) = rows_cols(shape);
        Tensor::new(&self.source, &field, info.bytes.clone(), format, rows, cols)
    }

    /// The bytes of tensor `name` of type U8 and exactly `shape`.
    pub fn bytes(&self, name: &str, shape: &[usize]) -> Result<&[u8], ModelError> {
        let (field, info) = self.info_of_shape(name, shape)?;
        if info.dtype != "U8" {
            return Err(ModelError::bad(self.name(), field, format!("type {}", info.dtype), "U8"));
        }
        Ok(&self.source[info.bytes.clone()])
    }

    fn info_of_shape(&self, name: &str, shape: &[usize]) -> Result<(String, &TensorInfo), ModelError> {
        let field = format!("tensor {name}");
        let Some(info) = self.tensors.get(name) else {
            return Err(ModelError::missing(self.name(), field, format!("shape {shape:?}")));
        };
        if info.shape != shape {
            let found = format!("shape {:?}", info.shape);
            return Err(ModelError::bad(self.name(), field, found, format!("{shape:?}")));
        }
        Ok((field, info))
    }
}

/// All sizes but the last as one. Their product fits: it was checked with the header.
fn rows_cols(shape: &[usize]) -> (usize, usize) {
    let (cols, rows) = shape.split_last().map_or((1, &[][..]), |(cols, rows)| (*cols, rows));
    (rows.iter().product(), cols)
}

/// The data must be covered exactly: a gap, an overlap or a tail means a cut, padded or forged file.
fn check_coverage(
    tensors: &BTreeMap<Box<str>, TensorInfo>,
    data: Range<usize>,
) -> Result<(), (String, String, String)> {
    let mut by_start: Vec<_> = tensors.iter().collect();
    by_start.sort_by_key(|(_, info)| (info.bytes.start, info.bytes.end));
    let mut end = data.start;
    for (name, info) in by_start {
        if info.bytes.start != end {
            let found = format!("data from byte {}", info.bytes.start - data.start);
            let supported = format!("data from byte {}, where the one before it ends", end - data.start);
            return Err((format!("tensor {name}"), found, supported));
        }
        end = info.bytes.end;
    }
    if end != data.end {
        let found = format!("{} bytes of data", data.len());
        return Err(("file length".into(), found, format!("the {} bytes of its tensors", end - data.start)));
    }
    Ok(())
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl Entry {
    fn check(self, data_len: usize, data_start: usize) -> Result<TensorInfo, (String, String)> {
        let Some(&(dtype, bits)) = DTYPE_BITS.iter().find(|(name, _)| *name == self.dtype) else {
            let names: Vec<_> = DTYPE_BITS.iter().map(|(name, _)| *name).collect();
            let found = self.dtype.chars().take(32).collect::<String>();
            return Err((format!("type {found:?}"), names.join(", ")));
        };
        let shape: Option<Vec<usize>> = self.shape.0.iter().map(|&n| usize::try_from(n).ok()).collect();
        // A zero anywhere makes the product 0, however large the other sizes are.
        let elements = |s: &Vec<usize>| {
            if s.contains(&0) { Some(0) } else { s.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) }
        };
        let sized = shape.and_then(|s| Some((elements(&s)?.checked_mul(bits)?, s)));
        let Some((total_bits, shape)) = sized.filter(|(bits, _)| *bits <= isize::MAX as usize) else {
            return Err((
                format!("shape {:?}, whose size overflows", self.shape.0),
                "a size below 2^60 bytes".into(),
            ));
        };
        let (begin, end) = self.data_offsets;
        if begin > end || end > data_len as u64 {
            let found = format!("data from byte {begin} to {end}");
            return Err((found, format!("a range inside the {data_len} bytes of data")));
        }
        if total_bits % 8 != 0 || (end - begin) != (total_bits / 8) as u64 {
            let found = format!("{} bytes of data", end - begin);
            return Err((found, format!("{total_bits} bits for {dtype} {shape:?}")));
        }
        // Both ends are within the file, so they fit.
        Ok(TensorInfo { dtype, shape, bytes: data_start + begin as usize..data_start + end as usize })
    }
}

/// A shape of at most [`MAX_DIMS`] sizes.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMS} sizes")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = seq.next_element()? {
                    if sizes.len() == MAX_DIMS {
                        return Err(A::Error::custom(format!("shape: more than {MAX_DIMS} dimensions")));
                    }
                    sizes.push(size);
                }
                Ok(Shape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}

/// The JSON header: names in order of appearance, each once, within the limits.
struct Header(BTreeMap<Box<str>, Entry>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    if name.is_empty() || name.len() > MAX_NAME_BYTES {
                        let len = name.len();
                        return Err(A::Error::custom(format!(
                            "tensor name of {len} bytes: 1 to {MAX_NAME_BYTES}"
                        )));
                    }
                    if tensors.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    let entry = map
                        .next_value::<Entry>()
                        .map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                    if tensors.contains_key(name.as_str()) {
                        return Err(A::Error::custom(format!("tensor {name}: the name twice")));
                    }
                    tensors.insert(name.into_boxed_str(), entry);
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

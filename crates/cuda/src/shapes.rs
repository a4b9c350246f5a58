//! Tile shapes of the forward kernels: build.rs hands them to nvcc, plans print them. Numbers only; this file is a module of build.rs too.
//!
//! Found by search on one H200 (docs/cuda-attn-notes.md). Three math warpgroups leave 160 registers a thread, two leave 232.

/// One build of `kernels/attention/forward.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardShape {
    /// Elements of a query and a key.
    pub head_dim: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Math warpgroups, 64 query rows each.
    pub warpgroups: u32,
    /// Keys a tile.
    pub keys: u32,
    /// Tiles of each of K and V in flight.
    pub stages: u32,
    /// Buffers of q.
    pub q_buffers: u32,
    /// Where in its step a warpgroup passes the token: 1 when q kᵀ is issued, 2 at its half, 3 when it is done, 4 after the maxima,
    /// 5 amid the exponentials; 0 is no token.
    pub token: u32,
    /// The next tile's scores are computed beside this tile's P v, at the price of S and P living at once.
    pub overlap: bool,
}

const fn shape(
    (head_dim, head_dim_v): (u32, u32),
    (warpgroups, keys, stages, q_buffers): (u32, u32, u32, u32),
    token: u32,
    overlap: bool,
) -> ForwardShape {
    ForwardShape { head_dim, head_dim_v, warpgroups, keys, stages, q_buffers, token, overlap }
}

/// Every head width that the 16-bit forward is built for.
pub const FORWARD: [ForwardShape; 6] = [
    shape((64, 64), (3, 128, 4, 2), 0, true),
    shape((96, 96), (3, 128, 2, 2), 2, false),
    shape((128, 128), (3, 128, 2, 2), 2, false),
    shape((192, 128), (2, 128, 2, 1), 1, true),
    shape((192, 192), (2, 96, 2, 1), 1, true),
    shape((256, 256), (2, 64, 2, 1), 1, true),
];

/// The builds with bias and dropout besides (`forward_more`): two warpgroups throughout, since three have too few registers for them.
pub const FORWARD_MORE: [ForwardShape; 6] = [
    shape((64, 64), (2, 128, 2, 2), 1, true),
    shape((96, 96), (2, 128, 2, 2), 1, false),
    shape((128, 128), (2, 128, 2, 1), 1, true),
    shape((192, 128), (2, 128, 2, 1), 1, true),
    shape((192, 192), (2, 96, 2, 1), 1, true),
    shape((256, 256), (2, 64, 2, 1), 1, true),
];

/// One build of `kernels/attention/forward_fp8.cu`: tiles of 128 keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Shape {
    /// Elements of a query, a key and a value.
    pub head_dim: u32,
    /// Math warpgroups, 64 query rows each.
    pub warpgroups: u32,
    /// Tiles of K in flight.
    pub k_stages: u32,
    /// Tiles of V as stored in flight.
    pub v_stages: u32,
    /// Tiles of V transposed.
    pub transposed_stages: u32,
    /// As in [`ForwardShape::token`]; from 6 on one warpgroup at a time takes exponentials, and passes after all, 3/4 or half (6, 7, 8).
    pub token: u32,
}

/// Every head width that the e4m3 forward is built for.
pub const FORWARD_FP8: [Fp8Shape; 2] = [
    Fp8Shape { head_dim: 128, warpgroups: 3, k_stages: 4, v_stages: 2, transposed_stages: 4, token: 1 },
    Fp8Shape { head_dim: 256, warpgroups: 2, k_stages: 2, v_stages: 2, transposed_stages: 2, token: 7 },
];
